"""What becomes of uploads between the clients and the method: attackers forge theirs, a robust server guards
itself. Both see uploads one by one."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core import robust
from descant.core.algorithm import Algorithm, Message, Round, contributions
from descant.core.tree import Tree, leaves, map_tree, rebuild, take
from descant.engine.attack import Attack
from descant.engine.robust import REPLACE, Robust, capped
from descant.engine.uploads import LOGARITHM, Origins
from descant.engine.work import Job


def measured(uploads: Tree) -> list[tuple[str, Tensor]]:
    """The tensors that have a length: neither counts, nor logarithms of weights, which have a bound of their
    own (`Round.most`)."""
    return [(name, rows) for name, rows in leaves(uploads)
            if rows.is_floating_point() and name.split(".")[-1] != LOGARITHM]


class Attackers:
    """The attackers of a run."""

    def __init__(self, attack: Attack, clients: np.ndarray, origins: Origins) -> None:
        self._attack = attack
        self._clients = clients
        self._origins = origins

    def sent(self, job: Job, clients: np.ndarray, number: int, message: Message, uploads: Tree) -> Tree:
        """The uploads [n, ...] of clients that were given `message`, with those of attackers forged."""
        attack = torch.from_numpy(np.isin(clients, self._clients))
        if self._attack.kind == "label_flip" or not bool(attack.any()):
            return uploads
        origins = self._origins.rows(job, clients, number, message)
        forged = {name: self._forged(rows, origins.get(name), attack) for name, rows in measured(uploads)}
        return rebuild(uploads, dict(leaves(uploads)) | forged)

    def _forged(self, rows: Tensor, origin: Tensor | None, attack: Tensor) -> Tensor:
        sound = robust.finite(rows)
        start = torch.zeros_like(rows) if origin is None else origin
        changes = (rows.double() - start.double())[sound]
        sent = (start.double()[sound] + self._attack.forged(changes, attack[sound])).to(rows.dtype)
        if bool((rows[sound] >= 0).all()):  # a variance, a count: a negative one would be found at once
            sent = sent.clamp(min=0)
        after = rows.clone()
        at = torch.nonzero(sound & attack).flatten()
        after[at] = sent[attack[sound]]
        return after


class Aggregated(NamedTuple):
    """The server after a round."""

    server: Tree
    report: dict[str, Any]
    chosen: np.ndarray  # positions of the clients whose uploads count


class Guard:
    """The robust server of a run."""

    def __init__(self, how: Robust, origins: Origins) -> None:
        self._how = how
        self._origins = origins

    def aggregate(self, method: Algorithm, job: Job, message: Message, server: Tree, uploads: Tree,
                  round: Round) -> Aggregated:
        """The method's server after the uploads [n, ...] of a round's clients, who were given `message`."""
        how, everyone, facts = self._how, np.arange(len(round.cohort)), capped(round, self._how.count)
        if uploads == ():  # of local training
            return Aggregated(*method.aggregate(server, uploads, round), everyone)
        if how.rule in REPLACE:
            each, counts = contributions(method.contribution, message, uploads), method.counts(facts.sizes)
            mean = map_tree(lambda rows: how.mean(rows, counts), each)
            return Aggregated(*method.absorb(server, mean, facts), everyone)
        origins = self._origins.rows(job, round.cohort.numpy(), round.number, message)
        changes = {name: rows.double() - origins.get(name, torch.zeros_like(rows)).double()
                   for name, rows in measured(uploads)}
        if how.rule == "norm":
            bound, count = bounded(uploads, changes, origins, how.clip)
            server, report = method.aggregate(server, bound, facts)
            return Aggregated(server, report | {"robust": {"shortened": count}}, everyone)
        chosen = self._chosen(changes, len(everyone))
        server, report = method.aggregate(server, take(uploads, chosen), facts.of(chosen))
        return Aggregated(server, report | {"robust": {"left_out": len(everyone) - len(chosen)}},
                          chosen.numpy())

    def _chosen(self, changes: dict[str, Tensor], n: int) -> Tensor:
        wrong = self._how.wrong(n)
        units = {name: robust.middle_length(robust.lengths(rows)) for name, rows in changes.items()}
        whole = torch.cat([rows.reshape(n, -1) / (units[name] or 1.0) for name, rows in changes.items()], 1)
        return robust.krum(whole, wrong, 1 if self._how.rule == "krum" else max(1, n - wrong))


def bounded(uploads: Tree, changes: dict[str, Tensor], origins: dict[str, Tensor], clip: float
            ) -> tuple[Tree, int]:
    """The uploads with changes of at most so many times the median length, and how many were longer. Those
    that are short enough stay as they are."""
    values, cut = dict(leaves(uploads)), torch.zeros(0)
    for name, rows in changes.items():
        own = robust.lengths(rows)
        limit = clip * robust.middle_length(own)
        if limit == 0 or not bool((long := own > limit).any()):
            continue
        cut = long if not len(cut) else cut | long
        start = origins.get(name, torch.zeros_like(values[name])).double()[long]
        values[name] = values[name].clone()
        values[name][long] = (start + robust.bounded(rows[long], limit)).to(values[name].dtype)
    return rebuild(uploads, values), int(cut.sum())

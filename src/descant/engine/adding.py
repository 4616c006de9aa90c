"""Uploads are added up where they are made, chunk by chunk: a round holds no more of them than a chunk has.

So it is for methods that need a mean alone (`Algorithm.needs_rows`). What cannot be added up, because it is
not finite, is told instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core.algorithm import Message, contributions
from descant.core.privacy.noise import normals
from descant.core.privacy.settings import Mechanism
from descant.core.sums import LARGEST, Total
from descant.core.tree import Tree, leaves, map_tree, nbytes, rebuild, take
from descant.engine.outcome import Outcome
from descant.engine.uploads import Origins
from descant.engine.work import Job, LocalResult, Work


class Bound(NamedTuple):
    """How much one client can add, so that noise hides it."""

    origin: Mapping[str, np.ndarray]  # what a client contributes that learns nothing: the same for all
    norm: float  # the largest distance from that

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: torch.from_numpy(origin) for name, origin in self.origin.items()}


class Adding(NamedTuple):
    """How the uploads of some clients are added up."""

    counted: np.ndarray  # bool [clients] whose uploads count
    bound: Bound | None = None  # then all count alike

    def of(self, rows: slice | np.ndarray) -> Adding:
        return Adding(self.counted[rows], self.bound)


def execute(work: Work, job: Job, clients: np.ndarray, number: int, message: Message, states: Tree,
            adding: Adding | None) -> Outcome:
    """The outcome of a chunk, its uploads added up if that is asked for."""
    outcome = work.execute(job, clients, number, message, states)
    return outcome if adding is None else added_up(work, outcome, clients, number, message, adding)


class Adder:
    """Chunks one after the other, whose uploads are added to one total."""

    def __init__(self, work: Work) -> None:
        self._work, self.total = work, Total()

    def execute(self, job: Job, clients: np.ndarray, number: int, message: Message, states: Tree,
                adding: Adding | None) -> Outcome:
        """The outcome of a chunk; its uploads, if they are to be added up, are in the total alone."""
        outcome = self._work.execute(job, clients, number, message, states)
        if adding is None:
            return outcome
        found = added_up(self._work, outcome, clients, number, message, adding, self.total)
        assert found.total is not None
        self.total = found.total
        return found._replace(total=None)


def added_up(work: Work, outcome: Outcome, clients: np.ndarray, number: int, message: Message, adding: Adding,
             onto: Total | None = None) -> Outcome:
    """The outcome with a total in place of its uploads, and of those in `onto`, which is used up;
    `message.each` has a row per client."""
    done, result, onto = outcome.done, outcome.values, onto or Total()
    if not len(done):
        return outcome._replace(total=onto)
    wrong = wrong_rows(result)
    taken = [k for k, at in enumerate(done) if k not in wrong and adding.counted[at]]
    kept = outcome._replace(values=result._replace(upload=()), total=onto,
                            wrong=tuple((int(done[k]), why) for k, why in wrong.items()),
                            uploaded=nbytes(take(result.upload, 0)))
    if not taken:
        return kept
    method, places = work.at(number).algorithm, torch.from_numpy(done[taken])
    uploads = result.upload if len(taken) == len(done) else take(result.upload, torch.tensor(taken))
    sent = Message(message.shared, take(message.each, places))
    each = contributions(method.contribution, sent, uploads)
    if adding.bound is None:
        sizes = work.round_of(clients[done[taken]], number).sizes
        return kept._replace(total=Total.of(each, method.counts(sizes), onto))
    total, is_shortened = Total.shortened(each, adding.bound.tensors, adding.bound.norm, onto)
    return kept._replace(total=total, rows=len(taken), shortened=int(is_shortened.sum()))


def noised_mean(total: Total, form: Tree, bound: Bound, mechanism: Mechanism,
                generator: np.random.Generator | None, *, is_noised: bool = False) -> Tree:
    """The origin and what clients that are no further from it than the bound add to it, with noise that hides
    each of them; divided by the number of clients that was expected, since that which came tells of them.
    Without a generator the noise is the operating system's. `is_noised`: the clients have added it."""
    deviation, found = 0.0 if is_noised else mechanism.sum_noise * bound.norm, {}
    for name, like in leaves(form):
        shape = tuple(like.shape)
        whole = deviation * normals(shape, torch.float64, generator) if deviation else torch.zeros(
            shape, dtype=torch.float64)
        if total.clients:
            whole += total.parts[name].value()
        found[name] = (torch.from_numpy(bound.origin[name]) + whole / mechanism.cohort).to(like.dtype)
    return rebuild(form, found)


def origin_of(work: Work, idle: Origins, job: Job, number: int, message: Message, template: Tree
              ) -> dict[str, np.ndarray]:
    """What a client contributes that learns nothing, found without anybody's rows; `message.each` has one
    row, and `template` is an upload."""
    known = idle.rows(job, np.zeros(1, np.int64), number, message)
    upload = rebuild(template, {name: known[name][0] if name in known else torch.zeros_like(leaf)
                                for name, leaf in leaves(template)})
    own = Message(message.shared, take(message.each, 0))
    origin = work.at(number).algorithm.contribution(own, upload)
    return {name: leaf.double().numpy() for name, leaf in leaves(origin)}


def form_of(work: Work, job: Job, number: int, message: Message) -> Tree:
    """One contribution to the total of a round; `message.each` has one row."""
    one = Message(message.shared, take(message.each, 0))
    upload = work.templates[job].upload
    return map_tree(torch.clone, work.at(number).algorithm.contribution(one, upload))


def wrong_rows(result: LocalResult) -> dict[int, str]:
    """Which rows hold NaN or infinity, or what is too large to be added up, and where."""
    wrong: dict[int, str] = {}
    for part in ("upload", "state"):
        for name, rows in leaves(getattr(result, part), part):
            for k in torch.nonzero(~_finite_rows(rows)).flatten().tolist():
                wrong.setdefault(k, f"{name} is not finite")
    return wrong


def _finite_rows(rows: Tensor) -> Tensor:
    rows = rows.reshape(len(rows), -1)
    finite = torch.isfinite(rows.sum(1))  # one pass; but large numbers may add up to infinity
    if not bool(finite.all()):
        finite = torch.isfinite(rows).all(1)
    if rows.dtype == torch.float64 and not bool((rows.abs() < LARGEST).all()):
        finite &= (rows.abs() < LARGEST).all(1)
    return finite

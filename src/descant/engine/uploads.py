"""How far one client's upload can move the server.

The length of an upload is its distance from what a client uploads that learns nothing: for a model, the model
that was broadcast; for a change, a gradient or evidence, zero. Each tensor of an upload is measured by
itself, since a model and a likelihood have no common scale. A tensor much longer than the median of the round
is shortened: it keeps its direction.

Two kinds are not shortened. Of methods that track the clients' states (`Algorithm.tracking`), a shortened
change would leave the server and the client apart for ever: an upload that is far too long is refused, so
that the client's state stays what it was. A logarithm of a weight (FedMAP's likelihood) is bounded by the
largest share of a client instead (`Round.most`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from descant.core import robust
from descant.core.algorithm import Message
from descant.core.federation import Federation
from descant.core.splits import Table
from descant.core.tree import Tree, leaves, rebuild, repeat
from descant.engine.backends.shard import Shard
from descant.engine.batches import LocalWork
from descant.engine.pool import Pools
from descant.engine.work import Job, Work

LOGARITHM = "log_weight"  # the name of a logarithm of a weight
WIDER = 3.0  # where nothing is shortened, refused is what is so many times as long as that


class Origins:
    """What clients upload that learn nothing, as far as the server can know: it has neither their rows nor
    their states, so that they have a row of zeros and the initial state."""

    def __init__(self, work: Work, state: Tree) -> None:
        self._idle = dataclasses.replace(work, federation=_with_rows_of_zeros(work.federation),
                                         local=LocalWork(steps=0), privacy=None, private=None,
                                         templates={}, pools=Pools())
        self._state = state

    def of(self, job: Job, client: int, number: int, own: Message) -> dict[str, Tensor]:
        """The tensors of ONE client by name; those that cannot be known are missing."""
        message = Message(own.shared, repeat(own.each, 1))
        found = self.rows(job, np.array([client]), number, message)
        return {name: rows[0] for name, rows in found.items()}

    def rows(self, job: Job, clients: np.ndarray, number: int, message: Message) -> dict[str, Tensor]:
        """Those of some clients, a row each; those that cannot be known are missing."""
        alike = message.each == () and not self._idle.algorithm.draws
        some = clients[:1] if alike else clients  # who is sent the same does nothing alike
        outcome = self._idle.execute(job, some, number, message, repeat(self._state, len(some)))
        if len(outcome.done) < len(some):
            return {}
        return {name: leaf.nan_to_num(0.0, 0.0, 0.0).expand(len(clients), *leaf.shape[1:])
                for name, leaf in leaves(outcome.values.upload)}


def _with_rows_of_zeros(federation: Federation) -> Shard:
    """The same clients, each with one row in every split."""
    known = {field.name: getattr(federation, field.name) for field in dataclasses.fields(Federation)}
    ones = Table.packed(np.zeros(federation.everyone, np.int64), np.ones(federation.everyone, np.int64))
    return Shard(**known | {"x": torch.zeros_like(federation.x[:1]), "y": torch.zeros_like(federation.y[:1]),
                            "train": ones, "validation": ones, "test": ones})


def _halves(upload: Tree, origin: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Half of what was learned, by tensor: the difference of two large numbers may be too large for one."""
    for name, leaf in leaves(upload):
        if leaf.is_floating_point():
            yield name, leaf.double() / 2 - origin.get(name, torch.zeros_like(leaf)).double() / 2


def lengths(upload: Tree, origin: Mapping[str, Tensor]) -> dict[str, float]:
    """How far each tensor is from its origin."""
    return {name: 2 * float(robust.lengths(half[None])) for name, half in _halves(upload, origin)}


def shortened(upload: Tree, origin: Mapping[str, Tensor], limits: Mapping[str, float]) -> Tree:
    """The upload with its tensors at most so long; those that are short enough stay as they are."""
    tensors = dict(leaves(upload))
    for name, half in _halves(upload, origin):
        limit = limits.get(name, math.inf)
        if 2 * float(robust.lengths(half[None])) > limit:
            own, change = tensors[name], 2 * robust.bounded(half[None], limit / 2)[0]
            start = origin.get(name, torch.zeros_like(own)).double()
            tensors[name] = (start + change).to(own.dtype)
    return rebuild(upload, tensors)


def medians(measured: Collection[Mapping[str, float]]) -> dict[str, float]:
    """The median over the clients of the length of each tensor (`robust.middle_length`)."""
    found: dict[str, list[float]] = {}
    for own in measured:
        for name, length in own.items():
            if name.split(".")[-1] != LOGARITHM:
                found.setdefault(name, []).append(length)
    typical = {name: robust.middle_length(torch.tensor(own, dtype=torch.float64))
               for name, own in found.items()}
    return {name: length for name, length in typical.items() if length > 0}

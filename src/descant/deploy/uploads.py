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
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core.algorithm import Message
from descant.core.tree import Tree, leaves, rebuild, repeat, take
from descant.deploy.protocol import RemoteExperiment, Shapes
from descant.engine.batches import LocalWork
from descant.engine.work import Job, Work

LOGARITHM = "log_weight"  # the name of a logarithm of a weight
WIDER = 3.0  # where nothing is shortened, refused is what is so many times as long as that


def not_finite(upload: Tree) -> str | None:
    """The name of a tensor that holds NaN or infinity."""
    return next((name for name, leaf in leaves(upload, "upload") if not bool(leaf.isfinite().all())), None)


class Origins:
    """What clients upload that learn nothing."""

    def __init__(self, remote: RemoteExperiment, shapes: Shapes, work: Work) -> None:
        self._idle = dataclasses.replace(remote.local_work(work.task), local=LocalWork(steps=0))
        self._state = shapes.state

    def of(self, job: Job, client: int, number: int, own: Message) -> dict[str, Tensor]:
        """The tensors of ONE client by name; those that cannot be known are missing."""
        message = Message(own.shared, repeat(own.each, 1))
        outcome = self._idle.execute(job, np.array([client]), number, message, repeat(self._state, 1))
        if not len(outcome.done):
            return {}
        upload = take(outcome.values, 0).upload
        return {name: leaf.nan_to_num(0.0, 0.0, 0.0) for name, leaf in leaves(upload)}


class Length(NamedTuple):
    """A vector's length as a product, which does not overflow: the square of 1e200 would, in float64."""

    largest: float  # entry
    rest: float  # the length of the vector divided by that

    @classmethod
    def of(cls, vector: Tensor) -> Length:
        largest = float(vector.abs().max()) if vector.numel() else 0.0
        return cls(largest, float((vector / largest).norm()) if largest > 0 else 0.0)

    def __float__(self) -> float:
        return self.largest * self.rest


def _halves(upload: Tree, origin: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Half of what was learned, by tensor: the difference of two large numbers may be too large for one."""
    for name, leaf in leaves(upload):
        if leaf.is_floating_point():
            yield name, leaf.double() / 2 - origin.get(name, torch.zeros_like(leaf)).double() / 2


def lengths(upload: Tree, origin: Mapping[str, Tensor]) -> dict[str, float]:
    """How far each tensor is from its origin."""
    return {name: 2 * float(Length.of(half)) for name, half in _halves(upload, origin)}


def shortened(upload: Tree, origin: Mapping[str, Tensor], limits: Mapping[str, float]) -> Tree:
    """The upload with its tensors at most so long; those that are short enough stay as they are."""
    tensors = dict(leaves(upload))
    for name, half in _halves(upload, origin):
        length, limit = Length.of(half), limits.get(name, math.inf)
        if 2 * float(length) > limit:
            own, unit = tensors[name], half / length.largest / length.rest
            start = origin.get(name, torch.zeros_like(own)).double()
            tensors[name] = (start + limit * unit).to(own.dtype)
    return rebuild(upload, tensors)


def medians(measured: Collection[Mapping[str, float]]) -> dict[str, float]:
    """The median over the clients of the length of each tensor; of two middle ones the longer, so that a
    client that has little left to learn does not hold back the others. Zeros do not count."""
    found: dict[str, list[float]] = {}
    for own in measured:
        for name, length in own.items():
            if length > 0 and name.split(".")[-1] != LOGARITHM:
                found.setdefault(name, []).append(length)
    return {name: sorted(lengths)[len(lengths) // 2] for name, lengths in found.items()}

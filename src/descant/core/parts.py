"""Which layers of a model all clients share, as a value. The others are private: each client has its own."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from descant.core.task import Task
from descant.core.vector import Layout, Model, Slice
from descant.errors import UsageError, unknown

#: The body is all but the head, and the head is the last layer that has parameters. A list names layers,
#: parameters, or patterns of their names ("conv*", "*.bias").
Shared: TypeAlias = Literal["all", "body", "head", "all but batchnorm"] | tuple[str, ...]


class Part(NamedTuple):
    """Some parameters of a model."""

    parameters: tuple[bool, ...]  # of those of the layout, whether each is one of them
    theta: Tensor  # bool [d] the same by coordinate

    def moved(self, old: Tensor, new: Tensor) -> Tensor:
        """The new coordinates of this part, the old ones of the rest."""
        return torch.where(self.theta.to(new.device), new, old)


@dataclass(frozen=True, eq=False)
class Split:
    """A model in two: what is shared, and what is private."""

    shared: Part
    private: Part
    places: Model  # the shared coordinates of theta and of stats
    others: Model  # the private ones

    def of_shared(self, model: Model) -> Model:
        return Model(*map(_at, model, self.places))

    def of_private(self, model: Model) -> Model:
        return Model(*map(_at, model, self.others))

    def joined(self, shared: Model, rest: Model) -> Model:
        """`rest`, a whole model, with these shared layers."""
        return Model(*map(_put, shared, rest, self.places))

    def whole(self, shared: Model, private: Model) -> Model:
        """The model of these two parts."""
        rest = Model(*(torch.cat([a, b], -1) for a, b in zip(shared, private, strict=True)))
        return self.joined(shared, Model(*map(_put, private, rest, self.others)))

    def lifted(self, values: Tensor | float, rest: Tensor) -> Tensor:
        """`rest` [d] with these values, or this one, at the shared coordinates."""
        given = torch.as_tensor(values, dtype=rest.dtype, device=rest.device)
        return _put(given.expand(len(self.places.theta)), rest, self.places.theta)


def split(task: Task, shared: Shared, method: str) -> Split | None:
    """The two parts of a task's models; None where all is shared. `method` is told in errors."""
    if shared == "all":
        return None
    if task.layout is None and shared == "all but batchnorm":
        return None
    if task.layout is None:
        raise UsageError(f'{method}.shared: a function of a vector has no layers: use shared = "all"')
    return _split(task.layout, shared, f"{method}.shared")


@lru_cache(maxsize=32)
def _split(layout: Layout, shared: Shared, field: str) -> Split | None:
    parameters, statistics = (tuple(_is_shared(s, shared, layout.last_layer) for s in slices)
                              for slices in (layout.parameters, layout.statistics))
    if isinstance(shared, tuple):
        _require_matches(layout, shared, field)
    if shared == "all but batchnorm" and all(parameters) and all(statistics):
        return None  # FedAvg
    if all(parameters) and all(statistics):
        raise UsageError(f'{field} = {_written(shared)} is every layer of the model: use shared = "all"')
    if not any(parameters):
        raise UsageError(f"{field} = {_written(shared)} leaves nothing to share: the model has only "
                         f"{', '.join(s.name for s in layout.parameters)}; use a model with more layers, "
                         "such as dnn, or list what to share")
    places, others = (Model(*(_coordinates(slices, [one == wanted for one in chosen]) for slices, chosen in (
        (layout.parameters, parameters), (layout.statistics, statistics)))) for wanted in (True, False))
    mask = torch.zeros(layout.dim, dtype=torch.bool).index_fill(0, places.theta, True)
    return Split(Part(parameters, mask), Part(tuple(not one for one in parameters), ~mask), places, others)


def _coordinates(slices: tuple[Slice, ...], chosen: list[bool]) -> Tensor:
    parts = [torch.arange(s.start, s.stop) for s, one in zip(slices, chosen, strict=True) if one]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *parts])


def _is_shared(s: Slice, shared: Shared, head: str) -> bool:
    match shared:
        case "body":
            return s.owner != head
        case "head":
            return s.owner == head
        case "all but batchnorm":
            return "_BatchNorm" not in s.layer
    return any(_matches(s, pattern) for pattern in shared)


def _matches(s: Slice, pattern: str) -> bool:
    """Whether the pattern is that of the parameter, or of a layer that it is in."""
    names = s.name.split(".")
    return any(fnmatchcase(".".join(names[:n]), pattern) for n in range(1, len(names) + 1))


def _require_matches(layout: Layout, patterns: tuple[str, ...], field: str) -> None:
    if not patterns:
        raise UsageError(f"{field} is an empty list: name the layers that all clients share")
    for pattern in patterns:
        if not any(_matches(s, pattern) for s in layout.parameters):
            layers = [".".join(s.name.split(".")[:n]) for s in layout.parameters
                      for n in range(1, s.name.count(".") + 2)]
            raise unknown(f"layer in {field}", pattern, dict.fromkeys(layers))


def _written(shared: Shared) -> str:
    return f'"{shared}"' if isinstance(shared, str) else str(list(shared))


def _at(vector: Tensor, places: Tensor) -> Tensor:
    return vector.index_select(-1, places.to(vector.device))


def _put(values: Tensor, rest: Tensor, places: Tensor) -> Tensor:
    return rest.index_copy(-1, places.to(rest.device), values)

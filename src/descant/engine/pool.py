"""The samples of a federation, arranged for work: each split by itself, and in it client by client, so that a
client's rows are one slice.

Rows that are only scored become the numbers that a model takes. Training reads its rows in random order,
which is faster from bytes, even with their conversion: memory is what it waits for. All this takes a copy.
Where it would be larger than `BUDGET`, bytes stay bytes everywhere; where that is too large too, samples stay
as they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core.federation import Federation
from descant.core.splits import SplitName, Table
from descant.core.task import inputs
from descant.engine.backends.memory import free_memory

BUDGET, SHARE = 2**30, 0.25  # bytes of a copy at most; as a share of the free memory
_BLOCK = 4096  # rows that are copied at once


def budget() -> int:
    """How many bytes a copy may take."""
    free = free_memory()
    return BUDGET if free is None else min(BUDGET, int(SHARE * free))


class Part(NamedTuple):
    """The samples of a split, or more, and which of them are each client's."""

    x: Tensor  # [n, ...]
    y: Tensor  # [n, ...]
    table: Table
    in_order: bool = False  # whether the rows of the table are 0, 1, 2, ...

    def slice_of(self, clients: np.ndarray) -> slice | None:
        """The rows of these clients, where they follow each other and each has as many."""
        sizes = self.table.sizes[clients]
        if not self.in_order or not sizes[0] or (sizes != sizes[0]).any() or (np.diff(clients) != 1).any():
            return None
        start = int(self.table.offsets[clients[0]])
        return slice(start, start + len(clients) * int(sizes[0]))

    def padded(self, clients: np.ndarray) -> np.ndarray:
        """The clients' rows side by side, padded with the client's last row; at least one column."""
        if (own := self.slice_of(clients)) is not None:
            return np.arange(own.start, own.stop).reshape(len(clients), -1)
        sizes, indices = self.table.sizes[clients], self.table.indices
        column = np.arange(max(1, int(sizes.max())))
        if not len(indices):
            return np.zeros((len(clients), 1), np.int64)
        offset = np.maximum(np.minimum(column[None, :], sizes[:, None] - 1), 0)
        # a client without rows gets another's, with weight False
        at = np.minimum(self.table.offsets[clients][:, None] + offset, len(indices) - 1)
        return np.asarray(indices[at])

    def copied(self, dtype: torch.dtype) -> Part:
        """The rows of the table alone, in its order, in this type."""
        rows = torch.from_numpy(np.require(self.table.indices, requirements="W"))  # torch warns otherwise
        if not len(rows):  # a row of somebody's fills up for clients without rows
            return self._replace(x=self.x[:1].clone(), y=self.y[:1].clone())
        order = Table(np.arange(len(rows)), self.table.offsets)
        if dtype == self.x.dtype and len(rows) == len(self.x) and np.array_equal(order.indices, rows):
            return self._replace(in_order=True)
        x = self.x.new_empty(len(rows), *self.x.shape[1:], dtype=dtype)
        for start in range(0, len(rows), _BLOCK):
            block = self.x[rows[start : start + _BLOCK]]
            x[start : start + _BLOCK] = block if dtype == self.x.dtype else inputs(block, dtype)
        return Part(x, self.y[rows], order, True)

    def nbytes(self, dtype: torch.dtype) -> int:
        """How large the copy would be."""
        return len(self.table.indices) * self.x[:1].numel() * dtype.itemsize


@dataclass(frozen=True)
class Pool:
    """The samples of the splits."""

    train: Part
    validation: Part
    test: Part

    def part(self, split: SplitName) -> Part:
        found: Part = getattr(self, split)
        return found

    @classmethod
    def of(cls, federation: Federation, dtype: torch.dtype) -> Pool:
        """The pool of a federation, for models of this precision."""
        given, own = cls.as_it_lies(federation), federation.x.dtype
        for scored in (dtype if own == torch.uint8 else own, own):
            kinds = (own, scored, scored)
            parts = (given.train, given.validation, given.test)
            if sum(part.nbytes(kind) for part, kind in zip(parts, kinds, strict=True)) <= budget():
                return cls(*(part.copied(kind) for part, kind in zip(parts, kinds, strict=True)))
        return given

    @classmethod
    def as_it_lies(cls, federation: Federation) -> Pool:
        """The federation's own tensors."""
        tables = (federation.train, federation.validation, federation.test)
        return cls(*(Part(federation.x, federation.y, table) for table in tables))

    def copied_bytes(self, federation: Federation) -> int:
        """Bytes of the samples that are not the federation's own tensor."""
        return sum(part.x.nbytes for part in (self.train, self.validation, self.test)
                   if part.x is not federation.x)

    def to(self, device: torch.device) -> Pool:
        parts = (self.train, self.validation, self.test)
        own = {id(tensor): tensor for part in parts for tensor in (part.x, part.y)}  # one for all, as it lies
        moved = {key: tensor.to(device) for key, tensor in own.items()}
        return Pool(*(part._replace(x=moved[id(part.x)], y=moved[id(part.y)]) for part in parts))


class Pools:
    """Holds the pool of a piece of work, which others that work on the same federation share."""

    def __init__(self) -> None:
        self._federation: Federation | None = None

    def of(self, federation: Federation, make: Callable[[], Pool]) -> Pool:
        if self._federation is not federation:
            self._federation, self._pool = federation, make()
        return self._pool

"""Sums whose last bit does not depend on who is added when, where, or with whom.

Clients are added up where they are trained: chunk by chunk, in several processes, as their replies arrive. In
floating point (a + b) + c is not a + (b + c), and so a run would depend on its backend. Here a number is cut
into pieces on fixed grids, whose units are 2^(32 j) for whole j: its piece on grid j is what is left of it by
the grids above, rounded to a multiple of the unit. A piece has at most 32 bits, and float64 adds up to 2^20
of them without rounding, in any order. Of a tensor the three grids below its largest number are kept, so that
at least 64 bits below that number count. Which these are depends on the numbers alone, as every piece does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from descant.core.tree import Tree, leaves, map_tree, rebuild
from descant.errors import DescantError

WIDTH, GRIDS = 32, 3  # bits of a piece; grids that are kept
MOST = 2**20  # clients in a sum
LOWEST = -28  # the first of the grids that are kept, at least: below them are no normal numbers
LARGEST = 2.0**900  # of a number: above are no grids
BLOCK = 2**17  # numbers that are cut together: they stay in the cache
COLUMNS = 2**13  # of rows that are measured together
SMALL = 2.0**-600  # units in which distances are measured whose squares would be too large


class Binned(NamedTuple):
    """The sum of some tensors, by grids."""

    top: int  # the first of the grids
    pieces: Tensor  # float64 [GRIDS, ...] the sums of the pieces on grids top, top - 1, ...

    def __reduce__(self) -> tuple[Any, ...]:
        """As an array: processes would share the memory of a tensor, which is small for that."""
        return _binned, (self.top, self.pieces.numpy())

    @classmethod
    def nothing(cls, shape: torch.Size) -> Self:
        return cls(LOWEST, torch.zeros(GRIDS, *shape, dtype=torch.float64))

    @classmethod
    def of(cls, rows: Tensor, weights: Tensor, largest: float, origin: Tensor | None = None,
           onto: Binned | None = None) -> Self:
        """The sum of weights_i (rows_i - origin), of which none is larger than `largest`, and of `onto`,
        whose pieces become those of the sum. rows: [n, ...]."""
        flat = rows.reshape(len(rows), -1)
        begun = (onto or cls.nothing(flat.shape[1:])).raised(_top(largest))
        top, pieces = begun.top, begun.pieces.view(GRIDS, -1)
        given, sums, counts = flat.numpy(), pieces.numpy(), weights.double().numpy()[:, None]
        width = min(max(1, BLOCK // len(rows)), flat.shape[1])
        blocks = np.empty((2, len(rows), width))  # used again and again: new memory costs more than the sums
        for start in range(0, flat.shape[1], width or 1):
            here = slice(start, start + width)
            numbers, piece = blocks[:, :, : min(width, flat.shape[1] - start)]
            if origin is None:
                np.multiply(given[:, here], counts, out=numbers)
            else:
                np.subtract(given[:, here], origin[here].numpy(), out=numbers)
                np.multiply(numbers, counts, out=numbers)
            _cut(numbers, piece, top, sums[:, here])
        return cls(top, pieces.reshape(GRIDS, *rows.shape[1:]))

    def raised(self, top: int) -> Binned:
        """On grids from this one on, if that is higher. What lies below them counts no more."""
        if (up := top - self.top) <= 0:
            return self
        pieces = torch.zeros_like(self.pieces)
        if up < GRIDS:
            pieces[up:] = self.pieces[: GRIDS - up]
        return Binned(top, pieces)

    def plus(self, other: Binned) -> Binned:
        """The sum of both."""
        top = max(self.top, other.top)
        return Binned(top, self.raised(top).pieces + other.raised(top).pieces)

    def value(self) -> Tensor:
        total = self.pieces[0]
        for lower in self.pieces[1:]:
            total = total + lower
        return total


def _binned(top: int, pieces: np.ndarray) -> Binned:
    return Binned(top, torch.from_numpy(pieces.copy()))


def _top(largest: float) -> int:
    """The first grid on which a number has a piece: it is less than half a unit of the one above."""
    if largest == 0:
        return LOWEST
    _, exponent = math.frexp(largest)  # largest < 2^exponent
    return max(LOWEST, -(-(exponent + 1) // WIDTH) - 1)


def _cut(left: np.ndarray, piece: np.ndarray, top: int, sums: np.ndarray) -> None:
    """Add the pieces of numbers [n, d], which are used up as `piece` is, to the sums on the grids
    [GRIDS, d]. In numpy, whose calls take less time than torch's."""
    for k in range(GRIDS):
        shift = 1.5 * 2.0 ** (52 + WIDTH * (top - k))  # numbers of this size are whole multiples of the unit
        np.add(left, shift, out=piece)
        np.subtract(piece, shift, out=piece)
        sums[k] += piece.sum(0)
        if k + 1 < GRIDS:
            np.subtract(left, piece, out=left)


def _sizes(flat: Tensor) -> Tensor:
    """The size of the largest entry of each row [n, d]: without a copy of them."""
    return torch.maximum(flat.amax(1), -flat.amin(1))  # aminmax takes ten times as long


def _distances(rows: Mapping[str, Tensor], origin: Mapping[str, Tensor]) -> Tensor:
    """How far rows [n, d] lie from the origin [d], all tensors together [n]."""
    norms = torch.stack([_squares(flat, origin[name]) for name, flat in rows.items()]).sum(0).sqrt()
    if bool((far := ~torch.isfinite(norms)).any()):
        squares = [_squares(flat[far], origin[name], SMALL) for name, flat in rows.items()]
        norms[far] = torch.stack(squares).sum(0).sqrt() / SMALL
    return norms


def _squares(flat: Tensor, origin: Tensor, unit: float = 1.0) -> Tensor:
    """The squared distances of rows [n, d] from the origin [d], times unit^2, block by block. These do not
    depend on n, nor does a client's length on those it is measured with."""
    squares = torch.zeros(len(flat), dtype=torch.float64)
    block = torch.empty(len(flat), min(COLUMNS, flat.shape[1]), dtype=torch.float64)
    for start in range(0, flat.shape[1], COLUMNS):
        here = slice(start, start + COLUMNS)
        moved = block[:, : flat.shape[1] - start].copy_(flat[:, here]).sub_(origin[here])
        squares += (moved if unit == 1 else moved.mul_(unit)).square_().sum(1)
    return squares


@dataclass(frozen=True)
class Total:
    """The weighted sum of what some clients contribute, which any order and grouping of them gives."""

    clients: int = 0
    weight: Binned = field(default_factory=lambda: Binned.nothing(torch.Size()))  # the sum of the weights
    parts: Mapping[str, Binned] = field(default_factory=dict)  # by the names of a contribution's tensors

    @classmethod
    def of(cls, contributions: Tree, weights: Tensor, onto: Total | None = None) -> Total:
        """Of contributions with a leading axis [n], and what each counts [n]; with `onto`, which is used up,
        of those in it, too: what `plus` gives, without a second total beside it."""
        onto, parts = onto or Total(), {}
        for name, rows in leaves(contributions):
            flat = rows.reshape(len(rows), -1)
            sizes = _sizes(flat) if flat.shape[1] else weights.new_zeros(len(rows))
            largest = float((sizes.double() * weights.double()).max())
            parts[name] = Binned.of(rows, weights, largest, onto=onto.parts.get(name))
        ones = torch.ones_like(weights, dtype=torch.float64)
        weight = Binned.of(ones, weights, float(weights.max()), onto=onto.weight)
        return cls(_counted(onto.clients, len(weights)), weight, parts)

    @classmethod
    def shortened(cls, contributions: Tree, origin: Mapping[str, Tensor], bound: float,
                  onto: Total | None = None) -> tuple[Total, Tensor]:
        """Of how far contributions [n, ...] lie from the origin (float64), each as one vector and no further
        than the bound, and of those in `onto`, as above; and whose were further [n]. No copy of them is made:
        blocks are moved and scaled while they are cut."""
        onto = onto or Total()
        rows = {name: leaf.reshape(len(leaf), -1) for name, leaf in leaves(contributions)}
        starts = {name: origin[name].reshape(-1) for name in rows}
        norms = _distances(rows, starts)
        scale = torch.clamp(bound / norms, max=1.0)
        largest, parts = float((norms * scale).max()), {}  # no entry is larger than the whole
        for name, leaf in leaves(contributions):
            found = Binned.of(rows[name], scale, largest, starts[name], onto.parts.get(name))
            parts[name] = Binned(found.top, found.pieces.reshape(GRIDS, *leaf.shape[1:]))
        ones = torch.ones_like(scale)
        weight = Binned.of(ones, ones, 1.0, onto=onto.weight)
        return cls(_counted(onto.clients, len(norms)), weight, parts), norms > bound

    def plus(self, other: Total) -> Total:
        if not other.clients or not self.clients:
            return self if self.clients else other
        return Total(_counted(self.clients, other.clients), self.weight.plus(other.weight),
                     {name: part.plus(other.parts[name]) for name, part in self.parts.items()})

    def mean(self, form: Tree) -> Tree:
        """The weighted mean, in the form of a contribution: each tensor has its type there."""
        weight = self.weight.value()
        return rebuild(form, {name: (self.parts[name].value() / weight).to(like.dtype)
                              for name, like in leaves(form)})


def _counted(clients: int, others: int) -> int:
    """How many these are together."""
    if clients + others > MOST:
        raise DescantError(f"a round can add up {MOST:,} clients at most: set train.cohort to that")
    return clients + others


def added(totals: Iterable[Total]) -> Total:
    """The sum of all."""
    whole = Total()
    for total in totals:
        whole = whole.plus(total)
    return whole


def weighted_mean(rows: Tree, weights: Tensor) -> Tree:
    """The mean of rows [n, ...] that count weights [n]."""
    return Total.of(rows, weights).mean(map_tree(lambda tensor: tensor[0], rows))

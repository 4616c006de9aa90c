"""Products of the clients' matrices, and room for what they are made of.

How a matrix is aligned may show in the last bit of a product. So what clients have begins alike within a line
of the cache, and a client's result does not depend on its place in the chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from descant.core.threads import on_all_cores

LINE = 64  # bytes of a line of the cache
COLUMNS = 512  # of a product over the population that are made together: their operands stay in the cache


def add_product_(into: Tensor, a: Tensor, b: Tensor, keep: float, factor: float) -> None:
    """into <- keep * into + factor * a b; with keep = 0 it may hold anything."""
    if into.is_contiguous():
        into.baddbmm_(a, b, beta=keep, alpha=factor)
    else:  # with room between the clients, torch would go from one to the next
        add_(into, torch.bmm(a, b), keep, factor)


def add_(into: Tensor, gradient: Tensor, keep: float, factor: float) -> None:
    """into <- keep * into + factor * gradient; with keep = 0 it may hold anything."""
    if keep == 0:  # what is there may be NaN
        torch.mul(gradient, factor, out=into) if factor != 1 else into.copy_(gradient)
    else:
        (into if keep == 1 else into.mul_(keep)).add_(gradient, alpha=factor)


def room(given: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Room for a tensor of this shape [clients, ...], of the kind of the given one."""
    clients, *own = shape
    dtype = dtype or given.dtype
    each, per_line = math.prod(own), LINE // dtype.itemsize
    return given.new_empty(clients, -(-each // per_line) * per_line, dtype=dtype)[:, :each].view(shape)


def some_rows(blocks: Sequence[tuple[Tensor, Tensor]], right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Rows of a product, on all cores: of each block [b, k] the rows that are wanted, times `right` [k, d].

    All rows of a block are made, since what a product has in one may depend on how many there are: with
    blocks that are always the same, it does not depend on which are wanted. A thread would give the memory of
    large tensors back, and pay for it again in the next round: it makes small ones.
    """
    made = right.new_empty(sum(len(wanted) for _, wanted in blocks), right.shape[1])
    parts = made.split([len(wanted) for _, wanted in blocks])

    def make(start: int) -> None:
        here = slice(start, start + COLUMNS)
        for (block, wanted), part in zip(blocks, parts, strict=True):
            all_rows = torch.mm(block, right[:, here])
            if bias is not None:
                all_rows += bias[here]
            part[:, here] = all_rows if len(wanted) == len(block) else all_rows[wanted]

    on_all_cores(make, range(0, right.shape[1], COLUMNS))
    return made


def centred(rows: Tensor) -> Tensor:
    """rows - mean of all rows, on all cores."""
    made = torch.empty_like(rows)

    def make(start: int) -> None:
        here = slice(start, start + COLUMNS)
        torch.sub(rows[:, here], rows[:, here].mean(0), out=made[:, here])

    on_all_cores(make, range(0, rows.shape[1], COLUMNS))
    return made


def taken_rows(rows: Tensor, places: Tensor) -> Tensor:
    """rows[places] [..., d], copied on all cores."""
    made = rows.new_empty(places.numel(), *rows.shape[1:])
    parts = zip(places.flatten().split(COLUMNS), made.split(COLUMNS), strict=True)
    on_all_cores(lambda part: torch.index_select(rows, 0, part[0], out=part[1]), parts)
    return made.view(*places.shape, *rows.shape[1:])


def in_lines(tensor: Tensor) -> bool:
    """Whether what every client has in it begins with a line of the cache."""
    return tensor.data_ptr() % LINE == 0 and tensor.stride(0) * tensor.element_size() % LINE == 0

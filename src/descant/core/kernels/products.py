"""Products of the clients' matrices, and room for what they are made of.

How a matrix is aligned may show in the last bit of a product. So what clients have begins alike within a line
of the cache, and a client's result does not depend on its place in the chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

LINE = 64  # bytes of a line of the cache


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


def in_lines(tensor: Tensor) -> bool:
    """Whether what every client has in it begins with a line of the cache."""
    return tensor.data_ptr() % LINE == 0 and tensor.stride(0) * tensor.element_size() % LINE == 0

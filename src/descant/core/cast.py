"""Real numbers in another type."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from descant.errors import UsageError


def cast_real(values: Tensor, dtype: torch.dtype, place: Callable[[int], str],
              remedy: str = 'correct it, or set dtype = "float64" in [train]') -> Tensor:
    """Real numbers in `dtype`, other tensors as they are. A number that would become infinite is an error;
    `place` says where the values of a row are."""
    if not values.is_floating_point() or values.dtype == dtype:
        return values
    found = values.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(values.dtype).max:
        lost = found.isinf() & values.isfinite()
        if bool(lost.any()):
            row, *rest = torch.nonzero(lost)[0].tolist()
            number, kind = float(values[(row, *rest)]), str(dtype).removeprefix("torch.")
            raise UsageError(f"{place(row)}: {number:g} is too large for {kind}: {remedy}")
    return found

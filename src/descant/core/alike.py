"""Whether two values hold the same tensors."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

Parts: TypeAlias = dict[str, Tensor]


def parts(value: Any) -> Parts:
    """The tensors in a value, whatever else is in it."""
    if isinstance(value, Tensor):
        return {"value": value}
    if not isinstance(value, tuple | list | dict):
        return {}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {f"{key}.{name}": tensor for key, part in items for name, tensor in parts(part).items()}


def same(found: Parts, expected: Parts, tolerance: float = 0.0) -> bool:
    """In every entry, bit for bit or to within a tolerance; NaN is NaN."""
    return found.keys() == expected.keys() and all(
        a.shape == b.shape and a.dtype == b.dtype
        and torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
        for a, b in ((tensor, expected[name]) for name, tensor in found.items()))

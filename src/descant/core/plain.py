"""Values as JSON can hold them."""

from __future__ import annotations

import math
from typing import Any


def plain(value: Any) -> Any:
    """JSON has no NaN, no tuples, and no tensors or arrays."""
    if not isinstance(value, list | tuple) and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

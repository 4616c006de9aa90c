"""How much a compressed file may unpack to: a limit that the user can raise."""

from __future__ import annotations

import os

from descant.core.units import size as in_units
from descant.errors import UsageError

LIMIT = "DESCANT_UNPACK"  # environment: the bytes that are always allowed
USUAL = 256_000_000
RATIO = 100  # to which anything may unpack, relative to its compressed size


def excess(size: int, packed: int) -> str | None:
    """Why so many bytes may not be made of `packed` ones; None if they may."""
    most = max(RATIO * packed, limit())
    if size <= most:
        return None
    return (f"unpacks from {in_units(packed)} to {in_units(size)}, and {in_units(most)} are allowed: if it "
            f"is right, set {LIMIT}={size} in the environment")


def limit() -> int:
    """The bytes to which anything may unpack."""
    text = os.environ.get(LIMIT, str(USUAL))
    if not text.isdecimal() or len(text) > 18:
        raise UsageError(f"{LIMIT} must be a number of bytes, such as {USUAL}, not {text!r}")
    return int(text)

"""Quantities as people write them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """A span of time in the unit that suits its size: `0.23 ms`, `4.2 s`, `3 min 20 s`."""
    if seconds < 1e-4:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.1:
        return f"{seconds * 1e3:.2g} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def size(count: int) -> str:
    """A number of bytes, in powers of 1000."""
    if count < 1000:
        return f"{count} B"
    value, unit = count / 1e3, "kB"
    for larger in ("MB", "GB", "TB"):
        if value < 999.95:
            break
        value, unit = value / 1e3, larger
    return f"{value:.1f} {unit}"


def times(count: int, noun: str) -> str:
    """`1 client`, `3 clients`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"

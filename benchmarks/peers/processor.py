"""The processor time of a side: of its process and all that it has started."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from pathlib import Path


def processor_time(pid: int) -> float | None:
    """Seconds that a process and its descendants have computed, by the kernel's count for each thread (Linux,
    in nanoseconds); None where that is not told."""
    children = defaultdict(list)
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            children[parent].append(int(place.name))
    total, left = None, [pid]
    while left:
        one = left.pop()
        left += children[one]
        for task in Path(f"/proc/{one}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                total = (total or 0.0) + int(task.read_text().split()[0]) / 1e9
    return total

"""Memory: how a process treats it, and how much there is."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8  # of mallopt(3)


def keep_freed_memory() -> None:
    """Let this process keep freed memory for its next use (glibc only).

    Otherwise a chunk's tensors are returned to the system at every step, and fresh pages are filled with
    zeros: up to a tenth of the time.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, 2**30)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_TOP_PAD, 2**26)


def return_freed_memory() -> None:
    """Let this process return freed memory to the system (glibc only): for a server, which has the messages
    of hundreds of clients for a moment. Otherwise each of its threads keeps what it needed once. To be called
    before there are threads.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_ARENA_MAX, 1)
        mallopt(_MMAP_THRESHOLD, 2**17)
        mallopt(_TRIM_THRESHOLD, 2**17)


class _Group(NamedTuple):
    """The files of a version of control groups."""

    root: str
    limit: str
    used: str
    cache: str  # of what is used: files that could be dropped


_OLD = _Group("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
              "total_inactive_file")
_NEW = _Group("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process can still use, by the machine and by its control groups; None if unknown."""
    known = [*_of_machine(root), *_of_groups(root)]
    return min(known) if known else None


def _of_machine(root: Path) -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError, KeyError):
        yield 1024 * _figures(root / "proc/meminfo")["MemAvailable"]


def _of_groups(root: Path) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, own = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            names = _OLD if controllers else _NEW
            # in a container the path may be the host's, of which only the last part is visible
            for group in (Path(own), *Path(own).parents):
                yield from _of_group(root / names.root / str(group).lstrip("/"), names)


def _of_group(group: Path, names: _Group) -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError, KeyError):  # not there, or "max": no limit
        limit, used = (int((group / name).read_text()) for name in (names.limit, names.used))
        yield max(0, limit - used + _figures(group / "memory.stat")[names.cache])


def _figures(path: Path) -> dict[str, int]:
    """The numbers of a file of the kernel, by name."""
    lines = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}

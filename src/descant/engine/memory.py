"""How a process treats memory."""

from __future__ import annotations

import contextlib
import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of mallopt(3)


def keep_freed_memory() -> None:
    """Let this process keep freed memory for its next use.

    Training frees and asks for tensors of the size of a chunk's models at every step. glibc hands those
    back to the system, which then fills fresh pages with zeros: up to a tenth of the time. Elsewhere than
    on glibc nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, 2**30)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_TOP_PAD, 2**26)

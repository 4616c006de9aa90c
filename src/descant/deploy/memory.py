"""Memory that a round has used, for others to use.

Replies come from all clients at once, in pieces of any size. What is freed of them stays with the process:
C's allocator gives back what lies at its end alone, and in every round other pieces lie there. So a server
would have more memory round after round, and the more the more clients it has.
"""

from __future__ import annotations

import contextlib
import ctypes


def give_back() -> None:
    """Return what is free to the system, where the C library can (glibc)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)

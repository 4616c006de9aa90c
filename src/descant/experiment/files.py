"""Writing files so that a kill, a full disk or a power cut leaves the old one or the new one."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from descant.errors import DescantError


def write_atomic(path: Path, data: bytes) -> None:
    """Replace a file in one step; durable when it returns."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def sync_directory(directory: Path) -> None:
    """Make creations, renames and removals in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append(path: Path, text: str) -> None:
    """Add whole lines to a file; durable when it returns."""
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold a directory for this process; the lock ends with the process, however it ends."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DescantError(f"another process is working in {directory}: wait for it, or stop it"
                               ) from None
        yield
    finally:
        os.close(descriptor)

"""Writing files so that a kill, a full disk or a power cut leaves the old one or the new one."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import io
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from descant.errors import DescantError


def write_atomic(path: Path, data: bytes, *, private: bool = False) -> None:
    """Replace a file in one step; durable when it returns. A private one is for this user alone."""
    with replacing(path, private=private) as file:
        file.write(data)


def write_csv(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    """Replace a file by a table, whose first row is the header."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_atomic(path, text.getvalue().encode())


@contextlib.contextmanager
def replacing(path: Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` in one step when the block ends well."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        if private:
            temporary.unlink(missing_ok=True)  # that of a process that was killed may be open to others
        with open(temporary, "wb", opener=_for_owner if private else None) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(temporary):
            error.filename = str(path)  # which is the one that the user knows
        raise


def _for_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def private_directory(directory: Path, own: Callable[[str], object] = lambda name: False) -> None:
    """Make a directory for this user alone. One that exists and has nothing but files of ours (`own`, by
    name) is closed to others too. Any other keeps its mode: it could be anything."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_mode & 0o077 and all(map(own, os.listdir(directory))):  # noqa: PTH208
        directory.chmod(0o700)


def sync_directory(directory: Path) -> None:
    """Make creations, renames and removals in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append(path: Path, text: str) -> None:
    """Add whole lines to a file; durable when it returns."""
    is_new = not path.exists()
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    if is_new:
        sync_directory(path.parent)


@contextlib.contextmanager
def locked(directory: Path, *, shared: bool = False, wait: bool = False) -> Iterator[None]:
    """Hold a directory for this process, alone or with other readers; the lock ends with the process
    (and those it forked meanwhile), however it ends."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.flock(descriptor, kind | (0 if wait else fcntl.LOCK_NB))
        except OSError:
            raise DescantError(f"another process is working in {directory}: wait for it, or stop it"
                               ) from None
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until a write is complete."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a worker, whose parent stops it
        yield
        return
    caught: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if caught:
        raise KeyboardInterrupt

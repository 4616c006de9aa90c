"""A side in a process of its own, so that its memory is its own and the others' threads are not in its way.

Whoever is not asked waits on a pipe, which costs nothing.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
import torch.multiprocessing

from descant.errors import DescantError

StartMethod: TypeAlias = Literal["fork", "spawn"]


class Apart:
    """Makes an object in a process and calls its methods there."""

    def __init__(self, start: StartMethod, make: Callable[..., Any], *arguments: Any) -> None:
        context: Any = torch.multiprocessing.get_context(start)
        self._pipe, theirs = context.Pipe()
        # not a daemon: it may have workers of its own
        self._process = context.Process(target=_serve, args=(theirs, make, arguments))
        try:
            self._process.start()
            theirs.close()
            self.ask("note")  # until it is there: whoever is asked next works alone
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def ask(self, what: str, *arguments: Any) -> Any:
        """Call a method there, or read an attribute; returns when that is done."""
        try:
            self._pipe.send((what, *arguments))
            failed, answer = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(1)
            raise DescantError("a process of the benchmark ended unexpectedly (exit code "
                               f"{self._process.exitcode}), perhaps for want of memory") from None
        if failed:
            raise answer
        return answer

    def close(self) -> None:
        """End the process, in whatever state it is."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._pipe.close()
        if self._process.pid is None:  # it was never started
            return
        self._process.join(3)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def orders(pipe: Connection) -> Iterator[Any]:
    """What comes through a pipe, until it is None or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    parent = multiprocessing.parent_process()
    assert parent is not None
    # forked processes hold copies of the pipe's far end, so that its closing cannot be relied on
    while pipe in wait([pipe, parent.sentinel]):
        try:
            order = pipe.recv()
        except EOFError:
            return
        if order is None:
            return
        yield order


def _serve(pipe: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)  # whoever wants more says so
    made: Any = None
    with contextlib.suppress(BrokenPipeError):  # the parent is gone, or wants to know no more
        for what, *given in orders(pipe):
            try:
                if made is None:
                    made = make(*arguments)
                answer = peak_memory() if what == "peak_memory" else getattr(made, what)
                answer = False, answer(*given) if callable(answer) else answer
            except DescantError as error:
                answer = True, error
            except Exception as error:
                answer = True, DescantError(f"the benchmark failed: {type(error).__name__}: {error}")
            pipe.send(answer)
    if made is not None:
        made.close()


def peak_memory() -> int | None:
    """Bytes that this process and all that it started had in memory at most, each at its own peak; what they
    share with each other is counted once. None where the system does not tell."""
    try:
        total = _bytes(Path("/proc/self/status"), "VmHWM")
        for place in _descendants(Path("/proc/self")):
            shared = (_bytes(place / "smaps_rollup", kind) for kind in ("Shared_Clean", "Shared_Dirty"))
            total += max(0, _bytes(place / "status", "VmHWM") - sum(shared))
    except (OSError, StopIteration):
        return None
    return total


def _descendants(place: Path) -> Iterator[Path]:
    for children in place.glob("task/*/children"):
        for child in children.read_text().split():
            yield Path("/proc") / child
            yield from _descendants(Path("/proc") / child)


def _bytes(file: Path, name: str) -> int:
    """What a line of a table of the kernel says, which is in kB."""
    line = next(line for line in file.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024

"""How many threads torch uses."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch at one thread. Parallelism is over clients, and the last bit of a sum depends on the number
    of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def on_all_cores(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """What `work` gives for each item, several at a time. Each is computed by one thread: to the last bit the
    same on any number of cores."""
    # what torch is told of the number of threads holds in the thread that tells it
    with one_thread(), ThreadPoolExecutor(cores(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return [*pool.map(work, items)]

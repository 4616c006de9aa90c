"""What runs chunks of clients: the base of all backends, and the one in this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np

from descant.core.algorithm import Message
from descant.core.tree import Tree, take
from descant.engine.backends.memory import keep_freed_memory
from descant.engine.work import Job, Outcome, Work, gather


class Backend(ABC):
    """Runs a job for any number of clients. All backends give the same results up to rounding."""

    def __init__(self, work: Work, chunk: int) -> None:
        self.work = work
        self.chunk = chunk
        self.notes: list[str] = []  # for the user

    @abstractmethod
    def run(self, job: Job, clients: np.ndarray, number: int, message: Message, states: Tree) -> Outcome:
        """The job's results; `message.each` and `states` have a row per client."""

    @abstractmethod
    def close(self) -> None:
        """Release what the backend holds."""

    def _chunks(self, clients: np.ndarray) -> Iterator[tuple[int, slice]]:
        # depends on the list alone, never on timing
        for start in range(0, len(clients), self.chunk):
            yield start, slice(start, start + self.chunk)


class InProcess(Backend):
    """Chunks in this process: `vectorised`, or `loop` with chunks of one client."""

    def __init__(self, work: Work, chunk: int) -> None:
        super().__init__(work, chunk)
        keep_freed_memory()

    def run(self, job: Job, clients: np.ndarray, number: int, message: Message, states: Tree) -> Outcome:
        return gather([
            (start, self.work.execute(job, clients[part], number,
                                      Message(message.shared, take(message.each, part)), take(states, part)))
            for start, part in self._chunks(clients)
        ])

    def close(self) -> None:
        """Nothing is held."""

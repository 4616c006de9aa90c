"""What runs chunks of clients: the base of all backends, and the one in this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from descant.core.algorithm import Message
from descant.core.tree import Tree, take
from descant.engine.adding import Adder, Adding
from descant.engine.backends.memory import keep_freed_memory
from descant.engine.outcome import Outcome, gather
from descant.engine.work import Job, Work

SCORING: tuple[Job, ...] = ("score", "score_newcomer")


class Planned(NamedTuple):
    """A job for some clients, which is run soon."""

    job: Job
    clients: np.ndarray
    number: int
    message: Message  # `each` has a row per client
    adding: Adding | None = None  # how uploads are added up

    @property
    def key(self) -> tuple[Job, int]:
        return self.job, self.number


class Backend(ABC):
    """Runs a job for any number of clients. All backends give the same results up to rounding."""

    asks: ClassVar[bool] = False  # whether its clients are asked, so that jobs are better put together

    def __init__(self, work: Work, chunk: int, scored: int | None = None) -> None:
        self.work = work
        self.chunk = chunk  # clients that train together
        self.scored = scored or chunk  # clients whose models are scored together
        self.notes: list[str] = []  # for the user
        self.announced: list[Planned] = []

    @abstractmethod
    def run(self, job: Job, clients: np.ndarray, number: int, message: Message, states: Tree,
            adding: Adding | None = None) -> Outcome:
        """The job's results; `message.each` and `states` have a row per client. With `adding`, the uploads
        are added up where they are made."""

    def announce(self, jobs: Sequence[Planned]) -> None:
        """These jobs are run next. Who asks clients may ask for them together with the first."""
        self.announced += jobs

    @abstractmethod
    def close(self) -> None:
        """Release what the backend holds."""

    def _chunks(self, job: Job, clients: np.ndarray) -> Iterator[tuple[int, slice]]:
        # depends on the list alone, never on timing
        chunk = self._chunk_of(job, len(clients))
        for start in range(0, len(clients), chunk):
            yield start, slice(start, start + chunk)

    def _chunk_of(self, job: Job, count: int) -> int:
        """How many of so many clients run together."""
        return self.scored if job in SCORING else self.chunk


class InProcess(Backend):
    """Chunks in this process: `vectorised`, or `loop` with chunks of one client."""

    def __init__(self, work: Work, chunk: int, scored: int | None = None) -> None:
        super().__init__(work, chunk, scored)
        keep_freed_memory()

    def run(self, job: Job, clients: np.ndarray, number: int, message: Message, states: Tree,
            adding: Adding | None = None) -> Outcome:
        adder = Adder(self.work)
        found = gather(
            (start, adder.execute(job, clients[part], number,
                                  Message(message.shared, take(message.each, part)), take(states, part),
                                  None if adding is None else adding.of(part)))
            for start, part in self._chunks(job, clients)
        )
        return found if adding is None else found._replace(total=adder.total)

    def close(self) -> None:
        """Nothing is held."""

"""Where the time of a run goes, by the parts of a round."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

Part: TypeAlias = Literal[
    "sampling", "broadcast", "gathering", "local", "aggregate", "evaluate", "checkpoint"]
PARTS: dict[Part, str] = {
    "sampling": "who takes part",
    "broadcast": "messages, and the clients' states",
    "gathering": "drawing the batches and looking up their samples",
    "local": "the clients' work",
    "aggregate": "checking the uploads, and the server's step",
    "evaluate": "scoring the clients",
    "checkpoint": "saving the round",
}


class Stopwatch:
    """Seconds of wall time spent in each part, since the start of this process."""

    def __init__(self) -> None:
        self.seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self.rounds = 0

    @contextmanager
    def __call__(self, part: Part) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - start

    def divide(self, wall: float, gathering: float) -> None:
        """The clients' work took so long, and a share of it went into batches."""
        self.seconds["gathering"] += gathering * wall
        self.seconds["local"] += (1 - gathering) * wall

"""What a side needs to take part: the work to do, and the orders it is given.

This runs in the environment of another library, so that it knows nothing but numpy.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np


class Work:
    """The federation and the rounds, as benchmarks/peers/work.py writes them."""

    def __init__(self, path: str | Path) -> None:
        with np.load(path) as found:
            self.model = str(found["model"])
            self.lr, self.batch = float(found["lr"]), int(found["batch"])
            self.x = found["x"].astype(np.float32) * np.float32(1 / 255)  # [clients, rows, pixels]
            self.y = found["y"]  # [clients, rows]
            self.cohorts = found["cohorts"]  # [rounds, cohort]: who takes part
            self.orders = found["orders"]  # [rounds, cohort, rows of all batches]: places in a client's rows
            self.initial = found["initial"]  # all parameters end to end, layers as torch has them

    @property
    def rounds(self) -> int:
        return len(self.cohorts)

    @property
    def cohort(self) -> int:
        return int(self.cohorts.shape[1])


class Session:
    """Answers orders, which come as lines: `about`, `round`, `model FILE`."""

    def __init__(self, *packages: str) -> None:
        self._orders = os.fdopen(os.dup(0))
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)  # what a library prints goes to the log
        self._packages = packages
        self._start = 0.0
        self.has_ended = False

    def begin(self, model: Callable[[], np.ndarray]) -> bool:
        """Wait until a round is asked for, and start the clock; False if there will be none."""
        for line in self._orders:
            order, _, given = line.strip().partition(" ")
            if order == "about":
                self._answer(about=", ".join(f"{name} {version(name)}" for name in self._packages))
            elif order == "model":
                np.save(given, model())
                self._answer()
            elif order == "round":
                self._start = time.perf_counter()
                return True
        self.has_ended = True
        return False

    def played(self, grad_steps: int) -> None:
        """The round is done."""
        self._answer(seconds=time.perf_counter() - self._start, grad_steps=grad_steps)

    def _answer(self, **facts: object) -> None:
        self._answers.write(json.dumps(facts) + "\n")
        self._answers.flush()


def work_of_this_process() -> Work:
    return Work(sys.argv[1])

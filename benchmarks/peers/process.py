"""A library at work, in a process of its own environment that answers orders."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.libraries import Arrangement, Library
from benchmarks.speed.side import Played
from descant.errors import DescantError

PATIENCE = 600.0  # seconds for an answer
FAREWELL = 20.0  # seconds to end: Ray takes some


class Process:
    """Started with a file of work; every answer is a line of JSON."""

    def __init__(self, library: Library, arrangement: Arrangement, work: Path) -> None:
        self._title = library.title
        self._is_closed = False
        self._log = work.with_name(f"{library.name}.log")
        self._file = work.with_name(f"{library.name}.npy")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [library.python.absolute(), library.script, work.absolute(), *arrangement.arguments],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=work.parent,
                env=_environment() | arrangement.environment, start_new_session=True)

    @property
    def pid(self) -> int:
        return self._process.pid

    def about(self) -> str:
        """The versions; answered when it is ready."""
        return str(self._ask("about")["about"])

    def round(self) -> Played:
        answer = self._ask("round")
        return Played(answer["seconds"], answer["grad_steps"])

    def model(self) -> np.ndarray:
        """All parameters of the global model."""
        self._ask(f"model {self._file.absolute()}")
        return np.asarray(np.load(self._file))

    def _ask(self, order: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(order + "\n")
            self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], PATIENCE)[0]:
            raise DescantError(f"{self._title} has not answered for {PATIENCE:.0f} s")
        answer = self._process.stdout.readline()
        if not answer:
            raise DescantError(f"{self._title} ended: {_last_line(self._log)} (all of it: {self._log})")
        return dict(json.loads(answer))

    def close(self) -> None:
        """End it, and what it has started."""
        if self._is_closed:
            return
        self._is_closed = True
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(FAREWELL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()


def _environment() -> dict[str, str]:
    """Ours, without what would lead another Python astray or limit its threads."""
    ours = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "OMP_NUM_THREADS", "XLA_FLAGS"}
    # Flower and Ray would otherwise report that they are used
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    return {name: value for name, value in os.environ.items() if name not in ours} | quiet


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"

"""Progress of what a script or a notebook calls, on standard error as tqdm shows it; nothing where nobody
looks, as in a log or a test."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from rich.console import Console

from descant.engine.backends.choose import Timing
from descant.experiment.observe import Silent
from descant.experiment.run import Run
from descant.view.display import scores_of

WIDTH = 24  # signs of a full bar


def is_watched() -> bool:
    """Whether standard error is a terminal or the output of a notebook."""
    return sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel")


def console(progress: bool | None) -> Console:
    """Where commands print to, for a function: standard error, or nowhere."""
    shown = is_watched() if progress is None else progress
    return Console(file=sys.stderr, quiet=not shown, markup=False, highlight=False, emoji=False,
                   force_jupyter=False, width=None if sys.stderr.isatty() else 1000)


class Bar(Silent):
    """Observes a run: one line that changes, and is gone in the end. What a user must know is a warning."""

    def __init__(self) -> None:
        self._width = 0  # of what is shown
        self._score = ""

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._show("")
        sys.stderr.write("\r")
        sys.stderr.flush()

    def started(self, run: Run, measured: list[Timing]) -> None:
        super().started(run, measured)
        self._rounds, self._metric = run.setup.train.rounds, run.setup.deciding.name

    def played(self, row: dict[str, Any]) -> None:
        super().played(row)
        if "personal" in row:
            self._score = f"  {scores_of(row, self._metric)[0]}"
        full = round(WIDTH * row["round"] / self._rounds)
        self._show(f"round {row['round']}/{self._rounds} {'█' * full}{'░' * (WIDTH - full)}{self._score}")

    def _show(self, text: str) -> None:
        sys.stderr.write(f"\r{text}{' ' * (self._width - len(text))}")
        sys.stderr.flush()
        self._width = len(text)

"""Who watches a run: displays, logs, and functions of the user's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from descant.engine.backends.choose import Timing
from descant.errors import UsageError

if TYPE_CHECKING:
    from descant.experiment.run import Run


class Observer(Protocol):
    """Watches a run: a progress display, a log."""

    def started(self, run: Run, measured: list[Timing]) -> None:
        """The first round is about to begin."""

    def played(self, row: dict[str, Any]) -> None:
        """A round is committed; `row` is its line of metrics.jsonl."""


class Silent:
    """Shows nothing; what a user must know is a warning."""

    def started(self, run: Run, measured: list[Timing]) -> None:
        for caution in (*run.setup.algorithm.cautions(), *run.notes):
            warnings.warn(caution, stacklevel=6)

    def played(self, row: dict[str, Any]) -> None:
        if "divergence" in row:
            warnings.warn(f"round {row['round']}: {row['divergence']}", stacklevel=7)


Callback: TypeAlias = Callable[["Run", dict[str, Any]], object]


class Calling:
    """An observer that also calls the user's functions, of the run and a round's line of metrics.jsonl: after
    every round, and after every evaluated one. A round is on disk before they are called."""

    def __init__(self, observer: Observer | None, on_round: Callback | None, on_evaluate: Callback | None
                 ) -> None:
        for name, function in (("on_round", on_round), ("on_evaluate", on_evaluate)):
            if function is not None and not callable(function):
                raise UsageError(f"{name} must be a function of (run, row), not {function!r}")
        self._observer = observer or Silent()
        self._on_round, self._on_evaluate = on_round, on_evaluate

    def started(self, run: Run, measured: list[Timing]) -> None:
        self._run = run
        self._observer.started(run, measured)

    def played(self, row: dict[str, Any]) -> None:
        self._observer.played(row)
        if self._on_round is not None:
            self._on_round(self._run, row)
        if self._on_evaluate is not None and "personal" in row:
            self._on_evaluate(self._run, row)


def require_observer(observer: Any) -> None:
    """Refuse what cannot watch a run before its data is prepared."""
    missing = [name for name in ("started", "played") if not callable(getattr(observer, name, None))]
    if missing:
        raise UsageError(f"observer must have the functions started(run, measured) and played(row), and "
                         f"{type(observer).__name__} has no {' and no '.join(missing)}")


class Interrupted(KeyboardInterrupt):
    """Ctrl-C: `run` stands at its last committed round."""

    def __init__(self, message: str, run: Run) -> None:
        super().__init__(message)
        self.run = run

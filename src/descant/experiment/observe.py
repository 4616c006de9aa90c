"""Who watches a run: displays, logs, and functions of the user's."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from descant.engine.backends.choose import Timing
from descant.errors import UsageError

if TYPE_CHECKING:
    from descant.experiment.run import Run


Status: TypeAlias = Literal["finished", "interrupted", "failed"]


class Observer(Protocol):
    """Watches a run: a progress display, a log. One that also has a function `ended(run, status)` is told
    when no round follows."""

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


class Together:
    """Several observers as one, told in their order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def started(self, run: Run, measured: list[Timing]) -> None:
        for observer in self._observers:
            observer.started(run, measured)

    def played(self, row: dict[str, Any]) -> None:
        for observer in self._observers:
            observer.played(row)

    def ended(self, run: Run, status: Status) -> None:
        for observer in self._observers:
            tell_end(observer, run, status)


class Calling:
    """Calls the user's functions, of the run and a round's line of metrics.jsonl: after every round, and
    after every evaluated one. A round is on disk before they are called."""

    def __init__(self, on_round: Callback | None, on_evaluate: Callback | None) -> None:
        for name, function in (("on_round", on_round), ("on_evaluate", on_evaluate)):
            if function is not None and not (callable(function) and _takes(function, 2)):
                raise UsageError(f"{name} must be a function of (run, row), not {function!r}")
        self._on_round, self._on_evaluate = on_round, on_evaluate

    def started(self, run: Run, measured: list[Timing]) -> None:
        self._run = run

    def played(self, row: dict[str, Any]) -> None:
        if self._on_round is not None:
            self._on_round(self._run, row)
        if self._on_evaluate is not None and "personal" in row:
            self._on_evaluate(self._run, row)


def tell_end(observer: Observer, run: Run, status: Status) -> None:
    """Tell an observer that has a function `ended` that no round follows."""
    if (ended := getattr(observer, "ended", None)) is not None:
        ended(run, status)


def require_observer(observer: Any) -> None:
    """Refuse what cannot watch a run before its data is prepared."""
    if isinstance(observer, type):
        raise UsageError(f"observer must be an object: {observer.__name__}() with brackets, not the class")
    missing = [words for words, count in (("started(run, measured)", 2), ("played(row)", 1))
               if not callable(found := getattr(observer, words.partition("(")[0], None))
               or not _takes(found, count)]
    if missing:
        raise UsageError("observer must have the functions started(run, measured) and played(row), and "
                         f"{type(observer).__name__} has no {' and no '.join(missing)}")


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with so many arguments, as far as that can be known."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # of some functions in C
        return True
    return True


class Interrupted(KeyboardInterrupt):
    """Ctrl-C: `run` stands at its last committed round."""

    def __init__(self, message: str, run: Run) -> None:
        super().__init__(message)
        self.run = run

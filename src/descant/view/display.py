"""Lines for what happens; and on a terminal, below them, a few lines that change.

Names and reasons may come from another machine: everything is shown as plain text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from descant.core.metric import figure

JOBS = {"local": "training", "opening": "opening", "score": "scoring", "score_newcomer": "scoring",
        "finish": "making the personal model"}


class Display:
    """A context, because what changes must be taken down."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        if console.is_interactive:
            self._live = Live(get_renderable=self.lines, console=console, transient=True,
                              refresh_per_second=4, redirect_stdout=False, redirect_stderr=False)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take down what changes."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, text: str) -> None:
        # a line is a line, however narrow the terminal: what people copy must not be cut
        self._console.print(Text(printable(text)), soft_wrap=True)

    def lines(self) -> RenderableType:
        """What is shown for the moment."""
        return ""


def scores_of(row: Mapping[str, Any], metric: str) -> list[str]:
    """The mean test figures of a round, in a few words for each kind of model."""
    return [f"{model} test {metric} {figure(metric, row[model]['test'][metric]['mean'])}"
            for model in ("personal", "global") if model in row]


def line(text: str) -> Text:
    """One line of what changes: the rest of it is cut off."""
    return Text(printable(text), no_wrap=True, overflow="ellipsis")


def printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)


def listed(names: Sequence[str], most: int = 6) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"

"""The console that commands print to."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def make_console(*, stderr: bool = False) -> Console:
    """Nothing that is printed is markup, and without a terminal nothing is wrapped or cut."""
    from rich.console import Console  # help must not wait for it

    console = Console(markup=False, highlight=False, emoji=False, stderr=stderr)
    return console if console.is_terminal else Console(markup=False, highlight=False, emoji=False,
                                                       stderr=stderr, width=1000)

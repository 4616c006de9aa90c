"""Where the time of a run's rounds went, as a table for the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console, Group
from rich.table import Table

from descant.core.stopwatch import PARTS, Stopwatch
from descant.core.units import duration, times

WIDTH = 24  # of a whole bar


def show_profile(console: Console, watch: Stopwatch) -> None:
    """Print the seconds per round of every part, and their shares."""
    if not watch.rounds:
        console.print("no round was played: there is nothing to profile")
        return
    total = max(sum(watch.seconds.values()), 1e-9)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, title_justify="left",
                  title=f"where the time went: {duration(total)} in {times(watch.rounds, 'round')}",
                  title_style="")
    table.add_column("part", no_wrap=True)
    for heading in ("a round", "share"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    table.add_column("what it is")
    for part, what in PARTS.items():
        share = watch.seconds[part] / total
        table.add_row(part, duration(watch.seconds[part] / watch.rounds), f"{share:.1%}",
                      "█" * round(share * WIDTH), what)
    console.print(Group("", table))

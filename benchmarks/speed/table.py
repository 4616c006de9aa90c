"""The figures of a benchmark for the terminal."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.speed.contest import FLOOR, LEAN
from descant.core.units import size, times


def show_case(console: Console, case: dict[str, Any], repetitions: int) -> None:
    """All sides of one case."""
    few = 0 < case["evaluated_clients"] < case["clients"]
    table = _table(f"{case['method']} on {case['model']} ({times(case['parameters'], 'parameter')}): "
                   f"{times(case['cohort'], 'client')} x {case['batches_per_round']} batches, "
                   f"{case['grad_steps_per_round']:,} gradient steps; median of {repetitions}"
                   f"{', evaluation from ' + times(case['evaluated_clients'], 'client') if few else ''}")
    table.add_column("side", no_wrap=True)
    for heading in ("µs per\nstep", "times as fast\nas lean loop", "times the\nfloor",
                    f"ms to score\n{times(case['clients'], 'client')}", "share of\na round", "peak\nmemory"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, side in case["sides"].items():
        share = side.get("evaluation_share_of_round")
        table.add_row(
            name, _digits(side["us_per_step"]),
            "" if name in (LEAN, FLOOR) else f"{side['times_as_fast_as_lean_loop']:.2f}",
            "" if name == FLOOR else _ratio(side["times_the_floor"]),
            _digits(side["evaluation_ms"]) if "evaluation_ms" in side else "",
            "" if share is None or name == FLOOR else f"{share:.0%}",
            "" if side["peak_memory_bytes"] is None else size(side["peak_memory_bytes"]))
    console.print(table)
    notes = {name: side["note"] for name, side in case["sides"].items() if side["note"]}
    console.print("; ".join(f"{name}: {note}" for name, note in notes.items()) + "\n")


def show_growth(console: Console, growth: dict[str, list[dict[str, Any]]]) -> None:
    """The points of the growth curves."""
    for curve, found in growth.items():
        names = list(found[0]["sides"])
        table = _table(f"growing {curve}: µs per gradient step of {found[0]['method']}, and peak memory")
        table.add_column(curve, justify="right", no_wrap=True)
        for name in names:
            table.add_column(name, justify="right", no_wrap=True)
        for point in found:
            cells = []
            for name in names:
                side = point["sides"][name]
                memory = "" if side["peak_memory_bytes"] is None else f"  {size(side['peak_memory_bytes'])}"
                cells.append(f"{_digits(side['us_per_step'])}{memory}")
            table.add_row(f"{point['at']:,}", *cells)
        console.print(table)
        console.print()


def show_summary(console: Console, cases: list[dict[str, Any]]) -> None:
    """What a user gets without asking, in a line for each case."""
    found = [case for case in cases if "auto" in case["sides"]]
    if not found:
        return
    table = _table('in short: descant as it comes (backend "auto")')
    for heading in ("method", "model"):
        table.add_column(heading, no_wrap=True)
    for heading in ("times as fast\nas lean loop", "times the\nfloor"):
        table.add_column(heading, justify="right", no_wrap=True)
    for case in found:
        side = case["sides"]["auto"]
        table.add_row(case["method"], case["model"], f"{side['times_as_fast_as_lean_loop']:.2f}",
                      _ratio(side["times_the_floor"]))
    console.print(table)
    console.print()


def _table(title: str) -> Table:
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, title_justify="left",
                 title=title, title_style="")


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"

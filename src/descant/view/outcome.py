"""What came of a federation: each client's model beside the shared one, and beside what it learned alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from descant.core.metric import LOWER, figure, is_share, usual
from descant.view.display import printable

WHO = {"alone": "alone", "shared": "shared model", "personal": "personal model"}

Figures = Mapping[str, Mapping[str, float | None]]  # {"personal": {"accuracy": 0.9, ...}, ...}


def show_outcome(console: Console, names: Sequence[str], served: Mapping[str, Figures], directory: Path
                 ) -> None:
    """For the server: the figures of all who have their model, and where things are."""
    rows = {name: served[name] for name in dict.fromkeys([*names, *served]) if name in served}
    if rows:
        metric = _metric(next(iter(rows.values())))
        console.print(f"\n{metric} on the clients' own test rows, in the round that is best on their "
                      "validation rows", soft_wrap=True)
        console.print(_all(rows, metric, names))
        console.print()
    for label, text in {
        "personal models": "with the clients: model.safetensors in the directory of each",
        "figures": directory / "clients.json",
        "run": directory / "run",
    }.items():
        console.print(f"{label:<17}{text}", soft_wrap=True)


def show_own(console: Console, figures: Figures) -> None:
    """For a client."""
    present = [who for who in WHO if who in figures]
    table = _table("on the test rows here", present)
    for metric in figures.get("personal", {}):
        table.add_row(metric, *_cells(figures, metric, present))
    console.print(table)


def worth(figures: Figures) -> str:
    """In a few words."""
    metric = _metric(figures)
    values = [f"{who} {figure(metric, figures[who].get(metric))}" for who in WHO if who in figures]
    return f"{metric} {', '.join(values)}"


def _metric(figures: Figures) -> str:
    return usual({name for table in figures.values() for name in table})


def _all(rows: Mapping[str, Figures], metric: str, members: Collection[str]) -> Table:
    present = [who for who in WHO if any(who in row for row in rows.values())]
    table = _table("client", present)
    for name, row in rows.items():
        label = name if name in members else f"{name} (newcomer)"
        table.add_row(Text(printable(label)), *_cells(row, metric, present))
    if len(rows) > 1:
        table.add_section()
        others = [other for other in next(iter(rows.values())).get("personal", {}) if other != "loss"]
        for other in dict.fromkeys([metric, *others]):
            label = "mean" if other == metric else f"mean {other}"
            table.add_row(Text(printable(label)), *_cells(_means(rows.values(), other), other, present))
    return table


def _table(first: str, present: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column(first, no_wrap=True)
    for heading in [*(WHO[who] for who in present), *(["gain over alone"] if "alone" in present else [])]:
        table.add_column(heading, no_wrap=True, justify="right")
    return table


def _cells(row: Figures, metric: str, present: Sequence[str]) -> list[str]:
    cells = [figure(metric, row.get(who, {}).get(metric)) for who in present]
    return [*cells, _gain(row, metric)] if "alone" in present else cells


def _gain(row: Figures, metric: str) -> str:
    """By how much the personal model is better than what the client learned alone."""
    personal, alone = (row.get(who, {}).get(metric) for who in ("personal", "alone"))
    if personal is None or alone is None:
        return "-"
    gain = alone - personal if metric in LOWER else personal - alone
    return f"{gain:+.4f}" if is_share(metric) else f"{gain:+.3g}"


def _means(rows: Iterable[Figures], metric: str) -> Figures:
    """Over the clients that have a figure, each counting the same."""
    values: dict[str, list[float]] = {who: [] for who in WHO}
    for row in rows:
        for who in WHO:
            if (value := row.get(who, {}).get(metric)) is not None:
                values[who].append(value)
    return {who: {metric: math.fsum(found) / len(found) if found else None} for who, found in values.items()}

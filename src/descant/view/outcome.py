"""What came of a federation: each client's model beside the shared one, and beside what it learned alone."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from descant.core.metric import LOWER, figure, is_share, usual
from descant.view.display import printable
from descant.view.tables import table

WHO = {"alone": "alone", "shared": "shared model", "personal": "personal model"}

Figures = Mapping[str, Mapping[str, float | None]]  # {"personal": {"accuracy": 0.9, ...}, ...}


def show_outcome(console: Console, names: Sequence[str], served: Mapping[str, Figures], directory: Path
                 ) -> None:
    """For the server: the figures of all who have their model, and where things are."""
    rows = {name: served[name] for name in dict.fromkeys([*names, *served]) if name in served}
    if any(rows.values()):
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
    console.print(_table("on the test rows here", present, [
        [metric, *_cells(figures, metric, present)] for metric in figures.get("personal", {})]))


def worth(figures: Figures) -> str:
    """In a few words."""
    if not figures:
        return "its figures stay there"
    metric = _metric(figures)
    values = [f"{who} {figure(metric, figures[who].get(metric))}" for who in WHO if who in figures]
    return f"{metric} {', '.join(values)}"


def _metric(figures: Figures) -> str:
    return usual({name for table in figures.values() for name in table})


def _all(rows: Mapping[str, Figures], metric: str, members: Collection[str]) -> Table:
    present = [who for who in WHO if any(who in row for row in rows.values())]
    lines: list[Sequence[RenderableType] | None] = []
    for name, row in rows.items():
        label = name if name in members else f"{name} (newcomer)"
        lines.append([Text(printable(label)), *_cells(row, metric, present)])
    if len(rows) > 1:
        lines.append(None)
        others = [other for other in next(iter(rows.values())).get("personal", {}) if other != "loss"]
        for other in dict.fromkeys([metric, *others]):
            label = "mean" if other == metric else f"mean {other}"
            lines.append([Text(printable(label)), *_cells(_means(rows.values(), other), other, present)])
    return _table("client", present, lines)


def _table(first: str, present: Sequence[str], rows: Iterable[Sequence[RenderableType] | None]) -> Table:
    heads = [first, *(WHO[who] for who in present), *(["gain over alone"] if "alone" in present else [])]
    return table("l" + "r" * (len(heads) - 1), heads, rows)


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


def _means(rows: Collection[Figures], metric: str) -> Figures:
    """Over the clients that have a figure, each counting the same."""
    values = {who: [value for row in rows if (value := row.get(who, {}).get(metric)) is not None]
              for who in WHO}
    return {who: {metric: math.fsum(found) / len(found) if found else None} for who, found in values.items()}

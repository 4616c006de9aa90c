"""What a run came to, as a table for the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table

from descant.core.units import duration, figure, size, times

SPREAD = {"mean": "mean", "weighted": "weighted", "std": "std", "worst_decile": "worst 10%"}


def metrics(scores: dict[str, Any], deciding: str) -> list[str]:
    """The metrics worth showing: the one that decides; then accuracy, or whatever there is without it."""
    names = list(scores["test"])
    return [*dict.fromkeys([deciding, *(["accuracy"] if "accuracy" in names else names)])]


def show_summary(console: Console, summary: dict[str, Any], directory: Path | None) -> None:
    """Print the figures of the last and the best round, and what the run cost."""
    console.print(Group("", _figures(summary), "", _facts(summary)))
    if directory is not None:  # apart, unwrapped: paths are to be copied
        clusters = directory / "clusters.png"
        drawn = {"curve": directory / "curve.png"} | ({"clusters": clusters} if clusters.exists() else {})
        for label, path in (drawn | {"directory": directory}).items():
            console.print(f"{label:<16}{path}", soft_wrap=True)


def _figures(summary: dict[str, Any]) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, title_justify="left",
                  title=f"on the clients' own test data (best: by {summary['metric'].replace('_', ' ')} on "
                        "validation data)", title_style="")
    for heading in ("round", "model", "metric"):
        table.add_column(heading, no_wrap=True)
    for heading in (*SPREAD.values(), "pooled"):
        table.add_column(heading, justify="right", no_wrap=True)
    for which in ("last", "best"):
        row = summary[which]
        if row is None:
            continue
        label = f"{which}, {row['round']}"
        for model in ("personal", "global"):
            for metric in metrics(row[model], summary["metric"]) if model in row else ():
                spread = row[model]["test"][metric]
                pooled = row[model].get("pooled")
                cells = [figure(metric, spread[key]) for key in SPREAD]
                table.add_row(label, model, metric, *cells,
                              "" if pooled is None or metric not in pooled else
                              figure(metric, pooled[metric]))
                label = ""
        table.add_section()
    return table


def _facts(summary: dict[str, Any]) -> RenderableType:
    facts = {"clients": _clients(summary)}
    if summary["last"] is not None and (failed := summary["last"]["personal"]["failed"]):
        facts["not scored"] = f"{times(failed, 'client')} in the last round"
    if told := _diverged(summary):
        facts["diverged"] = told
    facts |= {
        "rejected": times(summary["rejected"], "upload"),
        "gradient steps": f"{summary['grad_steps']:,}",
        "traffic": f"{size(summary['bytes_down'])} down, {size(summary['bytes_up'])} up",
        "time": duration(summary["seconds"]),
    }
    if summary["stopped"] is not None:
        facts["stopped"] = f"after round {summary['rounds']}: the validation figures no longer improve"
    if summary["best"] is None:
        facts["best round"] = "none: there is no validation data to choose it by"
    grid = Table.grid(padding=(0, 2))
    grid.add_column(min_width=14)
    grid.add_column()
    for name, value in facts.items():
        grid.add_row(name, value)
    return grid


def _diverged(summary: dict[str, Any]) -> str:
    """Whose models have, in the last and in the best round."""
    found = {which: summary[which]["personal"]["diverged"] for which in ("last", "best")
             if summary[which] is not None}
    if not any(found.values()):
        return ""
    words = ", ".join(f"{times(count, 'client')} in the {which} round" for which, count in found.items())
    first = summary["divergence"]
    return words if first is None else f"{words}; first seen in round {first['round']}"


def _clients(summary: dict[str, Any]) -> str:
    if summary["last"] is None:
        return f"{summary['clients']:,}"
    scored = summary["last"]["personal"]
    newcomers = f"{times(scored['newcomers'], 'newcomer')} (never took part)"
    if scored["clients"] == summary["clients"]:
        return f"{summary['clients']:,}, of them {newcomers}"
    return f"{summary['clients']:,}; {scored['clients']:,} evaluated, of them {newcomers}"

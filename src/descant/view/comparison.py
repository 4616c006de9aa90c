"""A comparison as a table for the terminal, and as the picture comparison.png."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from descant.comparison import conclusions, page
from descant.comparison.plan import Plan
from descant.comparison.plan import read as read_plan
from descant.comparison.results import Results
from descant.comparison.table import Column, cell, columns
from descant.core.files import write_atomic
from descant.core.metric import is_share
from descant.errors import UsageError
from descant.experiment.plots import png, tidy
from descant.view.charts import DAY, VERDICTS, Look, look, prepare
from descant.view.page import render
from descant.view.tables import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GREY, LIGHT = "#5B636E", "#C3C8CE"
ROW = 0.27  # inches of a method's line in the panel of differences, and in the legend


def show_comparison(console: Console, results: Results) -> None:
    """Print the table, and the answer in words."""
    shown = columns(results)
    made, left_out = _table(results, shown), []
    room = console.options.update(width=1000)  # to measure how wide it would be
    while console.measure(made, options=room).maximum > console.width and len(shown) > 1:
        left_out.append(shown.pop().title)  # the least important column is the last
        made = _table(results, shown)
    console.print(made)
    if left_out:
        console.print(f"in results.csv, or in a wider terminal: {', '.join(reversed(left_out))}")
    console.print()
    for sentence in (*conclusions.answer(results), *conclusions.paper(results)):
        console.print(sentence, soft_wrap=not console.is_terminal)
    for note in conclusions.notes(results):
        console.print(f"note: {note}", soft_wrap=not console.is_terminal)


def _table(results: Results, shown: list[Column]) -> Table:
    rows = [[row.label, *(cell(column.key, row.figures.get(column.key), results.metric) for column in shown),
             f"{row.rounds:,}"] for row in results.rows]
    best = next((k for k, row in enumerate(results.rows) if row.label == results.best), None)
    heads = ["method", *(column.title for column in shown), "rounds"]
    return table("l" + "r" * (len(shown) + 1), heads, rows,
                 title=f"test {results.metric.replace('_', ' ')} on the clients' own rows, mean over the "
                       "repetitions ± 95 % interval", bold=best)


def draw_comparison(data: dict[str, Any], path: Path) -> None:
    write_atomic(path, png(comparison_figure(data)))


def comparison_figure(data: dict[str, Any]) -> Figure:
    """Draw the page data of a comparison: curves against gradient steps and rounds; the lead of the best
    method over each other one; and the metric against the fields of a grid, if there is one."""
    from matplotlib.figure import Figure  # slow: only when there is something to draw
    from matplotlib.lines import Line2D

    data = prepare(data)
    fields = list(dict.fromkeys(grid["field"] for grid in data["grids"]))
    panels = 2 + bool(data["differences"]) + len(fields)
    legend = ROW * -(-len(data["methods"]) // (2 * panels))
    height = max(4.2, 1.3 + ROW * len(data["differences"]))
    canvas = Figure(figsize=(5.5 * panels, height + legend + 0.5), layout="constrained")
    canvas.suptitle(data["title"], fontsize=12, parse_math=False)
    left, right, *more = canvas.subplots(1, panels)
    right.sharey(left)
    _draw_curves(left, right, data)
    labels = [method["label"] for method in data["methods"]]
    handles = [Line2D([], [], **_style(own, label in data["in_front"]))
               for own, label in zip(data["looks"], labels, strict=True)]
    for text in canvas.legend(handles, [_short(label) for label in labels], loc="outside lower center",
                              ncols=2 * panels, fontsize=9, frameon=False).get_texts():
        text.set_parse_math(False)
    if data["differences"]:
        _draw_differences(more.pop(0), data)
    for axes, field in zip(more, fields, strict=True):
        _draw_grid(axes, field, [grid for grid in data["grids"] if grid["field"] == field], _looks(data))
    tidy(canvas.axes)
    return canvas


def draw(plan: Plan) -> None:
    """Write the picture and the page of a comparison."""
    data = page.page_data(plan.out, plan=plan)
    draw_comparison(data, plan.out / "comparison.png")
    write_atomic(plan.out / "report.html", render(data))


def write_page(directory: Path, out: Path | None) -> tuple[Path, int]:
    """Write the page of a comparison; returns where, and of how many bytes."""
    read_plan(directory)  # which says if there is no comparison
    path = directory / "report.html" if out is None else out
    if path.is_dir():
        raise UsageError(f"--out {path} is a directory: name a file, such as {path / 'report.html'}")
    if not path.parent.is_dir():
        raise UsageError(f"--out {path}: there is no directory {path.parent}; make it first")
    content = render(page.page_data(directory))
    write_atomic(path, content)
    return path, len(content)


def _looks(data: dict[str, Any]) -> dict[str, Look]:
    return {method["label"]: own for method, own in zip(data["methods"], data["looks"], strict=True)}


def _style(own: Look, is_front: bool = True) -> dict[str, Any]:
    return {"color": DAY[own.colour] if is_front else LIGHT, "marker": own.mark.matplotlib, "markersize": 5,
            "linestyle": (0, tuple(length / 2 for length in own.dash)) if own.dash else "-"}


def _short(label: str) -> str:
    return label if len(label) <= 28 else f"{label[:27]}…"


def _draw_curves(left: Any, right: Any, data: dict[str, Any]) -> None:
    from matplotlib.ticker import EngFormatter

    seen = []
    for own, method in zip(data["looks"], data["methods"], strict=True):
        if (curve := data["curves"].get(method["label"])) is None:
            continue
        is_front = method["label"] in data["in_front"]
        mean, low, high = (np.array(curve["personal"][end], float) for end in ("mean", "low", "high"))
        style = _style(own, is_front) | {"markevery": max(1, len(mean) // 7), "linewidth": 1.6}
        if not is_front:
            style |= {"marker": "", "linewidth": 1, "zorder": 1}
        for axes, key in ((left, "steps"), (right, "round")):
            axes.plot(curve[key], mean, **style)
            if is_front:
                axes.fill_between(curve[key], low, high, color=style["color"], alpha=0.12, linewidth=0)
        seen += [value for value in mean if is_front and value == value]
    left.set(xlabel="gradient steps", ylabel=data["y_title"]["personal"])
    left.xaxis.set_major_formatter(EngFormatter(sep=""))
    right.set(xlabel="round")
    left.set_title(data["instead"], fontsize=9, color=GREY, parse_math=False)
    if not data["curves"]:
        for axes in (left, right):
            axes.text(0.5, 0.5, "no round has been evaluated", transform=axes.transAxes, ha="center",
                      color=GREY)
    elif data["log_y"]["personal"]:
        left.set_yscale("log")
    elif len(data["in_front"]) < len(data["methods"]) and seen:  # grey lines may leave the axis
        room = 0.05 * (max(seen) - min(seen)) or 0.5
        left.set_ylim(min(seen) - room, max(seen) + room)


def _draw_differences(axes: Any, data: dict[str, Any]) -> None:
    """The deciding intervals of the best method against each other one, with the verdicts."""
    factor, unit = (100, " (points)") if is_share(data["metric"]) else (1, "")
    rows = data["differences"]
    looks = _looks(data)
    for at, row in enumerate(rows):
        beside = {"xycoords": ("axes fraction", "data"), "fontsize": 8, "va": "center", "color": GREY}
        axes.annotate(VERDICTS[row["verdict"]].words, (1.02, at), **beside)
        if row["verdict"] == "diverged" or row["mean"] is None:
            axes.annotate("off the scale", (0.98, at), **beside, ha="right")
            continue
        if row["low"] is not None and row["high"] is not None:
            axes.plot([factor * row["low"], factor * row["high"]], [at, at], color=GREY, linewidth=2.2,
                      solid_capstyle="butt")
        own = looks.get(row["against"], data["looks"][0])
        axes.plot([factor * row["mean"]], [at], **_style(own) | {"linestyle": "", "markersize": 7})
    axes.axvline(0, color=GREY, linewidth=1)
    axes.set_yticks(range(len(rows)), [_short(row["against"]) for row in rows], parse_math=False, fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel(f"lead in {data['metric'].replace('_', ' ')}{unit}")
    axes.set_title(f"{_short(rows[0]['label'])} against each, simultaneous {data['confidence']} intervals",
                   fontsize=9, parse_math=False)


def _draw_grid(axes: Any, field: str, lines: list[dict[str, Any]], looks: dict[str, Look]) -> None:
    """The metric against a hyper-parameter, with intervals over the seeds."""
    numeric = all(isinstance(value, int | float) for line in lines for value in line["values"])
    for place, line in enumerate(lines):
        at = line["values"] if numeric else [str(value) for value in line["values"]]
        reach = [0.0 if high is None else high - mean
                 for mean, high in zip(line["mean"], line["high"], strict=True)]
        axes.errorbar(at, line["mean"], yerr=reach, label=line["label"], capsize=3,
                      **_style(looks.get(line["label"], look(place))))
    if numeric and min(value for line in lines for value in line["values"]) > 0:
        axes.set_xscale("log")
    axes.set(xlabel=field)
    axes.legend(fontsize=8)

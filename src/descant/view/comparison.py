"""Several methods in one table and in one picture."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from descant.core.files import write_atomic
from descant.core.units import is_share
from descant.view.curve import spans_decades
from descant.view.looks import DAY, in_front, look
from descant.view.page_differences import VERDICTS

if TYPE_CHECKING:
    from descant.comparison.results import Results
    from descant.view.comparison_table import Column

GREY, LIGHT = "#5B636E", "#C3C8CE"
ROW = 0.27  # inches of a method's line in the panel of differences, and in the legend


def show_comparison(console: Console, results: Results) -> None:
    """The table, and the answer in words."""
    from descant.comparison import conclusions as words
    from descant.view.comparison_table import columns

    shown = columns(results)
    table, left_out = _table(results, shown), []
    room = console.options.update(width=1000)  # to see how wide it would like to be
    while console.measure(table, options=room).maximum > console.width and len(shown) > 1:
        left_out.append(shown.pop().title)  # what matters less is further to the right
        table = _table(results, shown)
    console.print(table)
    if left_out:
        console.print(f"in results.csv, or in a wider terminal: {', '.join(reversed(left_out))}")
    console.print()
    for sentence in words.answer(results):
        console.print(sentence, soft_wrap=not console.is_terminal)
    for note in words.notes(results):
        console.print(f"note: {note}", soft_wrap=not console.is_terminal)


def _table(results: Results, shown: list[Column]) -> Table:
    from descant.view.comparison_table import cell

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, title_justify="left",
                  title=f"test {results.metric.replace('_', ' ')} on the clients' own rows, mean over the "
                        "repetitions ± 95 % interval", title_style="")
    for title, justify in (("method", "left"), *((column.title, "right") for column in shown),
                           ("rounds", "right")):
        table.add_column(title, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for row in results.rows:
        table.add_row(row.label, *(cell(column.key, row.figures.get(column.key), results.metric)
                                   for column in shown), f"{row.rounds:,}",
                      style="bold" if row.label == results.best else None)
    return table


def draw_comparison(data: dict[str, Any], path: Path) -> None:
    """Test figures of the personal models against gradient steps and against rounds, with the range over the
    seeds; how far the best method is ahead of each other one, with the intervals that decide; and the figures
    against the fields of a grid, if there is one. `data` is that of the report's page."""
    from matplotlib.figure import Figure  # slow: only when there is something to draw

    fields = list(dict.fromkeys(grid["field"] for grid in data["grids"]))
    panels = 2 + bool(data["differences"]) + len(fields)
    legend = ROW * -(-len(data["methods"]) // (2 * panels))
    height = max(4.2, 1.3 + ROW * len(data["differences"]))
    canvas = Figure(figsize=(5.5 * panels, height + legend + 0.5), layout="constrained")
    canvas.suptitle(data["title"], fontsize=12, parse_math=False)
    left, right, *more = canvas.subplots(1, panels)
    right.sharey(left)
    _draw_curves(left, right, data)
    handles = [_handle(data, place) for place in range(len(data["methods"]))]
    names = [_short(method["label"]) for method in data["methods"]]
    for text in canvas.legend(handles, names, loc="outside lower center", ncols=2 * panels, fontsize=9,
                              frameon=False).get_texts():
        text.set_parse_math(False)
    if data["differences"]:
        _draw_differences(more.pop(0), data)
    for axes, field in zip(more, fields, strict=True):
        _draw_grid(axes, field, [grid for grid in data["grids"] if grid["field"] == field])
    for axes in canvas.axes:
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="png", dpi=130, metadata={"Software": None})
    write_atomic(path, buffer.getvalue())


def _style(place: int) -> dict[str, Any]:
    """A method's line, as on the page."""
    colour, dash, mark = look(place)
    return {"color": DAY[colour], "marker": mark.matplotlib, "markersize": 5,
            "linestyle": (0, tuple(length / 2 for length in dash)) if dash else "-"}


def _handle(data: dict[str, Any], place: int) -> Any:
    from matplotlib.lines import Line2D

    is_front = data["methods"][place]["label"] in in_front(data)
    return Line2D([], [], **_style(place) | ({} if is_front else {"color": LIGHT}))


def _short(label: str) -> str:
    return label if len(label) <= 28 else f"{label[:27]}…"


def _draw_curves(left: Any, right: Any, data: dict[str, Any]) -> None:
    """Of many methods, the best and the baselines are in colour."""
    from matplotlib.ticker import EngFormatter

    front, every, seen = in_front(data), [], []
    for place, method in enumerate(data["methods"]):
        label = method["label"]
        if (curve := data["curves"].get(label)) is None:
            continue
        is_front = label in front
        values = {end: [float("nan") if v is None else v for v in curve["personal"][end]]
                  for end in ("mean", "low", "high")}
        every += values["mean"]
        seen += values["mean"] if is_front else []
        style = _style(place) | {"markevery": max(1, len(values["mean"]) // 7)}
        if not is_front:
            style |= {"color": LIGHT, "marker": "", "linewidth": 1, "zorder": 1}
        for axes, key in ((left, "steps"), (right, "round")):
            axes.plot(curve[key], values["mean"], **{"linewidth": 1.6} | style)
            if is_front:
                axes.fill_between(curve[key], values["low"], values["high"], color=style["color"], alpha=0.12,
                                  linewidth=0)
    metric = data["curve_metric"].replace("_", " ")
    left.set(xlabel="gradient steps", ylabel=f"test {metric} of the personal models")
    left.xaxis.set_major_formatter(EngFormatter(sep=""))
    right.set(xlabel="round")
    if data["curve_metric"] != data["metric"]:
        missing = data["metric"].replace("_", " ")
        left.set_title(f"the rounds do not record {missing}: the {metric} in its place", fontsize=9,
                       color=GREY)
    if not data["curves"]:
        for axes in (left, right):
            axes.text(0.5, 0.5, "no round has been evaluated", transform=axes.transAxes, ha="center",
                      color=GREY)
    elif (data["lower_is_better"] or data["curve_metric"] != data["metric"]) and spans_decades(every):
        left.set_yscale("log")
    elif len(front) < len(data["methods"]) and (known := [value for value in seen if value == value]):
        room = 0.05 * (max(known) - min(known)) or 0.5
        left.set_ylim(min(known) - room, max(known) + room)


def _draw_differences(axes: Any, data: dict[str, Any]) -> None:
    """The intervals that decide, best method against each other one, with the verdicts."""
    factor, unit = (100, " (points)") if is_share(data["metric"]) else (1, "")
    rows = data["differences"]
    places = {method["label"]: k for k, method in enumerate(data["methods"])}
    drawn = [row for row in rows if row["verdict"] != "diverged" and row["mean"] is not None]
    for row in drawn:
        at = rows.index(row)
        if row["low"] is not None and row["high"] is not None:
            axes.plot([factor * row["low"], factor * row["high"]], [at, at], color=GREY, linewidth=2.2,
                      solid_capstyle="butt")
        axes.plot([factor * row["mean"]], [at], **_style(places.get(row["against"], 0)) | {
            "linestyle": "", "markersize": 7})
    axes.axvline(0, color=GREY, linewidth=1)
    for at, row in enumerate(rows):
        verdict = VERDICTS[row["verdict"]]
        axes.annotate(verdict.words, (1.02, at), xycoords=("axes fraction", "data"), fontsize=8, va="center",
                      color=GREY)
        if row not in drawn:
            axes.annotate("off the scale", (0.98, at), xycoords=("axes fraction", "data"), fontsize=8,
                          va="center", ha="right", color=GREY)
    axes.set_yticks(range(len(rows)), [_short(row["against"]) for row in rows], parse_math=False, fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel(f"{data['metric'].replace('_', ' ')}: how far ahead{unit}")
    axes.set_title(f"{_short(rows[0]['label'])} against each, simultaneous 95 % intervals", fontsize=9,
                   parse_math=False)


def _draw_grid(axes: Any, field: str, lines: list[dict[str, Any]]) -> None:
    """What a setting does, with the intervals over the seeds."""
    numeric = all(isinstance(value, int | float) for line in lines for value in line["values"])
    for place, line in enumerate(lines):
        at = line["values"] if numeric else [str(value) for value in line["values"]]
        reach = [0.0 if high is None else high - mean
                 for mean, high in zip(line["mean"], line["high"], strict=True)]
        axes.errorbar(at, line["mean"], yerr=reach, label=line["label"], capsize=3, **_style(place))
    if numeric and min(value for line in lines for value in line["values"]) > 0:
        axes.set_xscale("log")
    axes.set(xlabel=field)
    axes.legend(fontsize=8)

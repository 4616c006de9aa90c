"""Several methods in one table and in one picture."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from descant.files import write_atomic

if TYPE_CHECKING:
    from descant.comparison.results import Results
    from descant.comparison.table import Column

# Okabe and Ito's colours, told apart by people with any colour vision; then the same, dashed
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def show_comparison(console: Console, results: Results) -> None:
    """The table, and the answer in words."""
    from descant.comparison import words
    from descant.comparison.table import columns

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
    from descant.comparison.table import cell

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, title_justify="left",
                  title=f"test {results.metric.replace('_', ' ')} on the clients' own rows, mean over seeds "
                        "± 95 % interval", title_style="")
    for title, justify in (("method", "left"), *((column.title, "right") for column in shown),
                           ("rounds", "right")):
        table.add_column(title, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for row in results.rows:
        name = f"[bold]{escape(row.label)}[/bold]" if row.label == results.best else escape(row.label)
        table.add_row(name, *(cell(column.key, row.figures.get(column.key), results.metric)
                              for column in shown), f"{row.rounds:,}")
    return table


def draw_comparison(data: dict[str, Any], path: Path) -> None:
    """Test figures of the personal models against gradient steps and against rounds, with the range over the
    seeds; and against the fields of a grid, if there is one. `data` is that of the report's page."""
    from matplotlib.figure import Figure  # slow: only when there is something to draw

    grids = data["grids"]
    panels = 2 + len({grid["field"] for grid in grids})
    canvas = Figure(figsize=(5.5 * panels, 4.2), layout="constrained")
    left, right, *more = canvas.subplots(1, panels, sharey=True)
    styles = itertools.cycle(itertools.product(("-", "--", ":"), COLOURS))
    for (label, curve), (style, colour) in zip(data["curves"].items(), styles, strict=False):
        values = {end: [float("nan") if v is None else v for v in curve["personal"][end]]
                  for end in ("mean", "low", "high")}
        for axes, key in ((left, "steps"), (right, "round")):
            axes.plot(curve[key], values["mean"], style, color=colour, label=label, linewidth=1.5)
            axes.fill_between(curve[key], values["low"], values["high"], color=colour, alpha=0.15,
                              linewidth=0)
    metric = data["curve_metric"].replace("_", " ")
    left.set(xlabel="gradient steps", ylabel=f"test {metric} of the personal models")
    right.set(xlabel="round")
    if data["curves"]:
        right.legend(fontsize=8)
    for axes, field in zip(more, dict.fromkeys(grid["field"] for grid in grids), strict=True):
        _draw_grid(axes, field, [grid for grid in grids if grid["field"] == field])
    for axes in canvas.axes:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="png", dpi=130, metadata={"Software": None})
    write_atomic(path, buffer.getvalue())


def _draw_grid(axes: Any, field: str, lines: list[dict[str, Any]]) -> None:
    """What a setting does, with the intervals over the seeds."""
    numeric = all(isinstance(value, int | float) for line in lines for value in line["values"])
    for line, colour in zip(lines, itertools.cycle(COLOURS), strict=False):
        at = line["values"] if numeric else [str(value) for value in line["values"]]
        reach = [0.0 if high is None else high - mean
                 for mean, high in zip(line["mean"], line["high"], strict=True)]
        axes.errorbar(at, line["mean"], yerr=reach, color=colour, label=line["label"], marker="o", capsize=3)
    if numeric and min(value for line in lines for value in line["values"]) > 0:
        axes.set_xscale("log")
    axes.set(xlabel=field)
    axes.legend(fontsize=8)

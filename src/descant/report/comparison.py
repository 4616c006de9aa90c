"""Several methods in one table and one picture."""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from descant.files import write_atomic
from descant.units import duration, figure, size

if TYPE_CHECKING:
    from descant.experiment.compare import Row

# Okabe and Ito's colours, told apart by people with any colour vision; then the same, dashed
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
HEADINGS = {"personal": "personal", "personal_best": "at best val.", "worst_decile": "worst 10%",
            "global": "global", "personal_truth_error": "error to truth"}


def show_comparison(console: Console, rows: list[Row]) -> None:
    """Means over the seeds, with standard deviations; the methods in the order of the file."""
    known = [key for key in HEADINGS if any(key in row.figures for row in rows)]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, title_justify="left",
                  title=f"test {rows[0].metric} on the clients' own data, mean over seeds (std)",
                  title_style="")
    table.add_column("method", no_wrap=True)
    for heading in (*(HEADINGS[key] for key in known), "seeds", "rounds", "steps", "per client", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cells = []
        for key in known:
            mean, std = row.figures.get(key, (None, None))
            metric = "error" if key.endswith("error") else row.metric
            cells.append("-" if mean is None else f"{figure(metric, mean)} ({figure(metric, std)})")
        table.add_row(row.label, *cells, str(row.seeds), f"{row.rounds:,}", f"{row.grad_steps:,.0f}",
                      size(round(row.bytes_per_client)), duration(row.seconds))
    console.print(table)


def draw_comparison(histories: dict[str, list[list[dict[str, Any]]]], metric: str, path: Path) -> None:
    """Test figures of the personal models against gradient steps and against rounds; bands over the seeds."""
    canvas = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = canvas.subplots(1, 2, sharey=True)
    styles = itertools.product(("-", "--", ":"), COLOURS)
    for (label, seeds), (style, colour) in zip(histories.items(), styles, strict=False):
        common = min(len(history) for history in seeds)  # one of the runs may have been extended
        seeds = [history[:common] for history in seeds]
        rows = [[row for row in history if "personal" in row] for history in seeds]
        values = np.array([[row["personal"]["test"][metric]["mean"] for row in each] for each in rows], float)
        steps = np.mean([np.cumsum([row["grad_steps"] for row in history]) for history in seeds], 0)
        numbers = np.array([row["round"] for row in rows[0]])
        for axes, at in ((left, steps[numbers - 1]), (right, numbers)):
            axes.plot(at, values.mean(0), color=colour, linestyle=style, label=label)
            axes.fill_between(at, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0)
    left.set(xlabel="gradient steps of all clients", ylabel=f"test {metric} of the personal models")
    right.set(xlabel="round")
    right.legend(fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="png", dpi=130, metadata={"Software": None})
    write_atomic(path, buffer.getvalue())

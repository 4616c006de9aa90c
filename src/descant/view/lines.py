"""A picture of lines with standard errors, as studies of papers draw them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from descant.core.files import write_atomic
from descant.experiment.plots import png, tidy
from descant.view.charts import DAY


def lines(table: Mapping[str, Sequence[Sequence[float]]], at: Sequence[float], path: Path, *, x: str, y: str,
          log: bool = False) -> None:
    """A line for each entry of [points][repetitions], with standard errors."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for k, (label, values) in enumerate(table.items()):
        means = [np.mean(each) for each in values]
        errors = [np.std(each, ddof=1) / len(each) ** 0.5 if len(each) > 1 else 0.0 for each in values]
        axes.errorbar(at, means, errors, color=DAY[k % len(DAY)], label=label, marker="o", markersize=3,
                      capsize=2)
    axes.set(xlabel=x, ylabel=y)
    if log:
        axes.set(xscale="log", yscale="log")
    axes.legend(fontsize=8)
    tidy([axes])
    write_atomic(path, png(figure))

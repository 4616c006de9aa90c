"""The columns of the table of a comparison, and the text of its cells (room: view)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from descant.comparison.results import Results
from descant.comparison.rows import COSTS, MAIN
from descant.comparison.statistics import Interval
from descant.core.metric import figure, is_share
from descant.core.metric import title as title_of
from descant.core.units import duration, size

ERROR = "personal_truth_error"
TITLES = {
    "paper": ("paper", "what the paper has, {source}, by {metric}"),
    "paper_difference": ("difference", "ours less the paper's figure, at what it stands for"),
    "personal": ("personal", "{metric} of the clients' own models on their own test rows, mean over the "
                             "clients, at the round that is best on validation data; this interval covers "
                             "the population of the answer, those of other columns the repetitions"),
    "global": ("global", "the same for the global model, where the method has one"),
    "worst_decile": ("worst 10%", "the same as personal, over the worst tenth of the clients"),
    "gain": ("gain", "the mean gain of a client over training alone"),
    "worse_off": ("worse off", "share of the clients that do worse than by training alone"),
    "unseen": ("unseen", "the same as personal, over the clients that were held out of training"),
    ERROR: ("error to truth", "squared distance of the clients' models from those that made the data"),
    "epsilon": ("epsilon", "what the uploads reveal at most of any row, or client, that [privacy] protects"),
    "bytes_per_client": ("per client", "bytes that a client has received and sent in all"),
    "grad_steps": ("steps", "gradient steps of training, of all clients together"),
    "seconds": ("time", "of training and evaluation"),
}
PLAIN: dict[str, Callable[[float], str]] = {  # figures without an interval
    "epsilon": "{:.3g}".format,
    "bytes_per_client": lambda mean: size(round(mean)), "grad_steps": "{:,.0f}".format, "seconds": duration,
    "worse_off": lambda mean: f"{100 * mean:.0f} %"}


class Column(NamedTuple):
    key: str
    title: str
    help: str


def columns(results: Results, *, all_metrics: bool = False) -> list[Column]:
    """The columns that have something in them; with all metrics, or with the one that decides alone."""
    there = {key for row in results.rows for key in row.figures}
    found = [_column(key, results) for key in (*MAIN, ERROR) if key in there]
    found[1:1] = [column for column in _of_paper(results) if column.key in there]
    if all_metrics:
        found += [Column(f"personal_{name}", title_of(name),
                         f"of the clients' own models: {metric.meaning}")
                  for name, metric in results.plan.metrics.items() if f"personal_{name}" in there]
    return found + [_column(key, results) for key in COSTS if key in there]


def _of_paper(results: Results) -> list[Column]:
    """The published figures, and how far ours are from them."""
    if results.paper is None:
        return []
    paper = results.paper.paper
    return [Column(f"{key}_{paper.metric}", *(
                words.format(source=paper.source, metric=title_of(paper.metric)) for words in TITLES[key]))
            for key in ("paper", "paper_difference")]


def _column(key: str, results: Results) -> Column:
    title, meaning = TITLES[key]
    return Column(key, title, meaning.format(metric=title_of(results.metric)))


def cell(key: str, value: Interval | None, metric: str) -> str:
    """A figure with what the interval adds and takes away; its ends where that is not the same."""
    if value is None or value.mean != value.mean:
        return "-"
    if key in PLAIN:
        return PLAIN[key](value.mean)
    name = metric if key in MAIN else key
    sign = "+" if key.startswith(("gain", "paper_difference")) and value.mean > 0 else ""
    text = f"{sign}{figure(name, value.mean)}"
    if value.low is None or value.high is None:
        return text
    below, above = value.mean - value.low, value.high - value.mean
    if abs(below - above) > 1e-9 * max(above, below):  # it ends where figures end
        return f"{text} ({figure(name, value.low)} to {figure(name, value.high)})"
    return f"{text} ± {above:.4f}" if is_share(name) else f"{text} ± {above:.2g}"

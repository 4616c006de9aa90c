"""Comparisons and searches as objects of Python: tables, pictures, and cells of a notebook."""

from __future__ import annotations

import dataclasses
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from descant.comparison import conclusions, results
from descant.comparison import trials as records
from descant.comparison.page import page_data
from descant.comparison.plan import Plan
from descant.comparison.table import cell, columns
from descant.comparison.tune import Tuning
from descant.core.algorithm import Algorithm
from descant.core.frames import pandas
from descant.core.metric import LOWER, figure, title
from descant.core.units import times
from descant.errors import UsageError
from descant.experiment import run as runs
from descant.experiment.plots import BLUE, GREY, tidy
from descant.view.comparison import comparison_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORDS = ("method", "against", "algorithm", "metric", "population", "scale")  # columns that are no figures


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
    """Several methods on one federation, as far as their runs are finished."""

    directory: Path
    plan: Plan
    allow: tuple[str, ...] = ()

    @cached_property
    def results(self) -> results.Results:
        """Everything that is known, as the report has it."""
        return results.read(self.plan)

    @property
    def best(self) -> str | None:
        """The label of the method that is best on test rows; whether it is really better is in `answer`."""
        return self.results.best

    @property
    def answer(self) -> str:
        """Which method is best, and whether the difference is real."""
        return "\n".join(conclusions.answer(self.results))

    @property
    def notes(self) -> list[str]:
        """What a reader should know besides."""
        return conclusions.notes(self.results)

    @property
    def gained(self) -> str:
        """What learning together has brought over training alone, in words."""
        return conclusions.gained(self.results)

    def table(self) -> Any:
        """results.csv as a pandas DataFrame: a row for each method, the best first."""
        return _frame(results.table(self.results), "comparison.table()").set_index("method")

    def differences(self) -> Any:
        """differences.csv as a pandas DataFrame: all pairs of methods, with simultaneous intervals."""
        return _frame(results.differences_table(self.results), "comparison.differences()")

    def plot(self) -> Figure:
        """comparison.png as a Matplotlib figure."""
        return comparison_figure(page_data(self.directory, plan=self.plan))

    def run(self, method: str, seed: int = 0) -> runs.Run:
        """One of its runs, with its figures and models."""
        if method not in self.plan.methods:
            raise UsageError(f"there is no method {method!r}: known are {', '.join(self.plan.methods)}")
        return runs.load(self.plan.place_of(method) / f"seed-{seed}", allow=self.allow)

    def __repr__(self) -> str:
        found = self.results
        words = f"{times(len(self.plan.methods), 'method')}, {times(len(self.plan.seeds), 'seed')}"
        if found.best is not None and found.level is not None:
            level = figure(found.metric, found.level.mean)
            words += f": {found.best} is first, {title(found.metric)} {level}"
        return f"Comparison({words}; in {self.directory})"

    def _repr_html_(self) -> str:
        found = self.results
        shown = columns(found)
        heads = "".join(f"<th title='{escape(each.help, quote=True)}'>{escape(each.title)}</th>"
                        for each in shown)
        rows = "".join(f"<tr><td>{escape(row.label)}</td>" + "".join(
            f"<td>{escape(cell(each.key, row.figures.get(each.key), found.metric))}</td>" for each in shown)
            + "</tr>" for row in found.rows)
        said = "".join(f"<p>{escape(sentence)}</p>" for sentence in conclusions.answer(found))
        return f"<table><thead><tr><th>method</th>{heads}</tr></thead><tbody>{rows}</tbody></table>{said}"


def _frame(rows: list[list[Any]], what: str) -> Any:
    """The table of a CSV file, with its figures as numbers."""
    head, *body = rows
    return pandas(what).DataFrame([
        [value if name in WORDS or not isinstance(value, str) else float(value or "nan")
         for name, value in zip(head, row, strict=True)] for row in body], columns=head)


@dataclasses.dataclass(frozen=True, repr=False)
class Search:
    """A finished search: the method with the best values, and all trials."""

    directory: Path
    found: Tuning

    @property
    def algorithm(self) -> Algorithm:
        """The method with the values that are best on validation rows, ready for `descant.run`."""
        return self.found.algorithm

    @property
    def metric(self) -> str:
        """By which trials are judged."""
        return self.found.metric

    @property
    def best(self) -> dict[str, Any]:
        """These values, by the names of the fields."""
        return self.found.values

    def table(self) -> Any:
        """trials.csv as a pandas DataFrame: a row for each trial."""
        kept = self._record()
        return pandas("search.table()").DataFrame(kept["rows"], columns=kept["columns"]).set_index("number")

    def plot(self) -> Figure:
        """The validation figure against each field that was searched, with the best trial marked."""
        from matplotlib.figure import Figure

        kept = self._record()
        names = kept["columns"][len(records.FIXED_COLUMNS):]
        canvas = Figure(figsize=(4.2 * len(names), 3.6), layout="constrained")
        at = kept["columns"].index("validation")
        trained = [row for row in kept["rows"] if row[at] is not None]
        for k, (axes, name) in enumerate(zip(canvas.subplots(1, len(names), squeeze=False)[0], names,
                                             strict=True), len(records.FIXED_COLUMNS)):
            axes.scatter([row[k] for row in trained], [row[at] for row in trained], color=GREY)
            best = next(row for row in trained if row[0] == self.found.best)
            axes.scatter([best[k]], [best[at]], color=BLUE, marker="*", s=150, label=f"trial {best[0]}")
            if min(row[k] for row in trained) > 0:
                axes.set_xscale("log")
            axes.set(xlabel=name, ylabel=f"validation {self._figure_name}")
            axes.legend(fontsize=8)
        tidy(canvas.axes)
        return canvas

    @property
    def _figure_name(self) -> str:
        return f"minus {title(self.metric)}" if self.metric in LOWER else title(self.metric)

    def _record(self) -> dict[str, Any]:
        kept = records.read(self.directory)
        if kept is None:
            raise UsageError(f"{self.directory} no longer holds a search: trials.csv is missing")
        return kept

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
                           for name, value in self.best.items())
        return (f"Search({self.algorithm.name}, {times(self.found.trials, 'trial')}: {values} is best, "
                f"validation {self._figure_name} {figure(self.metric, self.found.validation)}; "
                f"in {self.directory})")

    def _repr_html_(self) -> str:
        kept = self._record()
        heads = "".join(f"<th>{escape(name)}</th>" for name in kept["columns"])
        rows = "".join(f"<tr>{_cells(row, row[0] == self.found.best)}</tr>" for row in kept["rows"])
        return (f"<p>{escape(repr(self))}</p><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody>"
                "</table>")


def _cells(row: list[Any], is_best: bool) -> str:
    words = ("" if value is None else escape(f"{value:.4g}" if isinstance(value, float) else str(value))
             for value in row)
    return "".join(f"<td><b>{text}</b></td>" if is_best else f"<td>{text}</td>" for text in words)

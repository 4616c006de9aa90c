"""A run for people who work in Python: a line, a table, a picture, a cell of a notebook."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from descant.core.frames import pandas
from descant.core.metric import figure, title
from descant.core.units import times
from descant.experiment.plots import curve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from descant.experiment.run import Run

PLAIN = ("round", "participants", "rejected", "loss", "grad_steps", "bytes_down", "bytes_up", "seconds")


def line(run: Run) -> str:
    """What the run is and how well its clients do."""
    setup = run.setup
    done = f"{run.rounds} of {times(setup.train.rounds, 'round')}"
    words = f"{setup.algorithm.name} on {setup.federation.heading}: {done}"
    if (chosen := run.summary["best"] or run.summary["last"]) is not None:
        metric = setup.deciding.name
        mean = chosen["personal"]["test"].get(metric, {}).get("mean")
        words += f", test {title(metric)} {figure(metric, mean)} in round {chosen['round']}"
    return f"Run({words})" if run.directory is None else f"Run({words}; in {run.directory})"


def table(run: Run) -> Any:
    """A row a round. Figures are means over the clients, and missing where a round was not evaluated."""
    rows = [{name: row[name] for name in PLAIN} | means(row) for row in run.history]
    return pandas("run.table()").DataFrame(rows).set_index("round") if rows else (
        pandas("run.table()").DataFrame(columns=list(PLAIN)).set_index("round"))


def means(row: dict[str, Any], sign: str = "_") -> dict[str, float | None]:
    """The figures of an evaluated round, as means over the clients."""
    scored: dict[str, Any] = {whose: row[whose] for whose in ("personal", "global") if whose in row}
    if "unseen" in row:
        scored |= {f"unseen{sign}{whose}": row["unseen"][whose] for whose in ("personal", "global")
                   if whose in row["unseen"]}
    return {f"{whose}{sign}{split}{sign}{metric}": spread["mean"] for whose, figures in scored.items()
            for split in ("test", "val") for metric, spread in figures.get(split, {}).items()}


def plot(run: Run) -> Figure:
    """The picture that a directory has as curve.png."""
    setup = run.setup
    return curve(run.history, run.best_round, setup.deciding.name,
                 f"{setup.algorithm.name} on {setup.federation.heading}")


def html(run: Run) -> str:
    """The line, and the figures of the last and the best round."""
    summary, metric = run.summary, run.setup.deciding.name
    rows = [f"<tr><td>{which}</td><td>{figures['round']}</td><td>{model}</td>"
            + "".join(f"<td>{figure(metric, figures[model]['test'][metric][end])}</td>"
                      for end in ("mean", "worst_decile")) + "</tr>"
            for which in ("last", "best") if (figures := summary[which]) is not None
            for model in ("personal", "global")
            if model in figures and metric in figures[model]["test"]]
    head = "".join(f"<th>{word}</th>" for word in (
        "", "round", "models", f"test {title(metric)}", "worst tenth of the clients"))
    body = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>" if rows else ""
    return f"<p>{escape(line(run))}</p>{body}"

"""What a comparison came to, from the files of its runs: the table, the differences, the answer in words.

Figures are those of the validation-best round, the models that one would take home (`_last`: of the last
round). A figure of a method with one seed is the mean over the clients; then there is a mean over seeds with
a 95 % interval. Of a grid, all members are in the table, and the one that is best on validation data is
compared with the other methods.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from descant.algorithms import LocalTrain
from descant.comparison import figures, statistics
from descant.comparison.plan import Plan, Planned
from descant.comparison.statistics import Difference, Interval, interval
from descant.errors import DescantError, UsageError, unknown
from descant.experiment import directory as layout
from descant.files import write_atomic

WORST = 10  # a decile


class Finished(NamedTuple):
    """One run that is done."""

    label: str
    seed: int
    rounds: int
    summary: dict[str, Any]
    columns: figures.Columns

    def values(self, metric: str, which: str = "best", model: str = "personal", *, unseen: bool = False
               ) -> dict[int, float]:
        """The figure of each client."""
        of = self.columns
        rows = ((of["which"] == which) & (of["model"] == model) & (of["unseen"] == unseen)
                & (of["client"] != figures.POOLED))
        known = rows & np.isfinite(of[metric])
        return dict(zip(of["client"][known].tolist(), of[metric][known].tolist(), strict=True))

    def pooled(self, metric: str, model: str) -> float:
        """The figure over the rows of all clients together."""
        of = self.columns
        rows = (of["which"] == "best") & (of["model"] == model) & (of["client"] == figures.POOLED)
        return float(of[metric][rows][0]) if rows.any() else float("nan")


class Row(NamedTuple):
    """A method in the table."""

    label: str
    rounds: int
    seeds: int
    figures: dict[str, Interval]  # "personal", "global", "worst_decile", "gain", "grad_steps", ...


class Results(NamedTuple):
    """All that is known of a comparison at the moment."""

    plan: Plan
    metric: str  # the one that decides
    lower_is_better: bool
    finished: list[Finished]
    rows: list[Row]
    reference: str | None  # whose clients learn alone
    chosen: dict[str, str]  # family -> label of its member that is best on validation data
    differences: list[Difference]  # the best method beside each of the others
    clients: dict[str, np.ndarray]  # label -> the figure of each client, mean over the seeds

    @property
    def best(self) -> str | None:
        return self.differences[0].label if self.differences else None


def read(plan: Plan, metric: str | None = None) -> Results:
    """The results so far. `metric` is what decides; without it the plan's, accuracy, or the loss."""
    finished = [found for run in plan.runs() if (found := _finished(run)) is not None]
    metric, lower = _metric(plan, finished, metric or plan.metric)
    reference = next((label for label, method in plan.methods.items()
                      if isinstance(method.algorithm, LocalTrain)
                      and any(run.label == label for run in finished)), None)
    chosen = _chosen(plan, finished)
    left_out = {label for label, method in plan.methods.items()
                if method.grid is not None and chosen.get(method.grid.family) not in (None, label)}
    of = {label: [run for run in finished if run.label == label] for label in plan.methods}
    of = {label: found for label, found in of.items() if found}
    everyone = 1 + max((int(run.columns["client"].max()) for run in finished), default=-1)
    clients = {label: _by_client([run.values(metric) for run in found], everyone)
               for label, found in of.items()}
    by_seed = {label: {run.seed: _mean(run.values(metric)) for run in found} for label, found in of.items()}
    differences = statistics.differences(
        {label: values for label, values in by_seed.items() if label not in left_out}, clients,
        lower_is_better=lower)
    alone = [] if reference is None else of[reference]
    rows = [_row(found, metric, lower, alone) for found in of.values()]
    return Results(plan, metric, lower, finished, rows, reference, chosen, differences, clients)


def _finished(run: Planned) -> Finished | None:
    """The files of a run, if it is done."""
    path = run.place / "summary.json"
    try:
        if not run.done or not path.exists():
            return None
        summary = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UsageError) as error:
        raise DescantError(f"the run in {run.place} is damaged ({error}): remove that directory, and compare "
                           "again") from None
    return Finished(run.label, run.seed, summary["rounds"], summary, figures.read(run.place / figures.FILE))


def _metric(plan: Plan, finished: Sequence[Finished], wanted: str | None) -> tuple[str, bool]:
    """The metric that decides, and whether less of it is better."""
    known = [name for name in finished[0].columns if name not in figures.FACTS] if finished else []
    if wanted is None:
        wanted = next((name for name in ("accuracy", "loss") if name in known), "accuracy")
    elif wanted not in (known or plan.metrics):
        raise unknown("metric", wanted, known or plan.metrics)
    return wanted, wanted in plan.metrics and plan.metrics[wanted].lower_is_better


def _chosen(plan: Plan, finished: Sequence[Finished]) -> dict[str, str]:
    """Of each grid, the member whose selected rounds are best on validation data."""
    scores: dict[str, dict[str, float]] = {}
    for label, method in plan.methods.items():
        values = [_validation(run.summary) for run in finished if run.label == label]
        if method.grid is not None and values:
            scores.setdefault(method.grid.family, {})[label] = float(np.mean(values))
    return {family: max(members, key=lambda label: members[label]) for family, members in scores.items()}


def _validation(summary: Mapping[str, Any]) -> float:
    """What model selection goes by: mean accuracy, or less loss; nothing without validation data."""
    found = ((summary["best"] or {}).get("personal") or {}).get("val") or {}
    if (value := found.get("accuracy", {}).get("mean")) is not None:
        return float(value)
    value = found.get("loss", {}).get("mean")
    return float("-inf") if value is None else -float(value)


def _mean(values: Mapping[int, float]) -> float:
    return float(np.mean(list(values.values()))) if values else float("nan")


def _by_client(seeds: Sequence[Mapping[int, float]], everyone: int) -> np.ndarray:
    """The mean over the seeds of each client's figure; NaN for a client that was not evaluated."""
    table = np.full((len(seeds), everyone), np.nan)
    for row, values in zip(table, seeds, strict=True):
        row[list(values)] = list(values.values())
    return mean_over_seeds(table)


def mean_over_seeds(table: np.ndarray) -> np.ndarray:
    """The mean of each column over what is known; NaN where nothing is."""
    known = np.isfinite(table)
    total, count = np.where(known, table, 0.0).sum(0), known.sum(0)
    mean: np.ndarray = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return mean


def _row(found: Sequence[Finished], metric: str, lower: bool, alone: Sequence[Finished]) -> Row:
    cells: dict[str, list[float]] = {}

    def note(key: str, value: float) -> None:
        cells.setdefault(key, []).append(value)

    names = [name for name in found[0].columns if name not in figures.FACTS]
    for run in found:
        for model in ("personal", "global"):
            for name in names:
                of = model if name == metric else f"{model}_{name}"
                for which, suffix in (("best", ""), ("last", "_last")):
                    if values := run.values(name, which, model):
                        note(f"{of}{suffix}", _mean(values))
                if np.isfinite(pooled := run.pooled(name, model)):
                    note(f"{of}_pooled", pooled)
            for which, suffix in (("best", ""), ("last", "_last")):
                error = ((run.summary[which] or run.summary["last"]).get(model) or {}).get("truth_error")
                if error is not None:
                    note(f"{model}_truth_error{suffix}", error)
        note("worst_decile", _worst(run.values(metric), lower))
        if unseen := run.values(metric, unseen=True):
            note("unseen", _mean(unseen))
        costs = run.summary
        note("bytes_per_client", (costs["bytes_down"] + costs["bytes_up"]) / costs["clients"])
        note("grad_steps", costs["grad_steps"])
        note("seconds", costs["seconds"])
    row = {key: interval(values) for key, values in cells.items()}
    if alone:
        gains = [gain for run in found for other in alone
                 if run.seed == other.seed and (gain := _gains(run, other, metric, lower))]
        row["gain"] = interval([_mean(gain) for gain in gains])
        if gains:
            mean = _by_client(gains, 1 + max(max(gain) for gain in gains))
            known = mean[np.isfinite(mean)]
            row["worse_off"] = Interval(float((known < 0).mean()), None, None, len(gains))
    return Row(found[0].label, found[0].rounds, len(found), row)


def _gains(run: Finished, alone: Finished, metric: str, lower: bool) -> dict[int, float]:
    """By how much each client is better off than alone; less than zero: worse off."""
    own, other = run.values(metric), alone.values(metric)
    sign = -1.0 if lower else 1.0
    return {client: sign * (own[client] - other[client]) for client in own if client in other}


def _worst(values: Mapping[int, float], lower: bool) -> float:
    ordered = sorted(values.values(), reverse=lower)
    return float(np.mean(ordered[: -(-len(ordered) // WORST)])) if ordered else float("nan")


# -- files ---------------------------------------------------------------------------------------------


def write_csv(results: Results, path: Path) -> None:
    """One row for each method: every figure with the ends of its interval."""
    keys = list(dict.fromkeys(key for row in results.rows for key in row.figures))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["method", "algorithm", "seeds", "rounds", "metric",
                     *(f"{key}{end}" for key in keys for end in ("", "_low", "_high"))])
    for row in results.rows:
        cells = [cell for key in keys for cell in _ends(row.figures.get(key))]
        name = results.plan.methods[row.label].asked["name"]
        writer.writerow([row.label, name, row.seeds, row.rounds, results.metric, *cells])
    write_atomic(path, text.getvalue().encode())


def _ends(value: Interval | None) -> Iterator[str]:
    for end in (None, None, None) if value is None else value[:3]:
        yield "" if end is None or not np.isfinite(end) else repr(float(end))


def missing_seeds(results: Results) -> dict[str, list[int]]:
    """The seeds that a method does not have yet, or has failed with."""
    have = {label: {run.seed for run in results.finished if run.label == label}
            for label in results.plan.methods}
    return {label: gone for label, seeds in have.items()
            if (gone := [seed for seed in results.plan.seeds if seed not in seeds])}


def histories(results: Results) -> dict[str, list[list[dict[str, Any]]]]:
    """The rounds of all finished runs, by method."""
    found: dict[str, list[list[dict[str, Any]]]] = {}
    for run in results.plan.runs():
        if any(done.label == run.label and done.seed == run.seed for done in results.finished):
            found.setdefault(run.label, []).append(layout.read_metrics(run.place))
    return found

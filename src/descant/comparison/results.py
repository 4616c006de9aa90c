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
from descant.comparison.statistics import ROUNDING, Difference, Interval, interval
from descant.errors import DescantError, UsageError, unknown
from descant.files import write_atomic

WORST = 10  # a decile
FIRST = ("personal", "global", "worst_decile", "gain", "worse_off", "unseen",
         "bytes_per_client", "grad_steps", "seconds")  # of the columns of results.csv
NONE = (float("-inf"),)  # the validation figures of a run without validation data


class Finished(NamedTuple):
    """One run that is done."""

    label: str
    seed: int
    rounds: int
    summary: dict[str, Any]
    columns: figures.Columns

    def values(self, metric: str, which: str = "best", model: str = "personal", *, unseen: bool = False
               ) -> dict[int, float]:
        """The figure of each client that has one."""
        if metric not in self.columns:  # which was asked for after this run was measured
            return {}
        of = self.columns
        known = self._rows(which, model, unseen) & np.isfinite(of[metric])
        return dict(zip(of["client"][known].tolist(), of[metric][known].tolist(), strict=True))

    @property
    def lost(self) -> int:
        """How many clients have a model that is of no use: no finite loss on the test rows that they have."""
        of = self.columns
        rows = self._rows("best", "personal", False)
        return int((rows & (of["n_test"] > 0) & ~np.isfinite(of["loss"])).sum())

    def _rows(self, which: str, model: str, unseen: bool) -> np.ndarray:
        of = self.columns
        rows: np.ndarray = ((of["which"] == which) & (of["model"] == model) & (of["unseen"] == unseen)
                            & (of["client"] != figures.POOLED))
        return rows

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
    beside_alone: int  # clients of which it is known whether they are better off than alone


class Results(NamedTuple):
    """All that is known of a comparison at the moment."""

    plan: Plan
    metric: str  # the one that decides
    lower_is_better: bool
    finished: list[Finished]
    rows: list[Row]
    reference: str | None  # whose clients learn alone
    chosen: dict[str, str]  # family -> label of its member that is best on validation data
    level: Interval | None  # of the best method, over the seeds that are compared
    differences: list[Difference]  # the best method beside each of the others
    left_out: dict[str, str]  # label -> why a method is not compared
    lost: dict[str, float]  # label -> clients without a usable model, mean over the seeds
    failures: dict[str, str]  # run -> why it failed
    clients: dict[str, np.ndarray]  # label -> the figure of each client, mean over the seeds

    @property
    def best(self) -> str | None:
        return self.differences[0].label if self.differences else None


class Outlook(NamedTuple):
    """Whether the comparison is settled, and what it would take."""

    decided: bool
    more: int | None  # repetitions; None: no number of them would do
    why: str


def outlook(results: Results) -> Outlook:
    raise NotImplementedError


def read(plan: Plan, metric: str | None = None) -> Results:
    """The results so far. `metric` is what decides; without it the plan's, accuracy, or the loss."""
    finished = [found for run in plan.runs() if (found := _finished(run)) is not None]
    metric, lower = _metric(plan, finished, metric or plan.metric)
    of = {label: [run for run in finished if run.label == label] for label in plan.methods}
    of = {label: found for label, found in of.items() if found}
    chosen = _chosen(plan, of)
    reference = next((label for label in of if isinstance(plan.methods[label].algorithm, LocalTrain)
                      and not _is_beaten(plan, label, chosen)), None)
    alone = [] if reference is None else of[reference]
    seeds, left_out = _compared(plan, of, chosen, metric)
    values = {label: {run.seed: run.values(metric) for run in of[label] if run.seed in seeds}
              for label in of if label not in left_out}
    # a client that one method has failed is compared with nobody's
    common = {seed: set.intersection(*({*each[seed]} for each in values.values())) for seed in seeds}
    by_seed = {label: {seed: _mean({client: found[client] for client in common[seed]})
                       for seed, found in each.items() if common[seed]} for label, each in values.items()}
    lost = {label: float(np.mean([run.lost for run in of[label] if run.seed in seeds])) for label in values}
    everyone = 1 + max((int(run.columns["client"].max()) for run in finished), default=-1)
    clients = {label: _by_client([run.values(metric) for run in found
                                  if run.seed in seeds or label in left_out], everyone)
               for label, found in of.items()}
    differences = statistics.differences(by_seed, clients, lower_is_better=lower, lost=lost)
    best = differences[0].label if differences else next(iter(values), None)
    level = None if best is None or not by_seed[best] else interval(list(by_seed[best].values()))
    rows = [_row(found, metric, lower, alone) for found in of.values()]
    return Results(plan, metric, lower, finished, rows, reference, chosen, level, differences, left_out, lost,
                   plan.failures(), clients)


def _finished(run: Planned) -> Finished | None:
    """The files of a run, if it is done."""
    try:
        if not run.is_finished:
            return None
        run.require_own()
        summary = json.loads((run.place / "summary.json").read_text(encoding="utf-8"))
    except (ValueError, UsageError) as error:
        raise DescantError(f"the run in {run.place} is damaged ({error}): remove that directory, and compare "
                           "again") from None
    return Finished(run.label, run.seed, summary["rounds"], summary, figures.read(run.place / figures.FILE))


def _metric(plan: Plan, finished: Sequence[Finished], wanted: str | None) -> tuple[str, bool]:
    """The metric that decides, and whether less of it is better."""
    known = [name for run in finished for name in run.columns if name not in figures.FACTS]
    if wanted is None:
        wanted = next((name for name in ("accuracy", "loss") if name in known), "accuracy")
    elif wanted not in (known or plan.metrics):
        raise unknown("metric", wanted, dict.fromkeys(known or plan.metrics))
    return wanted, wanted in plan.metrics and plan.metrics[wanted].lower_is_better


def _chosen(plan: Plan, of: Mapping[str, Sequence[Finished]]) -> dict[str, str]:
    """Of each grid, the member that is best on validation data, by the rule that selects rounds: as few lost
    clients as possible, then accuracy, then loss. Over the seeds that all members have, if there are any."""
    families: dict[str, list[str]] = {}
    for label, method in plan.methods.items():
        if method.grid is not None and label in of:
            families.setdefault(method.grid.family, []).append(label)
    chosen = {}
    for family, members in families.items():
        shared = set.intersection(*({run.seed for run in of[label]} for label in members))
        scores = {label: _validation([run.summary for run in of[label] if run.seed in shared or not shared])
                  for label in members}
        if max(scores.values()) > NONE:  # without validation data, all members are methods like others
            chosen[family] = max(scores, key=lambda label: scores[label])
    return chosen


def _validation(summaries: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    """The validation figures of the selected rounds, mean over the seeds; nothing is worse than none."""
    keys: list[list[float]] = [summary.get("selected_by") or [] for summary in summaries]
    if not all(keys) or len({len(key) for key in keys}) > 1:
        return NONE
    return tuple(float(value) for value in np.mean(keys, axis=0))


def _is_beaten(plan: Plan, label: str, chosen: Mapping[str, str]) -> bool:
    """Whether another member of a method's grid is better on validation data."""
    place = plan.methods[label].grid
    return place is not None and chosen.get(place.family, label) != label


def _compared(plan: Plan, of: Mapping[str, Sequence[Finished]], chosen: Mapping[str, str], metric: str
              ) -> tuple[list[int], dict[str, str]]:
    """The seeds that methods are compared over, all the same ones; and which methods are left out, and why. A
    method that has few of the seeds would leave few for all: it is left out until it has more."""
    left_out = {label: "another of its grid is better on validation data" for label in of
                if _is_beaten(plan, label, chosen)}
    name = metric.replace("_", " ")
    left_out |= {label: f"no client has a finite {name}" if all(metric in run.columns for run in found) else
                 f"its {name} has not been measured yet" for label, found in of.items()
                 if label not in left_out and not all(run.values(metric) for run in found)}
    seeds = {label: {run.seed for run in found} for label, found in of.items() if label not in left_out}
    while seeds:
        shared = set.intersection(*seeds.values())
        if 2 * len(shared) >= max(map(len, seeds.values())):
            return sorted(shared), left_out
        fewest = min(reversed(list(seeds)), key=lambda label: len(seeds[label]))
        left_out[fewest] = "it has too few seeds so far"
        del seeds[fewest]
    return [], left_out


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

    names = dict.fromkeys(name for run in found for name in run.columns if name not in figures.FACTS)
    for run in found:
        for model in ("personal", "global"):
            for name in names:
                of = model if name == metric else f"{model}_{name}"
                for which, suffix in (("best", ""), ("last", "_last")):
                    if values := run.values(name, which, model):
                        note(f"{of}{suffix}", _mean(values))
                if name in run.columns and np.isfinite(pooled := run.pooled(name, model)):
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
    row = {"personal": interval([])} | {key: interval(values) for key, values in cells.items()}
    beside_alone = 0
    if alone:
        gains = [gain for run in found for other in alone
                 if run.seed == other.seed and (gain := _gains(run, other, metric, lower))]
        row["gain"] = interval([_mean(gain) for gain in gains])
        if gains:
            mean = _by_client(gains, 1 + max(max(gain) for gain in gains))
            known = mean[np.isfinite(mean)]
            beside_alone = len(known)
            row["worse_off"] = Interval(float((known < -ROUNDING).mean()), None, None, len(gains))
    return Row(found[0].label, found[0].rounds, len(found), row, beside_alone)


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
    there = dict.fromkeys(key for row in results.rows for key in row.figures)
    keys = [*(key for key in FIRST if key in there), *(key for key in there if key not in FIRST)]
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

"""The results of a comparison, from the files of its runs: rows, differences, verdicts.

Figures are those of the validation-best round (`_last`: of the last round). The figure of a method in one
repetition is the mean over the clients; over the repetitions there is a mean with a 95 % interval.
docs/comparing.md says which methods are compared, and which get no verdict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from descant.algorithms import LocalTrain
from descant.comparison import convergence, statistics
from descant.comparison.agreement import Agreement, agreement, beside
from descant.comparison.finished import FACTS, FinishedRun
from descant.comparison.plan import Plan
from descant.comparison.rows import COSTS, MAIN, Row, by_client, row_of
from descant.comparison.sample import analyse, level_of, oriented, sample_of
from descant.comparison.seeds import shared_seeds
from descant.comparison.statistics import ROUNDING, Analysis, Interval, Pair
from descant.core.files import write_csv
from descant.core.metric import is_share, title
from descant.errors import unknown
from descant.experiment import directory as layout

NONE = (float("-inf"),)  # the validation figures of a run without validation data
WORTH = 0.01  # a smaller difference of shares does not matter, nor does 1 % of a loss
ALTERNATIVES = ("accuracy", "balanced_accuracy", "auroc")  # what else one could have decided by

Verdict: TypeAlias = Literal["better", "no difference found", "equivalent", "withheld", "diverged"]


class Difference(NamedTuple):
    """By how much the best method is better than another, paired over the repetitions."""

    label: str
    against: str
    mean: float = math.nan  # below zero where the other has the better figure, but has failed more clients
    low: float | None = None  # the simultaneous interval, which excludes zero exactly if p is below the level
    high: float | None = None
    p: float | None = None  # two-sided, corrected over all pairs; None with one repetition
    verdict: Verdict = "diverged"
    ratio: Pair | None = None  # logarithms of ratios, where these are compared
    clients_p: float | None = None  # Wilcoxon's, over the clients' means over the repetitions
    clients_better: int = 0  # how many of them are better off with `label`, and worse off
    clients_worse: int = 0


class Other(NamedTuple):
    """The winner by another metric."""

    metric: str
    best: str
    levels: tuple[float, float]  # of that method, and of the best by the metric that decides
    significant: bool


class Share(NamedTuple):
    """Some of the repetitions of a method."""

    some: int
    of: int


class Results(NamedTuple):
    """All that is known of a comparison at the moment."""

    plan: Plan
    metric: str  # the one that decides
    lower_is_better: bool
    finished: list[FinishedRun]
    rows: list[Row]  # best first
    reference: str | None  # whose clients learn alone
    chosen: dict[str, str]  # family -> label of its member that is best on validation data
    compared: list[str]  # labels, best first
    repetitions: int  # that are compared
    people: int  # clients that are compared
    level: Interval | None  # of the best method
    analysis: Analysis | None  # of `compared`, in this order
    differences: list[Difference]  # the best method beside each of the others
    beyond: Analysis | None  # the same for clients like these, where there are enough
    has_rows: bool  # whether the noise of the test rows is in the intervals
    others: list[Other]  # metrics by which another method would be best
    left_out: dict[str, str]  # label -> why a method is not compared
    diverged: dict[str, Share]  # label -> in how many repetitions
    unfinished: dict[str, Share]  # label -> in how many repetitions it was still improving
    lost: dict[str, float]  # label -> clients without a usable model, mean over the seeds
    failures: dict[str, str]  # run -> why it failed
    clients: dict[str, np.ndarray]  # label -> the figure of each client, mean over the seeds
    paper: Agreement | None = None  # what is published for these methods, beside ours

    @property
    def best(self) -> str | None:
        """Of several methods."""
        return self.compared[0] if len(self.compared) > 1 else None

    @property
    def worth(self) -> float:
        """A difference that is too small to matter; zero where that is unknown."""
        return WORTH if is_share(self.metric) or self.plan.is_ratio(self.metric) else 0.0


def read(plan: Plan, metric: str | None = None) -> Results:
    """The results so far. `metric` decides; without it the plan's."""
    finished = [found for run in plan.runs() if (found := run.read()) is not None]
    metric = metric or plan.metric
    known = [name for run in finished for name in run.columns if name not in FACTS] or [*plan.metrics]
    if metric not in known:
        raise unknown("metric", metric, dict.fromkeys(known))
    lower = plan.lower_is_better(metric)
    of = {label: [run for run in finished if run.label == label] for label in plan.methods}
    of = {label: found for label, found in of.items() if found}
    chosen = _chosen(plan, of)
    reference = next((label for label in of if isinstance(plan.methods[label].algorithm, LocalTrain)
                      and not _is_beaten(plan, label, chosen)), None)
    diverged = {label: Share(count, len(found)) for label, found in of.items()
                if (count := sum(run.has_diverged for run in found))}
    seeds, left_out = _compared(plan, of, chosen, metric, diverged)
    labels = [label for label in of if label not in left_out]
    lost = {label: float(np.mean([run.lost for run in of[label] if run.seed in seeds]))
            for label in labels if seeds}
    sample = sample_of([[run for run in of[label] if run.seed in seeds] for label in labels], metric)
    everyone = 1 + max((int(run.columns["client"].max()) for run in finished), default=-1)
    clients = {label: by_client([run.values(metric) for run in found
                                 if run.seed in seeds or label in left_out], everyone)
               for label, found in of.items()}
    rows = [row_of(found, metric, plan, [] if reference is None else of[reference]) for found in of.values()]
    unfinished = {label: share for label, found in of.items()
                  if (share := _still_improving(found, metric, lower)) is not None}
    compared: list[str] = []
    level = analysis = beyond = None
    if sample is not None:
        scores = oriented(sample, metric, plan, None)[0].mean(0)
        order = sorted(range(len(labels)), key=lambda k: (lost[labels[k]], -scores[k]))
        compared, sample = [labels[k] for k in order], sample.of(order)
        level = level_of(sample.of([0]), metric, plan)
    if sample is not None and len(compared) > 1:
        analysis = analyse(sample, metric, plan, plan.population)
        if plan.population == "clients" and sample.people >= statistics.ENOUGH_CLIENTS:
            beyond = analyse(sample, metric, plan, "new clients")
    results = Results(
        plan, metric, lower, finished, rows, reference, chosen, compared,
        repetitions=0 if sample is None else len(sample.scores),
        people=0 if sample is None else sample.people,
        level=level, analysis=analysis, differences=[], beyond=beyond,
        has_rows=sample is not None and sample.rows is not None, others=[], left_out=left_out,
        diverged=diverged, unfinished=unfinished, lost=lost, failures=plan.failures(), clients=clients)
    results = results._replace(differences=_differences(results), others=_others(results, of, seeds))
    return _beside_paper(results._replace(rows=_sorted(results)), of)


def _beside_paper(found: Results, of: Mapping[str, Sequence[FinishedRun]]) -> Results:
    """The results with the figures that are published."""
    if found.plan.paper is None:
        return found
    sound = {label: runs for label, runs in of.items() if label not in found.diverged}
    paper = agreement(found.plan.paper, found.plan, found.metric, found.rows, sound)
    return found._replace(paper=paper, rows=[beside(row, paper) for row in found.rows])


def _sorted(found: Results) -> list[Row]:
    """The methods in the order of the table: the best first, those that diverged last."""
    sign = -1.0 if found.lower_is_better else 1.0

    def key(row: Row) -> tuple[bool, bool, float, float]:
        mean = row.figures["personal"].mean
        return (row.label in found.diverged, row.label not in found.compared[:1],
                found.lost.get(row.label, 0.0), math.inf if math.isnan(mean) else -sign * mean)

    return sorted(found.rows, key=key)


# -- verdicts --------------------------------------------------------------------------------------------


def _differences(found: Results) -> list[Difference]:
    """The best method beside each of the others, the nearest first, and those that diverged."""
    if found.analysis is None or found.level is None:
        return []
    best, sign, rows = found.compared[0], -1.0 if found.lower_is_better else 1.0, []
    by_ratio = found.plan.is_ratio(found.metric)
    for k, other in enumerate(found.compared[1:], 1):
        pair = found.analysis.beside(0, k)
        # of a ratio, what it means for the level of the best
        mean, low, high = (None if end is None else found.level.mean * math.expm1(end) if by_ratio else end
                           for end in (pair.mean, pair.low, pair.high))
        gains = sign * (found.clients[best] - found.clients[other])
        rows.append(Difference(
            best, other, math.nan if mean is None else mean, low, high, pair.p,
            _verdict(found, other, pair), pair if by_ratio else None,
            statistics.wilcoxon(found.clients[best], found.clients[other]),
            int((gains > ROUNDING).sum()), int((gains < -ROUNDING).sum())))
    return rows + [Difference(best, label) for label in found.diverged
                   if not _is_beaten(found.plan, label, found.chosen)]


def _verdict(found: Results, other: str, pair: Pair) -> Verdict:
    if pair.p is None or pair.low is None or pair.high is None or other in found.unfinished or (
            pair.mean < 0 and found.lost[other] > found.lost[found.compared[0]]):
        return "withheld"
    assert found.analysis is not None
    if pair.p < found.analysis.level:
        return "better"
    return "equivalent" if max(-pair.low, pair.high) < found.worth else "no difference found"


def _others(found: Results, of: Mapping[str, Sequence[FinishedRun]], seeds: Sequence[int]) -> list[Other]:
    """The metrics by which another method would be best."""
    others = []
    runs = [[run for run in of[label] if run.seed in seeds] for label in found.compared]
    for metric in ALTERNATIVES if found.metric in ALTERNATIVES else ():
        sample = sample_of(runs, metric)
        if metric == found.metric or len(found.compared) < 2 or sample is None:
            continue
        scores = sample.scores.mean(0)
        best = int(scores.argmax())
        if scores[best] > scores[0] + ROUNDING:
            p = analyse(sample, metric, found.plan, found.plan.population).beside(best, 0).p
            others.append(Other(metric, found.compared[best], (float(scores[best]), float(scores[0])),
                                p is not None and p < statistics.LEVEL / found.plan.looks))
    return others


def _still_improving(found: Sequence[FinishedRun], metric: str, lower: bool) -> Share | None:
    """In how many repetitions a method was still improving when its training ended; None if it was not."""
    gains = [convergence.last_gain(layout.read_metrics(run.place), metric, lower=lower) for run in found
             if run.summary.get("stopped") != "converged" and not run.ended_diverged]
    count = convergence.still_improving(gains)
    return None if count is None else Share(count, len(found))


# -- what is compared --------------------------------------------------------------------------------------


def _chosen(plan: Plan, of: Mapping[str, Sequence[FinishedRun]]) -> dict[str, str]:
    """Of each grid, the member that is best on validation data, by the rule that selects rounds: as few lost
    clients as possible, then the metric, then the loss. Over the seeds that all members have, if any."""
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
    """The validation figures of the selected rounds, mean over the seeds."""
    keys: list[list[float]] = [summary.get("selected_by") or [] for summary in summaries]
    if not all(keys) or len({len(key) for key in keys}) > 1:
        return NONE
    return tuple(float(value) for value in np.mean(keys, axis=0))


def _is_beaten(plan: Plan, label: str, chosen: Mapping[str, str]) -> bool:
    """Whether another member of a method's grid is better on validation data."""
    place = plan.methods[label].grid
    return place is not None and chosen.get(place.family, label) != label


def _compared(plan: Plan, of: Mapping[str, Sequence[FinishedRun]], chosen: Mapping[str, str], metric: str,
              diverged: Mapping[str, Share]) -> tuple[list[int], dict[str, str]]:
    """The seeds that methods are compared over, the same for all; and which methods are left out, and why."""
    left_out = {label: "another member of its grid is better on validation data" for label in of
                if _is_beaten(plan, label, chosen)}
    left_out |= {label: f"it diverged in {share.some} of {share.of} repetitions"
                 for label, share in diverged.items() if label not in left_out}
    left_out |= {label: f"no client has a finite {title(metric)}" if all(
                     metric in run.columns for run in found) else f"its {title(metric)} is not measured yet"
                 for label, found in of.items()
                 if label not in left_out and not all(run.values(metric) for run in found)}
    shared, few = shared_seeds({label: {run.seed for run in found} for label, found in of.items()
                                if label not in left_out})
    return shared, left_out | dict.fromkeys(few, "it has too few seeds so far")


def missing_seeds(results: Results) -> dict[str, list[int]]:
    """The seeds that a method does not have yet, or has failed with."""
    have = {label: {run.seed for run in results.finished if run.label == label}
            for label in results.plan.methods}
    return {label: gone for label, seeds in have.items()
            if (gone := [seed for seed in results.plan.seeds if seed not in seeds])}


# -- files ---------------------------------------------------------------------------------------------


def write(results: Results, path: Path) -> None:
    """One row for each method, and beside it, in `differences.csv`, one for each pair of methods. And in
    `orderings.csv`, if there is a paper, the pairs that it has in an order."""
    write_csv(path, table(results))
    write_csv(path.with_name("differences.csv"), differences_table(results))
    if results.paper is not None:
        write_csv(path.with_name("orderings.csv"), _orderings_table(results.paper, results.plan))


def table(results: Results) -> list[list[Any]]:
    """A head, and one row for each method, best first: every figure with the ends of its interval."""
    there = dict.fromkeys(key for row in results.rows for key in row.figures)
    first = [key for key in (*MAIN, *COSTS) if key in there]
    keys = [*first, *(key for key in there if key not in first)]
    nobody = Share(0, 0)
    return [
        ["method", "algorithm", "seeds", "rounds", "metric",
         *(f"{key}{end}" for key in keys for end in ("", "_low", "_high")), "diverged", "still_improving"],
        *([row.label, results.plan.methods[row.label].asked.name, row.seeds, row.rounds, results.metric,
           *("" if end is None or not np.isfinite(end) else repr(float(end))
             for key in keys for end in (row.figures.get(key) or (None, None, None))[:3]),
           results.diverged.get(row.label, nobody).some, results.unfinished.get(row.label, nobody).some]
          for row in results.rows)]


def differences_table(results: Results) -> list[list[Any]]:
    """A head, and one row for each pair of methods, the better one first; a ratio of losses as its
    logarithm."""
    scale = "log ratio" if results.plan.is_ratio(results.metric) else "difference"
    pairs = {} if results.analysis is None else results.analysis.pairs
    return [
        ["method", "against", "metric", "population", "scale", "repetitions", "mean", "low", "high", "p"],
        *([results.compared[a], results.compared[b], results.metric, results.plan.population, scale,
           results.repetitions, *("" if end is None else repr(end) for end in (*pair[:3], pair.p))]
          for (a, b), pair in pairs.items())]


def _orderings_table(found: Agreement, plan: Plan) -> list[list[Any]]:
    paper = found.paper
    scale = "log ratio" if plan.is_ratio(paper.metric) else "difference"
    return [
        ["better", "worse", "source", "metric", "paper", "scale", "repetitions", "mean", "low", "high", "p",
         "appearance"],
        *([each.better, each.worse, paper.source, paper.metric, repr(each.paper), scale, found.repetitions,
           *("" if end is None else repr(end) for end in (*each.ours[:3], each.ours.p)), each.appearance]
          for each in found.orderings)]

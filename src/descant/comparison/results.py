"""What a comparison came to, from the files of its runs: the table, the differences, the answer in words.

Figures are those of the validation-best round, the models that one would take home (`_last`: of the last
round). A figure of a method in one repetition is the mean over the clients; then there is a mean over the
repetitions with a 95 % interval, which speaks of the plan's population. Of a grid, all members are in the
table, and the one that is best on validation data is compared with the other methods.

Three kinds of methods get no verdict: those that diverged in any repetition, those that were still improving
when their training ended and are behind, and, with one repetition, all.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from descant.algorithms import LocalTrain
from descant.comparison import measure as figures
from descant.comparison import progress, statistics
from descant.comparison.finished import Finished
from descant.comparison.finished import read as read_run
from descant.comparison.plan import Plan, Population
from descant.comparison.sample import analyse, gain_over, is_ratio, level_of, oriented, sample_of
from descant.comparison.statistics import ROUNDING, Analysis, Interval, Pair, interval
from descant.core.files import write_atomic
from descant.core.units import is_share
from descant.errors import unknown
from descant.experiment import directory as layout

WORST = 10  # a decile
FIRST = ("personal", "global", "worst_decile", "gain", "worse_off", "unseen",
         "bytes_per_client", "grad_steps", "seconds")  # of the columns of results.csv
NONE = (float("-inf"),)  # the validation figures of a run without validation data
WORTH = 0.01  # a smaller difference of shares is none that matters, nor is 1 % of a loss
ALTERNATIVES = ("accuracy", "balanced_accuracy", "auroc")  # what else one could have decided by

Verdict: TypeAlias = Literal["better", "no difference found", "equivalent", "withheld", "diverged"]


class Row(NamedTuple):
    """A method in the table."""

    label: str
    rounds: int
    seeds: int
    figures: dict[str, Interval]  # "personal", "global", "worst_decile", "gain", "grad_steps", ...
    beside_alone: int  # clients of which it is known whether they are better off than alone


class Difference(NamedTuple):
    """By how much the best method is better than another, paired over the repetitions."""

    label: str
    against: str
    mean: float  # less than zero where the other has the better figure, and has failed more clients
    low: float | None  # the simultaneous interval, which leaves out zero exactly if p is below the level
    high: float | None
    p: float | None  # two-sided, corrected over all pairs; None with one repetition
    verdict: Verdict
    ratio: Pair | None  # logarithms of ratios, where these are compared
    clients_p: float | None  # Wilcoxon's, over the clients' means over the repetitions
    clients_better: int  # how many of them are better off with `label`, and worse off
    clients_worse: int


class Other(NamedTuple):
    """What another metric would say."""

    metric: str
    best: str
    levels: tuple[float, float]  # of that method, and of the best by the metric that decides
    significant: bool


class Share(NamedTuple):
    """Some of the repetitions of a method."""

    some: int
    of: int


class Outlook(NamedTuple):
    """Whether more repetitions are worth their time."""

    decided: bool
    more: int | None  # repetitions that would probably settle what can be settled; None: none can
    why: str


class Results(NamedTuple):
    """All that is known of a comparison at the moment."""

    plan: Plan
    metric: str  # the one that decides
    lower_is_better: bool
    finished: list[Finished]
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

    @property
    def best(self) -> str | None:
        """Of several methods."""
        return self.compared[0] if len(self.compared) > 1 else None

    @property
    def worth(self) -> float:
        """A difference that is too small to matter; zero where nobody can know."""
        return WORTH if is_share(self.metric) or is_ratio(self.metric, self.plan) else 0.0

    @property
    def population(self) -> Population:
        return self.plan.population


def read(plan: Plan, metric: str | None = None) -> Results:
    """The results so far. `metric` is what decides; without it the plan's, accuracy, or the loss."""
    finished = [found for run in plan.runs() if (found := read_run(run)) is not None]
    metric, lower = _metric(plan, finished, metric or plan.metric)
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
    clients = {label: _by_client([run.values(metric) for run in found
                                  if run.seed in seeds or label in left_out], everyone)
               for label, found in of.items()}
    rows = [_row(found, metric, plan, [] if reference is None else of[reference]) for found in of.values()]
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
    return results._replace(rows=_sorted(results))


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
    by_ratio = is_ratio(found.metric, found.plan)
    for k, other in enumerate(found.compared[1:], 1):
        pair = found.analysis.beside(0, k)
        # of a ratio, what it means for the level of the best
        ends = [None if end is None else found.level.mean * math.expm1(end) if by_ratio else end
                for end in (pair.mean, pair.low, pair.high)]
        gains = sign * (found.clients[best] - found.clients[other])
        rows.append(Difference(
            best, other, float("nan") if ends[0] is None else ends[0], ends[1], ends[2], pair.p,
            _verdict(found, other, pair), pair if by_ratio else None,
            statistics.wilcoxon(found.clients[best], found.clients[other]),
            int((gains > ROUNDING).sum()), int((gains < -ROUNDING).sum())))
    return rows + [Difference(best, label, float("nan"), None, None, None, "diverged", None, None, 0, 0)
                   for label in found.diverged if not _is_beaten(found.plan, label, found.chosen)]


def _verdict(found: Results, other: str, pair: Pair) -> Verdict:
    if pair.p is None or pair.low is None or pair.high is None or other in found.unfinished or (
            pair.mean < 0 and found.lost[other] > found.lost[found.compared[0]]):
        return "withheld"
    assert found.analysis is not None
    if pair.p < found.analysis.level:
        return "better"
    return "equivalent" if max(-pair.low, pair.high) < found.worth else "no difference found"


def _others(found: Results, of: Mapping[str, Sequence[Finished]], seeds: Sequence[int]) -> list[Other]:
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
            p = analyse(sample, metric, found.plan, found.population).beside(best, 0).p
            others.append(Other(metric, found.compared[best], (float(scores[best]), float(scores[0])),
                                p is not None and p < statistics.LEVEL / found.plan.looks))
    return others


def outlook(results: Results) -> Outlook:
    """Whether all of the best method's differences are settled: significant, or too small to matter; and how
    many more repetitions would settle the rest."""
    if results.analysis is None:
        return Outlook(True, None, "there are no two methods to compare")
    if results.repetitions < 2:
        return Outlook(False, 4, "one repetition says nothing about another")
    needed = still_needed(results)
    if not needed:
        return Outlook(True, None, "every difference is significant, or too small to matter")
    known = [more for more in needed.values() if more is not None]
    return Outlook(False, max(known), f"no significant difference from {', '.join(needed)} so far"
                   ) if known else Outlook(False, None, hopeless(results))


def still_needed(results: Results) -> dict[str, int | None]:
    """Of the methods from which the best one does not differ so far, how many more repetitions would probably
    settle that; None where no number of them would."""
    analysis, found = results.analysis, {}
    for k, gap in enumerate(results.differences, 1):
        if analysis is not None and gap.verdict == "no difference found":
            count = statistics.needed(analysis.beside(0, k), analysis, results.worth)
            found[gap.against] = None if count is None else count - results.repetitions
    return found


def hopeless(results: Results) -> str:
    """Why more repetitions would not settle some differences."""
    assert results.analysis is not None
    pairs = [results.analysis.beside(0, k) for k, gap in enumerate(results.differences, 1)
             if gap.verdict == "no difference found"]
    if any(pair.lasting > pair.repetition / statistics.MOST_REPETITIONS for pair in pairs):
        return "there are too few clients" if results.population == "new clients" else (
            "there are too few test rows")
    return f"it would take more than {statistics.MOST_REPETITIONS} repetitions"


def seconds(results: Results) -> float:
    """What training takes in one repetition of all methods, one run after another."""
    return sum(row.figures["seconds"].mean for row in results.rows)


def _still_improving(found: Sequence[Finished], metric: str, lower: bool) -> Share | None:
    """In how many repetitions a method was still improving when its training ended; None if it was not."""
    gains = [progress.last_gain(layout.read_metrics(run.place), metric, lower=lower) for run in found
             if run.summary.get("stopped") != "converged"]
    count = progress.still_improving(gains)
    return None if count is None else Share(count, len(found))


# -- the runs --------------------------------------------------------------------------------------------


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


def _compared(plan: Plan, of: Mapping[str, Sequence[Finished]], chosen: Mapping[str, str], metric: str,
              diverged: Mapping[str, Share]) -> tuple[list[int], dict[str, str]]:
    """The seeds that methods are compared over, all the same ones; and which methods are left out, and why. A
    method that has few of the seeds would leave few for all: it is left out until it has more."""
    left_out = {label: "another of its grid is better on validation data" for label in of
                if _is_beaten(plan, label, chosen)}
    left_out |= {label: f"it diverged in {share.some} of {share.of} repetitions"
                 for label, share in diverged.items() if label not in left_out}
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


def _row(found: Sequence[Finished], metric: str, plan: Plan, alone: Sequence[Finished]) -> Row:
    cells: dict[str, list[float]] = {}
    shares: set[str] = set()  # keys of figures between 0 and 1
    lower = metric in plan.metrics and plan.metrics[metric].lower_is_better

    def note(key: str, value: float, name: str = "") -> None:
        cells.setdefault(key, []).append(value)
        if is_share(name):
            shares.add(key)

    names = dict.fromkeys(name for run in found for name in run.columns if name not in figures.FACTS)
    for run in found:
        for model in ("personal", "global"):
            for name in names:
                of = model if name == metric else f"{model}_{name}"
                for which, suffix in (("best", ""), ("last", "_last")):
                    if values := run.values(name, which, model):
                        note(f"{of}{suffix}", _mean(values), name)
                if name in run.columns and np.isfinite(pooled := run.pooled(name, model)):
                    note(f"{of}_pooled", pooled, name)
            for which, suffix in (("best", ""), ("last", "_last")):
                error = ((run.summary[which] or run.summary["last"]).get(model) or {}).get("truth_error")
                if error is not None:
                    note(f"{model}_truth_error{suffix}", error)
        note("worst_decile", _worst(run.values(metric), lower), metric)
        if unseen := run.values(metric, unseen=True):
            note("unseen", _mean(unseen), metric)
        costs = run.summary
        note("bytes_per_client", (costs["bytes_down"] + costs["bytes_up"]) / costs["clients"])
        note("grad_steps", costs["grad_steps"])
        note("seconds", costs["seconds"])
    row = {"personal": interval([])} | {
        key: interval(values).within(0.0, 1.0) if key in shares else interval(values)
        for key, values in cells.items()}
    for name in names:  # of these it is known what else might have been drawn
        if (sample := sample_of([found], name)) is not None:
            row["personal" if name == metric else f"personal_{name}"] = level_of(sample, name, plan)
    beside_alone = 0
    if alone:
        both = {run.seed for run in found} & {run.seed for run in alone}
        pairs = [[run for run in each if run.seed in both] for each in (found, alone)]
        row["gain"] = gain_over(pairs, metric, plan)
        gains = [gain for run in found for other in alone
                 if run.seed == other.seed and (gain := _gains(run, other, metric, lower))]
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
    """One row for each method, best first: every figure with the ends of its interval. Beside it, in
    `differences.csv`, all pairs of methods."""
    there = dict.fromkeys(key for row in results.rows for key in row.figures)
    keys = [*(key for key in FIRST if key in there), *(key for key in there if key not in FIRST)]
    nobody = Share(0, 0)
    table = [["method", "algorithm", "seeds", "rounds", "metric",
              *(f"{key}{end}" for key in keys for end in ("", "_low", "_high")),
              "diverged", "still_improving"]]
    for row in results.rows:
        cells = [cell for key in keys for cell in _ends(row.figures.get(key))]
        name = results.plan.methods[row.label].asked["name"]
        table.append([row.label, name, str(row.seeds), str(row.rounds), results.metric, *cells,
                      str(results.diverged.get(row.label, nobody).some),
                      str(results.unfinished.get(row.label, nobody).some)])
    _write(table, path)
    _write(_pairs(results), path.with_name("differences.csv"))


def _pairs(results: Results) -> list[list[str]]:
    """All pairs, the better one first; a ratio of losses as its logarithm."""
    table = [["method", "against", "metric", "population", "scale", "repetitions",
              "mean", "low", "high", "p"]]
    scale = "log ratio" if is_ratio(results.metric, results.plan) else "difference"
    pairs = {} if results.analysis is None else results.analysis.pairs
    for (a, b), pair in pairs.items():
        ends = [*pair[:3], pair.p]
        table.append([results.compared[a], results.compared[b], results.metric, results.population, scale,
                      str(results.repetitions), *("" if end is None else repr(end) for end in ends)])
    return table


def _write(table: Sequence[Sequence[str]], path: Path) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table)
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

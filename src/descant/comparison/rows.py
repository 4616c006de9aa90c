"""The rows of the table of results: every figure of a method, with an interval; and results.csv."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from descant.comparison import finished
from descant.comparison.finished import FinishedRun
from descant.comparison.plan import Plan
from descant.comparison.sample import gain_over, level_of, sample_of
from descant.comparison.statistics import ROUNDING, Interval, interval
from descant.core.metric import is_share

WORST = 10  # a decile
MAIN = ("personal", "global", "worst_decile", "gain", "worse_off", "unseen")  # of the metric that decides
COSTS = ("epsilon", "bytes_per_client", "grad_steps", "seconds")


class Row(NamedTuple):
    """A method in the table."""

    label: str
    rounds: int
    seeds: int
    figures: dict[str, Interval]  # "personal", "global", "worst_decile", "gain", "grad_steps", ...
    beside_alone: int  # clients for which training alone is known too


def row_of(found: Sequence[FinishedRun], metric: str, plan: Plan, alone: Sequence[FinishedRun]) -> Row:
    """The row of a method's runs; `alone` are the runs of LocalTrain."""
    lower = plan.lower_is_better(metric)
    names = dict.fromkeys(name for run in found for name in run.columns if name not in finished.FACTS)
    cells: dict[str, list[float]] = {}
    shares: set[str] = set()  # keys of figures between 0 and 1
    for run in found:
        for key, name, value in _figures(run, names, metric, lower):
            cells.setdefault(key, []).append(value)
            if is_share(name):
                shares.add(key)
    row = {"personal": interval([])} | {
        key: interval(values).within(0.0, 1.0) if key in shares else interval(values)
        for key, values in cells.items()}
    for name in names:  # where it is known what else might have been drawn
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
            mean = by_client(gains, 1 + max(max(gain) for gain in gains))
            known = mean[np.isfinite(mean)]
            beside_alone = len(known)
            row["worse_off"] = Interval(float((known < -ROUNDING).mean()), None, None, len(gains))
    return Row(found[0].label, found[0].rounds, len(found), row, beside_alone)


def _figures(run: FinishedRun, names: Sequence[str] | Mapping[str, None], metric: str, lower: bool
             ) -> Iterator[tuple[str, str, float]]:
    """The figures of a run: column, metric and value."""
    for model in ("personal", "global", "everywhere"):
        for name in names:
            of = model if name == metric else f"{model}_{name}"
            for which, suffix in (("best", ""), ("last", "_last")):
                if values := run.values(name, which, model):
                    yield f"{of}{suffix}", name, _mean(values)
            if name in run.columns and np.isfinite(pooled := run.pooled(name, model)):
                yield f"{of}_pooled", name, pooled
        for which, suffix in (("best", ""), ("last", "_last")):
            error = ((run.summary[which] or run.summary["last"] or {}).get(model) or {}).get("truth_error")
            if error is not None:
                yield f"{model}_truth_error{suffix}", "", error
    ordered = sorted(run.values(metric).values(), reverse=lower)
    worst = ordered[: -(-len(ordered) // WORST)]
    yield "worst_decile", metric, float(np.mean(worst)) if worst else float("nan")
    if unseen := run.values(metric, unseen=True):
        yield "unseen", metric, _mean(unseen)
    costs = run.summary
    if "privacy" in costs:
        yield "epsilon", "", costs["privacy"]["epsilon"]
    yield "bytes_per_client", "", (costs["bytes_down"] + costs["bytes_up"]) / costs["clients"]
    yield "grad_steps", "", costs["grad_steps"]
    yield "seconds", "", costs["seconds"]


def _mean(values: Mapping[int, float]) -> float:
    return float(np.mean(list(values.values())))


def _gains(run: FinishedRun, alone: FinishedRun, metric: str, lower: bool) -> dict[int, float]:
    """By how much each client is better off than alone."""
    own, other = run.values(metric), alone.values(metric)
    sign = -1.0 if lower else 1.0
    return {client: sign * (own[client] - other[client]) for client in own if client in other}


def by_client(seeds: Sequence[Mapping[int, float]], everyone: int) -> np.ndarray:
    """The mean over the seeds of each client's figure; NaN for a client that was not evaluated."""
    table = np.full((len(seeds), everyone), np.nan)
    for row, values in zip(table, seeds, strict=True):
        row[list(values)] = list(values.values())
    return mean_over_seeds(table)


def mean_over_seeds(table: np.ndarray) -> np.ndarray:
    """The mean of each column over what is known; NaN where nothing is."""
    return np.asarray(np.ma.masked_invalid(table).mean(0).filled(np.nan))

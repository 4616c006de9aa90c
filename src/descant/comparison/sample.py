"""The figures of methods side by side, as arrays for the statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from descant.comparison import statistics
from descant.comparison.finished import FinishedRun
from descant.comparison.plan import Plan, Population
from descant.comparison.statistics import Analysis, Interval, Units, interval
from descant.core.metric import is_share


class Sample(NamedTuple):
    """The figures of methods over the repetitions and clients that all of them have."""

    scores: np.ndarray  # [R, M] means over the clients
    clients: np.ndarray  # [R, C, M] NaN where a client is not compared
    rows: Units | None  # None where it is not known what each test row does

    @property
    def people(self) -> int:
        """How many clients are compared."""
        return int(np.isfinite(self.clients).all(2).any(0).sum())

    def of(self, methods: Sequence[int]) -> Sample:
        at = list(methods)
        rows = None if self.rows is None else self.rows._replace(influence=self.rows.influence[..., at])
        return Sample(self.scores[:, at], self.clients[..., at], rows)

    def units(self, population: Population) -> Units | None:
        """What was drawn by chance beside the repetitions."""
        if population == "rows":
            return None
        return self.rows if population == "clients" else statistics.of_clients(self.clients)


def sample_of(methods: Sequence[Sequence[FinishedRun]], metric: str) -> Sample | None:
    """Of the runs of each method with the same seeds; None where no client is left. A client without a figure
    with one method is left out of that repetition."""
    together = [{run.seed: run for run in found} for found in methods]
    seeds = sorted(together[0]) if together else []
    values = {seed: [of[seed].values(metric) for of in together] for seed in seeds}
    common = {seed: sorted(set.intersection(*({*each} for each in found))) for seed, found in values.items()}
    seeds = [seed for seed in seeds if common[seed]]
    if not seeds:
        return None
    clients = np.full((len(seeds), 1 + max(max(common[seed]) for seed in seeds), len(together)), np.nan)
    for r, seed in enumerate(seeds):
        for m, each in enumerate(values[seed]):
            clients[r, common[seed], m] = [each[client] for client in common[seed]]
    runs = [[of[seed] for of in together] for seed in seeds]
    there = np.isfinite(clients).all(2, keepdims=True)
    weights = np.broadcast_to(there / there.sum(1, keepdims=True), clients.shape)
    return Sample(np.nanmean(clients, 1), clients, units_of(runs, metric, weights))


def units_of(runs: Sequence[Sequence[FinishedRun]], metric: str, weights: np.ndarray) -> Units | None:
    """The test rows as units, of runs [R][M] in whose figures the clients have weights [R, C, M]; None where
    it is not known what each of them does."""
    tables = [[run.single for run in each] for each in runs]
    if any(table is None or metric not in table.rows for each in tables for table in each):
        return None
    known = [[table.rows for table in each if table is not None] for each in tables]
    numbers = np.unique(np.concatenate([table["row"] for each in known for table in each]))
    influence = np.zeros((len(runs), len(numbers), weights.shape[2]))
    owners = np.full(len(numbers), -1)
    for r, each in enumerate(known):
        is_compared = weights[r].any(1)
        for m, table in enumerate(each):
            there = np.isin(table["client"], np.flatnonzero(is_compared))
            at, client = np.searchsorted(numbers, table["row"][there]), table["client"][there]
            influence[r, at, m] = np.nan_to_num(table[metric][there]) * weights[r, client, m]
            owners[at] = client
    return Units(influence, int((owners >= 0).sum()) - len({*owners[owners >= 0].tolist()}))


def oriented(sample: Sample, metric: str, plan: Plan, population: Population | None
             ) -> tuple[np.ndarray, Units | None]:
    """Scores of which more is better, and their units, on the scale on which methods are compared."""
    scores = sample.scores
    units = None if population is None else sample.units(population)
    if plan.is_ratio(metric) and (scores > 0).all():
        scores, units = statistics.logarithms(scores, units)
    if plan.lower_is_better(metric):
        scores, units = -scores, None if units is None else units._replace(influence=-units.influence)
    return scores, units


def analyse(sample: Sample, metric: str, plan: Plan, population: Population) -> Analysis:
    scores, units = oriented(sample, metric, plan, population)
    return statistics.compare(scores, units, level=statistics.LEVEL / plan.looks)


def level_of(sample: Sample, metric: str, plan: Plan) -> Interval:
    """The figure of one method, with an interval of possible values."""
    found = statistics.level(sample.scores[:, 0], sample.units(plan.population))
    least = 0.0 if is_share(metric) or plan.is_ratio(metric) else -math.inf
    return found.within(least, 1.0 if is_share(metric) else math.inf)


def gain_over(both: Sequence[Sequence[FinishedRun]], metric: str, plan: Plan) -> Interval:
    """By how much a client is better off with the first method than with the second, on average."""
    sample = sample_of(both, metric)
    if sample is None:
        return interval([])
    sign = np.array([1.0, -1.0]) * (-1.0 if plan.lower_is_better(metric) else 1.0)
    units = sample.units(plan.population)
    if units is not None:
        units = units._replace(influence=(units.influence @ sign)[..., None])
    return statistics.level(sample.scores @ sign, units)

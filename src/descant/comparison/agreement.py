"""How far the results agree with what a paper has published: figures, orders, and each ordering of two."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from scipy import stats

from descant.comparison import statistics
from descant.comparison.finished import FinishedRun
from descant.comparison.paper import Figure, NearClaim, Paper, PaperClaim
from descant.comparison.plan import Plan
from descant.comparison.rows import Row
from descant.comparison.sample import Sample, oriented, units_of
from descant.comparison.seeds import shared_seeds
from descant.comparison.statistics import Interval, Pair, interval

ROW_MEANS = ("accuracy", "loss", "mse")  # over rows together they are means of the clients', by their sizes

Appearance: TypeAlias = Literal["appears", "reversed", "open"]


class Ordering(NamedTuple):
    """A method that the paper has ahead of another, and what ours say of the two."""

    better: str
    worse: str
    paper: float  # how far they are apart there, in the unit of the metric
    ours: Pair  # by how much `better` is better; a ratio of losses as its logarithm
    appearance: Appearance  # open: no significant difference in ours, or one repetition
    covers_rows: bool  # whether the noise of the test rows is in the test, or that of the repetitions alone


class Order(NamedTuple):
    """The methods in the paper's order, and how far ours is the same."""

    methods: list[str]  # best first in the paper
    tau: Interval  # Kendall's, of the two orders in each repetition; ties count as in tau-b
    orderings: list[Ordering]  # all pairs of methods that the paper does not have at the same figure
    variant: str | None = None  # which other reading stands in the place of a method


class Outcome(NamedTuple):
    """What ours say of a claim about two methods."""

    claim: PaperClaim
    levels: tuple[float, float]  # of the better and the worse one, in ours
    ours: Pair  # by how much `better` is better, over the repetitions
    appearance: Appearance


class Nearness(NamedTuple):
    """What ours say of a claim about a method beside the best of others."""

    claim: NearClaim
    level: float  # of the method, in ours
    best: str  # of the others, in ours
    level_of_best: float
    holds: bool


class Agreement(NamedTuple):
    """The paper beside ours."""

    paper: Paper
    ours: dict[str, Interval]  # label -> what of ours the paper's figure is compared with
    repetitions: int
    orders: list[Order]  # with the first reading of each method, then with each variant in its place
    orderings: list[Ordering]  # of all methods and variants
    claims: list[Outcome]  # those of which both methods have runs
    near: list[Nearness]  # those of which all methods have runs

    def gap(self, label: str) -> Interval:
        """Ours less the paper's."""
        mean, low, high, seeds = self.ours[label]
        value = self.paper.figures[label].value
        return Interval(mean - value, None if low is None else low - value,
                        None if high is None else high - value, seeds)

    def with_appearance(self, appearance: Appearance) -> list[Ordering]:
        return [each for each in self.orderings if each.appearance == appearance]


def agreement(paper: Paper, plan: Plan, metric: str, rows: Sequence[Row],
              runs: Mapping[str, Sequence[FinishedRun]]) -> Agreement:
    """Of the `rows` of a table that `metric` decides, and of the `runs` of methods that did not diverge."""
    found = {row.label: row.figures.get(_key(paper.figures[row.label], paper.metric, metric))
             for row in rows if row.label in paper.figures and row.label in runs}
    ours = {label: figure for label, figure in found.items()
            if figure is not None and np.isfinite(figure.mean)}
    scores = {label: {run.seed: value for run in runs[label]
                      if np.isfinite(value := figure_of(run, paper.metric, paper.figures[label].column))}
              for label in paper.figures if label in runs}
    seeds, left_out = shared_seeds({label: set(known) for label, known in scores.items() if known})
    sign = -1.0 if plan.lower_is_better(paper.metric) else 1.0
    methods = sorted((label for label, known in scores.items() if known and label not in left_out),
                     key=lambda label: -sign * paper.figures[label].value)
    claims, near = _outcomes(paper, plan, runs), _nearness(paper, plan, runs)
    if len(methods) < 2 or not seeds:
        of_any = {run.seed for found in runs.values() for run in found}
        return Agreement(paper, ours, len(of_any if claims or near else seeds), [], [], claims, near)
    table = np.array([[scores[label][seed] for label in methods] for seed in seeds])
    together = [[run for label in methods for run in runs[label] if run.seed == seed] for seed in seeds]
    orderings = _orderings(paper, plan, methods, table, together)
    orders = _orders(paper, methods, table, orderings)
    return Agreement(paper, ours, len(seeds), orders, orderings, claims, near)


def _orders(paper: Paper, methods: Sequence[str], table: np.ndarray, orderings: Sequence[Ordering]
            ) -> list[Order]:
    """Of all methods with their figures [R, M]. A printed figure counts once in an order."""
    found = []
    for variant, chosen in readings(paper.figures, methods).items():
        if len(chosen) > 1:
            own = table[:, [methods.index(label) for label in chosen]]
            printed = [paper.figures[label].value for label in chosen]
            # a constant order, as of equal figures, has no tau
            taus = [float(stats.kendalltau(printed, row).statistic) for row in own]
            found.append(Order(chosen, interval(taus).within(-1.0, 1.0),
                               [each for each in orderings if {each.better, each.worse} <= {*chosen}],
                               variant))
    return found


def readings(figures: Mapping[str, Figure], methods: Sequence[str]) -> dict[str | None, list[str]]:
    """The methods without variants, and with each variant in the place of its method."""
    first = [label for label in methods if figures[label].of is None]
    return {None: first} | {
        variant: [label for label in methods
                  if label == variant or (label in first and label != figures[variant].of)]
        for variant in methods if variant not in first}


def _outcomes(paper: Paper, plan: Plan, runs: Mapping[str, Sequence[FinishedRun]]) -> list[Outcome]:
    """The claims beside ours. All figures that claims speak of are one sample, so that the tests are
    corrected for their number."""
    places = list(dict.fromkeys((label, claim.column) for claim in paper.claims
                                for label in (claim.better, claim.worse) if label in runs))
    scores = {place: {run.seed: value for run in runs[place[0]]
                      if np.isfinite(value := figure_of(run, paper.metric, place[1]))} for place in places}
    places = [place for place in places if scores[place]]
    seeds = sorted(set.intersection(*(set(scores[place]) for place in places))) if places else []
    if len(places) < 2 or not seeds:
        return []
    table, level = np.array([[scores[place][seed] for place in places] for seed in seeds]), (
        statistics.LEVEL / plan.looks)
    analysis = statistics.compare(*oriented(Sample(table, table[:, None], None), paper.metric, plan, "rows"),
                                  level=level)
    found = []
    for claim in paper.claims:
        at = [(label, claim.column) for label in (claim.better, claim.worse)]
        if not all(place in places for place in at):
            continue
        a, b = (places.index(place) for place in at)
        pair = analysis.beside(a, b)
        found.append(Outcome(claim, (float(table[:, a].mean()), float(table[:, b].mean())), pair,
                             appearance(pair, level)))
    return found


def _nearness(paper: Paper, plan: Plan, runs: Mapping[str, Sequence[FinishedRun]]) -> list[Nearness]:
    """Of means over the repetitions that all methods of a claim have."""
    sign, found = -1.0 if plan.lower_is_better(paper.metric) else 1.0, []
    for claim in paper.near:
        scores = {label: {run.seed: value for run in runs.get(label, ())
                          if np.isfinite(value := figure_of(run, paper.metric, claim.column))}
                  for label in (claim.method, *claim.best_of)}
        seeds = sorted(set.intersection(*map(set, scores.values())))
        if not seeds:
            continue
        level = {label: float(np.mean([known[seed] for seed in seeds])) for label, known in scores.items()}
        best = max(claim.best_of, key=lambda label: sign * level[label])
        behind = sign * (level[best] - level[claim.method])
        found.append(Nearness(claim, level[claim.method], best, level[best], behind <= claim.near + 1e-12))
    return found


def appearance(pair: Pair, level: float) -> Appearance:
    """What a test says of an ordering."""
    if pair.p is None or pair.p >= level:
        return "open"
    return "appears" if pair.mean > 0 else "reversed"


def beside(row: Row, found: Agreement) -> Row:
    """A row of the table with the paper's figure, and by how much ours is more."""
    if row.label not in found.ours:
        return row
    metric, printed = found.paper.metric, Interval(found.paper.figures[row.label].value, None, None, 0)
    return row._replace(figures=row.figures | {
        f"paper_{metric}": printed, f"paper_difference_{metric}": found.gap(row.label)})


def figure_of(run: FinishedRun, metric: str, column: str) -> float:
    """A run's figure in one of the columns that a paper's can be compared with; NaN if there is none."""
    model, _, which = column.partition("_")
    if which == "pooled":
        return run.pooled(metric, model) if metric in run.columns else float("nan")
    values = run.values(metric, which or "best", model)
    return float(np.mean(list(values.values()))) if values else float("nan")


def _key(figure: Figure, metric: str, deciding: str) -> str:
    """Where a row of the table has what a figure is compared with."""
    model, *suffix = figure.column.split("_")
    return "_".join([model, *([] if metric == deciding else [metric]), *suffix])


def _orderings(paper: Paper, plan: Plan, methods: Sequence[str], table: np.ndarray,
               runs: Sequence[Sequence[FinishedRun]]) -> list[Ordering]:
    """Of methods sorted by the paper's figures, by ours [R, M] and their runs [R][M]. What single rows do is
    measured of the clients' own models at the best round, and of the model for all it is not."""
    columns = [paper.figures[label].column for label in methods]
    known = [column == "personal" or (column == "personal_pooled" and paper.metric in ROW_MEANS)
             for column in columns]
    units = None
    if plan.population != "rows" and any(known):
        units = units_of(runs, paper.metric, _weights(runs, paper.metric, columns, known))
    sample, level = Sample(table, table[:, None], units), statistics.LEVEL / plan.looks
    of_seeds = statistics.compare(*oriented(sample, paper.metric, plan, "rows"), level=level)
    of_both = statistics.compare(*oriented(sample, paper.metric, plan, "clients"), level=level)
    found = []
    for a, b in itertools.combinations(range(len(methods)), 2):
        lead = abs(paper.figures[methods[a]].value - paper.figures[methods[b]].value)
        if not lead:  # nor have two readings of one figure an order
            continue
        covers_rows = units is not None and known[a] and known[b]
        pair = (of_both if covers_rows else of_seeds).beside(a, b)
        found.append(Ordering(methods[a], methods[b], lead, pair, appearance(pair, level), covers_rows))
    return found


def _weights(runs: Sequence[Sequence[FinishedRun]], metric: str, columns: Sequence[str],
             known: Sequence[bool]) -> np.ndarray:
    """What each client counts in each figure, [R, C, M]; nothing in figures whose rows are not known."""
    everyone = 1 + max(int(run.columns["client"].max()) for each in runs for run in each)
    weights = np.zeros((len(runs), everyone, len(columns)))
    for r, each in enumerate(runs):
        for m, (run, column) in enumerate(zip(each, columns, strict=True)):
            if not known[m]:
                continue
            clients = list(run.values(metric))
            weights[r, clients, m] = run.sizes[clients] if column == "personal_pooled" else 1.0
    return np.asarray(weights / np.maximum(weights.sum(1, keepdims=True), 1.0))

"""The claims of a paper beside ours: "claim of the paper | ours | verdict". Verdicts are computed."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from descant.comparison import statistics
from descant.comparison.agreement import Agreement, Appearance, Nearness, Order, Outcome, appearance
from descant.comparison.paper import NearClaim, Paper, PaperClaim
from descant.comparison.results import Results
from descant.comparison.statistics import Interval
from descant.core.files import write_csv
from descant.core.metric import is_share
from descant.core.units import times

NEAR, FAR = 0.01, 0.1  # a share that differs by no more agrees, one that differs by more is not reproduced;
NEAR_RATIO, FAR_RATIO = 0.1, 2.0  # of other figures, 10 % of the printed one, and a factor of two
LEAST_P = 0.001  # a smaller p-value is not told

Verdict: TypeAlias = Literal[
    "agrees", "ours is higher", "ours is lower",  # of figures
    "not reproduced (ours is higher)", "not reproduced (ours is lower)",
    "appears", "reversed", "open",  # of orderings, by significance
    "holds", "holds in part", "does not hold",  # of orders, and of what is simply so, or not
    "diverged", "missing"]


class Claim(NamedTuple):
    """A claim of a paper, what ours say of it, and the verdict."""

    paper: str
    ours: str
    verdict: Verdict
    mean: float | None = None  # of a figure, or of Kendall's tau, with the ends of its interval
    low: float | None = None
    high: float | None = None
    p: float | None = None  # of an ordering, as it is told: two digits, and 0 below 0.001

    @property
    def cells(self) -> tuple[str, str, Verdict]:
        """The claim as people read it."""
        p = "" if self.p is None else f", p = {self.p:g}" if self.p else f", p < {LEAST_P:g}"
        return self.paper, self.ours + p, self.verdict


def of_comparison(results: Results) -> list[Claim]:
    """The figures of a [paper], the order of its methods, and its [[paper.claims]]."""
    found = results.paper
    if found is None:
        return []
    stated = {outcome.claim: outcome for outcome in found.claims}
    beside = {each.claim: each for each in found.near}
    return [*(_level(found, label, results) for label in found.paper.figures),
            *(_order(order, found.paper) for order in found.orders),
            *(_stated(claim, stated.get(claim), found.paper.metric, results)
              for claim in found.paper.claims),
            *(_near(claim, beside.get(claim), found.paper.metric, results)
              for claim in found.paper.near)]


def _level(found: Agreement, label: str, results: Results) -> Claim:
    metric, printed = found.paper.metric, found.paper.figures[label]
    says = f"{label}: {_figure(metric, printed.value)}"
    if label not in found.ours:
        return _without_figure(says, results, label)
    ours = found.ours[label]
    return Claim(says, _ends(metric, ours), near_to(ours.mean, printed.value, share=is_share(metric)),
                 *ours[:3])


def _without_figure(says: str, results: Results, *labels: str) -> Claim:
    """Of methods some of which have diverged in a repetition, or have no run."""
    told = [f"{label} diverged in {share.some} of {times(share.of, 'repetition')}"
            for label in labels if (share := results.diverged.get(label)) is not None]
    return Claim(says, "; ".join(told) or "-", "diverged" if told else "missing")


def near_to(ours: float, paper: float, *, share: bool = False) -> Verdict:
    """Whether a figure is the paper's."""
    if abs(ours - paper) <= (NEAR if share else NEAR_RATIO * abs(paper)) + 1e-12:
        return "agrees"
    far = abs(ours - paper) > FAR + 1e-12 if share else (
        not abs(paper) / FAR_RATIO <= ours * np.sign(paper) <= abs(paper) * FAR_RATIO)
    if ours > paper:
        return "not reproduced (ours is higher)" if far else "ours is higher"
    return "not reproduced (ours is lower)" if far else "ours is lower"


def _order(order: Order, paper: Paper) -> Claim:
    of = None if order.variant is None else paper.figures[order.variant].of
    instead = "" if of is None else f" with {order.variant} in the place of {of}"
    count = Counter(each.appearance for each in order.orderings)
    return Claim(f"the order of {len(order.methods)} methods{instead}, {times(len(order.orderings), 'pair')}",
                 order_words(order.tau, count), order_verdict(count),
                 *((None,) * 3 if math.isnan(order.tau.mean) else order.tau[:3]))


def order_words(tau: Interval, count: Mapping[Appearance, int]) -> str:
    """Tau, which equal figures do not have, and how many pairs appear."""
    ends = "" if tau.low is None or tau.high is None else f" ({tau.low:.2f} to {tau.high:.2f})"
    said = "" if math.isnan(tau.mean) else f"Kendall's tau {tau.mean:.2f}{ends}; "
    return (f"{said}of the pairs {count['appears']} appear, {count['reversed']} reversed, "
            f"{count['open']} open")


def order_verdict(count: Mapping[Appearance, int]) -> Verdict:
    """An order holds if all of its pairs appear, and in part if nothing significant speaks against it."""
    if count["reversed"]:
        return "does not hold"
    return "open" if not count["appears"] else "holds in part" if count["open"] else "holds"


def _stated(claim: PaperClaim, outcome: Outcome | None, metric: str, results: Results) -> Claim:
    if outcome is None:
        return _without_figure(claim.says, results, claim.better, claim.worse)
    better, worse = (_figure(metric, level) for level in outcome.levels)
    return Claim(claim.says, f"{claim.better} {better}, {claim.worse} {worse}", outcome.appearance,
                 p=_told(outcome.ours.p))


def _near(claim: NearClaim, found: Nearness | None, metric: str, results: Results) -> Claim:
    if found is None:
        return _without_figure(claim.says, results, claim.method, *claim.best_of)
    method, best = (_figure(metric, level) for level in (found.level, found.level_of_best))
    return fact(claim.says, f"{claim.method} {method}, {found.best} {best}", found.holds)


# -- for studies ---------------------------------------------------------------------------------------


def of(rows: Sequence[Mapping[str, Any]], figure: str, **where: Any) -> list[float]:
    """A figure in the repetitions of one point, in the order of the seeds."""
    found = [row for row in rows if all(row[name] == value for name, value in where.items())]
    return [float(row[figure]) for row in sorted(found, key=lambda row: row["seed"])]


def ordering(says: str, better: Sequence[float], worse: Sequence[float], *, lower: bool = True,
             words: tuple[str, str] = ("", "")) -> Claim:
    """A claim that one thing is ahead of another, by their figures in the same repetitions: a paired t-test,
    which `corrected` judges among the others of the study. `lower` figures are better."""
    ahead, behind = np.asarray(better, float), np.asarray(worse, float)
    if lost := [name or "one of both" for name, found in zip(words, (ahead, behind), strict=True)
                if not np.isfinite(found).all()]:
        return Claim(says, f"{' and '.join(lost)} diverged", "diverged")
    pair = statistics.compare((-1.0 if lower else 1.0) * np.stack([ahead, behind], 1)).beside(0, 1)
    return Claim(says, f"{words[0]} {ahead.mean():.4g}, {words[1]} {behind.mean():.4g}".strip(),
                 appearance(pair, statistics.LEVEL), p=pair.p)


def corrected(claims: Sequence[Claim]) -> list[Claim]:
    """The claims of a study, with the p-values of its orderings corrected for their number."""
    tests = sum(claim.p is not None for claim in claims)
    return [claim if claim.p is None else _among(claim, claim.p, tests) for claim in claims]


def _among(claim: Claim, p: float, tests: int) -> Claim:
    p = float(statistics.corrected(np.asarray(p), tests))
    return claim._replace(verdict=claim.verdict if p < statistics.LEVEL else "open", p=_told(p))


def fact(says: str, ours: str, holds: bool) -> Claim:
    """A claim that holds, or does not, without a test."""
    return Claim(says, ours, "holds" if holds else "does not hold")


def always(says: str, holds: np.ndarray, ours: str = "") -> Claim:
    """A claim that holds if it does in every repetition."""
    seen = f"in {int(holds.sum())} of {len(holds)} repetitions"
    return fact(says, f"{seen} ({ours})" if ours else seen, bool(holds.all()))


def _figure(metric: str, value: float) -> str:
    return f"{100 * value:.2f} %" if is_share(metric) else f"{value:.4g}"


def _ends(metric: str, value: Interval) -> str:
    if value.low is None or value.high is None:
        return _figure(metric, value.mean)
    return f"{_figure(metric, value.mean)} ({_figure(metric, value.low)} to {_figure(metric, value.high)})"


def _told(p: float | None) -> float | None:
    """A p-value to two digits, or to as many as keep it on its side of 5 %."""
    if p is None or p < LEAST_P:
        return None if p is None else 0.0
    digits = next(digits for digits in range(2, 18)
                  if (float(f"{p:.{digits}g}") < statistics.LEVEL) == (p < statistics.LEVEL))
    return float(f"{p:.{digits}g}")


# -- files ---------------------------------------------------------------------------------------------


def write(claims: Sequence[Claim], path: Path) -> None:
    rows = [[*claim[:3], *("" if value is None else repr(float(value)) for value in claim[3:])]
            for claim in claims]
    write_csv(path, [Claim._fields, *rows])


def read(path: Path) -> list[Claim]:
    with path.open(newline="", encoding="utf-8") as file:
        return [Claim(*row[:3], *(float(cell) if cell else None for cell in row[3:]))  # type: ignore[arg-type]
                for row in list(csv.reader(file))[1:]]

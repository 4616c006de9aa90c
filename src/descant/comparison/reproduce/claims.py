"""The claims of a paper beside ours: "claim of the paper | ours | verdict". Verdicts are computed."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from descant.comparison import statistics
from descant.comparison.agreement import Agreement, Appearance
from descant.comparison.results import Results
from descant.comparison.statistics import Interval
from descant.core.files import write_csv
from descant.core.metric import is_share
from descant.core.units import times

NEAR = 0.01  # a figure that differs by no more, of a share, agrees; of others, 10 %
NEAR_RATIO = 0.1

Verdict: TypeAlias = Literal[
    "agrees", "ours is higher", "ours is lower",  # of figures
    "appears", "reversed", "open",  # of orderings, by significance
    "holds", "does not hold",  # of what is simply so, or not
    "diverged", "missing"]


class Claim(NamedTuple):
    """A claim of a paper, what ours say of it, and the verdict."""

    paper: str
    ours: str
    verdict: Verdict


def of_comparison(results: Results) -> list[Claim]:
    """The figures of a [paper], the order of its methods, and its [[paper.claims]]."""
    found = results.paper
    if found is None:
        return []
    claims = [_level(found, label, results) for label in found.paper.figures]
    if len(found.methods) > 1:
        claims += _orders(found)
    stated = {outcome.claim: outcome for outcome in found.claims}
    for claim in found.paper.claims:
        outcome = stated.get(claim)
        claims.append(Claim(claim.says, "-", "missing") if outcome is None else Claim(
            claim.says, f"{claim.better} {_figure(found.paper.metric, outcome.levels[0])}, {claim.worse} "
                        f"{_figure(found.paper.metric, outcome.levels[1])}{_p(outcome.ours.p)}",
            outcome.appearance))
    return claims


def _level(found: Agreement, label: str, results: Results) -> Claim:
    metric, printed = found.paper.metric, found.paper.figures[label]
    says = f"{label}: {_figure(metric, printed.value)}"
    if label not in found.ours:
        return Claim(says, "-", "diverged" if label in results.diverged else "missing")
    near = NEAR if is_share(metric) else NEAR_RATIO * abs(printed.value)
    return Claim(says, _ends(metric, found.ours[label]), near_to(found.ours[label].mean, printed.value, near))


def near_to(ours: float, paper: float, near: float) -> Verdict:
    """Whether a figure is the paper's, up to `near`."""
    if abs(ours - paper) <= near + 1e-12:
        return "agrees"
    return "ours is higher" if ours > paper else "ours is lower"


def _orders(found: Agreement) -> list[Claim]:
    tau, some = found.tau, {kind: len(found.with_appearance(kind)) for kind in get_args(Appearance)}
    ends = "" if tau.low is None or tau.high is None else f" ({tau.low:.2f} to {tau.high:.2f})"
    # an order holds if nothing significant speaks against it, and something for it
    verdict: Verdict = "does not hold" if some["reversed"] else "holds" if some["appears"] else "open"
    counted = f"{some['appears']} appear, {some['reversed']} reversed, {some['open']} open"
    return [Claim(f"the order of {len(found.methods)} methods, {times(len(found.orderings), 'pair')}",
                  f"Kendall's tau {tau.mean:.2f}{ends}; of the pairs {counted}", verdict)]


# -- for studies ---------------------------------------------------------------------------------------


def of(rows: Sequence[Mapping[str, Any]], figure: str, **where: Any) -> list[float]:
    """A figure in the repetitions of one point, in the order of the seeds."""
    found = [row for row in rows if all(row[name] == value for name, value in where.items())]
    return [float(row[figure]) for row in sorted(found, key=lambda row: row["seed"])]


def ordering(says: str, better: Sequence[float], worse: Sequence[float], *, lower: bool = True,
             words: tuple[str, str] = ("", "")) -> Claim:
    """A claim that one thing is ahead of another, by their figures in the same repetitions: a paired t-test
    at 5 %. `lower` figures are better."""
    ahead, behind = np.asarray(better, float), np.asarray(worse, float)
    pair = statistics.compare((-1.0 if lower else 1.0) * np.stack([ahead, behind], 1)).beside(0, 1)
    verdict: Verdict = "open" if pair.p is None or pair.p >= statistics.LEVEL else (
        "appears" if pair.mean > 0 else "reversed")
    return Claim(says, f"{words[0]} {ahead.mean():.4g}, {words[1]} {behind.mean():.4g}{_p(pair.p)}".strip(),
                 verdict)


def fact(says: str, ours: str, holds: bool) -> Claim:
    """A claim that holds, or does not, without a test."""
    return Claim(says, ours, "holds" if holds else "does not hold")


def _figure(metric: str, value: float) -> str:
    return f"{100 * value:.2f} %" if is_share(metric) else f"{value:.4g}"


def _ends(metric: str, value: Interval) -> str:
    if value.low is None or value.high is None:
        return _figure(metric, value.mean)
    return f"{_figure(metric, value.mean)} ({_figure(metric, value.low)} to {_figure(metric, value.high)})"


def _p(p: float | None) -> str:
    return "" if p is None else ", p < 0.001" if p < 0.001 else f", p = {p:.2g}"


# -- files ---------------------------------------------------------------------------------------------


def write(claims: Sequence[Claim], path: Path) -> None:
    write_csv(path, [Claim._fields, *claims])


def read(path: Path) -> list[Claim]:
    with path.open(newline="", encoding="utf-8") as file:
        return [Claim(**row) for row in csv.DictReader(file)]  # type: ignore[arg-type]

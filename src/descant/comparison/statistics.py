"""Intervals and tests of differences, with every source of noise.

A score y[r, m] is the mean over the clients of method m in repetition r. Units are what else was drawn by
chance, test rows or clients: `influence[r, u, m]` is how much unit u moved that score. docs/comparing.md ("Is
a difference real?") has the variance U + max(0, s^2 / R - E) of a difference, why s^2 is moderated, the
correction over all pairs, and the measured coverage.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize, special, stats

CONFIDENCE = 0.95  # of the interval of one method
LEVEL = 0.05
ROUNDING = 1e-9  # a gain of less is none: means of equal figures differ in their last bits
ENOUGH_CLIENTS = 10  # for Wilcoxon's test, and for anything about clients like these
POWER = 0.8  # that more repetitions settle a comparison, if the differences are what they seem to be
MOST_REPETITIONS = 100
_BLOCK = 2**22  # influences of pairs that are held at once


class Interval(NamedTuple):
    """A mean over repetitions with its 95 % interval, which one repetition does not give."""

    mean: float
    low: float | None
    high: float | None
    seeds: int

    def within(self, least: float, most: float) -> Interval:
        """The interval with ends that are possible values."""
        if self.low is None or self.high is None:
            return self
        return self._replace(low=max(least, self.low), high=min(most, self.high))


class Units(NamedTuple):
    """What was drawn by chance beside the repetitions."""

    influence: np.ndarray  # [R, U, M] zero where a unit has no part; its squares add up to a variance
    free: int  # units less the means that were taken from them


class Pair(NamedTuple):
    """By how much method a is better than method b."""

    mean: float
    low: float | None  # of the simultaneous interval
    high: float | None
    p: float | None  # two-sided, corrected over all pairs; None with one repetition
    repetition: float  # variance of one repetition, moderated,
    freedom: float  # and its degrees of freedom
    lasting: float  # variance that more repetitions do not remove


class Analysis(NamedTuple):
    """All pairs of methods. `pairs[a, b]` with a < b, numbers of methods."""

    pairs: dict[tuple[int, int], Pair]
    repetitions: int
    level: float

    @property
    def p(self) -> float | None:
        """Of the question whether there is any difference at all."""
        known = [pair.p for pair in self.pairs.values() if pair.p is not None]
        return min(known) if known else None

    def beside(self, a: int, b: int) -> Pair:
        """By how much a is better than b, in either order."""
        if a < b:
            return self.pairs[a, b]
        pair = self.pairs[b, a]
        return pair._replace(mean=-pair.mean, low=None if pair.high is None else -pair.high,
                             high=None if pair.low is None else -pair.low)


# -- units -------------------------------------------------------------------------------------------------


def of_clients(figures: np.ndarray) -> Units:
    """The clients as units, of their figures [R, C, M]; NaN where a client was not evaluated."""
    there = np.isfinite(figures).all(2)
    count = there.sum(1)[:, None, None]
    mean = np.where(there[..., None], figures, 0.0).sum(1, keepdims=True) / count
    gaps = np.where(there[..., None], figures - mean, 0.0)
    return Units(gaps / np.sqrt(count * np.maximum(count - 1, 1)), int(there.any(0).sum()) - 1)


def logarithms(scores: np.ndarray, units: Units | None) -> tuple[np.ndarray, Units | None]:
    """Positive scores [R, M] and their units on a logarithmic scale: differences become ratios."""
    if units is not None:
        units = units._replace(influence=units.influence / scores[:, None, :])
    return np.log(scores), units


# -- variances -----------------------------------------------------------------------------------------


class _Noise(NamedTuple):
    """How some contrasts vary over repetitions, and the part of the units in it."""

    mean: np.ndarray
    repetition: np.ndarray  # s^2
    freedom: np.ndarray  # of it
    units: np.ndarray  # U
    inner: np.ndarray  # E
    units_freedom: np.ndarray

    def error(self, repetitions: int) -> tuple[np.ndarray, np.ndarray]:
        """Standard errors, and Satterthwaite's degrees of freedom with unbiased squared variances."""
        own = self.repetition / repetitions
        more = own > self.inner
        total = self.units + np.where(more, own - self.inner, 0.0)
        squares = (self.units**2 / (self.units_freedom + 2)
                   + np.where(more, own**2 / (self.freedom + 2)
                              + self.inner**2 / (self.units_freedom * (repetitions - 1) + 2), 0.0))
        freedom = np.divide(total**2, squares, out=np.full(len(total), np.inf), where=squares > 0) - 2
        return np.sqrt(total), np.clip(freedom, 1.0, 1e9)


def _noise(scores: np.ndarray, units: Units | None, contrasts: np.ndarray) -> _Noise:
    """Of contrasts [M, K] of scores [R, M]."""
    gaps = scores @ contrasts
    repetitions, pairs = gaps.shape
    of_units = np.tile([[0.0], [0.0], [1.0]], pairs)
    if units is not None and units.free > 0:
        size = max(1, _BLOCK // max(1, units.influence[..., 0].size))
        for start in range(0, pairs, size):
            part = slice(start, start + size)
            of_units[:, part] = _of_units(units.influence @ contrasts[:, part], units.free)
    variance = gaps.var(0, ddof=1)
    least = 1e-24 * np.maximum(1.0, np.square(gaps).max(0))  # the same with every seed, up to rounding
    variance = np.where(variance <= least, 0.0, variance)
    return _Noise(gaps.mean(0), variance, np.full(pairs, repetitions - 1.0), *of_units)


def _of_units(influence: np.ndarray, free: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """U, E and the degrees of freedom of influences [R, U, K]."""
    repetitions = len(influence)
    squares = np.square(influence.mean(0))
    total, each = squares.sum(0), np.square(influence).sum((0, 1)) / repetitions
    inner = np.maximum(0.0, (each - total) / (repetitions - 1))
    # a sum to which few rows contribute, such as those that two methods disagree about, is known less well
    spread = np.square(squares).sum(0) - total**2 / len(squares)
    freedom = np.divide(2 * total**2, spread, out=np.full(len(total), np.inf), where=spread > 0)
    return total, inner, np.clip(freedom, 1.0, free)


# -- intervals of one method -----------------------------------------------------------------------------


def interval(values: Sequence[float]) -> Interval:
    """The mean of values that come one from each repetition, by the t-distribution."""
    known = np.array([value for value in values if np.isfinite(value)], float)
    if not len(known):
        return Interval(float("nan"), None, None, 0)
    return level(known, None)


def level(scores: np.ndarray, units: Units | None) -> Interval:
    """The mean of scores [R] of one method, whose units have influences [R, U, 1]."""
    if len(scores) == 1:
        return Interval(float(scores[0]), None, None, 1)
    noise = _noise(scores[:, None], units, np.ones((1, 1)))
    [error], [freedom] = noise.error(len(scores))
    mean, reach = float(noise.mean[0]), float(special.stdtrit(freedom, (1 + CONFIDENCE) / 2) * error)
    return Interval(mean, mean - reach, mean + reach, len(scores))


# -- all pairs -------------------------------------------------------------------------------------------


def compare(scores: np.ndarray, units: Units | None = None, *, level: float = LEVEL) -> Analysis:
    """All pairs of methods by their scores [R, M], more being better."""
    repetitions, methods = scores.shape
    at = list(itertools.combinations(range(methods), 2))
    contrasts = np.zeros((methods, len(at)))
    for k, (a, b) in enumerate(at):
        contrasts[a, k], contrasts[b, k] = 1.0, -1.0
    if repetitions < 2:
        means = (scores @ contrasts)[0]
        return Analysis({pair: Pair(float(mean), None, None, None, np.nan, np.nan, 0.0)
                         for pair, mean in zip(at, means, strict=True)}, repetitions, level)
    noise = _moderated(_noise(scores, units, contrasts), scores)
    error, freedom = noise.error(repetitions)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(error > 0, np.abs(noise.mean) / error,
                     np.where(np.abs(noise.mean) <= 1e-12, 0.0, np.inf))
    p = corrected(2 * special.stdtr(freedom, -t), len(at))
    reach = _critical(level, len(at), freedom) * error
    lasting = np.maximum(0.0, noise.units - noise.inner)
    moved = np.maximum(noise.repetition, repetitions * noise.inner)
    found = zip(noise.mean, noise.mean - reach, noise.mean + reach, p, moved, noise.freedom, lasting,
                strict=True)
    return Analysis({pair: Pair(*map(float, values)) for pair, values in zip(at, found, strict=True)},
                    repetitions, level)


def corrected(p: np.ndarray, tests: int) -> np.ndarray:
    """P-values as they are among so many tests (Sidak)."""
    with np.errstate(divide="ignore"):
        return np.asarray(-np.expm1(tests * np.log1p(-p)))


def _critical(level: float, pairs: int, freedom: np.ndarray) -> np.ndarray:
    """How many standard errors a difference must have among so many pairs."""
    alone = -np.expm1(np.log1p(-level) / pairs)
    return np.asarray(-special.stdtrit(freedom, alone / 2))


def _moderated(noise: _Noise, scores: np.ndarray) -> _Noise:
    """The pairs' variances raised to what they share, with the freedom that brings."""
    repetitions, methods = scores.shape
    own, variance = repetitions - 1, noise.repetition
    known = variance > 1e-12 * variance.max(initial=0.0)  # equal methods say nothing about the others
    if methods < 3 or known.sum() < 3:
        return noise
    # one is given for the common value, which is estimated too
    most = max(own, (methods - 1) * own * _sphericity(scores) - 1)
    prior, common = _prior(variance[known], own, methods)
    prior = min(prior, most - own)
    if prior <= 0:
        return noise
    raised = np.maximum(variance, (prior * common + own * variance) / (prior + own))
    return noise._replace(repetition=raised, freedom=np.full(len(raised), float(own + prior)))


def _prior(variances: np.ndarray, freedom: int, methods: int) -> tuple[float, float]:
    """How many degrees of freedom a common variance is worth, and that variance, by the moments of the
    logarithms (Smyth 2004). Pairs with a method in common have variances that are correlated by 1/4."""
    half = freedom / 2
    logs = np.log(variances) - special.digamma(half) + np.log(half)
    alike = 0.25 * 2 * (methods - 2) / (methods * (methods - 1) / 2 - 1)
    excess = logs.var(ddof=1) / (1 - alike) - special.polygamma(1, half)
    if excess <= 1e-3:
        return np.inf, float(np.exp(logs.mean()))
    # the inverse of the trigamma function, which lies between 1 / x and 1 / (x - 0.5)
    least, most = 1 / excess, 0.5 + 1 / excess
    prior = 2 * float(optimize.brentq(lambda x: special.polygamma(1, x) - excess, least, most, xtol=1e-15))
    return prior, float(np.exp(logs.mean() + special.digamma(prior / 2) - np.log(prior / 2)))


def _sphericity(scores: np.ndarray) -> float:
    """Huynh and Feldt's epsilon: 1 if the differences of all methods vary alike and independently, down to
    1 / (M - 1) if one of them makes all the noise."""
    repetitions, methods = scores.shape
    gaps = scores - scores.mean(0)
    gaps = gaps - gaps.mean(1, keepdims=True)
    products = gaps @ gaps.T
    total = float(np.square(products).sum())
    if not total:
        return 1.0
    share = float(np.trace(products)) ** 2 / total  # epsilon times (M - 1)
    below = (methods - 1) * (repetitions - 1 - share)
    if below <= 0:
        return 1.0
    return float(np.clip((repetitions * share - 2) / below, 1 / (methods - 1), 1.0))


def needed(pair: Pair, analysis: Analysis, worth: float) -> int | None:
    """How many repetitions in all would probably settle a pair: a significant difference, or one below
    `worth`. None if that takes too many."""
    count = np.arange(analysis.repetitions + 1, MOST_REPETITIONS + 1)
    total = pair.repetition / count + pair.lasting
    share = np.divide(pair.repetition / count, total, out=np.zeros(len(count)), where=total > 0)
    freedom = pair.freedom * (count - 1) / (analysis.repetitions - 1)
    freedom = np.minimum(freedom / np.maximum(share, 1e-6) ** 2, 1e9)
    error = np.sqrt(total)
    reach = _critical(analysis.level, len(analysis.pairs), freedom) * error
    settled = (abs(pair.mean) > reach + stats.norm.ppf(POWER) * error) | (abs(pair.mean) + reach < worth)
    return int(count[settled.argmax()]) if settled.any() else None


def wilcoxon(a: np.ndarray, b: np.ndarray) -> float | None:
    """The p-value of Wilcoxon's signed-rank test; None where no client differs, or there are too few."""
    gaps = (a - b)[np.isfinite(a) & np.isfinite(b)]
    if len(gaps) < ENOUGH_CLIENTS or not np.any(gaps != 0):
        return None
    return float(stats.wilcoxon(gaps, zero_method="pratt", method="approx").pvalue)

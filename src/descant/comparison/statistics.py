"""Is a difference real? Intervals and tests over seeds, and a description of the clients at hand.

What varies between the repetitions of a comparison is the seed: the initial model, the cohorts, the batches.
Methods share it, so that their means over the clients are compared in pairs, seed by seed. The clients of
one federation are no independent repetitions (they share a server's model): a test over them describes these
clients, and decides nothing.

The best method is known only after looking. Comparing it with the others is therefore corrected as if all
pairs had been looked at (Holm): with a correction over the other methods alone, one of eight equal methods
was declared better in about one comparison of ten (docs/comparing.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
LEVEL = 1 - CONFIDENCE
ROUNDING = 1e-9  # a gain of less is none: means of equal figures differ in their last bits
ENOUGH_SEEDS = 5  # with fewer, a difference is called suggestive at most


class Interval(NamedTuple):
    """A mean over seeds with its 95 % t-interval; without ends where one seed gives none."""

    mean: float
    low: float | None
    high: float | None
    seeds: int


class Difference(NamedTuple):
    """By how much the best method is better than another, paired over seeds."""

    label: str
    against: str
    interval: Interval  # less than zero where the other has the better figure, and has failed more clients
    p: float | None  # two-sided; None with one seed
    p_holm: float | None  # corrected for all pairs of methods
    clients_p: float | None  # Wilcoxon's, over the clients' means over the seeds
    clients_better: int  # how many of them are better off with `label`, and worse off
    clients_worse: int

    @property
    def holds(self) -> bool:
        """Whether the seeds say that there is a difference."""
        return self.p_holm is not None and self.p_holm < LEVEL

    @property
    def is_real(self) -> bool:
        return self.holds and self.interval.seeds >= ENOUGH_SEEDS


def interval(values: Sequence[float]) -> Interval:
    """The mean of values that come one from each seed."""
    known = np.array([value for value in values if np.isfinite(value)], float)
    if not len(known):
        return Interval(float("nan"), None, None, 0)
    mean = float(known.mean())
    if len(known) == 1:
        return Interval(mean, None, None, 1)
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(known) - 1) * known.std(ddof=1) / len(known) ** 0.5)
    return Interval(mean, mean - reach, mean + reach, len(known))


def paired_p(a: Sequence[float], b: Sequence[float]) -> float | None:
    """The two-sided p-value of the paired t-test; None with fewer than two pairs."""
    gaps = np.asarray(a, float) - np.asarray(b, float)
    if len(gaps) < 2:
        return None
    spread = gaps.std(ddof=1)
    if spread <= 1e-12 * max(1.0, float(np.abs(gaps).max())):  # the same gap with every seed, up to rounding
        return 1.0 if abs(gaps.mean()) <= 1e-12 else 0.0
    t = gaps.mean() / spread * len(gaps) ** 0.5
    return float(2 * stats.t.sf(abs(t), len(gaps) - 1))


def holm(p: Mapping[tuple[str, str], float | None]) -> dict[tuple[str, str], float | None]:
    """Holm's correction over all p-values that there are."""
    known = sorted((value, key) for key, value in p.items() if value is not None)
    corrected: dict[tuple[str, str], float | None] = dict.fromkeys(p)
    least = 0.0
    for k, (value, key) in enumerate(known):
        least = max(least, min(1.0, (len(known) - k) * value))
        corrected[key] = least
    return corrected


def wilcoxon(a: np.ndarray, b: np.ndarray) -> float | None:
    """The p-value of Wilcoxon's signed-rank test over clients; None where no client differs."""
    gaps = (a - b)[np.isfinite(a) & np.isfinite(b)]
    if not np.any(gaps != 0):
        return None
    return float(stats.wilcoxon(gaps, zero_method="pratt", method="approx").pvalue)


def differences(
    by_seed: Mapping[str, Mapping[int, float]],
    by_client: Mapping[str, np.ndarray],
    *,
    lower_is_better: bool = False,
    lost: Mapping[str, float] | None = None,
) -> list[Difference]:
    """The best method beside each of the others, the nearest first. `by_seed`: for each method the mean over
    the clients with each seed, the same seeds for all; `by_client`: for each method the clients' means over
    these seeds; `lost`: how many clients each method has failed, which counts before any figure."""
    sign = -1.0 if lower_is_better else 1.0
    seeds = [sorted(values) for values in by_seed.values()]
    if len(by_seed) < 2 or not seeds[0] or any(each != seeds[0] for each in seeds):
        return []
    figures = {label: [values[seed] for seed in seeds[0]] for label, values in by_seed.items()}
    order = sorted(figures, key=lambda label: ((lost or {}).get(label, 0.0), -sign * np.mean(figures[label])))
    p = {(a, b): paired_p(figures[a], figures[b]) for a, b in itertools.combinations(order, 2)}
    corrected, best = holm(p), order[0]
    found = []
    for other in order[1:]:
        gaps = interval([sign * (a - b) for a, b in zip(figures[best], figures[other], strict=True)])
        gains = sign * (by_client[best] - by_client[other])
        found.append(Difference(best, other, gaps, p[best, other], corrected[best, other],
                                wilcoxon(by_client[best], by_client[other]),
                                int((gains > ROUNDING).sum()), int((gains < -ROUNDING).sum())))
    return found

"""Is a difference real? Intervals and tests beside SciPy's, and how often they are wrong in simulations."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from descant.comparison import statistics
from descant.comparison.statistics import differences, holm, interval, paired_p, wilcoxon

CLIENTS = 40


def simulated(rng: np.random.Generator, methods: int, seeds: int, gain: float = 0.0) -> list:
    """The differences of a simulated comparison. A seed shifts all methods alike, and each method besides by
    an amount of its own that all its clients share; the first method gains `gain`."""
    client = rng.normal(0.85, 0.08, CLIENTS)
    seed = rng.normal(0, 0.03, (seeds, 1, 1))
    own = rng.normal(0, 0.01, (seeds, methods, 1))
    values = client + seed + own + rng.normal(0, 0.02, (seeds, methods, CLIENTS))
    values[:, 0] += gain
    labels = [f"method {k}" for k in range(methods)]
    by_seed = {label: dict(enumerate(values[:, k].mean(1))) for k, label in enumerate(labels)}
    return differences(by_seed, {label: values[:, k].mean(0) for k, label in enumerate(labels)})


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_two_copies_of_a_method_are_told_apart_in_five_percent_of_comparisons(seeds: int) -> None:
    rng = np.random.default_rng(seeds)
    found = [simulated(rng, 2, seeds)[0] for _ in range(200)]
    alike = sum(not gap.holds for gap in found)
    assert 181 <= alike <= 198  # 95 % of 200, within three standard deviations
    # the clients share what a seed does to a method: taken for repetitions, they find what is not there
    assert sum(gap.clients_p is not None and gap.clients_p < 0.05 for gap in found) > 40


def test_one_of_many_equal_methods_is_not_called_better() -> None:
    rng = np.random.default_rng(1)
    alarms = sum(any(gap.holds for gap in simulated(rng, 8, 5)) for _ in range(200))
    assert alarms <= 19  # 5 % of 200, within three standard deviations


def test_a_planted_gain_is_found() -> None:
    rng = np.random.default_rng(2)
    found = [simulated(rng, 4, 8, gain=0.05) for _ in range(50)]
    assert all(gaps[0].label == "method 0" for gaps in found)
    assert sum(all(gap.is_real for gap in gaps) for gaps in found) >= 45
    inside = sum(gap.interval.low <= 0.05 <= gap.interval.high for gaps in found for gap in gaps)
    assert 0.9 <= inside / 150 <= 0.99  # the interval of the difference holds the gain in about 95 %


def test_few_seeds_suggest_at_most() -> None:
    seeds = {0: 0.9, 1: 0.92, 2: 0.91}
    worse = {seed: value - 0.1 - 0.001 * seed for seed, value in seeds.items()}
    clients = {"a": np.array([0.9, 0.8]), "b": np.array([0.8, 0.7])}
    [gap] = differences({"a": seeds, "b": worse}, clients)
    assert gap.holds
    assert not gap.is_real
    many = {seed: 0.9 + 0.001 * seed for seed in range(5)}
    [gap] = differences({"a": many, "b": {s: v - 0.1 - 0.001 * (s % 2) for s, v in many.items()}}, clients)
    assert gap.is_real


def test_one_seed_says_nothing() -> None:
    [gap] = differences({"a": {0: 0.9}, "b": {0: 0.1}}, {"a": np.array([0.9]), "b": np.array([0.1])})
    assert (gap.p, gap.p_holm, gap.holds, gap.interval.low) == (None, None, False, None)
    assert interval([0.5]) == (0.5, None, None, 1)
    assert interval([]).seeds == 0


def test_pairs_are_over_the_same_seeds() -> None:
    clients = {"a": np.array([0.5, 0.6]), "b": np.array([0.4, 0.7])}
    [gap] = differences({"a": {1: 0.8, 2: 0.7}, "b": {2: 0.6, 1: 0.6}}, clients)
    assert gap.interval[0] == pytest.approx(0.15)
    assert (gap.clients_better, gap.clients_worse) == (1, 1)
    assert differences({"a": {1: 0.8, 2: 0.7}, "b": {1: 0.6}}, clients) == []


def test_whoever_fails_a_client_is_not_the_best() -> None:
    clients = {"a": np.array([0.9, np.nan]), "b": np.array([0.8, 0.1])}
    [gap] = differences({"a": {0: 0.9, 1: 0.91}, "b": {0: 0.8, 1: 0.81}}, clients, lost={"a": 0.5, "b": 0.0})
    assert (gap.label, gap.against) == ("b", "a")
    assert gap.interval.mean == pytest.approx(-0.1)


def test_lower_can_be_better() -> None:
    by_seed = {"a": {0: 1.0, 1: 1.1}, "b": {0: 2.0, 1: 2.3}}
    clients = {"a": np.array([1.0, 1.1]), "b": np.array([2.0, 1.0])}
    [gap] = differences(by_seed, clients, lower_is_better=True)
    assert (gap.label, gap.against) == ("a", "b")
    assert gap.interval.mean == pytest.approx(1.1)
    assert (gap.clients_better, gap.clients_worse) == (1, 1)


def test_as_scipy_has_it() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 7))
    assert paired_p(a, b) == pytest.approx(stats.ttest_rel(a, b).pvalue)
    low, high = stats.t.interval(0.95, 6, a.mean(), stats.sem(a))
    assert interval(a)[:3] == pytest.approx((a.mean(), low, high))
    assert wilcoxon(a, b) == pytest.approx(stats.wilcoxon(a, b, method="approx").pvalue)


def test_constant_gaps_and_no_gaps() -> None:
    assert paired_p([0.9, 0.8, 0.7], [0.8, 0.7, 0.6]) == 0.0  # the same gap each time: no doubt about it
    assert paired_p([0.9, 0.8], [0.9, 0.8]) == 1.0
    assert wilcoxon(np.ones(3), np.ones(3)) is None
    assert wilcoxon(np.array([1.0, np.nan, 0.5]), np.array([0.5, 0.2, 0.4])) is not None


def test_holm() -> None:
    """By hand: the sorted p-values times 3, 2, 1, never falling."""
    given = {("a", "b"): 0.01, ("a", "c"): 0.04, ("b", "c"): 0.03, ("c", "d"): None}
    assert holm(given) == pytest.approx({("a", "b"): 0.03, ("a", "c"): 0.06, ("b", "c"): 0.06,
                                         ("c", "d"): None})
    assert statistics.ENOUGH_SEEDS == 5

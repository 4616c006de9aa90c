"""Is a difference real? Intervals and tests beside SciPy's and by hand, and how often they are wrong in
simulated comparisons (benchmarks/coverage.py, which has all of them, with more repetitions)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from descant.comparison import statistics
from descant.comparison.statistics import Units, compare, interval, level, of_clients, wilcoxon

QUICK, SLOW = 500, 2000


def simulation() -> Any:
    path = Path(__file__).parents[2] / "benchmarks" / "coverage.py"
    spec = importlib.util.spec_from_file_location("coverage_of_intervals", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


SIMULATION = simulation()
WAYS = [pytest.param(on, id="+".join(on)) for on in SIMULATION.every_source()]


def assert_covers(world: Any, comparisons: int) -> None:
    found = SIMULATION.coverage(world, comparisons, np.random.default_rng(0))
    defined = {name: share for name, share in found.items() if SIMULATION.is_defined(world, name)}
    slack = 2 * (0.05 * 0.95 / comparisons) ** 0.5 if comparisons < SLOW else 0.0  # of the simulation itself
    assert all(0.93 - slack <= share <= 0.97 + slack for share in defined.values()), defined


@pytest.mark.thorough
@pytest.mark.parametrize("on", [("seeds", "splits", "clients", "rows"), ("clients",)])
def test_intervals_hold_the_truth(on: tuple[str, ...]) -> None:
    assert_covers(SIMULATION.switched(SIMULATION.World(), on), QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("on", WAYS)
def test_intervals_hold_the_truth_with_every_source_on_and_off(on: tuple[str, ...]) -> None:
    assert_covers(SIMULATION.switched(SIMULATION.World(), on), SLOW)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SIMULATION.WORLDS if name != "folds"
                                  and "methods" not in name])
def test_intervals_hold_the_truth_of_other_federations(name: str) -> None:
    assert_covers(SIMULATION.WORLDS[name], SLOW)


@pytest.mark.parametrize("methods", [2, pytest.param(5, marks=pytest.mark.slow), 10])
@pytest.mark.parametrize("kind", ["alike", "one noisy", "groups"])
def test_equal_methods_are_not_told_apart(methods: int, kind: str) -> None:
    """In 5 % of the comparisons at most, within three standard deviations."""
    rng = np.random.default_rng(methods)
    assert SIMULATION.false_alarms(kind, 5, methods, QUICK, rng) <= 0.05 + 3 * (0.05 * 0.95 / QUICK) ** 0.5


# any two values meet; benchmarks/coverage.py has any three
NOISES = [(methods, (3, 5, 10)[(j + k) % 3], kind) for j, methods in enumerate((2, 3, 5, 10))
          for k, kind in enumerate(SIMULATION.KINDS)]


@pytest.mark.slow
@pytest.mark.parametrize(("methods", "repetitions", "kind"), NOISES)
def test_equal_methods_are_not_told_apart_whatever_the_noise(methods: int, repetitions: int, kind: str
                                                             ) -> None:
    rng = np.random.default_rng([methods, repetitions])
    alarms = SIMULATION.false_alarms(kind, repetitions, methods, SLOW, rng)
    assert alarms <= 0.05 + 3 * (0.05 * 0.95 / SLOW) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SIMULATION.WORLDS if "methods" in name])
def test_all_intervals_of_many_methods_hold_at_once(name: str) -> None:
    found = SIMULATION.coverage(SIMULATION.WORLDS[name], SLOW, np.random.default_rng(0))
    assert min(found.values()) >= 0.94


@pytest.mark.thorough
def test_a_large_difference_among_many_methods_is_found() -> None:
    """0.869 against 0.602 with 10 methods and 5 repetitions, which Holm's correction called chance."""
    before, now = SIMULATION.power(0.07, 300, np.random.default_rng(0))
    assert before < 0.5
    assert now > 0.85


def test_two_methods_are_compared_by_the_paired_t_test() -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(7, 2))
    pair = compare(scores).beside(0, 1)
    expected = stats.ttest_rel(scores[:, 0], scores[:, 1])
    assert pair.p == pytest.approx(expected.pvalue)
    assert (pair.low, pair.high) == pytest.approx(tuple(expected.confidence_interval()))
    low, high = stats.t.interval(0.95, 6, scores[:, 0].mean(), stats.sem(scores[:, 0]))
    assert interval(scores[:, 0])[:3] == pytest.approx((scores[:, 0].mean(), low, high))


def test_clients_for_units_are_the_analysis_of_variance() -> None:
    """(MS_R + MS_C - MS_E) / (RC), by hand."""
    rng = np.random.default_rng(1)
    count, clients = 4, 9
    figures = (rng.normal(size=(count, 1)) + 2 * rng.normal(size=clients)
               + rng.normal(size=(count, clients)))
    rows, columns, whole = figures.mean(1), figures.mean(0), figures.mean()
    repetitions = clients * ((rows - whole) ** 2).sum() / (count - 1)
    people = count * ((columns - whole) ** 2).sum() / (clients - 1)
    rest = ((figures - rows[:, None] - columns + whole) ** 2).sum() / ((count - 1) * (clients - 1))
    assert repetitions > rest  # else its part is nothing
    noise = statistics._noise(rows[:, None], of_clients(figures[..., None]), np.ones((1, 1)))
    [error], _ = noise.error(count)
    assert error**2 == pytest.approx((repetitions + people - rest) / (count * clients))


def test_rows_that_are_always_tested_add_their_noise_and_others_none() -> None:
    rng = np.random.default_rng(2)
    values = rng.normal(size=50)
    influence = (values - values.mean()) / np.sqrt(50 * 49)
    scores = np.array([0.1, 0.3, 0.2])
    same = Units(np.broadcast_to(influence, (3, 50))[..., None], 49)
    assert level(scores, same).high > level(scores, None).high
    noise = statistics._noise(scores[:, None], same, np.ones((1, 1)))
    assert noise.error(3)[0][0] ** 2 == pytest.approx(0.01 / 3 + values.var(ddof=1) / 50)
    once = np.zeros((3, 150))
    for r in range(3):  # each row in one repetition
        once[r, 50 * r : 50 * (r + 1)] = influence / 100
    assert level(scores, Units(once[..., None], 147)) == pytest.approx(level(scores, None), rel=1e-4)


def test_an_interval_leaves_out_zero_exactly_if_p_is_below_the_level() -> None:
    rng = np.random.default_rng(3)
    for methods, wanted in ((2, 0.05), (5, 0.05), (5, 0.05 / 3)):
        for _ in range(100):
            found = compare(rng.normal(size=(5, methods)) + np.linspace(0, 2, methods), level=wanted)
            for pair in found.pairs.values():
                assert (pair.low > 0 or pair.high < 0) == (pair.p < wanted)
            assert found.p == min(pair.p for pair in found.pairs.values())


def test_pairs_in_either_order() -> None:
    scores = np.random.default_rng(4).normal(size=(4, 3))
    found = compare(scores)
    there, back = found.beside(0, 2), found.beside(2, 0)
    assert (there.mean, there.low, there.high, there.p) == (-back.mean, -back.high, -back.low, back.p)
    assert compare(scores[:, ::-1]).beside(2, 0) == pytest.approx(there)


def test_a_noisy_method_is_not_lent_the_certainty_of_others() -> None:
    rng = np.random.default_rng(5)
    scores = 0.001 * rng.normal(size=(5, 6))
    scores[:, 0] += rng.normal(size=5)
    pair = compare(scores).beside(0, 1)
    assert pair.repetition >= (scores[:, 0] - scores[:, 1]).var(ddof=1)


def test_one_repetition_says_nothing() -> None:
    found = compare(np.array([[0.9, 0.1]]))
    pair = found.beside(0, 1)
    assert (pair.mean, pair.low, pair.p, found.p) == (0.8, None, None, None)
    assert interval([0.5]) == (0.5, None, None, 1)
    assert interval([]).seeds == 0


def test_constant_gaps_and_no_gaps() -> None:
    always = np.array([[0.9, 0.8], [0.8, 0.7], [0.7, 0.6]])
    assert compare(always).beside(0, 1).p == 0.0  # the same gap each time: no doubt about it
    equal = compare(np.array([[0.9, 0.9], [0.8, 0.8]])).beside(0, 1)
    assert (equal.p, equal.low, equal.high) == (1.0, 0.0, 0.0)
    some = compare(np.array([[0.9, 0.9, 0.1], [0.8, 0.8, 0.01], [0.7, 0.7, -0.1]]))  # two of three are equal
    assert some.beside(0, 1).p == 1.0
    assert some.beside(0, 2).p < 0.05


def test_losses_are_compared_by_their_ratios() -> None:
    """One repetition with a loss of a million hides no difference on a logarithmic scale."""
    losses = np.array([[0.02, 2.0], [0.021, 2.3], [0.019, 1e6], [0.02, 2.1], [0.02, 1.9]])
    assert compare(-losses).beside(0, 1).p > 0.3
    scores, units = statistics.logarithms(losses, of_clients(losses[:, None].repeat(3, 1)))
    pair = compare(-scores, units).beside(0, 1)
    assert pair.p < 0.1
    assert pair.mean == pytest.approx(np.log(losses[:, 1] / losses[:, 0]).mean())


def test_as_many_repetitions_as_are_said_to_settle_it_mostly_do() -> None:
    """With 80 %, if the difference and its noise are what they seem to be."""
    rng = np.random.default_rng(6)
    found = compare(rng.normal(size=(5, 2)))
    true = found.beside(0, 1)._replace(mean=0.05, repetition=2 * 0.05**2)
    wanted = statistics.needed(true, found, 0.0)
    assert wanted is not None
    assert 15 < wanted < 30
    settled = [compare(rng.normal(size=(wanted, 2)) * 0.05 + [0.05, 0]).p < 0.05 for _ in range(400)]
    assert 0.72 < np.mean(settled) < 0.88
    assert statistics.needed(true._replace(mean=0.01), found, 0.0) is None  # more than a hundred
    assert statistics.needed(true._replace(mean=0.01), found, 0.05) is not None  # enough to say: no more


def test_no_number_of_repetitions_makes_more_rows() -> None:
    found = compare(np.array([[0.5, 0.5], [0.6, 0.58], [0.55, 0.54]]))
    pair = found.beside(0, 1)._replace(mean=0.02, lasting=0.02**2)
    assert statistics.needed(pair, found, 0.01) is None
    assert statistics.needed(pair._replace(lasting=0.0), found, 0.01) is not None


def test_wilcoxon_is_for_enough_clients() -> None:
    rng = np.random.default_rng(7)
    a, b = rng.normal(size=(2, 12))
    assert wilcoxon(a, b) == pytest.approx(stats.wilcoxon(a, b, method="approx").pvalue)
    assert wilcoxon(a[:9], b[:9]) is None
    assert wilcoxon(np.ones(12), np.ones(12)) is None
    a[0] = np.nan
    assert wilcoxon(a, b) is not None


def test_clients_are_no_independent_repetitions() -> None:
    """They share what a seed does to a method: taken for repetitions, they find what is not there."""
    rng = np.random.default_rng(8)
    found = {"clients": 0, "repetitions": 0}
    for _ in range(200):
        values = (rng.normal(0.85, 0.08, (40, 1)) + rng.normal(0, 0.01, (5, 1, 2))
                  + rng.normal(0, 0.02, (5, 40, 2)))
        by_client = values.mean(0)
        p = wilcoxon(by_client[:, 0], by_client[:, 1])
        found["clients"] += p is not None and p < 0.05
        found["repetitions"] += compare(values.mean(1)).p < 0.05
    assert found["clients"] > 40
    assert 2 <= found["repetitions"] <= 19

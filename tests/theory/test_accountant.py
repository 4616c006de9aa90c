"""Epsilon against exact values, published ones, and another accountant."""

from __future__ import annotations

import builtins
import math
import sys
from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

from descant.errors import UsageError
from descant.theory import accountant
from descant.theory.accountant import Event, epsilon, gaussian_epsilon, least_noise, renyi_epsilon


@pytest.mark.parametrize(("mu", "delta"), [(0.1, 1e-5), (1.0, 1e-5), (4.0, 1e-6), (12.0, 1e-5), (40.0, 1e-9)])
def test_a_gaussian_has_the_delta_that_it_is_given(mu: float, delta: float) -> None:
    # the definition, by integration: delta = E_P[(1 - e^(eps - loss))+], the loss being N(mu^2/2, mu^2)
    eps = gaussian_epsilon(mu, delta)
    loss = np.linspace(eps, mu * mu / 2 + 40 * mu, 200_001)
    density = norm.pdf(loss, mu * mu / 2, mu) * -np.expm1(eps - loss)
    assert np.trapezoid(density, loss) == pytest.approx(delta, rel=1e-4)


def test_without_loss_there_is_nothing_to_spend_and_without_noise_everything() -> None:
    assert epsilon(Event(1.0, 0.1, 0), 1e-5) == 0
    assert epsilon(Event(0.0, 0.1, 1), 1e-5) == math.inf
    assert gaussian_epsilon(1e-4, 0.1) == 0  # delta alone covers it


@pytest.mark.parametrize(("event", "prv", "renyi"), [
    pytest.param(Event(1.1, 32 / 300, 600), 16.72, 18.11, marks=pytest.mark.slow),  # by PLD too: 16.7
    (Event(1.1, 0.01, 10_000), 5.20, 5.63),  # Abadi et al. 2016 and Gopi et al. 2021 have this setting
    (Event(4.0, 0.01, 10_000), 0.957, 1.035),
])
@pytest.mark.thorough
def test_sampled_sums_have_the_published_epsilons(event: Event, prv: float, renyi: float) -> None:
    assert epsilon(event, 1e-5) == pytest.approx(prv, rel=2e-3)
    assert renyi_epsilon(event, 1e-5) == pytest.approx(renyi, rel=1e-3)


#: Epsilon by privacy loss distributions, the worse of a unit that comes and one that goes: dp-accounting
#: 0.6.0, PLDAccountant().compose(SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)),
#: times)).get_epsilon(delta); rate 1: without the coin.
BY_LOSSES = {
    (Event(2.0, 0.1, 500), 1e-6): 6.2167, (Event(1.0, 0.9, 3), 0.1): 2.6103,
    (Event(3.0, 0.05, 200), 1e-2): 0.3507,
    (Event(1.0, 1.0, 25), 1e-5): 33.1037, (Event(1.0, 0.9, 10), 1e-2): 10.3740,
    (Event(0.7, 0.02, 300), 1e-5): 5.4351, (Event(0.8, 0.2, 1), 1e-4): 2.8468,
    (Event(1.1, 0.01, 10_000), 1e-5): 5.1926, (Event(4.0, 0.01, 10_000), 1e-5): 0.9470,
    (Event(1.0, 0.5, 20), 1e-5): 15.1233, (Event(8.0, 0.5, 200), 1e-5): 3.8379,
    (Event(1.1, 32 / 300, 600), 1e-5): 16.7139,
}


@pytest.mark.parametrize(("event", "delta"), [
    pytest.param(*key, marks=[] if k < 4 else pytest.mark.slow) for k, key in enumerate(BY_LOSSES)])
@pytest.mark.thorough
def test_epsilon_is_that_of_another_accountant_or_a_little_more(event: Event, delta: float) -> None:
    theirs = BY_LOSSES[event, delta]
    assert theirs - 1e-4 <= epsilon(event, delta) <= theirs + max(0.012, 0.002 * theirs)


@pytest.mark.thorough
def test_the_numerical_composition_is_above_the_truth_of_one_sum() -> None:
    # one sum: P = (1-q) N(0, s^2) + q N(1, s^2) against Q = N(0, s^2), both ways, by integration
    q, s, delta = 0.2, 0.8, 1e-4
    x = np.linspace(-20, 21, 400_001)
    base, mixed = norm.pdf(x, 0, s), (1 - q) * norm.pdf(x, 0, s) + q * norm.pdf(x, 1, s)
    eps = epsilon(Event(s, q, 1), delta)

    def excess(eps: float) -> float:
        ways = ((base, mixed), (mixed, base))
        return max(float(np.trapezoid(np.maximum(a - math.exp(eps) * b, 0), x)) for a, b in ways)

    assert excess(eps) <= delta < excess(eps - 0.03)


@pytest.mark.slow
def test_many_are_worse_than_few_and_a_secret_coin_is_better_than_none() -> None:
    found = [epsilon(Event(1.0, 0.1, times), 1e-5) for times in (1, 2, 3, 5, 8, 9, 40)]
    assert found == sorted(found)
    assert found[-1] < epsilon(Event(1.0, 1.0, 40), 1e-5)
    rates = [epsilon(Event(1.0, rate, 9), 1e-5) for rate in (0.01, 0.1, 0.5, 0.99, 1.0)]
    assert rates == sorted(rates)


@pytest.mark.parametrize("event", [
    Event(0.2, 0.1, 100), Event(0.5, 0.1, 2000), Event(50.0, 1e-4, 10), Event(1.0, 0.999999, 3)])
def test_extreme_numbers_have_a_bound(event: Event) -> None:
    assert 0 <= epsilon(event, 1e-5) <= epsilon(event._replace(rate=1.0), 1e-5)
    assert 0 <= epsilon(event, 1e-12) < math.inf


def test_the_least_noise_keeps_to_the_budget_and_a_little_less_does_not() -> None:
    def spent(noise: float) -> float:
        return epsilon(Event(noise, 1.0, 25), 1e-5)

    noise = least_noise(spent, 3.0)
    assert spent(noise) <= 3.0 < spent(noise * 0.995)
    with pytest.raises(UsageError, match="no noise keeps to"):
        least_noise(lambda noise: 1.0, 0.5)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = builtins.__import__
    for name in [name for name in sys.modules if name.partition(".")[0] == "opacus"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(accountant.importlib, "import_module", lambda name: plain("no_such_module"))
    accountant._divergences.cache_clear()
    with pytest.raises(UsageError, match=r"descant\[privacy\].*known"):
        renyi_epsilon(Event(1.03, 0.1, 1), 1e-5)
    assert epsilon(Event(1.0, 1.0, 4), 1e-5) > 0  # known sampling needs none


def test_the_exact_gaussian_agrees_with_opacus(monkeypatch: pytest.MonkeyPatch) -> None:
    from opacus.accountants.analysis import gdp
    from scipy.optimize import brentq

    module: Any = gdp
    eps = gaussian_epsilon(2.5, 1e-5)
    theirs = brentq(lambda e: module.delta_eps_mu(eps=e, mu=2.5) - 1e-5, 0, 100)
    assert eps == pytest.approx(theirs, rel=1e-6)

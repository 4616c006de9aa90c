"""pFedBreD's theorems: the terms against their definitions, and what their remark says of them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from descant.errors import UsageError
from descant.theory import personal_prior
from descant.theory.personal_prior import Problem

OF = Problem(mu_F=0.5, L_F=2.0, L_E=3.0, L_g=1.0, sigma_F=0.6, gamma_f=0.8, rows=20, error=0.1, gamma_Phi=1.2,
             G_Phi=0.9, sigma_Phi=0.3)
RUN: dict[str, Any] = {"lam": 15.0, "eta": 0.05, "T": 200, "R": 5, "N": 100, "S": 20, "beta": 1.0,
                       "step": 0.01, "start": 4.0}


def test_theorem_1_as_printed() -> None:
    slope = 1 + 0.05 * 1.2
    local = 0.8**2 / 20 + 0.1**2
    A, B = (1 / 0.5 * slope) ** 2 * local, (3 * 1.2 * 1.3 * slope) ** 2
    C = 0.3**2 * 9 * slope**2 / 0.5**3
    found = personal_prior.theorem1_bound(OF, **RUN)
    assert found.start == pytest.approx(0.5 * math.exp(-0.01 * 0.5 * 200 / 2) * 4)
    assert found.ball == pytest.approx((A * 225 + B) / 0.5)
    assert found.sampling == pytest.approx((100 / 20 - 1) * 0.36 / (100 * 200 * 0.5))
    assert found.drift == pytest.approx(2**5 * C / (200**2 * 5**2) * (5 * 0.36 + A * 225 + B))
    assert found.value == pytest.approx(sum(found))
    step = personal_prior.largest_step(OF, 0.05, 5, 1.0)
    assert step == pytest.approx(0.5 * 5 / (math.e * 1.3 * 3 * slope * 2**11.5 * 2.2 + 15 * 2.5 * 2))


def test_what_the_remark_says_of_theorem_1() -> None:
    """Without sampling its term is gone, and what is left falls with 1 / T^2 to the ball; the ball is that of
    the local errors and of the choice of the mean, and is none without either."""
    everyone = RUN | {"S": 100}
    assert personal_prior.theorem1_bound(OF, **everyone).sampling == 0
    far, farther = (personal_prior.theorem1_bound(OF, **everyone | {"T": T}) for T in (10**5, 10**6))
    assert far.start + far.sampling == pytest.approx(0, abs=1e-12)
    assert far.drift / farther.drift == pytest.approx(100)
    exact = OF._replace(gamma_f=0.0, error=0.0, gamma_Phi=0.0)
    assert personal_prior.theorem1_bound(exact, **RUN).ball == 0
    with pytest.raises(UsageError, match="S = 200 clients of N = 100"):
        personal_prior.theorem1_bound(OF, **RUN | {"S": 200})


def test_theorem_2_as_printed() -> None:
    local = 0.8**2 / 20 + 0.1**2
    found = personal_prior.theorem2_bound(OF, lam=15.0, eta=0.05, divergence=0.2, first_order=0.4)
    assert found == pytest.approx(2 / 0.25 * local + 2 / 225 * 0.16 + 4 / 225 * 0.36 + 0.05**2 * 0.81 / 2
                                  + (32 / 225 * 2 + 8 / 0.5) * 0.2)


def test_lam_trades_off() -> None:
    """Remark 1: with the ball of Theorem 1 for D_F, small lam is bad for Theorem 2, and so is large."""
    def radius(lam: float) -> float:
        ball = personal_prior.theorem1_bound(OF, **RUN | {"lam": lam, "T": 10**6, "S": 100}).value
        return personal_prior.theorem2_bound(OF, lam=lam, eta=0.05, divergence=ball)

    assert radius(1.0) > radius(5.0) < radius(100.0)

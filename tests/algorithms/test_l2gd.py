"""L2GD: the two steps by hand, their mean over the coins, and its fixed point.

f_i(x) = (x - a_i)' H_i (x - a_i) / 2 with exact gradients. The objective mean_i f_i(x_i) + lam/2 mean_i
||x_i - xbar||^2 is least where H_i (x_i - a_i) + lam (x_i - xbar) = 0 for all i:
x_i - xbar = A_i (a_i - xbar) with A_i = (H_i + lam)^-1 H_i, and the mean of these is zero.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from descant.algorithms import L2GD, LocalTrain, OneStageFedProx
from descant.algorithms.l2gd import Broadcast, Coins
from descant.core.algorithm import Message
from descant.core.vector import Model
from descant.errors import UsageError
from descant.priors.solve import SGD
from helpers import Engine, assert_same, batchnorm_net, engine, quadratics, ragged, unbalanced

FEDERATION = unbalanced(quadratics(5, rows=12), (9, 1, 4, 2, 6))
H, A = FEDERATION.truth["H"], FEDERATION.truth["optima"]
I = torch.eye(4, dtype=torch.float64)  # noqa: E741 (the identity)
FULL: dict[str, Any] = {"batch": "full", "backend": "vectorised", "chunk": 5}
LAM, LR, P = 0.7, 0.4, 0.3
METHOD = L2GD(lam=LAM, lr=LR, p=P)
SHARE = LR * LAM * (1 - P) / P  # alpha lam / (n p), where alpha / n = lr (1 - p)


def solution() -> Tensor:
    """The x_i that minimise the objective."""
    a = torch.linalg.solve(H + LAM * I, H)
    mean = torch.linalg.solve(a.mean(0), torch.einsum("ijk,ik->ij", a, A).mean(0))
    return mean + torch.einsum("ijk,ik->ij", a, A - mean)


def coins(key: int, steps: int) -> tuple[bool, ...]:
    """Which steps of a round with this key go towards the mean."""
    tossed = Coins(torch.tensor(key), P, LR, SHARE, 0.0)
    return tuple(bool(tossed._sizes(number)[1] > 0) for number in range(1, steps + 1))


def after(e: Engine, x: Tensor, key: int) -> Tensor:
    """The x_i after a round from these, with the coins of a key."""
    message = Message(Broadcast(Model(x.mean(0), e.server.stats), torch.tensor(key)))
    outcome = e.backend.run("local", e.everyone, 1, message, Model(x, torch.zeros((5, 0), dtype=x.dtype)))
    found: Tensor = outcome.values.state.theta
    torch.testing.assert_close(outcome.values.upload.theta, found - x, rtol=0, atol=1e-14)
    return found


def test_a_coin_decides_for_all_clients() -> None:
    """One local step: all clients take a gradient step, or all go towards the mean of their models."""
    x = torch.linspace(-2, 2, 20, dtype=torch.float64).reshape(5, 4).cos()
    seen = set()
    with engine(METHOD, FEDERATION, "quadratic", local={"steps": 1}, **FULL) as e:
        for key in range(12):
            [is_one] = coins(key, 1)
            seen.add(is_one)
            step = SHARE * (x - x.mean(0)) if is_one else LR * torch.einsum("ijk,ik->ij", H, x - A)
            torch.testing.assert_close(after(e, x, key), x - step, rtol=0, atol=1e-14)
    assert seen == {True, False}


@pytest.mark.parametrize("at", ["solution", "elsewhere"])
@pytest.mark.thorough
def test_in_the_mean_over_the_coins_it_goes_to_the_minimum(at: str) -> None:
    """In the mean, a toss takes x_i to x_i - lr (1 - p) (H_i (x_i - a_i) + lam (x_i - xbar)): a gradient
    step of size alpha / n. xbar is that of the round's start, and all is linear, so that E tosses take x_i in
    the mean to y_i + (I - lr (1 - p) (H_i + lam))^E (x_i - y_i), with y_i the minimum for this xbar. At the
    solution x_i = y_i, and nothing moves. The mean here is exact: over all 2^E rounds of coins, each times
    how likely it is."""
    E = 3
    x = solution() if at == "solution" else torch.linspace(-2, 2, 20, dtype=torch.float64).reshape(5, 4).cos()
    keys = {coins(key, E): key for key in range(300)}
    assert len(keys) == 2**E
    mean = torch.zeros_like(x)
    with engine(METHOD, FEDERATION, "quadratic", local={"steps": E}, **FULL) as e:
        for tossed in product((True, False), repeat=E):
            likely = P ** sum(tossed) * (1 - P) ** (E - sum(tossed))
            mean += likely * after(e, x, keys[tossed])
    y = torch.linalg.solve(H + LAM * I, torch.einsum("ijk,ik->ij", H, A) + LAM * x.mean(0))
    shrunk = torch.linalg.matrix_power(I - LR * (1 - P) * (H + LAM * I), E)
    torch.testing.assert_close(mean, y + torch.einsum("ijk,ik->ij", shrunk, x - y), rtol=0, atol=1e-13)
    if at == "solution":
        torch.testing.assert_close(mean, x, rtol=0, atol=1e-13)


@pytest.mark.thorough
def test_its_solution_is_where_one_stage_fedprox_ends() -> None:
    """The same objective with the same lam: exact gradient steps on the x_i, and w_g their mean."""
    with engine(OneStageFedProx(lam=LAM, eta=0.5, K=4), FEDERATION, "quadratic", **FULL) as e:
        e.play(60)
        torch.testing.assert_close(e.personal().theta, solution(), rtol=0, atol=1e-7)


def test_as_many_ones_as_p_says_and_other_coins_in_every_round() -> None:
    """1000 coins: p within four standard deviations."""
    found = [coin for key in range(100) for coin in coins(key * 1_000_003, 10)]
    assert sum(found) / 1000 == pytest.approx(P, abs=4 * (P * (1 - P) / 1000) ** 0.5)
    with engine(METHOD, FEDERATION, "quadratic", **FULL) as e:
        facts = [e.training.round_of(e.everyone)._replace(number=number) for number in range(1, 9)]
        keys = [int(METHOD.broadcast(e.server, each).shared.key) for each in facts]
        assert len(set(keys)) == 8
        some = facts[0].of(torch.tensor([1, 3]))
        assert int(METHOD.broadcast(e.server, some).shared.key) == keys[0]  # whoever takes part


def test_without_ones_every_client_is_alone() -> None:
    """p -> 0. Clients with few batches toss fewer coins."""
    settings: dict[str, Any] = {"local": {"epochs": 1}, "backend": "vectorised", "chunk": 3}
    with engine(L2GD(lam=1e-12, lr=0.1, p=1e-12), ragged(), batchnorm_net(), **settings) as e, \
         engine(LocalTrain(SGD(lr=0.1)), ragged(), batchnorm_net(), **settings) as alone:
        e.play(3)
        alone.play(3)
        assert_same(e.states(), alone.states(), 1e-11)


def test_the_steps_of_all_clients_at_once_are_those_of_one_after_the_other() -> None:
    settings: dict[str, Any] = {"local": {"epochs": 2}, "backend": "vectorised", "chunk": 5}
    method = L2GD(lam=2.0, lr=0.1, p=0.5, weight_decay=0.1)
    with engine(method, ragged(), batchnorm_net(), **settings) as e, \
         engine(method, ragged(), batchnorm_net(), **settings) as plain:
        plain.training.work.task.chunk_gradients = None
        e.play(2)
        plain.play(2)
        assert_same((e.server, e.states()), (plain.server, plain.states()), 1e-11)


def test_the_mean_is_that_of_all_clients() -> None:
    """Whoever is in the cohort; statistics of BatchNorm too."""
    with engine(L2GD(p=0.3), ragged(), batchnorm_net(), cohort=2) as e:
        for _ in range(5):
            e.play()
            states = e.states()
            assert_same(e.server, Model(states.theta.mean(0), states.stats.mean(0)), 1e-12)


def test_bad_values_and_cautions() -> None:
    for wrong in (0.0, 1.0):
        with pytest.raises(UsageError, match=r"l2gd\.p"):
            L2GD(p=wrong)
    with pytest.raises(UsageError, match=r"l2gd\.lam"):
        L2GD(lam=0.0)
    assert L2GD(lam=10.0).p == 0.5
    assert L2GD().cautions() == []
    [caution] = L2GD(lam=3.0, lr=0.1, p=0.2).cautions()  # 0.3 * 4 = 1.2
    assert "1.2 of the way and the models overshoot" in caution
    assert "p >= 0.231" in caution
    assert L2GD(lam=3.0, lr=0.1, p=0.2308).cautions() == []
    assert "diverge" in L2GD(lam=3.0, lr=0.2, p=0.2).cautions()[0]

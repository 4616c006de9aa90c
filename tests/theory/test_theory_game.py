"""The theory of pFedGT's game, on losses f_i(w) = (w - a_i)' H_i (w - a_i) / 2 whose game is solved by hand.

Everything is in float64; eigenvalues of H_i lie in [0.2, 1], so that L = 1.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from descant.core.vector import Model
from descant.errors import UsageError
from descant.models import make_task
from descant.priors.solve import SGD
from descant.theory import game
from descant.theory.oracle import messages, oracle
from helpers import batchnorm_net, finite_differences, quadratics, ragged

FEDERATION = quadratics(5, rows=3)
H, A = FEDERATION.truth["H"], FEDERATION.truth["optima"]  # [m, d, d], [m, d]
M, D = A.shape
I = torch.eye(D, dtype=torch.float64)  # noqa: E741 (the identity)
W = torch.from_numpy(np.random.default_rng(1).standard_normal((M, D)))
GAMMAS = torch.tensor([0.3, 0.5, 0.8, 0.0, 1.0], dtype=torch.float64)
both_gammas = pytest.mark.parametrize("gamma", [0.8, GAMMAS], ids=["one for all", "one each"])


def close(found: Any, expected: Any, tolerance: float) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def told(w: Tensor, mu: float) -> Tensor:
    """c_i = grad f_i(w_i) - mu w_i."""
    return torch.einsum("ijk,ik->ij", H, w - A) - mu * w


def cost(i: int, w_i: Tensor, others: Tensor, gamma: float, mu: float, rho: float) -> Tensor:
    """G_i as Eq. 2 has it before its own term is put in exactly (which Eq. 4 does):
    gamma f_i(w_i) + (1 - gamma)/m (f_i(w_i) + sum_{j != i} its model of f_j) + rho/2 ||w_i||^2."""
    def f(j: int, v: Tensor) -> Tensor:
        return (v - A[j]) @ H[j] @ (v - A[j]) / 2

    total = gamma * f(i, w_i) + rho / 2 * w_i @ w_i + (1 - gamma) / M * f(i, w_i)
    for j in range(M):
        if j != i:
            gap = w_i - others[j]
            expansion = f(j, others[j]) + (H[j] @ (others[j] - A[j])) @ gap + mu / 2 * gap @ gap
            total = total + (1 - gamma) / M * expansion
    return total


@both_gammas
def test_the_gradients_are_those_of_the_costs(gamma: Any) -> None:
    """The costs are quadratic, so that central differences are exact but for rounding."""
    mu, rho = 0.3, 0.1
    each = torch.as_tensor(gamma, dtype=torch.float64).expand(M)
    others = W.roll(1, 0) * 2  # what the others played when they told, not what is played now
    found = game.game_gradients(W, told(W, mu), told(others, mu), gamma=gamma, mu=mu, rho=rho)
    for i in range(M):
        def of(v: Tensor, i: int = i) -> Tensor:
            return cost(i, v, others, float(each[i]), mu, rho)

        close(found[i], finite_differences(of, W[i], 1e-3), 1e-10)
    eps = game.achieved_accuracy(W, told(W, mu), told(others, mu), gamma=gamma, mu=mu, rho=rho)
    close(eps, found.square().sum(1), 1e-14)


@both_gammas
def test_best_responses_and_the_equilibrium(gamma: Any) -> None:
    """A best response makes the client's own gradient zero while the others stay; at the equilibrium all are
    zero at once. The matrix of best responses is their derivative: they are affine."""
    game_of: dict[str, Any] = {"gamma": gamma, "mu": 0.3, "rho": 0.1}
    answers = game.best_responses(H, A, W, **game_of)
    gradients = game.game_gradients(answers, told(answers, 0.3), told(W, 0.3), **game_of)
    close(gradients, torch.zeros_like(W), 1e-13)
    assert game.nash_residual(W, told(W, 0.3), **game_of).min() > 0.1
    nash = game.equilibrium(H, A, **game_of)
    close(game.best_responses(H, A, nash, **game_of), nash, 1e-13)
    close(game.nash_residual(nash, told(nash, 0.3), **game_of), torch.zeros(M, dtype=torch.float64), 1e-13)
    J = game.response_matrix(H, **game_of)
    moved = answers - game.best_responses(H, A, torch.zeros_like(A), **game_of)
    close((J @ W.reshape(-1)).reshape(M, D), moved, 1e-12)


def test_the_residual_bounds_the_distance_to_the_best_response() -> None:
    """||w_i - R_i(w)|| <= ||grad G_i|| / s with s the least curvature of G_i, gt h + (1 - gt) mu + rho at
    h = 0.2; and at least ||grad G_i|| / its largest curvature, at h = 1."""
    game_of: dict[str, Any] = {"gamma": 0.8, "mu": 0.3, "rho": 0.1}
    s = 0.84 * 0.2 + 0.16 * 0.3 + 0.1
    residual = game.nash_residual(W, told(W, 0.3), **game_of)
    distance = (W - game.best_responses(H, A, W, **game_of)).norm(dim=1)
    assert (distance <= residual / s * (1 + 1e-12)).all()
    assert (distance >= residual / (0.84 + 0.16 * 0.3 + 0.1) * (1 - 1e-12)).all()


@pytest.mark.parametrize("mu", [0.0, 0.05, 2.0])
def test_without_personalization_the_global_minimiser_is_an_equilibrium(mu: float) -> None:
    """gamma = rho = 0 and all w_j = w: grad G_i = (1/m) sum_j grad f_j(w), as mu (w - w_j) = 0."""
    everywhere = FEDERATION.truth["global"].expand(M, D)
    residual = game.nash_residual(everywhere, told(everywhere, mu), gamma=0.0, mu=mu)
    close(residual, torch.zeros(M, dtype=torch.float64), 1e-13)
    if mu:
        close(game.equilibrium(H, A, gamma=0.0, mu=mu), everywhere, 1e-12)
    else:  # one equation for all: sum_j grad f_j(w_j) = 0
        with pytest.raises(UsageError, match="no single equilibrium"):
            game.equilibrium(H, A, gamma=0.0, mu=mu)


def test_with_gamma_one_the_equilibrium_is_local_ridge() -> None:
    nash = game.equilibrium(H, A, gamma=1.0, mu=0.3, rho=0.2)
    close(nash, torch.linalg.solve(H + 0.2 * I, torch.einsum("ijk,ik->ij", H, A)), 1e-13)


def test_equal_bowls_of_curvature_mu() -> None:
    """f_j = mu/2 ||w - a_j||^2: the model of f_j is exact, so
    (mu + rho) w_i = mu (gamma a_i + (1 - gamma) abar)."""
    mu, rho = 0.7, 0.2
    nash = game.equilibrium(mu * I.expand(M, D, D), A, gamma=GAMMAS, mu=mu, rho=rho)
    mixed = GAMMAS[:, None] * A + (1 - GAMMAS[:, None]) * A.mean(0)
    close(nash, mu * mixed / (mu + rho), 1e-13)


# -- stability ---------------------------------------------------------------------------------------------


def test_the_condition_is_that_the_spectral_radius_is_below_one() -> None:
    """On a grid that has both; wherever gt > 1/2, it holds."""
    found = []
    for h, gamma, m, mu, rho in itertools.product((0.1, 1.0, 9.0), (0.0, 0.2, 0.45, 0.8), (2, 3, 8),
                                                  (0.05, 0.5, 3.0), (0.0, 0.5)):
        J = game.response_matrix(h * torch.ones(m, 1, 1, dtype=torch.float64), gamma=gamma, mu=mu, rho=rho)
        radius = float(torch.linalg.eigvals(J).abs().max())
        gt = game.own_share(gamma, m)
        assert radius == pytest.approx((1 - gt) * abs(h - mu) / (gt * h + (1 - gt) * mu + rho), abs=1e-12)
        stable = h < game.stable_curvature(game.own_share(gamma, m), mu, rho)
        assert stable == (radius < 1)
        assert stable == (h * (1 - 2 * gt) < 2 * (1 - gt) * mu + rho)
        assert stable or gt <= 0.5
        found.append(stable)
    assert 20 < sum(found) < len(found) - 20


def test_the_largest_stable_curvature() -> None:
    bound = game.stable_curvature(0.2, 0.05, 0.01)
    assert bound == pytest.approx((2 * 0.8 * 0.05 + 0.01) / 0.6)
    gamma = (5 * 0.2 - 1) / 4  # whose share among 5 clients is 0.2
    assert bound * 0.999 < game.stable_curvature(game.own_share(gamma, 5), 0.05, 0.01)
    assert bound * 1.001 > game.stable_curvature(game.own_share(gamma, 5), 0.05, 0.01)
    assert game.stable_curvature(0.51, 0.0) == math.inf
    assert game.stable_curvature(0.5, 0.1) == math.inf
    assert game.stable_curvature(0.5, 0.0) == 0  # w_i <- -w_j: the answers go round for ever


# -- Theorems 1 and 2 ----------------------------------------------------------------------------------------


def test_the_constants_of_theorem_1() -> None:
    """L_F bounds the curvature of F_i, and is reached where f_i curves by L; rho must exceed it, and L."""
    m, mu, L = 5, 0.3, 1.0
    for gamma in (0.1, 0.5, 0.9):
        gt = (4 * gamma + 1) / 5
        assert game.lipschitz_F(gamma, m, L, mu) == pytest.approx(gt * L + (1 - gt) * mu)
        curvature = torch.linalg.eigvalsh(gt * H + (1 - gt) * mu * I)
        assert float(curvature.max()) == pytest.approx(game.lipschitz_F(gamma, m, L, mu), abs=1e-12)
    assert game.least_rho(GAMMAS, m, L, mu) == L
    assert game.least_rho(0.0, m, L, 3.0) == pytest.approx(0.2 + 0.8 * 3.0)


@pytest.mark.parametrize("gamma", [0.2, 0.8, GAMMAS])
def test_best_responses_contract_by_a1(gamma: Any) -> None:
    """||R(w) - R(v)|| <= a1 ||w - v|| (Eq. 12): a1 is at least the spectral norm of their matrix. It holds
    for any L-smooth losses, and with gamma one for all it is reached where they all curve by -L."""
    mu, rho = 0.05, 1.3
    rate = game.theorem2(gamma, M, 1.0, mu, rho)
    J = game.response_matrix(H, gamma=gamma, mu=mu, rho=rho)
    assert float(torch.linalg.matrix_norm(J, 2)) <= rate.a1 < 1
    worst = game.response_matrix(-I.expand(M, D, D), gamma=gamma, mu=mu, rho=rho)
    assert float(torch.linalg.matrix_norm(worst, 2)) <= rate.a1 + 1e-12
    if not isinstance(gamma, Tensor):
        assert float(torch.linalg.eigvals(worst).abs().max()) == pytest.approx(rate.a1)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_theorem_2_holds_in_expectation(size: int) -> None:
    """The expectation is exact here: with second moments S of w - w*, a round makes the mean over all cohorts
    of T S T', T = I - L + L J, where L picks the cohort."""
    mu, rho, gamma = 0.05, 1.3, 0.3
    rate = game.theorem2(gamma, M, 1.0, mu, rho, p=size / M)
    J = game.response_matrix(H, gamma=gamma, mu=mu, rho=rho)
    nash = game.equilibrium(H, A, gamma=gamma, mu=mu, rho=rho)
    start = (W - nash).reshape(-1)
    S, square = torch.outer(start, start), float(start @ start)
    cohorts = [torch.tensor([float(i in cohort) for i in range(M)]).double().repeat_interleave(D)[:, None]
               for cohort in itertools.combinations(range(M), size)]
    steps = [torch.eye(M * D, dtype=torch.float64) * (1 - on) + on * J for on in cohorts]
    for t in range(1, 60):
        S = torch.stack([T @ S @ T.T for T in steps]).mean(0)
        assert float(S.trace()) <= rate.bound(t, square)
    assert rate.bound(59, square) < square / 2  # it says something
    assert float(S.trace()) > 0


def test_theorem_2_holds_with_inexact_solves() -> None:
    """Every answer misses by e_i with ||grad G_i|| = ||(Hessian of G_i) e_i||: eps_i is its square."""
    mu, rho, gamma = 0.05, 1.3, 0.3
    rate = game.theorem2(gamma, M, 1.0, mu, rho)
    nash, w = game.equilibrium(H, A, gamma=gamma, mu=mu, rho=rho), W
    gt = game.own_share(gamma, M)
    hessian = gt * H + ((1 - gt) * mu + rho) * I
    square, worst = float((w - nash).square().sum()), torch.zeros(M, dtype=torch.float64)
    rng = np.random.default_rng(0)
    for t in range(1, 40):
        miss = 0.3 * torch.from_numpy(rng.standard_normal((M, D)))
        before, w = w, game.best_responses(H, A, w, gamma=gamma, mu=mu, rho=rho) + miss
        eps = game.achieved_accuracy(w, told(w, mu), told(before, mu), gamma=gamma, mu=mu, rho=rho)
        close(eps, torch.einsum("ijk,ik->ij", hessian, miss).square().sum(1), 1e-12)
        worst = torch.maximum(worst, eps)
        assert float((w - nash).square().sum()) <= rate.bound(t, square, worst)
    assert rate.bound(39, square) < float((w - nash).square().sum())  # not without the term for eps


def test_theorem_2_s_own_formula() -> None:
    """a = 1 - p (1 - (1 + 1/xi) a1^2) with the least xi = a1 / (1 - a1)."""
    rate = game.theorem2(0.3, 5, 1.0, 0.05, 1.3, p=0.4)
    assert rate.xi == pytest.approx(rate.a1 / (1 - rate.a1))
    assert rate.a == pytest.approx(1 - 0.4 * (1 - (1 + 1 / rate.xi) * rate.a1**2))
    printed = 0.7 * 4 * 1.05 / (0.7 * 4 * 0.05 - (0.3 * 4 + 1) * 1.0 + 5 * 1.3)
    assert rate.a1 == pytest.approx(printed)
    assert game.theorem2(1.0, 5, 1.0, 0.05, 1.3).a1 == 0  # nobody listens: one round is enough


def test_theorem_2_refuses_what_it_does_not_cover() -> None:
    with pytest.raises(UsageError, match=r"rho = 0.9 is too small.*needs rho > max\(L, L_F\) = 1"):
        game.theorem2(0.8, 5, 1.0, 0.05, 0.9)
    with pytest.raises(UsageError, match="p must be a probability"):
        game.theorem2(0.8, 5, 1.0, 0.05, 1.3, p=0.0)


# -- with everyone's data ------------------------------------------------------------------------------------


def test_messages_are_full_gradients() -> None:
    """By finite differences of the mean loss over a client's rows, 600 of them in two blocks."""
    federation = ragged((600, 3, 1), shape=(2,))
    task = make_task("mclr", federation, dtype=torch.float64, seed=0)
    theta = torch.from_numpy(np.random.default_rng(0).standard_normal((3, task.dim)))
    models = Model(theta, torch.zeros(3, 0, dtype=torch.float64))
    found = messages(task, federation, models, mu=0.4)
    for i in range(3):
        rows = federation.train[i]

        def f(v: Tensor, rows: Any = rows) -> Tensor:
            outputs = federation.x[rows] @ v[:6].view(3, 2).T + v[6:]
            return torch.nn.functional.cross_entropy(outputs, federation.y[rows])

        close(found[i], finite_differences(f, theta[i]) - 0.4 * theta[i], 1e-8)


def quadratic_oracle(gamma: float, **settings: Any) -> Any:
    task = make_task("quadratic", FEDERATION, dtype=torch.float64, seed=0)
    usual: dict[str, Any] = {"steps": 160, "batch": "full", "solver": SGD(lr=1.0)}
    return oracle(task, FEDERATION, 2, gamma, **(usual | settings))


@pytest.mark.parametrize("gamma", [0.0, 0.4, 1.0])
def test_the_oracle_solves_equation_1(gamma: float) -> None:
    """gamma H_i (w - a_i) + (1 - gamma) mean_j H_j (w - a_j) = 0; a step shrinks the error by 0.8 or more."""
    matrix = gamma * H[2] + (1 - gamma) * H.mean(0)
    right = gamma * H[2] @ A[2] + (1 - gamma) * torch.einsum("ijk,ik->j", H, A) / M
    expected = torch.linalg.solve(matrix, right)
    found = quadratic_oracle(gamma)
    close(found.model.theta, expected, 1e-12)
    gap = expected - A[2]
    assert found.test == {"loss": pytest.approx(float(gap @ H[2] @ gap / 2))}
    assert list(found.validation) == ["loss"]
    assert math.isnan(found.validation["loss"])  # this federation has no validation rows
    if gamma == 0:
        close(expected, FEDERATION.truth["global"], 1e-12)
    if gamma == 1:
        close(expected, A[2], 1e-12)


def test_the_oracle_s_batches_are_of_the_mixture() -> None:
    """H = I: a step of size 1 lands at the mean of the batch's rows y = a_j. It is expected at gamma a_i +
    (1 - gamma) abar, each client counting alike however many rows it has, with a deviation of less than
    max ||a|| / sqrt(batch)."""
    federation = quadratics(5, rows=12, kappa=1.0)
    lists = [federation.train[k][: k + 1] for k in range(5)]
    federation = type(federation)(**{**vars(federation), "train": type(federation.train).of(lists)})
    task = make_task("quadratic", federation, dtype=torch.float64, seed=0)
    a = federation.truth["optima"]
    for gamma in (0.0, 0.3, 1.0):
        found = oracle(task, federation, 1, gamma, steps=1, batch=40_000, solver=SGD(lr=1.0)).model.theta
        expected = gamma * a[1] + (1 - gamma) * a.mean(0)
        assert (found - expected).norm() < 4 * a.norm(dim=1).max() / 200
        other = gamma * a[1] + (1 - gamma) * a[[0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4]].mean(0)
        assert gamma == 1 or (expected - other).norm() > 5 * a.norm(dim=1).max() / 200  # rows counting alike


def test_the_oracle_trains_the_experiment_s_own_model() -> None:
    """A network with statistics and random numbers, repeatable; figures of the held-out rows."""
    federation = ragged()
    task = make_task(batchnorm_net(), federation, dtype=torch.float64, seed=0)
    found = [oracle(task, federation, 0, 0.5, steps=30, batch=8, solver=SGD(lr=0.1, momentum=0.5), seed=s)
             for s in (0, 0, 1)]
    assert torch.equal(found[0].model.theta, found[1].model.theta)
    assert not torch.equal(found[0].model.theta, found[2].model.theta)
    assert (found[0].model.stats - task.init().stats).abs().min() > 0
    assert found[0].test.keys() == {"loss", "accuracy", "balanced_accuracy"}
    exact = oracle(task, federation, 0, 0.5, steps=3, batch="full", solver=SGD(lr=0.1))
    assert (exact.model.stats - task.init().stats).abs().min() > 0


def test_the_oracle_refuses_what_makes_no_sense() -> None:
    for wrong, why in (({"gamma": 1.2}, "gamma must be from 0 to 1, not 1.2"),
                       ({"gamma": 0.5, "batch": 0}, "steps and batch must be at least 1"),
                       ({"gamma": 0.5, "steps": 0}, "steps and batch must be at least 1")):
        with pytest.raises(UsageError, match=why):
            quadratic_oracle(**wrong)
    task = make_task("quadratic", FEDERATION, dtype=torch.float64, seed=0)
    with pytest.raises(UsageError, match="client 5 does not exist: there are clients 0 to 4"):
        oracle(task, FEDERATION, 5, 0.5, steps=1)

"""The theory of one-stage FedProx: its constants are attained and its bounds hold where the answer is known.

Notation of the paper: L_i the loss of client i, p_i what it counts, (w_g, w_i) the exact minimiser of
sum_i p_i (L_i(w_i) + lam/2 ||w_i - w_g||^2), w*_i the true models and w*_g = sum_i p_i w*_i.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, jacrev, vmap

from descant.errors import UsageError
from descant.priors.adaptive import theorem_lambda
from descant.theory import moreau

GRID = [(lam, L, mu) for lam, L, mu in itertools.product(np.geomspace(1e-4, 1e4, 9), (0.3, 1.0, 50.0),
                                                         (1e-3, 0.1, 0.3, 1.0, 50.0)) if mu <= L]


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def curvature(d: int, mu: float, L: float, generator: torch.Generator) -> Tensor:
    """A random symmetric matrix whose eigenvalues reach from mu to L."""
    basis = torch.linalg.qr(normal(d, d, generator=generator)).Q
    values = mu + (L - mu) * torch.rand(d, generator=generator, dtype=torch.float64)
    values[0], values[-1] = mu, L
    return (basis * values) @ basis.T


def hessian(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """By two passes in reverse (torch's own goes forward, which warns of what torch itself uses)."""
    backward: Callable[..., Tensor] = jacrev(grad(f))
    return backward


def newton(f: Callable[[Tensor], Tensor], at: Tensor, steps: int = 40) -> Tensor:
    """The minimiser of a strongly convex function, by damped Newton steps until the gradient is nothing."""
    value = f(at)
    for _ in range(steps):
        g = grad(f)(at)
        if g.norm() < 1e-12:
            return at
        step, size = torch.linalg.solve(hessian(f)(at), g), 1.0
        while (trial := f(at - size * step)) > value + 1e-12 and size > 1e-3:
            size /= 2
        at, value = at - size * step, trial
    raise AssertionError(f"Newton's method stops at a gradient of {g.norm()}")


# -- Lemma 2 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lam", [0.03, 1.0, 40.0])
def test_quadratics_attain_the_constants_of_lemma_2(lam: float) -> None:
    """For L_i(w) = w' H w / 2 everything is linear algebra: the Hessian of the envelope, that of the client's
    problem, and the Jacobian of its solution have exactly the extreme eigenvalues that the lemma states."""
    mu, L = 0.2, 3.0
    H = curvature(5, mu, L, rng(0))
    eye = torch.eye(5, dtype=torch.float64)
    constants = moreau.constants(lam, L, mu)

    def prox(w: Tensor) -> Tensor:
        return torch.linalg.solve(H + lam * eye, lam * w)

    def problem(v: Tensor, w: Tensor) -> Tensor:
        return v @ H @ v / 2 + lam / 2 * (v - w).square().sum()

    w = normal(5, generator=rng(1))
    envelope = torch.linalg.eigvalsh(hessian(lambda w: problem(prox(w), w))(w))
    client = torch.linalg.eigvalsh(hessian(problem)(w, w))
    solution = torch.linalg.matrix_norm(jacrev(prox)(w), 2)
    found = torch.stack([envelope[0], envelope[-1], client[0], client[-1], solution])
    torch.testing.assert_close(found, torch.tensor(constants, dtype=torch.float64), rtol=1e-11, atol=0)


class Problem(NamedTuple):
    """A federation of losses with known L and mu."""

    loss: Callable[[Tensor, Tensor], Tensor]  # (w [d], what client i has) -> L_i(w)
    has: Tensor  # [clients, ...]
    L: float
    mu: float


def quadratic(clients: int, d: int, seed: int) -> Problem:
    g, mu, L = rng(seed), 0.2, 2.0
    parts = [torch.cat([curvature(d, mu, L, g), normal(1, d, generator=g)]) for _ in range(clients)]
    return Problem(lambda w, own: (w - own[-1]) @ own[:-1] @ (w - own[-1]) / 2, torch.stack(parts), L, mu)


def logistic(clients: int, d: int, seed: int) -> Problem:
    """Ridge-logistic regression on 12 samples: sigmoid' <= 1/4, so that L = ridge + max eig(X'X / n) / 4."""
    g, ridge = rng(seed), 0.1
    x = normal(clients, 12, d, generator=g) * 2
    y = 2 * torch.randint(2, (clients, 12), generator=g).double() - 1
    L = ridge + float(torch.linalg.eigvalsh(x.mT @ x / 12).max()) / 4
    return Problem(lambda w, own: F.softplus(-(own @ w)).mean() + ridge / 2 * w.square().sum(),
                   x * y[..., None], L, ridge)


PROBLEMS = {"quadratic": quadratic, "logistic": logistic}


@pytest.mark.parametrize("lam", [0.05, 1.0, 20.0])
@pytest.mark.thorough
def test_lemma_2_bounds_the_envelope_of_a_logistic_loss(lam: float) -> None:
    """The Hessian of the envelope, by differences of its gradient lam (w - prox(w)) (Lemma 3), and the prox
    by Newton's method: nothing here knows the lemma."""
    problem = logistic(1, 3, 5)
    own, constants = problem.has[0], moreau.constants(lam, problem.L, problem.mu)
    h = 1e-4

    def prox(w: Tensor) -> Tensor:
        return newton(lambda v: problem.loss(v, own) + lam / 2 * (v - w).square().sum(), w)

    for seed in range(4):
        w = 2 * normal(3, generator=rng(seed))
        jacobian = torch.stack([(prox(w + e) - prox(w - e)) / (2 * h) for e in h * torch.eye(3).double()], 1)
        curvatures = torch.linalg.eigvalsh(lam * (torch.eye(3) - (jacobian + jacobian.T) / 2))
        assert constants.mu_g * (1 - 1e-6) <= curvatures[0]
        assert curvatures[-1] <= constants.L_g * (1 + 1e-6)
        assert torch.linalg.matrix_norm(jacobian, 2) <= constants.L_w * (1 + 1e-6)


@pytest.mark.parametrize(("lam", "L", "mu"), [(0.0, 1.0, 0.1), (1.0, 1.0, 0.0), (1.0, 0.1, 0.2),
                                              (math.inf, 1.0, 0.1), (1.0, math.nan, 0.1)])
def test_constants_that_no_problem_has_are_refused(lam: float, L: float, mu: float) -> None:
    with pytest.raises(UsageError, match="0 < mu <= L"):
        moreau.constants(lam, L, mu)


# -- Lemma 1 ------------------------------------------------------------------------------------------------


class Solution(NamedTuple):
    w_g: Tensor
    w_i: Tensor
    w_gt: Tensor  # of GlobalTrain


def solve(problem: Problem, lam: float, p: Tensor) -> Solution:
    """By Newton's method on all models at once."""
    clients, d = len(problem.has), problem.has.shape[-1]
    losses = vmap(problem.loss)

    def joint(models: Tensor) -> Tensor:
        w = models.view(clients + 1, d)
        return p @ (losses(w[1:], problem.has) + lam / 2 * (w[1:] - w[0]).square().sum(1))

    models = newton(joint, torch.zeros((clients + 1) * d, dtype=torch.float64)).view(clients + 1, d)
    together = newton(lambda w: p @ losses(w.expand(clients, d), problem.has), torch.zeros(d).double())
    return Solution(models[0], models[1:], together)


@pytest.mark.parametrize("kind", PROBLEMS)
@pytest.mark.thorough
def test_lemma_1(kind: str) -> None:
    """(4) says how near GlobalTrain's model is; (5) holds for any points w*_i within R of their mean, with
    lam/4 for lam/2, as derived in `lemma1_bounds`."""
    for seed, lam in itertools.product(range(6), (0.05, 0.5, 5.0)):
        g = rng(100 + seed)
        problem = PROBLEMS[kind](4, 2, seed)
        p = torch.rand(4, generator=g, dtype=torch.float64)
        p = p / p.sum()
        w_g, w_i, w_gt = solve(problem, lam, p)
        torch.testing.assert_close(w_g, p @ w_i, rtol=0, atol=1e-9)  # (23)
        gradients = vmap(grad(problem.loss))
        at_w_g = p @ gradients(w_g.expand_as(w_i), problem.has).square().sum(1)

        true = w_i + 0.7 * normal(4, 2, generator=g)
        R = float((true - p @ true).norm(dim=1).max())
        bounds = moreau.lemma1_bounds(lam, problem.L, problem.mu, R, float(at_w_g))
        distance = float((w_g - w_gt).square().sum())
        error = w_i - true
        inner = (gradients(true, problem.has) * error).sum(1)
        excess = float(p @ (problem.mu * error.square().sum(1) + inner))
        assert distance <= bounds.distance
        assert excess <= bounds.excess / 2
        # a far stronger pull would have brought w_g nearer than this: the bound falls with lam as it should
        assert distance > moreau.lemma1_bounds(1e9, problem.L, problem.mu, R, float(at_w_g)).distance


def test_half_of_lemma_1_s_second_bound_is_attained() -> None:
    """Two clients with L_i(w) = (w -+ 1)^2 mu / 2 and w*_i = +-s: w_g = 0 and w_i = +-c, c = mu / (mu + lam).
    The left side of (5) is mu (c - s)^2 + mu (s - 1) (c - s) = mu (s - c) (1 - c) = lam c (s - c), which is
    lam s^2 / 4 = lam R^2 / 4 at s = 2 c."""
    mu, lam = 0.4, 0.7
    c = mu / (mu + lam)
    s = 2 * c
    left = mu * (c - s) ** 2 + mu * (s - 1) * (c - s)
    assert math.isclose(left, moreau.lemma1_bounds(lam, 1.0, mu, s, 0.0).excess / 2, rel_tol=1e-12)


# -- Theorem 1 ----------------------------------------------------------------------------------------------


MU, L, D, SIGMA = 0.5, 1.5, 2, 1.0
RHO = SIGMA * math.sqrt(MU + L)


class Errors(NamedTuple):
    w_g: float  # mean over the draws of ||w_g - w*_g||^2
    w_i: Tensor  # [clients] of ||w_i - w*_i||^2


def errors(m: int, n: int, R: float, lam: float, draws: int = 30) -> Errors:
    """Linear regression: a sample is (X, y = X w*_i + sigma N(0, I)), X [2, 2] with singular values sqrt(mu)
    and sqrt(L) in random bases, and l(w) = ||X w - y||^2 / 2. So every sample's loss is mu-strongly convex
    and L-smooth (Assumptions 2 and 3), and its gradient at w*_i is -sigma X' N(0, I), of mean square
    rho^2 = sigma^2 E tr(X'X) = sigma^2 (mu + L) (4). The w*_i lie evenly on a circle of radius R (1).

    L_i has the Hessian H_i, the mean of X'X, and the minimiser a_i; with A_i = H_i (H_i + lam)^-1 the exact
    solution is w_g = (sum A_i)^-1 sum A_i a_i, w_i = A_i a_i + (I - A_i) w_g."""
    g = rng(int(1e6 * R) + m)
    angle = 2 * math.pi * torch.arange(m, dtype=torch.float64) / m
    true = 1.0 + R * torch.stack([angle.cos(), angle.sin()], 1)  # w*_g = (1, 1)
    values = torch.tensor([MU, L], dtype=torch.float64).sqrt()
    w_g_errors, w_i_errors = [], []
    eye = torch.eye(D, dtype=torch.float64)
    for _ in range(draws):
        left, right = (torch.linalg.qr(normal(m, n, D, D, generator=g)).Q for _ in range(2))
        x = left * values @ right
        noise = SIGMA * normal(m, n, D, 1, generator=g)
        H = (x.mT @ x).mean(1)
        a = true + torch.linalg.solve(H, (x.mT @ noise).mean(1).squeeze(-1))
        A = torch.linalg.solve(H + lam * eye, H)
        w_g = torch.linalg.solve(A.sum(0), torch.einsum("ijk,ik->j", A, a))
        w_i = w_g + torch.einsum("ijk,ik->ij", A, a - w_g)
        w_g_errors.append((w_g - 1.0).square().sum())
        w_i_errors.append((w_i - true).square().sum(1))
    return Errors(float(torch.stack(w_g_errors).mean()), torch.stack(w_i_errors).mean(0))


@pytest.mark.parametrize(("m", "n", "R", "factors"), [
    (10, 20, 2.0, (1.0, 0.3, 1e-3)),  # R > 1/sqrt(n): any lam up to the theorem's
    (10, 20, 0.25, (1.0, 0.3, 1e-3)),
    (10, 20, 0.2, (1.0, 3.0, 1e3)),  # R <= 1/sqrt(n): any lam from the theorem's on
    (50, 5, 0.01, (1.0, 3.0, 1e3)),
    (10, 20, 0.0, (1.0, 3.0, 1e3)),
])
def test_theorem_1_holds_in_expectation(m: int, n: int, R: float, factors: tuple[float, ...]) -> None:
    bounds = moreau.theorem1_bounds(n, m * n, R, L, MU, RHO)
    lam = theorem_lambda(R, n, m * n, L=L, mu=MU, rho=RHO)
    for factor in factors:
        found = errors(m, n, R, lam.lam * factor)
        assert found.w_g <= bounds.w_g
        assert found.w_i.max() <= bounds.w_i


def test_theorem_1_is_about_its_lambdas() -> None:
    """With a lam of the wrong regime the errors pass the bounds, so that the theorem says something: clients
    that are far apart and pulled together miss by R; many alike clients left alone miss by about 1/n, and the
    theorem promises 1/N."""
    far = errors(10, 20, 40.0, 1e4)
    assert far.w_i.min() > moreau.theorem1_bounds(20, 200, 40.0, L, MU, RHO).w_i
    alone = errors(2000, 2, 0.0, 1e-3, draws=5)
    assert alone.w_i.mean() > moreau.theorem1_bounds(2, 4000, 0.0, L, MU, RHO).w_i


def test_the_constants_of_theorem_1() -> None:
    """Where L = mu = rho = 1, C_2 and C_4 are those of small R; where rho = 10, those of large R."""
    assert moreau.theorem1_constants(1.0, 1.0, 1.0) == (32.0, 32.0, 192.0, 198.0)
    C2 = 100 * (4 + 2 * math.sqrt(3))
    found = moreau.theorem1_constants(1.0, 1.0, 10.0)
    expected = (3200, C2, 19200, 100 * (4 * C2 + 6 + 2 * math.sqrt(4 * C2 + 5)))  # (1 + x)^2 = 1 + 2 x + x^2
    np.testing.assert_allclose(found, expected, rtol=1e-12)


# -- Theorem 2 and Corollary 1 ------------------------------------------------------------------------------


@pytest.mark.parametrize(("lam", "L", "mu"), GRID)
def test_the_steps_of_corollary_1_meet_condition_12(lam: float, L: float, mu: float) -> None:
    eta, gamma, K = moreau.corollary_steps(lam, L, mu)
    assert moreau.condition_12(lam, L, mu, eta, gamma, K)
    left, right = moreau.sides_of_12(lam, L, mu, eta, gamma, K)
    assert left <= right == pytest.approx(1 / 16)
    # (115): with these steps the left side is (2 + 64 lam^2 / mu^2) ((L - mu) / (lam + L))^K
    expected = (2 + 64 * (lam / mu) ** 2) * ((L - mu) / (lam + L)) ** K
    assert left == pytest.approx(expected, rel=1e-6, abs=1e-100)


def test_the_steps_of_corollary_1_by_hand() -> None:
    """lam = 1, L = 10, mu = 1: eta = 1/11, gamma = 11/20, K >= 2 + 5.5 ln(105600) = 65.6."""
    assert moreau.corollary_steps(1.0, 10.0, 1.0) == (pytest.approx(1 / 11), pytest.approx(11 / 20), 66)


def test_what_condition_12_refuses() -> None:
    lam, L, mu = 0.5, 1.0, 0.1
    eta, gamma, K = moreau.corollary_steps(lam, L, mu)
    assert not moreau.condition_12(lam, L, mu, eta, gamma, K // 2)
    assert not moreau.condition_12(lam, L, mu, 1.01 * eta, gamma, 10 * K)  # eta > 1 / L_l
    # the step of the authors' experiments, gamma = 1 / L_g: no K is enough, because the right side is 0
    assert not moreau.condition_12(lam, L, mu, eta, 2 * gamma, 100)
    assert moreau.condition_12(lam, L, mu, eta, 1.8 * gamma, 3 * K)


@pytest.mark.parametrize("kappa", [2.0, 100.0])
def test_rounds_grow_with_lambda_from_a_constant_to_kappa(kappa: float) -> None:
    """gamma mu_g = (lam + L) / (2 kappa (lam + mu)) falls from 1/2 to 1 / (2 kappa), so that the factor grows
    from 1 - 1/4 - 1/8 to 1 - 1 / (4 kappa) - 1 / (8 kappa^2)."""
    eps, mu = 1e-8, 0.3
    lams = np.geomspace(1e-6, 1e6, 25)
    rounds = [moreau.predicted_rounds(lam, kappa * mu, mu, eps) for lam in lams]
    assert rounds == sorted(rounds)
    assert rounds[0] == math.ceil(math.log(1e8) / -math.log(0.625))
    slow = 1 - 1 / (4 * kappa) - 1 / (8 * kappa**2)
    assert rounds[-1] == pytest.approx(math.log(1e8) / -math.log(slow), rel=1e-3, abs=1)
    assert rounds[-1] > 1.5 * rounds[0]


@pytest.mark.parametrize(("lam", "L", "mu"), GRID)
def test_gradients_are_of_the_order_of_kappa_for_every_lambda(lam: float, L: float, mu: float) -> None:
    """-ln(rate) >= gamma mu_g / 2 = (lam + L) / (4 kappa (lam + mu)), so that the rounds are at most
    1 + 4 kappa (lam + mu) / (lam + L) ln(1/eps), and K <= 3 + (lam + L) / (lam + mu) ln(1056 kappa^2)."""
    kappa, eps = L / mu, 1e-6
    per_round = 3 + (lam + L) / (lam + mu) * math.log(1056 * kappa**2)
    bound = 4 * kappa * math.log(1 / eps) * (3 + math.log(1056 * kappa**2)) + per_round
    assert moreau.predicted_gradients(lam, L, mu, eps) <= bound


def test_nothing_is_left_to_do_at_the_start() -> None:
    assert moreau.predicted_rounds(0.5, 1.0, 0.1, eps=1e-3, start=1e-4) == 0
    for eps in (0.0, -1.0):
        with pytest.raises(UsageError, match="greater than 0"):
            moreau.predicted_rounds(0.5, 1.0, 0.1, eps)

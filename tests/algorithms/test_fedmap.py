"""FedMAP: closed forms, its reductions to other methods, Theorem 1, the weights, and appendix A.4.

As in test_methods.py, client i has the loss L_i(theta) = (theta - a_i)' H_i (theta - a_i) / 2, every row
alike, with eigenvalues of H_i in [0.2, 1], everything in float64. With a Gaussian prior of precision
lam = 1 / sigma2 the local solution is theta_i = A_i a_i + (I - A_i) gamma, A_i = (H_i + lam)^-1 H_i.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import descant
from descant.algorithms import Ditto, FedMAP, OneStageFedProx, pFedMe
from descant.core import tree
from descant.core.algorithm import Round
from descant.core.tree import Tree
from descant.core.vector import Model
from descant.errors import UsageError
from descant.priors.belief import Upload
from descant.priors.energy import Energy, EnergyState, InputConvex
from descant.priors.gaussian import GaussianState, Tempered
from descant.priors.precision import (
    Adaptive,
    DiagonalVariance,
    FixedVariance,
    LearnedVariance,
    stationary_s,
)
from descant.priors.solve import SGD, Adam, Proximal
from descant.theory.envelope import MeanAndVariance, as_energy, client_losses, envelope
from helpers import Engine, assert_same, engine, finite_differences, quadratics, ragged, unbalanced

SIZES = (9, 1, 4, 2, 6)
FEDERATION = unbalanced(quadratics(5, rows=12), SIZES)
H, A = FEDERATION.truth["H"], FEDERATION.truth["optima"]  # [clients, d, d], [clients, d]
I = torch.eye(4, dtype=torch.float64)  # noqa: E741 (the identity)
N = torch.tensor(SIZES, dtype=torch.float64)
COUNTS = N / N.sum()
W0 = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
NONE = torch.zeros(0, dtype=torch.float64)

# With lam = 2, a gradient step shrinks the error of theta by I - lr (H_i + lam), eigenvalues of H_i + lam in
# [2.2, 3]: 0.154 at worst with lr = 2 / 5.2, and 0.154^18 = 2e-15. So these local solutions are exact.
SIGMA2 = 0.5
VARIANCES = torch.tensor([0.5, 4.0, 1.0, 2.0], dtype=torch.float64)
DIAGONAL = DiagonalVariance(tuple(VARIANCES.tolist()))
EXACT = SGD(lr=2 / 5.2)


def settings(steps: int = 18, **train: Any) -> dict[str, Any]:
    return {"batch": "full", "local": {"steps": steps}, "backend": "vectorised", "chunk": 5} | train


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def local_solutions(gamma: Tensor, precision: Tensor | float) -> Tensor:
    """(H_i + P)^-1 (H_i a_i + P gamma) for P = diag(precision)."""
    P = torch.diag(torch.as_tensor(precision, dtype=torch.float64).expand(4))
    return torch.linalg.solve(H + P, torch.einsum("ijk,ik->ij", H, A) + P @ gamma)


def mean_losses(thetas: Tensor) -> Tensor:
    return torch.einsum("ij,ijk,ik->i", thetas - A, H, thetas - A) / 2


def client_weights(kind: Any, logs: Tensor, sizes: Tensor, temperature: float = 1.0) -> Tensor:
    uploads = Upload(Model(NONE, NONE), (), logs)
    return Tempered(kind, temperature)(uploads, Round(0, 1, torch.arange(len(sizes)), sizes, len(sizes)))


def place(e: Engine, gamma: Tensor, pull: Tree = ()) -> None:
    e.training.server = GaussianState(Model(gamma, NONE), pull)


# -- what it is where others are known ---------------------------------------------------------------------


def test_one_stage_fedprox_with_lam_1_over_sigma2() -> None:
    """With fixed weights and the mean, a round is one-stage FedProx's with gamma = 1 / lam, step for step:
    both go on from the client's own model by the same gradient steps, and average."""
    method = FedMAP(FixedVariance(SIGMA2), SGD(lr=0.3), weights="samples")
    other = OneStageFedProx(lam=1 / SIGMA2, eta=0.3, K=1, weights="samples")
    with engine(method, FEDERATION, "quadratic", **settings(3)) as e, \
         engine(other, FEDERATION, "quadratic", **settings(3)) as f:
        for _ in range(6):
            e.play()
            f.play()
            close(e.model.theta, f.model.theta, 1e-14)
            close(e.personal().theta, f.personal().theta, 1e-14)


@pytest.mark.thorough
def test_the_fixed_point() -> None:
    """w_g = (sum p A_i)^-1 sum p A_i a_i, and theta_i = A_i a_i + (I - A_i) w_g: as one-stage FedProx's, also
    when local work is inexact, because theta_i goes on. With lam = 0.25 the eigenvalues of A_i are at least
    0.44, by which gamma comes nearer in every round."""
    lam = 0.25
    B = torch.linalg.solve(H + lam * I, H)
    w = torch.linalg.solve(torch.einsum("i,ijk->jk", COUNTS, B), torch.einsum("i,ijk,ik->j", COUNTS, B, A))
    for solver in (SGD(lr=0.9), Proximal(lr=0.9)):
        method = FedMAP(FixedVariance(4.0), solver, weights="samples")
        with engine(method, FEDERATION, "quadratic", **settings(3)) as e:
            e.play(50)
            close(e.model.theta, w, 1e-9)
            close(e.personal().theta, local_solutions(w, lam), 1e-9)


@pytest.mark.slow
def test_the_fixed_point_with_a_variance_for_each_coordinate() -> None:
    """Eq. 16: the same with P = diag(1 / sigma2_j) in place of lam I."""
    P = torch.diag(1 / VARIANCES)
    B = torch.linalg.solve(H + P, H)
    w = torch.linalg.solve(torch.einsum("i,ijk->jk", COUNTS, B), torch.einsum("i,ijk,ik->j", COUNTS, B, A))
    method = FedMAP(DIAGONAL, SGD(lr=0.5), weights="samples")
    with engine(method, FEDERATION, "quadratic", **settings(5)) as e:
        e.play(150)
        close(e.model.theta, w, 1e-9)
        close(e.personal().theta, local_solutions(w, 1 / VARIANCES), 1e-9)


def test_equal_variances_are_one_variance() -> None:
    one = FedMAP(FixedVariance(SIGMA2), SGD(lr=0.3), server_lr=0.2)
    each = FedMAP(DiagonalVariance((SIGMA2,) * 4), SGD(lr=0.3), server_lr=0.2)
    with engine(one, FEDERATION, "quadratic", **settings(3)) as e, \
         engine(each, FEDERATION, "quadratic", **settings(3)) as f:
        e.play(5)
        f.play(5)
        close(e.model.theta, f.model.theta, 1e-14)
        close(e.personal().theta, f.personal().theta, 1e-14)


def test_a_variance_for_each_coordinate_is_one_for_each() -> None:
    with pytest.raises(UsageError, match="sigma2 has 2 numbers for 4 coordinates"), \
         engine(FedMAP(DiagonalVariance((1.0, 2.0))), FEDERATION, "quadratic"):
        pass
    for wrong in ((), (1.0, 0.0), (1.0, -1.0)):
        with pytest.raises(UsageError, match="sigma2 must be numbers greater than 0"):
            DiagonalVariance(wrong)
    [caution] = FedMAP(DiagonalVariance((0.1, 5.0)), server_lr=0.3).cautions()
    assert "server_lr = 0.3 with sigma2 = 0.1" in caution


def test_pfedme_with_one_local_round_and_eta_1_over_lam() -> None:
    """eta = 1 / lam makes w_i = theta. From gamma, K steps on one full batch are a step on each of K."""
    lam, K = 1 / SIGMA2, 7
    method = FedMAP(FixedVariance(SIGMA2), SGD(lr=0.3), weights="samples", start="global")
    with engine(method, FEDERATION, "quadratic", **settings(K)) as e, \
         engine(pFedMe(lam=lam, eta=1 / lam, alpha=0.3, K=K), FEDERATION, "quadratic", **settings(1)) as f:
        for _ in range(5):
            e.play()
            f.play()
            close(e.model.theta, f.model.theta, 1e-14)
            close(e.personal().theta, f.personal().theta, 1e-14)


@pytest.mark.parametrize("weights", ["omega", "mean_log", "samples", "uniform"])
def test_a_gradient_step_with_lambda_sigma2_is_the_weighted_mean(weights: Any) -> None:
    """gamma - sigma2 sum_k w_k (gamma - theta_k) / sigma2 = sum_k w_k theta_k. Another lambda is not."""
    found = []
    for lr in ("mean", SIGMA2, SIGMA2 / 2):
        method = FedMAP(FixedVariance(SIGMA2), SGD(lr=0.2), weights=weights, temperature=2.0, server_lr=lr)
        with engine(method, FEDERATION, "quadratic", **settings(3)) as e:
            place(e, W0)
            e.play(4)
            found.append(e.model.theta)
    close(found[0], found[1], 1e-12)
    assert (found[0] - found[2]).norm() > 1e-2


def test_equal_omega_is_the_mean() -> None:
    """Clients with the same data but for a shift, sent the mean of their optima: H_i = I makes R and the loss
    the same for a_i = +-v, so omega_1 = omega_2 exactly, and the server takes the plain mean."""
    federation = quadratics(2, kappa=1.0, rows=4)
    a = federation.truth["optima"]
    with engine(FedMAP(FixedVariance(SIGMA2), EXACT), federation, "quadratic", **settings()) as e:
        place(e, a.mean(0))
        [report] = e.play()
        close(e.model.theta, a.mean(0), 1e-12)
        close(report.info["weights"]["most"], torch.tensor(0.5, dtype=torch.float64), 1e-12)
        close(report.info["weights"]["effective"], torch.tensor(2.0, dtype=torch.float64), 1e-11)


def test_a_wide_prior_leaves_local_training() -> None:
    """sigma2 -> inf: theta_i minimises L_i alone, to within |P (a_i - gamma)| / 0.2 = 5e-11."""
    with engine(FedMAP(FixedVariance(1e12), SGD(lr=1.0), weights="samples"), FEDERATION, "quadratic",
                **settings(120)) as e:
        place(e, W0)
        e.play()
        close(e.personal().theta, A, 1e-9)
        close(e.model.theta, COUNTS @ A, 1e-9)


def test_a_narrow_prior_is_a_step_of_fedsgd() -> None:
    """sigma2 -> 0 with exact solutions: theta_i = gamma - sigma2 grad L_i(gamma) + O(sigma2^2), and so for
    the mean: FedSGD with step sigma2. The proximal solver is stable for any prior, and exact in few steps:
    its error shrinks by 1 / (1 + lr / sigma2) = 1e-6 a step."""
    sigma2 = 1e-6
    gradient = torch.einsum("i,ijk,ik->j", COUNTS, H, W0 - A)
    method = FedMAP(FixedVariance(sigma2), Proximal(lr=1.0), weights="samples")
    with engine(method, FEDERATION, "quadratic", **settings(4)) as e:
        place(e, W0)
        e.play()
        close((W0 - e.model.theta) / sigma2, gradient, 1e-4 * float(gradient.norm()))


@pytest.mark.thorough
def test_the_sum_of_the_likelihood_is_a_weaker_prior() -> None:
    """Eq. 2 is N_k L_k + R: the minimiser of L_k + R / N_k, one precision for each client. The upload and
    what newcomers do follow it."""
    lam = 1 / SIGMA2
    method = FedMAP(FixedVariance(SIGMA2), SGD(lr=0.6), weights="samples", likelihood="sum")
    expected = torch.stack([local_solutions(W0, lam / n)[k] for k, n in enumerate(SIZES)])
    with engine(method, FEDERATION, "quadratic", **settings(200)) as e:
        place(e, W0)
        facts = e.training.round_of(e.everyone)
        new = e.backend.run("adapt", e.everyone, 0, method.newcomer(e.server, facts), e.states())
        e.play()
        close(e.personal().theta, expected, 1e-10)
        close(new.values.theta, expected, 1e-10)
        close(e.model.theta, COUNTS @ expected, 1e-10)
    assert (expected - local_solutions(W0, lam)).norm() > 0.1


# -- Theorem 1 ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quadratic(Energy):
    """The Gaussian prior as a function."""

    name: ClassVar[str] = "quadratic"
    sigma2: float = SIGMA2

    def energy(self, theta: Tensor, gamma: Tensor) -> Tensor:
        return (theta - gamma).square().sum() / (2 * self.sigma2)


@dataclass(frozen=True)
class Robust(Energy):
    """Not quadratic, and of bounded force."""

    name: ClassVar[str] = "robust"

    def energy(self, theta: Tensor, gamma: Tensor) -> Tensor:
        return 2 * ((1 + (theta - gamma).square()).sqrt() - 1).sum()


def flat(gamma: Tree) -> Tensor:
    return torch.cat([tensor.reshape(-1) for _, tensor in tree.leaves(gamma)])


def unflat(like: Tree, vector: Tensor) -> Tree:
    names, tensors = zip(*tree.leaves(like), strict=True)
    parts = vector.split([t.numel() for t in tensors])
    return tree.rebuild(like, {n: p.reshape(t.shape) for n, p, t in zip(names, parts, tensors, strict=True)})


def gamma_of(server: Tree, prior: Any) -> Tree:
    """The server's state without statistics, and without variances that are fixed, as `envelope` knows it."""
    if isinstance(server, EnergyState):
        return server.gamma
    mean = server.mean.theta
    return MeanAndVariance(mean, server.pull) if isinstance(prior, LearnedVariance) else mean


NETWORK = InputConvex(hidden=2, sigma2=1.0, kappa=2.0, epsilon=0.05)
S0 = torch.tensor([0.5, 2.0, 0.1, 7.0], dtype=torch.float64)
LR = 0.3
THEOREM: dict[str, tuple[Any, Tree]] = {
    "fixed": (FixedVariance(SIGMA2), GaussianState(Model(W0, NONE), ())),
    "diagonal": (DIAGONAL, GaussianState(Model(W0, NONE), 1 / VARIANCES)),
    "learned": (LearnedVariance(c=0.5, epsilon=0.01, lr=LR), GaussianState(Model(W0, NONE), S0)),
    "robust": (Robust(), EnergyState(W0, NONE)),
    "input_convex": (NETWORK, EnergyState(NETWORK.init(W0, np.random.default_rng(0)), NONE)),
}


@pytest.mark.thorough
@pytest.mark.parametrize(("case", "likelihood"), [
    *(pytest.param(case, "mean", marks=pytest.mark.slow if case in ("robust", "input_convex") else ())
      for case in THEOREM),
    ("learned", "sum"), pytest.param("input_convex", "sum", marks=pytest.mark.slow)])
def test_the_server_steps_down_the_gradient_of_m(case: str, likelihood: Any) -> None:
    """Theorem 1, for any prior: gamma+ = gamma - lambda grad M(gamma), M(gamma) = sum_k w_k min L_k + R. The
    step of a round is held against Danskin's formula, and in two random directions against differences of M
    itself, whose error is O(h^2) + O(eps / h). The variance has the step size of its rule: lambda here, so
    that all of gamma takes one gradient step. Local steps shrink errors by 1 - 0.55 * 0.2 = 0.89 at worst,
    with the network by 0.83: 200 and 130 of them leave 1e-10."""
    (prior, server), steps = THEOREM[case], 130 if case == "input_convex" else 200
    method = FedMAP(prior, SGD(lr=0.55), weights="samples", server_lr=LR, likelihood=likelihood)
    with engine(method, FEDERATION, "quadratic", **settings(steps)) as e:
        losses = client_losses(e.training.work.task, e.training.work.federation, likelihood)
        gamma = gamma_of(server, prior)
        e.training.server = server
        e.play()
        step, thetas = (flat(gamma) - flat(gamma_of(e.server, prior))) / LR, e.personal().theta
    found = envelope(losses, prior, gamma, COUNTS)
    close(thetas, found.thetas, 1e-8)
    close(step, flat(found.grad), 1e-8)
    directions = torch.from_numpy(np.random.default_rng(0).standard_normal((2, len(step))))

    def M(along: Tensor) -> Tensor:
        return envelope(losses, prior, unflat(gamma, flat(gamma) + along @ directions), COUNTS).value

    close(directions @ step, finite_differences(M, torch.zeros(2, dtype=torch.float64), 1e-5), 1e-7)
    assert (directions @ step).abs().min() > 0.1


def test_the_envelope_of_quadratics() -> None:
    """M(gamma) = sum_k w_k (gamma - a_k)' lam A_k (gamma - a_k) / 2: the Moreau envelope of a quadratic."""
    lam = 1 / SIGMA2
    with engine(FedMAP(), FEDERATION, "quadratic") as e:
        losses = client_losses(e.training.work.task, e.training.work.federation)
    found = envelope(losses, FixedVariance(SIGMA2), W0, COUNTS)
    B = lam * torch.linalg.solve(H + lam * I, H)
    close(found.value, torch.einsum("i,ij,ijk,ik->", COUNTS, W0 - A, B, W0 - A) / 2, 1e-12)
    close(found.grad, torch.einsum("i,ijk,ik->j", COUNTS, B, W0 - A), 1e-12)
    close(found.thetas, local_solutions(W0, lam), 1e-13)


@pytest.mark.slow
def test_the_envelope_of_a_network_s_losses() -> None:
    """Losses that are not quadratic (logistic regression), where Newton's method takes several steps: the
    local gradient vanishes at theta_k, and M's gradient is that of finite differences."""
    with engine(FedMAP(), ragged((9, 5), shape=(2,)), "mclr") as e:
        losses = client_losses(e.training.work.task, e.training.work.federation)
        gamma = e.model.theta + 1
    weights = torch.tensor([0.3, 0.7], dtype=torch.float64)
    found = envelope(losses, Robust(), gamma, weights)
    for k, loss in enumerate(losses):
        total = torch.func.grad(lambda t, loss=loss: loss(t) + Robust().energy(t, gamma))(found.thetas[k])
        assert total.abs().max() < 1e-12
    close(found.grad, finite_differences(lambda g: envelope(losses, Robust(), g, weights).value, gamma, 1e-5),
          1e-8)


def test_the_gaussian_prior_as_a_function_is_the_gaussian_prior() -> None:
    """By autograd, or by its own formulas."""
    results = []
    for prior in (FixedVariance(SIGMA2), Quadratic()):
        with engine(FedMAP(prior, Adam(lr=0.05), weights="mean_log", server_lr=0.2), FEDERATION, "quadratic",
                    **settings(3)) as e:
            e.play(5)
            results.append((e.model.theta, e.personal().theta))
    assert_same(results[0], results[1], 1e-13)


@pytest.mark.slow
def test_rounds_with_any_prior_reach_the_minimiser_of_m() -> None:
    """Gradient descent on M ends where its gradient vanishes."""
    with engine(FedMAP(Robust(), SGD(lr=0.5), weights="samples", server_lr=2.0), FEDERATION, "quadratic",
                **settings(5)) as e:
        losses = client_losses(e.training.work.task, e.training.work.federation)
        e.training.server = EnergyState(W0, NONE)
        e.play(100)
        found = envelope(losses, Robust(), e.server.gamma, COUNTS)
        close(e.personal().theta, found.thetas, 1e-8)
        close(found.grad, torch.zeros(4, dtype=torch.float64), 1e-8)


# -- learned variance --------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_the_stationary_point_of_mean_and_variance() -> None:
    """For fixed theta_k (sigma2 -> inf leaves them at a_k), sum_k w_k R is least where
        s (s + c)^2 = V / (4 epsilon),  V = sum_k w_k (theta_k - mu)^2,
        mu = alpha(s) sum_k w_k theta_k / (alpha(s) + 2 epsilon):
    set d/ds = -V / (2 (s + c)^2) + 2 epsilon s and d/dmu = alpha (mu - mean) + 2 epsilon mu to zero. Here
    with theta_k moving too, at the fixed point of the rounds, and M's gradient vanishes there."""
    prior = LearnedVariance(c=0.5, epsilon=0.01, s=1.0)
    method = FedMAP(prior, SGD(lr=0.8), weights="samples")
    with engine(method, FEDERATION, "quadratic", **settings(6)) as e:
        losses = client_losses(e.training.work.task, e.training.work.federation)
        e.play(90)
        mu, s = e.model.theta, e.server.pull
        thetas = e.personal().theta
        close(thetas, local_solutions(mu, 1 / (s + 0.5)), 1e-9)
        V = COUNTS @ (thetas - mu).square()
        close(s * (s + 0.5).square(), V / (4 * 0.01), 1e-9)
        alpha = 1 / (s + 0.5)
        close(mu, alpha * (COUNTS @ thetas) / (alpha + 0.02), 1e-9)
        assert flat(envelope(losses, prior, MeanAndVariance(mu, s), COUNTS).grad).abs().max() < 1e-8


@pytest.mark.slow
def test_gradient_steps_reach_the_same_stationary_point() -> None:
    exact = FedMAP(LearnedVariance(epsilon=0.1), SGD(lr=0.8), weights="samples")
    slow = dataclasses.replace(exact, prior=LearnedVariance(epsilon=0.1, lr=2.0), server_lr=1.0)
    found = []
    for method, rounds in ((exact, 50), (slow, 60)):
        with engine(method, FEDERATION, "quadratic", **settings(3)) as e:
            e.play(rounds)
            found.append((e.model.theta, e.server.pull, e.personal().theta))
    assert_same(found[0], found[1], 1e-8)


def test_the_epsilon_term_is_on_the_server_only() -> None:
    """One server step with gradient: d/dmu has 2 epsilon mu; the clients' problem has no epsilon at all."""
    prior = LearnedVariance(c=1.0, epsilon=0.25, s=1.0, lr=0.1)
    with engine(FedMAP(prior, SGD(lr=0.9), weights="samples", server_lr=0.1), FEDERATION, "quadratic",
                **settings(40)) as e:
        place(e, W0, torch.ones(4, dtype=torch.float64))
        e.play()
        thetas = local_solutions(W0, 0.5)
        close(e.personal().theta, thetas, 1e-10)
        close(e.model.theta, W0 - 0.1 * (0.5 * (W0 - COUNTS @ thetas) + 0.5 * W0), 1e-10)


def test_the_rule_is_the_one_that_other_methods_use() -> None:
    """The same object is Ditto's lam and FedMAP's prior; FedMAP's server has theta_k, so that evidence costs
    no traffic, and gives the rule what the clients of other methods tell: (theta_k - mean)^2."""
    rule = LearnedVariance(epsilon=1e-3, lr=2.0)
    assert Ditto(lam=rule).belief.precision is FedMAP(rule).belief.precision
    with engine(FedMAP(rule, SGD(lr=0.3), weights="samples", server_lr=0.1), FEDERATION, "quadratic",
                **settings(3)) as e:
        e.play()
        mu, s = e.model.theta, e.server.pull
        [report] = e.play()
        evidence = torch.stack([rule.evidence(theta, mu) for theta in e.personal().theta])
        facts = Round(0, 2, torch.arange(5), N, 5)
        expected, told = rule.update(s, COUNTS @ evidence, facts)
        close(e.server.pull, expected, 1e-14)
        close(report.info["s"]["most"], told["s"]["most"], 1e-14)
        # down: mean and s; up: theta
        assert (report.bytes_down, report.bytes_up) == (5 * 8 * 8, 5 * 4 * 8)


def test_adaptive_precision() -> None:
    """One number for all, or one for each client: then the mean is sum p lam theta / sum p lam."""
    rule = Adaptive(pilot=0.5, rounds=1, c=0.5, cap=1.0, per_client=True)
    with engine(FedMAP(rule, SGD(lr=0.9), weights="samples"), FEDERATION, "quadratic", **settings(40)) as e:
        e.play()
        first = e.personal().theta
        close(first, local_solutions(torch.zeros(4, dtype=torch.float64), 0.5), 1e-6)
        close(e.model.theta, COUNTS @ first, 1e-12)
        R2 = (first - e.model.theta).square().sum(1)
        lam = torch.where(R2 * N >= 1, 0.5 / (N * R2), 0.5 / (N * R2).sqrt()).clamp(max=1)
        assert len(set(lam.tolist())) > 2
        close(e.server.pull.lam, lam, 1e-12)
        e.play()
        theta, pull = e.personal().theta, COUNTS * lam
        close(e.model.theta, pull @ theta / pull.sum(), 1e-12)


# -- weights -----------------------------------------------------------------------------------------------


def test_the_weights_are_those_of_direct_computation() -> None:
    """Where likelihoods are not too small to compute: omega_k = prod_i exp(-loss) rho(theta_k), as printed
    (the density's constant cancels); tempered omega^(1/T); mean-log exp(log omega / N_k); counts N_k."""
    lam, T = 1 / SIGMA2, 3.0
    thetas = local_solutions(W0, lam)
    omega = (-mean_losses(thetas)).exp() ** N * (-lam / 2 * (thetas - W0).square().sum(1)).exp()
    expected = {("omega", 1.0): omega, ("omega", T): omega ** (1 / T), ("mean_log", 1.0): omega ** (1 / N),
                ("samples", 1.0): N, ("uniform", 1.0): torch.ones_like(N)}
    for (weights, temperature), unnormalised in expected.items():
        method = FedMAP(FixedVariance(SIGMA2), EXACT, weights=weights, temperature=temperature)
        w = unnormalised / unnormalised.sum()
        with engine(method, FEDERATION, "quadratic", **settings()) as e:
            place(e, W0)
            [report] = e.play()
            close(e.model.theta, w @ thetas, 1e-11)
            close(report.info["weights"]["most"], w.max(), 1e-11)
            close(report.info["weights"]["effective"], 1 / w.square().sum(), 1e-10)
            # only weights that need it cost a number more
            assert report.bytes_up == 5 * 8 * (4 + (weights in ("omega", "mean_log")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_likelihoods_far_beyond_floating_point(dtype: torch.dtype) -> None:
    """exp(-1400 * 0.3) = 1e-183 is 0 in float32, exp(-1e6 * 0.3) in any format; softmax of the logs does not
    care: two clients whose log omega differ by log 3 share 1 to 3, whatever they add up to."""
    half = torch.full((2,), 0.5, dtype=torch.float64)
    for total in (1400 * 0.3, 1e6 * 0.3):
        logs = torch.tensor([-total, -total - math.log(3)], dtype=torch.float64)
        sizes = torch.tensor([1e6, 1e6], dtype=dtype)
        exact = torch.tensor([0.75, 0.25], dtype=torch.float64)
        close(client_weights("omega", logs.to(torch.float64), sizes), exact, 1e-9)
        rounded = client_weights("omega", logs.to(dtype), sizes)
        assert rounded.isfinite().all()
        # float32 knows 3e5 to 0.03
        close(rounded, exact, 0.01 if dtype == torch.float32 else 1e-9)
        for kind in ("mean_log", "samples", "uniform"):
            close(client_weights(kind, logs.to(dtype), sizes), half, 1e-6)
    logs, winner = torch.tensor([-3e38, -1.0, 3e38], dtype=dtype), torch.tensor([0.0, 0.0, 1.0])
    close(client_weights("omega", logs, torch.ones(3, dtype=dtype)), winner.double(), 0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_large_clients_train_without_overflow(dtype: str) -> None:
    """1500 rows of three classes at a loss near 1: log omega is about -1500. Everything stays finite."""
    federation = ragged((1500, 40, 700), shape=(2,))
    for weights in ("omega", "mean_log"):
        method = FedMAP(FixedVariance(1.0), SGD(lr=0.1), weights=weights)
        with engine(method, federation, "mclr", dtype=dtype, batch=64, backend="vectorised") as e:
            for report in e.play(3):
                assert not report.rejected
                assert math.isfinite(report.info["weights"]["effective"])
            assert e.model.theta.isfinite().all()


def test_omega_takes_the_winner_and_favours_small_clients() -> None:
    """Three clients with the same kind of data, of 1500, 40 and 700 rows: the total loss decides, so that the
    smallest has all the weight; mean-log is nearly uniform, counts are as the rows."""
    federation = ragged((1500, 40, 700), shape=(2,))
    effective, model = {}, {}
    for weights in ("omega", "mean_log", "samples"):
        method = FedMAP(FixedVariance(1.0), SGD(lr=0.1), weights=weights)
        with engine(method, federation, "mclr", batch=64, backend="vectorised") as e:
            [report] = e.play()
            effective[weights], model[weights] = float(report.info["weights"]["effective"]), e.model.theta
            smallest = e.personal().theta[1]
    assert effective["omega"] - 1 < 1e-12
    close(model["omega"], smallest, 1e-12)
    assert effective["mean_log"] > 2.9
    assert effective["samples"] == pytest.approx(2240**2 / (1500**2 + 40**2 + 700**2))
    # a temperature brings the others back, and far enough all alike
    logs = torch.tensor([-1500.0, -40.0, -700.0])
    sizes = torch.tensor([1500.0, 40.0, 700.0])
    shares = [client_weights("omega", logs, sizes, T).max() for T in (1.0, 100.0, 1e4, 1e8)]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == pytest.approx(1 / 3, abs=1e-4)


# -- where it starts ---------------------------------------------------------------------------------------


def test_warm_and_global_starts() -> None:
    """"own": the error of theta shrinks by (I - lr (H_i + lam))^E from the client's last model, in its first
    round from gamma (also for one that joins late); "global": from gamma each round."""
    lam, lr, steps = 1 / SIGMA2, 0.1, 2
    Q = torch.linalg.matrix_power(I - lr * (H + lam * I), steps)

    def worked(start: Tensor, gamma: Tensor) -> Tensor:
        target = local_solutions(gamma, lam)
        return target + torch.einsum("ijk,ik->ij", Q, start - target)

    for start in ("own", "global"):
        method = FedMAP(FixedVariance(SIGMA2), SGD(lr=lr), weights="samples", start=start)  # type: ignore[arg-type]
        with engine(method, FEDERATION, "quadratic", **settings(steps, cohort=3, seed=4)) as e:
            place(e, W0)
            late = 0
            for number in range(1, 7):
                gamma, before, joined = e.model.theta, e.states().theta.theta, e.states().joined.clone()
                e.play()
                took_part = torch.from_numpy(e.training.store.last_round == number)
                late += int((took_part & (joined == 0)).sum()) if number > 1 else 0
                own = torch.where((joined > 0)[:, None], before, gamma)
                expected = worked(own if start == "own" else gamma.expand(5, 4), gamma)
                close(e.states().theta.theta[took_part], expected[took_part], 1e-12)
            assert late > 0


def test_initialisation_from_a_random_client() -> None:
    """Round 1 trains without a prior, and only a random client's model is taken: gamma^(0) = theta_j. In
    round 2 all start there, whatever they did before. Another seed draws another client."""
    lr, steps = 0.3, 2
    lam = 1 / SIGMA2
    method = FedMAP(FixedVariance(SIGMA2), SGD(lr=lr), weights="samples", init="client")
    drawn = set()
    for seed in range(4):
        with engine(method, FEDERATION, "quadratic", **settings(steps, seed=seed)) as e:
            place(e, W0)
            [report] = e.play()
            alone = A + torch.einsum("ijk,ik->ij", torch.linalg.matrix_power(I - lr * H, steps), W0 - A)
            close(e.personal().theta, alone, 1e-12)
            j = report.info["initial client"]
            drawn.add(j)
            close(e.model.theta, alone[j], 1e-12)
            e.play()
            target = local_solutions(alone[j], lam)
            Q = torch.linalg.matrix_power(I - lr * (H + lam * I), steps)
            close(e.personal().theta, target + torch.einsum("ijk,ik->ij", Q, alone[j] - target), 1e-12)
    assert len(drawn) > 1
    # the flag for that round is the only traffic
    assert report.bytes_down == 5 * 8 * (4 + 1)


def test_newcomers_solve_the_same_problem_from_the_centre() -> None:
    lam, lr, steps = 1 / SIGMA2, 0.2, 3
    for method in (FedMAP(FixedVariance(SIGMA2), SGD(lr=lr)),
                   FedMAP(FixedVariance(SIGMA2), SGD(lr=lr), init="client"),
                   FedMAP(Quadratic(), SGD(lr=lr), server_lr=1.0)):
        with engine(method, FEDERATION, "quadratic", **settings(steps)) as e:
            facts = e.training.round_of(e.everyone)
            server = method.init_server(e.training.work.task, Model(W0, NONE), facts)
            outcome = e.backend.run("adapt", e.everyone, 0, method.newcomer(server, facts), e.states())
        target = local_solutions(W0, lam)
        Q = torch.linalg.matrix_power(I - lr * (H + lam * I), steps)
        close(outcome.values.theta, target + torch.einsum("ijk,ik->ij", Q, W0 - target), 1e-12)


# -- appendix A.4 ------------------------------------------------------------------------------------------


def a4(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """H_k, c_k of L_k(t) = mean (a x + b - y)^2 = t' H_k t / 2 - c_k' t + const, t = (a, b); and N_k / N."""
    federation = descant.federation("fedmap_linear", test=0.0, validation=0.0, seed=seed).to(torch.float64)
    H, c = [], []
    for k in range(5):
        rows = federation.train[k]
        design = torch.cat([federation.x[rows], torch.ones((len(rows), 1), dtype=torch.float64)], 1)
        H.append(2 * design.T @ design / len(rows))
        c.append(2 * design.T @ federation.y[rows] / len(rows))
    sizes = torch.tensor([60, 1, 2, 3, 50], dtype=torch.float64)
    return torch.stack(H), torch.stack(c), sizes / 116


@cache
def a4_minimum(seed: int, epsilon: float = 1e-4) -> tuple[Tensor, Tensor, Tensor]:
    """mu, s and the personal models at the minimum of M (22): minimise over theta, mu and s in turn, until
    nothing moves. M is convex, and what is in turn least in all three is its minimum."""
    H, c, w = a4(seed)
    mu, s = torch.zeros((2, 2), dtype=torch.float64)
    for _ in range(200):
        alpha = 1 / (s + 1)
        theta = torch.linalg.solve(H + torch.diag(alpha), c + alpha * mu)
        mu = alpha * (w @ theta) / (alpha + 2 * epsilon)
        s = stationary_s(w @ (theta - mu).square(), 1.0, epsilon)
    return mu, s, theta


def line_errors(theta: Tensor) -> Tensor:
    """E (a x + b - (-x + 4k))^2 over x ~ N(k, 1): ((a + 1) k + b - 4k)^2 + (a + 1)^2, for client k from 0."""
    k = torch.arange(5.0, dtype=torch.float64)
    slope = theta[:, 0] + 1
    return (slope * k + theta[:, 1] - 4 * k).square() + slope.square()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
@pytest.mark.thorough
def test_a4_the_prior_finds_what_the_lines_share(seed: int) -> None:
    """The slope is -1 for all, the intercepts are 0, 4, ..., 16, and all data together has a rising line. The
    learned prior has a falling mean, and holds the slope about ten times as firmly as the intercept; so the
    personal lines of clients with 1, 2 and 3 points are far better than Ditto's, which pulls both
    coefficients alike (with the paper's 0.1) to the pooled line. (The paper's own figures after ten rounds,
    mu_b = 9.49 and s_b = 97.8, are not those of the minimum, on any of these draws.)"""
    H, c, w = a4(seed)
    mu, s, theta = a4_minimum(seed)
    pooled = torch.linalg.solve(torch.einsum("k,kij->ij", w, H), w @ c)
    assert pooled[0] > 1.9
    assert -1.1 < mu[0] < -0.5
    assert 6 < mu[1] < 7.5
    assert 7 < (s[1] + 1) / (s[0] + 1) < 30
    ditto = torch.linalg.solve(H + 0.1 * torch.eye(2, dtype=torch.float64), c + 0.1 * pooled)
    assert line_errors(theta)[1:4].mean() < 0.5 * line_errors(ditto)[1:4].mean()
    assert line_errors(theta).mean() < line_errors(ditto).mean()


@pytest.mark.thorough
def test_a4_by_rounds() -> None:
    """The same minimum, by the method itself. The narrowest direction of client 5 has curvature 0.1 under 36:
    the clients use momentum, and what is left after 40 steps the warm start makes good."""
    federation = descant.federation("fedmap_linear", test=0.0, validation=0.0, seed=0)
    method = FedMAP(LearnedVariance(epsilon=1e-4, s=0.0), SGD(lr=0.03, momentum=0.9), weights="samples")
    with engine(method, federation, "mclr", local={"steps": 40}, batch="full", backend="vectorised") as e:
        e.play(30)
        mu, s, theta = a4_minimum(0)
        close(e.model.theta, mu, 1e-3)
        close(e.server.pull, s, 1e-3)
        close(e.personal().theta, theta, 1e-3)


# -- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wrong", "why"), [
    ({"prior": {"name": "fixed", "sigma2": 0.0}}, "sigma2 must be greater than 0, not 0"),
    ({"prior": {"name": "fixed", "sigma2": -1}}, "sigma2 must be greater than 0, not -1"),
    ({"prior": {"name": "fixd"}}, "prior.name 'fixd': did you mean 'fixed'"),
    ({"prior": {"name": "learned", "c": 0}}, "c must be greater than 0"),
    ({"prior": 3.0}, "prior must be"),
    ({"temperature": 0}, "temperature must be greater than 0"),
    ({"temperature": -2.0}, "temperature must be greater than 0"),
    ({"server_lr": 0}, "server_lr must be greater than 0"),
    ({"server_lr": "median"}, 'server_lr must be a number or "mean"'),
    ({"weights": "likelihood"}, "weights 'likelihood': .*known are mean_log, omega, samples, uniform"),
    ({"prior": {"name": "adaptive", "per_client": True}}, "omega compares densities of one prior"),
    ({"prior": {"name": "input_convex"}}, "server_lr: the prior input_convex has no weighted mean"),
])
def test_bad_input(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        FedMAP(**wrong)


def test_bad_input_from_python() -> None:
    for sigma2 in (0.0, -3.0, math.nan, math.inf):
        with pytest.raises(UsageError, match=r"fixed.sigma2 must be"):
            FixedVariance(sigma2)
    assert as_energy(FixedVariance(2.0)).energy(torch.ones(2), torch.zeros(2)) == 0.5


def test_steps_beyond_their_bounds_are_told() -> None:
    assert FedMAP().cautions() == []
    [caution] = FedMAP(FixedVariance(0.1), SGD(lr=0.3)).cautions()
    assert "solver.lr < 2 / (L + 1/sigma2), at most 0.2" in caution
    [caution] = FedMAP(FixedVariance(0.1), server_lr=0.3).cautions()
    assert "server_lr <= sigma2" in caution
    assert FedMAP(FixedVariance(0.1), SGD(lr=0.3), likelihood="sum").cautions() == []

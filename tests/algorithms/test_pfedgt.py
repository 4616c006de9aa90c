"""pFedGT plays its game, on losses f_i(w) = (w - a_i)' H_i (w - a_i) / 2 whose game is solved by hand.

Everything is in float64. Eigenvalues of H_i lie in [0.5, 1], and with full batches gradients are exact. G_i
curves by gt h + (1 - gt) mu + rho: steps of size 2 / (least + largest curvature) shrink the error of a local
solve by (largest - least) / (largest + least).
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import descant
from descant.algorithms import SCAFFOLD, pFedGT
from descant.algorithms.pfedgt import ByValidation, State
from descant.core.algorithm import Message
from descant.core.federation import Federation
from descant.core.tree import take
from descant.core.vector import Model
from descant.errors import UsageError
from descant.experiment.checkpoint import Checkpointer
from descant.experiment.config import parse_algorithm
from descant.priors.quadratic import Quadratic
from descant.priors.solve import SGD, Adam, Proximal
from descant.theory import game
from descant.theory.oracle import messages
from helpers import Engine, assert_same, batchnorm_net, engine, finite_differences, quadratics, ragged

FEDERATION = quadratics(5, rows=4, kappa=2.0)
H, A = FEDERATION.truth["H"], FEDERATION.truth["optima"]  # [m, d, d], [m, d]
M, D = A.shape
I = torch.eye(D, dtype=torch.float64)  # noqa: E741 (the identity)
GAMMAS = (0.55, 0.6, 0.8, 0.9, 1.0)
EACH = torch.tensor(GAMMAS, dtype=torch.float64)
BOWLS = quadratics(5, rows=4, kappa=1.0)  # H_i = I for all
B = BOWLS.truth["optima"]


def settings(steps: int, **train: Any) -> dict[str, Any]:
    return {"batch": "full", "local": {"steps": steps}, "backend": "vectorised", "chunk": 5} | train


def close(found: Any, expected: Any, tolerance: float) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def fitted(gamma: float, mu: float = 0.05, rho: float = 0.0, **rest: Any) -> pFedGT:
    """With the step size for the quickest local solves."""
    gt = game.own_share(gamma, M)
    lr = 2 / (gt * 1.5 + 2 * ((1 - gt) * mu + rho))
    return pFedGT(gamma=gamma, mu=mu, rho=rho, solver=SGD(lr=lr), **rest)


def gradient(w: Tensor) -> Tensor:
    return torch.einsum("ijk,ik->ij", H, w - A)


def place(e: Engine, w: Tensor, c: Tensor, theta: Tensor) -> None:
    """Put everyone at w, with messages c, and the server at theta and the mean message."""
    rows = e.states()._replace(w=Model(w, torch.zeros(M, 0, dtype=torch.float64)), c=c)
    e.training.store.stage(e.everyone, rows, 1)
    e.training.store.write()
    e.training.server = e.server._replace(theta=Model(theta, e.server.theta.stats), c=c.mean(0))


# -- one step ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["theta", "w", "initial"])
def test_a_step_is_that_of_equation_7(start: Any) -> None:
    """grad f_i(w) + (1 - gamma_i)(c - c_i(w)) + (1 - gamma_i)/m (c_i(w) - c_i) + rho w, with c_i(w) =
    grad f_i(w) - mu w at the present w: the explicit form is the same. It begins where `start` says."""
    rng = np.random.default_rng(3)
    w, c = (torch.from_numpy(rng.standard_normal((M, D))) for _ in range(2))
    theta = torch.from_numpy(rng.standard_normal(D))
    mu, rho, lr = 0.4, 0.2, 0.3
    method = pFedGT(gamma=GAMMAS, mu=mu, rho=rho, solver=SGD(lr=lr), start=start)
    with engine(method, FEDERATION, "quadratic", **settings(1)) as e:
        place(e, w, c, theta)
        e.play()
        at = {"theta": theta.expand(M, D), "w": w, "initial": torch.zeros(M, D, dtype=torch.float64)}[start]
        running = gradient(at) - mu * at
        listens = (1 - EACH)[:, None]
        direction = (gradient(at) + listens * (c.mean(0) - running) + listens / M * (running - c) + rho * at)
        new = at - lr * direction
        states: State = e.states()
        close(states.w.theta, new, 1e-14)
        close(states.c, gradient(new) - mu * new, 1e-14)
        close(e.server.c, states.c.mean(0), 1e-14)
        close(e.server.theta.theta, new.mean(0), 1e-14)


@pytest.mark.parametrize("c_start", ["c", "c_i"])
def test_two_steps_of_algorithm_2_as_printed(c_start: Any) -> None:
    """Line 5 with the c_i of the step before, which begins at c or at the stored c_i; what is told at the end
    is the gradient of the last batch, before its step."""
    rng = np.random.default_rng(4)
    w, c = (torch.from_numpy(rng.standard_normal((M, D))) for _ in range(2))
    theta = torch.from_numpy(rng.standard_normal(D))
    gamma, mu, rho, lr = 0.7, 0.4, 0.2, 0.3
    method = pFedGT(gamma=gamma, mu=mu, rho=rho, solver=SGD(lr=lr), messages="minibatch", c_start=c_start)
    with engine(method, FEDERATION, "quadratic", **settings(2)) as e:
        place(e, w, c, theta)
        [report] = e.play()
        at, running = theta.expand(M, D), c.mean(0).expand(M, D) if c_start == "c" else c
        for _ in range(2):
            last = gradient(at) - mu * at
            at = at - lr * (gradient(at) + (1 - gamma) * (c.mean(0) - running)
                            + (1 - gamma) / M * (running - c) + rho * at)
            running = last
        close(e.states().w.theta, at, 1e-14)
        close(e.states().c, running, 1e-14)
        assert report.info == {}  # the accuracy is not known without a full gradient


def test_the_prior_of_the_others() -> None:
    """Gradient and proximal map against the energy: the map minimises ||u - v||^2 / 2 + step energy(u)."""
    rng = np.random.default_rng(0)
    slope, v = (torch.from_numpy(rng.standard_normal(D)) for _ in range(2))
    others = Quadratic(slope, 0.3)
    close(finite_differences(others.energy, v, 1e-3), others.grad(v), 1e-10)
    u = others.prox(v, 0.7)
    close(u - v + 0.7 * others.grad(u), torch.zeros(D, dtype=torch.float64), 1e-14)


@pytest.mark.thorough
def test_the_literal_variant_has_the_direction_of_scaffold() -> None:
    """gamma = mu = rho = 0 and c_i begun at the stored one: the first step goes along grad f_i(w) + c - c_i,
    SCAFFOLD's direction, and tells c_i = grad f_i(theta), its option II. With one local step the methods are
    one: also with minibatches, BatchNorm, Dropout and sampled cohorts."""
    ours = pFedGT(gamma=0.0, mu=0.0, messages="minibatch", c_start="c_i", solver=SGD(lr=0.1), eta_s=0.7)
    with engine(ours, ragged(), batchnorm_net(), cohort=3, local={"steps": 1}) as e, \
         engine(SCAFFOLD(eta_l=0.1, eta_g=0.7), ragged(), batchnorm_net(), cohort=3, local={"steps": 1}) as s:
        for each in (e, s):
            each.play(12)
        assert_same((e.server.theta, e.server.c), (s.server.x, s.server.c), 1e-12)
        assert_same(e.states().c, s.states(), 1e-12)
        assert s.server.c.abs().max() > 1e-3


# -- equilibria ------------------------------------------------------------------------------------------


def test_gamma_one_is_local_ridge() -> None:
    """w_i = (H_i + rho)^-1 H_i a_i, whatever the others say: here they say nonsense. h + rho lies in
    [0.8, 1.3]: the error shrinks by 0.24 a step, 0.24^24 = 1e-15."""
    with engine(fitted(1.0, rho=0.3), FEDERATION, "quadratic", **settings(24, cohort=2)) as e:
        e.training.server = e.server._replace(c=1e3 * torch.ones(D, dtype=torch.float64))
        e.play(12)
        expected = torch.linalg.solve(H + 0.3 * I, torch.einsum("ijk,ik->ij", H, A))
        assert e.training.store.took_part(e.everyone).all()
        close(e.personal().theta, expected, 1e-12)


@pytest.mark.parametrize("mu", [0.05, 2.0])
def test_without_personalization_nobody_leaves_the_global_minimiser(mu: float) -> None:
    """gamma = rho = 0: at w* with c_i = grad f_i(w*) - mu w*, grad G_i = (1/m) sum_j grad f_j(w*) = 0 for any
    mu, also where the equilibrium is unstable (mu = 0.05)."""
    best = FEDERATION.truth["global"].expand(M, D)
    with engine(fitted(0.0, mu), FEDERATION, "quadratic", **settings(3, cohort=3)) as e:
        place(e, best, gradient(best) - mu * best, best[0])
        [report] = e.play()
        close(e.personal().theta, best, 1e-14)
        close(e.server.theta.theta, best[0], 1e-14)
        assert report.info["eps"] < 1e-28


@pytest.mark.thorough
def test_without_personalization_the_global_minimiser_is_reached_where_that_is_stable() -> None:
    """mu = 2: the spectral radius of best responses is below 0.71, 0.71^50 = 4e-8; G_i curves by [1.7, 1.8],
    an error of 0.029 a step."""
    radius = torch.linalg.eigvals(game.response_matrix(H, gamma=0.0, mu=2.0)).abs().max()
    assert radius < 0.71
    with engine(fitted(0.0, 2.0), FEDERATION, "quadratic", **settings(5)) as e:
        e.play(50)
        close(e.personal().theta, FEDERATION.truth["global"].expand(M, D), 1e-6)


@pytest.mark.parametrize("rho", [0.0, 0.25])
def test_equal_bowls_of_curvature_mu_take_one_round(rho: float) -> None:
    """f_j = mu/2 ||w - a_j||^2 with mu = 1: c_j = -mu a_j whatever w_j, so that everyone who has told once
    has told all, and (mu + rho) w_i = mu (gamma_i a_i + (1 - gamma_i) abar). G_i curves by mu + rho: one step
    of 1 / (mu + rho) solves it. `init = "gradient"` tells before the first round, `zero` in it."""
    expected = (EACH[:, None] * B + (1 - EACH[:, None]) * B.mean(0)) / (1 + rho)
    method = pFedGT(gamma=GAMMAS, mu=1.0, rho=rho, solver=SGD(lr=1 / (1 + rho)))
    opened = dataclasses.replace(method, init="gradient")
    with engine(opened, BOWLS, "quadratic", **settings(1)) as e:
        e.play()  # the opening: trains nobody
        close(e.states().w.theta, torch.zeros(M, D, dtype=torch.float64), 0)
        e.play()
        close(e.personal().theta, expected, 1e-14)
    with engine(method, BOWLS, "quadratic", **settings(1)) as e:
        e.play()
        assert (e.personal().theta - expected).abs().max() > 0.1
        e.play()
        close(e.personal().theta, expected, 1e-14)


SOLVES: dict[str, tuple[pFedGT, dict[str, Any]]] = {
    "all": (fitted(0.8), settings(16)),
    "sampled": (fitted(0.8), settings(16, cohort=2)),
    "ridge": (fitted(0.3, mu=0.3, rho=0.1), settings(16, cohort=3)),
    "own start": (fitted(0.8, start="w"), settings(4, cohort=2)),
    "initial start": (fitted(0.8, start="initial"), settings(16, cohort=3)),
    "no server model": (fitted(0.8, start="w", server_model=False), settings(4, cohort=2)),
    "told at once": (fitted(0.8, init="gradient"), settings(16, cohort=2)),
    "proximal": (pFedGT(gamma=0.8, solver=Proximal(lr=1.2), start="w"), settings(5, cohort=3)),
    "per client": (pFedGT(gamma=GAMMAS, solver=SGD(lr=1.5), start="w"), settings(5, cohort=2)),
    "literal": (pFedGT(gamma=0.8, solver=SGD(lr=1.0), messages="minibatch", start="w",
                       c_start="c_i"), settings(6, cohort=3)),
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", [
    pytest.param(case, marks=pytest.mark.slow if case.endswith(" start") or case == "told at once" else ())
    for case in SOLVES])
def test_general_quadratics_reach_the_equilibrium(case: str) -> None:
    """The one linear solve, to 1e-6, with all clients or a sample of them. The residual of the game vanishes,
    by the states alone and by gradients over all data; c is the mean message."""
    method, train = SOLVES[case]
    rule: dict[str, Any] = {"gamma": torch.as_tensor(method.gamma, dtype=torch.float64), "mu": method.mu,
                            "rho": method.rho}
    nash = game.equilibrium(H, A, **rule)
    with engine(method, FEDERATION, "quadratic", **train) as e:
        e.play(2)
        before = float((e.personal().theta - nash).abs().max())
        e.play(33)
        states, w = e.states(), e.personal()
        assert before > 1e-3
        close(w.theta, nash, 1e-6)
        close(states.c, messages(e.training.work.task, FEDERATION, w, method.mu), 1e-6)
        assert game.nash_residual(w.theta, states.c, **rule).max() < 1e-6
        close(e.server.c, states.c.mean(0), 1e-12)
        if method.server_model:
            assert (e.model.theta - nash.mean(0)).abs().max() < 2  # near the mean of some of them
        else:
            assert e.model is None


@pytest.mark.thorough
def test_the_printed_lambda_comes_to_rest_at_another_point() -> None:
    """lam = 0.7 with 2 of 5: c is 1.75 times the mean message, whatever the rounds (all |S| alike), so that
    the rest point is the equilibrium of clients who hear 1.75 c."""
    nash = game.equilibrium(H, A, gamma=0.5, mu=0.5)
    with engine(fitted(0.5, 0.5, lam=0.7), FEDERATION, "quadratic", **settings(16, cohort=2)) as e:
        e.play(45)
        states = e.states()
        close(e.server.c, 0.7 * 5 / 2 * states.c.mean(0), 1e-12)
        assert (states.w.theta - nash).abs().max() > 0.05
        residual = game.game_gradients(states.w.theta, states.c, states.c, gamma=0.5, mu=0.5)
        close(residual + 0.5 * 0.75 * states.c.mean(0), torch.zeros(M, D, dtype=torch.float64), 1e-6)


@pytest.mark.slow
def test_tracking_is_exact_over_200_random_rounds() -> None:
    """c = mean_i c_i to 1e-10, with sampled cohorts of which some drop out, minibatches and noise; and a
    client whose uploads are never accepted."""
    federation = quadratics(6, rows=12, noise=0.5)
    x = federation.x.clone()
    x[federation.train[4]] = torch.nan
    federation = dataclasses.replace(federation, x=x)
    method = pFedGT(gamma=0.7, mu=0.3, solver=SGD(lr=0.3))
    sizes, rejected = set(), 0
    with engine(method, federation, "quadratic", batch=3, local={"steps": 2}, cohort=4, drop=0.3,
                backend="vectorised") as e:
        for _ in range(200):
            [report] = e.play()
            rejected += len(report.rejected)
            sizes.add(report.participants - len(report.rejected))
            close(e.server.c, e.states().c.mean(0), 1e-10)
        assert rejected > 50
        assert len(sizes) > 1
        assert not e.states().c[4].any()
        assert e.states().c[[0, 1, 2, 3, 5]].abs().sum(1).min() > 0.01


@pytest.mark.parametrize(("variant", "stays"), [
    ({}, True), ({"messages": "minibatch", "c_start": "c_i"}, True), ({"messages": "minibatch"}, False),
])
def test_who_stays_at_the_equilibrium(variant: dict[str, Any], stays: bool) -> None:
    """Nobody moves, also by Algorithm 2 with the stored c_i; begun at c, as printed, its first step goes."""
    nash = game.equilibrium(H, A, gamma=0.8, mu=0.05)
    with engine(fitted(0.8, start="w", **variant), FEDERATION, "quadratic", **settings(3)) as e:
        place(e, nash, gradient(nash) - 0.05 * nash, nash.mean(0))
        e.play(2)
        moved = (e.personal().theta - nash).abs().max()
        assert moved < 1e-14 if stays else moved > 1e-3


@pytest.mark.parametrize(("gamma", "mu"), [(0.2, 0.05), (0.2, 0.3), (0.0, 0.9), (0.6, 0.05)])
def test_best_responses_diverge_just_where_the_condition_says(gamma: float, mu: float) -> None:
    """H_i = I and exact solves (one step of 1 / curvature): the mean of w_i - w_i* is multiplied by
    -(1 - gt)(1 - mu) / (gt + (1 - gt) mu) in every round; it is stable where h (1 - 2 gt) < 2 (1 - gt) mu."""
    gt = game.own_share(gamma, M)
    curvature = gt + (1 - gt) * mu
    factor = -(1 - gt) * (1 - mu) / curvature
    stable = game.stable_curvature(game.own_share(gamma, M), mu) > 1.0
    assert stable == (1 - 2 * gt < 2 * (1 - gt) * mu) == (abs(factor) < 1) == (mu > 0.05 or gamma > 0.5)
    nash = game.equilibrium(BOWLS.truth["H"], B, gamma=gamma, mu=mu)
    method = pFedGT(gamma=gamma, mu=mu, solver=SGD(lr=1 / curvature))
    with engine(method, BOWLS, "quadratic", **settings(1)) as e:
        gaps = []
        for _ in range(7):
            e.play()
            gaps.append((e.personal().theta - nash).mean(0))
    for before, after in itertools.pairwise(gaps[1:]):
        close(after, factor * before, 1e-10)
    assert (gaps[-1].norm() < gaps[1].norm()) == stable


# -- accuracy, server, newcomers -----------------------------------------------------------------------------


def test_the_accuracy_of_the_local_solves_is_reported() -> None:
    """eps_i of Assumption 2 by its definition, with the messages before the round; it falls with the work."""
    reported = {}
    for steps in (1, 4, 12):
        with engine(fitted(0.8), FEDERATION, "quadratic", **settings(steps)) as e:
            e.play(3)
            told = e.states().c
            [report] = e.play()
            states = e.states()
            eps = game.achieved_accuracy(states.w.theta, states.c, told, gamma=0.8, mu=0.05)
            close(report.info["eps"], eps.mean(), 1e-13)
            reported[steps] = float(eps.mean())
    assert reported[12] < reported[4] / 10 < reported[1] / 20


def test_theorem_2_bounds_a_run() -> None:
    """rho above max(L, L_F) = 1, all clients: ||w^t - w*||^2 <= a^t ||w^0 - w*||^2 + what the local solves
    cost, with the eps_i of the run. The clock starts when c is the mean message of what is played: after the
    opening."""
    method = fitted(0.3, rho=1.2, init="gradient")
    rate = game.theorem2(0.3, M, 1.0, 0.05, 1.2)
    nash = game.equilibrium(H, A, gamma=0.3, mu=0.05, rho=1.2)
    with engine(method, FEDERATION, "quadratic", **settings(3)) as e:
        e.play()
        told, worst = e.states().c, torch.zeros(M, dtype=torch.float64)
        square = float((e.states().w.theta - nash).square().sum())
        for t in range(1, 15):
            e.play()
            states = e.states()
            eps = game.achieved_accuracy(states.w.theta, states.c, told, gamma=0.3, mu=0.05, rho=1.2)
            told, worst = states.c, torch.maximum(worst, eps)
            assert float((states.w.theta - nash).square().sum()) <= rate.bound(t, square, worst)
        assert rate.bound(14, square, worst) < square / 5


def test_the_server_model() -> None:
    """theta + eta_s mean_{i in S}(w_i - theta), statistics the mean of the participants'."""
    with engine(pFedGT(solver=SGD(lr=0.1), eta_s=0.4), ragged(), batchnorm_net(), cohort=3) as e:
        e.play(2)
        before = e.server.theta
        e.play()
        now = e.training.store.last_round == 3
        w = take(e.states().w, torch.from_numpy(now))
        close(e.server.theta.theta, before.theta + 0.4 * (w.theta.mean(0) - before.theta), 1e-14)
        close(e.server.theta.stats, w.stats.mean(0), 1e-14)
        assert now.sum() == 3
        assert w.stats.std(0).min() > 0
        # statistics have no gradient and no message
        assert e.server.c.shape == e.server.theta.theta.shape


@pytest.mark.thorough
def test_theta_stays_bounded_when_few_take_part() -> None:
    """Eq. 6 as printed, theta + mean_{i in S}(w_i - w_i(old)) from a start at theta, multiplies theta by
    about 2 - |S|/m a round; from theta itself, eta_s = 1 makes it a mean of models."""
    with engine(fitted(0.8), FEDERATION, "quadratic", **settings(6, cohort=1)) as e:
        largest = 0.0
        for _ in range(60):
            e.play()
            largest = max(largest, float(e.model.theta.norm()))
        assert largest < 3 * float(A.norm(dim=1).max())


def test_a_newcomer_plays_its_best_response() -> None:
    """Of the population: c is (1/m) sum of the others' messages, its own being 0: gt H_i (w - a_i) +
    (1 - gt) mu w + (1 - gamma) c = 0. From outside: as the sixth client of a game of six, while the five
    stay. Curvatures lie in about [0.43, 0.85]: 0.33 a step, 0.33^28 = 3e-14. A list of gammas: its mean."""
    federation = quadratics(6, rows=4, kappa=2.0, unseen=1)
    hessians, optima = federation.truth["H"], federation.truth["optima"]
    for method, gamma in ((fitted(0.8), 0.8), (pFedGT(gamma=GAMMAS, solver=SGD(lr=1.6)), sum(GAMMAS) / 5)):
        with engine(method, federation, "quadratic", **settings(28)) as e:
            e.play(3)
            states: State = e.states()
            sixth = np.array([5])
            facts = e.training.round_of(sixth)
            told = method.newcomer(e.server, facts)
            found = e.backend.run("adapt", sixth, 3, told, states).values.theta[0]
            w = torch.cat([states.w.theta, torch.zeros(1, D, dtype=torch.float64)])
            close(found, game.best_responses(hessians, optima, w, gamma=gamma, mu=0.05)[5], 1e-11)

            everyone = e.training.round_of(e.everyone)
            told = method.newcomer(e.server, everyone)
            own = e.backend.run("adapt", e.everyone, 3, told, states).values.theta
            gt = game.own_share(gamma, 5)
            right = gt * torch.einsum("ijk,ik->ij", hessians[:5], optima[:5]) - (1 - gamma) * e.server.c
            close(own, torch.linalg.solve(gt * hessians[:5] + (1 - gt) * 0.05 * I, right), 1e-11)


def test_without_a_server_model() -> None:
    """Half the traffic, no global model; newcomers start at the initial model."""
    method = pFedGT(gamma=1.0, start="w", server_model=False, solver=SGD(lr=0.5))
    with engine(method, FEDERATION, "quadratic", **settings(2, cohort=2)) as e:
        initial = e.server.theta
        [report] = e.play()
        assert (report.bytes_down, report.bytes_up) == (2 * 8 * (D + 1), 2 * 8 * (D + 1))
        assert e.model is None
        assert e.score().shared is None
        assert_same(e.server.theta, initial)
        told = method.newcomer(e.server, e.training.round_of(e.everyone))
        found = e.backend.run("adapt", e.everyone, 1, told, e.states()).values.theta
        twice = (I - 0.5 * H) @ (I - 0.5 * H)
        close(found, A - torch.einsum("ijk,ik->ij", twice, A), 1e-14)  # two steps from zero, with gamma = 1


# -- gamma by validation --------------------------------------------------------------------------------


def validated(wanted: list[float | None]) -> Federation:
    """Bowls H = I; client i's validation row lies where its model comes to with gamma = wanted_i; None: no
    row."""
    base = quadratics(len(wanted), rows=4, kappa=1.0)
    a = base.truth["optima"]
    y, lists, rows = base.y.clone(), [], base.train.sizes[0] - 1
    train = [base.train[k][:rows] for k in range(len(wanted))]
    for k, gamma in enumerate(wanted):
        last = base.train[k][rows:]
        lists.append(last if gamma is not None else last[:0])
        y[last] = a.mean(0) if gamma is None else gamma * a[k] + (1 - gamma) * a.mean(0)
    table = type(base.train)
    return dataclasses.replace(base, y=y, train=table.of(train), validation=table.of(lists))


@pytest.mark.parametrize("backend", ["loop", "vectorised"])
def test_gamma_is_chosen_on_validation_rows(backend: str) -> None:
    """mu = 1, H = I: once all have told, c = -abar whatever is played, and a client with gamma comes to
    gamma a_i + (1 - gamma) abar in one step. Validation rows that lie just there for a gamma of its own
    choose it; who has none plays the fallback. Newcomers choose alike."""
    wanted: list[float | None] = [0.1, 0.4, 0.7, 1.0, None]
    federation = validated(wanted)
    a = federation.truth["optima"]
    chosen = torch.tensor([0.1, 0.4, 0.7, 1.0, 0.4], dtype=torch.float64)[:, None]
    expected = chosen * a + (1 - chosen) * a.mean(0)
    method = pFedGT(gamma=ByValidation((0.1, 0.4, 0.7, 1.0), 0.4), mu=1.0, solver=SGD(lr=1.0))
    with engine(method, federation, "quadratic", **settings(1, backend=backend)) as e:
        e.play()
        [report] = e.play()
        close(e.personal().theta, expected, 1e-13)
        assert report.info["gamma"] == {"0.1": 1, "0.4": 2, "0.7": 1, "1": 1}
        close(e.server.c, -a.mean(0), 1e-13)
        # a newcomer, who told nothing, comes to gt a_i + (1 - gamma) abar
        told = method.newcomer(e.server, e.training.round_of(e.everyone))
        found = e.backend.run("adapt", e.everyone, 2, told, e.states()).values.theta
        answers = {g: (4 * g + 1) / 5 * a + (1 - g) * a.mean(0) for g in (0.1, 0.4, 0.7, 1.0)}
        for k in range(4):
            miss = {g: float((answer[k] - expected[k]).norm()) for g, answer in answers.items()}
            close(found[k], answers[min(miss, key=lambda g: miss[g])][k], 1e-13)
        close(found[4], answers[0.4][4], 1e-13)


def test_a_candidate_that_diverges_is_not_chosen() -> None:
    """mu = 0, m = 5, H = I: G_i curves by gt, 1 for gamma = 1 and 0.2 for gamma = 0. With lr = 9 a step
    multiplies errors by -8 or by -0.8: in float32, 8^60 is beyond all numbers. The candidate that converges
    is played, though it is not the fallback."""
    method = pFedGT(gamma=ByValidation((0.0, 1.0), 1.0), mu=0.0, solver=SGD(lr=9.0))
    with engine(method, validated([1.0] * 5), "quadratic", **settings(60, dtype="float32")) as e:
        [report] = e.play()
        assert not report.rejected
        assert report.info["gamma"] == {"0": 5, "1": 0}


# -- the opening --------------------------------------------------------------------------------------------


def test_the_opening_asks_everyone_once() -> None:
    """Round 1, whatever the cohort: c_i = grad f_i - mu w of the initial model over all rows, c their mean,
    also with another lam; nobody has trained, and all are newcomers. One pass over the data: 9, 5, 1, 7, 3
    rows in batches of 4 are 9 gradients."""
    for method in (pFedGT(init="gradient"), pFedGT(init="gradient", lam=0.7, messages="minibatch")):
        with engine(method, ragged(), batchnorm_net(), cohort=2) as e:
            initial = e.server.theta
            [report] = e.play()
            assert (report.participants, report.grad_steps, report.info) == (5, 9, {})
            assert not e.training.store.took_part(e.everyone).any()
            states = e.states()
            assert_same(states.w, take(Model(*(t.expand(5, *t.shape) for t in initial)), slice(None)))
            close(states.c, messages(e.training.work.task, ragged(), states.w, 0.05), 1e-13)
            close(e.server.c, states.c.mean(0), 1e-15)
            assert_same(e.server.theta, initial)
            assert e.score().newcomer.all()
            [report] = e.play()
            assert report.participants == e.training.store.took_part(e.everyone).sum() == 2
            assert e.score().newcomer.sum() == 3
            moved = e.training.store.last_round == 2
            assert_same(take(e.states(), ~moved), take(states, ~moved))


@pytest.mark.parametrize("backend", ["vectorised", "processes"])
def test_backends_agree_on_the_opening(backend: str) -> None:
    found = []
    for settings_of in ({"backend": "loop"}, {"backend": backend, "chunk": 2}):
        with engine(pFedGT(init="gradient"), ragged(), batchnorm_net(), cohort=3, **settings_of) as e:
            e.play(3)
            found.append((e.server, e.states()))
    assert_same(found[0], found[1], 1e-10)


class Gone(BaseException):
    """The process is no more."""


@pytest.mark.parametrize("at", ["journal", "round"])
@pytest.mark.thorough
def test_a_run_with_an_opening_can_be_resumed(at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                              ) -> None:
    """Bit for bit, from just after the opening, and from its journal alone: those who were only asked keep
    their messages and are newcomers still."""
    monkeypatch.setattr("descant.experiment.run.draw_curve", lambda *args: None)
    method = pFedGT(init="gradient", solver=SGD(lr=0.1))
    train: dict[str, Any] = {"federation": ragged(), "cohort": 2, "batch": 4, "rounds": 4,
                             "eval": {"every": 1}, "local": {"steps": 2}, "backend": "vectorised", "chunk": 2}
    descant.run(method, out=tmp_path / "whole", **train)
    apply = Checkpointer._apply

    def stop(self: Checkpointer, promote: bool) -> None:
        if at == "round":
            apply(self, promote)
        if self._training.number == 1:
            raise Gone
        if at == "journal":
            apply(self, promote)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "_apply", stop)
        with pytest.raises(Gone):
            descant.run(method, out=tmp_path / "parts", **train)
    assert (tmp_path / "parts" / "checkpoint" / "journal.safetensors").exists() == (at == "journal")
    descant.run(method, out=tmp_path / "parts", resume=True, **train)
    kept = [{p.relative_to(tmp_path / part): p.read_bytes() for p in sorted((tmp_path / part).rglob("*"))
             if p.is_file() and ("checkpoint" in p.parts or p.name == "clients.csv")}
            for part in ("whole", "parts")]
    assert kept[0] == kept[1]
    assert len(kept[0]) > 5


# -- what the user says --------------------------------------------------------------------------------


@pytest.mark.parametrize(("wrong", "why"), [
    ({"gamma": -0.1}, "gamma must be at least 0, not -0.1"),
    ({"gamma": 1.1}, "gamma must be at most 1, not 1.1"),
    ({"gamma": [0.5, 1.5]}, r"gamma\[1\] must be at most 1, not 1.5"),
    ({"gamma": "best"}, "gamma must be a number or a list of numbers or { by_validation }, not 'best'"),
    ({"gamma": {"candidates": [0.5, 2]}}, r"candidates\[1\] must be at most 1, not 2"),
    ({"gamma": {"candidates": [0.5, 0.6]}}, "fallback = 0.8 must be one of the candidates"),
    ({"gamma": {"candidates": []}}, "fallback = 0.8 must be one of the candidates"),
    ({"mu": -1}, "mu must be at least 0"),
    ({"lam": 0}, "lam must be greater than 0"),
    ({"server_model": False}, 'start = "theta" needs the server model: use "w" or "initial"'),
    ({"start": "random"}, "start 'random': known are initial, theta, w"),
])
def test_bad_fields_are_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        parse_algorithm({"name": "pfedgt"} | wrong)


def test_a_list_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(UsageError, match="gamma is a list of 2 numbers for 5 clients: it must have one"), \
         engine(pFedGT(gamma=(0.5, 0.6)), FEDERATION, "quadratic"):
        pass


def test_cautions() -> None:
    assert pFedGT().cautions() == []
    assert pFedGT(gamma=0.5, mu=0.0).cautions() == []  # gt > 1/2 with any number of clients
    [told] = pFedGT(gamma=(0.9, 0.2), mu=0.05).cautions()
    assert "gamma = 0.2" in told
    assert f"= {(2 * 0.8 * 0.05) / 0.6:g};" in told
    [told] = pFedGT(gamma=ByValidation((0.1, 0.8))).cautions()
    assert "gamma = 0.1" in told
    [told] = pFedGT(rho=30.0, solver=SGD(lr=0.1)).cautions()
    assert "solver.lr = 0.1 with (1 - gamma) mu + rho = 30.01" in told
    assert pFedGT(rho=30.0, solver=Adam(lr=0.1)).cautions() == []
    assert pFedGT(rho=30.0, solver=Proximal(lr=0.1)).cautions() == []


def test_a_message_has_a_row_of_its_own_only_for_lists() -> None:
    with engine(pFedGT(), FEDERATION, "quadratic") as e:
        facts = e.training.round_of(np.array([1, 4]))
        assert e.training.work.algorithm.broadcast(e.server, facts).each == ()
        sent: Message = pFedGT(gamma=GAMMAS).broadcast(e.server, facts)
        close(sent.each, EACH[[1, 4]], 0)

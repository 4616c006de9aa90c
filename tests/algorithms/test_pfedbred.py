"""pFedBreD against its formulas in plain torch, its closed forms, its reductions, and its analyses.

On the quadratics client i has the loss f_i(w) = (w - a_i)' H_i (w - a_i) / 2, every row alike, so that with
any batch its gradient is H_i (w - a_i). Everything is in float64.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import descant
from descant.algorithms import LocalTrain, pFedBreD, pFedMe
from descant.core.algorithm import Message
from descant.core.federation import Federation
from descant.core.meter import metered
from descant.core.splits import Table
from descant.core.task import Batch, FunctionTask, Task
from descant.core.tree import take
from descant.core.vector import Model
from descant.engine.batches import View
from descant.engine.diagnostics import Observed
from descant.errors import UsageError
from descant.experiment.coherence import (
    deviations,
    envelope_gradients,
    generalized_coherence,
    loss_deviations,
)
from descant.priors.bregman import (
    Bernoulli,
    DiagonalGaussian,
    Exponential,
    Family,
    FullGaussian,
    Poisson,
    SphericalGaussian,
)
from descant.priors.generators import FromGenerator
from descant.priors.precision import Adaptive, LearnedVariance, stationary_s
from descant.priors.solve import SGD
from descant.theory.bregman import envelope, proximal_map
from helpers import (
    assert_same,
    batchnorm_net,
    clone,
    engine,
    finite_differences,
    make_work,
    quadratics,
    ragged,
    unbalanced,
)

SIZES = (9, 1, 4, 2, 6)
FEDERATION = unbalanced(quadratics(5, rows=12), SIZES)
H, A = FEDERATION.truth["H"], FEDERATION.truth["optima"]  # [clients, d, d], [clients, d]
P = torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES)
STRATEGIES = ("identity", "lg", "meg", "mh", "mh_nested", "mh_code")
REMEMBERING = ("meg", "mh", "mh_nested", "mh_code")  # those whose mean looks at the memory
STARTS = ("last", "theta", "w", "mu")


def settings(steps: int, **train: Any) -> dict[str, Any]:
    return {"batch": "full", "local": {"steps": steps}, "backend": "vectorised", "chunk": 5} | train


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def played(algorithm: Any, federation: Federation, rounds: int, model: Any = "mclr", **train: Any
           ) -> tuple[Any, Any]:
    """The global model and the clients' theta."""
    with engine(algorithm, federation, model, **train) as e:
        e.play(rounds)
        states = e.states()
        return e.model, getattr(states, "theta", states) if isinstance(algorithm, pFedBreD) else states


# -- the updates as printed, and as coded -------------------------------------------------------------------


def plain_round(i: int, method: pFedBreD, lam: Any, w: Tensor, theta: Tensor, memory: Tensor, R: int
                ) -> tuple[Tensor, Tensor, Tensor]:
    """One round of client i with a Gaussian prior and order "first", written out: w_{i,R}, theta, last mu."""
    def gradient(at: Tensor) -> Tensor:
        return H[i] @ (at - A[i])

    before = theta if method.start == "last" else w
    for _ in range(R):
        nested = gradient(w - method.eta_inner * gradient(w))
        if method.strategy == "mh_code":
            w = w - method.eta_a * nested
        envelope_term = method.eta * (memory - theta)
        mu = {"identity": w, "lg": w - method.eta_a * gradient(w), "meg": w - envelope_term,
              "mh": w - method.eta_a * gradient(w) - envelope_term,
              "mh_nested": w - method.eta_a * nested - envelope_term,
              "mh_code": w - envelope_term}[method.strategy]
        theta = {"w": w, "mu": mu}.get(method.start, before)
        for _ in range(method.K):
            theta = theta - method.a * (gradient(theta) + lam * (theta - mu))
        w = w - method.a_m * lam * (mu - theta)
        before = theta
    return w, theta, mu


@pytest.mark.parametrize(("strategy", "start"), [
    *((strategy, "last") for strategy in STRATEGIES), *(("mh", start) for start in STARTS[1:]),
    ("mh_code", "w")])
def test_rounds_with_sampled_cohorts_written_out(strategy: Any, start: Any) -> None:
    """Six rounds with two or three of five clients. The memory of a client is w_{i,R} of its OWN last
    participation, before which it is the initial model, as theta is."""
    method = pFedBreD(lam=2.0, eta=0.3, eta_a=0.2, a_m=0.2, a=0.15, K=3, beta=1.5, strategy=strategy,
                      start=start, eta_inner=0.35)
    w0 = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    w, theta, memory = w0, w0.repeat(5, 1), w0.repeat(5, 1)
    with engine(method, FEDERATION, starting_at(w0), **settings(3, cohort=3, drop=0.3)) as e:
        seen = []
        for _ in range(6):
            e.training.number += 1
            cohort, _ = e.training.sample()
            e.training.number -= 1
            seen.append(cohort)
            e.play()
            results = {int(i): plain_round(int(i), method, 2.0, w, theta[i], memory[i], 3) for i in cohort}
            for i, (own, found, _) in results.items():
                theta[i], memory[i] = found, own
            mean = sum(P[i] * own for i, (own, _, _) in results.items()) / P[cohort].sum()
            w = w + 1.5 * (mean - w)
            close(e.model.theta, w, 1e-12)
            close(e.states().theta.theta, theta, 1e-12)
            if method.strategy in REMEMBERING:
                close(e.states().memory, memory, 1e-12)
            else:
                assert e.states().memory == ()
    times = np.bincount(np.concatenate(seen), minlength=5)
    assert times.max() > 2  # somebody had a memory to use,
    assert times.min() < 6  # and somebody was absent


def starting_at(w0: Tensor) -> Task:
    def losses(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        gap = theta - y
        return torch.einsum("ni,nij,nj->n", gap, x, gap) / 2

    return FunctionTask(losses, w0)


def test_the_authors_code_written_out_on_its_two_batches() -> None:
    """One local round of mh_code by torch alone: b1 makes the inner step, b2 the step on w and those on
    theta. Its first meta gradient is at w, its second at w - eta_a grad f(w; b1)."""
    method = pFedBreD(lam=3.0, eta=0.3, eta_a=0.2, a_m=0.1, a=0.1, K=3, strategy="mh_code", start="w")
    work = make_work(method, ragged(), "mclr", batch=4, local={"steps": 1})
    task, w = work.task, work.task.init()
    theta = Model(w.theta + 0.1, w.stats)
    memory = w.theta - 0.2
    server = method.init_server(task, w, facts(work.federation))
    plan, tensors = work._plan("local", np.array([0]), 1)
    data = View(plan, take(tensors, 0))
    batches: list[Batch] = []
    data.scan(lambda carry, *found: batches.extend(found) or carry, ())
    assert len(batches) == 2
    assert not torch.equal(batches[0].x, batches[1].x)
    told, state = method.local(task, method.broadcast(server, facts(work.federation)),
                               type(method.init_client(task, w))(theta, memory), data)

    def gradient(at: Tensor, batch: Batch) -> Tensor:
        at = at.clone().requires_grad_()
        outputs = batch.x.flatten(1) @ at[:48].view(3, 16).T + at[48:]
        [found] = torch.autograd.grad(F.cross_entropy(outputs, batch.y), at)
        return found

    b1, b2 = batches
    inner = w.theta - 0.2 * gradient(w.theta, b1)
    local = w.theta - 0.2 * gradient(inner, b2)
    mu = local - 0.3 * (memory - theta.theta)
    v = local
    for _ in range(3):
        v = v - 0.1 * (gradient(v, b2) + 3.0 * (v - mu))
    close(state.theta.theta, v, 1e-14)
    close(told.model.theta, local - 0.1 * 3.0 * (mu - v), 1e-14)
    assert torch.equal(state.memory, told.model.theta)


def facts(federation: Federation, number: int = 1) -> Any:
    n = federation.population
    sizes = torch.from_numpy(federation.train.sizes[:n]).double()
    return descant.Round(0, number, torch.arange(n), sizes, n)


def test_the_printed_strategies_take_one_batch_for_everything() -> None:
    for strategy in STRATEGIES:
        assert pFedBreD(strategy=strategy).batches_per_step() == (2 if strategy == "mh_code" else 1)


# -- reductions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", ["theta", "w"])
@pytest.mark.parametrize(("strategy", "model"), [
    *((strategy, "mclr") for strategy in STRATEGIES[:-1]), ("mh", "batchnorm+dropout")])
def test_without_meta_steps_it_is_pfedme_bit_for_bit(strategy: Any, start: Any, model: str) -> None:
    """eta = eta_a = 0: mu = w. The same batches, random numbers, statistics and sums; sampled cohorts."""
    weights: Any = "uniform" if start == "w" else "samples"
    train: dict[str, Any] = {"cohort": 3, "local": {"epochs": 1}, "backend": "vectorised"}
    network = batchnorm_net() if model != "mclr" else model
    mine = pFedBreD(lam=2.0, eta=0.0, eta_a=0.0, a_m=0.1, a=0.07, K=3, beta=1.5, weights=weights,
                    strategy=strategy, start=start)
    theirs = pFedMe(lam=2.0, eta=0.1, alpha=0.07, K=3, beta=1.5, weights=weights, start=start)
    assert_same(played(mine, ragged(), 4, network, **train), played(theirs, ragged(), 4, network, **train))


def test_identity_is_pfedme_whatever_the_meta_steps() -> None:
    for order in ("first", "exact"):
        mine = pFedBreD(lam=2.0, a_m=0.1, a=0.07, K=3, strategy="identity", start="theta", order=order)
        assert_same(played(mine, ragged(), 3), played(pFedMe(lam=2.0, eta=0.1, alpha=0.07, K=3), ragged(), 3))


@pytest.mark.parametrize(("start", "order"), [
    *((start, "first") for start in STARTS), pytest.param("last", "exact", marks=pytest.mark.slow)])
@pytest.mark.thorough
def test_the_hybrid_has_the_two_others_as_its_parts(start: Any, order: Any) -> None:
    """mh(eta=0) = lg and mh(eta_a=0) = meg, exactly; so has the nested form the second."""
    usual: dict[str, Any] = {"lam": 2.0, "a_m": 0.1, "a": 0.07, "K": 2, "start": start, "order": order}
    train: dict[str, Any] = {"cohort": 3, "backend": "vectorised"}
    model: Any = batchnorm_net() if start == "last" else "mclr"

    def after(**fields: Any) -> Any:
        return played(pFedBreD(**usual | fields), ragged(), 4, model, **train)

    lg, meg = after(strategy="lg", eta_a=0.2), after(strategy="meg", eta=0.3)
    assert_same(after(strategy="mh", eta=0.0, eta_a=0.2), lg)
    assert_same(after(strategy="mh", eta=0.3, eta_a=0.0), meg)
    assert_same(after(strategy="mh_nested", eta=0.3, eta_a=0.0), meg)
    both = after(strategy="mh", eta=0.3, eta_a=0.2)
    for other in (lg, meg):
        assert (both[0].theta - other[0].theta).abs().max() > 1e-4


def test_the_code_without_its_loss_gradient_is_meg() -> None:
    """On full batches, which are all alike."""
    usual: dict[str, Any] = {"lam": 2.0, "eta": 0.3, "eta_a": 0.0, "a_m": 0.1, "a": 0.1, "start": "w"}
    found, expected = (played(pFedBreD(strategy=strategy, **usual), ragged(), 3, batch="full", cohort=3)
                       for strategy in ("mh_code", "meg"))
    assert_same(found, expected)


@pytest.mark.parametrize("strategy", ["identity", "mh"])
def test_the_unit_covariance_is_the_spherical_gaussian(strategy: Any) -> None:
    ones, unit = (1.0,) * 4, tuple(tuple(row) for row in torch.eye(4).tolist())
    families: list[Family] = [SphericalGaussian(), DiagonalGaussian(ones), FullGaussian(unit)]
    found = [played(pFedBreD(lam=2.0, a=0.1, strategy=strategy, family=family), FEDERATION, 3, "quadratic",
                    **settings(2)) for family in families]
    assert_same(found[1], found[0], 1e-15)
    assert_same(found[2], found[0], 1e-15)


# -- closed forms -------------------------------------------------------------------------------------------

VARIANCE = (0.5, 2.0, 1.3, 0.8)
SIGMA = ((2.0, 0.6, 0.1, 0.0), (0.6, 1.0, -0.3, 0.2), (0.1, -0.3, 0.5, 0.1), (0.0, 0.2, 0.1, 1.5))


@pytest.mark.parametrize("family", [SphericalGaussian(), DiagonalGaussian(VARIANCE), FullGaussian(SIGMA)])
@pytest.mark.parametrize("order", ["first", "exact"])
def test_one_round_is_a_step_down_the_envelopes_of_quadratics(family: Family, order: Any) -> None:
    """Many steps on theta reach (H + lam Q)^-1 (H a + lam Q mu) with Q = Sigma^-1, here for mu = w - eta_a H
    (w - a); then w_i = w - a_m lam J Q (mu - theta), where J = I - eta_a H in order "exact", else I. Steps
    are made in Q theta: the error shrinks by I - a (Sigma H + lam), whose eigenvalues lie within
    1 - 0.3 (2.4 + 2) = -0.32 and 1 - 0.3 (0.05 + 2) = 0.39, and 0.39^40 = 4e-17."""
    lam, eta_a, a_m = 2.0, 0.3, 0.05
    sigma = {"gaussian": np.eye(4), "diagonal_gaussian": np.diag(VARIANCE), "full_gaussian": np.array(SIGMA)}
    Q = torch.linalg.inv(torch.from_numpy(sigma[family.name]))
    w0 = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    mu = w0 - eta_a * torch.einsum("ijk,ik->ij", H, w0 - A)
    right = torch.einsum("ijk,ik->ij", H, A) + lam * mu @ Q
    theta = torch.linalg.solve(H + lam * Q, right)
    step = a_m * lam * (mu - theta) @ Q
    if order == "exact":
        step = step - eta_a * torch.einsum("ijk,ik->ij", H, step)
    method = pFedBreD(lam=lam, eta_a=eta_a, a_m=a_m, a=0.3, K=40, strategy="lg", family=family, order=order)
    with engine(method, FEDERATION, starting_at(w0), **settings(1)) as e:
        e.play()
        close(e.states().theta.theta, theta, 1e-11)
        close(e.model.theta, w0 - P @ step, 1e-11)


def test_a_very_strong_prior_is_its_mean() -> None:
    """lam -> inf: theta = mu, to the order of 1/lam; a is kept below 2 / lam."""
    lam, eta_a = 1e7, 0.3
    w0 = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    mu = w0 - eta_a * torch.einsum("ijk,ik->ij", H, w0 - A)
    method = pFedBreD(lam=lam, eta_a=eta_a, a_m=0.5 / lam, a=1 / lam, K=3, strategy="lg")
    with engine(method, FEDERATION, starting_at(w0), **settings(1)) as e:
        e.play()
        close(e.states().theta.theta, mu, 1e-6)


# -- every family: a step down F_i --------------------------------------------------------------------------

# Logistic regression without an intercept, whose parameters start inside the domains; 3 clients.
ROWS = 7
_rng = np.random.default_rng(3)
POINTS = Federation(
    torch.from_numpy(_rng.standard_normal((3 * ROWS + 3, 3)) + 0.5),
    torch.from_numpy(_rng.integers(2, size=3 * ROWS + 3)),
    Table.of([np.arange(i * ROWS, (i + 1) * ROWS) for i in range(3)]), Table.of([np.zeros(0, np.int64)] * 3),
    Table.of([np.array([3 * ROWS + i]) for i in range(3)]), 2, ("a", "b", "c"))
THETA0 = torch.tensor([0.2, 0.7, 0.4], dtype=torch.float64)


def logistic(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.softplus((1 - 2 * y) * (x @ theta)) + 0.1 * (theta - 0.5).square().sum()


def cosh(y: Tensor) -> Tensor:
    return torch.cosh(y)


def mixture(y: Tensor) -> Tensor:
    """No sum over coordinates; the means are the open simplex."""
    return torch.log1p(y.exp().sum())


FAMILIES: dict[str, Family] = {
    "gaussian": SphericalGaussian(), "diagonal": DiagonalGaussian((0.5, 2.0, 1.3)),
    "full": FullGaussian(((2.0, 0.6, 0.1), (0.6, 1.0, -0.3), (0.1, -0.3, 0.5))),
    "bernoulli": Bernoulli(), "poisson": Poisson(), "exponential": Exponential(),
    "own": FromGenerator(cosh, steps=12), "own mixture": FromGenerator(mixture, steps=12),
}


def loss_of(i: int) -> Callable[[Tensor], Tensor]:
    rows = torch.from_numpy(POINTS.train[i])

    def f(theta: Tensor) -> Tensor:
        return logistic(theta, POINTS.x[rows], POINTS.y[rows]).mean()

    return f


def test_the_inner_step_of_eq_22_is_that_of_the_gradient_where_nobody_says() -> None:
    assert pFedBreD(eta_a=0.3).eta_inner == 0.3
    assert pFedBreD(eta_a=0.3, eta_inner=0.0).eta_inner == 0.0


@pytest.mark.parametrize(("family", "strategy"), [
    *(pytest.param(family, "mh", marks=pytest.mark.slow if family.startswith("own ") else ())
      for family in FAMILIES),
    *((family, strategy) for family in ("gaussian", "bernoulli") for strategy in ("lg", "mh_nested"))])
def test_the_exact_step_of_w_is_down_the_gradient_of_the_objective(family: str, strategy: Any) -> None:
    """Eq. 13. With many steps on theta and R = 1, w - w_i = a_m grad F_i(w), F_i(w) = env f_i(mu_i(w)), here
    by differences of the envelope; theta and the memory in mu are constants. In order "first" it is not."""
    g, lam, eta, eta_a, a_m = FAMILIES[family], 1.5, 0.2, 0.3, 0.02
    theta = torch.tensor([0.3, 0.5, 0.1], dtype=torch.float64)
    memory = torch.tensor([0.25, 0.6, 0.15], dtype=torch.float64)
    start = THETA0 * (0.5 if family == "own mixture" else 1.0)  # inside the simplex
    f = loss_of(1)

    def mean(w: Tensor) -> Tensor:
        inner = w - 0.5 * torch.func.grad(f)(w) if strategy == "mh_nested" else w
        mu = w - eta_a * torch.func.grad(f)(inner)
        return mu if strategy == "lg" else mu - eta * (memory - theta)

    moved = {}
    for order in ("exact", "first"):
        method = pFedBreD(lam=lam, eta=eta, eta_a=eta_a, a_m=a_m, a=0.4, K=40, strategy=strategy, family=g,
                          order=order, start="mu", eta_inner=0.5)
        told, state, _ = alone(method, start, theta, memory)
        moved[order] = (start - told.model.theta) / a_m
        close(state.theta.theta, proximal_map(f, mean(start), lam, g), 1e-8)
    expected = finite_differences(lambda w: envelope(f, mean(w), lam, g, tolerance=1e-8), start, 1e-5)
    close(moved["exact"], expected, 2e-6)
    assert (moved["first"] - expected).norm() > 1e-3 * expected.norm()
    if not g.is_gaussian:
        close(moved["first"], lam * (mean(start) - state.theta.theta), 1e-10)


@pytest.mark.parametrize("strategy", ["mh", "mh_nested"])
def test_the_exact_step_where_means_are_put_back_into_the_domain(strategy: Any) -> None:
    """The projection is a part of mu_i(w): coordinates that it moves do not depend on w. Here the third of
    mu, and in the nested form the first of the inner point besides; theta is nowhere near the edge."""
    g, lam, eta, eta_a, a_m = Poisson(eps=0.3), 1.5, 0.2, 1.0, 0.02
    w, theta = torch.tensor([0.5, 0.7, 0.4], dtype=torch.float64), torch.full((3,), 0.5, dtype=torch.float64)
    memory = torch.tensor([-2.5, -1.5, 2.0], dtype=torch.float64)
    f = loss_of(0)

    def inner(w: Tensor) -> Tensor:
        return w - eta_a * torch.func.grad(f)(w)

    def raw(w: Tensor) -> Tensor:
        at = g.project(inner(w)) if strategy == "mh_nested" else w
        return w - eta_a * torch.func.grad(f)(at) - eta * (memory - theta)

    assert (raw(w) < 0.3).tolist() == [False, False, True]
    assert (inner(w) < 0.3).tolist() == [True, False, False]
    method = pFedBreD(lam=lam, eta=eta, eta_a=eta_a, a_m=a_m, a=0.4, K=40, strategy=strategy, family=g,
                      order="exact", start="mu")
    told, state, _ = alone(method, w, theta, memory, client=0)
    assert state.theta.theta.min() > 0.31
    expected = finite_differences(lambda w: envelope(f, g.project(raw(w)), lam, g, tolerance=1e-8), w, 1e-5)
    close((w - told.model.theta) / a_m, expected, 2e-6)


def alone(method: pFedBreD, w: Tensor, theta: Tensor, memory: Tensor, client: int = 1, steps: int = 1
          ) -> tuple[Any, Any, Any]:
    """The round of one client from these states: upload, new state, and how many gradients it took."""
    work = make_work(method, POINTS, FunctionTask(logistic, w), batch="full", local={"steps": steps})
    task, model = work.task, work.task.init()
    server = method.init_server(task, model, facts(POINTS))
    message = method.broadcast(server, facts(POINTS))
    own = method.init_client(task, model)
    remembered = memory if method.strategy in REMEMBERING else ()
    state = own._replace(theta=Model(theta, model.stats), memory=remembered)
    plan, tensors = work._plan("local", np.array([client]), 1)
    with torch.no_grad(), metered(1) as meter:
        told, state = method.local(task, Message(message.shared, take(message.each, client)), state,
                                   View(plan, take(tensors, 0)))
    return told, state, meter.grad_steps


def test_the_code_s_exact_step_has_the_hessian_of_the_family_only() -> None:
    """mh_code steps from the w that it has moved, in which its mean has the derivative I."""
    g, memory = Poisson(), THETA0 + 0.1
    fields: dict[str, Any] = {"lam": 1.5, "eta": 0.2, "eta_a": 0.3, "a_m": 0.02, "a": 0.2,
                              "strategy": "mh_code", "family": g}
    told, state, _ = alone(pFedBreD(order="exact", **fields), THETA0, THETA0, memory)
    gradient = torch.func.grad(loss_of(1))
    w = THETA0 - 0.3 * gradient(THETA0 - 0.3 * gradient(THETA0))
    mu = w - 0.2 * (memory - THETA0)
    close(told.model.theta, w - 0.02 * 1.5 * (mu - state.theta.theta) / mu, 1e-13)


def test_the_hessian_of_a_task() -> None:
    """Products with unit vectors are the differences of its gradient; also where rows only fill up a batch,
    and with BatchNorm and Dropout, which draw and count the same in both."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Dropout(0.3),
                                nn.Linear(3, 3))
    work = make_work(LocalTrain(), ragged(shape=(4,)), network)
    task, model = work.task, work.task.init()
    rows = work.federation.train[0][:6]
    batch = Batch(work.federation.x[rows], work.federation.y[rows], torch.arange(6) < 5, torch.tensor(7))
    v = torch.linspace(-1, 1, task.dim, dtype=torch.float64)
    with metered(3) as meter:
        found = task.hessian(model, batch, v)
        assert meter.grad_steps == 2 * 3
    h = 1e-6
    ahead, behind = (task.grad(Model(model.theta + s * h * v, model.stats), batch).theta for s in (1, -1))
    close(found, (ahead - behind) / (2 * h), 1e-8)
    assert found.norm() > 0.1


# -- domains ------------------------------------------------------------------------------------------------

WILD: dict[str, Any] = {"lam": 0.5, "eta": 0.9, "eta_a": 2.0, "a_m": 1.0, "a": 3.0, "K": 4, "beta": 2.0}


@pytest.mark.parametrize(("strategy", "order"), [
    ("mh", "first"), ("mh_nested", "exact"), ("mh_code", "exact")])
@pytest.mark.parametrize("family", ["bernoulli", "poisson", "exponential"])
def test_no_model_ever_leaves_the_domain(family: str, order: Any, strategy: Any) -> None:
    """With steps that are far too large, and an aggregation that overshoots (beta = 2)."""
    g = FAMILIES[family]
    method = pFedBreD(strategy=strategy, order=order, family=g, finetune=2, **WILD)
    edges = 0
    with engine(method, POINTS, FunctionTask(logistic, THETA0), **settings(3, chunk=3)) as e:
        for _ in range(4):
            e.play()
            states = e.states()
            for models in (e.model.theta[None], states.theta.theta, states.memory, e.personal().theta):
                assert g.inside(models).all()
                edges += int((models < 1e-5).sum())
    assert edges > 0  # it was tried


@pytest.mark.usefixtures("only_together")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_vectorised(family: str) -> None:
    method = pFedBreD(lam=1.5, a=0.1, K=2, family=FAMILIES[family], order="exact", finetune=1)
    start = THETA0 * (0.5 if family == "own mixture" else 1.0)
    results = []
    for backend in ("loop", "vectorised"):
        with engine(method, POINTS, FunctionTask(logistic, start), local={"steps": 2}, batch=3, chunk=3,
                    backend=backend) as e:
            e.play()
            results.append((e.server, e.states(), e.personal()))
    assert_same(results[0], results[1], 1e-12)
    assert (results[0][0].mean.theta - start).abs().max() > 1e-5


@pytest.fixture
def only_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """No falling back to one client after another."""
    from descant.engine.work import Work

    one_by_one = Work._one_by_one

    def refuse(self: Work, job: Any, clients: np.ndarray, *rest: Any) -> Any:
        assert len(clients) == 1, "the chunk was not vectorised"
        return one_by_one(self, job, clients, *rest)

    monkeypatch.setattr(Work, "_one_by_one", refuse)


# -- tricks and newcomers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("finetune", [1, 3])
def test_fine_tuning(finetune: int) -> None:
    """FT: the client predicts with theta after steps on f_i alone, theta - a_i shrinking by I - a H_i; states
    and server do not notice."""
    usual: dict[str, Any] = {"lam": 2.0, "a": 0.2, "a_m": 0.1}
    for strategy in ("mh", "mh_code"):
        with engine(pFedBreD(strategy=strategy, finetune=finetune, **usual), FEDERATION, "quadratic",
                    **settings(2)) as e, \
             engine(pFedBreD(strategy=strategy, **usual), FEDERATION, "quadratic", **settings(2)) as without:
            e.play(3)
            without.play(3)
            assert_same((e.server, e.states()), (without.server, without.states()))
            shrink = torch.linalg.matrix_power(torch.eye(4, dtype=torch.float64) - 0.2 * H, finetune)
            theta = without.personal().theta
            assert_same(theta, e.states().theta.theta)
            close(e.personal().theta, A + torch.einsum("ijk,ik->ij", shrink, theta - A), 1e-13)


def test_fine_tuning_in_the_geometry_of_the_family() -> None:
    """Poisson: a step in ln theta."""
    method = pFedBreD(lam=1.5, a=0.3, family=Poisson(), finetune=1)
    with engine(method, POINTS, FunctionTask(logistic, THETA0), **settings(2, chunk=3)) as e:
        e.play(2)
        for i, theta in enumerate(e.states().theta.theta):
            expected = theta * torch.exp(-0.3 * torch.func.grad(loss_of(i))(theta))
            close(e.personal().theta[i], expected, 1e-13)


def test_aggregation_momentum() -> None:
    """AM: beta = 2 goes twice as far as the mean of the w_i."""
    start, moved = None, {}
    for beta in (1.0, 2.0):
        method = pFedBreD(beta=beta, lam=2.0, a_m=0.2, a=0.1)
        with engine(method, FEDERATION, "quadratic", **settings(2)) as e:
            start = e.model.theta
            e.play()
            moved[beta] = e.model.theta - start
    close(moved[2.0], 2 * moved[1.0], 1e-15)
    assert moved[1.0].norm() > 0.01


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("finetune", [0, 2])
def test_newcomers_do_the_work_of_one_round_from_w(strategy: Any, finetune: int) -> None:
    method = pFedBreD(lam=2.0, eta=0.3, eta_a=0.2, a_m=0.2, a=0.15, strategy=strategy, finetune=finetune)
    w = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    with engine(method, FEDERATION, starting_at(w), **settings(3)) as e:
        newcomer = method.newcomer(e.server, e.training.round_of(e.everyone))
        found = e.backend.run("adapt", e.everyone, 0, newcomer, e.states()).values
    for i in range(5):
        _, theta, _ = plain_round(i, method, 2.0, w, w, w, 3)
        for _ in range(finetune):
            theta = theta - 0.15 * H[i] @ (theta - A[i])
        close(found.theta[i], theta, 1e-13)


@pytest.mark.parametrize("order", ["first", "exact"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_a_local_round_costs(strategy: Any, order: Any) -> None:
    """K gradients for theta, one or two for the mean, and two for each product with a Hessian."""
    meta = {"identity": 0, "lg": 1, "meg": 0, "mh": 1, "mh_nested": 2, "mh_code": 2}[strategy]
    products = {"lg": 2, "mh": 2, "mh_nested": 4}.get(strategy, 0) if order == "exact" else 0
    _, _, count = alone(pFedBreD(strategy=strategy, order=order, K=4), THETA0, THETA0, THETA0, steps=3)
    assert count == 3 * (4 + meta + products)


# -- composition --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["mh", "meg", "mh_code"])
def test_a_learned_variance_with_personal_means(strategy: Any) -> None:
    """FedMAP's variance under pFedBreD's means, over three rounds: every coordinate has its own precision
    1 / (s + 1), in the steps on theta and on w; after a round s is the stationary point for the mean of
    (theta_i - mu_i)^2, mu_i the mean of the prior that theta_i was found with."""
    rule = LearnedVariance(epsilon=0.05, s=0.3)
    method = pFedBreD(lam=rule, eta=0.3, eta_a=0.2, a_m=0.2, a=0.3, K=3, strategy=strategy)
    w = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    s, theta, memory = torch.full((4,), 0.3, dtype=torch.float64), w.repeat(5, 1), w.repeat(5, 1)
    with engine(method, FEDERATION, starting_at(w), **settings(2)) as e:
        for _ in range(3):
            e.play()
            found = [plain_round(i, method, 1 / (s + 1), w, theta[i], memory[i], 2) for i in range(5)]
            memory, theta, mu = (torch.stack(each) for each in zip(*found, strict=True))
            w, s = P @ memory, stationary_s(P @ (theta - mu).square(), 1.0, 0.05)
            close(e.server.pull, s, 1e-12)
            close(e.model.theta, w, 1e-12)
            close(e.states().theta.theta, theta, 1e-12)
    close(s * (s + 1).square(), P @ (theta - mu).square() / (4 * 0.05), 1e-12)
    assert s.std() > 0.05  # coordinates differ


def test_an_adaptive_strength_looks_at_the_distance_from_w() -> None:
    """R^2 = mean ||theta_i - w||^2 with the w that the server sent: how far the clients are apart, which
    mu_i, that follows its own client, would hide."""
    rule = Adaptive(pilot=0.3, rounds=2, cap=50.0)
    method = pFedBreD(lam=rule, eta=0.3, a_m=0.2, a=0.3, strategy="mh")
    with engine(method, FEDERATION, "quadratic", **settings(3)) as e:
        e.play()
        sent = e.model.theta
        [report] = e.play()
        square = (e.states().theta.theta - sent).square().sum(1).mean()
        close(report.info["R"], square.sqrt(), 1e-13)
        assert e.server.pull.lam != 0.3
        [report] = e.play()
        assert report.info["lam"] == e.server.pull.lam


def test_every_client_can_have_its_own_strength() -> None:
    lams = (0.5, 1.0, 2.0, 3.0, 4.0)
    method = pFedBreD(lam=lams, eta=0.3, eta_a=0.2, a_m=0.2, a=0.15)
    w = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    with engine(method, FEDERATION, starting_at(w), **settings(2)) as e:
        e.play()
        for i, lam in enumerate(lams):
            close(e.states().theta.theta[i], plain_round(i, method, lam, w, w, w, 2)[1], 1e-13)


# -- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fields", "reason"), [
    ({"lam": LearnedVariance(), "family": Bernoulli()}, r"learns the variance.*bernoulli.*\"gaussian\""),
    ({"lam": LearnedVariance(), "family": DiagonalGaussian((1.0,))}, "diagonal_gaussian"),
    ({"lam": Adaptive(), "family": Poisson()}, r"Gaussian priors.*poisson"),
    ({"strategy": "best"}, r"pfedbred.strategy.*mh"),
    ({"start": "zero"}, "pfedbred.start"),
    ({"order": "second"}, "pfedbred.order"),
    ({"family": {"name": "cauchy"}}, r"family.name.*cauchy"),
    ({"family": {"name": "bernoulli", "eps": 0.0}}, "family.eps must be greater than 0"),
    ({"eta": -0.1}, "pfedbred.eta must be at least 0"),
    ({"a": 0.0}, "pfedbred.a must be greater than 0"),
    ({"K": 0}, "pfedbred.K must be at least 1"),
    ({"lam": (1.0, -1.0)}, r"pfedbred.lam\[1\]"),
])
def test_bad_fields(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        pFedBreD(**fields)


def test_models_outside_the_family_s_domain_are_refused() -> None:
    """51 parameters of a softmax regression, about half of them negative."""
    negative = int((make_work(pFedBreD(), ragged()).task.init().theta <= 0).sum())
    assert 10 < negative < 41
    for family in (Poisson(), Exponential(), Bernoulli()):
        reason = rf"{family.name}: {negative} of the 51 parameters .*gaussian"
        with pytest.raises(UsageError, match=reason), engine(pFedBreD(family=family), ragged()):
            pass
    with pytest.raises(UsageError, match="2 numbers for a model of 51"), \
         engine(pFedBreD(family=DiagonalGaussian((1.0, 2.0))), ragged()):
        pass
    with pytest.raises(UsageError, match="lam is a list of 2 numbers for 5 clients"), \
         engine(pFedBreD(lam=(1.0, 2.0)), ragged()):
        pass


def test_cautions() -> None:
    assert pFedBreD().cautions() == []
    [caution] = pFedBreD(a=0.2).cautions()
    assert caution.startswith("a = 0.2 with lam = 15")
    assert "0.133333" in caution
    [caution] = pFedBreD(a_m=0.1).cautions()
    assert caution.startswith("a_m lam = 1.5")
    for family in (DiagonalGaussian((0.1, 2.0)), FullGaussian(((0.1, 0.0), (0.0, 2.0)))):
        assert pFedBreD(family=family).cautions() == []  # the step of w is derived from lam / Sigma
        [caution] = pFedBreD(family=family, a_m=0.01).cautions()  # 15 / 0.1 * 0.01
        assert caution.startswith("a_m lam / Sigma = 1.5")
    assert len(pFedBreD(lam=(1.0, 300.0), a=0.01, a_m=0.01).cautions()) == 2
    assert pFedBreD(lam=(1.0, 300.0)).cautions() == []
    assert pFedBreD(lam=LearnedVariance(c=0.1), a_m=0.1).cautions() == []  # the precision is at most 10
    [caution] = pFedBreD(lam=LearnedVariance(c=0.1), a=0.2).cautions()
    assert caution.startswith("a = 0.2 with lam up to 10")
    assert pFedBreD(family=Poisson(), a_m=9.0).cautions() == []


# -- analyses -----------------------------------------------------------------------------------------------


def test_the_coherence_of_known_vectors() -> None:
    """1 - det of the matrix of cosines. Two vectors at 60 degrees: 1/4. Three unit vectors with all cosines
    c: det = (1 - c)^2 (1 + 2 c), for c = 1/2 that is 1/2."""
    eye = torch.eye(5, dtype=torch.float64)
    assert generalized_coherence(3 * eye[:3]) == (0.0, 0.0)
    pair = torch.tensor([[2.0, 0.0], [0.5, 0.75**0.5]])
    assert generalized_coherence(pair).gce == pytest.approx(0.25, abs=1e-7)
    three = eye[:3] + eye[3]  # cosines 1/2
    found = generalized_coherence(three * torch.tensor([[1e-9], [1.0], [-1e9]]))  # lengths do not count
    assert found.gce == pytest.approx(0.5, abs=1e-12)
    assert found.log_det == pytest.approx(np.log(0.5), abs=1e-12)
    dependent = torch.stack([eye[0], eye[1], eye[0] - 2 * eye[1]])
    assert generalized_coherence(dependent).gce == pytest.approx(1.0, abs=1e-12)
    assert generalized_coherence(torch.randn(7, 5, generator=torch.Generator().manual_seed(0))).gce == 1.0


def test_the_coherence_of_nearly_parallel_vectors() -> None:
    """60 vectors u + e_k / 1000 with |u| = 1: det C = (1 - c)^59 (1 + 59 c) with c = 1 / (1 + 1e-6), far
    below the smallest float; the logarithm is exact to ten digits."""
    vectors = torch.eye(61, dtype=torch.float64)[:60] / 1000
    vectors[:, 60] = 1.0
    c = 1 / (1 + 1e-6)
    found = generalized_coherence(vectors)
    assert found.gce == 1.0
    assert found.log_det == pytest.approx(59 * np.log1p(-c) + np.log1p(59 * c), rel=1e-10)


@pytest.mark.parametrize(("vectors", "reason"), [
    (torch.ones(1, 3), "two vectors or more"), (torch.ones(3), "two vectors or more"),
    (torch.tensor([[1.0, 0.0], [0.0, 0.0]]), "vector 1 is zero"),
    (torch.tensor([[torch.nan, 0.0], [0.0, 1.0]]), "vector 0 is zero or not finite"),
])
def test_coherence_refuses_what_has_no_direction(vectors: Tensor, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        generalized_coherence(vectors)


def test_the_envelope_gradients_of_a_run() -> None:
    """lam (w - theta_i) for a Gaussian prior, with each client's lam; Hess g*(w) (w - theta_i) lam else."""
    train: dict[str, Any] = {"rounds": 3, "batch": "full", "local": {"steps": 2}, "dtype": "float64",
                             "backend": "vectorised"}
    lams = (0.5, 1.0, 2.0, 3.0, 4.0)
    run = descant.run(pFedBreD(lam=lams, a=0.1), federation=FEDERATION, model="quadratic", **train)
    w = run.snapshot("last").server.mean.theta
    theta = torch.stack([run.personal(i, "last").theta for i in range(5)])
    expected = torch.tensor(lams, dtype=torch.float64)[:, None] * (w - theta)
    close(envelope_gradients(run, "last"), expected, 1e-15)
    assert 0 < generalized_coherence(envelope_gradients(run)[:3]).gce < 1
    run = descant.run(pFedBreD(lam=2.0, a=0.1, family=Poisson()), federation=POINTS,
                      model=FunctionTask(logistic, THETA0), **train)
    w = run.snapshot("last").server.mean.theta
    theta = torch.stack([run.personal(i, "last").theta for i in range(3)])
    close(envelope_gradients(run, "last"), 2.0 * (w - theta) / w, 1e-15)
    run = descant.run(LocalTrain(SGD(lr=0.1)), federation=FEDERATION, model="quadratic", **train)
    with pytest.raises(UsageError, match="no global model"):
        envelope_gradients(run)


SEEN: list[Observed] = []


def seen(round: Observed) -> float:
    SEEN.append(round)
    return 0.0


@pytest.mark.parametrize("strategy", ["identity", "lg", "meg", "mh"])
def test_the_clients_of_figure_2_tell_their_envelope_gradients(strategy: Any, monkeypatch: Any) -> None:
    """A step of w is down lam (mu - theta). After several, pFedMe's w_R - theta is (1 - a_m lam) times that
    of the last step; and the models are those of pFedBreD."""
    folder = Path(__file__).parents[2] / "experiments" / "pfedbred"
    monkeypatch.syspath_prepend(str(folder))
    telling: Any = importlib.import_module("_envelopes").Telling
    fields: dict[str, Any] = {"strategy": strategy, "lam": 2.0, "a_m": 0.1, "a": 0.07, "K": 3}
    for steps in (1, 3):
        SEEN.clear()
        given = settings(steps, federation=FEDERATION, model="quadratic", rounds=3, dtype="float64")
        run = descant.run(telling(**fields), eval={"diagnostics": ["test_pfedbred:seen"]}, **given)
        plain = descant.run(pFedBreD(**fields), **given)
        told = SEEN[-1].uploads.envelope
        for client, gap in enumerate(told):
            assert torch.equal(run.personal(client, "last").theta, plain.personal(client, "last").theta)
            if steps == 1:
                close(SEEN[-1].moved[client], -0.2 * gap, 1e-12)
            elif strategy == "identity":
                w = SEEN[-1].uploaded[client]
                close(w - run.personal(client, "last").theta, 0.8 * gap, 1e-12)


def test_deviations_by_hand() -> None:
    """Appendix B.4. Two clients, three classes; the second has no rows of class 1, nobody has any of class 2.
    Class 0: own losses 1 and 4 on 1 and 2 rows have the mean 3. Class 1: the mean is that of the first alone,
    and the second shows it negated."""
    nan = torch.nan
    everyone = torch.tensor([[1.0, 5.0, nan], [3.0, 1.0, nan]])
    own = torch.tensor([[1.0, 2.0, nan], [4.0, nan, nan]])
    found = deviations(everyone, own, torch.tensor([[1.0, 3.0, 0.0], [2.0, 0.0, 0.0]]))
    expected = (torch.tensor([[-1.0, 2.0, nan], [1.0, -2.0, nan]]),
                torch.tensor([[-2.0, 0.0, nan], [1.0, -2.0, nan]]))
    assert_same(tuple(found), expected, 1e-7)


@pytest.mark.thorough
def test_the_deviations_of_a_run() -> None:
    """Against losses computed one sample after another by torch alone."""
    federation = ragged()
    run = descant.run(pFedBreD(a=0.1, lam=1.0), federation=federation, model="mclr", rounds=2, batch=4,
                      local={"steps": 3}, dtype="float64", backend="vectorised")
    found = loss_deviations(run, "last")
    everyone, own, counts = (torch.zeros(5, 3, dtype=torch.float64) for _ in range(3))
    totals = torch.zeros(3, dtype=torch.float64)
    for j in range(5):
        for row in federation.test[j]:
            c = int(federation.y[row])
            totals[c] += 1
            counts[j, c] += 1
            for i in range(5):
                theta = run.personal(i, "last").theta
                outputs = theta[:48].view(3, 16) @ federation.x[row].double().flatten() + theta[48:]
                loss = F.cross_entropy(outputs, federation.y[row])
                everyone[i, c] += loss
                own[i, c] += loss if i == j else 0.0
    assert (counts == 0).any()
    mean = own.sum(0) / totals
    close(found.everyone, everyone / totals - (everyone / totals).mean(0), 1e-12)
    close(found.own, own / counts.clamp(min=1) - mean, 1e-12)
    with pytest.raises(UsageError, match="one class per sample"):
        loss_deviations(descant.run(pFedMe(), federation=FEDERATION, model="quadratic", rounds=1,
                                    local={"steps": 1}, backend="loop"))
    empty = dataclasses.replace(federation, test=Table.of([np.zeros(0, np.int64)] * 5))
    with pytest.raises(UsageError, match="nobody has any"):
        loss_deviations(descant.run(pFedMe(), federation=empty, rounds=1, local={"steps": 1}, backend="loop"))


@pytest.mark.thorough
def test_a_run_with_a_family_of_one_s_own_survives_its_directory(tmp_path: Any, monkeypatch: Any) -> None:
    """The family is written to config.toml, a generator by its place; the run is loaded from there."""
    monkeypatch.setattr("descant.experiment.run.draw_curve", lambda *args: None)  # takes time, and is tested
    federation = descant.federation("quadratics", clients=4, dim=3, rows=6)
    method = pFedBreD(lam=2.0, a=0.1, family=FromGenerator(cosh, steps=12), order="exact")
    run = descant.run(method, federation=federation, model="quadratic", rounds=2, batch=3, local={"steps": 2},
                      backend="vectorised", out=tmp_path / "run")
    loaded = descant.load(tmp_path / "run", allow=[__name__])
    assert loaded.setup.algorithm == method
    assert_same(clone(loaded.personal(1, "last")), clone(run.personal(1, "last")))

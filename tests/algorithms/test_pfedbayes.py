"""pFedBayes: divergence, gradients with the noise fixed, the point of rest and its limits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Normal

from descant.algorithms import LocalTrain, pFedBayes
from descant.core import random
from descant.core.task import Batch
from descant.core.tree import repeat, take
from descant.core.vector import Model
from descant.engine.outcome import Outcome
from descant.models import make_task
from descant.models.module import ModuleTask
from descant.priors import variational
from descant.priors.solve import SGD, Adam, Solver
from descant.priors.variational import NOISE, Gauss, divergence, prior_slopes
from helpers import (
    MODELS,
    SIZES,
    assert_same,
    engine,
    finite_differences,
    make_work,
    quadratics,
    ragged,
    unbalanced,
)

FEDERATION = quadratics(3)
H, A = FEDERATION.truth["H"], FEDERATION.truth["optima"]
TASK = make_task("quadratic", FEDERATION, dtype=torch.float64)
FULL: dict[str, Any] = {"batch": "full", "backend": "vectorised", "chunk": 3}
STATS = torch.zeros(0, dtype=torch.float64)


def drawn(seed: int) -> Gauss:
    generator = torch.Generator().manual_seed(seed)
    mu, rho = torch.randn((2, 4), generator=generator, dtype=torch.float64)
    return Gauss(mu, rho - 1, STATS)


def batch_of(client: int, key: int | Tensor) -> Batch:
    rows = FEDERATION.train[client]
    return Batch(FEDERATION.x[rows], FEDERATION.y[rows], None, torch.as_tensor(key))


def gradient(q: Gauss, w: Gauss, weight: float, batch: Batch) -> Gauss:
    c = torch.tensor(weight, dtype=torch.float64)
    return pFedBayes()._gradient(TASK, q, w.mu, c / F.softplus(w.rho).square(), c, batch)


def rho_of(sigma: Tensor) -> Tensor:
    return sigma.expm1().log()


def test_the_divergence_is_the_mean_of_the_log_ratio() -> None:
    """KL = E_q log q/w, by 200,000 draws: to 5 standard errors."""
    q, w = drawn(0), drawn(1)
    of_q, of_w = (Normal(each.mu, F.softplus(each.rho)) for each in (q, w))
    eps = torch.randn((200_000, 4), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    theta = q.mu + F.softplus(q.rho) * eps
    ratios = (of_q.log_prob(theta) - of_w.log_prob(theta)).sum(1)
    error = float(ratios.std()) / math.sqrt(len(ratios))
    assert abs(float(ratios.mean() - divergence(q, w))) < 5 * error
    assert error < 0.01 * float(divergence(q, w))
    assert float(divergence(q, q)) == 0


def test_gradients_are_those_of_finite_differences_with_the_noise_fixed() -> None:
    q, w, weight, batch = drawn(0), drawn(1), 0.3, batch_of(1, 5)
    eps = random.coarse_normal(random.fold(torch.tensor(5), NOISE), 4, torch.float64)

    def objective(both: Tensor) -> Tensor:
        at = Gauss(*both.chunk(2), STATS)
        loss = TASK.loss(Model(at.mu + F.softplus(at.rho) * eps, STATS), batch)
        return loss + weight * divergence(at, w)

    found = gradient(q, w, weight, batch)
    expected = finite_differences(objective, torch.cat(q[:2]))
    torch.testing.assert_close(torch.cat(found[:2]), expected, rtol=1e-7, atol=1e-7)


def test_the_gradient_of_the_servers_copy() -> None:
    q, w = drawn(0), drawn(1)
    found = torch.cat(prior_slopes(q, w, F.softplus(w.rho), torch.tensor(0.3)))
    expected = finite_differences(lambda both: 0.3 * divergence(q, Gauss(*both.chunk(2), STATS)),
                                  torch.cat(w[:2]))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("c", [1e-6, 0.5, 1e6])
def test_the_point_of_rest_and_its_limits(c: float) -> None:
    """On quadratics E f(mu + sigma eps) = f(mu) + sum_j H_jj sigma_j^2 / 2. With c KL(q || N(m, s^2)) that is
    least at mu = (H + c/s^2)^-1 (H a + c m/s^2) and sigma_j^2 = c / (H_jj + c/s_j^2): there the mean gradient
    over the noise is zero. c -> 0: mu = a, sigma = 0, as alone. c -> inf: the server's Gaussian."""
    w = drawn(1)
    s, client = F.softplus(w.rho), 2
    pull = torch.diag(c / s.square())
    mu = torch.linalg.solve(H[client] + pull, H[client] @ A[client] + pull @ w.mu)
    sigma = (c / (H[client].diagonal() + c / s.square())).sqrt()
    q = Gauss(mu, rho_of(sigma), STATS)
    each = [gradient(q, w, c, batch_of(client, random.fold(torch.tensor(9), k))) for k in range(300)]
    for part in (torch.stack([g.mu for g in each]), torch.stack([g.rho for g in each])):
        assert (part.mean(0).abs() < 5 * part.std(0) / math.sqrt(300) + 1e-9).all()
    if c == 1e-6:
        torch.testing.assert_close(mu, A[client], rtol=0, atol=1e-3)
        assert sigma.max() < 0.01
    if c == 1e6:
        torch.testing.assert_close(mu, w.mu, rtol=0, atol=1e-4)
        torch.testing.assert_close(sigma, s, rtol=1e-4, atol=0)


def test_without_divergence_and_noise_it_is_local_training() -> None:
    """zeta = 0 and sigma -> 0: every client follows its own gradients, and the server's Gaussian stays."""
    solver = SGD(lr=0.3)
    with engine(pFedBayes(zeta=0.0, sigma=1e-9, K=1, solver=solver), FEDERATION, "quadratic", **FULL) as e, \
         engine(LocalTrain(solver), FEDERATION, "quadratic", **FULL) as alone:
        e.play(5)
        alone.play(5)
        torch.testing.assert_close(e.states().mu, alone.states().theta, rtol=0, atol=1e-7)
        assert torch.equal(e.personal().theta, e.states().mu)
        assert torch.equal(e.server.mu, torch.zeros(4, dtype=torch.float64))


def test_a_strong_divergence_keeps_q_at_the_servers_gaussian() -> None:
    """The pull per step, lr zeta / (n s^2) = 0.5, is far above lr times the gradient of the loss."""
    zeta, n = 1e6, 3
    strong = pFedBayes(zeta=zeta, sigma=0.5, solver=SGD(lr=0.5 * 0.25 * n / zeta))
    with engine(strong, FEDERATION, "quadratic", **FULL) as e:
        e.play(5)
        for part in ("mu", "rho"):
            gap = getattr(e.states(), part) - getattr(e.server, part)
            assert gap.abs().max() < 1e-5
    with engine(pFedBayes(zeta=1.0), FEDERATION, "quadratic", **FULL) as e:
        e.play(5)
        assert (e.states().mu - e.server.mu).abs().max() > 1e-2


def test_the_divergence_counts_zeta_by_the_number_of_rows() -> None:
    """After one step of each, w_i = lr (zeta / n_i) mu_i / sigma^2, from w = 0."""
    federation, lr, zeta = unbalanced(FEDERATION, (1, 3, 2)), 0.1, 0.7
    method = pFedBayes(zeta=zeta, sigma=0.5, K=1, solver=SGD(lr=lr), weights="uniform")
    with engine(method, federation, "quadratic", batch="full", local={"steps": 1}) as e:
        e.play()
        n = torch.tensor([[1.0], [3.0], [2.0]], dtype=torch.float64)
        expected = (lr * zeta / n * e.states().mu / 0.25).mean(0)
        torch.testing.assert_close(e.server.mu, expected)


def test_the_server_averages_mu_and_rho() -> None:
    method = pFedBayes(beta=2.0, sigma=0.5, weights="uniform")
    with engine(method, FEDERATION, "quadratic", **FULL) as e:
        facts = e.training.round_of(e.everyone)
        torch.testing.assert_close(F.softplus(e.server.rho), torch.full((4,), 0.5, dtype=torch.float64))
        uploads = Gauss(A, A + 1, torch.ones((3, 2), dtype=torch.float64))
        server, _ = method.aggregate(e.server, uploads, facts)
        torch.testing.assert_close(server.mu, 2 * A.mean(0))
        torch.testing.assert_close(server.rho, 2 * (A + 1).mean(0) - e.server.rho)
        assert torch.equal(server.stats, torch.ones(2, dtype=torch.float64))


def test_the_preset_of_the_authors() -> None:
    paper = pFedBayes.preset("paper")
    assert paper.zeta == 10
    assert paper.sigma == pytest.approx(math.log1p(math.exp(-3)), rel=1e-4)
    assert paper.solver == Adam(lr=0.001)


def test_steps_that_overshoot_are_told() -> None:
    """lr zeta / (n sigma^2) = 2 at n = 0.1 * 1 / (2 * 0.05^2) = 20."""
    [caution] = pFedBayes(zeta=1.0, sigma=0.05, solver=SGD(lr=0.1)).cautions()
    assert "of fewer than 20 training rows" in caution
    assert not pFedBayes().cautions()
    assert not pFedBayes(zeta=0.01, solver=SGD(lr=0.1)).cautions()


def test_coarse_normal_numbers() -> None:
    """Mean, variance and fourth moment of a million; a key's numbers do not depend on how many are asked for
    together, and vmap changes nothing."""
    keys = torch.arange(100)
    found = random.coarse_normal(keys, 10_000, torch.float64)
    assert abs(float(found.mean())) < 5e-3
    assert float(found.var()) == pytest.approx(1, abs=0.01)
    assert float(found.pow(4).mean()) == pytest.approx(3, abs=0.05)
    assert float((found[:, :-1] * found[:, 1:]).mean()) == pytest.approx(0, abs=5e-3)
    assert float((found[:-1] * found[1:]).mean()) == pytest.approx(0, abs=5e-3)
    assert torch.equal(random.coarse_normal(keys[3], 10_000, torch.float64), found[3])
    mapped = torch.func.vmap(lambda key: random.coarse_normal(key, 7, torch.float32))(keys)
    assert torch.equal(mapped, random.coarse_normal(keys, 7, torch.float32))


def test_numbers_that_are_drawn_in_place_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "DRAWN", 4)  # more than one part
    keys = torch.tensor([5, -7, 2**62 + 11])
    for count, dtype in ((7, torch.float32), (64, torch.float64)):
        rows = torch.empty(3, count, dtype=dtype)
        random.draw_coarse_normal_(rows, keys)
        assert torch.equal(rows, random.coarse_normal(keys, count, dtype))


@pytest.mark.parametrize("model", ["mclr", "batchnorm+dropout", "conv"])
@pytest.mark.parametrize("solver", [Adam(lr=0.01, weight_decay=0.1), SGD(lr=0.001, momentum=0.5)])
def test_steps_at_once_are_those_of_each(model: str, solver: Solver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of different sizes, of which some end before others, three at a time: as by autograd, each for
    itself; and a client's place in the chunk changes no bit."""
    monkeypatch.setattr(variational, "AT_ONCE", 3 * 192)
    method = pFedBayes(K=2, solver=solver)
    work = make_work(method, ragged(), MODELS[model](), local={"epochs": 2})
    clients = np.arange(len(SIZES))

    def executed(clients: np.ndarray) -> Outcome:
        server = method.init_server(work.task, work.task.init(), work.round_of(clients, 0))
        message = method.broadcast(server, work.round_of(clients, 1))
        outcome = work.execute("local", clients, 1, message, repeat(server, len(clients)))
        assert outcome.note is None
        return outcome

    found, turned = executed(clients), executed(clients[::-1].copy())
    assert_same(take(turned.values, torch.arange(len(SIZES) - 1, -1, -1)), found.values)
    none = property(lambda self: None, lambda self, value: None)
    monkeypatch.setattr(ModuleTask, "chunk_gradients", none, raising=False)
    plain = executed(clients)
    assert found.grad_steps == plain.grad_steps
    assert_same(found.values, plain.values, 1e-9)

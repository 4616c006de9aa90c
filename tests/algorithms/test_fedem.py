"""FedEM: FedAvg with one component, posteriors by hand, a bound that rises, planted mixtures found."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from descant.algorithms import FedAvg, FedEM
from descant.algorithms.fedem import Mixture
from descant.core.federation import Federation
from descant.core.splits import Table
from descant.core.task import Batch, FunctionTask
from descant.core.tree import take
from descant.core.vector import Model
from descant.errors import UsageError
from descant.models import make_task
from descant.priors.solve import SGD, Adam
from helpers import MODELS, Engine, assert_same, batchnorm_net, engine, ragged

FULL: dict[str, Any] = {"batch": "full", "local": {"steps": 1}, "backend": "vectorised"}
DOUBLE = torch.float64


@pytest.mark.parametrize("backend", [pytest.param("loop", marks=pytest.mark.slow), "vectorised"])
@pytest.mark.parametrize("aggregation", ["responsibilities", "samples"])
@pytest.mark.parametrize("solver", [SGD(lr=0.1, momentum=0.5), Adam(lr=0.02)])
def test_one_component_is_fedavg(backend: str, aggregation: Any, solver: Any) -> None:
    """q = pi = 1: every row counts once, every client n_i."""
    for model in ("mclr", batchnorm_net()):
        method = FedEM(M=1, solver=solver, aggregation=aggregation, beta=1.5)
        with engine(method, ragged(), model, backend=backend, cohort=4) as e, \
             engine(FedAvg(solver, beta=1.5), ragged(), model, backend=backend, cohort=4) as average:
            e.play(3)
            average.play(3)
            assert_same(e.model, average.model, 1e-14)
            assert torch.equal(e.states(), torch.ones((5, 1), dtype=DOUBLE))


# -- a mixture of numbers: losses (theta - y)^2 of rows y ------------------------------------------------

Y = [[0.0, 1.0, 3.0], [2.0]]
NUMBERS = FunctionTask(lambda theta, x, y: (theta[0] - y).square(), torch.zeros(1, dtype=DOUBLE))


def numbers() -> Federation:
    y = torch.tensor([*Y[0], *Y[1]], dtype=DOUBLE)
    nobody = Table.of([np.zeros(0, np.int64)] * 2)
    return Federation(torch.zeros((4, 1), dtype=DOUBLE), y, Table.of([np.array([2, 0, 1]), np.array([3])]),
                      nobody, nobody, None, ("a", "b"))


def by_hand(y: list[float], theta: list[float], pi: list[float]) -> np.ndarray:
    """q [rows, M], entry by entry."""
    q = np.array([[p * np.exp(-(t - each) ** 2) for t, p in zip(theta, pi, strict=True)] for each in y])
    return q / q.sum(1, keepdims=True)


@pytest.mark.parametrize("aggregation", ["responsibilities", "samples"])
@pytest.mark.thorough
def test_a_round_by_hand(aggregation: Any) -> None:
    """q by Bayes' rule from the received models and the last pi, pi its mean, one step of
    theta_im - lr mean(q_m / pi_m 2 (theta_m - y)), and their mean by n_i pi_im; or without the pi_im."""
    theta, pis, lr = [0.5, 2.5], [[0.3, 0.7], [0.6, 0.4]], 0.1
    moved, new = np.zeros((2, 2)), np.zeros((2, 2))
    for i, y in enumerate(Y):
        q = by_hand(y, theta, pis[i])
        new[i] = q.mean(0)
        for m in range(2):
            counts = q[:, m] / (new[i, m] if aggregation == "responsibilities" else 1)
            moved[i, m] = theta[m] - lr * np.mean([c * 2 * (theta[m] - each) for c, each in zip(
                counts, y, strict=True)])
    n = np.array([[3.0], [1.0]]) * (new if aggregation == "responsibilities" else 1 + 0 * new)
    expected = (n * moved).sum(0) / n.sum(0)
    for backend in ("loop", "vectorised"):
        method = FedEM(M=2, solver=SGD(lr=lr), aggregation=aggregation)
        with engine(method, numbers(), NUMBERS, **FULL | {"backend": backend}) as e:
            e.training.server = Model(torch.tensor(theta, dtype=DOUBLE)[:, None], e.server.stats)
            e.training.store.stage(e.everyone, torch.tensor(pis, dtype=DOUBLE), 1)
            e.training.store.write()
            [report] = e.play()
            np.testing.assert_allclose(e.server.theta[:, 0], expected, atol=1e-14)
            np.testing.assert_allclose(e.states(), new, atol=1e-14)
            np.testing.assert_allclose(report.info["pi"], np.array([0.75, 0.25]) @ new, atol=1e-14)
            # what is predicted with: the components and the shares
            theta_i, _, pi_i = e.personal()
            assert torch.equal(theta_i, e.server.theta.expand(2, 2, 1))
            assert torch.equal(pi_i, e.states())


def test_a_newcomer_learns_its_shares_alone() -> None:
    """Three steps of pi <- mean q(pi) from 1/2, the models as they are."""
    theta = [0.5, 2.5]
    with engine(FedEM(M=2, steps_pi=3), numbers(), NUMBERS, **FULL) as e:
        server = Model(torch.tensor(theta, dtype=DOUBLE)[:, None], e.server.stats)
        message = e.training.work.algorithm.newcomer(server, e.training.round_of(e.everyone))
        found = e.backend.run("adapt", e.everyone, 1, message, e.states()).values
        for i, y in enumerate(Y):
            pi = [0.5, 0.5]
            for _ in range(3):
                pi = by_hand(y, theta, pi).mean(0).tolist()
            np.testing.assert_allclose(found.pi[i], pi, atol=1e-14)
            assert torch.equal(found.theta[i], server.theta)


# -- the bound -----------------------------------------------------------------------------------------


def likelihood(e: Engine, pi: Tensor) -> tuple[Tensor, list[Tensor]]:
    """sum_i sum_rows log sum_m pi_im exp(-loss_m), and the losses [rows, M] of each client."""
    federation, task = e.training.work.federation, e.training.work.task
    found, total = [], torch.zeros((), dtype=DOUBLE)
    for i in range(federation.population):
        rows = federation.train[i]
        batch = Batch(federation.x[rows], federation.y[rows])
        models = range(len(pi[i]))
        found.append(torch.stack([task.losses(take(e.server, m), batch)[0] for m in models], 1))
        total = total + torch.logsumexp(pi[i].log() - found[-1], 1).sum()
    return total, found


@pytest.mark.parametrize("aggregation", ["responsibilities", "samples"])
def test_the_bound_of_em_rises_in_every_round(aggregation: Any) -> None:
    """F(q, pi, theta) = sum q (log pi - loss - log q) is at most the log-likelihood, and equal for q of
    (pi, theta). A round takes that q, the pi that maximises F, and a gradient step on theta, which raises F
    if it is small; then q again. So L_k <= F(q_k, pi_{k+1}, theta_{k+1}) <= L_{k+1}."""
    method = FedEM(M=3, solver=SGD(lr=0.02), aggregation=aggregation)
    with engine(method, ragged(), "mclr", **FULL) as e:
        L, losses = likelihood(e, e.states())
        first = L
        for _ in range(12):
            q = [torch.softmax(pi.log() - each, 1) for pi, each in zip(e.states(), losses, strict=True)]
            e.play()
            after, losses = likelihood(e, e.states())
            bound = sum((each * (pi.log() - loss - each.log())).sum()
                        for each, pi, loss in zip(q, e.states(), losses, strict=True))
            assert L < bound <= after + 1e-12
            L = after
        assert first + 1 < L


@pytest.mark.thorough
def test_it_finds_a_planted_mixture() -> None:
    """y = x' theta_m + noise of variance 1/8, m by the client's own shares: with loss 4 (x' theta - y)^2 that
    is the model of FedEM. 8 clients with 80 rows each: shares to within 3 sqrt(1/4 / 80) = 0.17."""
    rng = np.random.default_rng(3)
    true, share = np.array([[2.0, -1.0, 0.5], [-1.0, 1.5, 1.0]]), np.linspace(0.05, 0.95, 8)
    x = rng.standard_normal((8, 80, 3))
    which = (rng.random((8, 80)) > share[:, None]).astype(int)
    y = np.einsum("cnd,cnd->cn", x, true[which]) + np.sqrt(1 / 8) * rng.standard_normal((8, 80))
    nobody = Table.of([np.zeros(0, np.int64)] * 8)
    federation = Federation(torch.from_numpy(x.reshape(-1, 3)), torch.from_numpy(y.ravel()),
                            Table.of(list(np.arange(640).reshape(8, 80))), nobody, nobody, None,
                            tuple("abcdefgh"))
    task = FunctionTask(lambda theta, x, y: 4 * (x @ theta - y).square(), torch.zeros(3, dtype=DOUBLE))
    with engine(FedEM(M=2, solver=SGD(lr=0.05)), federation, task, **FULL | {"local": {"steps": 2}}) as e:
        e.play(40)
        found, pi = e.server.theta.numpy(), e.states().numpy()
        swap = np.linalg.norm(found[0] - true[0]) > np.linalg.norm(found[1] - true[0])
        found, pi = (found[::-1], pi[:, ::-1]) if swap else (found, pi)
        assert np.abs(found - true).max() < 0.15
        assert np.abs(pi[:, 0] - share).max() < 0.17
        # a newcomer with the same rows has the same shares
        message = e.training.work.algorithm.newcomer(e.server, e.training.round_of(e.everyone))
        new = e.backend.run("adapt", e.everyone, 1, message, e.states()).values.pi.numpy()
        assert np.abs((new[:, ::-1] if swap else new) - pi).max() < 0.05


# -- what it is made of --------------------------------------------------------------------------------


def test_predictions_are_mixtures_of_probabilities() -> None:
    pi = torch.tensor([0.2, 0.8], dtype=DOUBLE)
    outputs = torch.randn((2, 6, 3), dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    classes = make_task("mclr", ragged(), dtype=DOUBLE)
    each = torch.softmax(outputs, 2)
    found = torch.softmax(classes.mixture(outputs, pi), 1)
    torch.testing.assert_close(found, torch.einsum("m,mnc->nc", pi, each))
    alone = torch.tensor([0.0, 1.0], dtype=DOUBLE)  # a component without a share has no say
    torch.testing.assert_close(torch.softmax(classes.mixture(outputs, alone), 1), each[1])
    binary = make_task("mclr", ragged(classes=2), loss="binary_cross_entropy", dtype=DOUBLE)
    yes = torch.sigmoid(binary.mixture(outputs[..., :1], pi))
    torch.testing.assert_close(yes, torch.einsum("m,mnc->nc", pi, torch.sigmoid(outputs[..., :1])))
    real = make_task("mclr", ragged(classes=None), dtype=DOUBLE)
    torch.testing.assert_close(real.mixture(outputs, pi), torch.einsum("m,mnc->nc", pi, outputs))

    theta = classes.init().theta
    models = Model(torch.stack([theta, -theta]), torch.zeros((2, 0), dtype=DOUBLE))
    x = torch.randn((4, 1, 4, 4), dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
    each = torch.stack([torch.softmax(classes.predict(take(models, m), x), 1) for m in range(2)])
    found = FedEM(M=2).predict(classes, Mixture(models.theta, models.stats, pi), x)
    torch.testing.assert_close(torch.softmax(found, 1), torch.einsum("m,mnc->nc", pi, each))


@pytest.mark.parametrize("model", ["mclr", "groupnorm"])
@pytest.mark.parametrize("padded", [False, True])
def test_rows_may_count_unequally(model: str, padded: bool) -> None:
    """The gradient is that of the mean over the real rows of counts * loss: written out and by autograd."""
    federation = ragged()
    task = make_task(MODELS[model](), federation, dtype=DOUBLE)
    counts = torch.tensor([0.5, 2.0, 0.0, 1.25, 3.0], dtype=DOUBLE)
    weight = torch.tensor([True, True, True, False, False]) if padded else None
    batch = Batch(federation.x[:5], federation.y[:5], weight, torch.tensor(3), counts)
    theta = task.init().theta.requires_grad_()
    losses = task.losses(Model(theta, task.init().stats), batch)[0]
    expected = (losses * counts)[: 3 if padded else 5].mean()
    [gradient] = torch.autograd.grad(expected, theta)
    found = task.grad(task.init(), batch)
    torch.testing.assert_close(found.theta, gradient, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.loss, expected.detach())
    torch.testing.assert_close(task.loss(task.init(), batch), expected.detach())


@pytest.mark.thorough
def test_counts_follow_the_rows_wherever_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the samples are too many to be arranged client by client, they stay as they lie."""
    found = []
    for budget in (2**30, 0):
        monkeypatch.setattr("descant.engine.pool.BUDGET", budget)
        for backend in ("loop", "vectorised"):
            with engine(FedEM(), ragged(), "mclr", backend=backend) as e:
                assert e.training.work.pool.train.in_order == (budget > 0)
                e.play(2)
                found.append((e.server, e.states()))
    for each in found[1:]:
        assert_same(each, found[0], 1e-12)


def test_more_components_than_clients_are_refused() -> None:
    with pytest.raises(UsageError, match=r"fedem.M is 6, but the .* only 5 clients: take at most 5"), \
         engine(FedEM(M=6), ragged(), "mclr"):
        pass

"""Layers of which some are shared and some are private: FedPer, LG-FedAvg, FedBN, FedRep, FedBABU, and priors
on the shared layers alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from descant.algorithms import (
    FedAvg,
    FedBABU,
    FedBN,
    FedMAP,
    FedPer,
    FedProx,
    FedRep,
    LGFedAvg,
    LocalTrain,
    pFedBreD,
    pFedMe,
)
from descant.algorithms.ditto import Ditto
from descant.core.algorithm import Algorithm
from descant.core.federation import Federation
from descant.core.splits import Table
from descant.core.vector import Layout, Model
from descant.errors import UsageError
from descant.priors.energy import InputConvex
from descant.priors.precision import FixedVariance
from descant.priors.solve import SGD, Proximal
from helpers import MODELS, assert_same, batchnorm_net, engine, quadratics, ragged

FULL: dict[str, Any] = {"batch": "full", "local": {"steps": 1}, "backend": "vectorised", "chunk": 6}


def regressions(rows: tuple[int, ...], slopes: torch.Tensor, intercepts: torch.Tensor) -> Federation:
    """y = x slopes_i + intercept_i + noise; slopes [clients, p]."""
    generator = torch.Generator().manual_seed(0)
    lists = torch.arange(sum(rows)).split(list(rows))
    x = torch.randn(sum(rows), slopes.shape[1], generator=generator, dtype=torch.float64)
    y = torch.cat([x[at] @ slopes[k] + intercepts[k] for k, at in enumerate(lists)])
    y = y + 0.1 * torch.randn(len(y), generator=generator, dtype=torch.float64)
    table = Table.of([at.numpy() for at in lists])
    nobody = Table.of([at.numpy()[:0] for at in lists])
    return Federation(x, y, table, nobody, nobody, None, tuple(map(str, range(len(rows)))))


WITHIN = regressions((8, 13, 5, 20), torch.tensor([[1.0, -2.0, 0.5]] * 4, dtype=torch.float64),
                     torch.tensor([3.0, -3.0, 0.0, 1.0], dtype=torch.float64))


def linear(inputs: int = 3) -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(inputs, 1)


def within_estimator() -> tuple[torch.Tensor, torch.Tensor]:
    """The least squares of one slope for all with an intercept for each client: slopes by regression of what
    deviates from the clients' means, then intercepts from the means."""
    parts = [(WITHIN.x[torch.from_numpy(WITHIN.train[k])], WITHIN.y[torch.from_numpy(WITHIN.train[k])])
             for k in range(4)]
    x = torch.cat([a - a.mean(0) for a, _ in parts])
    y = torch.cat([b - b.mean() for _, b in parts])
    w = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    return w, torch.stack([(b - a @ w).mean() for a, b in parts])


@pytest.mark.thorough
def test_fedper_with_private_intercepts_is_the_within_estimator() -> None:
    """With one full step a round, rounds are gradient steps on sum_i n_i f_i(w, b_i) in w, and on each f_i in
    b_i: both gradients vanish at the least squares of one w with a b_i for each client, and only there."""
    w, b = within_estimator()
    with engine(FedPer(shared=("weight",), solver=SGD(lr=0.2)), WITHIN, linear(), **FULL) as e:
        e.play(120)
        torch.testing.assert_close(e.server.theta, w, rtol=0, atol=1e-9)
        torch.testing.assert_close(e.states().theta[:, 0], b, rtol=0, atol=1e-9)
        torch.testing.assert_close(e.personal().theta, torch.cat([w.expand(4, 3), b[:, None]], 1), rtol=0,
                                   atol=1e-9)


@pytest.mark.slow
def test_lg_fedavg_shares_what_fedper_keeps() -> None:
    """One intercept for all and a slope for each: at the least squares of that model."""
    with engine(LGFedAvg(shared=("bias",), solver=SGD(lr=0.2)), WITHIN, linear(), **FULL) as e:
        e.play(300)
        design, y = torch.zeros(46, 13, dtype=torch.float64), WITHIN.y
        design[:, 12] = 1
        for k in range(4):
            at = torch.from_numpy(WITHIN.train[k])
            design[at, 3 * k : 3 * k + 3] = WITHIN.x[at]
        found = torch.linalg.lstsq(design, y[:, None]).solution[:, 0]
        torch.testing.assert_close(e.server.theta, found[12:], rtol=0, atol=1e-4)
        torch.testing.assert_close(e.states().theta, found[:12].reshape(4, 3), rtol=0, atol=1e-4)


@pytest.mark.parametrize("method", [FedPer, FedRep, FedBABU, LGFedAvg, FedBN])
def test_with_all_layers_shared_it_is_fedavg(method: type[FedPer]) -> None:
    with engine(method(shared="all", finetune=0), ragged(), "dnn") as e, \
         engine(FedAvg(), ragged(), "dnn") as other:
        e.play(3)
        other.play(3)
        assert_same(e.server, other.server)
        assert_same(e.personal(), other.personal())


def test_fedbn_without_batchnorm_is_fedavg_and_says_so() -> None:
    with engine(FedBN(), ragged(), "dnn") as e, engine(FedAvg(), ragged(), "dnn") as other:
        e.play(2)
        other.play(2)
        assert_same(e.server, other.server)
        [remark] = e.training.work.algorithm.remarks(e.training.work.task)
    assert "fedbn is fedavg here" in remark
    with engine(FedBN(), ragged(), batchnorm_net()) as e:
        assert e.training.work.algorithm.remarks(e.training.work.task) == []


def test_fedbn_keeps_batchnorm_with_the_clients() -> None:
    """Its parameters and statistics differ between clients; everything else is the server's."""
    with engine(FedBN(), ragged(), batchnorm_net()) as e:
        e.play(2)
        layout, models = e.training.work.task.layout, e.personal()
        for s in layout.parameters:
            own = models.theta[:, s.start : s.stop]
            assert bool((own == own[0]).all()) == ("_BatchNorm" not in s.layer), s.name
        assert not bool((models.stats == models.stats[0]).all(0).any())
        assert e.server.theta.shape == (123,)
        assert e.server.stats.shape == (0,)


@pytest.mark.parametrize("method", [FedPer(), FedRep(heads=2), LGFedAvg(shared=("*weight",))])
def test_a_newcomer_fits_its_private_layers_alone(method: FedPer) -> None:
    with engine(method, ragged(), "dnn") as e:
        e.play(1)
        algorithm, task = e.training.work.algorithm, e.training.work.task
        message = algorithm.newcomer(e.server, e.training.round_of(e.everyone))
        found = e.backend.run("adapt", e.everyone, 1, message, e.states()).values
        parts, start = method.split(task), task.init()
        assert parts is not None
        for k in e.everyone:
            model = Model(found.theta[k], found.stats[k])
            assert_same(parts.of_shared(model), e.server)
            assert bool((parts.of_private(model).theta != parts.of_private(start).theta).any())


# -- FedRep and FedBABU ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fedrep_recovers_a_planted_representation() -> None:
    """y = x B h_i with B [10, 2]: the sine of the largest angle between the learned and the true subspace
    falls to that of the noise (Theorem 1 of the paper: by a constant factor a round)."""
    generator = torch.Generator().manual_seed(3)
    B, _ = torch.linalg.qr(torch.randn(10, 2, generator=generator, dtype=torch.float64))
    heads = torch.randn(12, 2, generator=generator, dtype=torch.float64)
    federation = regressions((40,) * 12, heads @ B.T, torch.zeros(12, dtype=torch.float64))
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(10, 2, bias=False), nn.Linear(2, 1, bias=False))

    def angle(weight: torch.Tensor) -> float:
        Q, _ = torch.linalg.qr(weight.reshape(2, 10).T)
        return float(torch.linalg.svdvals(Q - B @ (B.T @ Q)).max())

    settings = FULL | {"chunk": 12}
    with engine(FedRep(solver=SGD(lr=0.2), heads=10), federation, network, **settings) as e:
        angles = [angle(e.server.theta)]
        for _ in range(3):
            e.play(20)
            angles.append(angle(e.server.theta))
    assert angles[0] > 0.9
    assert angles == sorted(angles, reverse=True)
    assert angles[-1] < 0.05, angles  # with deviations of 0.1 in y, and 480 rows


def test_fedrep_fits_the_head_before_the_body() -> None:
    """By hand on one batch: `heads` steps on the head, then one on the body under the new head."""
    network = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).double()
    with engine(FedRep(solver=SGD(lr=0.1), heads=2), WITHIN, network, **FULL) as e:
        layout = e.training.work.task.layout
        start = Layout.flatten(layout, network, torch.float64)
        layout.load(network, start)
        e.play(1)
        at = torch.from_numpy(WITHIN.train[1])
        x, y = WITHIN.x[at], WITHIN.y[at]
        for part in (network[1], network[1], network[0]):
            loss = (network(x)[:, 0] - y).square().mean()
            parameters = list(part.parameters())
            for parameter, slope in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.data -= 0.1 * slope
        torch.testing.assert_close(e.states().theta[1], layout.flatten(network, torch.float64).theta[8:],
                                   rtol=0, atol=1e-12)


def test_the_head_of_fedbabu_never_moves_in_training() -> None:
    with engine(FedBABU(finetune=3), ragged(), MODELS["batchnorm+dropout"]()) as e:
        head, body = e.states().theta.clone(), e.server.theta.clone()
        e.play(3)
        assert_same(e.states().theta, head)
        assert bool((e.server.theta != body).any())
        assert bool((e.personal().theta[:, -len(head[0]) :] != head).any())  # fine-tuning moves it


def test_without_fine_tuning_fedbabu_predicts_with_the_initial_head() -> None:
    with engine(FedBABU(finetune=0), ragged(), "dnn") as e:
        e.play(2)
        models = e.personal().theta
        assert_same(models, torch.cat([e.server.theta, e.states().theta[0]]).expand_as(models))


# -- priors on the shared layers ---------------------------------------------------------------------------


STRONG = 1e7  # so strong that the shared layers are those of the server, up to 1 / STRONG


@pytest.mark.parametrize("method", [
    Ditto(lam=STRONG, solver=Proximal(lr=0.2), shared=("weight",)),
    FedMAP(FixedVariance(1 / STRONG), Proximal(lr=0.2), weights="samples", shared=("weight",)),
], ids=["ditto", "fedmap"])
@pytest.mark.thorough
def test_private_layers_have_no_prior(method: Algorithm) -> None:
    """However strong the prior: the slopes are the server's, and each intercept the least squares of its
    client below them, b_i = mean(y - x w)."""
    with engine(method, WITHIN, linear(), **FULL) as e:
        e.play(60)
        models, w = e.personal().theta, e.server.mean.theta
        torch.testing.assert_close(models[:, :3], w.expand(4, 3), rtol=0, atol=1e-5)
        for k in range(4):
            at = torch.from_numpy(WITHIN.train[k])
            own = (WITHIN.y[at] - WITHIN.x[at] @ models[k, :3]).mean()
            torch.testing.assert_close(models[k, 3], own, rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", [
    pFedMe(lam=2.0, shared=("weight",)), pFedMe(lam=2.0, shared=("weight",), start="w"),
    pFedBreD(lam=2.0, strategy="identity", shared=("weight",)),
], ids=["pfedme", "pfedme from w", "pfedbred"])
def test_without_a_shared_layer_that_matters_clients_train_alone(method: Algorithm) -> None:
    """Inputs are zero, so that the shared slopes have no gradient, and the intercepts are trained as without
    a server: K steps of the same size on each batch."""
    federation = dataclasses.replace(WITHIN, x=torch.zeros_like(WITHIN.x))
    step = method.alpha if isinstance(method, pFedMe) else method.a  # type: ignore[attr-defined]
    with engine(method, federation, linear(), **FULL | {"local": {"steps": 2}}) as e, \
         engine(LocalTrain(SGD(lr=step)), federation, linear(), **FULL | {"local": {"steps": 10}}) as alone:
        e.play(3)
        alone.play(3)
        torch.testing.assert_close(e.personal().theta[:, 3], alone.personal().theta[:, 3], rtol=0, atol=1e-12)


def test_what_is_private_is_not_sent() -> None:
    with engine(pFedMe(shared="body"), ragged(), "dnn") as e:
        e.play(1)
        work = e.training.work
        head = 3 * 101
        assert e.server.mean.theta.numel() == work.task.dim - head
        assert work.algorithm.global_model(e.server) is None
        message = work.algorithm.broadcast(e.server, e.training.round_of(e.everyone))
        assert message.shared.mean.theta.numel() == work.task.dim - head


@pytest.mark.parametrize(("method", "lr"), [
    (pFedMe(finetune=2), pFedMe().alpha), (Ditto(finetune=2), 0.05), (FedProx(finetune=2), 0.05)])
def test_fine_tuning_takes_steps_on_all_rows(method: Algorithm, lr: float) -> None:
    """Two full gradient steps from what is predicted with otherwise."""
    plain = dataclasses.replace(method, finetune=0)  # type: ignore[call-arg]
    with engine(method, WITHIN, linear()) as e, engine(plain, WITHIN, linear()) as without:
        e.play(2)
        without.play(2)
        expected = without.personal().theta.clone()
        for k in range(4):
            at = torch.from_numpy(WITHIN.train[k])
            x = torch.cat([WITHIN.x[at], torch.ones(len(at), 1, dtype=torch.float64)], 1)
            for _ in range(2):
                expected[k] -= lr * 2 * x.T @ (x @ expected[k] - WITHIN.y[at]) / len(at)
        torch.testing.assert_close(e.personal().theta, expected, rtol=0, atol=1e-12)
        assert_same(e.server, without.server)


# -- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shared", "model", "message"), [
    (("haed",), "dnn", r"unknown layer in fedper\.shared 'haed': did you mean 'head'\? known are body"),
    (("body", "head"), "dnn", r"\['body', 'head'\] is every layer of the model: use shared = \"all\""),
    ((), "dnn", r"fedper\.shared is an empty list: name the layers"),
    ("body", "mclr", r'fedper\.shared = "body" leaves nothing to share: the model has only head\.weight, '
                     r"head\.bias; use a model with more layers, such as dnn, or list what to share"),
    ("head", "mclr", r'fedper\.shared = "head" is every layer of the model'),
])
def test_layers_that_cannot_be_shared_are_refused(shared: Any, model: str, message: str) -> None:
    with pytest.raises(UsageError, match=message), engine(FedPer(shared=shared), ragged(), model):
        pass


def test_functions_have_no_layers() -> None:
    with pytest.raises(UsageError, match=r'ditto\.shared: a function of a vector has no layers'), \
         engine(Ditto(shared="body"), quadratics(3), "quadratic"):
        pass


def test_a_prior_of_whole_models_cannot_be_one_of_layers() -> None:
    with pytest.raises(UsageError, match=r"fedmap\.shared: input_convex is a prior of whole models"):
        FedMAP(InputConvex(), SGD(lr=0.1), server_lr=0.5, shared="body")


def test_shared_is_a_word_or_a_list() -> None:
    with pytest.raises(UsageError, match=r'fedper\.shared must be "all" or "body" or "head"'):
        FedPer(shared="hed")  # type: ignore[arg-type]

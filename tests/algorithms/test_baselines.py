"""GlobalTrain and the dichotomous strategy, the baselines of one-stage FedProx, against closed forms.

Client i has the loss f_i(w) = mean_j (w - y_ij)' H_i (w - y_ij) / 2 over its rows j, whose gradient is
H_i (w - a_i) with a_i the mean of the y_ij. Everything is in float64. p_i is what client i counts in an
average.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from descant.algorithms import Dichotomous, FedAvg, GlobalTrain, LocalTrain
from descant.core.federation import Federation
from descant.core.splits import Table
from descant.core.task import Batch
from descant.core.tree import take
from descant.engine.batches import LocalWork, View, plan_chunk
from descant.engine.pool import Pool
from descant.priors.solve import SGD
from helpers import assert_same, batchnorm_net, engine, quadratics, ragged, unbalanced

SIZES = (9, 1, 4, 2, 6)
FEDERATION = unbalanced(quadratics(5, rows=12, noise=1.0), SIZES)
H = FEDERATION.truth["H"]  # [clients, d, d]
I = torch.eye(4, dtype=torch.float64)  # noqa: E741 (the identity)
WEIGHTS = {"samples": torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES),
           "uniform": torch.full((5,), 1 / 5, dtype=torch.float64)}
FULL: dict[str, Any] = {"batch": "full", "local": {"steps": 1}, "backend": "vectorised", "chunk": 5}
both_weights = pytest.mark.parametrize("weights", ["samples", "uniform"])


def means(start: int = 0, step: int = 1) -> Tensor:
    """The a_i of the rows start, start + step, ... of each client: its own optimum on them."""
    return torch.stack([FEDERATION.y[rows[start::step] if len(rows) > 1 else rows].mean(0)
                        for rows in FEDERATION.train])


def pooled(p: Tensor, a: Tensor, ridge: float = 0.0) -> Tensor:
    """argmin_w sum_i p_i f_i(w) + ridge/2 ||w||^2 = (sum_i p_i H_i + ridge)^-1 sum_i p_i H_i a_i."""
    return torch.linalg.solve(torch.einsum("i,ijk->jk", p, H) + ridge * I,
                              torch.einsum("i,ijk,ik->j", p, H, a))


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


# -- GlobalTrain ------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(("weights", "momentum", "ridge"), [
    ("uniform", 0.0, 0.0), ("samples", 0.5, 0.0), ("samples", 0.0, 0.3)])
def test_globaltrain_reaches_the_pooled_minimiser(weights: Any, momentum: float, ridge: float) -> None:
    """The eigenvalues h of sum_i p_i H_i lie in [0.2, 1], so that a step of 1 shrinks the error to 0.8 of it
    at most. With momentum m = 0.5, (1 + m - h)^2 < 4 m for all of them, and it shrinks by sqrt(m) = 0.71.
    0.8^110 = 2e-11."""
    method = GlobalTrain(lr=1.0 / (1 + ridge), momentum=momentum, weight_decay=ridge, weights=weights)
    expected = pooled(WEIGHTS[weights], means(), ridge)
    with engine(method, FEDERATION, "quadratic", **FULL) as e:
        reports = e.play(110)
        close(e.model.theta, expected)
        close(e.personal().theta, expected.expand(5, 4))
    assert {report.grad_steps for report in reports} == {5}


@pytest.mark.thorough
def test_fedavg_with_several_local_steps_ends_elsewhere() -> None:
    with engine(FedAvg(SGD(lr=0.8)), FEDERATION, "quadratic", **FULL | {"local": {"steps": 5}}) as e:
        e.play(40)
        assert (e.model.theta - pooled(WEIGHTS["samples"], means())).norm() > 0.05


def test_globaltrain_s_momentum_is_heavy_ball() -> None:
    """v <- m v + g + ridge w, w <- w - lr v, written out for three rounds."""
    lr, m, ridge, p, a = 0.4, 0.7, 0.1, WEIGHTS["samples"], means()
    w, v = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    with engine(GlobalTrain(lr, m, ridge), FEDERATION, "quadratic", **FULL) as e:
        for _ in range(3):
            v = m * v + torch.einsum("i,ijk,ik->j", p, H, w - a) + ridge * w
            w = w - lr * v
            e.play(1)
            close(e.model.theta, w, 1e-13)


@pytest.mark.parametrize("local", [{"epochs": 1}, {"epochs": 2}])
@pytest.mark.parametrize("batch", [2, 4, 100])
def test_whole_epochs_of_any_batches_are_the_exact_gradient(batch: int, local: dict[str, int]) -> None:
    """sum_b n_b g_b / sum_b n_b is the mean over all rows when the batches are all rows, however they are
    cut, because all gradients are taken at the same w."""
    federation = ragged()
    with engine(GlobalTrain(lr=0.5), federation, "mclr", batch=batch, local=local) as e:
        task, start = e.training.work.task, e.model
        rows = np.concatenate([federation.train[k] for k in range(5)])
        gradient = task.grad(start, Batch(federation.x[rows], federation.y[rows])).theta
        e.play(1)  # weights by samples: sum_i (n_i / N) g_i is the gradient on the union
        close(e.model.theta, start.theta - 0.5 * gradient, 1e-14)


def test_globaltrain_keeps_statistics_and_takes_one_gradient_a_batch() -> None:
    with engine(GlobalTrain(), ragged(), batchnorm_net(), local={"steps": 3}) as e:
        before = e.model.stats.clone()
        [report] = e.play(1)
        assert report.grad_steps == 5 * 3
        assert not torch.equal(e.model.stats, before)


# -- the dichotomous strategy -----------------------------------------------------------------------------


@pytest.mark.thorough
@both_weights
def test_dichotomous_trains_its_models_on_separate_halves(weights: Any) -> None:
    """theta_i comes to the mean of rows 0, 2, ... of client i. With one step on a full batch, w takes
    gradient steps on the pooled loss of rows 1, 3, ... (client 1 has one row, which serves both)."""
    with engine(Dichotomous(SGD(lr=1.0), weights=weights), FEDERATION, "quadratic", **FULL) as e:
        e.play(110)
        close(e.states().theta, means(0, 2))
        close(e.model.theta, pooled(WEIGHTS[weights], means(1, 2)))


@pytest.mark.thorough
def test_dichotomous_without_splitting_is_localtrain_and_fedavg() -> None:
    """Bit for bit, on the same batches."""
    settings: dict[str, Any] = {"batch": 3, "local": {"epochs": 2}, "cohort": 4}
    federation, solver = ragged(), SGD(lr=0.1, momentum=0.5, weight_decay=0.01)
    results = []
    for method in (Dichotomous(solver, split="none"), LocalTrain(solver), FedAvg(solver)):
        with engine(method, federation, batchnorm_net(), **settings) as e:
            e.play(4)
            results.append((e.states(), e.model))
    assert_same(results[0][0], results[1][0])
    assert_same(results[0][1], results[2][1])


def validated(choices: list[str], own: Tensor, shared: Tensor) -> Federation:
    """FEDERATION with one validation row per client that speaks for its own or for the shared model (or
    none), and one test row that speaks for the other."""
    pool = [k for k in range(len(FEDERATION.x)) if k not in set(FEDERATION.train.indices.tolist())]
    y, validation, test = FEDERATION.y.clone(), [], []
    for client, choice in enumerate(choices):
        mine = [k for k in pool if torch.equal(FEDERATION.x[k], H[client])][:2]
        y[mine[0]] = own[client] if choice == "own" else shared
        y[mine[1]] = shared if choice == "own" else own[client]
        validation.append(np.array(mine[:1] if choice != "none" else [], np.int64))
        test.append(np.array(mine[1:], np.int64))
    return dataclasses.replace(FEDERATION, y=y, validation=Table.of(validation), test=Table.of(test))


@pytest.mark.thorough
def test_dichotomous_chooses_on_validation_never_on_test() -> None:
    """Without validation rows a client takes the model of all."""
    choices = ["own", "own", "shared", "none", "shared"]
    own, shared = means(0, 2), pooled(WEIGHTS["samples"], means(1, 2))
    federation = validated(choices, own, shared)
    is_own = torch.tensor([choice == "own" for choice in choices])[:, None]
    for backend in ("loop", "vectorised"):
        with engine(Dichotomous(SGD(lr=1.0)), federation, "quadratic", **FULL | {"backend": backend}) as e:
            e.play(20)  # near enough to what the rows speak for
            expected = torch.where(is_own, e.states().theta, e.model.theta)
            assert torch.equal(e.personal().theta, expected)


def test_a_newcomer_of_the_dichotomous_strategy_trains_alone_and_chooses() -> None:
    """One step of size 1/2 on its first half from the initial model 0 is H (mean of rows 0, 2, ...) / 2;
    the other choice is the w of the one client that took part."""
    start = torch.einsum("ijk,ik->ij", H, means(0, 2)) / 2
    with engine(Dichotomous(SGD(lr=0.5)), FEDERATION, "quadratic", **FULL | {"cohort": 1}) as e:
        e.play(1)
        w = e.model.theta
    choices = ["own", "shared", "own", "shared", "own"]
    expected = torch.stack([start[k] if choice == "own" else w for k, choice in enumerate(choices)])
    with engine(Dichotomous(SGD(lr=0.5)), validated(choices, start, w), "quadratic", **FULL | {"cohort": 1}
                ) as e:
        e.play(1)
        facts = e.training.round_of(e.everyone)
        newcomer = e.training.work.algorithm.newcomer(e.server, facts)
        done, values, failed, *_ = e.backend.run("adapt", e.everyone, 1, newcomer, e.states())
        assert not failed
        assert len(done) == 5
        close(values.theta, expected)


def seen(batch: int | str, per_step: int, **work: int) -> list[list[list[int]]]:
    """[client][batch] the places in its training list of the rows that a client is given."""
    federation = ragged(SIZES)
    plan, tensors = plan_chunk(
        Pool.as_it_lies(federation), np.arange(5), seed=3, purpose="local", number=2, batch=batch,  # type: ignore[arg-type]
        work=LocalWork(**work), per_step=per_step, dtype=torch.float64, draws=False, splits=("train",),
        disjoint=True)
    found = []
    for client in range(5):
        view, own = View(plan, take(tensors, client)), federation.train[client].tolist()
        count = int(view.steps) * per_step
        given = []
        for k, rows in enumerate(torch.split(take(tensors, client).rows, list(plan.widths))):
            if k < count:
                length = int(take(tensors, client).lengths[k])
                given.append([own.index(row) for row in rows[:length].tolist()])
        found.append(given)
    return found


@pytest.mark.parametrize(("batch", "work"), [(2, {"epochs": 1}), (3, {"steps": 4}), ("full", {"steps": 2})])
def test_the_batches_of_a_step_share_no_rows(batch: int | str, work: dict[str, int]) -> None:
    for client, batches in enumerate(seen(batch, 2, **work)):
        if SIZES[client] == 1:
            assert {*map(tuple, batches)} == {(0,)}
            continue
        for k, places in enumerate(batches):
            assert places
            assert {place % 2 for place in places} == {k % 2}
        if "epochs" in work:  # the larger half once; of the other, as many batches
            largest = sorted(place for places in batches[::2] for place in places)
            assert largest == list(range(0, SIZES[client], 2))
        if batch == "full":
            assert batches == [list(range(0, SIZES[client], 2)), list(range(1, SIZES[client], 2))] * 2


def test_one_batch_a_step_is_drawn_as_ever() -> None:
    federation = ragged(SIZES)
    plans = [plan_chunk(Pool.of(federation, torch.float64), np.arange(5), seed=1, purpose="local", number=1,
                        batch=4, work=LocalWork(epochs=2), per_step=1, dtype=torch.float64, draws=False,
                        splits=("train",), disjoint=disjoint)[1] for disjoint in (False, True)]
    assert_same(plans[0], plans[1])

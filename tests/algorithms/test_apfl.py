"""APFL: its two ends, its gradients, and where the mixtures come to rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from descant.algorithms import APFL, FedAvg, LocalTrain
from descant.algorithms.apfl import Own
from descant.core.algorithm import Message
from descant.core.meter import metered
from descant.core.task import Batch
from descant.core.tree import take
from descant.core.vector import Model
from descant.engine.batches import View
from descant.errors import UsageError
from descant.priors.solve import SGD, Adam
from helpers import (
    assert_same,
    batchnorm_net,
    engine,
    finite_differences,
    make_work,
    quadratics,
    ragged,
    unbalanced,
)

FEDERATION = unbalanced(quadratics(5, rows=12), (9, 1, 4, 2, 6))
A = FEDERATION.truth["optima"]
FULL: dict[str, Any] = {"batch": "full", "backend": "vectorised", "chunk": 5}


@pytest.mark.parametrize("solver", [SGD(lr=0.3), SGD(lr=0.1, momentum=0.9, weight_decay=0.1), Adam(lr=0.1)])
@pytest.mark.parametrize("beta", [1.0, 1.5])
def test_with_alpha_zero_it_is_fedavg(solver: Any, beta: float) -> None:
    """Bit for bit: w does not know of v, and the mixture is w."""
    with engine(APFL(0.0, solver=solver, beta=beta), FEDERATION, "quadratic", **FULL) as e, \
         engine(FedAvg(solver, beta=beta), FEDERATION, "quadratic", **FULL) as plain:
        e.play(4)
        plain.play(4)
        assert_same(e.server, plain.server)
        assert_same(e.personal(), plain.personal())
        assert_same(e.states().v.theta, torch.zeros((5, 4), dtype=torch.float64))  # v has not moved


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_w_is_fedavg_s_for_any_alpha(alpha: float) -> None:
    """Also with BatchNorm, whose statistics are each model's own; in part of the cohort."""
    settings: dict[str, Any] = {"cohort": 3, "backend": "vectorised", "chunk": 2}
    with engine(APFL(alpha), ragged(), batchnorm_net(), **settings) as e, \
         engine(FedAvg(), ragged(), batchnorm_net(), **settings) as plain:
        e.play(3)
        plain.play(3)
        assert_same(e.server, plain.server, 1e-12)
        assert not torch.equal(e.personal().theta[0], e.server.theta) or alpha == 0


@pytest.mark.parametrize("solver", [SGD(lr=0.3), SGD(lr=0.1, momentum=0.9, weight_decay=0.1), Adam(lr=0.1)])
@pytest.mark.thorough
def test_with_alpha_one_it_is_local_training(solver: Any) -> None:
    """The mixture is v, and v sees no w."""
    with engine(APFL(1.0, solver=solver), FEDERATION, "quadratic", **FULL) as e, \
         engine(LocalTrain(solver), FEDERATION, "quadratic", **FULL) as alone:
        e.play(4)
        alone.play(4)
        assert_same(e.personal(), alone.personal(), 1e-15)
    with engine(APFL(1.0, solver=solver), ragged(), batchnorm_net()) as e, \
         engine(LocalTrain(solver), ragged(), batchnorm_net()) as alone:
        e.play(2)
        alone.play(2)
        # Adam makes rounding noise large where a gradient is zero: the bias before BatchNorm
        assert_same(e.personal(), alone.personal(), 1e-3 if isinstance(solver, Adam) else 1e-12)


@pytest.mark.thorough
def test_the_mixture_comes_to_the_client_s_own_optimum() -> None:
    """With one step a round, w_i of a step is the w of the round, and v rests where alpha grad f_i(m_i) = 0:
    m_i = a_i, v_i = (a_i - (1 - alpha) w) / alpha. A round shrinks m_i - a_i by I - lr alpha^2 H_i, the
    eigenvalues of H_i being at least 0.2: (1 - 1.6 * 0.64 * 0.2)^60 = 1e-6."""
    alpha = 0.8
    with engine(APFL(alpha, solver=SGD(lr=1.6)), FEDERATION, "quadratic", local={"steps": 1}, **FULL) as e:
        e.play(60)
        torch.testing.assert_close(e.personal().theta, A, rtol=0, atol=1e-5)
        v = (A - (1 - alpha) * e.server.theta) / alpha
        torch.testing.assert_close(e.states().v.theta, v, rtol=0, atol=1e-5)


def local(method: APFL, own: Own, w: Tensor, steps: int = 1) -> tuple[Model, Own, list[Batch], Any]:
    """The work of client 0 on minibatches of logistic losses: upload, state, and the batches it saw."""
    work = make_work(method, ragged(), "mclr", batch=3, local={"steps": steps})
    plan, tensors = work._plan("local", np.array([0]), 1)
    data, seen = View(plan, take(tensors, 0)), []
    data.scan(lambda carry, batch: seen.append(batch) or carry, ())
    with torch.no_grad(), metered(1) as meter:
        upload, state = method.local(work.task, Message(Model(w, own.v.stats)), own, data)
    assert meter.grad_steps == 2 * steps
    return upload, state, seen, work.task


def given(alpha: float) -> tuple[Own, Tensor]:
    d = make_work(APFL(), ragged(), "mclr").task.dim
    v = torch.linspace(-1, 1, d, dtype=torch.float64)
    w = torch.linspace(0.5, -0.2, d, dtype=torch.float64).cos()
    return Own(Model(v, v[:0]), torch.tensor(alpha, dtype=torch.float64)), w


def test_steps_are_gradients_of_the_loss_of_the_mixture() -> None:
    """In v and alpha, by finite differences of f(alpha v + (1 - alpha) w); in w, of f(w). Weight decay is in
    f."""
    own, w = given(0.4)
    lr, decay = 0.01, 0.3
    upload, state, [batch], task = local(APFL(adaptive=True, solver=SGD(lr, weight_decay=decay)), own, w)

    def f(theta: Tensor) -> Tensor:
        return task.loss(Model(theta, own.v.stats), batch) + decay / 2 * theta.square().sum()

    def mixed(v: Tensor, alpha: Tensor) -> Tensor:
        return f(alpha * v + (1 - alpha) * w)

    v, alpha = own.v.theta, own.alpha
    in_alpha = finite_differences(lambda a: mixed(v, a[0]), alpha[None], 1e-5)[0]
    in_v = finite_differences(lambda each: mixed(each, alpha), v, 1e-5)
    torch.testing.assert_close(state.alpha, alpha - lr * in_alpha, rtol=0, atol=1e-10)
    torch.testing.assert_close(state.v.theta, v - lr * in_v, rtol=0, atol=1e-10)
    torch.testing.assert_close(upload.theta, w - lr * finite_differences(f, w, 1e-5), rtol=0, atol=1e-10)
    assert (state.alpha - alpha).abs() > 1e-3


def test_alpha_learns_once_a_round_and_stays_a_share() -> None:
    own, w = given(0.4)
    method = APFL(adaptive=True, solver=SGD(0.01))
    once, twice = local(method, own, w, 1)[1].alpha, local(method, own, w, 2)[1].alpha
    assert torch.equal(once, twice)
    assert 0 < once < 1
    assert once != own.alpha
    ends = {float(local(APFL(adaptive=True, solver=SGD(100.0)), start, w)[1].alpha)
            for start in (own, Own(own.v._replace(theta=2 * w - own.v.theta), own.alpha))}
    assert ends == {0.0, 1.0}
    assert float(local(APFL(0.4), own, w, 2)[1].alpha) == 0.4


def test_newcomers_mix_after_the_work_of_one_round() -> None:
    """v_i = w to begin with. A step of size lr alpha at w, of which alpha counts: w - lr alpha^2 grad f_i."""
    method = APFL(0.5, solver=SGD(lr=0.4))
    with engine(method, FEDERATION, "quadratic", local={"steps": 1}, **FULL) as e:
        e.play(3)
        facts = e.training.round_of(e.everyone)
        new = e.backend.run("adapt", e.everyone, 3, method.newcomer(e.server, facts), e.states()).values
        w = e.server.theta
        slope = torch.einsum("ijk,ik->ij", FEDERATION.truth["H"], w - A)
        torch.testing.assert_close(new.theta, w - 0.4 * 0.25 * slope, rtol=0, atol=1e-13)


def test_bad_values_and_cautions() -> None:
    with pytest.raises(UsageError, match=r"apfl\.alpha"):
        APFL(alpha=1.1)
    [caution] = APFL(alpha=0.0, adaptive=True).cautions()
    assert "alpha = 0" in caution
    assert APFL(alpha=0.0).cautions() == APFL(adaptive=True).cautions() == []

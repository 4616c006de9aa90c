"""Per-FedAvg: its meta-gradient, its fixed points, and what clients adapt on.

f_i(w) = (w - a_i)' H_i (w - a_i) / 2 with exact gradients. One step of size alpha takes w to u_i with
u_i - a_i = (I - alpha H_i) (w - a_i).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from descant.algorithms import FedAvg, PerFedAvg
from descant.core.algorithm import Message
from descant.core.meter import metered
from descant.core.task import Batch
from descant.core.tree import take
from descant.core.vector import Model
from descant.engine.batches import View
from descant.errors import UsageError
from descant.priors.solve import SGD
from helpers import assert_same, engine, finite_differences, make_work, quadratics, ragged, unbalanced

SIZES = (9, 1, 4, 2, 6)
FEDERATION = unbalanced(quadratics(5, rows=12), SIZES)
H, A = FEDERATION.truth["H"], FEDERATION.truth["optima"]
I = torch.eye(4, dtype=torch.float64)  # noqa: E741 (the identity)
WEIGHTS = {"samples": torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES),
           "uniform": torch.full((5,), 1 / 5, dtype=torch.float64)}
W0 = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
FULL: dict[str, Any] = {"batch": "full", "backend": "vectorised", "chunk": 5}


def balance(p: Tensor, m: Tensor) -> Tensor:
    """The w with sum_i p_i M_i (w - a_i) = 0."""
    return torch.linalg.solve(torch.einsum("i,ijk->jk", p, m), torch.einsum("i,ijk,ik->j", p, m, A))


def one_round(method: PerFedAvg, start: Tensor, **train: Any) -> Tensor:
    with engine(method, FEDERATION, "quadratic", **FULL | {"local": {"steps": 1}} | train) as e:
        e.training.server = Model(start, e.server.stats)
        e.play()
        theta: Tensor = e.server.theta
        return theta


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_a_round_is_a_gradient_step_on_the_meta_objective(weights: Any) -> None:
    """With one local step, hf takes w to w - beta grad F(w), F(w) = sum_i p_i f_i(w - alpha grad f_i(w)): the
    differences of the gradients of a quadratic are exact. fo leaves out (I - alpha H_i)."""
    alpha, beta, p = 0.6, 0.3, WEIGHTS[weights]

    def F(w: Tensor) -> Tensor:
        u = w - alpha * torch.einsum("ijk,ik->ij", H, w - A)
        return p @ torch.einsum("ij,ijk,ik->i", u - A, H, u - A) / 2

    meta = finite_differences(F, W0, 1e-4)
    found = one_round(PerFedAvg("hf", alpha, beta, delta=0.1, weights=weights), W0)
    torch.testing.assert_close(found, W0 - beta * meta, rtol=0, atol=1e-9)
    u = W0 - alpha * torch.einsum("ijk,ik->ij", H, W0 - A)
    first = torch.einsum("i,ijk,ik->j", p, H, u - A)
    found = one_round(PerFedAvg("fo", alpha, beta, weights=weights), W0)
    torch.testing.assert_close(found, W0 - beta * first, rtol=0, atol=1e-12)
    assert (first - meta).norm() > 0.1


@pytest.mark.parametrize("variant", ["fo", "hf"])
@pytest.mark.thorough
def test_fixed_points_with_several_local_steps(variant: Any) -> None:
    """A step takes w_i - a_i to (I - beta M_i) (w_i - a_i), with M_i = H_i (I - alpha H_i) for fo and
    (I - alpha H_i) H_i (I - alpha H_i) for hf. E steps and the average rest where
    sum_i p_i (I - (I - beta M_i)^E) (w - a_i) = 0. The client predicts `finetune` steps of size alpha on."""
    alpha, beta, steps = 0.5, 0.9, 3
    m = H @ (I - alpha * H) if variant == "fo" else (I - alpha * H) @ H @ (I - alpha * H)
    w = balance(WEIGHTS["uniform"], I - torch.linalg.matrix_power(I - beta * m, steps))
    personal = A + torch.einsum("ijk,ik->ij", torch.linalg.matrix_power(I - alpha * H, 2), w - A)
    method = PerFedAvg(variant, alpha, beta, finetune=2)
    with engine(method, FEDERATION, "quadratic", local={"steps": steps}, **FULL) as e:
        e.play(60)
        torch.testing.assert_close(e.server.theta, w, rtol=0, atol=1e-7)
        torch.testing.assert_close(e.personal().theta, personal, rtol=0, atol=1e-7)
        facts = e.training.round_of(e.everyone)
        sent = method.newcomer(e.server, facts)
        new = e.backend.run("adapt", e.everyone, e.training.number, sent, e.states())
        assert_same(new.values, e.personal())  # newcomers adapt in the same way
    plain = balance(WEIGHTS["uniform"], I - torch.linalg.matrix_power(I - beta * H, steps))
    assert (w - plain).norm() > 1e-2  # not FedAvg's


def test_differences_come_to_the_hessian_with_the_square_of_delta() -> None:
    """The error of h is of the order delta^2: a third of delta leaves a ninth of it. Logistic losses; the
    exact product is `Task.hessian`."""
    work = make_work(PerFedAvg(), ragged(), "mclr")
    task, fed = work.task, work.federation
    batch = Batch(fed.x[fed.train[0]], fed.y[fed.train[0]])
    w = Model(torch.linspace(-1, 1, task.dim, dtype=torch.float64), task.init().stats)
    g = torch.linspace(0.5, -1, task.dim, dtype=torch.float64)
    exact = task.hessian(w, batch, g)
    errors = []
    for delta in (0.09, 0.03, 0.01):
        difference = PerFedAvg(delta=delta, weight_decay=0.2)._difference(task, w, batch, g) / (2 * delta)
        errors.append((difference - exact - 0.2 * g).norm())  # the ridge is part of f
    assert errors[0] / errors[1] == pytest.approx(9, rel=0.05)
    assert errors[1] / errors[2] == pytest.approx(9, rel=0.05)
    assert errors[2] < 1e-3 * exact.norm()


@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_every_part_of_a_step_has_a_batch_of_its_own(variant: Any) -> None:
    """By hand, from the batches that the client is given."""
    alpha, beta, delta = 0.3, 0.2, 0.01
    method = PerFedAvg(variant, alpha, beta, delta)
    work = make_work(method, ragged(), "mclr", batch=3, local={"steps": 1})
    task, start = work.task, work.task.init()
    plan, tensors = work._plan("local", np.array([0]), 1)
    data, seen = View(plan, take(tensors, 0)), []
    data.scan(lambda carry, *batches: seen.extend(batches) or carry, ())
    assert len(seen) == (2 if variant == "fo" else 3)
    assert len({tuple(batch.x.flatten().tolist()) for batch in seen}) == len(seen)

    def grad(theta: Tensor, batch: Batch) -> Tensor:
        return task.grad(Model(theta, start.stats), batch).theta

    w = start.theta
    g = grad(w - alpha * grad(w, seen[0]), seen[1])
    if variant == "hf":
        h = (grad(w + delta * g, seen[2]) - grad(w - delta * g, seen[2])) / (2 * delta)
        g = g - alpha * h
    with torch.no_grad(), metered(1) as meter:
        found, _ = method.local(task, Message(start), (), data)
    torch.testing.assert_close(found.theta, w - beta * g, rtol=0, atol=1e-12)
    assert meter.grad_steps == (2 if variant == "fo" else 4)


@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_without_adaptation_it_is_fedavg(variant: Any) -> None:
    """alpha -> 0: u = w, and the Hessian does not count."""
    method = PerFedAvg(variant, alpha=1e-300, beta=0.3, server_lr=1.5, weights="samples")
    with engine(method, FEDERATION, "quadratic", **FULL) as e, \
         engine(FedAvg(SGD(lr=0.3), beta=1.5), FEDERATION, "quadratic", **FULL) as plain:
        e.play(5)
        plain.play(5)
        assert_same(e.server, plain.server, 1e-14)


def test_clients_adapt_on_training_rows_alone() -> None:
    """Other test rows change no personal model; other training rows do."""
    fed = ragged()
    others = {}
    for split in ("test", "train"):
        rows = torch.from_numpy(getattr(fed, split).indices)
        x = fed.x.clone()
        x[rows] += 1.0
        others[split] = dataclasses.replace(fed, x=x)
    with engine(PerFedAvg(), fed, "mclr") as e:
        e.play(2)
        before = e.personal()
        assert (before.theta - e.server.theta).norm() > 1e-3
        for split, changed in others.items():
            with engine(PerFedAvg(), changed, "mclr") as other:
                other.training.server, other.training.number = e.server, e.training.number
                after = other.personal().theta
                assert torch.equal(after, before.theta) == (split == "test")


def test_bad_values_and_cautions() -> None:
    with pytest.raises(UsageError, match=r"perfedavg\.variant"):
        PerFedAvg(variant="so")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"perfedavg\.delta"):
        PerFedAvg(delta=0.0)
    [caution] = PerFedAvg(delta=1e-7).cautions()
    assert "delta = 1e-07" in caution
    assert PerFedAvg("fo", delta=1e-7).cautions() == PerFedAvg().cautions() == []
    assert PerFedAvg(alpha=0.1).local_step().field == "alpha"
    assert PerFedAvg(beta=0.1).local_step().field == "beta"

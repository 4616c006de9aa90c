"""FedPAC: the quadratic program, alignment, statistics of features, and the alternation of head and body."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

from descant.algorithms import FedPAC
from descant.algorithms.fedpac import body_size, combination
from descant.core.task import Batch, Pull
from descant.core.tree import repeat, take
from descant.core.vector import Model
from descant.errors import UsageError
from descant.models import DNN, make_task
from descant.models.module import ModuleTask
from descant.priors.solve import SGD, descend
from helpers import (
    CLASSES,
    MODELS,
    SIZES,
    assert_same,
    batchnorm_net,
    engine,
    finite_differences,
    make_work,
    quadratics,
    ragged,
)

FEDERATION = ragged()
FULL: dict[str, Any] = {"batch": "full", "backend": "vectorised", "chunk": 5}


def task_of(model: Any) -> Any:
    return make_task(model, FEDERATION, dtype=torch.float64, seed=0)


def batch_of(client: int) -> Batch:
    rows = FEDERATION.train[client]
    return Batch(FEDERATION.x[rows], FEDERATION.y[rows])


def random_pull(k: int, seed: int = 0) -> Pull:
    generator = torch.Generator().manual_seed(seed)
    return Pull(torch.randn((CLASSES, k), generator=generator, dtype=torch.float64),
                torch.tensor([0.3, 0.0, 1.2], dtype=torch.float64))


class Written(nn.Module):
    """A network that is no chain for descant; `times` calls of its last layer."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.times = nn.Linear(16, 4), nn.Linear(4, CLASSES), times

    def forward(self, x: Tensor) -> Tensor:
        features = torch.tanh(self.body(x.flatten(1)))
        return sum((self.head(features) for _ in range(self.times)), torch.zeros(()))  # type: ignore[return-value]


# -- the quadratic program ---------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_heads_are_combined_as_the_quadratic_program_says(seed: int) -> None:
    """Against SLSQP; and the conditions of Karush, Kuhn and Tucker: (P a)_j = a'Pa where a_j > 0, above where
    it is 0."""
    rng = np.random.default_rng(seed)
    h, v, i = rng.standard_normal((9, 6)), rng.uniform(0.1, 2.0, 9), 3
    P = np.diag(v) + (h[i] - h) @ (h[i] - h).T
    a = combination(torch.from_numpy(h @ h.T), torch.from_numpy(v), i).numpy()

    def objective(a: np.ndarray) -> float:
        return float((a**2 * v).sum() + ((h[i] - a @ h) ** 2).sum())

    assert objective(a) == pytest.approx(a @ P @ a, rel=1e-9)
    found = minimize(lambda a: a @ P @ a, np.full(9, 1 / 9), jac=lambda a: 2 * P @ a, bounds=[(0, 1)] * 9,
                     constraints={"type": "eq", "fun": lambda a: a.sum() - 1}, tol=1e-14)
    np.testing.assert_allclose(a, found.x, rtol=0, atol=1e-5)
    assert a.sum() == pytest.approx(1)
    assert (a >= 0).all()
    slopes = P @ a - a @ P @ a
    np.testing.assert_allclose(slopes[a > 0], 0, rtol=0, atol=1e-8)
    assert (slopes > -1e-8).all()


def test_ends_of_the_quadratic_program() -> None:
    """Equal h: a_j is as 1 / v_j. h far apart: each has its own head. No variance at all: alike for
    all."""
    v = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    same = torch.ones((3, 3), dtype=torch.float64)
    torch.testing.assert_close(combination(same, v, 1), torch.tensor([4.0, 2.0, 1.0]).double() / 7)
    far = 1e9 * torch.eye(3, dtype=torch.float64)
    own = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(combination(far, v, 1), own, rtol=0, atol=1e-8)
    torch.testing.assert_close(combination(0 * same, 0 * v, 0), torch.full((3,), 1 / 3).double())
    torch.testing.assert_close(combination(same[:1, :1], v[:1], 0), torch.ones(1).double())


# -- features and the pull on them ---------------------------------------------------------------------


def test_features_are_what_the_head_is_given() -> None:
    x = FEDERATION.x[:7]
    for model in (DNN(hidden=5), batchnorm_net(), Written()):
        task = task_of(model)
        at = task.init()
        module = task.module(at)
        head = module.head if hasattr(module, "head") else module[-1]
        features = task.features(at, x)
        assert features.shape == (7, task.feature_width)
        torch.testing.assert_close(head(features), task.predict(at, x))


@pytest.mark.parametrize("model", [DNN(hidden=3), Written()])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_the_pull_against_finite_differences(model: Any, padded: bool, counted: bool) -> None:
    """By hand for chains, by autograd for others; padding does not count, nor does the pull in the loss that
    is told, and rows that count unequally are pulled unequally."""
    task = task_of(model)
    at, batch, pull = task.init(), batch_of(0), random_pull(task.feature_width)
    assert (task.chunk_gradients is None) == isinstance(model, Written)
    real = torch.arange(9) < 6
    if padded:
        batch = batch._replace(weight=real)
    counts = torch.linspace(0.5, 2.0, 9).double() if counted else torch.ones(9).double()
    if counted:
        batch = batch._replace(counts=counts)

    def objective(theta: Tensor) -> Tensor:
        now = Model(theta, at.stats)
        rows = counts * (task.losses(now, batch)[0] + pull.rows(task.features(now, batch.x), batch.y))
        return rows[real].mean() if padded else rows.mean()

    found = task.grad(at, batch, pull)
    torch.testing.assert_close(found.theta, finite_differences(objective, at.theta), rtol=0, atol=1e-7)
    torch.testing.assert_close(found.loss, task.loss(at, batch))
    assert not torch.allclose(found.theta, task.grad(at, batch).theta)


def test_the_head_is_the_last_layer_with_parameters() -> None:
    for model in (DNN(hidden=5), batchnorm_net(), Written()):
        layout = task_of(model).layout
        names = [s.name for s in layout.parameters if layout.head()[s.start]]
        assert [name.rpartition(".")[2] for name in names] == ["weight", "bias"]
        assert names == [s.name for s in layout.parameters if s.owner == layout.last_layer]
    assert task_of("mclr").layout.head().all()


# -- rounds ---------------------------------------------------------------------


def test_alone_and_without_alignment_head_and_body_take_turns() -> None:
    """lam = 0 and one client, whose combined head is its own: FedRep's alternation, two steps on the head and
    three on the body of five."""
    federation = ragged((9,))
    method = FedPAC(lam=0.0, head=0.4, eta_g=0.2, eta_f=0.1)
    with engine(method, federation, DNN(hidden=5), batch="full", local={"steps": 5}) as e:
        task, batch = e.training.work.task, Batch(federation.x[federation.train[0]],
                                                  federation.y[federation.train[0]])
        model, head = task.init(), task.layout.head()
        for _ in range(2):
            for k in range(5):
                trained, lr = (head, 0.2) if k < 2 else (~head, 0.1)
                moved, _ = descend(task, model, batch, SGD(lr=lr))
                model = Model(torch.where(trained, moved.theta, model.theta), model.stats)
            e.play()
        torch.testing.assert_close(e.personal().theta[0], model.theta)
        torch.testing.assert_close(e.model.theta, model.theta)


def test_what_a_client_tells_of_its_features() -> None:
    """h = p(y) E[g | y] and v = (1/n) sum_y (p E[||g||^2 | y] - p^2 ||E[g | y]||^2), with the model that was
    sent, class by class. The centroids are means over the rows of all clients, each by its trained model."""
    with engine(FedPAC(), FEDERATION, DNN(hidden=5), **FULL) as e:
        task, before = e.training.work.task, e.model
        e.play()
        sums, counts = torch.zeros((CLASSES, 5)).double(), torch.zeros(CLASSES).double()
        for i in range(5):
            batch, v = batch_of(i), 0.0
            g = task.features(before, batch.x)
            h = torch.zeros((CLASSES, 5)).double()
            for y in batch.y.unique().tolist():
                rows = g[batch.y == y]
                p = len(rows) / len(g)
                h[y] = p * rows.mean(0)
                v += p * float(rows.square().sum(1).mean()) - p**2 * float(rows.mean(0).square().sum())
            torch.testing.assert_close(e.server.facts.h[i], h)
            assert float(e.server.facts.v[i]) == pytest.approx(v / len(g), abs=1e-12)
            trained = Model(e.states().theta[i], e.states().stats[i])
            sums.index_add_(0, batch.y, task.features(trained, batch.x))
            counts += torch.bincount(batch.y, minlength=CLASSES)
        torch.testing.assert_close(e.server.common.c, sums / counts[:, None])
        assert torch.equal(e.server.facts.head, e.states().theta[:, body_size(task):])
        facts = e.server.facts
        gram = facts.h.flatten(1) @ facts.h.flatten(1).T
        sent = e.training.work.algorithm.broadcast(e.server, e.training.round_of(e.everyone))
        expected = torch.stack([combination(gram, facts.v, i) @ facts.head for i in range(5)])
        torch.testing.assert_close(sent.each, expected)


def test_who_never_took_part_and_classes_that_nobody_has() -> None:
    with engine(FedPAC(), FEDERATION, DNN(hidden=5), **FULL | {"cohort": 2}) as e:
        e.play()
        joined = torch.from_numpy(e.training.store.took_part(e.everyone))
        assert torch.equal(e.server.facts.joined == 1, joined)
        sent = e.training.work.algorithm.broadcast(e.server, e.training.round_of(e.everyone))
        mean = e.model.theta[body_size(e.training.work.task):]
        assert torch.equal(sent.each[~joined], mean.expand(3, -1))
        y = torch.cat([batch_of(int(i)).y for i in joined.nonzero()])
        there = torch.bincount(y, minlength=CLASSES) > 0
        assert torch.equal(e.server.common.known == 1, there)
        server, cohort = e.server, e.training.round_of(e.everyone).of(joined.nonzero().flatten())
        old = server._replace(common=server.common._replace(c=torch.full((CLASSES, 5), 7.0).double()))
        message = e.training.work.algorithm.broadcast(server, cohort)
        done = e.backend.run("local", cohort.cohort.numpy(), 1, message, e.training.store.read(
            cohort.cohort.numpy())).values.upload
        none = done._replace(sums=done.sums.index_fill(1, torch.tensor([1]), 0.0),
                             counts=done.counts.index_fill(1, torch.tensor([1]), 0.0))
        new, _ = e.training.work.algorithm.aggregate(old, none, cohort)
        assert (new.common.c[1] == 7).all()
        assert not (new.common.c[0] == 7).any()


@pytest.mark.thorough
def test_alignment_brings_features_to_their_centroids() -> None:
    def spread(lam: float) -> float:
        method = FedPAC(lam=lam, eta_g=0.05, eta_f=0.05)
        with engine(method, FEDERATION, DNN(hidden=5), local={"steps": 5}, **FULL) as e:
            e.play(6)
            task, total = e.training.work.task, 0.0
            for i in range(5):
                batch = batch_of(i)
                pull = Pull(e.server.common.c, torch.ones(CLASSES).double())
                personal = Model(e.states().theta[i], e.states().stats[i])
                total += float(pull.rows(task.features(personal, batch.x), batch.y).mean())
            return total

    assert spread(5.0) < 0.5 * spread(0.0)


class Ridge(ModuleTask):
    """With ||theta||^2 times `ridge` / 2 in the loss of every row."""

    ridge = 0.3

    def losses(self, model: Model, batch: Batch, *, train: bool = False) -> tuple[Tensor, Tensor]:
        losses, stats = super().losses(model, batch, train=train)
        return losses + self.ridge / 2 * model.theta.square().sum(), stats


def test_weight_decay_is_a_ridge_in_the_loss() -> None:
    plain, ridge = (kind(Written(), "cross_entropy", classes=CLASSES, dtype=torch.float64)
                    for kind in (ModuleTask, Ridge))
    with engine(FedPAC(weight_decay=0.3), FEDERATION, plain) as e, \
         engine(FedPAC(), FEDERATION, ridge) as other, engine(FedPAC(), FEDERATION, plain) as without:
        for each in (e, other, without):
            each.play(2)
        torch.testing.assert_close(e.states().theta, other.states().theta)
        assert (e.states().theta - without.states().theta).abs().max() > 1e-3


# -- what it refuses ---------------------------------------------------------------------


def test_models_without_features_are_refused() -> None:
    with pytest.raises(UsageError, match="function of a vector"), \
         engine(FedPAC(), quadratics(3), "quadratic"):
        pass
    with pytest.raises(UsageError, match="fedpac is for classification"), \
         engine(FedPAC(), ragged(classes=None), "mclr"):
        pass
    convolution = nn.Sequential(nn.Conv2d(1, CLASSES, 4), nn.Flatten())
    with pytest.raises(UsageError, match="'0', a Conv2d: it must be an nn"), \
         engine(FedPAC(), FEDERATION, convolution):
        pass
    spatial = nn.Sequential(nn.Flatten(2), nn.Linear(16, CLASSES), nn.Flatten())
    for model, message in ((Written(2), "is called 2 times"), (spatial, r"shape .1, 16. for a sample")):
        task = task_of(model)
        with pytest.raises(UsageError, match=message):
            task.features(task.init(), FEDERATION.x[:2])


@pytest.mark.parametrize("model", ["mclr", "dnn", "batchnorm+dropout"])
def test_phases_at_once_are_those_of_each(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of different sizes, so that some train their body while others are still at their head: as by
    autograd; and a client's place in the chunk changes no bit."""
    method = FedPAC(head=0.4, weight_decay=0.1)
    work = make_work(method, FEDERATION, MODELS[model](), local={"epochs": 2})
    clients = np.arange(len(SIZES))
    server = method.init_server(work.task, work.task.init(), work.round_of(clients, 0))
    k = server.common.c.shape[1]
    pull = random_pull(k)
    server = server._replace(common=server.common._replace(c=pull.centres, known=torch.ones_like(
        server.common.known)))

    def executed(clients: np.ndarray) -> Any:
        message = method.broadcast(server, work.round_of(clients, 1))
        outcome = work.execute("local", clients, 1, message, repeat(work.task.init(), len(clients)))
        assert outcome.note is None
        return outcome

    found, turned = executed(clients), executed(clients[::-1].copy())
    assert_same(take(turned.values, torch.arange(len(SIZES) - 1, -1, -1)).state, found.values.state)
    none = property(lambda self: None, lambda self, value: None)
    monkeypatch.setattr(ModuleTask, "chunk_gradients", none, raising=False)
    plain = executed(clients)
    assert found.grad_steps == plain.grad_steps
    assert_same(found.values, plain.values, 1e-9)


def test_who_took_part_predicts_without_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are combined for training alone."""
    with engine(FedPAC(), FEDERATION, "mclr", backend="vectorised") as e:
        e.play()
        monkeypatch.setattr(FedPAC, "broadcast", None)
        assert torch.equal(e.personal().theta, e.states().theta)

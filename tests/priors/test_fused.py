"""Steps for all clients of a chunk at once, in place, against the plain steps of each by autograd."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from descant.algorithms import ALGORITHMS
from descant.core.algorithm import Algorithm, ClientData, Message, Round
from descant.core.kernels import span
from descant.core.task import Task
from descant.core.tree import Tree, take
from descant.core.vector import Model
from descant.engine.outcome import Outcome
from descant.models.module import ModuleTask
from descant.priors import fused
from descant.priors.prior import Prior
from descant.priors.quadratic import Flat, Gaussian, Quadratic
from descant.priors.solve import SGD, Adam, AdamW, Proximal, Solver, inner_solve, solve
from helpers import MODELS, SIZES, assert_same, engine, make_work, on_any_model, ragged

CLIENTS = np.arange(len(SIZES))
SOLVERS: dict[str, Solver] = {
    "sgd": SGD(lr=0.1), "decay": SGD(lr=0.1, weight_decay=0.3), "momentum": SGD(lr=0.05, momentum=0.9),
    "momentum, decay": SGD(lr=0.05, momentum=0.9, weight_decay=0.3), "adam": Adam(lr=0.02),
    "adam, decay": Adam(lr=0.02, weight_decay=0.3), "adamw": AdamW(lr=0.02, weight_decay=0.3),
    "proximal": Proximal(lr=0.1),
    "proximal, decay": Proximal(lr=0.1, weight_decay=0.3),
}
LOSSES = {"cross_entropy": 3, "binary_cross_entropy": 2, "mse": None}


@dataclasses.dataclass(frozen=True)
class Solves(Algorithm):
    """One call of a solver under a prior that is sent to all (`shared`) or to each."""

    name: ClassVar[str] = "solves"
    citation: ClassVar[str] = "none"
    solver: Solver = SGD(lr=0.1)  # noqa: RUF009 - a value
    prior: str = "flat"
    scale: float | None = None
    inner: bool = False  # some steps on each batch, one client of the chunk after the other having ended

    def init_server(self, task: Task, model: Model, round: Round) -> Model:
        return model

    def init_client(self, task: Task, model: Model) -> Tree:
        return ()

    def broadcast(self, server: Model, round: Round) -> Message:
        return Message(server, (round.cohort.to(server.theta.dtype) + 1) / 2)

    def local(self, task: Task, message: Message, state: Tree, data: ClientData) -> tuple[Model, Tree]:
        w, own = message
        scale: Any = 1.0 if self.scale is None else self.scale * own
        prior = self._prior(w.theta, own)
        if not self.inner:
            return solve(task, w, data, self.solver, prior, scale), ()
        return data.scan(lambda model, batch: inner_solve(task, model, batch, self.solver, prior, 3), w), ()

    def _prior(self, theta: Tensor, own: Tensor) -> Prior:
        grows = torch.linspace(0.1, 1.0, len(theta), dtype=theta.dtype)
        made: dict[str, Prior] = {
            "flat": Flat(), "number": Gaussian(theta - 0.3, 0.7), "own number": Gaussian(theta - 0.3, own),
            "vector": Gaussian(0.5 * theta * own, grows), "own vector": Gaussian(theta + own, grows * own),
            "slope": Quadratic(grows * own), "pulled": Quadratic(grows, 0.5),
            "own pull": Quadratic(grows * own, own),
        }
        return made[self.prior]

    def aggregate(self, server: Model, uploads: Model, round: Round) -> tuple[Model, dict[str, Any]]:
        return server, {}

    def personalize(self, task: Task, message: Message, state: Tree, data: ClientData) -> Model:
        return message.shared

    def adapt(self, task: Task, message: Message, data: ClientData) -> Model:
        return message.shared


PRIORS = ("flat", "number", "own number", "vector", "own vector", "slope", "pulled", "own pull")


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a function with gradients by autograd and steps of one client."""
    def run(f: Any) -> Any:
        with monkeypatch.context() as patch:
            none = property(lambda self: None, lambda self, value: None)
            patch.setattr(ModuleTask, "chunk_gradients", none, raising=False)
            return f()

    return run


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the steps that are made at once."""
    steps: list[int] = []
    step = fused.Descent.step

    def counted(self: fused.Descent, clients: int, batch: Any) -> None:
        steps.append(clients)
        step(self, clients, batch)

    monkeypatch.setattr(fused.Descent, "step", counted)
    return steps


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Steps on one batch are made in its span wherever they can be; lists these spans."""
    made: list[Any] = []
    monkeypatch.setattr(span, "_pays", lambda *shape: True)
    form = span.Span.form
    monkeypatch.setattr(span.Span, "form", lambda self, *given: (made.append(self), form(self, *given)))
    return made


def executed(method: Solves, model: Any = "mclr", loss: str = "cross_entropy", clients: np.ndarray = CLIENTS,
             **train: Any) -> Outcome:
    federation = ragged(classes=LOSSES[loss])
    work = make_work(method, federation, model, loss=loss, **{"local": {"epochs": 2}} | train)
    message = method.broadcast(work.task.init(), work.round_of(clients, 1))
    outcome = work.execute("local", clients, 1, message, ())
    assert outcome.note is None
    return outcome


def agree(found: Outcome, expected: Outcome, tolerance: float = 1e-10) -> None:
    assert found.grad_steps == expected.grad_steps
    assert_same(found.values, expected.values, tolerance)


# every solver meets every prior, and both meet one step on a batch and several; the span of a batch, below,
# has several steps of most solvers under all priors
@pytest.mark.parametrize(("solver", "prior", "inner"), [
    (solver, prior, (j + k) % 2 == 1) for j, solver in enumerate(SOLVERS) for k, prior in enumerate(PRIORS)])
def test_steps_at_once_are_those_of_each(solver: str, prior: str, inner: bool, plain: Any, used: list[int]
                                         ) -> None:
    method = Solves(SOLVERS[solver], prior, inner=inner)
    found, made = executed(method), len(used)
    assert made
    agree(found, plain(lambda: executed(method)))
    assert len(used) == made, "the plain steps were none"


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("solver", ["sgd", "decay", "momentum, decay", "proximal, decay", "adam"])
def test_steps_in_the_span_of_a_batch(solver: str, prior: str, plain: Any, spans: list[Any]) -> None:
    """What is not alike for every number of a parameter cannot be made there: Adam, a precision for each."""
    method = Solves(SOLVERS[solver], prior, inner=True)
    found = executed(method)
    assert bool(spans) == (solver != "adam" and "vector" not in prior)
    agree(found, plain(lambda: executed(method)))


@pytest.mark.parametrize("model", [
    "dnn", nn.Sequential(nn.Flatten(), nn.Tanh(), nn.Linear(16, 5, bias=False), nn.BatchNorm1d(5),
                         nn.Dropout(0.3), nn.Linear(5, 3))], ids=["dnn", "no bias"])
def test_the_span_of_other_networks(model: Any, plain: Any, spans: list[Any]) -> None:
    method = Solves(SGD(lr=0.1, momentum=0.5), "own number", inner=True)
    found = executed(method, model)
    assert spans
    agree(found, plain(lambda: executed(method, model)))


def test_dropped_samples_span_nothing(plain: Any, spans: list[Any]) -> None:
    """Each step has others."""
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(16, 3))
    found = executed(Solves(inner=True), model)
    assert not spans
    agree(found, plain(lambda: executed(Solves(inner=True), model)))


@pytest.mark.parametrize(("rows", "inputs", "outputs", "steps", "pays"), [
    (20, 784, 10, 5, True), (20, 784, 100, 5, True), (20, 784, 10, 1, False), (20, 784, 10, 2, False),
    (500, 28, 2, 5, False)])
def test_a_span_that_takes_more_products_is_not_used(rows: int, inputs: int, outputs: int, steps: int,
                                                     pays: bool) -> None:
    assert span._pays(rows, inputs, outputs, steps) is pays


@pytest.mark.parametrize("inner", [False, True])
def test_clipped_steps_are_plain_ones(inner: bool, plain: Any, used: list[int]) -> None:
    """The norm is one of all parameters; a step at once knows one after the other."""
    method = Solves(SGD(lr=0.5, clip=0.3), inner=inner)
    found = executed(method)
    assert not used
    agree(found, plain(lambda: executed(method)))
    free = executed(Solves(SGD(lr=0.5), inner=inner))
    assert used
    assert not torch.allclose(found.values.upload.theta, free.values.upload.theta)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("scale", [None, 0.4])
def test_every_loss_and_its_scale(loss: str, scale: float | None, plain: Any, used: list[int]) -> None:
    method = Solves(SGD(lr=0.1), "own number", scale)
    outputs = {"cross_entropy": 3, "binary_cross_entropy": 1, "mse": 1}[loss]
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, outputs))
    found = executed(method, model, loss)
    assert used
    agree(found, plain(lambda: executed(method, model, loss)))


@pytest.mark.parametrize("model", ["dnn", "batchnorm+dropout", "conv"])
@pytest.mark.parametrize("solver", ["sgd", "momentum, decay", "proximal"])  # Adam makes rounding noise large
@pytest.mark.parametrize("inner", [False, True])
def test_every_network(model: str, solver: str, inner: bool, plain: Any, used: list[int]) -> None:
    method = Solves(SOLVERS[solver], "number", 0.5 if not inner else None, inner)
    found = executed(method, MODELS[model]())
    assert used
    agree(found, plain(lambda: executed(method, MODELS[model]())))


# quickly, every other method with each
PAIRS = [pytest.param(method, model, marks=pytest.mark.slow if (j + k) % 2 else ())
         for k, method in enumerate(ALGORITHMS) for j, model in enumerate(("mclr", "conv"))]


@pytest.mark.parametrize(("method", "model"), PAIRS)
def test_every_method(method: str, model: str, plain: Any) -> None:
    def played() -> Tree:
        settings = {"backend": "vectorised", "chunk": 3, "batch": 4, "local": {"epochs": 1}, "cohort": 4}
        algorithm = ALGORITHMS[method](**on_any_model(method))
        if (lr := {"fedmap": 0.05, "pfedbayes": 0.001}.get(method)) is not None:
            # see test_conformance: not Adam, before BatchNorm
            algorithm = dataclasses.replace(algorithm, solver=SGD(lr=lr))  # type: ignore[call-arg]
        with engine(algorithm, ragged(), MODELS[model](), **settings) as e:
            reports = e.play(2)  # in the second, clients have states
            losses = torch.tensor([r.loss for r in reports], dtype=torch.float64)
            return (e.server, e.states(), tuple(e.score().personal), losses,
                    torch.tensor([r.grad_steps for r in reports]))

    assert_same(played(), plain(played), 1e-10)


def test_a_single_client_takes_the_same_steps(used: list[int]) -> None:
    together = executed(Solves(SGD(lr=0.1), "own number"))
    used.clear()
    for k in CLIENTS:
        alone = executed(Solves(SGD(lr=0.1), "own number"), clients=CLIENTS[k : k + 1])
        assert_same(take(alone.values, 0), take(together.values, k), 1e-12)
    assert set(used) == {1}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("widths", [(33, 5, 3), (28, 1, 3), (17, 7, 1), (1, 6, 3), (125, 13, 1)])
@pytest.mark.parametrize("batch", [8, 19])  # of 20 rows: the last batch of 19 has one
@pytest.mark.parametrize("inner", [False, True])
def test_the_place_in_a_chunk_shows_in_no_bit(inner: bool, batch: int, widths: tuple[int, int, int],
                                              dtype: str, spans: list[Any]) -> None:
    """The same client, with its own rows and start, first, in the middle and last in a chunk."""
    inputs, hidden, outputs = widths
    federation = ragged((20, 20, 20, 20, 20), shape=(inputs,), classes=3 if outputs == 3 else None)
    model = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))
    method = Solves(SGD(lr=0.1), "own number", inner=inner)
    work = make_work(method, federation, model, dtype=dtype, batch=batch, local={"epochs": 2})
    found = []
    for order in ([2, 0, 1, 3, 4], [0, 1, 2, 3, 4], [4, 3, 1, 0, 2], [2, 4]):
        clients = np.array(order)
        message = method.broadcast(work.task.init(), work.round_of(clients, 1))
        values = work.execute("local", clients, 1, message, ()).values
        found.append(take(values, order.index(2)))
    assert bool(spans) == inner
    for other in found[1:]:
        assert_same(other, found[0])


@pytest.mark.parametrize("inner", [False, True])
def test_the_padding_of_others_shows_in_no_bit(inner: bool) -> None:
    """The models of clients whose batches are all full, by themselves and beside clients with short ones."""
    method = Solves(SGD(lr=0.1), "number", inner=inner)
    work = make_work(method, ragged((20, 20, 13, 20, 7), shape=(28,)), dtype="float32", batch=10,
                     local={"epochs": 2})
    found = []
    for clients in ([0, 1, 3], [2, 0, 4, 1, 3]):
        message = method.broadcast(work.task.init(), work.round_of(np.array(clients), 1))
        values = work.execute("local", np.array(clients), 1, message, ()).values
        found.append([take(values.upload, clients.index(client)) for client in (0, 1, 3)])
    for beside, alone in zip(*found, strict=True):
        assert_same(beside, alone)


def test_an_own_objective_is_not_replaced_by_the_named_loss(used: list[int]) -> None:
    class Regularised(ModuleTask):
        def losses(self, model: Model, batch: Any, *, train: bool = False) -> tuple[Tensor, Tensor]:
            losses, stats = super().losses(model, batch, train=train)
            return losses + model.theta.abs().sum(), stats

    task = Regularised(nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), "cross_entropy", classes=3,
                       dtype=torch.float64)
    federation = ragged()
    work = dataclasses.replace(make_work(Solves(SGD(lr=0.1)), federation), task=task)
    message = work.algorithm.broadcast(task.init(), work.round_of(CLIENTS, 1))
    theta = work.execute("local", CLIENTS, 1, message, ()).values.upload.theta
    assert not used
    ordinary = ModuleTask(task.module(task.init()), "cross_entropy", classes=3, dtype=torch.float64)
    other = dataclasses.replace(work, task=ordinary).execute("local", CLIENTS, 1, message, ()).values
    assert not torch.allclose(theta, other.upload.theta)


@dataclasses.dataclass(frozen=True)
class Signed(SGD):
    """Steps by the sign alone."""

    def step(self, theta: Tensor, gradient: Tensor, prior: Prior, state: Tree) -> tuple[Tensor, Tree]:
        return theta - self.lr * gradient.sign(), state


class Capped(Gaussian):
    """A Gaussian whose pull is bounded."""

    def grad(self, theta: Tensor) -> Tensor:
        return super().grad(theta).clamp(-0.1, 0.1)


@pytest.mark.parametrize("own", ["solver", "prior"])
def test_who_has_steps_or_a_pull_of_its_own_keeps_them(own: str, used: list[int],
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    method = Solves(Signed(lr=0.1) if own == "solver" else SGD(lr=0.1), "number")
    with monkeypatch.context() as patch:
        if own == "prior":
            patch.setattr(Solves, "_prior", lambda self, theta, _: Capped(theta - 0.3, 0.7))
        found = executed(method)
    assert not used
    plainly = executed(Solves(SGD(lr=0.1), "number"))
    assert not torch.allclose(found.values.upload.theta, plainly.values.upload.theta)

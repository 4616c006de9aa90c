"""Modules as people write them: what is trained is what plain PyTorch trains, or it is refused by name.

The reference is a loop over `nn.Module`s with `torch.optim.SGD`. It shares no code with descant: all batches
are full ones, which are a client's rows in their order.
"""

from __future__ import annotations

import copy
import warnings
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import descant
from descant.algorithms import FedAvg, LocalTrain
from descant.core import fields
from descant.core.sample import SampleFormat
from descant.core.task import Batch
from descant.engine.backends.choose import make_backend
from descant.engine.rounds import Training
from descant.engine.settings import Train
from descant.errors import UsageError
from descant.models import MODELS, make_task
from descant.models.module import ModuleTask
from descant.priors.solve import SGD
from helpers import assert_same, engine, make_work, ragged
from module_zoo import EXACT, IN, RANDOM, REFUSED, NormReLU, head, net, seeded

FEDERATION = ragged((9, 5, 2, 7, 3), shape=(IN,)).to(torch.float64)
ROUNDS, STEPS, LR = 2, 2, 0.1
METHODS = {"fedavg": FedAvg(solver=SGD(lr=LR)), "localtrain": LocalTrain(solver=SGD(lr=LR))}
WORK: dict[str, Any] = {"batch": "full", "local": {"steps": STEPS}}


def build(make: Any) -> nn.Module:
    with warnings.catch_warnings():  # some of torch's own constructors are deprecated
        warnings.simplefilter("ignore")
        return seeded(make)


def rows(table: Any, client: int) -> tuple[Tensor, Tensor]:
    own = torch.from_numpy(np.asarray(table[client]))
    return FEDERATION.x[own], FEDERATION.y[own]


def plain(module: nn.Module, average: bool) -> list[nn.Module]:
    """The clients' models, by PyTorch alone."""
    clients = [copy.deepcopy(module) for _ in FEDERATION.names]
    share = np.array([len(FEDERATION.train[k]) for k in range(len(clients))])
    for _ in range(ROUNDS):
        for k, client in enumerate(clients):
            x, y = rows(FEDERATION.train, k)
            client.train()
            optimizer = torch.optim.SGD([p for p in client.parameters() if p.requires_grad], lr=LR)
            for _ in range(STEPS):
                optimizer.zero_grad()
                F.cross_entropy(client(x.clone()), y).backward()
                optimizer.step()
        if average:
            states = [client.state_dict() for client in clients]
            mean = {name: sum(each[name] * (n / share.sum()) for each, n in zip(states, share, strict=True))
                    if tensor.is_floating_point() else tensor for name, tensor in states[0].items()}
            for client in clients:
                client.load_state_dict(mean)
    return [client.eval() for client in clients]


def losses(modules: list[nn.Module]) -> list[float]:
    """The test loss of every client's module; NaN for a client without test rows."""
    found = []
    for k, module in enumerate(modules):
        x, y = rows(FEDERATION.test, k)
        with torch.no_grad():
            found.append(F.cross_entropy(module(x.clone()), y).item() if len(x) else torch.nan)
    return found


@cache
def reference(name: str, method: str) -> tuple[list[nn.Module], list[float]]:
    modules = plain(build(EXACT[name]), method == "fedavg")
    return modules, losses(modules)


def compare(name: str, method: str, backend: str, **train: Any) -> None:
    expected, expected_losses = reference(name, method)
    with engine(METHODS[method], FEDERATION, build(EXACT[name]), backend=backend, **WORK, **train) as e:
        e.play(ROUNDS)
        scored = e.score()
        personal = e.personal()
        task = e.training.work.task
        modules = [task.module(type(personal)(*(part[k] for part in personal)))
                   for k in range(len(FEDERATION.names))]
    assert not scored.failed
    for module, other in zip(modules, expected, strict=True):
        ours, theirs = dict(module.named_parameters()), dict(other.named_parameters())
        for key, parameter in theirs.items():
            torch.testing.assert_close(ours[key], parameter, rtol=1e-8, atol=1e-10, msg=f"{key} of {name}")
        for key, buffer in other.named_buffers():
            if buffer.is_floating_point():
                torch.testing.assert_close(dict(module.named_buffers())[key], buffer, rtol=1e-8, atol=1e-10)
    found = scored.personal.test[:, 0].tolist()
    np.testing.assert_allclose(found, expected_losses, rtol=1e-8)
    # and a personal model predicts what was scored
    np.testing.assert_allclose(found, losses(modules), rtol=1e-10)


# what a module does is the same under both methods: each of them has every other module, together and in
# processes, and the others one by one
ONE = [(name, [*METHODS][k % 2]) for k, name in enumerate(EXACT)]
OTHER = [(name, [*METHODS][1 - k % 2]) for k, name in enumerate(EXACT)]


@pytest.mark.parametrize(("name", "method"), ONE)
def test_what_is_trained_is_what_plain_pytorch_trains(name: str, method: str) -> None:
    compare(name, method, "vectorised")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "method"), OTHER)
def test_one_client_after_another_too(name: str, method: str) -> None:
    compare(name, method, "loop")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "method"), ONE)
def test_in_processes_too(name: str, method: str) -> None:
    compare(name, method, "processes", workers=2)


@pytest.mark.parametrize("name", ["norm with relu", "mean in a buffer", "spectral norm", "transformer"])
@pytest.mark.thorough
def test_in_processes_too_quickly(name: str) -> None:
    compare(name, "localtrain", "processes", workers=2)


@pytest.mark.parametrize("name", ["norm with relu", "mean in a buffer", "attention by hand"])
@pytest.mark.thorough
def test_minibatches_that_are_filled_up(name: str) -> None:
    """Short batches beside whole ones, where padding is: together as alone."""
    work = {"batch": 4, "local": {"epochs": 2}}
    states = []
    for backend in ("loop", "vectorised"):
        with engine(METHODS["localtrain"], FEDERATION, build(EXACT[name]), backend=backend, **work) as e:
            e.play(2)
            states.append(e.states())
    assert_same(states[1], states[0], 1e-10)


# -- random numbers --------------------------------------------------------------------------------------


def played(name: str, backend: str = "loop", seed: int = 0) -> tuple[Any, Any]:
    with engine(METHODS["localtrain"], FEDERATION, build(RANDOM[name]), backend=backend, seed=seed, batch=4,
                local={"steps": 2}) as e:
        e.play(2)
        return e.states(), e.training.work.task


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.thorough
def test_random_numbers_are_those_of_the_client_and_the_step(name: str) -> None:
    """A repeated run repeats and clients together are clients alone; another seed draws others."""
    states, _ = played(name)
    assert_same(played(name, "vectorised")[0], states, 1e-10)
    assert not torch.allclose(played(name, "vectorised", seed=1)[0].theta, states.theta)


@pytest.mark.parametrize("name", RANDOM)
def test_clients_with_the_same_rows_draw_otherwise(name: str) -> None:
    one = FEDERATION.train[0]
    same = copy.copy(FEDERATION)
    object.__setattr__(same, "train", type(FEDERATION.train).of([one] * 5))
    with engine(METHODS["localtrain"], same, build(RANDOM[name]), backend="vectorised", **WORK) as e:
        e.play(1)
        theta = e.states().theta
    apart = torch.cdist(theta, theta) + torch.eye(len(theta), dtype=theta.dtype)
    assert apart.min() > 1e-6, "two clients drew the same random numbers"


@pytest.mark.parametrize("name", RANDOM)
def test_what_draws_in_training_predicts_as_plain_pytorch(name: str) -> None:
    module = build(RANDOM[name])
    task = make_task(module, FEDERATION, dtype=torch.float64)
    with torch.no_grad():
        expected = copy.deepcopy(module).eval()(FEDERATION.x[:9])
        found = task.predict(task.init(), FEDERATION.x[:9])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


class Shown(nn.Module):
    """Gives what its own code makes of ones, beside a parameter."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.draw, self.shift = draw, nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return (self.draw(x) if self.training else x) + self.shift


DRAWS: dict[str, tuple[Any, float, float]] = {  # with mean and standard deviation
    "dropout": (lambda x: F.dropout(x, 0.2), 1.0, 0.5),
    "dropout of channels": (lambda x: F.dropout1d(x[:, :, None], 0.2)[..., 0], 1.0, 0.5),
    "rand": (lambda x: torch.rand(x.shape, dtype=x.dtype), 0.5, 12**-0.5),
    "rand_like": (lambda x: torch.rand_like(x), 0.5, 12**-0.5),
    "uniform_": (lambda x: torch.empty_like(x).uniform_(-1, 3), 1.0, 4 * 12**-0.5),
    "randn": (lambda x: torch.randn(*x.shape, dtype=x.dtype), 0.0, 1.0),
    "randn_like": (lambda x: torch.randn_like(x), 0.0, 1.0),
    "normal_": (lambda x: torch.empty_like(x).normal_(2, 0.5), 2.0, 0.5),
    "bernoulli": (lambda x: torch.bernoulli(0.3 * x), 0.3, 0.21**0.5),
    "bernoulli_": (lambda x: x.new_empty(x.shape).bernoulli_(0.3), 0.3, 0.21**0.5),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_that_are_answered_in_torch_s_place(name: str) -> None:
    draw, mean, deviation = DRAWS[name]
    seen: list[Tensor] = []

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        seen.append(outputs.detach())
        return outputs.flatten(1).sum(1)

    task = ModuleTask(Shown(draw), loss, dtype=torch.float64)
    x = torch.ones(200, 100, dtype=torch.float64)
    before = torch.get_rng_state()
    for key in (1, 1, 2):
        task.losses(task.init(), Batch(x, torch.zeros(200), None, torch.tensor(key)), train=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(seen[0], seen[1])
    assert abs(np.corrcoef(seen[0].flatten(), seen[2].flatten())[0, 1]) < 5 / np.sqrt(20_000)
    assert abs(seen[0].mean().item() - mean) < 5 * deviation / np.sqrt(20_000)
    assert abs(seen[0].std().item() - deviation) < 0.02 * deviation


# -- the faults that this file is about ------------------------------------------------------------------


def test_a_batchnorm_with_a_built_in_relu_keeps_it() -> None:
    """It trained and scored as if it had none, and came back with one."""
    with_relu, without = (
        build(lambda norm=norm: nn.Sequential(nn.Linear(IN, IN), norm(IN), nn.Linear(IN, 3)))
        for norm in (NormReLU, nn.BatchNorm1d))
    without.load_state_dict(with_relu.state_dict())
    scores = []
    for module in (with_relu, without):
        with engine(METHODS["fedavg"], FEDERATION, module, **WORK) as e:
            e.play(2)
            scores.append(e.score().personal.test[:, 0].nanmean().item())
    by_hand = build(lambda: nn.Sequential(nn.Linear(IN, IN), nn.BatchNorm1d(IN), nn.ReLU(), nn.Linear(IN, 3)))
    by_hand.load_state_dict({name.replace("2.", "3."): t for name, t in with_relu.state_dict().items()})
    with engine(METHODS["fedavg"], FEDERATION, by_hand, **WORK) as e:
        e.play(2)
        assert e.score().personal.test[:, 0].nanmean().item() == pytest.approx(scores[0], rel=1e-10)
    assert abs(scores[0] - scores[1]) > 1e-3


@pytest.mark.parametrize("name", ["mean in a buffer", "mean in a new buffer", "spectral norm"])
@pytest.mark.parametrize("backend", ["loop", "vectorised"])
def test_no_client_s_rows_reach_another_s_model(name: str, backend: str) -> None:
    """Under LocalTrain nothing is shared: other rows of client 0 change client 0 alone."""
    other = copy.copy(FEDERATION)
    x = FEDERATION.x.clone()
    x[FEDERATION.train[0]] += 100
    object.__setattr__(other, "x", x)
    states = []
    for federation in (FEDERATION, other):
        with engine(METHODS["localtrain"], federation, build(EXACT[name]), backend=backend, **WORK) as e:
            e.play(2)
            states.append(e.states())
    for a, b in zip(*states, strict=True):
        assert torch.equal(a[1:], b[1:])
        assert not torch.equal(a[0], b[0])


@pytest.mark.thorough
def test_scoring_changes_nothing() -> None:
    for name in ("mean in a buffer", "spectral norm", "norm by hand", "instance norm with statistics"):
        with engine(METHODS["localtrain"], FEDERATION, build(EXACT[name]), **WORK) as e:
            e.play(1)
            first, states = e.score(), e.states()
            assert torch.equal(e.score().personal.test.nan_to_num(), first.personal.test.nan_to_num())
            assert_same(e.states(), states, 0)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:the clients are run one by one")
def test_a_run_s_personal_model_predicts_what_was_scored() -> None:
    for name in ("norm with relu", "mean in a buffer", "spectral norm"):
        run = descant.run(METHODS["localtrain"], federation=FEDERATION, model=build(EXACT[name]), rounds=2,
                          dtype="float64", backend="vectorised", eval={"every": 1}, **WORK)
        found = losses([run.personal_model(k, "last") for k in range(len(FEDERATION.names))])
        scored = run.history[-1]["personal"]["test"]["loss"]["mean"]
        assert scored == pytest.approx(np.nanmean(found), rel=1e-10)


# -- refused, or told ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_made_right_is_refused_by_name(name: str) -> None:
    make, hint = REFUSED[name]
    with pytest.raises(UsageError, match=hint):
        make_task(build(make), FEDERATION, dtype=torch.float64)


@pytest.mark.parametrize("name", ["mean in a buffer", "control flow", "norm by hand"])
def test_vectorised_says_that_clients_are_run_one_by_one(name: str) -> None:
    work = make_work(METHODS["fedavg"], FEDERATION, build(EXACT[name]), **WORK)
    for backend, told in (("vectorised", 1), ("loop", 0)):
        settings = fields.parse(Train, {"dtype": "float64", "backend": backend, **WORK}, "train")
        made, _, _ = make_backend(Training(work, settings))
        assert sum("run one by one" in note for note in made.notes) == told
        made.close()


def test_auto_runs_them_one_by_one() -> None:
    with engine(METHODS["fedavg"], FEDERATION, build(EXACT["control flow"]), backend="auto", workers=1,
                **WORK) as e:
        assert e.backend.chunk == 1
        e.play(1)


def test_a_buffer_that_is_written_only_sometimes_is_told() -> None:
    """What a trial could not see is an error where it happens, not another client's business."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if self.training and x.max() > 50:
            self.mean.add_(1)
        return self.last(self.first(x - self.mean))

    task = make_task(build(lambda: net(forward, mean=torch.zeros(IN))), FEDERATION, dtype=torch.float64)
    batch = Batch(FEDERATION.x[:4] + 100, FEDERATION.y[:4])
    with pytest.raises(UsageError, match="wrote the buffer 'mean'"):
        task.losses(task.init(), batch, train=True)


def test_the_data_are_left_as_they_are() -> None:
    """A module may change the samples that it is given; those are never the federation's own."""
    before = FEDERATION.x.clone()
    with engine(METHODS["fedavg"], FEDERATION, build(EXACT["in place"]), **WORK) as e:
        e.play(1)
        e.score()
    assert torch.equal(FEDERATION.x, before)


def test_known_layers_are_not_tried_and_not_intercepted() -> None:
    """The fast path is as it was: no trial, no function that passes through our hands."""
    task = make_task(build(lambda: head(nn.BatchNorm1d(IN))), FEDERATION, dtype=torch.float64)
    assert task._chain is not None  # type: ignore[attr-defined]
    assert not task._train.effects.known  # type: ignore[attr-defined]
    own = make_task(build(EXACT["batch norm"]), FEDERATION, dtype=torch.float64)
    assert not own._train.effects.calls  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["lstm", pytest.param("resnet18", marks=pytest.mark.slow)])
def test_networks_of_the_package_need_no_trial(name: str) -> None:
    """They are trusted to do nothing that a trial would find."""
    facts = (SampleFormat((12,), classes=3, tokens=20) if name == "lstm"
             else SampleFormat((3, 32, 32), classes=3))
    federation = ragged(shape=facts.shape).to(torch.float64)
    if name == "lstm":
        object.__setattr__(federation, "x", torch.randint(20, federation.x.shape))
    network = build(lambda: MODELS[name]().network(facts))
    trusted, found = (make_task(model, federation, dtype=torch.float64) for model in (name, network))
    assert isinstance(trusted, ModuleTask)
    assert isinstance(found, ModuleTask)
    assert found._train.effects == trusted._train.effects
    assert found.layout == trusted.layout
    assert found.draws == trusted.draws
    assert found.alone is None


@pytest.mark.parametrize("name", ["mean in a buffer", "mean in a new buffer", "spectral norm",
                                  "norm with relu"])
def test_a_server_without_data_comes_to_the_same_statistics(name: str) -> None:
    """All that a real server has is two samples of zeros; clients must agree with it on the form."""
    frame = copy.copy(FEDERATION)
    object.__setattr__(frame, "x", torch.zeros_like(FEDERATION.x[:2]))
    object.__setattr__(frame, "y", torch.zeros_like(FEDERATION.y[:2]))
    at_home, there = (make_task(build(EXACT[name]), each, dtype=torch.float64)
                      for each in (frame, FEDERATION))
    assert at_home.layout == there.layout
    assert at_home.layout is not None
    assert at_home.layout.stats_dim > 0

"""Small federations, networks and engine pieces that several test files use."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import descant
from descant.algorithms import ALGORITHMS
from descant.core import fields
from descant.core.algorithm import Algorithm
from descant.core.federation import Federation
from descant.core.splits import Table
from descant.core.tree import Tree, leaves, map_tree
from descant.data.cache import data_dir
from descant.data.ragged import CLASSES
from descant.data.ragged import SIZES as SIZES
from descant.data.ragged import ragged as ragged
from descant.engine.backends.base import Backend
from descant.engine.backends.choose import make_backend
from descant.engine.evaluation import Evaluation, evaluate
from descant.engine.rounds import RoundReport, Training
from descant.engine.settings import Train
from descant.engine.work import Work
from descant.models import DNN, make_task
from descant.testing import batchnorm_net


def require_data(name: str) -> None:
    """Without this prepared dataset, the test is skipped."""
    path = data_dir() / f"{name}.npz"
    if not path.exists():
        pytest.skip(f"{path} is not there (set DESCANT_DATA to a directory with prepared datasets)")


def quadratics(clients: int = 5, **fields: Any) -> Federation:
    """Quadratic losses with known optima; one test row in each client, no validation."""
    chosen = {"dim": 4, "rows": 4, "kappa": 5.0, "validation": 0.0} | fields
    return descant.federation("quadratics", clients=clients, **chosen)


def unbalanced(federation: Federation, sizes: Sequence[int]) -> Federation:
    """The same federation with only the first `sizes[i]` training rows of client i."""
    lists = [federation.train[k][:n] for k, n in enumerate(sizes)]
    return Federation(federation.x, federation.y, Table.of(lists), federation.validation, federation.test,
                      federation.classes, federation.names, federation.truth)


def _seeded(make: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module: nn.Module = make()
    return module


def conv_net() -> nn.Module:
    return _seeded(lambda: nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(),
                                         nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, CLASSES)))


def groupnorm_net() -> nn.Module:
    return _seeded(lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(),
                                         nn.Linear(16, CLASSES)))


MODELS = {
    "mclr": lambda: "mclr",
    "dnn": lambda: DNN(hidden=5),
    "batchnorm+dropout": batchnorm_net,
    "conv": conv_net,
    "groupnorm": groupnorm_net,
}


def on_any_model(name: str) -> dict[str, Any]:
    """The fields with which a method works on every model: the layers that it shares are its weights."""
    return {} if getattr(ALGORITHMS[name], "shared", "all") == "all" else {"shared": ["*weight"]}


class Engine(NamedTuple):
    """A run without files: `play` rounds, `score` the population, look at the states."""

    training: Training
    backend: Backend

    def play(self, rounds: int = 1) -> list[RoundReport]:
        reports = []
        for _ in range(rounds):
            reports.append(self.training.play(self.backend))
            self.training.store.write()
        return reports

    def score(self) -> Evaluation:
        return evaluate(self.training, self.backend, self.everyone)

    @property
    def everyone(self) -> np.ndarray:
        return np.arange(self.training.work.federation.population)

    @property
    def server(self) -> Tree:
        return self.training.server

    @property
    def model(self) -> Any:
        """The method's global model."""
        return self.training.work.algorithm.global_model(self.server)

    def states(self) -> Tree:
        """The states of the whole population, with a leading axis."""
        return self.training.store.read(self.everyone)

    def personal(self) -> Tree:
        """What every client that took part predicts with."""
        message = self.training.work.algorithm.participant(self.server, self.training.round_of(self.everyone))
        done, values, failed, *_ = self.backend.run("personalize", self.everyone, self.training.number,
                                                   message, self.states())
        assert not failed
        assert len(done) == len(self.everyone)
        return values


def make_work(algorithm: Algorithm, federation: Federation, model: Any = "mclr", loss: Any = None,
              **train: Any) -> Work:
    settings = fields.parse(Train, {"dtype": "float64", "batch": 4, "local": {"steps": 2}} | train, "train")
    federation = federation.to(settings.torch_dtype)
    task = make_task(model, federation, loss=loss, dtype=settings.torch_dtype, seed=settings.seed)
    return Work(algorithm, task, federation, settings.seed, settings.batch, settings.local)


@contextmanager
def engine(algorithm: Algorithm, federation: Federation, model: Any = "mclr", **train: Any
           ) -> Iterator[Engine]:
    """An engine in float64 (unless told otherwise), closed at the end. Clients run together, at a third of
    what they take one by one; that both come to the same is tested of every method (test_conformance)."""
    usual = {"dtype": "float64", "batch": 4, "local": {"steps": 2}, "backend": "vectorised"}
    settings = fields.parse(Train, usual | train, "train")
    training = Training(make_work(algorithm, federation, model, **train_only(train)), settings)
    backend, _, _ = make_backend(training)
    with closing(backend):
        yield Engine(training, backend)


def train_only(train: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in train.items() if key in ("dtype", "batch", "local", "seed")}


def assert_same(found: Tree, expected: Tree, tolerance: float = 0.0, what: str = "") -> None:
    """Two trees agree: bit for bit, or in every entry to within `tolerance` (relative above one)."""
    a, b = dict(leaves(found)), dict(leaves(expected))
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.shape == b[name].shape, f"{what} {name}"
        assert tensor.dtype == b[name].dtype, f"{what} {name}"
        if tolerance:
            torch.testing.assert_close(tensor, b[name], rtol=tolerance, atol=tolerance, equal_nan=True,
                                       msg=lambda text, name=name: f"{what} {name}: {text}")
        else:
            assert torch.equal(tensor.nan_to_num(123.0), b[name].nan_to_num(123.0)), f"{what} {name}"


def clone(tree: Tree) -> Tree:
    return map_tree(torch.clone, tree)


def finite_differences(f: Any, at: Tensor, h: float = 1e-6) -> Tensor:
    """The gradient of a scalar function by central differences; the error is O(h^2) + O(eps / h)."""
    steps = h * torch.eye(at.numel(), dtype=at.dtype)
    return torch.stack([(f(at + step) - f(at - step)) / (2 * h) for step in steps])


class PoolHere:
    """In place of a pool of processes: jobs are done in this one, when they are submitted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> PoolHere:
        return self

    def __exit__(self, *_: object) -> None: ...

    def shutdown(self, *args: Any, **kwargs: Any) -> None: ...

    def submit(self, play: Any, job: Any) -> Any:
        future: Any = concurrent.futures.Future()
        try:
            future.set_result(play(job))
        except Exception as error:
            future.set_exception(error)
        return future

"""Class weights: the loss of torch with the same weights, in training alone, on every path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import descant
from cli_helpers import call
from descant import UsageError
from descant.algorithms import FedAvg
from descant.core.task import Batch
from descant.experiment.config import Experiment
from descant.models import make_task
from helpers import assert_same, engine, ragged

WEIGHTS = [0.5, 3.0, 1.25]
RNG = np.random.default_rng(0)


@pytest.mark.parametrize("model", [
    "mclr", nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.Softplus(beta=2))])
def test_gradients_are_those_of_torch(model):
    federation = ragged().to(torch.float64)
    task = make_task(model, federation, dtype=torch.float64, class_weights=WEIGHTS)
    start = task.init()
    batch = Batch(federation.x[:9].double(), federation.y[:9])
    module = task.module(start)
    weight = torch.tensor(WEIGHTS, dtype=torch.float64)
    F.cross_entropy(module(batch.x), batch.y, weight=weight, reduction="none").mean().backward()
    expected = torch.cat([p.grad.flatten() for p in module.parameters()])
    with torch.no_grad():
        assert_same(task.grad(start, batch).theta, expected, 1e-12)
        # what is reported is the loss of the data
        plain = F.cross_entropy(module(batch.x), batch.y)
    assert float(task.loss(start, batch)) == pytest.approx(float(plain), rel=1e-12)


def test_two_classes_with_one_output():
    x, y = RNG.normal(size=(40, 3)), np.arange(40) % 2
    federation = descant.Federation.from_arrays(x, y, np.arange(40) % 2)
    task = make_task(nn.Linear(3, 1), federation, loss="binary_cross_entropy", dtype=torch.float64,
                     class_weights=[1.0, 4.0])
    start, batch = task.init(), Batch(federation.x[:10], federation.y[:10])
    module = task.module(start)
    rows = torch.tensor([1.0, 4.0]).double()[batch.y]
    F.binary_cross_entropy_with_logits(module(batch.x)[:, 0], batch.y.double(), weight=rows).backward()
    expected = torch.cat([p.grad.flatten() for p in module.parameters()])
    with torch.no_grad():
        assert_same(task.grad(start, batch).theta, expected, 1e-12)


def test_backends_agree():
    """In place for all clients at once, under vmap, and one by one."""
    federation = ragged()

    def played(backend: str) -> Any:
        with engine(FedAvg(), federation, "dnn", backend=backend) as e:
            object.__setattr__(e.training.work, "task", make_task(
                "dnn", federation.to(torch.float64), dtype=torch.float64, class_weights=WEIGHTS))
            e.play(2)
            return e.server

    assert_same(played("vectorised"), played("loop"), 1e-10)


def test_a_file_and_a_call_are_the_same(tmp_path):
    (tmp_path / "e.toml").write_text("""
[data]
dataset = "digits"
partition = "classes"
clients = 3
[model]
name = "mclr"
class_weights = [1, 1, 1, 1, 1, 1, 1, 1, 1, 5]
[algorithm]
name = "fedavg"
[train]
rounds = 2
backend = "vectorised"
""")
    assert call("run", tmp_path / "e.toml", "--out", tmp_path / "typed").code == 0
    federation = descant.federation("digits", partition="classes", clients=3)
    settings: dict[str, Any] = {"federation": federation, "rounds": 2, "backend": "vectorised"}
    weights = torch.tensor([1.0] * 9 + [5.0])  # as for torch's own losses
    run = descant.run("fedavg", class_weights=weights, out=tmp_path / "python", **settings)

    def state(name: str) -> bytes:
        return (tmp_path / name / "checkpoint" / "state.safetensors").read_bytes()

    assert state("typed") == state("python")
    assert Experiment.load(tmp_path / "python" / "config.toml").model.class_weights == (*[1.0] * 9, 5.0)
    plain = descant.run("fedavg", **settings)
    assert not plain.snapshot("last").server.theta.equal(run.snapshot("last").server.theta)
    with pytest.raises(UsageError, match="cannot be resumed with a changed setup"):
        descant.run("fedavg", out=tmp_path / "python", resume=True, class_weights=[2.0] * 10, **settings)


@pytest.mark.parametrize(("given", "words"), [
    ({"class_weights": [1.0, 2.0]}, "2 weights for 10 classes"),
    ({"class_weights": 3}, "model.class_weights"),
    ({"class_weights": [0.0] * 10}, r"class_weights\[0\] must be greater than 0"),
    ({"class_weights": [1.0] * 10, "loss": "mse"}, "not for 'mse'"),
])
def test_what_is_refused(given, words, tmp_path: Path):
    with pytest.raises(UsageError, match=words):
        descant.run("fedavg", federation=descant.federation("digits"), rounds=1, **given)

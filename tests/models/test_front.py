"""Frozen layers with which a network begins run once for each row: who belongs to them, and that nothing else
changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import descant
from descant.engine import pool
from descant.engine.features import on_features
from descant.models import make_task
from descant.models.front import front_of
from helpers import ragged
from module_zoo import seeded

IN = 6
FED = ragged((9, 5, 7, 4), shape=(IN,))
WORK: dict[str, Any] = {"rounds": 2, "local": {"steps": 3}, "batch": 4, "dtype": "float64", "progress": False}


def body(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(IN, 8), nn.Tanh(), nn.Linear(8, 5), *more).requires_grad_(False)


class Own(nn.Module):
    """A forward pass of one's own around a frozen body."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self._how = forward
        self.body, self.head = parts.pop("body", body()), nn.Linear(5, 3)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self._how(self, x)


NETS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # with the number of layers of the front
    "a chain": (lambda: nn.Sequential(*body(), nn.ReLU(), nn.Linear(5, 3)), 4),
    "a chain in a chain": (lambda: nn.Sequential(nn.Identity(), body(), nn.Linear(5, 3)), 1),
    "a pass of its own": (lambda: Own(lambda self, x: self.head(self.body(x).relu())), 1),
    "dropout behind it": (lambda: nn.Sequential(body(), nn.Dropout(0.3), nn.Linear(5, 3)), 1),
    "norm behind it": (lambda: nn.Sequential(body(), nn.BatchNorm1d(5), nn.Linear(5, 3)), 1),
    "half of it": (lambda: nn.Sequential(nn.Linear(IN, 8).requires_grad_(False), nn.Linear(8, 3)), 1),
    "dropout in it": (lambda: nn.Sequential(body(nn.Dropout(0.3)), nn.Linear(5, 3)), 3),
    "it writes into samples": (lambda: nn.Sequential(nn.ReLU(inplace=True), body(), nn.ReLU(inplace=True),
                                                     nn.Linear(5, 3)), 3),
    "norm in it": (lambda: nn.Sequential(body(nn.BatchNorm1d(5)), nn.Linear(5, 3)), 3),
}
WITHOUT: dict[str, Callable[[], nn.Module]] = {
    "all is trained": lambda: nn.Sequential(nn.Linear(IN, 5), nn.Linear(5, 3)),
    "the end is frozen": lambda: nn.Sequential(nn.Linear(IN, 5), nn.Linear(5, 3).requires_grad_(False)),
    "samples go past it": lambda: Own(lambda self, x: self.head(self.body(x) + x[:, :5])),
    "samples are looked at": lambda: Own(lambda self, x: self.head(self.body(x)) * (1 + 0 * x.mean())),
    "it is called twice": lambda: Own(lambda self, x: self.head(self.body(x) + self.body(x))),
    "it is given something else": lambda: Own(lambda self, x: self.head(self.body(x * 2))),
    "only a table": lambda: nn.Sequential(nn.Flatten(), nn.Linear(IN, 3)),
}


def front(net: nn.Module) -> Any:
    return front_of(net, torch.float64, FED.to(torch.float64).x[[0, 7, 3, 5]])


@pytest.mark.parametrize("name", NETS)
def test_the_front_ends_where_training_changes_something(name: str) -> None:
    make, count = NETS[name]
    net = seeded(make)
    found = front(net)
    assert found is not None
    assert len(found.layers) == count
    x, before = FED.x.double(), FED.x.double().clone()
    with torch.no_grad():
        features = found.features(x, None)
        assert torch.equal(x, before)
        torch.testing.assert_close(found.rest(features), net.double().eval()(x))
    assert [n for n, p in found.rest.named_parameters() if p.requires_grad] == [
        n for n, p in net.named_parameters() if p.requires_grad]


@pytest.mark.parametrize("name", WITHOUT)
def test_where_there_is_none(name: str) -> None:
    assert front(seeded(WITHOUT[name])) is None


@pytest.mark.parametrize(("name", "backend"), [
    ("a chain", "loop"), *((name, "vectorised") for name in NETS if name not in ("half of it", "norm in it")),
])
@pytest.mark.thorough
def test_numbers_are_those_without_it(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = seeded(NETS[name][0])
    runs = []
    for room in (pool.BUDGET, 0):  # without room all layers run in every step
        monkeypatch.setattr(pool, "BUDGET", room)
        runs.append(descant.run("ditto", federation=FED, model=net, backend=backend, **WORK))
    kept, whole = runs
    assert kept.work.federation is not whole.work.federation
    assert torch.equal(whole.work.federation.x, FED.to(torch.float64).x)
    for client in range(4):
        for a, b in zip(kept.personal(client), whole.personal(client), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
        x = FED.x[:3].double()
        torch.testing.assert_close(kept.personal_model(client)(x), whole.personal_model(client)(x))
    a, b = (run.summary["best"]["personal"]["test"]["loss"]["mean"] for run in runs)
    assert a == pytest.approx(b, rel=1e-9)


class Counted(nn.Linear):
    rows = 0

    def forward(self, x: Tensor) -> Tensor:
        Counted.rows += len(x)
        return super().forward(x)


def test_a_row_passes_the_front_once() -> None:
    net = nn.Sequential(Counted(IN, 5).requires_grad_(False), nn.Linear(5, 3))
    passed = []
    for rounds in (1, 4):
        Counted.rows = 0
        descant.run("fedavg", federation=FED, model=net, backend="loop", **WORK | {"rounds": rounds})
        passed.append(Counted.rows)
    assert passed[0] == passed[1]  # the trials of the module, and each row


def test_every_row_of_a_federation_has_its_own_features() -> None:
    task = make_task(seeded(NETS["a chain"][0]), FED.to(torch.float64), dtype=torch.float64)
    made, features = on_features(task, FED.to(torch.float64))
    model = task.init()
    torch.testing.assert_close(made.predict(made.init(), features.x),
                               task.predict(model, FED.to(torch.float64).x))
    assert torch.equal(made.init().theta, model.theta)


@pytest.mark.slow
def test_a_run_is_continued_bit_for_bit(tmp_path: Path) -> None:
    given: dict[str, Any] = {"federation": FED, "model": seeded(NETS["dropout behind it"][0]), **WORK}
    whole = descant.run("pfedme", **given | {"rounds": 4})
    descant.run("pfedme", out=tmp_path, **given)
    parts = descant.run("pfedme", out=tmp_path, resume=True, **given | {"rounds": 4})
    for client in range(4):
        assert torch.equal(parts.personal(client, "last").theta, whole.personal(client, "last").theta)


@pytest.mark.thorough
def test_rows_are_protected_as_they_are_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features of a row are of that row alone: the noise and the account are the same."""
    found = []
    for room in (pool.BUDGET, 0):
        monkeypatch.setattr(pool, "BUDGET", room)
        run = descant.run("fedavg", federation=FED, model=seeded(NETS["a chain"][0]), backend="loop",
                          privacy={"unit": "record", "noise": 1.0, "clip": 0.5, "delta": 1e-3}, **WORK)
        found.append(run.personal(0, "last").theta)
    torch.testing.assert_close(*found, rtol=1e-8, atol=1e-9)

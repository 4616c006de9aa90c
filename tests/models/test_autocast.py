"""Passes in bfloat16, parameters and sums in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import descant
from descant.algorithms import FedAvg
from descant.core.task import Batch
from descant.errors import UsageError
from descant.models import make_task
from descant.priors.solve import SGD
from helpers import quadratics, ragged
from module_zoo import EXACT, IN, RANDOM, seeded

FED = ragged((9, 5, 7), shape=(IN,)).to(torch.float32)
NETS: dict[str, Any] = {
    "dense": lambda: nn.Sequential(nn.Linear(IN, 16), nn.Tanh(), nn.Linear(16, 3)),
    "norm": EXACT["batch norm"],
    "transformer": RANDOM["transformer with dropout"],
    "lstm": RANDOM["lstm with dropout"],
}
WORK: dict[str, Any] = {"rounds": 2, "local": {"steps": 3}, "batch": 4, "progress": False}


def trained(net: nn.Module, **more: Any) -> Tensor:
    run = descant.run(FedAvg(solver=SGD(lr=0.3)), federation=FED, model=net, **WORK | more)
    return run.personal(0, "last").theta


@pytest.mark.parametrize("name", NETS)
def test_gradients_are_those_of_float32_up_to_its_rounding(name: str) -> None:
    """Of eight bits: far enough to see that it is used, near enough to be right."""
    net = seeded(NETS[name])
    found = []
    for autocast in (None, "bfloat16"):
        task = make_task(net, FED, autocast=autocast)
        batch = Batch(FED.x[:9], FED.y[:9], None, torch.tensor(5))
        found.append(task.grad(task.init(), batch))
    exact, short = found
    assert short.theta.dtype == short.loss.dtype == short.stats.dtype == torch.float32
    error = (exact.theta - short.theta).norm() / exact.theta.norm()
    assert 1e-5 < error < 0.03
    assert 0 < (exact.loss - short.loss).abs() < 0.01 * exact.loss


@pytest.mark.parametrize("name", NETS)
@pytest.mark.thorough
def test_clients_together_are_clients_alone(name: str) -> None:
    """To the rounding of eight bits of what training has changed; a repeated run repeats bit for bit."""
    net = seeded(NETS[name])
    start = make_task(net, FED).init().theta
    alone, together = (trained(net, backend=backend, autocast="bfloat16")
                       for backend in ("loop", "vectorised"))
    assert alone.dtype == torch.float32
    assert (alone - together).norm() < 0.03 * (alone - start).norm()
    if name == "dense":
        assert torch.equal(alone, trained(net, backend="loop", autocast="bfloat16"))
        assert (alone - trained(net, backend="loop")).norm() < 0.1 * (alone - start).norm()


@pytest.mark.thorough
def test_evaluation_is_in_it_too() -> None:
    """What is reported is what plain PyTorch finds under torch.autocast."""
    run = descant.run("fedavg", federation=FED, model=seeded(NETS["dense"]), autocast="bfloat16", **WORK)
    task, model = run.setup.task, run.personal(0)
    found = task.predict(model, FED.x)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = task.module(model)(FED.x)
    assert expected.dtype == torch.bfloat16
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected.float(), rtol=0.02, atol=0.02)
    assert not torch.equal(found, task.module(model)(FED.x))


@pytest.mark.slow
def test_a_run_is_continued_bit_for_bit(tmp_path: Path) -> None:
    fed = descant.federation("logistic", clients=4)
    given: dict[str, Any] = {"federation": fed, "model": "dnn", "autocast": "bfloat16", **WORK}
    whole = descant.run("pfedme", out=tmp_path / "whole", **given | {"rounds": 4})
    descant.run("pfedme", out=tmp_path / "parts", **given)
    parts = descant.resume(tmp_path / "parts", rounds=4, progress=False)
    assert 'autocast = "bfloat16"' in (tmp_path / "parts" / "config.toml").read_text()
    for client in range(4):
        assert torch.equal(parts.personal(client).theta, whole.personal(client).theta)
    with pytest.raises(UsageError, match="model"):  # another precision is another run
        descant.run("pfedme", out=tmp_path / "parts", resume=True, **given | {"autocast": None, "rounds": 4})


@pytest.mark.parametrize(("given", "hint"), [
    ({"dtype": "float64", "autocast": "bfloat16"}, "model.autocast = 'bfloat16'.*train.dtype is float64"),
    ({"autocast": "float16"}, "model.autocast must be"),
    ({"model": nn.Linear(IN, 3).bfloat16()}, r"'weight'.*\.float\(\).*autocast=\"bfloat16\""),
    ({"federation": quadratics(), "model": "quadratic", "autocast": "bfloat16"}, "autocast is for networks"),
], ids=["float64", "another", "module", "no network"])
def test_where_it_cannot_hold_it_is_refused(given: dict[str, Any], hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        descant.run("fedavg", **{"federation": FED, "model": nn.Linear(IN, 3), **WORK, **given})

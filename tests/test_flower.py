"""The same algorithms on nodes: the same numbers as in simulation, and nobody trusted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from descant.algorithms import ALGORITHMS
from descant.experiment import run as runs
from descant.experiment.config import Experiment
from descant.experiment.run import Setup
from descant.tree import leaves
from descant.vector import Model
from helpers import assert_same

flower = pytest.importorskip("flower_helpers", reason="Flower is missing: pip install 'descant[flower]'")

CLIENTS = 4


def experiment(method: str, **changes: Any) -> Experiment:
    tables: dict[str, Any] = {
        "data": {"dataset": "digits", "partition": "classes", "clients": CLIENTS, "classes_per_client": 2},
        "model": {"name": "mclr"}, "algorithm": {"name": method},
        "train": {"rounds": 3, "batch": 20, "local": {"steps": 3}, "dtype": "float64", "backend": "loop"},
        "eval": {"every": 2},
    }
    for name, fields in changes.items():
        tables[name] = tables[name] | fields
    return Experiment.parse(tables)


def simulated(wanted: Experiment) -> runs.Run:
    return runs.start(Setup.of(wanted))


def on_nodes(wanted: Experiment, place: Path, **options: Any) -> tuple[runs.Run, Any]:
    grid = flower.Grid(flower.make_nodes({str(k): f"digits:{k}" for k in range(CLIENTS)}, place))
    return flower.federate(wanted, grid, place / "server", **options), grid


def personal_tensors(run: runs.Run, client: int) -> tuple[torch.Tensor, ...]:
    """What the simulator's client predicts with, in the order of the names."""
    personal = run.personal(client)
    if isinstance(personal, Model):
        tensors: dict[str, torch.Tensor] = run.personal_model(client).state_dict()
    else:
        tensors = dict(leaves(personal))
    return tuple(tensors[name] for name in sorted(tensors))


def flat(table: Any, path: str = "") -> dict[str, float]:
    """The numbers of nested tables."""
    if not isinstance(table, dict):
        return {path: table}
    return {name: value for key, inner in table.items()
            for name, value in flat(inner, f"{path}.{key}").items()}


def assert_same_run(found: runs.Run, expected: runs.Run, tolerance: float) -> None:
    assert_same(found.snapshot("last").server, expected.snapshot("last").server, tolerance)
    assert found.best_round == expected.best_round
    for mine, theirs in zip(found.history, expected.history, strict=True):
        for key in ("grad_steps", "participants", "bytes_down", "bytes_up", "rejected"):
            assert mine[key] == theirs[key]
        for key in ("personal", "global"):
            assert flat(mine.get(key, {})) == pytest.approx(flat(theirs.get(key, {})), abs=tolerance)


@pytest.mark.parametrize("cohort", ["all", 2])
@pytest.mark.parametrize("method", ALGORITHMS)
def test_nodes_give_what_the_simulator_gives(method: str, cohort: int | str, tmp_path: Path) -> None:
    wanted = experiment(method, train={"cohort": cohort})
    expected = simulated(wanted)
    found, _ = on_nodes(wanted, tmp_path, alone=False)
    assert_same_run(found, expected, 1e-10)
    for client in range(CLIENTS):
        own = load_file(tmp_path / str(client) / "model.safetensors")
        assert_same(tuple(own[name] for name in sorted(own)), personal_tensors(expected, client), 1e-10)

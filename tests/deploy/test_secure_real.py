"""Secure aggregation among real processes, with certificates, over TLS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from descant.core.tree import leaves
from descant.experiment import directory as layout
from descant.experiment import run as runs
from descant.experiment.checkpoint import read
from descant.experiment.config import Experiment
from descant.experiment.run import Setup
from federation_processes import Federation, cleaned
from helpers import assert_same

pytestmark = [pytest.mark.slow, pytest.mark.alone]

NAMES = ("0", "1", "2")
PLAIN = """
[data]
dataset = "digits"
partition = "classes"
clients = 3
classes_per_client = 4
[model]
name = "mclr"
[algorithm]
name = "fedavg"
[train]
rounds = 2
batch = 20
local = { steps = 3 }
dtype = "float64"
backend = "loop"
"""
PRIVATE = PLAIN + """
[privacy]
unit = "client"
noise = 1.0
sampling = "known"
clip = { quantile = 0.5, start = 0.3, count_noise = 2.0 }
"""


@pytest.fixture(autouse=True)
def _nobody_stays() -> Iterator[None]:
    with cleaned():
        yield


def test_sums_are_those_of_the_simulation_and_noise_is_not(tmp_path: Path) -> None:
    """The clients stay for two servers: one of plain sums, and one whose sums they noise themselves."""
    federation = Federation(tmp_path, NAMES, PLAIN)
    federation.clients("--stay", "--secure-aggregation")
    for name, text in (("plain", PLAIN), ("private", PRIVATE)):
        place = tmp_path / f"{name}.toml"
        place.write_text(text)
        federation.server("--no-alone", "--secure-aggregation", "--threshold", 3, experiment=place, out=name
                          ).ended(0, 240)
        state, _ = read(tmp_path / name / "run" / "checkpoint" / "state.safetensors")
        if name == "private":
            break
        for part, tensor in leaves(runs.start(Setup.of(Experiment.load(place))).snapshot("last").server):
            assert_same(state[f"server.{part}"], tensor, 1e-10)
    rows = layout.read_metrics(tmp_path / "private" / "run")
    assert rows[0]["clip"] == 0.3
    assert rows[1]["clip"] != 0.3
    assert all(row["loss"] is None and row["rejected"] == 0 for row in rows)
    assert rows[1]["epsilon"] > rows[0]["epsilon"] > 0

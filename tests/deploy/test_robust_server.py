"""[robust] on a real server is what it is in simulation; [attack] is for simulation alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import flower_helpers as flower
from descant.core.tree import leaves
from descant.deploy.backend import Rules
from descant.engine.attack import Attack
from descant.engine.robust import Robust
from descant.errors import UsageError
from descant.experiment import run as runs
from descant.experiment.run import Setup
from flower_helpers import DATA, experiment


@pytest.mark.parametrize(("method", "rule"), [
    pytest.param("cgpfl", Robust("norm"), marks=pytest.mark.slow), ("fedper", Robust("median"))])
@pytest.mark.thorough
def test_nodes_and_simulation_agree(method: str, rule: Robust, tmp_path: Path) -> None:
    wanted = dataclasses.replace(experiment(method), robust=rule)
    simulated = runs.start(Setup.of(wanted)).snapshot("last").server
    nodes = flower.MemoryServer(flower.make_clients(DATA, tmp_path))
    rules = Rules(deadline=5, clip=None, max_share=1.0)
    real = flower.federate(wanted, nodes, tmp_path / "server", rules=rules, alone=False)
    for (name, a), (_, b) in zip(leaves(simulated), leaves(real.snapshot("last").server), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, msg=name)
    plain = runs.start(Setup.of(experiment(method))).snapshot("last").server
    assert any(not torch.equal(a, b) for (_, a), (_, b) in zip(leaves(plain), leaves(simulated), strict=True))


def test_a_real_federation_has_no_simulated_attackers(tmp_path: Path) -> None:
    wanted = dataclasses.replace(experiment("fedavg"), attack=Attack())
    with pytest.raises(UsageError, match="take the section out"):
        flower.federate(wanted, flower.MemoryServer({}), tmp_path, clients=4)


def test_too_few_clients_for_krum_are_told_before_anybody_is_waited_for(tmp_path: Path) -> None:
    wanted = dataclasses.replace(experiment("fedavg"), robust=Robust("krum"))
    with pytest.raises(UsageError, match="needs at least 5 clients"):
        flower.federate(wanted, flower.MemoryServer({}), tmp_path, clients=4)

"""Worker processes that are spawned, as they are where processes cannot be forked (macOS)."""

from __future__ import annotations

import pytest

import descant
from descant.algorithms import Ditto
from descant.engine.backends import processes
from helpers import assert_same

pytestmark = pytest.mark.slow


def test_spawned_workers_give_the_same_bits_as_forked_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = descant.federation("digits", partition="dirichlet", alpha=0.5, clients=6, seed=0)
    runs = []
    for start in ("spawn", "fork"):
        monkeypatch.setattr(processes, "_START", start)
        runs.append(descant.run(Ditto(), federation=federation, model="dnn", rounds=2, local={"steps": 3},
                                backend="processes", workers=2, eval={"every": 1}))
    spawned, forked = runs
    assert spawned.history[-1]["personal"] == forked.history[-1]["personal"]
    for client in range(6):
        assert_same(spawned.personal(client), forked.personal(client))

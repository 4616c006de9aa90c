"""A federation under faults gives the same bits as undisturbed; plans are drawn from seeds."""

from __future__ import annotations

import shutil

import pytest

pytest.importorskip("flwr")

from benchmarks.chaos.__main__ import CLIENTS, compare
from benchmarks.chaos.plan import KINDS, SERVER, draw


def test_a_plan_has_every_kind_and_can_be_repeated() -> None:
    plan = draw(5, 2 * len(KINDS), 40, CLIENTS, True)
    assert plan == draw(5, 2 * len(KINDS), 40, CLIENTS, True) != draw(6, 2 * len(KINDS), 40, CLIENTS, True)
    assert sorted(fault.kind for fault in plan) == sorted(2 * KINDS)
    assert [fault.round for fault in plan] == sorted(fault.round for fault in plan)
    for fault in plan:
        assert 1 <= fault.round < 39
        assert fault.target in (CLIENTS if fault.kind in ("cut", "stall", "corrupt") else [*CLIENTS, SERVER])
    assert "clock" not in {fault.kind for fault in draw(5, 30, 40, CLIENTS, False)}


@pytest.mark.slow
@pytest.mark.alone
def test_a_federation_under_faults() -> None:
    """One fault of each kind, and a liar in every round."""
    kinds = len(KINDS) - (shutil.which("cc") is None)
    assert compare(kinds, 16, 5).startswith(f"over grpc: {kinds} faults")

"""A large population: what was never touched costs nothing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

POPULATION = """
import json, resource, sys
import numpy as np, torch
import descant

torch.set_num_threads(1)
clients, rows = 10_000, 10
rng = np.random.default_rng(0)
federation = descant.Federation.from_arrays(
    rng.integers(0, 256, (clients * rows, 784), dtype=np.uint8), rng.integers(0, 10, clients * rows),
    np.repeat(np.arange(clients), rows))
run = descant.run(descant.algorithms.pFedMe(), federation=federation, model="dnn", rounds=6, cohort=100,
                  local={"steps": 2}, eval={"every": 3, "clients": 200}, backend="vectorised",
                  out=sys.argv[1])
print(json.dumps({
    "parameters": run.summary["parameters"],
    "newcomers": run.history[-1]["personal"]["newcomers"],
    "gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
}))
"""


def test_ten_thousand_clients_in_little_memory(tmp_path):
    """pFedMe, 10,000 clients of an 80k-parameter model, cohort 100: under 3 GB, mapped pages included,
    and on disk only the rows of those who took part (twice: the last and the best round)."""
    out = tmp_path / "run"
    result = subprocess.run([sys.executable, "-c", POPULATION, str(out)], capture_output=True, text=True,
                            timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["parameters"] == 79_510
    assert found["gigabytes"] < 3
    assert 180 < found["newcomers"] <= 200  # at most 600 of 10,000 ever took part
    on_disk = sum(p.stat().st_blocks * 512 for p in (out / "checkpoint").rglob("*"))
    apparent = sum(p.stat().st_size for p in (out / "checkpoint").rglob("*"))
    assert apparent > 6e9
    assert on_disk < 2 * 600 * 79_510 * 4 * 1.2

"""A large population: what was never touched costs nothing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.alone]

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


ROUNDS = """
import json, sys, time
from pathlib import Path
import numpy as np
import descant

class Watch:
    def __init__(self):
        self.seconds, self.last = [], 0.0

    def started(self, run, measured):
        self.last = time.process_time()

    def played(self, row):
        self.seconds.append(time.process_time() - self.last)
        self.last += self.seconds[-1]

def own_megabytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024

clients, rows = int(sys.argv[1]), 4
rng = np.random.default_rng(0)
federation = descant.Federation.from_arrays(
    rng.integers(0, 256, (clients * rows, 784), dtype=np.uint8), rng.integers(0, 10, clients * rows),
    np.repeat(np.arange(clients), rows), classes=10)
before, watch = own_megabytes(), Watch()
descant.run("pfedme", federation=federation, model="mclr", rounds=15, cohort=200, local={"steps": 2}, batch=4,
            eval={"every": 15, "clients": 100}, backend="vectorised", observer=watch, out=sys.argv[2])
print(json.dumps({"seconds": float(np.median(watch.seconds[:-1])), "megabytes": own_megabytes() - before}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_round_costs_by_its_cohort_not_by_the_population(tmp_path):
    """200 of 200 clients, and 200 of 30,000 whose states would be 942 MB: the same processor time (a copy of
    these states alone takes longer than a round), and hardly more memory. Figures for 100,000 clients are
    what `benchmarks/population.py` is for."""
    found = []
    for population in (200, 30_000):
        result = subprocess.run(
            [sys.executable, "-c", ROUNDS, str(population), str(tmp_path / str(population))],
            capture_output=True, text=True, timeout=300, check=False)
        assert result.returncode == 0, result.stderr
        found.append(json.loads(result.stdout))
    small, large = found
    assert large["seconds"] < 2 * small["seconds"]
    assert large["megabytes"] < small["megabytes"] + 100

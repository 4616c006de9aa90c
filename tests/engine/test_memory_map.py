"""A pool larger than the memory there is: rows stay in their file, and a run reads those that it needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROWS, WIDTH, ROOM = 60_000, 1000, 120  # 240 MB of float32; megabytes that may be taken for the run

PROGRAM = f"""
import json, resource
import numpy as np, torch, descant
from descant.engine import pool
from descant.core.federation import Federation

torch.set_num_threads(1)
pool.BUDGET = 20 * 2**20  # as on a machine whose memory does not hold the rows

def status(name):
    return 1024 * int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith(name)))

def run(rounds, x, y, client):
    fed = Federation.from_arrays(x, y, client, test=0.1)
    return descant.run("fedavg", fed, rounds=rounds, cohort=4, local={{"steps": 2}}, backend="vectorised",
                       eval={{"clients": 2}}, progress=False)

run(1, np.zeros((200, {WIDTH}), np.float32), np.arange(200) % 2, np.arange(200) % 20)  # what all runs take
most = status("VmData") + {ROOM} * 2**20
resource.setrlimit(resource.RLIMIT_DATA, (most, most))
x = np.load("x.npy", mmap_mode="r")
refused = False
try:
    np.array(x)
except MemoryError:
    refused = True
client = np.arange({ROWS}) % 20
found = run(2, x, np.arange({ROWS}) // 20 % 2, client)
print(json.dumps([refused, found.rounds, found.summary["last"]["personal"]["test"]["accuracy"]["mean"]]))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_on_rows_that_do_not_fit_into_memory(tmp_path: Path) -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    x = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", "float32", (ROWS, WIDTH))
    for start in range(0, ROWS, 10_000):
        x[start : start + 10_000] = rng.normal(size=(10_000, WIDTH)).astype(np.float32)
    x[:, 0] = 4 * (np.arange(ROWS) // 20 % 2) - 2  # what the rows are told apart by
    x.flush()
    del x
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr
    refused, rounds, accuracy = json.loads(done.stdout.splitlines()[-1])
    assert refused  # all rows at once are more than there is room for
    assert rounds == 2
    assert 0 <= accuracy <= 1

"""Long runs: memory does not grow with the number of rounds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.alone,
              pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

PROGRAM = """
import json, multiprocessing, sys
from pathlib import Path
import numpy as np
import descant

def resident(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024

class Watch:
    def __init__(self):
        self.found = {}

    def started(self, run, measured):
        pass

    def played(self, row):
        if row["round"] in (100, 500):
            pids = ["self", *(worker.pid for worker in multiprocessing.active_children())]
            self.found[row["round"]] = [resident(pid) for pid in pids]

rng = np.random.default_rng(0)
federation = descant.Federation.from_arrays(rng.normal(size=(240, 200)).astype(np.float32),
                                            rng.integers(0, 10, 240), np.repeat(np.arange(20), 12))
watch, settings = Watch(), json.loads(sys.argv[1])
descant.run("pfedme", federation=federation, rounds=500, cohort=10, batch=4, local={"steps": 1}, chunk=5,
            eval={"every": 10}, observer=watch, **settings)
print(json.dumps([watch.found[100], watch.found[500]]))
"""


@pytest.mark.parametrize(("settings", "processes"), [
    ({"backend": "vectorised"}, 1), ({"backend": "processes", "workers": 2}, 3)], ids=["here", "processes"])
def test_memory_does_not_grow_over_five_hundred_rounds(settings: dict[str, Any], processes: int,
                                                       tmp_path: Path) -> None:
    """Nothing but the rows of the history stays, a kilobyte or so each: some half a megabyte between
    rounds 100 and 500. The uploads of these rounds would be 32 MB."""
    text = json.dumps(settings | {"out": str(tmp_path / "run")})
    result = subprocess.run([sys.executable, "-c", PROGRAM, text], capture_output=True, text=True,
                            timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    early, late = json.loads(result.stdout)
    assert len(early) == len(late) == processes
    assert all(after - before < 3 for before, after in zip(early, late, strict=True)), (early, late)

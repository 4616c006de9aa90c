"""Does a round cost by its cohort alone, whatever the population? `python benchmarks/population.py`.

pFedMe on a logistic model (`mclr`, 7,850 parameters) with a cohort of 1,000 clients, in populations of 1,000
and of 100,000: each in a process of its own, with its states in a run directory. A round is what a run waits
for: training, the checkpoint on disk, and the evaluation of 500 clients in every tenth round. Memory is what
the process takes besides files that are mapped, at its peak, with what its workers add to that.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import descant

PIXELS, CLASSES = 784, 10


class Watch:
    """An observer that keeps the time of every round, and the most memory that was in use."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.peak = {"own": 0, "mapped": 0}
        self._last = 0.0
        threading.Thread(target=self._look, daemon=True).start()

    def started(self, run: descant.Run, measured: Any) -> None:
        self._last = time.perf_counter()

    def played(self, row: dict[str, Any]) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now

    def _look(self) -> None:
        while True:
            driver, *workers = (_memory(pid) for pid in ("self", *_children()))
            # workers share the driver's pages until they write to them: "dirty" are those of their own
            now = {"own": driver["RssAnon"] + driver["RssShmem"] + sum(w["Private_Dirty"] for w in workers),
                   "mapped": driver["RssFile"]}
            self.peak = {kind: max(self.peak[kind], now[kind]) for kind in now}
            time.sleep(1)


def _children() -> list[str]:
    return [pid for task in Path("/proc/self/task").iterdir()
            for pid in (task / "children").read_text().split()]


def _memory(pid: str) -> dict[str, int]:
    """The figures of a process in bytes, by the kernel's names; all zero once it is gone."""
    found = {"RssAnon": 0, "RssShmem": 0, "RssFile": 0, "Private_Dirty": 0}
    try:
        text = Path(f"/proc/{pid}/status").read_text()
        text += Path(f"/proc/{pid}/smaps_rollup").read_text() if pid != "self" else ""
    except OSError:
        return found
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name in found:
            found[name] = 1024 * int(value.split()[0])
    return found


def measure(population: int, cohort: int, rounds: int, rows: int, steps: int, backend: str, out: Path
            ) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    start = time.perf_counter()
    federation = descant.Federation.from_arrays(
        rng.integers(0, 256, (population * rows, PIXELS), dtype=np.uint8),
        rng.integers(0, CLASSES, population * rows), np.repeat(np.arange(population), rows), classes=CLASSES)
    made = time.perf_counter() - start
    watch = Watch()
    run = descant.run("pfedme", federation=federation, model="mclr", rounds=rounds, cohort=cohort,
                      local={"steps": steps}, backend=backend, observer=watch, out=out,
                      eval={"every": 10, "clients": min(500, population)})
    kept = [path for path in (out / "checkpoint").rglob("*") if path.is_file()]
    plain = [s for row, s in zip(run.history, watch.seconds, strict=True) if "personal" not in row]
    return {"population": population, "cohort": cohort, "backend": run.setup.train.backend,
            "federation_seconds": made, "round_seconds": float(np.median(plain)),
            "slowest_seconds": max(watch.seconds),
            "train_seconds": float(np.median([row["seconds"] for row in run.history])),
            "gigabytes": watch.peak["own"] / 2**30, "mapped_gigabytes": watch.peak["mapped"] / 2**30,
            "disk_gigabytes": sum(path.stat().st_blocks for path in kept) * 512 / 2**30}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--populations", type=int, nargs="+", default=[1_000, 100_000])
    parser.add_argument("--cohort", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--rows", type=int, default=10, help="of each client")
    parser.add_argument("--steps", type=int, default=5, help="of each client in a round")
    parser.add_argument("--backend", default="vectorised", help="the same for all, lest unlike is compared")
    parser.add_argument("--out", type=Path, help="where run directories are made, and removed")
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)  # in this process, printed as JSON
    wanted = parser.parse_args()
    if wanted.only is not None:
        with tempfile.TemporaryDirectory(dir=wanted.out) as place:
            found = measure(wanted.only, wanted.cohort, wanted.rounds, wanted.rows, wanted.steps,
                            wanted.backend, Path(place) / "run")
        print(json.dumps(found))
        return
    console, table = Console(width=200), Table()
    names: list[str] = []
    for population in wanted.populations:
        result = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--only", str(population)],
                                stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(result.stdout)
        if not names:
            names = list(found)
            for name in names:
                table.add_column(name.replace("_", " "), justify="right")
        table.add_row(*(f"{found[name]:.3f}" if isinstance(found[name], float) else str(found[name])
                        for name in names))
    console.print(table)


if __name__ == "__main__":
    main()

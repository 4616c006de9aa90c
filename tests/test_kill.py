"""Runs killed with SIGKILL at random moments and resumed end as if nothing had happened."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from descant.experiment.directory import read_metrics

pytestmark = pytest.mark.slow

KILLS = 20
EXPERIMENT = """
[data]
dataset = "digits"
partition = "dirichlet"
clients = 12
[model]
name = "dnn"
hidden = 20
[algorithm]
name = "{method}"
[train]
rounds = 40
cohort = 5
local = {{ steps = 4 }}
backend = "{backend}"
[eval]
every = 2
"""


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "descant", *map(str, words)]


def finish(*words: object) -> None:
    result = subprocess.run(command(*words), capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr


def killed(out: Path, lines: int, delay: float, *words: object) -> bool:
    """Start a run and kill it, `delay` seconds after its metrics have so many lines; False if it was
    done before."""
    process = subprocess.Popen(command(*words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               start_new_session=True)
    while process.poll() is None and lines_of(out) < lines:
        time.sleep(0.002)
    try:
        process.wait(delay)
    except subprocess.TimeoutExpired:
        process.kill()  # the parent alone: its workers must notice by themselves
    process.wait()
    deadline = time.monotonic() + 10
    while group_is_alive(process.pid):
        assert time.monotonic() < deadline, "a worker process outlives its parent"
        time.sleep(0.05)
    return process.returncode == -signal.SIGKILL


def lines_of(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def group_is_alive(group: int) -> bool:
    """Whether any process of the group still runs (a zombie does not)."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(pgrp) == group and state != "Z":
            return True
    return False


def fingerprint(run: Path) -> dict[str, str]:
    kept = run / "checkpoint"
    return {str(p.relative_to(kept)): hashlib.sha256(p.read_bytes()).hexdigest()
            for p in sorted(kept.rglob("*")) if p.is_file()}


@pytest.mark.parametrize(("method", "backend"), [("pfedme", "vectorised"), ("scaffold", "processes")])
def test_killed_at_random_moments(tmp_path, method, backend):
    experiment = tmp_path / "experiment.toml"
    experiment.write_text(EXPERIMENT.format(method=method, backend=backend))
    finish("run", experiment, "--out", tmp_path / "whole")
    expected = fingerprint(tmp_path / "whole")
    rounds = [row["round"] for row in read_metrics(tmp_path / "whole")]
    assert rounds == list(range(1, 41))

    moments = random.Random(f"{method} {backend}")
    # two while the program starts, the others at any round, at any point of it
    when = [(0, moments.uniform(0.2, 3.0)) for _ in range(2)]
    when += [(moments.randint(1, 38), moments.uniform(0.0, 0.15)) for _ in range(KILLS // 2 - 2)]

    def one(k: int) -> tuple[bool, int]:
        out = tmp_path / f"killed{k}"
        was_killed = killed(out, *when[k], "run", experiment, "--out", out)
        begun, lines = (out / "config.toml").exists(), lines_of(out)
        finish(*(("resume", out) if begun else ("run", experiment, "--out", out)))
        assert fingerprint(out) == expected, f"killed {when[k][1]:.3f} s after line {when[k][0]}"
        found = [row["round"] for row in read_metrics(out)]
        assert found == rounds
        assert (out / "clients.csv").read_text() == (tmp_path / "whole/clients.csv").read_text()
        assert json.loads((out / "summary.json").read_text())["rounds"] == 40
        return was_killed, lines

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1))) as pool:
        outcomes = list(pool.map(one, range(len(when))))
    # the moments must mean something: nearly all kills hit, most of them in the middle of the rounds
    assert sum(was_killed for was_killed, _ in outcomes) >= len(when) - 2
    assert sum(0 < lines < 40 for _, lines in outcomes) >= len(when) // 2

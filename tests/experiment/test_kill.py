"""Runs killed with SIGKILL at random moments and resumed end as if nothing had happened."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import runpy
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cli_helpers import group_is_alive
from descant.experiment.directory import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.alone]

KILLS = 10
EXPERIMENT = """
[data]
dataset = "digits"
partition = "dirichlet"
clients = 12
[model]
name = "dnn"
hidden = 20
[algorithm]
{algorithm}
[train]
rounds = 40
cohort = 5
local = {{ steps = 4 }}
backend = "{backend}"
[eval]
every = 2
"""


def program(*words: object) -> subprocess.Popen[bytes]:
    """`descant` with these words, from its very start."""
    return subprocess.Popen([sys.executable, "-m", "descant", *map(str, words)], stdout=subprocess.DEVNULL,
                            stderr=subprocess.DEVNULL, start_new_session=True)


class Forked:
    """The same in a process that is forked from one where everything is imported, which takes most of a
    short run's time."""

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["descant.cli", "descant.experiment.run", "matplotlib.figure",
                                    "torch._dynamo", "sklearn.cluster"])

    def __init__(self, *words: object) -> None:
        self.process = self.context.Process(target=descant_in_a_session, args=[str(word) for word in words])
        self.process.start()
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("descant", timeout or 0)
        return self.returncode

    def kill(self) -> None:
        self.process.kill()

    returncode = property(poll)


def descant_in_a_session(*words: str) -> None:
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.argv = ["descant", *words]
    runpy.run_module("descant", run_name="__main__")


def killed(out: Path, lines: int, delay: float, *words: object) -> bool:
    """Start a run and kill it, `delay` rounds after its metrics have so many lines; False if it was done
    before. Without a line to wait for it is killed while it starts, as a user starts it, after `delay`
    seconds."""
    process = Forked(*words) if lines else program(*words)
    while process.poll() is None and lines_of(out) < lines:
        time.sleep(0.002)
    try:
        process.wait(delay * (seconds_of_a_round(out) if lines else 1))
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


def seconds_of_a_round(out: Path) -> float:
    """Of the last one that is written down: how many are played in a second depends on the machine."""
    *_, last = read_metrics(out)
    return float(last["seconds"])


def fingerprint(run: Path) -> dict[str, str]:
    kept = run / "checkpoint"
    return {str(p.relative_to(kept)): hashlib.sha256(p.read_bytes()).hexdigest()
            for p in sorted(kept.rglob("*")) if p.is_file()}


@pytest.mark.parametrize(("method", "backend"), [("pfedme", "vectorised"), ("scaffold", "processes")])
def test_killed_at_random_moments(tmp_path, method, backend):
    moments = random.Random(f"{method} {backend}")
    # two while the program starts, the others at any round, at any point of it
    when = [(0, moments.uniform(0.2, 3.0)) for _ in range(2)]
    when += [(moments.randint(1, 38), moments.uniform(0.0, 3.0)) for _ in range(KILLS - 2)]
    outcomes = killed_and_resumed(tmp_path, f'name = "{method}"', backend, when)
    # the moments must mean something: nearly all kills hit, most of them in the middle of the rounds
    assert sum(was_killed for was_killed, _ in outcomes) >= len(when) - 2
    assert sum(0 < lines < 40 for _, lines in outcomes) >= len(when) // 2


METHODS = {  # with a state on the server, or on the clients, that is more than a model
    "pfedbred": ('strategy = "mh"', "vectorised"),
    "one_stage_fedprox": ('lam = { name = "adaptive", rounds = 20 }', "processes"),
    "cgpfl": ("K = 3\nk_rounds = 20", "vectorised"),  # then the server's state has another shape
    "fedmap": ('prior = { name = "learned" }', "processes"),
    "pfedgt": ('init = "gradient"', "vectorised"),  # which has a round before the first
    "pfedhn": ("", "vectorised"),  # a network and the memory of an optimizer
    "fedper": ('shared = ["*weight"]', "processes"),  # a part of a model on either side
}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_can_be_killed(tmp_path, method):
    """Early, in the middle and late."""
    fields, backend = METHODS[method]
    moments = random.Random(method)
    when = [(moments.randint(*part), moments.uniform(0.0, 2.0)) for part in ((1, 3), (17, 20), (25, 30))]
    outcomes = killed_and_resumed(tmp_path, f'name = "{method}"\n{fields}', backend, when)
    assert all(was_killed and 0 < lines < 40 for was_killed, lines in outcomes)


def killed_and_resumed(tmp_path, algorithm, backend, when):
    """For each kill of an experiment, whether it hit and how many lines there were; resumed, every one must
    end as the run that was not killed."""
    experiment = tmp_path / "experiment.toml"
    experiment.write_text(EXPERIMENT.format(algorithm=algorithm, backend=backend))
    assert Forked("run", experiment, "--out", tmp_path / "whole").wait(120) == 0
    expected = fingerprint(tmp_path / "whole")
    rounds = [row["round"] for row in read_metrics(tmp_path / "whole")]
    assert rounds == list(range(1, 41))

    def one(k: int) -> tuple[bool, int]:
        out = tmp_path / f"killed{k}"
        was_killed = killed(out, *when[k], "run", experiment, "--out", out)
        begun, lines = (out / "config.toml").exists(), lines_of(out)
        assert Forked(*(("resume", out) if begun else ("run", experiment, "--out", out))).wait(120) == 0
        assert fingerprint(out) == expected, f"killed {when[k][1]:.3f} after line {when[k][0]}"
        found = [row["round"] for row in read_metrics(out)]
        assert found == rounds
        assert (out / "clients.csv").read_text() == (tmp_path / "whole/clients.csv").read_text()
        assert json.loads((out / "summary.json").read_text())["rounds"] == 40
        return was_killed, lines

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1))) as pool:
        return list(pool.map(one, range(len(when))))

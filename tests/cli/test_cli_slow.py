"""The command line in processes of its own: signals, pipes, a full disk."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli_helpers import COMMAND, ENVIRONMENT, call, finish, group_is_alive, start

pytestmark = [pytest.mark.slow, pytest.mark.alone]


def settings(**changes: object) -> list[str]:
    fields = {"data__clients": 6, "train__cohort": 3, "train__rounds": 30, "train__local": "{ steps = 5 }",
              "train__backend": "vectorised", "eval__every": 5} | changes
    return [f"--set={key.replace('__', '.')}={value}" for key, value in fields.items()]


def checkpoint(directory: Path) -> dict[str, bytes]:
    base = directory / "checkpoint"
    return {str(path.relative_to(base)): path.read_bytes() for path in base.rglob("*") if path.is_file()}


def rounds_done(directory: Path) -> int:
    metrics = directory / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


@pytest.mark.parametrize("backend", [
    {"train__backend": "vectorised"},
    {"train__backend": "processes", "train__workers": 2, "train__chunk": 1},
])
def test_ctrl_c_leaves_a_run_that_goes_on(tmp_path, backend):
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert finish("run", *settings(**backend), "--out", whole, cwd=tmp_path)[0] == 0

    with start("run", *settings(**backend), "--out", "run", cwd=tmp_path, start_new_session=True) as process:
        deadline = time.monotonic() + 60
        while rounds_done(run) < 3 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    stopped = re.fullmatch(r"stopped after round (\d+) of 30; continue with: descant resume run\n", err)
    assert stopped, err
    assert rounds_done(run) == int(stopped[1]) < 30
    assert checkpoint(run) != checkpoint(whole)

    code, out, err = finish("resume", "run", cwd=tmp_path)
    assert code == 0, err
    assert f"continuing after round {stopped[1]} of 30" in out
    assert checkpoint(run) == checkpoint(whole)
    assert (run / "clients.csv").read_bytes() == (whole / "clients.csv").read_bytes()


def mount(place: Path, options: str) -> None:
    """Put a tmpfs at a place, or change the one that is there; skip where that is not allowed."""
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command to make a small disk with")
    if done.returncode:
        pytest.skip(f"mounting a small disk is not permitted here: {done.stderr.strip()}")


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A disk of one megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    mount(place, "size=1m")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_an_error_to_recover_from(tmp_path, disk):
    big = settings(model__name="dnn", train__rounds=12, data__clients=15, eval__every=2)
    run, whole = disk / "run", tmp_path / "whole"
    assert finish("run", *big, "--out", whole, cwd=tmp_path)[0] == 0

    code, _, err = finish("run", *big, "--out", run, cwd=tmp_path)
    assert code == 1
    assert re.fullmatch(rf"error: .*No space left on device.*descant resume {run}\n", err), err
    code, _, err = finish("resume", run, cwd=tmp_path)  # still full
    assert code == 1
    assert re.fullmatch(r"error: .*No space left on device.*\n", err), err

    mount(disk, "remount,size=20m")
    code, _, err = finish("resume", run, cwd=tmp_path)
    assert code == 0, err
    assert checkpoint(run) == checkpoint(whole)


def test_a_disk_that_is_full_from_the_start(tmp_path, disk):
    (disk / "filler").write_bytes(b"x" * (2**20 - 4096))
    code, _, err = finish("run", *settings(), "--out", disk / "run", cwd=tmp_path)
    assert code == 1
    assert re.fullmatch(r"error: .*No space left on device.*\n", err), err


def test_a_read_only_disk(tmp_path, disk):
    mount(disk, "remount,ro")
    code, _, err = finish("run", *settings(), "--out", disk / "run", cwd=tmp_path)
    assert (code, err) \
        == (1, f"error: cannot write to {disk / 'run'}: Read-only file system; choose another --out\n")
    code, _, err = finish("run", *settings(), cwd=disk)
    assert (code, err) == (1, "error: cannot write to runs: Read-only file system; choose another --out\n")
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize("args", [
    ["--help"], ["list", "algorithms"], ["show", "ditto"], ["show", "ditto", "--json"],
    ["run", *settings(), "--out", "run"],
])
def test_a_reader_that_has_heard_enough_is_no_error(tmp_path, args):
    with start(*args, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_help_does_not_wait_for_torch(tmp_path):
    command = [sys.executable, "-X", "importtime", *COMMAND[1:], "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert "Usage: descant" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "descant.cli" in imported
    assert imported & {"torch", "numpy", "sklearn", "matplotlib", "rich"} == set()


def test_a_poor_terminal_is_no_error(tmp_path, monkeypatch):
    monkeypatch.setitem(ENVIRONMENT, "PYTHONIOENCODING", "ascii")
    code, out, err = finish("show", "fedavg", cwd=tmp_path)
    assert (code, err) == (0, "")
    assert "Ag?era y Arcas" in out


@pytest.mark.parametrize("command", [[], ["run"], ["resume"], ["list"], ["show"]])
def test_help_through_the_real_command_line(tmp_path, command):
    code, out, err = finish(*command, "--help", cwd=tmp_path)
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: {' '.join(['descant', *command])} ")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A finished run of two rounds."""
    directory = tmp_path_factory.mktemp("finished")
    code, _, err = finish("run", *settings(train__rounds=2), "--out", "run", cwd=directory)
    assert code == 0, err
    return directory / "run"


WRONG = {  # what the user asks for, the exit code, and what the message says; test_cli.py has all mistakes
    "algorithm": (["--set", "algorithm.name=pfedmee"], 2, "did you mean 'pfedme'"),
    "diverges": (["--set", "algorithm.alpha=1e30", "--set", "algorithm.lam=1e30"], 1,
                 "the steps diverge for any loss"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_mistake_and_a_failure_through_the_real_command_line(tmp_path, kind):
    arguments, expected, message = WRONG[kind]
    code, _, err = finish("run", *arguments, "--out", "run", cwd=tmp_path)
    assert code == expected
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err
    if expected == 2:
        assert not list(tmp_path.iterdir())
    else:
        assert (tmp_path / "run" / "checkpoint" / "state.safetensors").exists()


@pytest.mark.parametrize(("damage", "expected", "message"), [
    (lambda run: (run / "config.toml").write_text((run / "config.toml").read_text().replace("15.0", "16.0")),
     2, "algorithm.lam: 15.0 became 16.0"),
    (lambda run: (run / "checkpoint" / "state.safetensors").write_bytes(b"nonsense"), 1, "is damaged"),
    (lambda run: (run / "checkpoint" / "state.safetensors").unlink(), 1, "is missing"),
    (lambda run: (run / "config.toml").unlink(), 2, "holds no run"),
])
def test_each_kind_of_damage_to_a_run(finished, tmp_path, monkeypatch, damage, expected, message):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    damage(run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    code, _, err = call("resume", "run")
    assert code == expected
    assert message in err
    assert "Traceback" not in err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_client_without_training_data_and_labels_out_of_range(tmp_path):
    """What a file of experiments cannot ask for, a script can."""
    script = """
import numpy as np, descant
x, y = np.zeros((6, 2), "float32"), np.array([0, 1, 2, 0, 1, 2])
try:
    descant.Federation.from_arrays(x, y, [0, 0, 0, 1, 1, 1], classes=2)
except descant.UsageError as error:
    print(error)
try:
    descant.Federation.from_datasets({"north": (x, y), "south": (x[:0], y[:0])})
except descant.UsageError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", script], env=ENVIRONMENT, capture_output=True, text=True,
                            timeout=60, check=True)
    lines = result.stdout.splitlines()
    assert "labels lie in 0..2, outside the range 0..1" in lines[0]
    assert "client 'south' has no training data" in lines[1]


COMPARISON = """
[data]
dataset = "digits"
partition = "classes"
clients = 6
[algorithm]
name = "pfedme"
K = 2
[train]
rounds = 60
cohort = 3
local = { steps = 3 }
backend = "vectorised"
[eval]
every = 30
[[algorithms]]
name = "localtrain"
"""


COMPARE = ("compare", "e.toml", "--no-baselines", "--seeds", "0,1", "--jobs", "2", "--out")


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> Path:
    """A comparison that was never stopped."""
    place = tmp_path_factory.mktemp("compared")
    (place / "e.toml").write_text(COMPARISON)
    code, out, err = finish(*COMPARE, "whole", cwd=place)
    assert (code, err) == (0, "")
    assert re.search(r"^localtrain +0\.9", out, re.M)
    return place / "whole"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_comparison_that_was_stopped_goes_on(tmp_path, compared, how):
    """In two processes. Ctrl-C and a kill of the parent stop the workers too; the same command again does
    what is missing, and the result is that of a comparison that was never stopped."""
    (tmp_path / "e.toml").write_text(COMPARISON)
    process = start(*COMPARE, "parts", cwd=tmp_path, start_new_session=True)
    first = tmp_path / "parts" / "runs" / "pfedme" / "seed-0"
    deadline = time.monotonic() + 100
    while rounds_done(first) < 10 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(how)
    _, err = process.communicate(timeout=60)
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert "rerun the same command to finish" in err
    deadline = time.monotonic() + 60
    while group_is_alive(process.pid):
        assert time.monotonic() < deadline, "a worker process outlives its parent"
        time.sleep(0.05)
    code, _, err = finish(*COMPARE, "parts", cwd=tmp_path)
    assert (code, err) == (0, "")
    for label in ("pfedme", "localtrain"):
        for seed in (0, 1):
            at = f"runs/{label}/seed-{seed}"
            assert checkpoint(tmp_path / "parts" / at) == checkpoint(compared / at)
    code, _, err = finish("compare", "e.toml", "--out", "parts", "--budget", "rounds", cwd=tmp_path)
    assert code == 2
    assert "holds another comparison" in err

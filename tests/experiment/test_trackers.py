"""TensorBoard, MLflow and Weights & Biases are told every round once, also after a kill, and end no run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import descant
from cli_helpers import ENVIRONMENT, call
from descant import UsageError
from descant.experiment import trackers
from descant.experiment.trackers import Tracker, figures

SETTINGS: dict[str, Any] = {"backend": "vectorised", "local": {"steps": 1}, "eval": {"every": 2}}


@pytest.fixture(scope="module")
def digits() -> descant.Federation:
    return descant.federation("digits", partition="classes", clients=3)


class Ledger(Tracker):
    """A tool that keeps what it is told by the numbers of the rounds, and fails when it is told to."""

    name, module = "ledger", "json"

    def __init__(self, broken: str = "") -> None:
        super().__init__()
        self.broken, self.said, self.status, self.kept = broken, [], "", {}  # type: ignore[var-annotated]

    def _open(self, run: descant.Run) -> None:
        self._fails("open")

    def _log(self, number: int, figures: Mapping[str, float]) -> None:
        self._fails(f"log {number}")
        self.said.append(number)
        self.kept[number] = {name: value for name, value in figures.items() if name != "seconds"}

    def _close(self, run: descant.Run, status: str) -> None:
        self._fails("close")
        self.status = status

    def _fails(self, where: str) -> None:
        if where == self.broken:
            raise ConnectionError("nobody is there\nsecond line")


def test_a_tool_is_told_every_round(digits):
    ledger = Ledger()
    run = descant.run("ditto", federation=digits, rounds=3, observer=ledger, **SETTINGS)
    assert (ledger.said, ledger.status) == ([1, 2, 3], "finished")
    told, row = figures(run.history[1]), run.history[1]
    assert told["personal/test/accuracy"] == row["personal"]["test"]["accuracy"]["mean"]
    assert told["loss"] == row["loss"]
    assert told["bytes_up"] == row["bytes_up"]
    assert "personal/test/accuracy" not in figures(run.history[0])
    assert figures(run.history[0] | {"loss": None, "info": {"lam": 0.5, "why": "text"}})["info/lam"] == 0.5


def test_the_rounds_of_a_server_are_told_too(tmp_path):
    flower = pytest.importorskip("flower_helpers")
    clients = flower.make_clients({name: flower.DATA[name] for name in ("0", "1")}, tmp_path)
    ledger = Ledger()
    run = flower.federate(flower.experiment("fedavg", train={"rounds": 2}), flower.MemoryServer(clients),
                          tmp_path / "server", alone=False, trackers=[ledger])
    assert (ledger.said, ledger.status) == ([1, 2], "finished")
    assert ledger.kept[2]["loss"] == run.history[1]["loss"]


@pytest.mark.parametrize("broken", ["open", "log 2", "close"])
def test_a_tool_that_is_away_ends_no_run(broken, digits):
    plain = descant.run("fedavg", federation=digits, rounds=3, **SETTINGS)
    ledger, other = Ledger(broken), Ledger()
    with pytest.warns(UserWarning, match=r"Ledger is told nothing .*\(ConnectionError: nobody is there\)"):
        run = descant.run("fedavg", federation=digits, rounds=3, observer=[ledger, other], **SETTINGS)
    assert run.snapshot("last").server.theta.equal(plain.snapshot("last").server.theta)
    assert ledger.said == {"open": [], "log 2": [1], "close": [1, 2, 3]}[broken]
    assert (other.said, other.status) == ([1, 2, 3], "finished")


def test_a_resumed_run_is_told_what_is_missing(digits, tmp_path):
    whole = Ledger()
    descant.run("ditto", federation=digits, rounds=4, observer=whole, **SETTINGS)
    with pytest.warns(UserWarning, match="told nothing more"):
        descant.run("ditto", federation=digits, rounds=4, observer=Ledger("log 2"), **SETTINGS,
                    out=tmp_path / "run")
    later = Ledger()
    descant.resume(tmp_path / "run", observer=later)  # all rounds are there: it is told of them
    assert later.kept == whole.kept


def test_how_a_run_ends(digits):
    ledger = Ledger()
    with pytest.raises(RuntimeError, match="mine"):
        descant.run("fedavg", federation=digits, rounds=3, observer=ledger, on_round=_raise, **SETTINGS)
    assert ledger.status == "failed"


def _raise(run: descant.Run, row: dict[str, Any]) -> None:
    raise RuntimeError("mine")


def test_an_observer_is_an_object_with_two_functions(digits):
    class Wrong:
        def started(self) -> None: ...

        def played(self, row: dict[str, Any]) -> None: ...

    with pytest.raises(UsageError, match=r"Wrong has no started\(run, measured\)$"):
        descant.run("fedavg", federation=digits, observer=[Ledger(), Wrong()])
    with pytest.raises(UsageError, match=r"Ledger\(\) with brackets"):
        descant.run("fedavg", federation=digits, observer=Ledger)
    with pytest.raises(UsageError, match=r"on_round must be a function of \(run, row\)"):
        descant.run("fedavg", federation=digits, on_round=lambda run: None)


def test_a_tool_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(trackers.MLflow, "module", "no_such_package_here")
    with pytest.raises(UsageError, match=r"pip install 'descant\[mlflow\]'"):
        descant.MLflow()
    assert call("run", "--track", "mlflow").code == 2
    assert "did you mean 'wandb'" in call("run", "--track", "wand").err


# -- the tools themselves ----------------------------------------------------------------------------------


KILLED = """
import os, sys, descant
def end(run, row):
    if row["round"] == 2:
        os._exit(9)
fed = descant.federation("digits", partition="classes", clients=3)
descant.run("ditto", federation=fed, rounds=4, out=sys.argv[2], backend="vectorised", local={"steps": 1},
            eval={"every": 2}, observer=eval("descant." + sys.argv[1]), on_round=end)
"""


def interrupted(tool: str, place: Path) -> None:
    """A run of four rounds that was killed after the second and resumed from the command line."""
    done = subprocess.run([sys.executable, "-c", KILLED, tool, place], env=ENVIRONMENT | dict(os.environ),
                          check=False, capture_output=True, text=True)
    assert done.returncode == 9, done.stderr


def expected(run: descant.Run) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for row in run.history:
        for name, value in figures(row).items():
            found.setdefault(name, {})[row["round"]] = value
    return found


@pytest.mark.slow
def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    interrupted("TensorBoard()", tmp_path / "run")
    [events] = (tmp_path / "run" / "tensorboard").iterdir()
    events.rename(events.with_name(f"events.out.tfevents.{int(time.time()) + 3}.a"))  # a clock set back
    done = call("resume", tmp_path / "run", "--track", "tensorboard")
    assert done.code == 0, done
    kept = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    kept.Reload()
    found = {name: [(event.step, event.value) for event in kept.Scalars(name)]
             for name in kept.Tags()["scalars"]}
    assert found == {name: [(number, pytest.approx(value)) for number, value in points.items()]
                     for name, points in expected(descant.load(tmp_path / "run")).items()}
    with pytest.raises(UsageError, match="has nowhere to write"):
        descant.run("fedavg", federation=descant.federation("digits"), rounds=1,
                    observer=descant.TensorBoard())


@pytest.mark.slow
def test_mlflow_in_a_real_local_store(tmp_path, monkeypatch):
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    interrupted("MLflow()", tmp_path / "run")
    done = call("resume", tmp_path / "run", "--track", "mlflow")
    assert (done.code, done.err) == (0, ""), done
    client, run = MlflowClient(), descant.load(tmp_path / "run")
    name = json.loads((tmp_path / "run" / "tracking.json").read_text())["mlflow"]
    kept = client.get_run(name)
    assert kept.info.status == "FINISHED"
    assert kept.data.tags["best_round"] == str(run.best_round)
    assert kept.data.params["algorithm.name"] == "ditto"
    assert kept.data.params["train.rounds"] == "4"
    found = {key: [(point.step, point.value) for point in client.get_metric_history(name, key)]
             for key in kept.data.metrics}
    assert found == {key: list(points.items()) for key, points in expected(run).items()}
    assert {file.path for file in client.list_artifacts(name)} == {"config.toml", "summary.json", "curve.png"}


@pytest.mark.slow
def test_an_mlflow_server_that_is_away_is_a_warning(tmp_path, monkeypatch, digits):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.warns(UserWarning, match="MLflow is told nothing more of this run, which goes on"):
        run = descant.run("fedavg", federation=digits, rounds=2, **SETTINGS,
                          observer=descant.MLflow("http://127.0.0.1:9"))
    assert run.rounds == 2


@pytest.mark.slow
def test_mlflow_of_an_extended_run_and_of_a_comparison(tmp_path, monkeypatch, digits):
    """Parameters are for ever, so that what was extended is a tag; runs of a comparison are named by method
    and seed."""
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)  # where MLflow keeps files
    descant.run("fedavg", digits, rounds=1, out=tmp_path / "run", observer=descant.MLflow(), **SETTINGS)
    descant.resume(tmp_path / "run", rounds=2, observer=descant.MLflow())
    client = MlflowClient()
    kept = client.get_run(json.loads((tmp_path / "run" / "tracking.json").read_text())["mlflow"])
    assert kept.data.params["train.rounds"] == "1"
    assert kept.data.tags["train.rounds"] == "2"
    assert "train.batch" not in kept.data.tags
    descant.compare(digits, tmp_path / "several", algorithms="fedavg", seeds=[0, 1], baselines=False,
                    track=["mlflow"], rounds=2, **SETTINGS)
    found = {run.info.run_name: run for run in client.search_runs(
        [client.get_experiment_by_name("descant").experiment_id])}
    for seed in (0, 1):
        run = found[f"fedavg, seed {seed}"]
        assert run.info.status == "FINISHED"
        losses = client.get_metric_history(run.info.run_id, "loss")
        rows = (tmp_path / "several" / "runs" / "fedavg" / f"seed-{seed}" / "metrics.jsonl").read_text()
        assert [point.value for point in losses] == [json.loads(row)["loss"] for row in rows.splitlines()]


@pytest.mark.slow
def test_wandb_offline(tmp_path):
    interrupted("WandB()", tmp_path / "run")
    done = call("resume", tmp_path / "run", "--track", "wandb")
    assert (done.code, done.err) == (0, ""), done
    name = json.loads((tmp_path / "run" / "tracking.json").read_text())["wandb"]
    files = sorted((tmp_path / "run" / "wandb").glob(f"offline-run-*/run-{name}.wandb"))
    assert len(files) == 2  # the last one has everything
    assert _history(files[-1]) == expected(descant.load(tmp_path / "run"))


def _history(path: Path) -> dict[str, dict[int, float]]:
    """The figures in a file of Weights & Biases: records in blocks, as LevelDB's log has them."""
    from wandb.proto import wandb_internal_pb2 as protocol

    data, at, parts = path.read_bytes(), 7, b""
    found: dict[str, dict[int, float]] = {}
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = protocol.Record.FromString(parts)
            parts = b""
            for item in record.history.item:
                if not (key := item.key or ".".join(item.nested_key)).startswith("_"):
                    found.setdefault(key, {})[record.history.step.num] = json.loads(item.value_json)
    return found

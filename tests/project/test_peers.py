"""The benchmark beside other libraries, as far as it needs none of them: numpy plays one."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.peers.__main__ import app
from benchmarks.peers.contest import DESCANT, Figures, UnequalWork, compete, require_equal_work
from benchmarks.peers.libraries import HERE, Arrangement, Library
from benchmarks.peers.picture import draw
from benchmarks.peers.results import dump, show
from benchmarks.peers.sides.networks import flat, network
from benchmarks.peers.sides.session import Work
from benchmarks.peers.work import write_work
from benchmarks.speed.case import BATCH, MODELS, Case, random_federation
from benchmarks.speed.lean import Lean
from descant.core.task import inputs

pytestmark = pytest.mark.slow

SIDE = f"""
import sys
sys.path.insert(0, {str(HERE / "sides")!r})
import numpy as np
from session import Session, work_of_this_process

work, session, kind = work_of_this_process(), Session("numpy"), sys.argv[2]
model, number = work.initial, 0
while session.begin(lambda: model):
    print("what a library prints is no answer")
    if kind == "ends":
        raise ValueError("no way")
    total, steps = 0, 0
    for client, order in zip(work.cohorts[number], work.orders[number]):
        w, b = model[:7840].reshape(10, 784).copy(), model[7840:].copy()
        for start in range(0, len(order), work.batch):
            rows = order[start : start + work.batch]
            x, y = work.x[client][rows], work.y[client][rows]
            scores = np.exp(x @ w.T + b)
            slope = (scores / scores.sum(1, keepdims=True) - np.eye(10)[y]) / len(rows)
            lr = work.lr * (1.02 if kind == "longer" else 1)
            w -= lr * slope.T @ x
            b -= lr * slope.sum(0)
            steps += 1
        total += np.concatenate([w.reshape(-1), b]) / work.cohort
    model, number = total, number + 1
    session.played(steps - (kind == "fewer"))
"""


@dataclass(frozen=True)
class Here(Library):
    """A library in this environment."""

    file: Path = Path()

    python = Path(sys.executable)
    is_installed = True

    @property
    def script(self) -> Path:
        return self.file


class Absent(Library):
    is_installed = False


def case_of(model: str = "mclr") -> Case:
    """Three of five clients, with two batches and a short one."""
    return Case("fedavg", model, random_federation(5, 45, 0), cohort=3, batches=3, evaluated=0)


def library(place: Path, *kinds: str) -> Library:
    (place / "side.py").write_text(SIDE)
    return Here("numpy", "NumPy", (), tuple(Arrangement(kind, (kind,)) for kind in kinds),
                file=place / "side.py")


def test_the_written_work_is_descants(tmp_path):
    """Every batch of every round, found again by its pixels and targets."""
    case, lean = case_of(), Lean(case_of())
    write_work(case, 2, tmp_path / "work.npz")
    work = Work(tmp_path / "work.npz")
    assert (work.model, work.batch, work.rounds, work.cohort) == ("mclr", BATCH, 2, 3)
    assert work.lr == case.algorithm.solver.lr
    assert work.initial == pytest.approx(case.task.init().theta.numpy())
    x = inputs(case.federation.x, torch.float32).flatten(1).numpy()
    for client in range(5):
        own = case.federation.train[client]
        assert work.x[client] == pytest.approx(x[own])
        assert (work.y[client] == case.federation.y.numpy()[own]).all()
    for number in range(2):
        lean.round()
        assert work.cohorts[number].tolist() == lean._cohort.tolist()
        assert work.orders[number].tolist() == [order.tolist() for order in lean._orders()]


@pytest.mark.parametrize("model", MODELS)
def test_the_networks_of_the_sides_are_descants(model):
    task, x = case_of(model).task, torch.rand(3, 784)
    vector = task.init().theta
    made = network(model, vector.numpy())
    assert flat(list(made.parameters())) == pytest.approx(vector.numpy())
    expected = task.module(task.init())(x.reshape(3, 1, 28, 28))
    assert torch.allclose(made(x), expected, atol=1e-5)


def test_sides_take_turns_and_the_faster_arrangement_is_kept(tmp_path):
    said = []
    figures = compete(case_of(), (library(tmp_path, "ends", "right"), Absent("absent", "Absent", (), ())), 2,
                      tmp_path, said.append)
    assert [text for text in said if "repetition" in text] == [
        "descant: repetition 1 of 2", "numpy: repetition 1 of 2",
        "numpy: repetition 2 of 2", "descant: repetition 2 of 2"]
    assert len(figures[DESCANT].steps) == len(figures["numpy"].steps) == 2
    assert min(figures[DESCANT].steps + figures["numpy"].steps) > 0
    note = figures["numpy"].note
    assert note.startswith(f"numpy {np.__version__}; right (tried: ends: NumPy ended: ValueError: no way")
    assert figures["absent"] == Figures("not installed: python -m benchmarks.peers install absent")


def test_different_work_is_refused(tmp_path):
    with pytest.raises(UnequalWork, match=r"not do the same work.*NumPy \(longer\) is \S+ of its way"):
        compete(case_of(), (library(tmp_path, "longer"),), 1, tmp_path)
    with pytest.raises(UnequalWork, match="a round of numpy took 8 gradient steps in place of 9"):
        compete(case_of(), (library(tmp_path, "right", "fewer"),), 1, tmp_path)


def test_models_are_compared_by_how_far_they_moved():
    start, own = np.zeros(4), np.array([3.0, 0, 4, 0])
    require_equal_work(start, {DESCANT: own, "other": own + 0.002})
    with pytest.raises(UnequalWork, match=r"the model of other is 2\.0e-03 of its way"):
        require_equal_work(start, {DESCANT: own, "other": own + 0.005})
    with pytest.raises(UnequalWork, match="the model of other"):
        require_equal_work(start, {DESCANT: own, "other": own * np.nan})
    with pytest.raises(UnequalWork, match="other has a model of 3 parameters in place of 4"):
        require_equal_work(start, {DESCANT: own, "other": own[:3]})


def test_the_table_and_the_picture_of_given_timings():
    figures = {DESCANT: Figures("two workers", [1e-4, 3e-4, 2e-4]), "pfl": Figures("one", [5e-4, 4e-4, 9e-4]),
               "flower": Figures("failed: it said nothing")}
    found = dump(case_of(), figures)
    assert found["sides"]["pfl"]["us_per_step"] == pytest.approx(500)
    assert found["sides"]["pfl"]["times_descant"] == pytest.approx(2.5)
    assert found["sides"]["flower"]["times_descant"] is None
    text = io.StringIO()
    show(Console(file=text, width=120), found, 3)
    lines = [line.split() for line in text.getvalue().splitlines() if line.strip()]
    assert ["descant", "200", "100", "to", "300"] in lines
    assert ["pfl-research", "500", "400", "to", "900", "2.50"] in lines
    assert ["Flower", "-"] in lines
    assert "Flower: failed: it said nothing" in text.getvalue()
    machine = {"processor": "a processor", "cores": 2}
    assert draw({"machine": machine, "cases": [found], "repetitions": 3}).startswith(b"\x89PNG")


def test_several_runs_are_joined_by_their_medians(tmp_path):
    files = []
    for k, pfl in enumerate((4e-4, 9e-4, 5e-4)):
        figures = {DESCANT: Figures("two workers", [1e-4]), "pfl": Figures("one", [pfl])}
        run = {"machine": {"processor": "a processor", "cores": 2}, "cases": [dump(case_of(), figures)],
               "repetitions": 1}
        files.append(tmp_path / f"{k}.json")
        files[-1].write_text(json.dumps(run))
    found = CliRunner().invoke(app, ["join", *map(str, files), "--out", str(tmp_path / "a.png")])
    assert found.exit_code == 0, found.output
    [line] = [line for line in found.output.splitlines() if "mclr" in line]
    assert line.split() == ["mclr", "100,", "100,", "100", "500:", "4.0,", "9.0,", "5.0"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_says_what_it_does() -> None:
    found = CliRunner().invoke(app, ["run", "--help"])
    assert found.exit_code == 0
    assert "--repetitions" in found.output

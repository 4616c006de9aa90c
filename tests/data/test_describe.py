"""`descant init`: a first experiment for a folder or a dataset, which runs as it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cli_helpers import ENVIRONMENT, call
from descant.data.describe import describe
from descant.data.schema import Column
from descant.experiment.config import Experiment


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "my hospitals"
    place.mkdir()
    rng = np.random.default_rng(0)
    for name in ("north", "south"):
        rows = [",".join([str(rng.integers(20, 90)), f"{rng.normal():.3f}" if k % 7 else "NA",
                          str(rng.choice(["f", "m"])), f"a note on patient {name} {k}", str(k // 2),
                          str(rng.choice(["no", "yes"]))]) for k in range(40)]
        (place / f"{name}.csv").write_text("\n".join(["age,lab 1,sex,note,patient,ill", *rows]) + "\n")
    return place


def test_the_schema_is_guessed(folder):
    found = describe(folder, "ill", "patient")
    assert found.schema.columns == (Column("age", "number"), Column("lab 1", "number"),
                                    Column("sex", ("f", "m")), Column("note", "ignore"))
    assert found.schema.classes == ("no", "yes")
    assert (found.schema.group, found.schema.missing) == ("patient", ("NA",))
    assert (found.clients, found.has_gaps, found.ignored) == (2, True, ("note",))
    assert describe(folder, "lab 1").schema.classes is None  # a real target
    assert describe(folder, "patient").schema.classes == tuple(map(str, range(20)))  # not "0", "1", "10"


def test_the_experiment_runs_as_it_is(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = call("init", "my hospitals", "--target", "ill", "--group", "patient")
    assert done == (0, "experiment.toml\n", "")
    experiment = Experiment.load(Path("experiment.toml"))
    assert experiment.data.schema == describe(folder, "ill", "patient").schema
    assert experiment.data.federation().names == ("north", "south")
    ran = call("run", "experiment.toml", "--set", "train.rounds=2", "--set", "train.backend=vectorised",
               "--out", "run")
    assert ran.code == 0, ran
    assert "already exists" in call("init", "my hospitals", "--target", "ill").err
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert call("init", folder, "--target", "ill", "-o", elsewhere / "e.toml").code == 0
    assert Experiment.load(elsewhere / "e.toml").data.dataset.path == str(folder.resolve())


@pytest.mark.parametrize("name", ["digits", "heart_disease"])
def test_a_dataset(name, tmp_path):
    assert call("init", name, "-o", tmp_path / "e.toml").code == 0
    assert Experiment.load(tmp_path / "e.toml").data.dataset.name == name


@pytest.mark.parametrize(("arguments", "words"), [
    (("nowhere",), "neither a folder nor a dataset"), (("digits", "--target", "y"), "whose target is known"),
    (("my hospitals",), "--target is missing: name the column to predict, one of age, lab 1"),
    (("my hospitals", "--target", "il"), "did you mean 'ill'"),
    (("my hospitals", "--target", "note"), "many different texts"),
])
def test_what_is_wrong_is_said(arguments, words, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = call("init", *arguments)
    assert (done.code, done.err.startswith("error: ")) == (2, True)
    assert words in done.err
    assert not Path("experiment.toml").exists()


@pytest.mark.thorough
def test_a_shell_completes_commands():
    ask = {"_DESCANT_COMPLETE": "complete_bash", "COMP_WORDS": "descant com", "COMP_CWORD": "1"}
    done = subprocess.run([sys.executable, "-c", "from descant.cli import main; main()"],
                          env=ENVIRONMENT | ask, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.split() == ["compare"], done

"""`descant example`: tables and an experiment that fit each other, the same everywhere."""

from __future__ import annotations

import csv
import hashlib

from typer.testing import CliRunner

from descant.cli import app
from descant.data.hospitals import HOSPITALS, NEW_PATIENTS, write_example
from descant.experiment.config import Experiment, read_toml


def test_the_example_is_an_experiment_with_its_data(tmp_path):
    place = tmp_path / "a" / "hospitals"
    result = CliRunner().invoke(app, ["example", str(place)])
    assert result.exit_code == 0, result.output
    assert result.output.strip() == str(place / "experiment.toml")
    federation = Experiment.parse(read_toml(place / "experiment.toml")).data.federation()
    assert federation.names == tuple(sorted(HOSPITALS))
    assert len(federation.x) == sum(HOSPITALS.values())
    assert federation.classes == 2
    new, west = (list(csv.reader((place / name).read_text(encoding="utf-8").splitlines()))
                 for name in ("new.csv", "west.csv"))
    assert len(new) == 1 + NEW_PATIENTS
    assert [*new[0], "disease"] == west[0]


def test_the_example_is_the_same_everywhere(tmp_path):
    digest = hashlib.sha256()
    for path in sorted(write_example(tmp_path)):
        digest.update(path.read_bytes())
    assert digest.hexdigest()[:16] == "8a8d474bc5b90c4c"


def test_what_is_there_is_not_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    result = CliRunner().invoke(app, ["example", str(tmp_path)])
    assert result.exit_code == 2
    assert "not empty" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["example", str(tmp_path / "file" / "inside")])
    assert result.exit_code == 2
    assert "choose another directory" in result.output

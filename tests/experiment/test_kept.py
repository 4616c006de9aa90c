"""Models of a run whose training files were moved, changed or removed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import descant
from descant import DescantError
from descant.data.hospitals import write_example
from descant.deploy.export import export_model, personalized
from descant.experiment import run as runs
from descant.experiment.config import Experiment, read_toml
from descant.experiment.run import Run, Setup
from helpers import assert_same


def trained(place: Path, **method: Any) -> Run:
    """A run on a folder of tables."""
    write_example(place / "hospitals")
    tables = read_toml(place / "hospitals" / "experiment.toml")
    tables |= {"algorithm": method, "train": {"rounds": 2, "local": {"steps": 2}, "backend": "loop"}}
    return runs.start(Setup.of(Experiment.parse(tables)), place / "run")


def shorten(file: Path) -> None:
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    file.write_text("".join(lines[:-1]), encoding="utf-8")


@pytest.mark.parametrize(("harm", "words"), [
    (lambda data: data.rename(data.with_name("elsewhere")), "cannot read the folder"),
    (lambda data: shorten(data / "north.csv"), "cannot be resumed with a changed setup"),
    (lambda data: (data / "zoo.csv").write_bytes(b"\xff"), "zoo.csv"),
], ids=["gone", "changed", "unreadable"])
@pytest.mark.thorough
def test_models_are_loaded_and_exported_without_the_training_files(harm: Callable[[Path], Any], words: str,
                                                                   tmp_path: Path) -> None:
    run = trained(tmp_path, name="ditto")
    harm(tmp_path / "hospitals" / "data")
    again = descant.load(tmp_path / "run")
    assert again.history == run.history
    assert repr(again.setup.federation) == repr(run.setup.federation)
    assert again.setup.federation.treatment is not None
    assert again.setup.federation.treatment.is_learned
    for client in ("river", 3):
        assert_same(again.personal(client), run.personal(client), 0)
    made = [export_model(each, "river", tmp_path / name) for name, each in (("a", run), ("b", again))]
    with_rows, without = ((place / "model.json").read_bytes() for place in made)
    assert with_rows == without  # with the numbers of the scaling, and the hash of the tensors
    with pytest.raises(DescantError, match=words):
        descant.resume(tmp_path / "run", rounds=3)


@pytest.mark.thorough
def test_a_newcomer_is_served_without_them(tmp_path: Path) -> None:
    run = trained(tmp_path, name="ditto")
    (tmp_path / "hospitals" / "data").rename(tmp_path / "elsewhere")
    late = [personalized(each, tmp_path / "hospitals" / "west.csv")
            for each in (run, descant.load(tmp_path / "run"))]
    assert late[0].figures == late[1].figures


@pytest.mark.parametrize("method", [{"name": "fedavg", "finetune": 2}, {"name": "ifca", "K": 2}])
@pytest.mark.thorough
def test_a_model_that_is_made_with_rows_needs_them(method: dict[str, Any], tmp_path: Path) -> None:
    trained(tmp_path, **method)
    (tmp_path / "hospitals").rename(tmp_path / "elsewhere")
    again = descant.load(tmp_path / "run")
    with pytest.raises(DescantError, match=r"client 0 cannot be personalized: .*bring them back"):
        again.personal(0)


def test_other_federations_are_made_again(tmp_path: Path) -> None:
    fed = descant.federation("digits", clients=4)
    descant.run("fedavg", fed, rounds=1, local={"steps": 1}, backend="loop", out=tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoint" / "federation.safetensors").exists()


@pytest.mark.thorough
def test_a_damaged_description_is_told(tmp_path: Path) -> None:
    trained(tmp_path, name="ditto")
    file = tmp_path / "run" / "checkpoint" / "federation.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(DescantError, match=r"federation\.safetensors is damaged"):
        descant.load(tmp_path / "run")

"""Your own data: folders with a file for each client, arrays, and experiments on them."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch

import descant
from descant.data import PARTITIONS, DataSpec
from descant.errors import UsageError
from descant.experiment.config import Experiment, override, read_toml
from descant.experiment.run import Setup, start

DOCUMENT = (Path(__file__).parents[2] / "docs/own-data.md").read_text(encoding="utf-8")
SCHEMA: dict[str, Any] = {"target": "disease", "classes": ["no", "yes"],
                          "columns": {"age": "number", "sex": ["female", "male"], "note": "ignore"}}
HEADER = "age,sex,note,disease\n"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCUMENT, re.DOTALL)


def patients(count: int, seed: int) -> str:
    rng = np.random.default_rng(seed)
    lines = [f"{age},{'male' if male else 'female'},,{'yes' if age + 10 * male > 60 else 'no'}\n"
             for age, male in zip(rng.integers(20, 90, count), rng.integers(2, size=count), strict=True)]
    return HEADER + "".join(lines)


@pytest.fixture
def hospitals(tmp_path: Path) -> Path:
    folder = tmp_path / "study" / "hospitals"
    folder.mkdir(parents=True)
    for seed, (name, count) in enumerate({"west": 12, "north": 20, "10": 16}.items()):
        (folder / f"{name}.csv").write_text(patients(count, seed))
    return folder


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    folder = tmp_path / "arrays"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name, count in {"b": 8, "a": 12}.items():
        np.savez(folder / f"{name}.npz", x=rng.standard_normal((count, 2, 3)), y=rng.integers(3, size=count))
    return folder


def refused(folder: Path, **fields: Any) -> str:
    with pytest.raises(UsageError) as error:
        descant.federation(folder, **fields)
    return str(error.value).replace(str(folder), "FOLDER")


# -- folders -----------------------------------------------------------------------------------------


def test_a_client_for_each_file(hospitals: Path) -> None:
    fed = descant.federation(hospitals, schema=SCHEMA)
    assert fed.names == ("10", "north", "west")
    assert (fed.train.sizes + fed.validation.sizes + fed.test.sizes).tolist() == [16, 20, 12]
    assert fed.x.shape == (48, 3)
    assert (fed.x.dtype, fed.y.dtype, fed.classes) == (torch.float32, torch.int64, 2)
    x, y = descant.data.Schema.parse(SCHEMA).read(hospitals / "north.csv")
    rows = np.sort(np.concatenate([fed.train[1], fed.validation[1], fed.test[1]]))
    assert torch.equal(fed.x[torch.from_numpy(rows)], torch.from_numpy(x))
    assert torch.equal(fed.y[torch.from_numpy(rows)], torch.from_numpy(y))


@pytest.mark.thorough
def test_arrays_in_files(arrays: Path) -> None:
    fed = descant.federation(str(arrays))
    assert fed.names == ("a", "b")
    assert fed.x.shape == (20, 2, 3)
    assert fed.classes == 3
    assert np.array_equal(fed.x[:12].numpy(), np.load(arrays / "a.npz")["x"])
    run = descant.run("fedavg", federation=fed, rounds=2)
    assert run.rounds == 2


def test_files_of_all_kinds_together(hospitals: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    (hospitals / ".DS_Store").write_bytes(b"\x00")
    np.savez(hospitals / "east.npz", x=np.eye(4, 3), y=[0, 1, 1, 0], group=["p", "p", "q", "q"])
    table = arrow.table({"age": [1, 2, 3], "sex": ["male"] * 3, "disease": ["no"] * 3})
    importlib.import_module("pyarrow.parquet").write_table(table, hospitals / "South.PARQUET")
    fed = descant.federation(hospitals, schema=SCHEMA)
    assert fed.names == ("10", "South", "east", "north", "west")
    assert fed.x.dtype == torch.float32
    assert set(fed.train[2].tolist()) in ({19, 20}, {21, 22})  # patient p or q, wholly


def test_groups_are_those_of_their_file(arrays: Path) -> None:
    np.savez(arrays / "c.npz", x=np.zeros((6, 2, 3)), y=[0] * 6, group=[7, 7, 8, 8, 9, 9])
    np.savez(arrays / "d.npz", x=np.ones((6, 2, 3)), y=[0] * 6, group=[7, 7, 8, 8, 9, 9])
    samples = DataSpec.parse({"dataset": str(arrays)}).dataset.load(4, 0)
    assert samples.group is not None
    sizes = np.bincount(samples.group)
    assert sorted(sizes[sizes > 0].tolist()) == [1] * 20 + [2] * 6


def test_classes_are_those_of_the_schema(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(HEADER + "1,male,,no\n" * 4)
    assert descant.federation(tmp_path, schema=SCHEMA).classes == 2


def test_other_partitions_of_a_folder(hospitals: Path) -> None:
    fed = descant.federation(hospitals, schema=SCHEMA, partition="iid", clients=4)
    assert fed.names == ("0", "1", "2", "3")
    with pytest.raises(UsageError, match="clients = 2, but the data has 3 natural owners: set clients = 3"):
        descant.federation(hospitals, schema=SCHEMA, clients=2)


def test_missing_values(hospitals: Path, arrays: Path) -> None:
    path = hospitals / "north.csv"
    path.write_text(path.read_text() + '50,male,"two\nlines",no\n,male,,no\n50,,,yes\n')
    assert refused(hospitals, schema=SCHEMA) == (
        "FOLDER/north.csv, line 24, column 'age': the value is missing: "
        'set impute = "client" or "constants" in [data], or leave the row out')
    fed = descant.federation(hospitals, schema=SCHEMA, impute="client")
    assert bool(fed.x.isfinite().all())
    path.write_text(HEADER + "50,,,yes\n50,male,,yes\n")
    assert "FOLDER/north.csv, line 2, column 'sex'" in refused(hospitals, schema=SCHEMA)
    x = np.zeros((4, 2, 3))
    x[2, 1, 0] = np.nan
    np.savez(arrays / "c.npz", x=x, y=[0] * 4)
    assert "FOLDER/c.npz: x[2, 1, 0] is missing (NaN): set impute" in refused(arrays)


@pytest.mark.parametrize(("name", "content", "message"), [
    ("east.csv", b"", "FOLDER/east.csv is empty"),
    ("east.csv", HEADER.encode(), "FOLDER/east.csv has a header but no rows"),
    ("east.csv", b"age,sex,disease\n1,male,maybe\n", "FOLDER/east.csv, line 2, column 'disease'"),
    ("east.xlsx", b"", "FOLDER/east.xlsx is not a client's file, which ends in one of .csv, .parquet, .npz: "
     "convert it, or move it elsewhere"),
    ("north.npz", b"", "FOLDER/north.csv and FOLDER/north.npz both belong to client 'north'"),
    ("east.npz", b"no zip", "FOLDER/east.npz cannot be read as NPZ: File is not a zip file"),
])
def test_bad_files_in_a_folder(hospitals: Path, name: str, content: bytes, message: str) -> None:
    (hospitals / name).write_bytes(content)
    assert message in refused(hospitals, schema=SCHEMA)


@pytest.mark.parametrize(("content", "message"), [
    ({"x": np.zeros((2, 4)), "y": [0, 1]},
     "FOLDER/c.npz: x has rows of shape (4,) and type float64, but that of FOLDER/a.npz has (2, 3) and"),
    ({"x": np.zeros((2, 2, 3), np.uint8), "y": [0, 1]},
     "FOLDER/c.npz: x has rows of shape (2, 3) and type uint8"),
    ({"x": np.zeros((2, 2, 3)), "y": [0.0, 1.0]}, "FOLDER/c.npz: y has rows of shape () and type float64"),
    ({"x": np.zeros((2, 2, 3))}, "FOLDER/c.npz has no array 'y': it needs x (samples) and y (targets)"),
    ({"x": np.zeros((2, 2, 3)), "y": [0, 1], "groups": [0, 1]},
     "FOLDER/c.npz: unknown array 'groups': did you mean 'group'?"),
    ({"x": np.zeros((2, 2, 3)), "y": [0, 1], "group": [0]}, "FOLDER/c.npz: group has the shape (1,)"),
    ({"x": np.zeros((2, 2, 3)), "y": [0]}, "FOLDER/c.npz: x has 2 rows, but y has the shape (1,)"),
    ({"x": np.zeros((0, 2, 3)), "y": np.zeros(0, int)}, "FOLDER/c.npz: x has no rows"),
    ({"x": np.zeros(2), "y": [0, 1]}, "FOLDER/c.npz: x has the shape (2,): it needs rows and columns"),
    ({"x": np.zeros((2, 2, 3)), "y": [0, -1]}, "FOLDER/c.npz: y[1] is -1: class numbers begin at 0"),
    ({"x": np.full((2, 2, 3), np.inf), "y": [0, 1]}, "FOLDER/c.npz: x[0, 0, 0] is not a finite number"),
    ({"x": np.zeros((2, 2, 3)), "y": [0, np.nan]}, "FOLDER/c.npz: y[1] is not a finite number"),
    ({"x": np.zeros((2, 2, 3)), "y": ["a", "b"]},
     "FOLDER/c.npz: y must be an array of numbers, not of <U1"),
    ({"x": np.array([{}, {}]), "y": [0, 1]},
     "FOLDER/c.npz cannot be read as NPZ: x.npy holds Python objects, which are never loaded"),
])
def test_bad_npz(arrays: Path, content: dict[str, Any], message: str) -> None:
    np.savez(arrays / "c.npz", **content)
    assert message in refused(arrays)


def test_a_truncated_npz(arrays: Path) -> None:
    data = (arrays / "b.npz").read_bytes()
    (arrays / "b.npz").write_bytes(data[:-50])
    assert "FOLDER/b.npz cannot be read as NPZ: " in refused(arrays)
    (arrays / "b.npz").write_bytes(data[:200] + bytes(40) + data[240:])
    assert "FOLDER/b.npz cannot be read as NPZ: " in refused(arrays)


def test_folders_that_are_none(tmp_path: Path, hospitals: Path) -> None:
    assert refused(tmp_path / "none") == ("data.dataset: cannot read the folder FOLDER: "
                                          "No such file or directory")
    assert "cannot read the folder FOLDER: Not a directory" in refused(hospitals / "north.csv", schema=SCHEMA)
    (tmp_path / "none").mkdir()
    assert "the folder FOLDER is empty: put a file for each client there" in refused(tmp_path / "none")
    assert "FOLDER/10.csv is a table: describe its columns and the target in a section" in refused(hospitals)


# -- arrays ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partition", sorted(set(PARTITIONS) - {"natural"}))
def test_arrays_are_dealt_by_any_partition(partition: str) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((400, 6)), rng.integers(4, size=400)
    fed = descant.federation((x, torch.from_numpy(y)), partition=partition, clients=5)
    assert fed.everyone == 5
    assert (fed.classes, fed.x.dtype, fed.origin) == (4, torch.float64, None)


@pytest.mark.thorough
def test_arrays_of_real_targets_are_dealt_evenly(tmp_path: Path) -> None:
    x = np.arange(40.0).reshape(20, 2) / 40
    fed = descant.federation((x, x[:, 0]), clients=4)
    assert fed.classes is None
    settings: dict[str, Any] = {"federation": fed, "out": tmp_path / "run"}
    descant.run("fedavg", rounds=1, **settings)
    assert descant.run("fedavg", rounds=2, resume=True, **settings).rounds == 2


@pytest.mark.parametrize(("pair", "message"), [
    ((np.zeros((3, 2)), [0, 1]), "x has 3 rows, but y has the shape (2,)"),
    ((np.zeros(3), [0, 1, 1]), "x has the shape (3,)"),
    (([["a"]], [0]), "x must be an array of numbers, not of <U1"),
    (([[1], [1, 2]], [0, 1]), "x must be an array of numbers: "),
])
def test_bad_arrays(pair: Any, message: str) -> None:
    with pytest.raises(UsageError) as error:
        descant.federation(pair)
    assert str(error.value).startswith(message)


def test_natural_needs_owners() -> None:
    with pytest.raises(UsageError, match="'natural' needs data whose rows have owners"):
        descant.federation((np.zeros((4, 2)), [0, 1, 0, 1]), partition="natural")


# -- experiments -------------------------------------------------------------------------------------


def write_experiment(hospitals: Path, dataset: str = "hospitals", **data: Any) -> Path:
    path = hospitals.parent / "experiment.toml"
    path.write_text(tomli_w.dumps({
        "data": {"dataset": dataset, "scale": "client", **data}, "schema": SCHEMA,
        "algorithm": {"name": "fedavg"}, "train": {"rounds": 2, "backend": "loop"}}))
    return path


def test_an_experiment_survives_a_round_trip(hospitals: Path) -> None:
    experiment = Experiment.load(write_experiment(hospitals))
    assert experiment.data.schema == descant.data.Schema.parse(SCHEMA)
    assert experiment.data.clients == 3
    dumped = experiment.dump()
    assert dumped["data"]["dataset"] == str(hospitals)
    assert dumped["data"]["schema"] == SCHEMA
    again = Experiment.parse(tomllib.loads(tomli_w.dumps(dumped)))
    assert again == experiment
    assert again.dump() == dumped
    assert Experiment.parse({"algorithm": {"name": "fedavg"}}).data.schema is None


@pytest.mark.parametrize("dataset", ["hospitals", "./hospitals", "hospitals/", "../study/hospitals"])
@pytest.mark.thorough
def test_a_run_is_repeated_from_another_directory(
        hospitals: Path, tmp_path: Path, dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    experiment = Experiment.load(write_experiment(hospitals, dataset).relative_to(tmp_path))
    run = start(Setup.of(experiment), Path("runs/a"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert descant.load(tmp_path / "runs/a").summary == run.summary
    assert descant.resume(tmp_path / "runs/a", rounds=3).rounds == 3
    again = start(Setup.of(Experiment.load(tmp_path / "runs/a/config.toml", ["train.rounds=2"])))
    assert again.setup.federation.fingerprint() == run.setup.federation.fingerprint()
    assert torch.equal(again.personal(1).theta, run.personal(1).theta)  # type: ignore[attr-defined]


@pytest.mark.thorough
def test_a_run_from_python_is_resumed_from_another_directory(
        hospitals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(hospitals)
    fed = descant.federation("../hospitals", schema=SCHEMA)
    fed.save_partition("partition.npz.saved")  # with another ending, since this is the folder of the clients
    Path("partition.npz.saved").rename("../partition.npz")
    fed = descant.federation("../hospitals", schema=SCHEMA, partition_file="../partition.npz")
    descant.run("fedavg", federation=fed, rounds=1, out=tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert descant.resume(tmp_path / "run", rounds=2).rounds == 2


def test_other_data_do_not_resume(hospitals: Path, tmp_path: Path) -> None:
    run = start(Setup.of(Experiment.load(write_experiment(hospitals))), tmp_path / "run")
    assert run.rounds == 2
    path = hospitals / "west.csv"
    path.write_text(path.read_text().replace("female", "male", 1))
    with pytest.raises(UsageError, match="federation"):
        descant.resume(tmp_path / "run", rounds=3)
    (hospitals / "new.csv").write_text(patients(10, 9))
    with pytest.raises(UsageError, match="clients = 3, but the data has 4 natural owners"):
        descant.resume(tmp_path / "run", rounds=3)


def test_paths_in_a_file_are_relative_to_it(hospitals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                            ) -> None:
    monkeypatch.chdir(tmp_path)
    file = write_experiment(hospitals, partition_file="p.npz")
    data = read_toml(file)["data"]
    assert (data["dataset"], data["partition_file"]) == (str(hospitals), str(hospitals.parent / "p.npz"))
    changed = Experiment.parse(override(read_toml(file), ["data.partition_file=q.npz"]))
    assert changed.data.partition_file == str(tmp_path / "q.npz")  # the command line is here
    monkeypatch.setenv("HOME", str(hospitals.parent))
    home = Experiment.parse({"data": {"dataset": "~/hospitals"}, "algorithm": {"name": "fedavg"}})
    assert home.dump()["data"]["dataset"] == str(hospitals)
    (tmp_path / "digits").mkdir()
    assert DataSpec.parse({"dataset": "digits"}).dataset.name == "digits"  # names come first


def test_a_folder_need_not_be_there_to_be_named(tmp_path: Path) -> None:
    """A site knows the experiment, and has only its own file."""
    tables = {"data": {"dataset": "/no/where", "clients": 4}, "schema": SCHEMA,
              "algorithm": {"name": "fedavg"}}
    experiment = Experiment.parse(tables)
    assert experiment.data.schema is not None
    assert Experiment.parse(experiment.dump()) == experiment


def test_settings_of_the_schema(hospitals: Path) -> None:
    tables = read_toml(write_experiment(hospitals))
    settings = ["schema.columns.sex=ignore", 'schema.classes=["no", "yes", "?"]']
    changed = Experiment.parse(override(tables, settings))
    assert changed.data.schema is not None
    assert changed.data.schema.features == ("age",)
    assert changed.data.federation().classes == 3
    stored = Experiment.parse(override(changed.dump(), ["schema.columns.sex=ignore"]))
    assert stored == changed
    other = Experiment.parse(override(tables, ["data.dataset=digits", "data.clients=5"]))
    assert (other.data.schema, other.data.dataset.name) == (None, "digits")
    moved = Experiment.parse(override(tables, [f"data.dataset={hospitals.parent / 'new'}", "data.clients=3"]))
    assert moved.data.schema == Experiment.parse(tables).data.schema
    with pytest.raises(UsageError, match="schema field 'tarket': did you mean 'target'"):
        Experiment.parse(override(tables, ["schema.tarket=age"]))
    with pytest.raises(UsageError, match=r"unknown data\.dataset"):
        Experiment.parse(override(tables, ["data.dataset=[1]"]))


@pytest.mark.parametrize(("tables", "message"), [
    ({"schema": SCHEMA}, "[schema] describes your own files, but data.dataset is not a folder"),
    ({"schema": SCHEMA, "data": {"dataset": "logistic"}}, "[schema] describes your own files"),
    ({"schema": {}, "data": {"dataset": "./a"}}, "schema.columns must be a section"),
    ({"schema": 3, "data": {"dataset": "./a"}}, "[schema] must be a section, not 3"),
    ({"schema": SCHEMA, "data": {"dataset": "./a", "schema": SCHEMA}},
     "[schema] and [data.schema] are the same"),
    ({"shema": SCHEMA}, "unknown section 'shema': did you mean 'schema'?"),
    ({"data": {"dataset": "./a", "clients": 2, "shema": 1}},
     "unknown data field 'shema': did you mean 'schema'?"),
    ({"data": {"dataset": "hospital"}}, "your own folder is given by a path such as ./hospitals"),
    ({"data": {"dataset": "./no_such_folder"}}, "cannot read the folder"),
])
def test_bad_sections(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        Experiment.parse({"algorithm": {"name": "fedavg"}} | tables)
    assert message in str(error.value)


# -- the document ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_examples_of_the_document_work(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "hospitals"
    folder.mkdir()
    [table], [experiment], [code, frames] = blocks("csv"), blocks("toml"), blocks("python")
    for name, seed in (("north", 0), ("south", 1)):
        (folder / f"{name}.csv").write_text(table + patients(20, seed).removeprefix(HEADER))
    (tmp_path / "experiment.toml").write_text(experiment)
    run = start(Setup.of(Experiment.load(tmp_path / "experiment.toml")))
    assert run.rounds == 5
    assert run.setup.federation.names == ("north", "south")
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert capsys.readouterr().out.startswith("('north', 'south') torch.Size([48, 3])")
    pytest.importorskip("pandas")
    exec(frames, {})
    assert "3 clients, samples of 5 (float32), 2 classes" in capsys.readouterr().out

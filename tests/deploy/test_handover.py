"""Exported models: what is exported predicts what the run predicts; newcomers get what a method gives."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import importlib.util
import io
import itertools
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import descant
import flower_helpers as flower
from descant.algorithms import CGPFL, FedAvg, FedMAP, LocalTrain, pFedBreD, pFedGT, pFedMe
from descant.cli import app
from descant.cli.export import load_run
from descant.core.files import locked
from descant.core.permit import ran
from descant.core.sample import SampleFormat
from descant.core.splits import SPLITS
from descant.core.task import inputs
from descant.deploy.export import Manifest, export_model, formats, load_model, personalized, predictions
from descant.deploy.export.export import export_models, safe_names
from descant.deploy.export.manifest import read_manifest, save_model
from descant.deploy.export.network import OnRows
from descant.deploy.export.personalize import wilson
from descant.deploy.protocol import ClientInfo, RemoteFederation
from descant.errors import UsageError
from descant.experiment import run as runs
from descant.experiment.config import Experiment
from descant.experiment.run import Run, Setup
from descant.models import DNN
from helpers import batchnorm_net, quadratics, ragged

pytestmark = pytest.mark.thorough

SCHEMA = {"target": "ill", "classes": ["no", "yes"],
          "columns": {"age": "number", "sex": ["f", "m"], "lab": "number", "note": "ignore"}}
HEADER = "lab,age,sex,note,ill"


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def lines_of(name: str, rows: int) -> list[str]:
    """Rows of a hospital: some cells are empty, and ages differ between hospitals."""
    rng = random.Random(name)
    lines = []
    for _ in range(rows):
        ill = rng.random() < 0.4
        age = f"{rng.gauss(40 + len(name) * 5 + 8 * ill, 9):.1f}" if rng.random() > 0.2 else ""
        sex = rng.choice(["f", "m", "f", "m", ""])
        lines.append(f"{rng.gauss(1.5 * ill, 1):.3f},{age},{sex},x,{'yes' if ill else 'no'}")
    return lines


def write_csv(path: Path, lines: list[str], header: str = HEADER) -> Path:
    path.write_text("\n".join([header, *lines]) + "\n", encoding="utf-8")
    return path


def hospitals(folder: Path, names: tuple[str, ...] = ("a", "bb", "ccc")) -> Path:
    folder.mkdir()
    for k, name in enumerate(names):
        write_csv(folder / f"{name}.csv", lines_of(name, 30 + 6 * k))
    return folder


def run_on(folder: Path, out: Path | None, algorithm: dict[str, Any] | None = None, **sections: Any) -> Run:
    experiment = Experiment.parse({
        "data": {"dataset": f"{folder}/", "schema": SCHEMA, "scale": "client", "impute": "client",
                 **sections.get("data", {})},
        "model": sections.get("model", {"name": "mclr"}),
        "algorithm": algorithm or {"name": "ditto"},
        "train": {"rounds": 3, "backend": "loop", "local": {"steps": 3}, "batch": 8,
                  **sections.get("train", {})},
        "eval": {"every": 1}}, ran())
    return runs.start(Setup.of(experiment), out)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on CSV files; its folder is beside it."""
    base = tmp_path_factory.mktemp("kept")
    run_on(hospitals(base / "hospitals"), base / "run")
    return base


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*")) if path.is_file()}


# -- the same bits ----------------------------------------------------------------------------------------

METHODS = [FedAvg(finetune=3), pFedMe(), FedMAP(), CGPFL(K=2), LocalTrain(), pFedGT(), pFedBreD()]


# every method in one of the precisions, and one in both
@pytest.mark.parametrize(("method", "dtype"), [
    (FedAvg(finetune=3), "float64"), *zip(METHODS, itertools.cycle(["float32", "float64"]))],
    ids=lambda each: getattr(each, "name", each))
def test_what_is_exported_is_what_the_run_predicts_with(method: Any, dtype: str, tmp_path: Path) -> None:
    federation = descant.federation("digits", clients=5, unseen=1)
    run = descant.run(method, federation=federation, model=DNN(hidden=7), rounds=2, cohort=3, batch=10,
                      local={"steps": 2}, backend="vectorised", dtype=dtype)
    export_models(run, range(5), tmp_path, which="last")
    for client, name in enumerate(federation.names):
        x = run.setup.federation.x[torch.from_numpy(federation.test[client])]
        module, expected = load_model(tmp_path / name), run.personal_model(client, "last")
        assert torch.equal(module(x), expected(x))
        assert not module.training
        assert {key: t.dtype for key, t in module.state_dict().items()} == dict.fromkeys(
            expected.state_dict(), getattr(torch, dtype))
    assert read_manifest(tmp_path / federation.names[4]).newcomer
    assert not torch.equal(load_model(tmp_path / federation.names[0])(x), expected(x))  # models differ


def test_a_module_of_ones_own_with_running_statistics(tmp_path: Path) -> None:
    run = descant.run("pfedme", federation=ragged(), model=batchnorm_net(), rounds=2, batch=4, backend="loop",
                      local={"steps": 2})
    place = export_model(run, "client3", tmp_path)
    x = run.setup.federation.x[:9]
    assert torch.equal(load_model(place, batchnorm_net())(x), run.personal_model(3)(x))
    assert torch.equal(load_model(place)(x), run.personal_model(3)(x))  # its layers are in the file
    with pytest.raises(UsageError, match="does not have the tensors of this model"):
        load_model(place, nn.Linear(3, 3))


class Noisy(nn.Module):
    """A network with a random part that its state_dict does not hold."""

    def __init__(self, shape: tuple[int, ...], outputs: int, scale: float) -> None:
        super().__init__()
        self.head = nn.Linear(shape[0], outputs)
        self.register_buffer("kept", scale * torch.randn(outputs))
        self.register_buffer("drawn", torch.randn(outputs), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(x) + self.kept + self.drawn
        return out


def test_a_module_by_its_place_is_made_again(tmp_path: Path) -> None:
    folder = hospitals(tmp_path / "hospitals")
    run = run_on(folder, None, model={"name": f"{__name__}:Noisy", "scale": 2.0})
    place = export_model(run, 1, tmp_path / "models")
    x = run.setup.federation.x[:5]
    torch.randn(3)  # whatever was drawn meanwhile
    assert torch.equal(load_model(place, allow=[__name__])(x), run.personal_model(1)(x))


def test_a_module_that_cannot_be_made_again_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = hospitals(tmp_path / "hospitals")
    run = run_on(folder, None, model={"name": f"{__name__}:Noisy", "scale": 2.0})
    monkeypatch.setattr(Noisy, "__init__", lambda self, shape, outputs: nn.Module.__init__(self))
    made = export_models(run, [0, 1], tmp_path / "models")
    assert len(made.places) == 2
    [problem] = made.problems
    assert problem.startswith("a: load_model cannot rebuild this model from its name")


def test_the_model_for_all(kept: Path, tmp_path: Path) -> None:
    run = load_run(kept / "run")
    place = export_model(run, None, tmp_path)
    x = run.setup.federation.x[:5]
    assert place == tmp_path / "global"
    assert torch.equal(load_model(place)(x), run.global_model()(x))
    about = read_manifest(place)
    assert about.client is None
    assert about.preprocess is None
    with pytest.raises(UsageError, match="with every client's own constants"):
        predictions(place, kept / "hospitals" / "a.csv")
    none = run_on(kept / "hospitals", None, {"name": "cgpfl", "K": 2})
    with pytest.raises(UsageError, match="cgpfl has no global model"):
        export_model(none, None, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_the_model_for_all_has_the_constants_that_all_share(tmp_path: Path) -> None:
    folder = hospitals(tmp_path / "hospitals")
    run = run_on(folder, None, {"name": "fedavg"}, data={
        "scale": "constants", "mean": [40.0], "std": [10.0], "impute": "constants", "fill": [45.0, 0, 1, 0]})
    place = export_model(run, None, tmp_path)
    rows = held_out(run, folder, tmp_path, "bb")
    x = run.setup.federation.x[torch.from_numpy(run.setup.federation.test[1])]
    assert torch.equal(predictions(place, rows).outputs, run.global_model()(x))


def test_the_last_round_and_the_best(tmp_path: Path) -> None:
    folder = hospitals(tmp_path / "hospitals")
    solver = {"name": "sgd", "lr": 1.0}
    run = run_on(folder, None, {"name": "ditto", "solver": solver}, train={"rounds": 12})
    best = run.best_round
    assert best is not None
    assert best < 12  # else this test says nothing
    x = run.setup.federation.x[:9]
    for which, number in (("best", best), ("last", 12)):
        place = export_model(run, "a", tmp_path / which, which)
        assert (read_manifest(place).round, read_manifest(place).notes) == (number, ())
        assert torch.equal(load_model(place)(x), run.personal_model(0, which)(x))
    without = run_on(folder, None, data={"validation": 0.0})
    about = read_manifest(export_model(without, "a", tmp_path / "none"))
    assert about.round == 3
    assert about.notes == ("this is the last round: without validation data there is no best round",)


# -- predictions ------------------------------------------------------------------------------------------


def held_out(run: Run, folder: Path, to: Path, name: str) -> Path:
    """The test rows of a client, as they are in its file."""
    federation = run.setup.federation
    files = sorted(folder.glob("*.csv"))
    lines = {path.stem: path.read_text().splitlines()[1:] for path in files}
    first = sum(len(lines[path.stem]) for path in files if path.stem < name)
    chosen = federation.test[federation.names.index(name)] - first
    return write_csv(to / f"{name}-test.csv", [lines[name][k] for k in chosen])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_predictions_are_those_of_the_run_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    folder = hospitals(tmp_path / "hospitals")
    run = run_on(folder, tmp_path / "run", model={"name": "dnn", "hidden": 6}, train={"dtype": dtype})
    federation = run.setup.federation
    assert call("export", tmp_path / "run", "--client", "all", "--to", tmp_path / "models").exit_code == 0
    scores = list(csv.DictReader(io.StringIO((tmp_path / "run" / "clients.csv").read_text())))
    for client, name in enumerate(federation.names):
        rows = held_out(run, folder, tmp_path, name)
        assert any(",," in line for line in rows.read_text().splitlines())  # something is missing there
        result = call("predict", tmp_path / "models" / name, rows, "--probabilities")
        assert result.exit_code == 0
        found = list(csv.DictReader(io.StringIO(result.stdout)))
        x = federation.x[torch.from_numpy(federation.test[client])]
        with torch.no_grad():
            expected = torch.softmax(run.personal_model(client)(x), 1).numpy()
        read = np.array([[row["probability_no"], row["probability_yes"]] for row in found]).astype(
            expected.dtype)
        assert np.array_equal(read, expected)
        assert [row["predicted"] for row in found] == [("no", "yes")[k] for k in expected.argmax(1)]
        for row in found:
            assert row["probability"] == row[f"probability_{row['predicted']}"]
        [own] = [row for row in scores if row["name"] == name and int(row["round"]) == run.best_round]
        assert predictions(tmp_path / "models" / name, rows).figures()["accuracy"] == pytest.approx(
            float(own["personal_test_accuracy"]), abs=1e-7)
        assert f"{float(own['personal_test_accuracy']):.4f}" in result.stderr


def test_the_order_of_columns_and_the_target_do_not_matter(kept: Path, tmp_path: Path) -> None:
    place = export_model(load_run(kept / "run"), "a", tmp_path)
    whole = write_csv(tmp_path / "whole.csv", ["0.5,40,f,x,yes", "1,,m,,no"])
    bare = write_csv(tmp_path / "bare.csv", ["f,0.5,40", "m,1,"], "sex,lab,age")
    known, blind = predictions(place, whole), predictions(place, bare)
    assert torch.equal(known.outputs, blind.outputs)
    assert blind.y is None
    assert blind.figures() == {}
    assert "accuracy" in known.figures()
    result = call("predict", place, bare, "--out", tmp_path / "out.csv")
    assert (result.exit_code, "accuracy" in result.stdout) == (0, False)
    assert (tmp_path / "out.csv").read_text().splitlines()[0] == "predicted,probability"


def test_an_id_is_written_beside_the_predictions(kept: Path, tmp_path: Path) -> None:
    place = export_model(load_run(kept / "run"), "a", tmp_path)
    rows = write_csv(tmp_path / "rows.csv", ["p1,f,0.5,40", ",m,1,", "NA,m,2,50"], "patient,sex,lab,age")
    plain = write_csv(tmp_path / "plain.csv", ["f,0.5,40", "m,1,", "m,2,50"], "sex,lab,age")
    expected = call("predict", place, plain).stdout.splitlines()
    result = call("predict", place, rows, "--id", "patient")
    assert result.stdout.splitlines() == [f"{own},{line}" for own, line in zip(
        ["patient", "p1", "", "NA"], expected, strict=True)]
    by_age = call("predict", place, plain, "--id", "age")  # a feature may be the id as well
    assert [line.partition(",")[0] for line in by_age.stdout.splitlines()] == ["age", "40", "", "50"]
    assert "its column 'patient' is not in the schema" in call("predict", place, rows).stderr
    assert "unknown column" in call("predict", place, rows, "--id", "person").stderr
    np.savez(tmp_path / "rows.npz", x=np.array([[40, 1, 0, 0.5]]))
    assert "only tables" in call("predict", place, tmp_path / "rows.npz", "--id", "age").stderr


def test_parquet_and_npz_give_the_same(kept: Path, tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    place = export_model(load_run(kept / "run"), "a", tmp_path)
    table = write_csv(tmp_path / "rows.csv", ["0.5,40,f", "1,,m"], "lab,age,sex")
    parquet.write_table(arrow.table({"lab": [0.5, 1], "age": [40, None], "sex": ["f", "m"]}),
                        tmp_path / "rows.parquet")
    np.savez(tmp_path / "rows.npz", x=np.array([[40, 1, 0, 0.5], [np.nan, 0, 1, 1]]))
    expected = predictions(place, table).outputs
    for ending in ("parquet", "npz"):
        assert torch.equal(predictions(place, tmp_path / f"rows.{ending}").outputs, expected)


def test_more_rows_than_a_block(tmp_path: Path) -> None:
    run = descant.run("fedavg", federation=descant.federation("digits", clients=3), rounds=1, backend="loop")
    place = export_model(run, 0, tmp_path)
    x = run.setup.federation.x.numpy()
    assert len(x) > 1024
    np.savez(tmp_path / "all.npz", x=x, y=run.setup.federation.y.numpy())
    found = predictions(place, tmp_path / "all.npz")
    blocks = [run.personal_model(0)(part) for part in torch.from_numpy(x).split(1024)]
    assert torch.equal(found.outputs, torch.cat(blocks))
    right = found.outputs.argmax(1) == run.setup.federation.y
    assert found.figures()["accuracy"] == float(right.double().mean())


def test_bytes_tokens_and_real_targets(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    client = np.repeat([0, 1], 20)
    images = descant.Federation.from_arrays(rng.integers(0, 256, (40, 1, 4, 4)).astype(np.uint8),
                                            rng.integers(0, 3, 40), client)
    run = descant.run("ditto", federation=images, rounds=1, backend="loop")
    place = export_model(run, 0, tmp_path / "bytes")
    np.savez(tmp_path / "bytes.npz", x=images.x.numpy())
    expected = run.personal_model(0)(inputs(images.x, torch.float32))
    assert torch.equal(predictions(place, tmp_path / "bytes.npz").outputs, expected)
    np.savez(tmp_path / "real.npz", x=images.x.numpy() / 255)
    with pytest.raises(UsageError, match="x holds float64, but the model takes uint8"):
        predictions(place, tmp_path / "real.npz")

    words = descant.Federation.from_arrays(rng.integers(0, 9, (40, 5)), rng.integers(0, 3, 40), client)
    run = descant.run("ditto", federation=words, model="lstm", rounds=1, backend="loop", local={"steps": 1})
    place = export_model(run, 0, tmp_path / "tokens")
    np.savez(tmp_path / "tokens.npz", x=words.x.numpy())
    assert torch.equal(predictions(place, tmp_path / "tokens.npz").outputs, run.personal_model(0)(words.x))
    np.savez(tmp_path / "more.npz", x=words.x.numpy() + 3)
    with pytest.raises(UsageError, match="x holds tokens from 3 to 11, but the model knows 0 to 8"):
        predictions(place, tmp_path / "more.npz")

    x = rng.standard_normal((40, 3))
    prices = descant.Federation.from_arrays(x, x @ [1.0, 2.0, 3.0], client, scale="client")
    run = descant.run("ditto", federation=prices, rounds=1, backend="loop")
    place = export_model(run, 1, tmp_path / "prices")
    np.savez(tmp_path / "prices.npz", x=x[20:], y=prices.y.numpy()[20:])
    found = predictions(place, tmp_path / "prices.npz")
    assert torch.equal(found.outputs, run.personal_model(1)(run.setup.federation.x[20:]))
    assert found.table().splitlines()[0] == "predicted"
    assert {*found.figures()} == {"loss", "mse", "r2"}


def test_a_binary_loss_has_probabilities_of_both_classes(tmp_path: Path) -> None:
    folder = hospitals(tmp_path / "hospitals")
    run = run_on(folder, None, model={"name": "mclr", "loss": "binary_cross_entropy"})
    found = predictions(export_model(run, "a", tmp_path), folder / "a.csv")
    assert found.probabilities is not None
    one = torch.sigmoid(found.outputs).flatten()
    assert torch.equal(found.probabilities[:, 1], one)
    names = [line.split(",")[0] for line in found.table().splitlines()[1:]]
    assert names == ["yes" if share > 0.5 else "no" for share in one]


def test_outputs_for_more_classes_than_have_names_are_told(kept: Path, tmp_path: Path) -> None:
    place = export_model(load_run(kept / "run"), "a", tmp_path)
    found = predictions(place, write_csv(tmp_path / "rows.csv", ["0.5,40,f,x,yes", "1,,m,,no"]))
    one = found._replace(manifest=dataclasses.replace(found.manifest, classes=("no",)))
    for outputs, probabilities in ((found.outputs, True), (torch.tensor([[0.0, 1.0]]), False)):
        with pytest.raises(UsageError, match=r"more classes than it has names for \(no\)"):
            one._replace(outputs=outputs).table(probabilities)
    assert one._replace(outputs=found.outputs[:0]).table() == "predicted,probability\n"


def test_a_loss_of_ones_own_gives_classes_without_probabilities(tmp_path: Path) -> None:
    def own(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (outputs - nn.functional.one_hot(y, 3)).square().sum(1)

    run = descant.run("ditto", federation=ragged(), loss=own, rounds=1, backend="loop")
    place = export_model(run, 0, tmp_path)
    np.savez(tmp_path / "x.npz", x=run.setup.federation.x.numpy())
    found = predictions(place, tmp_path / "x.npz")
    assert found.table().splitlines()[0] == "predicted"
    with pytest.raises(UsageError, match="does not define probabilities"):
        found.table(probabilities=True)


# -- what does not fit ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("header", "row", "message"), [
    ("lab,agee,sex", "1,2,f", "it has no column 'age' (did you mean 'agee'?); its column 'agee' is not in"),
    ("lab,age,sex,extra", "1,2,f,3", "its column 'extra' is not in the schema"),
    ("lab,age", "1,2", "it has no column 'sex'"),
    ("lab,age,sex", "1,2,x", "line 2, column 'sex': unknown category 'x'"),
    ("lab,age,sex", "1,old,f", "line 2, column 'age': 'old' is not a number"),
    ("lab,age,sex,ill", "1,2,f,maybe", "line 2, column 'ill': unknown class 'maybe'"),
])
def test_rows_that_do_not_fit(kept: Path, tmp_path: Path, header: str, row: str, message: str) -> None:
    place = export_model(load_run(kept / "run"), "a", tmp_path)
    rows = write_csv(tmp_path / "rows.csv", [row], header)
    result = call("predict", place, rows, "--out", tmp_path / "out.csv")
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "out.csv").exists()


def test_what_is_missing_needs_a_number_to_put_there(tmp_path: Path) -> None:
    folder = tmp_path / "hospitals"
    folder.mkdir()
    for name in "ab":
        write_csv(folder / f"{name}.csv", ["1,40,f,x,yes", "2,50,m,x,no"] * 6)
    run = run_on(folder, None, data={"impute": "none"})
    place = export_model(run, "a", tmp_path)
    rows = write_csv(tmp_path / "rows.csv", ["1,40,f,x,no", "1,,f,x,no"])
    with pytest.raises(UsageError, match=r"rows.csv, line 3, column 'age': the value is missing, and this"):
        predictions(place, rows)


def test_arrays_that_do_not_fit(tmp_path: Path) -> None:
    run = descant.run("ditto", federation=descant.federation("digits", clients=3), rounds=1, backend="loop")
    place = export_model(run, 0, tmp_path)
    np.savez(tmp_path / "narrow.npz", x=np.zeros((3, 8)))
    np.savez(tmp_path / "label.npz", x=np.zeros((3, 64)), y=np.array([0, 1, 12]))
    np.savez(tmp_path / "hole.npz", x=np.full((3, 64), np.nan))
    for name, message in (("narrow.npz", r"rows of shape \(8,\), but the model takes \(64,\)"),
                          ("label.npz", "y holds 12, but the model knows the classes 0 to 9"),
                          ("hole.npz", r"x\[0, 0\] is missing, and this model does not impute"),
                          ("none.npz", "there is no file"), ("rows.txt", "must end in one of .csv")):
        with pytest.raises(UsageError, match=message):
            predictions(place, tmp_path / name)
    table = write_csv(tmp_path / "rows.csv", ["1"], "a")
    with pytest.raises(UsageError, match=r"has no schema .*: give an NPZ file with x of shape \(rows, 64\)"):
        predictions(place, table)


def test_damaged_models_are_refused(kept: Path, tmp_path: Path) -> None:
    rows = kept / "hospitals" / "a.csv"
    run = load_run(kept / "run")
    one, other = (export_model(run, name, tmp_path) for name in ("a", "bb"))

    def refused(message: str, code: int = 1) -> None:
        result = call("predict", one, rows)
        assert (result.exit_code, result.stdout) == (code, "")
        assert message in result.stderr

    whole = contents(one)
    tensors = (one / "model.safetensors").read_bytes()
    (one / "model.safetensors").write_bytes(tensors[:-1] + bytes([tensors[-1] ^ 1]))
    refused("another hash")
    shutil.copy(other / "model.safetensors", one / "model.safetensors")
    refused("another hash")
    (one / "model.safetensors").unlink()
    refused("model.safetensors is missing")
    (one / "model.safetensors").write_bytes(tensors)
    assert contents(one) == whole
    (one / "model.json").write_text((one / "model.json").read_text().replace('"round": ', '"round": 1'))
    refused("its checksum does not match")
    about = json.loads((one / "model.json").read_text())
    del about["check"]  # as older versions wrote it
    for change, message in (({"format": 99}, "its format is 99"), ({"round": "three"}, "round is 'three'"),
                            ({"dtype": "float33"}, "is not a type of numbers"),
                            ({"dtype": "int32"}, "a model cannot be of int32"),
                            ({"files": {"model.safetensors": 3}}, "another hash"),
                            ({"schema": {}}, "not a schema"),
                            ({"preprocess": {"fill": "x"}}, "preprocess.fill")):
        (one / "model.json").write_text(json.dumps(about | change))
        refused(message)
    (one / "model.json").write_text(json.dumps({key: about[key] for key in about if key != "loss"}))
    refused("it has no 'loss'")
    (one / "model.json").write_text("{")
    refused("is damaged or not a model's manifest")
    (one / "model.json").unlink()
    refused("holds no model", 2)
    assert f"name one, such as {tmp_path / 'bb'}" in call("predict", tmp_path, rows).stderr


def test_a_model_is_named_by_its_directory_or_a_file(kept: Path, tmp_path: Path) -> None:
    place = export_model(load_run(kept / "run"), "a", tmp_path)
    rows = kept / "hospitals" / "a.csv"
    expected = call("predict", place, rows).stdout
    assert expected
    for name in ("model.json", "model.safetensors"):
        assert call("predict", place / name, rows).stdout == expected
    assert call("predict", place, rows, "--out", rows).exit_code == 2
    assert rows.read_text().startswith(HEADER)


# -- the command ------------------------------------------------------------------------------------------


def test_export_leaves_the_run_alone_and_overwrites_nothing(kept: Path, tmp_path: Path) -> None:
    before = contents(kept)
    to = tmp_path / "models"
    result = call("export", kept / "run", "--client", "bb", "--client", "0", "--to", to)
    assert (result.exit_code, result.stdout) == (0, f"2 models in {to}\n")
    made = contents(to)
    assert {*made} == {f"{name}/model.{ending}" for name in ("a", "bb") for ending in ("json", "safetensors")}
    result = call("export", kept / "run", "--client", "all", "--to", to)
    assert result.exit_code == 2
    assert "exists already: choose another --to" in result.stderr
    assert contents(to) == made
    assert call("export", kept / "run", "--client", "ccc", "--global", "--to", to).exit_code == 0
    assert {path.name for path in to.iterdir()} == {"a", "bb", "ccc", "global"}
    assert contents(kept) == before


def test_what_is_asked_for_must_be_there(kept: Path, tmp_path: Path) -> None:
    to = tmp_path / "models"
    for arguments, message in (
            ((kept / "run", "--to", to), "use --client NAME, --client all, or --global"),
            ((kept / "run", "--client", "cc", "--to", to), "unknown client 'cc': did you mean 'ccc'?"),
            ((kept / "run", "--client", "7", "--to", to), "client 7 does not exist: there are clients 0 to"),
            ((kept, "--client", "a", "--to", to), "holds no run: it has no config.toml"),
            ((kept / "none", "--client", "a", "--to", to), "there is no directory"),
            ((kept / "run", "--client", "a", "--to", kept / "hospitals" / "a.csv"), "cannot write to")):
        result = call("export", *arguments)
        assert result.exit_code == 2, message
        assert message in result.stderr
    assert not to.exists()


def test_a_comparison_names_its_runs(kept: Path, tmp_path: Path) -> None:
    inner = tmp_path / "runs" / "ditto" / "seed-0"
    shutil.copytree(kept / "run", inner)
    (tmp_path / "comparison.json").write_text("{}")
    result = call("export", tmp_path, "--client", "a", "--to", tmp_path / "models")
    assert f"name one of its runs, such as {inner}" in result.stderr
    assert call("export", inner, "--client", "a", "--to", tmp_path / "models").exit_code == 0


def test_a_failed_write_leaves_nothing(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from descant.deploy.export import manifest

    def full(path: Path, data: bytes, *, private: bool = False) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(manifest, "write_atomic", full)
    result = call("export", kept / "run", "--client", "a", "--to", tmp_path / "models")
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr
    assert list((tmp_path / "models").iterdir()) == []


def test_names_that_are_no_names_of_directories(tmp_path: Path) -> None:
    names = ["../../etc", "..", ".", "a/b", "a_b", "A", "a", "global", "x" * 300, "Malmö", "a b", ".hidden"]
    safe = safe_names(names)
    assert len({place.casefold() for place in safe.values()}) == len(names)
    for name, place in safe.items():
        assert place not in (".", "..", "global", "")
        assert "/" not in place
        assert not place.startswith(".")
        assert len(place.encode()) < 250
        assert safe_names(names[::-1])[name] == place  # whatever else is exported
    assert (safe["Malmö"], safe["a_b"]) == ("Malmö", "a_b")
    clients = ["../../up", "a/b", "a_b", "global"]
    x = np.random.default_rng(0).standard_normal((40, 3))
    y = (x[:, 0] > 0).astype(int)
    federation = descant.Federation.from_arrays(x, y, np.repeat(range(4), 10), names=clients)
    run = descant.run("fedavg", federation=federation, rounds=1, backend="loop")
    made = export_models(run, range(4), tmp_path / "deep" / "models", shared=True)
    assert {path.parent for path in made.places} == {tmp_path / "deep" / "models"}
    assert [read_manifest(path).client for path in made.places] == [*clients, None]
    assert {path.name for path in tmp_path.rglob("model.json")} == {"model.json"}
    assert len([*tmp_path.rglob("model.json")]) == 5


def test_what_is_no_network_cannot_be_exported(tmp_path: Path) -> None:
    run = descant.run("fedavg", federation=quadratics(), model="quadratic", rounds=1, backend="loop",
                      dtype="float64")
    with pytest.raises(UsageError, match="a function of a vector, not a network"):
        export_model(run, 0, tmp_path / "models")

    class Mixed(FedAvg):
        name = "mixed"

        def predict(self, task: Any, personal: Any, x: torch.Tensor) -> torch.Tensor:
            return task.predict(personal, x) / 2

    run = descant.run(Mixed(), federation=ragged(), rounds=1, backend="loop")
    with pytest.raises(UsageError, match="a client of mixed predicts with more than one module"):
        export_model(run, 0, tmp_path / "models")
    assert not (tmp_path / "models").exists()


def test_parts_are_told_from_a_module(kept: Path, tmp_path: Path) -> None:
    """A client of a real federation keeps what its method predicts with, also where that is no module."""
    run = load_run(kept / "run")
    about = Manifest.of(run.setup, 0, name="a", newcomer=False, number=3, which="best", tensors="parts")
    save_model(tmp_path, {"experts.theta": torch.zeros(2, 3)}, about)
    with pytest.raises(UsageError, match="this is not one module: ditto predicts with several parts"):
        load_model(tmp_path)


# -- files without descant ---------------------------------------------------------------------------------


def raw_rows() -> torch.Tensor:
    """Rows as the schema encodes them, with what is missing."""
    rng = torch.Generator().manual_seed(0)
    rows = torch.randn(7, 4, generator=rng) * 10 + 40
    rows[:, 1], rows[:, 2] = 1.0, 0.0
    rows[2, 0] = rows[4, 3] = torch.nan
    rows[5, 1:3] = torch.nan
    return rows


@pytest.mark.slow
def test_a_file_for_pytorch_takes_rows_as_they_are(kept: Path, tmp_path: Path) -> None:
    result = call("export", kept / "run", "--client", "bb", "--to", tmp_path, "--torch-export")
    assert result.exit_code == 0, result.stderr
    rows, place = raw_rows(), tmp_path / "bb"
    whole = load_model(place, on_rows=True)
    program = torch.export.load(str(place / "model.pt2")).module()
    for n in (1, 7):
        with torch.no_grad():
            assert (program(rows[:n]) - whole(rows[:n])).abs().max() <= 1e-6
    files = read_manifest(place).files
    assert {*files} == {"model.safetensors", "model.pt2"}
    for name in files:
        assert files[name]["sha256"] == hashlib.sha256((place / name).read_bytes()).hexdigest()
    # and the rows of the run's own file are treated as the run treated them
    found, run = predictions(place, kept / "hospitals" / "bb.csv"), load_run(kept / "run")
    assert torch.equal(found.outputs, outputs_of_run(run, 1))
    with torch.no_grad():
        rows, _ = found.manifest.schema.read(kept / "hospitals" / "bb.csv")
        assert (program(torch.from_numpy(rows)) - found.outputs).abs().max() <= 1e-6


@pytest.mark.slow
def test_a_file_for_other_programs_takes_rows_as_they_are(kept: Path, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    result = call("export", kept / "run", "--client", "bb", "--to", tmp_path, "--onnx")
    assert result.exit_code == 0, result.stderr
    rows, place = raw_rows(), tmp_path / "bb"
    session = runtime.InferenceSession(str(place / "model.onnx"))
    for n in (1, 7):
        with torch.no_grad():
            expected = load_model(place, on_rows=True)(rows[:n])
        [outputs] = session.run(["outputs"], {"rows": rows[:n].numpy()})
        assert np.abs(outputs - expected.numpy()).max() <= 1e-5
    assert 0 <= read_manifest(place).files["model.onnx"]["difference"] <= 1e-5


def outputs_of_run(run: Run, client: int) -> torch.Tensor:
    federation = run.setup.federation
    rows = np.sort(np.concatenate([federation.split(split)[client] for split in SPLITS]))
    with torch.no_grad():
        return run.personal_model(client)(federation.x[torch.from_numpy(rows)])


@pytest.mark.slow
@pytest.mark.parametrize("make", [
    lambda: (descant.federation("digits", clients=3, scale="client"), "dnn"),
    lambda: (ragged(shape=(1, 28, 28)), "cnn2"),
    lambda: (ragged(), batchnorm_net()),
    lambda: (descant.Federation.from_arrays(
        np.random.default_rng(0).integers(0, 256, (40, 1, 28, 28)).astype(np.uint8), np.arange(40) % 3,
        np.arange(40) % 2), "cnn2"),
    lambda: (descant.Federation.from_arrays(
        np.random.default_rng(0).standard_normal((40, 3, 8)), np.arange(40) % 3, np.arange(40) % 2,
        scale="client"), "mclr"),
], ids=["dnn", "cnn2", "batchnorm", "bytes", "series"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_files_of_all_kinds(make: Any, dtype: str, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    federation, model = make()
    run = descant.run("ditto", federation=federation, model=model, rounds=1, batch=4, backend="loop",
                      dtype=dtype)
    place = export_model(run, 0, tmp_path, formats=["pt2", "onnx"])
    about = read_manifest(place)
    module = run.personal_model(0)
    whole = OnRows(module, about).eval()
    rows = whole.inverse(run.setup.federation.x[:7]).to(about.input.torch_dtype())
    program = torch.export.load(str(place / "model.pt2")).module()
    session = runtime.InferenceSession(str(place / "model.onnx"))
    for n in (1, 7):
        with torch.no_grad():
            expected = whole(rows[:n])
            assert (program(rows[:n]) - expected).abs().max() <= 1e-6
        [outputs] = session.run(None, {"rows": rows[:n].numpy()})
        assert np.abs(outputs - expected.numpy()).max() <= 1e-5


def test_onnx_that_is_not_installed(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnx" else found(name))
    result = call("export", kept / "run", "--client", "a", "--to", tmp_path / "models", "--onnx")
    assert result.exit_code == 2
    assert "pip install 'descant[onnx]'" in result.stderr
    assert not (tmp_path / "models").exists()


def test_a_converter_that_fails_costs_only_its_file(
        kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such operator\nand a long explanation")

    monkeypatch.setattr(torch.export, "export", fails)
    result = call("export", kept / "run", "--client", "all", "--to", tmp_path, "--torch-export")
    assert result.exit_code == 1
    for name in ("a", "bb", "ccc"):
        assert f"error: {name}: model.pt2 could not be written: no such operator\n" in result.stderr
        assert {path.name for path in (tmp_path / name).iterdir()} == {"model.json", "model.safetensors"}


def test_a_file_with_other_outputs_is_not_written(
        kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_traced", lambda network, rows: network)
    monkeypatch.setitem(formats._WRITERS, "pt2",
                        lambda network: (b"wrong", lambda rows: network(rows) + 1e-3))
    made = export_models(load_run(kept / "run"), [0], tmp_path, formats=["pt2"])
    assert made.problems == [
        "a: model.pt2 could not be written: its outputs differ from the model's by 0.001"]
    assert not (tmp_path / "a" / "model.pt2").exists()


# -- newcomers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [
    {"name": "fedavg", "finetune": 2}, {"name": "cgpfl", "K": 2},
    *(pytest.param({"name": name}, marks=pytest.mark.slow)
      for name in ("pfedme", "pfedgt", "fedmap", "localtrain", "ditto", "scaffold"))],
    ids=lambda method: method["name"])
def test_a_newcomer_gets_what_the_simulator_gives_an_unseen_client(
        method: dict[str, Any], tmp_path: Path) -> None:
    everybody = hospitals(tmp_path / "all", ("a", "bb", "ccc", "zz"))
    others = tmp_path / "others"
    shutil.copytree(everybody, others)
    newcomer = (others / "zz.csv").rename(tmp_path / "zz.csv")
    seed = next(seed for seed in range(99)  # which leaves out the last one, so that numbers stay
                if descant.federation(f"{everybody}/", schema=SCHEMA, impute="client", unseen=1, seed=seed
                                      ).names[-1] == "zz")
    expected = run_on(everybody, None, method, data={"unseen": 1, "seed": seed})
    run_on(others, tmp_path / "run", method, data={"seed": seed})
    before = contents(tmp_path / "run")
    run = load_run(tmp_path / "run")
    made = personalized(run, newcomer)
    assert made.name == "zz"
    theirs = expected.personal_model(3).state_dict()
    for name, tensor in made.module.state_dict().items():
        assert torch.equal(tensor, theirs[name])
    row = next(row for row in expected.history if row["round"] == expected.best_round)
    for who, key in (("personal", "personal"), ("shared", "global")):
        if who in made.figures:
            assert made.figures[who] == pytest.approx(
                {name: spread["mean"] for name, spread in row["unseen"][key]["test"].items()}, abs=1e-6)
    assert ("shared" in made.figures) == ("global" in row)
    assert made.sizes == {split: int(expected.setup.federation.split(split).sizes[3])
                          for split in ("train", "validation", "test")}
    result = call("personalize", tmp_path / "run", "--data", newcomer, "--to", tmp_path / "models")
    assert result.exit_code == 0, result.stderr
    assert "alone" in result.stdout
    assert "95 % confidence interval of accuracy" in result.stdout
    assert contents(tmp_path / "run") == before
    # the model that was written predicts the newcomer's rows as they are in its file
    federation = expected.setup.federation
    rows = held_out(expected, everybody, tmp_path, "zz")
    x = federation.x[torch.from_numpy(federation.test[3])]
    assert torch.equal(predictions(tmp_path / "models" / "zz", rows).outputs, expected.personal_model(3)(x))
    assert read_manifest(tmp_path / "models" / "zz").newcomer


def test_a_newcomer_with_arrays(tmp_path: Path) -> None:
    federation = descant.federation("digits", clients=4)
    descant.run("ditto", federation=federation, rounds=2, backend="loop", out=tmp_path / "run")
    np.savez(tmp_path / "new.npz", x=federation.x.numpy()[:40], y=federation.y.numpy()[:40])
    result = call("personalize", tmp_path / "run", "--data", tmp_path / "new.npz", "--name", "../new", "--to",
                  tmp_path / "models")
    assert result.exit_code == 0, result.stderr
    [place] = (tmp_path / "models").iterdir()
    assert read_manifest(place).client == "../new"
    assert predictions(place, tmp_path / "new.npz").figures()["accuracy"] > 0


def test_a_newcomer_that_knows_fewer_words(tmp_path: Path) -> None:
    """The network is the one of the run, and not one for the newcomer's own vocabulary."""
    rng, folder = np.random.default_rng(0), tmp_path / "texts"
    folder.mkdir()
    for name in "ab":
        np.savez(folder / f"{name}.npz", x=rng.integers(0, 9, (20, 5)), y=rng.integers(0, 3, 20))
    np.savez(tmp_path / "new.npz", x=rng.integers(0, 4, (20, 5)), y=rng.integers(0, 2, 20))
    experiment = Experiment.parse({
        "data": {"dataset": f"{folder}/"}, "model": {"name": "lstm"}, "algorithm": {"name": "ditto"},
        "train": {"rounds": 1, "backend": "loop", "local": {"steps": 1}}})
    run = runs.start(Setup.of(experiment), tmp_path / "run")
    result = call("personalize", tmp_path / "run", "--data", tmp_path / "new.npz", "--to", tmp_path)
    assert result.exit_code == 0, result.stderr
    whole, facts = read_manifest(tmp_path / "new"), run.setup.federation
    assert (whole.input.tokens, whole.outputs) == (9, 3)
    assert load_model(tmp_path / "new")(facts.x[:4]).shape == (4, 3)


def test_newcomers_that_do_not_fit(kept: Path, tmp_path: Path) -> None:
    before = contents(kept)

    def refused(data: Path, message: str, *options: object) -> None:
        result = call("personalize", kept / "run", "--data", data, "--to", tmp_path / "models", *options)
        assert result.exit_code == 2, result.stderr
        assert message in result.stderr
        assert not (tmp_path / "models").exists()

    good = write_csv(tmp_path / "good.csv", lines_of("good", 20))
    refused(tmp_path / "none.csv", "there is no such file")
    refused(tmp_path / "rows.txt", "must end in one of .csv")
    refused(write_csv(tmp_path / "one.csv", ["1,2,f,x,no"]), "has 1 rows: a client needs at least 2")
    refused(write_csv(tmp_path / "blind.csv", ["1,2,f"] * 9, "lab,age,sex"), "it has no column 'ill'")
    refused(good, "'a' is a client of this run, whose model", "--name", "a")
    refused(good, "use printable characters", "--name", "a\nb")
    np.savez(tmp_path / "narrow.npz", x=np.zeros((9, 3)), y=np.zeros(9, int))
    refused(tmp_path / "narrow.npz", "the schema has 4 features")
    assert contents(kept) == before
    descant.run("ditto", federation=descant.federation("digits", clients=3), rounds=1, backend="loop",
                out=tmp_path / "run")
    np.savez(tmp_path / "class.npz", x=np.zeros((9, 64), np.float32), y=np.arange(9) + 5)
    np.savez(tmp_path / "shape.npz", x=np.zeros((9, 8, 8), np.float32), y=np.zeros(9, int))
    for data, message in ((tmp_path / "class.npz", "has the class 13, but the run knows 0 to 9"),
                          (tmp_path / "shape.npz", "its shape is (8, 8), that of the others (64,)"),
                          (good, "have no schema")):
        result = call("personalize", tmp_path / "run", "--data", data)
        assert result.exit_code == 2
        assert message in result.stderr


def test_the_interval_of_wilson() -> None:
    """As computed by hand for 8 of 10, and where the plain interval would be a point."""
    assert wilson(0.8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    low, high = wilson(1.0, 20)
    assert (low, high) == (pytest.approx(0.8389, abs=1e-4), pytest.approx(1.0))


# -- remote clients ------------------------------------------------------------------------------------


def test_a_remote_federation(tmp_path: Path) -> None:
    """The server's run has the model for all, each client's directory its own; newcomers can be served."""
    folder = hospitals(tmp_path / "hospitals")
    here = run_on(folder, None, train={"dtype": "float64"})
    sections = here.setup.tables()
    sections["data"]["dataset"] = "nodes"
    del sections["data"]["clients"]
    files = {path.stem: str(path) for path in sorted(folder.iterdir())}
    out = tmp_path / "server"
    transport = flower.MemoryServer(flower.make_clients(files, tmp_path))
    flower.federate(Experiment.parse(sections), transport, out, alone=False)
    before = contents(out)
    for place in (out, out / "run"):
        result = call("export", place, "--client", "a", "--to", tmp_path / "models")
        assert result.exit_code == 2
        assert "are on the clients' machines" in result.stderr
    assert call("export", out, "--global", "--to", tmp_path / "models").exit_code == 0
    x = here.setup.federation.x[:5]
    assert torch.allclose(load_model(tmp_path / "models" / "global")(x), here.global_model()(x), atol=1e-10)
    assert read_manifest(tmp_path / "models" / "global").preprocess is None
    # a client's own directory is a model's, and its rows are treated as in the simulation
    rows = held_out(here, folder, tmp_path, "bb")
    x = here.setup.federation.x[torch.from_numpy(here.setup.federation.test[1])]
    found = predictions(tmp_path / "bb", rows).outputs
    assert torch.allclose(found, here.personal_model(1)(x), atol=1e-10)
    newcomer = write_csv(tmp_path / "zz.csv", lines_of("zz", 30))
    away, near = personalized(load_run(out), newcomer), personalized(here, newcomer)
    for name, tensor in near.module.state_dict().items():
        assert torch.allclose(tensor, away.module.state_dict()[name], atol=1e-10)
    assert contents(out) == before


@pytest.mark.parametrize("labels", [(1, 2), (0, 2)])
@pytest.mark.parametrize("where", ["here", "remote"])
def test_predictions_show_the_users_own_labels(labels: tuple[int, int], where: str, tmp_path: Path) -> None:
    """Whoever trained the model, and for newcomers: never a class number that no row has."""
    folder, rng = tmp_path / "sites", np.random.default_rng(0)
    folder.mkdir()
    for name in ("a", "b", "new"):
        y = np.resize(labels, 30)
        x = rng.standard_normal((30, 3)) + 3.0 * y[:, None]
        np.savez((tmp_path if name == "new" else folder) / f"{name}.npz", x=x, y=y)
    sections: dict[str, Any] = {
        "data": {"dataset": f"{folder}/" if where == "here" else "nodes", "scale": "client"},
        "model": {"name": "mclr"}, "algorithm": {"name": "fedavg"},
        "train": {"rounds": 5, "backend": "loop", "local": {"steps": 20}}}
    if where == "here":
        assert runs.start(Setup.of(Experiment.parse(sections)), tmp_path / "run").rounds == 5
        assert call("export", tmp_path / "run", "--client", "a", "--to", tmp_path).exit_code == 0
    else:
        files = {name: str(folder / f"{name}.npz") for name in ("a", "b")}
        transport = flower.MemoryServer(flower.make_clients(files, tmp_path))
        flower.federate(Experiment.parse(sections), transport, tmp_path / "run", alone=False)
    made = call("personalize", tmp_path / "run", "--data", tmp_path / "new.npz", "--to", tmp_path)
    assert made.exit_code == 0, made.stderr
    for model in ("a", "new"):
        found = call("predict", tmp_path / model, tmp_path / "new.npz")
        assert found.exit_code == 0, found.stderr
        shown = [int(line.split(",")[0]) for line in found.stdout.splitlines()[1:]]
        assert {*shown} == {*labels}
        assert np.mean(np.array(shown) == np.resize(labels, 30)) > 0.8


def test_constants_of_the_experiment_are_known_where_the_rows_are_not(kept: Path) -> None:
    setup = load_run(kept / "run").setup
    frame = RemoteFederation.of(SampleFormat((4,), "real", (), "int64", 2, None), [ClientInfo("a", 3, 1, 1)],
                                torch.float32)
    constants = {"scale": "constants", "mean": [1.0], "std": [2.0], "impute": "none"}
    for changes, found in ((constants, {"mean": [1.0] * 4, "std": [2.0] * 4}),
                           ({"scale": "none", "impute": "none"}, {}), ({"scale": "client"}, None)):
        origin = setup.origin | {"data": setup.origin["data"] | {"dataset": "nodes"} | changes}
        away = dataclasses.replace(setup, federation=frame, origin=origin)
        about = Manifest.of(away, None, name=None, newcomer=False, number=1, which="best")
        assert about.preprocess == found


def test_a_run_that_goes_on_is_left_alone(kept: Path, tmp_path: Path) -> None:
    shutil.copytree(kept / "run", tmp_path / "run")
    with locked(tmp_path / "run"):
        result = call("export", tmp_path / "run", "--client", "a", "--to", tmp_path / "models")
    assert result.exit_code == 1
    assert "another process is working in" in result.stderr
    assert not (tmp_path / "models").exists()


def test_an_unfinished_run_says_so(kept: Path, tmp_path: Path) -> None:
    shutil.copytree(kept / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    result = call("export", tmp_path / "run", "--client", "a", "--to", tmp_path / "models")
    assert result.exit_code == 1
    assert "has no checkpoint yet: run `descant resume" in result.stderr


# -- the document ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_document_is_true(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its manifest has the fields of a real one, and its programs run."""
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    shown = json.loads(re.findall(r"```json\n(.*?)```", text, re.DOTALL)[0])
    schema = {"target": "disease", "classes": ["no", "yes"], "columns": dict(shown["schema"]["columns"])}
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "hospitals"
    folder.mkdir()
    for name in ("north", "south"):
        write_csv(folder / f"{name}.csv", lines_of(name, 40), "lab,age,sex,note,disease")
        path = folder / f"{name}.csv"
        path.write_text(path.read_text().replace(",f,", ",female,").replace(",m,", ",male,"))
    run_on(folder, tmp_path / "run", data={"schema": schema})
    done = call("export", "run", "--client", "north", "--to", "models", "--onnx", "--torch-export")
    assert done.exit_code == 0, done.stderr
    about = json.loads((tmp_path / "models" / "north" / "model.json").read_text())
    del about["files"]["model.pt2"]

    def keys(value: Any) -> Any:
        return {k: keys(v) for k, v in value.items()} if isinstance(value, dict) else type(value)

    assert keys(shown) == keys(about)
    assert shown["schema"] == about["schema"]
    for program in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(program, {})
    assert "models/3" in capsys.readouterr().out
    pytest.importorskip("onnxruntime")
    for start in ("program = torch", "import numpy"):
        scope: dict[str, Any] = {"torch": torch}
        exec(re.search(rf"```\n({start}.*?)```", text, re.DOTALL)[1], scope)  # type: ignore[index]
        outputs = scope["logits"]
        rows = torch.tensor([[61.0, 0.0, 1.0, 2.3], [torch.nan, 1.0, 0.0, 0.1]])
        expected = load_model("models/north", on_rows=True)(rows).detach()
        assert torch.allclose(torch.as_tensor(outputs), expected, atol=1e-5)

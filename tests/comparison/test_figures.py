"""The full figures of a finished run: exact, and the same as those that the run itself wrote."""

from __future__ import annotations

import csv
import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as known
from torch import nn

import descant
from descant import DescantError, UsageError
from descant.algorithms import ALGORITHMS, Ditto, FedAvg, LocalTrain, pFedMe
from descant.comparison import finished as files
from descant.comparison import measure
from descant.core import scoring
from descant.core.federation import Federation
from descant.core.metric import METRICS
from descant.core.splits import Table
from descant.deploy import protocol
from descant.engine.settings import Eval
from descant.experiment.config import DEMO, Experiment
from helpers import on_any_model, quadratics, ragged

DIGITS = descant.federation("digits", partition="dirichlet", clients=8, alpha=0.3, unseen=2)
SMALL: dict[str, Any] = {"rounds": 4, "cohort": 3, "local": {"steps": 2}, "eval": {"every": 1},
                         "backend": "vectorised"}


def run(method: Any = None, **settings: Any) -> Any:
    return descant.run(method or Ditto(), **({"federation": DIGITS} | SMALL | settings))


# -- of one client's outputs, against scikit-learn ------------------------------------------------------


def softmax(logits: np.ndarray) -> np.ndarray:
    p = np.exp(logits - logits.max(1, keepdims=True))
    return np.asarray(p / p.sum(1, keepdims=True))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("n", [3, 7, 60, 400])
@pytest.mark.parametrize("form", ["one", "column", "two"])
def test_two_classes(form: str, n: int, ties: bool) -> None:
    for seed in range(5):
        rng = np.random.default_rng([seed, n])
        y = rng.integers(2, size=n)
        y[:2] = 0, 1
        margin = np.round(rng.normal(y, 1.5)) if ties else rng.normal(y, 1.5)
        other = rng.normal(size=n)
        outputs = {"one": margin, "column": margin[:, None],
                   "two": np.stack([other, other + margin], 1)}[form]
        found = scoring.classification(outputs, y, 2)
        predicted = margin > 0
        if form == "two" and ties:
            predicted = outputs.argmax(1)
        assert found["accuracy"] == known.accuracy_score(y, predicted)
        assert found["balanced_accuracy"] == pytest.approx(known.balanced_accuracy_score(y, predicted))
        assert found["sensitivity"] == pytest.approx(known.recall_score(y, predicted, pos_label=1))
        assert found["specificity"] == pytest.approx(known.recall_score(y, predicted, pos_label=0))
        scores = margin if form != "two" else outputs[:, 1] - outputs[:, 0]
        assert found["auroc"] == pytest.approx(known.roc_auc_score(y, scores), abs=1e-14)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("n", [5, 30, 300])
def test_many_classes(n: int, ties: bool) -> None:
    for seed in range(5):
        rng = np.random.default_rng([seed, n])
        y = rng.integers(5, size=n)
        y[:5] = range(5)
        logits = rng.normal(size=(n, 5)) + 2 * np.eye(5)[y]
        if ties:
            logits = logits[rng.integers(n // 2, size=n)]
        found = scoring.classification(logits, y, 5)
        p = softmax(logits)
        expected = known.roc_auc_score(y, p, multi_class="ovr", average="macro")
        assert found["auroc"] == pytest.approx(expected, abs=1e-14)
        assert found["accuracy"] == known.accuracy_score(y, p.argmax(1))
        assert found["balanced_accuracy"] == pytest.approx(known.balanced_accuracy_score(y, p.argmax(1)))
        assert "sensitivity" not in found


def test_the_mean_is_over_the_classes_that_occur() -> None:
    rng = np.random.default_rng(0)
    y, logits = rng.choice([1, 4, 6], size=50), rng.normal(size=(50, 9))
    expected = np.mean([known.roc_auc_score(y == c, softmax(logits)[:, c]) for c in (1, 4, 6)])
    found = scoring.classification(logits, y, 9)
    assert found["auroc"] == pytest.approx(expected, abs=1e-14)
    recalls = known.recall_score(y, logits.argmax(1), labels=[1, 4, 6], average="macro")
    assert found["balanced_accuracy"] == pytest.approx(recalls)


def test_ties_count_half() -> None:
    positive = np.array([True, False, False, True])
    assert scoring.binary_auroc(np.array([1.0, 1.0, 0.0, 2.0]), positive) == 3.5 / 4
    assert scoring.binary_auroc(np.zeros(5), np.arange(5) < 2) == 0.5


@pytest.mark.parametrize(("y", "expected"), [
    ([1, 1, 1], {"accuracy": 2 / 3, "balanced_accuracy": 2 / 3, "sensitivity": 2 / 3}),
    ([0, 0, 0], {"accuracy": 1 / 3, "balanced_accuracy": 1 / 3, "specificity": 1 / 3}),
])
def test_what_is_not_defined_is_nan(y: list[int], expected: dict[str, float]) -> None:
    found = scoring.classification(np.array([2.0, 1.0, -1.0]), np.array(y), 2)
    del found["calibration_error"]
    assert {name: value for name, value in found.items() if not np.isnan(value)} == pytest.approx(expected)


@pytest.mark.parametrize("shape", [(0,), (0, 2), (0, 4)])
def test_nothing_is_measured_of_no_rows(shape: tuple[int, ...]) -> None:
    found = scoring.classification(np.zeros(shape), np.zeros(0, np.int64), max(shape[-1], 2))
    assert np.isnan(list(found.values())).all()


def test_rows_with_a_probability_of_one_are_told_apart() -> None:
    """In float64, exp(-50) added to 1 is gone, and exp(-800) is zero."""
    y = np.array([0, 1, 0, 1, 2])
    for scale in (1.0, 1000.0):
        logits = scale * np.array([[1, 50, 0], [1, 80, 0], [1, 60, 0], [1, 90, 0], [0, 70, 0.5]])
        assert scoring.binary_auroc(scoring.Odds.of(logits).of_class(logits, 1), y == 1) == 1.0
    logit = np.array([40.0, 50, 60])
    assert scoring.classification(logit, np.array([0, 1, 1]), 2)["auroc"] == 1.0


def test_odds_are_those_of_the_probabilities() -> None:
    logits = np.random.default_rng(0).normal(scale=3, size=(100, 6)).astype(np.float32)
    p, odds = softmax(logits.astype(np.float64)), scoring.Odds.of(logits)
    for c in range(6):
        np.testing.assert_allclose(odds.of_class(logits, c), np.log(p[:, c] / (1 - p[:, c])), rtol=1e-9)
    np.testing.assert_allclose(odds.confidence, p.max(1), rtol=1e-12)


def test_the_calibration_error_by_hand() -> None:
    """Three rows at 0.9, of which two are right, and one at 0.6 that is wrong: (3 |0.9 - 2/3| + 0.6) / 4."""
    p = np.array([[0.9, 0.1], [0.1, 0.9], [0.9, 0.1], [0.4, 0.6]])
    found = scoring.classification(np.log(p), np.array([0, 1, 1, 0]), 2)
    assert found["calibration_error"] == pytest.approx((3 * (0.9 - 2 / 3) + 0.6) / 4)
    one = scoring.classification(np.log(p[:, 1] / p[:, 0]), np.array([0, 1, 1, 0]), 2)
    assert one["calibration_error"] == pytest.approx(found["calibration_error"])


def test_bins_end_with_their_upper_edge() -> None:
    at_edge = scoring.calibration_error(np.array([1 / 3, 1 / 3 - 0.01]), np.array([True, False]))
    assert at_edge == pytest.approx(abs(2 / 3 - 0.01 - 1) / 2)  # one bin
    above = scoring.calibration_error(np.array([1 / 3 + 0.01, 1 / 3]), np.array([True, False]))
    assert above == pytest.approx((2 / 3 - 0.01 + 1 / 3) / 2)  # two
    assert scoring.calibration_error(np.array([1.0, 0.0]), np.array([True, False])) == 0


def test_positions_of_sequences_are_rows() -> None:
    rng = np.random.default_rng(1)
    y, outputs = rng.integers(3, size=(4, 6)), rng.normal(size=(4, 3, 6))
    flat = outputs.transpose(0, 2, 1).reshape(24, 3)
    assert scoring.classification(outputs, y, 3) == scoring.classification(flat, y.reshape(-1), 3)


def test_outputs_that_are_not_finite_are_not_ranked() -> None:
    found = scoring.classification(np.array([[0, np.nan, 1], [2, 0, 1.0]]), np.array([1, 0]), 3)
    assert np.isnan(found["auroc"])
    assert np.isnan(found["calibration_error"])
    assert found["accuracy"] == 1.0  # as the tallies have it: NaN is the largest
    one = scoring.classification(np.array([np.nan, np.inf, -np.inf]), np.array([0, 1, 0]), 2)
    assert one["accuracy"] == 1.0
    assert np.isnan(one["auroc"])


# -- of runs, against what they wrote themselves --------------------------------------------------------


def written(out: Path) -> dict[tuple[int, int], dict[str, str]]:
    """The rows of clients.csv by round and client."""
    with (out / "clients.csv").open(newline="") as file:
        return {(int(row["round"]), int(row["client"])): row for row in csv.DictReader(file)}


def assert_agrees(found: files.Columns, out: Path, metrics: tuple[str, ...] = (
        "loss", "accuracy", "balanced_accuracy")) -> None:
    rows = written(out)
    single = found["client"] != files.POOLED
    assert single.any()
    for k in np.flatnonzero(single):
        row = rows[int(found["round"][k]), int(found["client"][k])]
        assert (row["name"], int(row["unseen"]), int(row["n_test"])) == (
            found["name"][k], found["unseen"][k], found["n_test"][k])
        for metric in metrics:
            expected = row[f"{found['model'][k]}_test_{metric}"]
            assert found[metric][k] == pytest.approx(float(expected or "nan"), rel=1e-5, abs=1e-6,
                                                     nan_ok=True), (metric, k)


# quickly those whose clients predict with a model of the server's, their own, both, or none for all
QUICK = ("fedavg+finetune", "fedavg", "ditto", "localtrain", "cgpfl", "fedem", "fedper")


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow)
                                            for name in ALGORITHMS if name not in QUICK)])
@pytest.mark.thorough
def test_figures_agree_with_the_clients_of_the_run(name: str, tmp_path: Path) -> None:
    method = FedAvg(finetune=3) if "+" in name else ALGORITHMS[name](**on_any_model(name))
    finished = run(method, out=tmp_path / "run")
    found, _, notes = measure.measure(finished)
    assert not notes
    assert_agrees(found, tmp_path / "run")
    assert [*found] == [*files.FACTS, "loss", "accuracy", "balanced_accuracy", "auroc", "calibration_error"]
    assert set(found["client"]) == {-1, *range(8)}
    assert set(found["round"][found["which"] == "last"]) == {4}
    assert set(found["round"][found["which"] == "best"]) == {finished.best_round}
    has_global = "global" in finished.history[-1]
    assert ("global" in found["model"]) == has_global
    for k in np.flatnonzero((found["client"] == files.POOLED) & (found["model"] == "global")):
        row = finished.history[found["round"][k] - 1]
        pooled = (row["unseen"] if found["unseen"][k] else row)["global"]["pooled"]
        assert {m: found[m][k] for m in pooled} == pytest.approx(pooled, rel=1e-5)


def without_validation(federation: Federation) -> Federation:
    none = Table.of([np.zeros(0, np.int64)] * federation.everyone)
    return dataclasses.replace(federation, validation=none, origin=None)


@pytest.mark.parametrize("settings", [
    {"backend": "loop"}, {"dtype": "float64"}, {"eval": {"every": 2, "clients": 3}},
    {"federation": without_validation(DIGITS)}, {"federation": ragged(), "cohort": "all"},
    {"chunk": 2, "model": "dnn"}, {"model": "mlp128", "rounds": 1}])
@pytest.mark.thorough
def test_figures_agree_however_it_is_run(settings: dict[str, Any], tmp_path: Path) -> None:
    finished = run(pFedMe(), out=tmp_path / "run", **settings)
    found = measure.measure(finished).columns
    assert_agrees(found, tmp_path / "run")
    expected = settings.get("eval", {}).get("clients", finished.setup.federation.population)
    assert len({*found["client"][~found["unseen"]]}) == expected + 1


def test_without_validation_data_the_best_round_is_the_last() -> None:
    found = measure.measure(run(federation=without_validation(DIGITS))).columns
    assert set(found["round"]) == {4}
    half = len(found["round"]) // 2
    np.testing.assert_array_equal(found["auroc"][:half], found["auroc"][half:])


def test_one_round_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    finished = run(LocalTrain(), rounds=1)
    tallied = []
    tally = type(finished.setup.task).tally
    monkeypatch.setattr(type(finished.setup.task), "tally", lambda *a: (tallied.append(1), tally(*a))[1])
    found = measure.measure(finished).columns
    assert len(tallied) == 8  # clients, each with one kind of model
    assert list(found["which"]) == ["best"] * 10 + ["last"] * 10


def test_a_client_without_test_rows_has_no_figures() -> None:
    """Client 1 of the ragged federation has none."""
    found = measure.measure(run(federation=ragged(), cohort="all")).columns
    is_first = found["client"] == 1
    assert (found["n_test"][is_first] == 0).all()
    assert np.isnan(found["loss"][is_first]).all()
    assert np.isfinite(found["loss"][~is_first]).all()


def test_pooled_rows_are_those_of_all_clients() -> None:
    finished = run(pFedMe(), cohort="all")
    outputs, y = [], []
    for client in range(6):
        rows = DIGITS.test[client]
        module = finished.personal_model(client, "last")
        with torch.no_grad():
            outputs.append(module(DIGITS.x[rows].float()).numpy())
        y.append(DIGITS.y[rows].numpy())
    p = softmax(np.concatenate(outputs).astype(np.float64))
    found = measure.measure(finished).columns
    at = ((found["which"] == "last") & (found["model"] == "personal") & (found["client"] == files.POOLED)
          & ~found["unseen"])
    assert found["n_test"][at] == [len(p)]
    expected = known.roc_auc_score(np.concatenate(y), p, multi_class="ovr")
    assert found["auroc"][at] == pytest.approx(expected, abs=1e-5)
    assert found["accuracy"][at] == pytest.approx(known.accuracy_score(np.concatenate(y), p.argmax(1)))


@pytest.mark.thorough
def test_two_classes_have_sensitivity_and_specificity(tmp_path: Path) -> None:
    federation = ragged((20, 30, 25), classes=2)
    for k, settings in enumerate(({}, {"loss": "binary_cross_entropy", "model": nn.Sequential(
            nn.Flatten(), nn.Linear(16, 1))})):
        run(federation=federation, out=tmp_path / str(k), cohort="all", **settings)
        finished = run(federation=federation, out=tmp_path / str(k), cohort="all", resume=True, **settings)
        found = measure.measure(finished).columns
        assert_agrees(found, tmp_path / str(k))
        both = (found["sensitivity"] + found["specificity"]) / 2
        is_defined = ~np.isnan(both)
        assert is_defined.any()
        np.testing.assert_allclose(both[is_defined], found["balanced_accuracy"][is_defined])


def test_regression_has_the_figures_of_its_task(tmp_path: Path) -> None:
    method = Ditto(solver=descant.SGD(lr=0.01))
    settings: dict[str, Any] = {"out": tmp_path / "run", "cohort": "all", "dtype": "float64"}
    run(method, federation=ragged(classes=None), **settings)
    finished = run(method, federation=ragged(classes=None), **settings, resume=True)
    found = measure.measure(finished).columns
    assert [*found][len(files.FACTS):] == ["loss", "mse", "r2"]
    assert_agrees(found, tmp_path / "run", ("loss", "mse", "r2"))


def test_a_task_that_predicts_nothing_has_its_loss(tmp_path: Path, own: str) -> None:
    finished = run(federation=quadratics(), model="quadratic", out=tmp_path / "run", dtype="float64")
    found, _, notes = measure.measure(finished, [f"{own}:spread"])
    assert [*found][len(files.FACTS):] == ["loss", "spread"]
    assert np.isnan(found["spread"]).all()
    assert_agrees(found, tmp_path / "run", ("loss",))
    assert len(notes) == 1
    assert "predicts nothing" in notes[0]


def test_a_client_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    finished = run(pFedMe(), cohort="all")
    before = measure.measure(finished).columns
    unlucky = DIGITS.x[DIGITS.test[2]].float()[0]

    def predict(self: Any, task: Any, personal: Any, x: Any) -> Any:
        if torch.equal(x[0], unlucky):
            raise RuntimeError("out of luck\nand of memory")
        return task.predict(personal, x)

    monkeypatch.setattr(pFedMe, "predict", predict)
    after, _, notes = measure.measure(finished)
    lost = (after["client"] == 2) & (after["model"] == "personal")
    assert np.isnan(after["accuracy"][lost]).all()
    pooled = (after["client"] == files.POOLED) & (after["model"] == "personal") & ~after["unseen"]
    assert (after["n_test"][pooled] == before["n_test"][pooled] - len(DIGITS.test[2])).all()
    np.testing.assert_array_equal(after["auroc"][~lost & ~pooled], before["auroc"][~lost & ~pooled])
    assert len(notes) == 1
    assert notes[0].startswith("models of clients could not be measured ")
    assert notes[0].endswith(f"; first: client {DIGITS.names[2]!r}: out of luck")


def test_clients_elsewhere_cannot_be_measured_here(monkeypatch: pytest.MonkeyPatch) -> None:
    finished = run(rounds=1)
    monkeypatch.setattr(Federation, "is_remote", True)
    with pytest.raises(UsageError, match="on their own machines"):
        measure.measure(finished)


# -- the user's own -------------------------------------------------------------------------------------

OWN = '''
import torch

def spread(outputs, y):
    """How far the logits lie apart."""
    return outputs.std()

spread.lower_is_better = True

def damaging(outputs, y):
    outputs.zero_()
    return 0

def shape(outputs, y):
    assert outputs.shape == (len(y), 10) and y.dtype == torch.int64
    return len(y)

def failing(outputs, y):
    raise ZeroDivisionError("no rows\\nat all")

def nothing(outputs, y):
    return float("nan")

def text(outputs, y):
    return "high"

def accuracy(outputs, y):
    return 0.0

number = 3
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The name of a module with metrics, in the current directory."""
    name = "own_metrics_of_" + "".join(c if c.isalnum() else "_" for c in request.node.name)
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


def test_metrics_of_ones_own_stand_beside_the_others(own: str) -> None:
    plain = measure.measure(run()).columns
    places = [f"{own}:{name}" for name in ("damaging", "spread", "shape")]
    found, _, notes = measure.measure(run(eval={"every": 1, "metrics": places}))
    assert not notes
    assert [*found] == [*plain, "damaging", "spread", "shape"]
    for name, column in plain.items():
        np.testing.assert_array_equal(found[name], column)
    np.testing.assert_array_equal(found["shape"], found["n_test"])
    assert (found["spread"] > 0).all()  # another metric's mischief did not reach it
    described = measure.described(places)
    assert described["spread"][:2] == (True, "How far the logits lie apart")
    assert not described["shape"].lower_is_better
    assert described["auroc"] == METRICS["auroc"]


def test_a_metric_that_fails_is_a_note(own: str) -> None:
    places = [f"{own}:{name}" for name in ("failing", "nothing", "text", "spread")]
    found, _, notes = measure.measure(run(), places)
    assert all(np.isnan(found[name]).all() for name in ("failing", "nothing", "text"))
    assert np.isfinite(found["spread"]).all()
    assert [note.split()[1] for note in notes] == ["failing", "nothing", "text"]
    assert notes[0].endswith("ZeroDivisionError: no rows")


@pytest.mark.parametrize(("place", "hint"), [
    ("no_such_module_anywhere:f", "there is no module 'no_such_module_anywhere'"),
    ("{own}:spreed", "did you mean 'spread'"),
    ("{own}:number", "not an object of type int"),
    ("{own}:accuracy", "'accuracy' is the name of a column"),
])
def test_a_metric_that_cannot_be_used_is_refused(place: str, hint: str, own: str) -> None:
    with pytest.raises(UsageError, match=hint):
        measure.own_metrics([place.format(own=own)])


def test_two_metrics_need_two_names(own: str) -> None:
    with pytest.raises(UsageError, match="another metric is called 'spread' too"):
        measure.own_metrics([f"{own}:spread"] * 2)


@pytest.mark.parametrize("metrics", ["a.b:c", ["a.b.c"], [len], [3]])
def test_metrics_are_a_list_of_places(metrics: Any) -> None:
    with pytest.raises(UsageError, match=r"eval\.metrics.* must (read|be)"):
        run(eval={"metrics": metrics})


@pytest.mark.thorough
def test_metrics_can_be_added_to_a_run_that_is_there(own: str, tmp_path: Path) -> None:
    settings = {"federation": DIGITS, "out": tmp_path / "run"}
    run(**settings)
    before = (tmp_path / "run" / "config.toml").read_text()
    assert "metrics" not in before  # as if there were no such field: older runs can be resumed
    finished = run(eval={"every": 1, "metrics": [f"{own}:spread"]}, resume=True, **settings)
    assert "spread" in measure.measure(finished).columns
    loaded = descant.load(tmp_path / "run")
    assert "spread" in measure.measure(loaded, [f"{own}:spread"]).columns


def test_a_node_imports_no_metric_that_a_server_names(own: str) -> None:
    experiment = dataclasses.replace(Experiment.parse(DEMO), eval=Eval(metrics=(f"{own}:spread",)))
    assert Experiment.parse(experiment.dump()) == experiment
    tables = protocol.tables_of(experiment) | {"eval": experiment.dump()["eval"]}  # whatever a server sends
    with pytest.raises(UsageError, match=f"--allow {own} "):
        protocol.received_experiment(tables)
    protocol.received_experiment(tables, [own])
    assert own not in sys.modules


@pytest.mark.slow
def test_a_node_does_without_this_module() -> None:
    code = ("import sys, descant.deploy.flower_app, descant.deploy.client; "
            "sys.exit('descant.comparison.measure' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- the file -------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    federation = dataclasses.replace(ragged(), names=("a,b", 'say "c"', "ä", "pooled", "5"))
    path = tmp_path / files.FILE
    assert measure.write(run(federation=federation, cohort="all"), tmp_path) == []
    return path


def test_what_is_read_is_what_was_measured(tmp_path: Path) -> None:
    federation = dataclasses.replace(ragged(), names=("a,b", 'say "c"', "ä", "pooled", "5"))
    finished = run(federation=federation, cohort="all")
    measure.write(finished, tmp_path)
    expected, found = measure.measure(finished).columns, files.read_figures(tmp_path / files.FILE)
    assert [*found] == [*expected]
    for name, column in expected.items():
        np.testing.assert_array_equal(found[name], column)
        assert found[name].dtype.kind == column.dtype.kind, name
    assert {p.name for p in tmp_path.iterdir()} == {files.FILE, files.ROWS}


@pytest.mark.parametrize("damage", [
    lambda text: text[:-1], lambda text: text[: len(text) // 2], lambda text: "",
    lambda text: "\n", lambda text: text.splitlines(keepends=True)[0],
    lambda text: "".join(text.splitlines(keepends=True)[:-1]),
    lambda text: "".join(text.splitlines(keepends=True)[:1] + text.splitlines(keepends=True)[2:]),
    lambda text: text.replace("which", "witch", 1), lambda text: text.replace("accuracy", "loss", 1),
    lambda text: text.replace("best,", "best,x", 1), lambda text: text.replace("0.", "0..", 1),
    lambda text: text.replace("last", "past"), lambda text: text.replace('"a', '"a"x', 1)])
def test_a_damaged_file_is_told(damage: Any, file: Path) -> None:
    file.write_text(damage(file.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(DescantError, match=r"figures\.csv is damaged .*: remove it"):
        files.read_figures(file)


def test_a_file_of_bytes_is_told(file: Path) -> None:
    file.write_bytes(b"\xff\xfe\x00\n")
    with pytest.raises(DescantError, match="is damaged"):
        files.read_figures(file)
    file.unlink()
    with pytest.raises(DescantError, match="cannot read"):
        files.read_figures(file)
    with pytest.raises(DescantError, match="cannot write"):
        measure.write(run(rounds=1), file / "nowhere")


def test_figures_are_out_of_date_after_more_rounds_or_other_metrics(file: Path) -> None:
    assert files.is_current(file.parent, 4, None)
    assert not files.is_current(file.parent, 5, None)
    assert not files.is_current(file.parent, 4, ["my:f1"])
    assert not files.is_current(file.parent / "nowhere", 4, None)
    file.write_text(file.read_text()[:-9])
    assert not files.is_current(file.parent, 4, None)

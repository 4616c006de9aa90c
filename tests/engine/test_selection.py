"""The metric that decides, and when a run stops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import vmap

import descant
from descant.core import scoring
from descant.core.federation import Federation
from descant.engine.selection import DecidingMetric, deciding, idle, selecting
from descant.errors import UsageError
from descant.experiment import directory as layout
from descant.experiment import run as runs
from descant.experiment.config import Experiment
from descant.experiment.run import Run, Setup
from descant.models import make_task
from helpers import require_data

pytestmark = pytest.mark.thorough


def of_labels(*clients: Any, classes: int = 2) -> Federation:
    """Clients with these labels, all for training but for a fifth."""
    y = np.concatenate([np.asarray(labels) for labels in clients])
    x = np.random.default_rng(0).normal(size=(len(y), 3)).astype(np.float32) + y[:, None] / 2
    owner = np.repeat(np.arange(len(clients)), [len(labels) for labels in clients])
    return Federation.from_arrays(x.astype(np.float32), y, owner, classes=classes)


def task_of(federation: Federation, model: str = "mclr") -> Any:
    return make_task(model, federation, loss=None, dtype=torch.float32, seed=0)


# -- which metric --------------------------------------------------------------------------------------


def chosen(federation: Federation, wanted: str | None = None) -> DecidingMetric:
    return deciding(wanted, task_of(federation), federation)


def test_balanced_classes_are_judged_by_accuracy() -> None:
    assert chosen(of_labels([0, 1] * 20, [0, 1] * 20)) == ("accuracy", None)
    assert chosen(of_labels([0] * 15 + [1] * 5, [1] * 15 + [0] * 5)) == ("accuracy", None)  # 75 %


def test_one_class_of_most_rows_makes_it_balanced_accuracy() -> None:
    found = chosen(of_labels(*[[0] * 30 + [1] * 5 + [2] * 5] * 3, classes=3))
    assert found.name == "balanced_accuracy"
    assert found.why == "75 % of the training rows are of one class"


def test_a_one_sided_client_makes_it_balanced_accuracy() -> None:
    found = chosen(of_labels([0, 1] * 40, [1] * 38 + [0] * 2))
    assert found == ("balanced_accuracy", "92 % of the training rows of client '1' are of one class")
    small = chosen(of_labels([0, 1] * 40, [1] * 8))  # too few rows to say
    assert small.name == "accuracy"
    of_three = chosen(of_labels([0, 1, 2] * 40, [1] * 38 + [0] * 2, classes=3))
    assert of_three.name == "accuracy"  # clients of some of the classes are what federations are like


def test_what_is_asked_for_decides() -> None:
    federation = of_labels([0, 1] * 40, [1] * 38 + [0] * 2)
    assert chosen(federation, "accuracy") == ("accuracy", None)
    assert selecting(task_of(federation)) == ("loss", "accuracy", "balanced_accuracy", "auroc")
    with pytest.raises(UsageError, match=r"'sensitivity' cannot select rounds.* choose one of loss"):
        chosen(federation, "sensitivity")
    one_class = of_labels([0] * 40, [1] * 40)
    with pytest.raises(UsageError, match="auroc' is defined for no client"):
        chosen(one_class, "auroc")


def test_real_targets_are_judged_by_the_loss() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3)).astype(np.float32)
    federation = Federation.from_arrays(x, x.sum(1), np.arange(60) % 3)
    task = make_task(nn.Linear(3, 1), federation, loss="mse", dtype=torch.float32, seed=0)
    assert deciding(None, task, federation) == ("loss", None)
    assert deciding("r2", task, federation).name == "r2"
    with pytest.raises(UsageError, match="choose one of loss, mse, r2"):
        deciding("accuracy", task, federation)


def test_a_function_of_ones_own_selects_no_rounds() -> None:
    tables = {"data": {"dataset": "digits"}, "algorithm": {"name": "fedavg"}}
    for eval in ({"metric": "pack.module:f1"}, {"metric": "f1", "metrics": ["pack.module:f1"]}):
        with pytest.raises(UsageError, match="of your own, which is measured of finished runs only"):
            Experiment.parse(tables | {"eval": eval})


# -- the AUROC of every round --------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_auroc_is_that_of_the_exact_measures(classes: int) -> None:
    """Padded rows do not count; equal scores of two classes count half; one class alone has none."""
    draw = torch.Generator().manual_seed(classes)
    outputs = torch.randn(60, 30, classes, generator=draw)
    y = torch.randint(0, classes, (60, 30), generator=draw)
    if classes == 2:
        outputs = outputs.round()
    y[::9] = 1
    outputs[13, 0] = torch.nan
    counts = torch.randint(1, 31, (60,), generator=draw)
    weight = torch.arange(30) < counts[:, None]
    found = vmap(lambda o, t, w: scoring.auroc(o, t, w, classes))(outputs, y, weight)
    exact = [scoring.classification(o[:n].numpy(), t[:n].numpy(), classes)["auroc"]
             for o, t, n in zip(outputs, y, counts.tolist(), strict=True)]
    assert np.isnan(exact).sum() > 7
    np.testing.assert_allclose(found.numpy(), exact, rtol=0, atol=1e-12)
    alone = [scoring.auroc(o, t, w, classes) for o, t, w in zip(outputs, y, weight, strict=True)]
    assert torch.equal(torch.stack(alone).nan_to_num(9.0), found.nan_to_num(9.0))


def test_auroc_of_one_logit_and_of_sequences() -> None:
    draw = torch.Generator().manual_seed(0)
    logit, y = torch.randn(25, 1, generator=draw), torch.randint(0, 2, (25,), generator=draw)
    everyone = torch.ones(25, dtype=torch.bool)
    assert float(scoring.auroc(logit, y, everyone, 2)) == scoring.classification(
        logit.numpy(), y.numpy(), 2)["auroc"]
    outputs, y = torch.randn(25, 4, 6, generator=draw), torch.randint(0, 4, (25, 6), generator=draw)
    few = torch.arange(25) < 20
    assert float(scoring.auroc(outputs, y, few, 4)) == pytest.approx(
        scoring.classification(outputs[:20].numpy(), y[:20].numpy(), 4)["auroc"], abs=1e-12)


def two_class(out: Path | None = None, backend: str = "vectorised", eval: dict[str, Any] | None = None,
              **train: Any) -> Run:
    rng = np.random.default_rng(3)
    federation = of_labels(*(rng.permutation([0] * 25 + [1] * 15) for _ in range(4)))
    return descant.run("fedavg", federation=federation, out=out, eval={"every": 1, **(eval or {})},
                       **{"rounds": 4, "backend": backend, "local": {"steps": 3}, **train})


@pytest.mark.parametrize("backend", ["loop", "vectorised"])
def test_where_auroc_decides_it_selects_the_round_and_has_a_curve(backend: str, tmp_path: Path) -> None:
    run = two_class(tmp_path / "run", backend, {"metric": "auroc"})
    val = [row["personal"]["val"]["auroc"]["mean"] for row in run.history]
    assert run.summary["metric"] == "auroc"
    assert run.best_round is not None
    assert val[run.best_round - 1] == max(val)
    assert run.summary["selected_by"][1] == max(val)
    model = run.personal_model(2, "last")
    rows = run.setup.federation.test[2]
    outputs = model(run.setup.federation.x[rows]).detach().numpy()
    exact = scoring.classification(outputs, run.setup.federation.y[rows].numpy(), 2)["auroc"]
    lines = (tmp_path / "run" / "clients.csv").read_text().splitlines()
    last = dict(zip(lines[0].split(","), lines[-2].split(","), strict=True))
    assert last["client"] == "2"
    assert float(last["personal_test_auroc"]) == pytest.approx(exact, abs=1e-6)
    assert "auroc" not in run.history[-1]["global"]["pooled"]
    assert layout.config(tmp_path / "run")["eval"]["metric"] == "auroc"


def test_rounds_are_selected_by_the_metric_that_decides() -> None:
    for metric, sign in (("accuracy", 1), ("balanced_accuracy", 1), ("loss", -1)):
        run = two_class(eval={"metric": metric}, rounds=8)
        val = [sign * row["personal"]["val"][metric]["mean"] for row in run.history]
        assert run.best_round is not None
        assert val[run.best_round - 1] == max(val)


def test_a_run_from_before_there_was_a_choice_goes_on_by_accuracy(tmp_path: Path) -> None:
    """Its config names no metric; the rule of today would take another one for these data."""
    require_data("heart_disease")
    tables = {"data": {"dataset": "heart_disease", "scale": "client", "impute": "client"},
              "algorithm": {"name": "fedavg"}, "train": {"rounds": 2, "backend": "vectorised"},
              "eval": {"every": 1}}
    new = runs.start(Setup.of(Experiment.parse(tables)), tmp_path / "new")
    assert new.summary["metric"] == "balanced_accuracy"
    old = Experiment.parse(tables | {"eval": {"every": 1, "metric": "accuracy"}})
    runs.start(Setup.of(old), tmp_path / "old")
    path = tmp_path / "old" / "config.toml"
    path.write_text(path.read_text().replace('metric = "accuracy"\n', ""))
    assert "metric" not in layout.config(tmp_path / "old")["eval"]
    assert runs.resume(tmp_path / "old", rounds=3).summary["metric"] == "accuracy"
    assert runs.load(tmp_path / "old").rounds == 3
    with pytest.raises(UsageError, match="cannot be resumed with a changed setup"):
        runs.resume(tmp_path / "old", Setup.of(Experiment.parse(tables | {"eval": {
            "every": 1, "metric": "balanced_accuracy"}})), rounds=3)


# -- stopping ------------------------------------------------------------------------------------------


def rows(*figures: tuple[float, float]) -> list[dict[str, Any]]:
    """Evaluated rounds with these accuracies and losses, and rounds that are not evaluated between them."""
    return [row for accuracy, loss in figures for row in ({}, {"personal": {"val": {
        "accuracy": {"mean": accuracy}, "loss": {"mean": loss}}}})]


def test_for_how_long_nothing_has_improved() -> None:
    assert idle([], "accuracy") == 0
    assert idle(rows((0.5, 1.0)), "accuracy") == 0
    assert idle(rows((0.5, 1.0), (0.5, 1.0), (0.4, 2.0)), "accuracy") == 2
    assert idle(rows((0.5, 1.0), (0.5, 1.0), (0.6, 2.0)), "accuracy") == 0
    assert idle(rows((0.5, 1.0), (0.5, 0.98)), "accuracy") == 0  # it still learns
    assert idle(rows((0.5, 1.0), (0.5, 0.995), (0.5, 0.9945)), "accuracy") == 2
    assert idle(rows((0.5, 1.0), (0.5, 0.995), (0.5, 0.985)), "accuracy") == 0  # which adds up
    assert idle(rows((0.5, 1.0), (0.5005, 1.0)), "accuracy") == 1
    assert idle(rows((0.5, 1.0), (0.9, 0.995)), "loss") == 1
    nothing: Any = (None, None)
    assert idle(rows(nothing, nothing), "accuracy") == 2


def test_a_run_stops_when_nothing_improves_and_a_resumed_one_at_the_same_round(tmp_path: Path) -> None:
    whole = two_class(tmp_path / "whole", rounds=200, patience=2)
    assert 3 <= whole.rounds < 200
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert (summary["stopped"], summary["rounds"]) == ("converged", whole.rounds)
    assert idle(whole.history, "accuracy") == 2

    half = two_class(tmp_path / "half", rounds=whole.rounds - 1, patience=2)
    assert half.summary["stopped"] is None
    done = two_class_again(tmp_path / "half")
    assert done.rounds == whole.rounds
    for name in ("checkpoint/state.safetensors", "clients.csv"):
        assert (tmp_path / "half" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert two_class_again(tmp_path / "half").rounds == whole.rounds  # and stays there


def two_class_again(out: Path) -> Run:
    rng = np.random.default_rng(3)
    federation = of_labels(*(rng.permutation([0] * 25 + [1] * 15) for _ in range(4)))
    return descant.run("fedavg", federation=federation, out=out, resume=True, eval={"every": 1}, rounds=200,
                       backend="vectorised", local={"steps": 3}, patience=2)


@pytest.mark.slow
def test_more_rounds_of_a_run_that_has_stopped_are_refused(tmp_path: Path) -> None:
    tables = {"data": {"dataset": "digits", "clients": 4}, "algorithm": {"name": "localtrain"},
              "train": {"rounds": 100, "patience": 1, "local": {"steps": 40}, "backend": "vectorised"},
              "eval": {"every": 1}}
    run = runs.start(Setup.of(Experiment.parse(tables)), tmp_path / "run")
    assert run.summary["stopped"] == "converged"
    with pytest.raises(UsageError, match=r"to go on, take patience out of its config.toml"):
        runs.resume(tmp_path / "run", rounds=200)
    path = tmp_path / "run" / "config.toml"
    path.write_text(path.read_text().replace("patience = 1\n", ""))
    assert runs.resume(tmp_path / "run").rounds == 100


def test_patience_needs_validation_rows() -> None:
    tables = {"data": {"dataset": "digits", "clients": 4, "validation": 0.0},
              "algorithm": {"name": "fedavg"}, "train": {"patience": 2}}
    with pytest.raises(UsageError, match=r"train\.patience stops by validation figures"):
        runs.start(Setup.of(Experiment.parse(tables)))

"""[eval] rows and diagnostics: models scored on everybody's rows, and figures of what the server sees."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

import descant
from descant import SGD, DescantError, UsageError
from descant.algorithms import FedAvg, LocalTrain, pFedMe
from descant.comparison import finished
from descant.comparison.measure import measure
from descant.core.task import Batch, inputs
from descant.engine import diagnostics
from descant.engine.diagnostics import Observed
from descant.models import module

FEDERATION = descant.federation("digits", partition="classes", clients=5, classes_per_client=2)
SMALL = {"federation": FEDERATION, "rounds": 2, "batch": 10, "local": {"steps": 3}, "backend": "vectorised",
         "dtype": "float64"}


def largest(seen: Observed) -> float:
    return float(seen.uploaded.abs().max())


def failing(seen: Observed) -> float:
    raise ValueError("no reason")


not_a_function = 3


def test_personal_models_are_scored_on_the_rows_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PASSED", 100)  # several blocks of rows
    run = descant.run(LocalTrain(SGD(lr=0.1)), eval={"rows": "all", "every": 1}, **SMALL)
    task, federation = run.setup.task, run.setup.federation
    rows = np.concatenate([federation.test[client] for client in range(5)])
    batch = Batch(inputs(federation.x[rows], task.dtype), federation.y[rows])
    found = torch.stack([task.metrics(task.predict(run.personal(client, "last"), batch.x), batch)
                         for client in range(5)])
    told = run.history[-1]["everywhere"]
    assert [told[name] for name in task.metric_names] == pytest.approx(found.mean(0).tolist(), rel=1e-12)
    assert told["accuracy"] < 0.45  # two classes of ten are known
    columns = measure(run).columns
    last = (columns["which"] == "last") & (columns["model"] == "everywhere") & (
        columns["client"] != finished.POOLED)
    assert columns["accuracy"][last] == pytest.approx(found[:, task.metric_names.index("accuracy")].tolist())
    own = descant.run(LocalTrain(SGD(lr=0.1)), **SMALL)
    assert "everywhere" not in own.history[-1]
    assert "everywhere" not in measure(own).columns["model"]


def test_a_run_that_scores_more_trains_the_same() -> None:
    plain = descant.run(pFedMe(), **SMALL)
    seen = descant.run(pFedMe(), eval={"rows": "all", "diagnostics": ["drift", "coherence"]}, **SMALL)
    assert torch.equal(plain.personal(0).theta, seen.personal(0).theta)


def test_the_named_figures_are_those_of_the_uploads(tmp_path) -> None:
    names = ["drift", "spread", "coherence", "test_diagnostics:largest"]
    run = descant.run(FedAvg(SGD(lr=0.1), weights="uniform"), out=tmp_path / "run",
                      eval={"diagnostics": names}, **SMALL)
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])["diagnostics"]
    assert set(line) == {"drift", "spread", "coherence", "largest"}
    first = run.setup.task.init().theta
    # with one client's start known, its upload is that of training alone
    alone = descant.run(LocalTrain(SGD(lr=0.1)), **(SMALL | {"rounds": 1}))
    models = torch.stack([alone.personal(client, "last").theta for client in range(5)])
    moved = models - first
    assert line["drift"] == pytest.approx(float(moved.norm(dim=1).mean()), rel=1e-9)
    assert line["spread"] == pytest.approx(float((models - models.mean(0)).norm(dim=1).mean()), rel=1e-9)
    assert line["largest"] == pytest.approx(float(models.abs().max()), rel=1e-9)
    lengths = moved.norm(dim=1)
    cosines = (moved @ moved.T) / lengths.outer(lengths)
    assert line["coherence"]["gce"] == pytest.approx(1 - float(torch.linalg.det(cosines)), rel=1e-8)
    assert math.exp(line["coherence"]["log_det"]) == pytest.approx(1 - line["coherence"]["gce"], rel=1e-8)
    # what is watched may change when a run is continued
    more = descant.run(FedAvg(SGD(lr=0.1), weights="uniform"), out=tmp_path / "run", resume=True,
                       eval={"diagnostics": ["drift"]}, **(SMALL | {"rounds": 3}))
    assert set(more.history[-1]["diagnostics"]) == {"drift"}


@pytest.mark.parametrize(("names", "words"), [
    (["coherense"], "coherence"), (["drift", "drift"], "twice"),
    (["test_diagnostics:not_a_function"], "must be a function")])
def test_wrong_names_are_refused_before_training(names, words) -> None:
    with pytest.raises(UsageError, match=words):
        diagnostics.named(names)


def test_a_figure_that_cannot_be_had_is_named() -> None:
    with pytest.raises(DescantError, match="diagnostics failing failed in round 1: no reason"):
        descant.run(FedAvg(), eval={"diagnostics": ["test_diagnostics:failing"]}, **SMALL)
    for name, why in (("drift", "localtrain has no one model"), ("spread", "localtrain upload no model")):
        with pytest.raises(DescantError, match=f"{name} failed in round 1: .*{why}"):
            descant.run(LocalTrain(), eval={"diagnostics": [name]}, **SMALL)


def test_code_of_a_file_needs_a_permit() -> None:
    from descant.core.import_object import named_in

    assert ("eval.diagnostics", "somewhere:figure") in list(
        named_in({"eval": {"diagnostics": ["drift", "somewhere:figure"]}}))

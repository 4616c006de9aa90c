"""Scoring: a model that all clients share is tried once, and a split without rows not at all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from descant.algorithms import Ditto, FedAvg
from descant.core.algorithm import Algorithm
from descant.core.splits import Table
from descant.core.task import Task
from descant.core.tree import Tree
from descant.models.module import ModuleTask
from helpers import MODELS, assert_same, engine, ragged

FEDERATION = ragged()
BACKENDS = {"loop": {"backend": "loop"}, "vectorised": {"backend": "vectorised", "chunk": 3}}
every_backend = pytest.mark.parametrize("backend", BACKENDS)


@dataclass(frozen=True)
class Contrary(FedAvg):
    """The model for all, read the wrong way round."""

    name: ClassVar[str] = "contrary"

    def predict(self, task: Task, personal: Tree, x: Tensor) -> Tensor:
        return -task.predict(personal, x)


def are_equal(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)  # a client without test rows has no figures


def tries(method: Algorithm, model: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many predictions scoring takes, after a round."""
    calls = []
    with engine(method, FEDERATION, MODELS[model](), **BACKENDS[backend]) as e:
        e.play(1)
        predict = ModuleTask.predict

        def counted(*given: object) -> Tensor:
            calls.append(given)
            return predict(*given)  # type: ignore[arg-type]

        monkeypatch.setattr(ModuleTask, "predict", counted)
        found = e.score()
        monkeypatch.undo()
    assert found.shared is not None
    assert are_equal(found.shared.test, found.personal.test) == (type(method) is FedAvg)
    return len(calls)


@every_backend
@pytest.mark.parametrize("model", ["mclr", "batchnorm+dropout"])
def test_a_model_for_all_is_tried_once(model: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    once = tries(FedAvg(), model, backend, monkeypatch)
    for method in (Ditto(), Contrary()):
        assert tries(method, model, backend, monkeypatch) == 2 * once


@every_backend
def test_a_fine_tuned_model_is_not_the_model_for_all(backend: str) -> None:
    with engine(FedAvg(finetune=2), FEDERATION, "mclr", **BACKENDS[backend]) as e:
        e.play(1)
        found = e.score()
    assert found.shared is not None
    assert not are_equal(found.shared.test, found.personal.test)


@every_backend
def test_without_validation_rows_the_rest_is_the_same(backend: str) -> None:
    none = Table.of([np.zeros(0, np.int64)] * FEDERATION.population)
    scores = []
    for federation in (FEDERATION, replace(FEDERATION, validation=none)):
        with engine(Ditto(), federation, "mclr", **BACKENDS[backend]) as e:
            e.play(1)
            scores.append(e.score())
    assert_same(scores[1].personal.test, scores[0].personal.test)
    assert scores[0].personal.validation.isfinite().any()
    assert scores[1].personal.validation.isnan().all()

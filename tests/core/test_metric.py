"""A metric by its name, and a field by its dotted name: one home each."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from descant.algorithms import Ditto
from descant.core import fields, scoring
from descant.core.metric import (
    CLASSIFICATION,
    LOWER,
    METRICS,
    REGRESSION,
    figure,
    is_share,
    of_classifier,
    title,
    usual,
)
from descant.errors import UsageError
from descant.priors.solve import SGD


def test_the_table_of_metrics() -> None:
    assert CLASSIFICATION == ("accuracy", "balanced_accuracy")
    assert REGRESSION == ("mse", "r2")
    assert {"loss", "mse", "calibration_error"} == LOWER
    assert [name for name in METRICS if is_share(name)] == [
        "accuracy", "balanced_accuracy", "auroc", "sensitivity", "specificity", "calibration_error"]
    assert is_share("personal_balanced_accuracy")
    assert not is_share("personal_truth_error")


@pytest.mark.parametrize("classes", [2, 3])
def test_every_metric_of_a_classifier_is_computed_in_the_order_of_the_table(classes: int) -> None:
    found = scoring.classification(np.eye(classes), np.arange(classes), classes)
    assert tuple(found) == of_classifier(classes)


def test_how_values_are_written() -> None:
    assert [figure("accuracy", 0.5), figure("loss", 1234.56), figure("mse", None)] == ["0.5000", "1235", "-"]
    assert title("balanced_accuracy") == "balanced accuracy"
    assert (usual({"loss", "accuracy"}), usual({"loss", "r2"})) == ("accuracy", "loss")


def test_the_table_of_metrics_needs_no_torch() -> None:
    code = "import sys, descant.core.metric; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_fields_by_their_dotted_names() -> None:
    tables: dict[str, Any] = {"solver": {"lr": 0.1}, "lam": 1}
    before = tables["solver"]
    fields.put(tables, "solver.momentum", 0.9)
    fields.put(tables, "prior.sigma2", 2)
    assert tables == {"solver": {"lr": 0.1, "momentum": 0.9}, "lam": 1, "prior": {"sigma2": 2}}
    assert before == {"lr": 0.1}  # what was given is not changed
    assert fields.dotted(tables) == {"solver.lr": 0.1, "solver.momentum": 0.9, "lam": 1, "prior.sigma2": 2}
    assert fields.value_of(tables, "solver.lr") == 0.1
    assert fields.value_of(Ditto(solver=SGD(lr=0.1)), "solver.lr") == 0.1
    with pytest.raises(UsageError, match=r"lam\.x: lam is not a section"):
        fields.table_of(tables, "lam.x")


@pytest.mark.parametrize(("text", "value"), [
    ("3", 3), (" 0.5", 0.5), ("true", True), ("[1, 2]", [1, 2]), ("mh", "mh"),
    ('"a b"', "a b"), ("1.", "1.")])
def test_values_on_a_command_line(text: str, value: Any) -> None:
    assert fields.written(text) == value

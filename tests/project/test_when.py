"""Where personalization pays: the page, and what `descant advise` knows, are those of the kept study."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from descant.core.federation import Federation
from descant.experiment.config import Experiment

HOME = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def when_page() -> Any:
    """experiments/when_page.py, with the study beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HOME / "experiments"))
        return importlib.import_module("when_page")


def test_the_page_of_the_study_is_written_from_what_is_kept(when_page: Any) -> None:
    """So every figure in it is that of a committed file. To write it: python experiments/when_page.py"""
    cells = when_page.read()
    assert when_page.PAGE.read_text(encoding="utf-8") == when_page.page(cells)
    assert when_page.PAGE.with_suffix(".png").exists()


def test_the_evidence_of_the_package_is_that_of_the_study(when_page: Any) -> None:
    assert when_page.EVIDENCE.read_text(encoding="utf-8") == when_page.evidence(when_page.read())


def test_a_gap_of_the_study_is_that_of_its_table(when_page: Any) -> None:
    """In either order of the methods, and the best one is the one with the highest accuracy."""
    for cell in when_page.read():
        level = {row["method"]: 100 * float(row["personal"]) for row in cell.methods}
        assert cell.best == max(cell.compared, key=lambda name: level[name])
        assert cell.lead.mean >= 0
        for one, other in (("LocalTrain", "FedAvg"), ("FedAvg", "LocalTrain")):
            gap = cell.gap(one, other)
            assert gap.mean == pytest.approx(level[one] - level[other], abs=1e-6)
            assert gap.low < gap.mean < gap.high
            assert (gap.low > 0 or gap.high < 0) == (gap.p < 0.05)


def test_every_cell_of_the_study_is_an_experiment(when_page: Any) -> None:
    cells = when_page.planned()
    assert len(cells) == len(set(cells)) == 76
    for cell in cells:
        tables = cell.tables()
        del tables["algorithms"]
        assert Experiment.parse(tables).eval.metric == "accuracy"


def test_the_labels_of_cells_are_those_of_the_splits(when_page: Any) -> None:
    """What is kept of all synthetic cells, made again; and every cell says it."""
    when = sys.modules["when"]
    for cell in when_page.read():
        assert {"unseen_validation", "unseen_test", "without_validation"} <= cell.about.keys()
        if cell.family in ("logistic", "clusters"):
            federation = when.first_of(when.Cell(cell.family, cell.rows, cell.level)).data.federation()
            found = when.of_labels(federation)
            assert {name: cell.about[name] for name in found} == pytest.approx(found, rel=1e-5)


def test_labels_without_training_rows_by_hand(when_page: Any) -> None:
    """Client 0 trains class 0 alone, client 1 both; two of three test rows of client 0 are of class 1."""
    federation = Federation.from_arrays(
        np.zeros((9, 1)), np.array([0, 0, 1, 1, 0, 1, 1, 0, 1]), np.array([0] * 5 + [1] * 4),
        split=["train", "validation", "test", "test", "test", "train", "validation", "train", "test"])
    assert sys.modules["when"].of_labels(federation) == {
        "label_distance": pytest.approx((1 / 3 + 1 / 6) / 2), "unseen_test": 0.5, "unseen_validation": 0.0,
        "without_validation": 0}


def test_the_page_says_where_clients_never_train_what_they_are_tested_on(when_page: Any) -> None:
    cells = when_page.read()
    for unseen, without in ((0.5, 0), (0.51, 2)):
        one = cells[0]._replace(about=cells[0].about | {
            "unseen_validation": 0.0, "unseen_test": unseen, "without_validation": without})
        said = " ".join(when_page.findings([one]))
        assert ("in 1 of 1 cells more than half" in said) == (unseen > 0.5)
        assert (f"{one.level}: 2. They have no say" in said) == bool(without)


def test_the_page_names_every_method_that_is_not_in_the_study(when_page: Any) -> None:
    text = when_page.page(when_page.read())
    assert "pFedMe, pFedBreD and CGPFL are left out" in text
    for name in ("OneStageFedProx", "SCAFFOLD", "FedRep"):
        assert name in text.split("Not tried are")[1].split("\n\n")[0]


@pytest.mark.slow
def test_a_cell_of_the_study_is_played_and_kept(when_page: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """With two methods and one trial; a second time nothing is made anew."""
    when = sys.modules["when"]
    monkeypatch.setattr(when, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(when, "METHODS", {name: when.METHODS[name] for name in ("LocalTrain", "FedAvg")})
    monkeypatch.setattr(when, "TRIALS", 1)
    cell = when.Cell("logistic", 10, "deviation 1")
    monkeypatch.setattr(when, "cells", lambda: [cell])
    when.main(["--out", str(tmp_path)])
    place = tmp_path / "kept" / cell.name
    about = json.loads((place / when.ABOUT).read_text())
    assert (about["n"], about["clients"], about["repetitions"]) == (10, 20, 3)
    rows = {name: (place / f"{name}.csv").read_text().splitlines()[1:] for name in ("methods", "differences")}
    assert {name: len(found) for name, found in rows.items()} == {"methods": 2, "differences": 1}
    monkeypatch.setattr(when, "play", None)  # nothing is made anew
    when.main(["--out", str(tmp_path)])

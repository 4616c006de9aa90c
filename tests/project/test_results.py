"""Figures in docs/results.md and docs/results/ are those of the committed results."""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from descant.comparison.reproduce import claims, items, pages
from descant.experiment.config import Experiment, read_toml

HOME = Path(__file__).parents[2]
RESULTS = sorted((HOME / "experiments" / "results").glob("*/results.csv"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.parent.name)
def test_a_table_is_that_of_its_results(path: Path) -> None:
    spec = importlib.util.spec_from_file_location("table", HOME / "experiments" / "table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (HOME / "docs" / "results.md").read_text(encoding="utf-8")
    assert f"](../{path.relative_to(HOME).as_posix()})" in text
    assert module.table(path) in text


def test_there_are_results() -> None:
    assert RESULTS


PAPERS = sorted({item.path.parent for item in items.find(HOME / "experiments")})


@pytest.mark.parametrize("paper", PAPERS, ids=lambda path: path.name)
def test_the_page_of_a_paper_is_written_from_what_is_kept(paper: Path) -> None:
    """So every figure in it is that of a committed file. To write it again: descant reproduce ITEM, or
    `pages.write(paper)`."""
    place = HOME / "docs" / "results"
    assert (place / f"{paper.name}.md").read_text(encoding="utf-8") == pages.page(paper, place)


KEPT = [item for item in items.find(HOME / "experiments") if item.kept() is not None]


@pytest.mark.parametrize("item", KEPT, ids=lambda item: item.name)
def test_the_figures_of_claims_are_those_of_the_results(item: items.Item) -> None:
    """Of comparisons: a claim "label: 97.60 %" has the figure of results.csv in the paper's column."""
    kept = item.kept()
    assert kept is not None
    assert kept["item"] == item.name
    found = claims.read(item.results / "claims.csv")
    assert found
    if item.is_study:
        return
    paper = read_toml(item.path)["paper"]
    metric, usual = paper["metric"], paper.get("column", "personal")
    with (item.results / "results.csv").open(newline="") as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    ours = {claim.paper.rpartition(": ")[0]: claim.ours for claim in found}
    for label, figure in paper.get("figures", {}).items():
        model, *suffix = (figure.get("column", usual) if isinstance(figure, dict) else usual).split("_")
        key = "_".join([model, *([] if rows[label]["metric"] == metric else [metric]), *suffix])
        assert ours[label].startswith(f"{100 * float(rows[label][key]):.2f} %"), label


# -- where personalization pays ----------------------------------------------------------------------------


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

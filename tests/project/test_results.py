"""Figures in docs/results.md are those of the committed results."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path

import pytest

from descant.comparison.reproduce import claims, items, pages
from descant.experiment.config import read_toml

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

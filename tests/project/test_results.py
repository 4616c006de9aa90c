"""Figures in docs/results.md and docs/results/*.md are those of the committed results."""

from __future__ import annotations

import csv
import importlib.util
import json
from collections import Counter
from pathlib import Path

import pytest

from descant.comparison.reproduce import baselines, claims, items, pages, study
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
    below = text.split(module.table(path))[1].split("\n\n")[1]
    assert below.strip().splitlines() == [f"- {said}" for said in module.sentences(path)]


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


def kept_in(item: items.Item) -> list[Path]:
    """What is kept with the paper's budget, and with matched steps."""
    return [place for place in (item.results, item.results / pages.STEPS) if (place / "about.json").exists()]


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


COMPARED = [(item, place) for item in KEPT if not item.is_study for place in kept_in(item)]


@pytest.mark.parametrize(("item", "place"), COMPARED, ids=lambda each: getattr(each, "name", None))
def test_the_figures_of_claims_are_those_of_the_results(item: items.Item, place: Path) -> None:
    """A claim "label: 97.60 %" has the figure of results.csv in the paper's column; orderings are counted in
    orderings.csv; and what is said beside the baselines has figures of results.csv."""
    paper = read_toml(item.path)["paper"]
    metric, usual = paper["metric"], paper.get("column", "personal")
    rows = {row["method"]: row for row in read(place / "results.csv")}
    ours = {claim.paper.rpartition(": ")[0] or claim.paper: claim.ours
            for claim in claims.read(place / "claims.csv")}
    assert ours
    for label, figure in paper.get("figures", {}).items():
        model, *suffix = (figure.get("column", usual) if isinstance(figure, dict) else usual).split("_")
        key = "_".join([model, *([] if rows[label]["metric"] == metric else [metric]), *suffix])
        assert ours[label].startswith(f"{100 * float(rows[label][key]):.2f} %"), label
    if any(claim.startswith("the order of") for claim in ours):
        count = Counter(row["appearance"] for row in read(place / "orderings.csv"))
        said = ", ".join(f"{count[kind]} {word}" for kind, word in (
            ("appears", "appear"), ("reversed", "reversed"), ("open", "open")))
        assert any(said in text for text in ours.values())
    for beside in baselines.read(place):
        for label, said in ((beside.baseline, beside.baseline_figure), (beside.method, beside.method_figure)):
            value = float(rows[label]["personal"])
            assert said in (f"{100 * value:.2f} %", f"{value:.4g}")


STUDIED = [item for item in KEPT if item.is_study]


@pytest.mark.parametrize("item", STUDIED, ids=lambda item: item.name)
def test_the_claims_of_a_study_are_made_of_its_results(item: items.Item) -> None:
    """Judged again from results.csv, which has six digits."""
    module = study.load(item.path)
    kind = {name: type(value) for point in module.POINTS for name, value in point.items()}
    rows = [{name: kind.get(name, int if name == "seed" else float)(value) for name, value in row.items()}
            for row in read(item.results / "results.csv")]
    assert [row for row in rows if row["seed"] == 0]
    assert list(module.claims(rows)) == claims.read(item.results / "claims.csv")


@pytest.mark.parametrize("item", KEPT, ids=lambda item: item.name)
def test_what_is_kept_says_where_it_is_from(item: items.Item) -> None:
    for place in kept_in(item):
        about = json.loads((place / "about.json").read_text(encoding="utf-8"))
        assert about["item"] == item.name
        assert about["source"] == item.about().source
        assert about["command"].startswith(f"descant reproduce {item.name}")
        assert about["commit"]

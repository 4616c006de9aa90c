"""Figures in docs/results.md and docs/results/*.md are those of the committed results."""

from __future__ import annotations

import csv
import importlib.util
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from descant.comparison import methods
from descant.comparison.agreement import readings
from descant.comparison.paper import Paper
from descant.comparison.reproduce import baselines, claims, items, pages, study
from descant.comparison.reproduce.claims import Claim, Verdict, near_to, order_verdict
from descant.core.metric import METRICS, is_share
from descant.core.permit import ran
from descant.core.units import times
from descant.engine.settings import Train
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


class Comparison:
    """What is kept of a comparison."""

    def __init__(self, item: items.Item, place: Path) -> None:
        tables = read_toml(item.path)
        self.paper = Paper.parse(tables["paper"], methods.labels(tables, Train(), ran()), METRICS)
        self.rows = {row["method"]: row for row in read(place / "results.csv")}
        self.orderings = read(place / "orderings.csv")
        self.claims = {claim.paper: claim for claim in claims.read(place / "claims.csv")}

    def level(self, label: str, column: str) -> list[float]:
        """A figure of results.csv, with the ends of its interval."""
        row, (model, *suffix) = self.rows[label], column.split("_")
        own = [] if row["metric"] == self.paper.metric else [self.paper.metric]
        return [float(row["_".join([model, *own, *suffix]) + end]) for end in ("", "_low", "_high")]

    def diverged(self, label: str) -> str | None:
        """In how many repetitions a method has, if it has."""
        some, of = (int(self.rows[label][name]) for name in ("diverged", "seeds"))
        return f"{label} diverged in {some} of {times(of, 'repetition')}" if some else None

    def shown(self, value: float) -> str:
        return f"{100 * value:.2f} %" if is_share(self.paper.metric) else f"{value:.4g}"

    def of_figures(self) -> Iterator[Claim]:
        for label, printed in self.paper.figures.items():
            if label not in self.rows:  # the file has gained it since
                yield Claim(f"{label}: {self.shown(printed.value)}", "-", "missing")
                continue
            if (often := self.diverged(label)) is not None:
                yield Claim(f"{label}: {self.shown(printed.value)}", often, "diverged")
                continue
            ends = self.level(label, printed.column)
            ours, low, high = map(self.shown, ends)
            yield Claim(f"{label}: {self.shown(printed.value)}", f"{ours} ({low} to {high})",
                        near_to(ends[0], printed.value, share=is_share(self.paper.metric)), *ends)

    def of_orders(self) -> Iterator[Claim]:
        """Tau alone is as it was kept: it is of the single repetitions."""
        present = sorted((label for label in self.paper.figures
                          if label in self.rows and self.diverged(label) is None),
                         key=lambda label: -self.paper.figures[label].value)
        for variant, some in readings(self.paper.figures, present).items():
            own = [row for row in self.orderings if {row["better"], row["worse"]} <= {*some}]
            if len(some) < 2:
                continue
            instead = "" if variant is None else (
                f" with {variant} in the place of {self.paper.figures[variant].of}")
            says = f"the order of {len(some)} methods{instead}, {times(len(own), 'pair')}"
            tau = self.claims[says][3:6]
            count = Counter(row["appearance"] for row in own)
            words = "" if tau[0] is None else f"Kendall's tau {tau[0]:.2f} ({tau[1]:.2f} to {tau[2]:.2f}); "
            yield Claim(says, f"{words}of the pairs {count['appears']} appear, {count['reversed']} reversed, "
                              f"{count['open']} open", order_verdict(count), *tau)

    def stated(self) -> Iterator[Claim]:
        """P-values are as they were kept; without one a claim is missing, which the file has gained since."""
        for claim in self.paper.claims:
            if self.claims[claim.says].verdict == "missing":
                yield Claim(claim.says, "-", "missing")
                continue
            if often := [told for label in (claim.better, claim.worse) if (told := self.diverged(label))]:
                yield Claim(claim.says, "; ".join(often), "diverged")
                continue
            better, worse = (self.level(label, claim.column)[0] for label in (claim.better, claim.worse))
            p = self.claims[claim.says].p
            yield Claim(claim.says, f"{claim.better} {self.shown(better)}, {claim.worse} {self.shown(worse)}",
                        appearance(p, better - worse), p=p)

    def near(self) -> Iterator[Claim]:
        for claim in self.paper.near:
            level = {label: self.level(label, claim.column)[0] for label in (claim.method, *claim.best_of)}
            best = max(claim.best_of, key=lambda label, level=level: level[label])  # type: ignore[misc]
            yield claims.fact(claim.says, f"{claim.method} {self.shown(level[claim.method])}, {best} "
                                          f"{self.shown(level[best])}",
                              level[best] - level[claim.method] <= claim.near + 1e-12)


def appearance(p: float | None, lead: float) -> Verdict:
    return "open" if p is None or p >= 0.05 else "appears" if lead > 0 else "reversed"


@pytest.mark.parametrize(("item", "place"), COMPARED, ids=lambda each: getattr(each, "name", None))
def test_the_claims_of_a_comparison_are_made_of_its_results(item: items.Item, place: Path) -> None:
    """Every word, digit and verdict of them is written again from results.csv and orderings.csv."""
    kept = Comparison(item, place)
    assert kept.claims
    assert list(kept.claims.values()) == [*kept.of_figures(), *kept.of_orders(), *kept.stated(), *kept.near()]
    for claim in kept.claims.values():
        ends = [end for end in (claim.low, claim.mean, claim.high) if end is not None]
        assert ends == sorted(ends)


@pytest.mark.parametrize(("item", "place"), COMPARED, ids=lambda each: getattr(each, "name", None))
def test_orderings_are_of_figures_of_the_results(item: items.Item, place: Path) -> None:
    kept = Comparison(item, place)
    for row in kept.orderings:
        better, worse = (kept.level(row[name], kept.paper.figures[row[name]].column)[0]
                         for name in ("better", "worse"))
        assert row["scale"] == "difference"
        assert float(row["mean"]) == pytest.approx(better - worse)
        assert row["appearance"] == appearance(float(row["p"]), better - worse)


@pytest.mark.parametrize(("item", "place"), COMPARED, ids=lambda each: getattr(each, "name", None))
def test_what_stands_beside_the_baselines_is_of_the_results(item: items.Item, place: Path) -> None:
    kept = Comparison(item, place)
    for beside in baselines.read(place):
        figure = kept.paper.figures.get(beside.method)
        assert figure is None or not figure.column.startswith("global")
        ours, alone = (float(kept.rows[label]["personal"]) for label in (beside.method, beside.baseline))
        assert (beside.method_figure, beside.baseline_figure) == (kept.shown(ours), kept.shown(alone))
        assert {"ahead": "appears", "open": "open"}.get(beside.stands, "reversed") == appearance(
            float(beside.p), ours - alone)


STUDIED = [item for item in KEPT if item.is_study]


@pytest.mark.parametrize("item", STUDIED, ids=lambda item: item.name)
def test_the_claims_of_a_study_are_made_of_its_results(item: items.Item) -> None:
    """Judged again from results.csv, which has six digits."""
    module = study.load(item.path)
    kind = {name: type(value) for point in module.POINTS for name, value in point.items()}
    rows = [{name: kind.get(name, int if name == "seed" else float)(value) for name, value in row.items()
             if value}  # points may differ in what they measure
            for row in read(item.results / "results.csv")]
    assert [row for row in rows if row["seed"] == 0]
    assert claims.corrected(module.claims(rows)) == claims.read(item.results / "claims.csv")


@pytest.mark.parametrize("item", KEPT, ids=lambda item: item.name)
def test_what_is_kept_says_where_it_is_from(item: items.Item) -> None:
    for place in kept_in(item):
        about = json.loads((place / "about.json").read_text(encoding="utf-8"))
        assert about["item"] == item.name
        assert about["source"] == item.about().source
        assert about["command"].startswith(f"descant reproduce {item.name}")
        assert about["commit"]
        assert item.is_study == ("seconds" not in about)  # the points of a study know their processor time
        assert about.get("processor_seconds", about.get("seconds")) > 0

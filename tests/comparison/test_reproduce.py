"""`descant reproduce`: items are found, run, judged and kept; verdicts are computed from the figures."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

import descant
from cli_helpers import call
from descant import UsageError
from descant.algorithms import FedAvg, LocalTrain
from descant.comparison import execute, statistics
from descant.comparison.agreement import Appearance
from descant.comparison.budget import Cost
from descant.comparison.make import source_commit
from descant.comparison.paper import Figure, Paper
from descant.comparison.plan import joined_versions
from descant.comparison.reproduce import baselines, claims, items, orderings, pages, study, times
from descant.comparison.reproduce.baselines import Beside
from descant.comparison.reproduce.claims import Claim
from descant.comparison.reproduce.execute import ReproduceOptions, computing
from descant.comparison.reproduce.orderings import Kept
from descant.comparison.statistics import interval
from descant.core.algorithm import Round
from descant.core.vector import Model
from helpers import PoolHere

COMPARISON = """
[data]
dataset = "digits"
partition = "classes"
classes_per_client = 2
clients = 6
[model]
name = "mclr"
[train]
rounds = 2
local = { steps = 2 }
backend = "vectorised"
[eval]
every = 1
metric = "accuracy"
[algorithm]
name = "localtrain"
solver.lr = 0.1
[[algorithms]]
name = "fedavg"
solver.lr = 0.1
[paper]
source = "A paper, Table 7"
metric = "accuracy"
column = "personal"
percent = true
repetitions = 2
[paper.figures]
localtrain = 99.0
fedavg = 5.0
[[paper.claims]]
says = "training alone is ahead of FedAvg's model for all"
better = "localtrain"
worse = "fedavg"
[[paper.claims]]
says = "and the other way round"
better = "fedavg"
worse = "localtrain"
[[paper.claims]]
says = "FedAvg is near"
method = "fedavg"
best_of = ["localtrain"]
near = 0.05
"""

STUDY = '''"""Figure 9 of a paper: the square of a number."""

from descant.comparison.reproduce.claims import fact, ordering

SOURCE = "A paper, Figure 9"
SEEDS = 3
POINTS = [{"x": 2.0}, {"x": 3.0}]


def measure(seed, x):
    return {"square": x * x + 0.01 * seed}


def claims(rows):
    small, large = ([row["square"] for row in rows if row["x"] == x] for x in (2.0, 3.0))
    return [ordering("2 has the smaller square", small, large, words=("of 2", "of 3")),
            fact("squares are negative", f"{small[0]:g}", small[0] < 0)]
'''


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "docs" / "results").mkdir(parents=True)
    place = tmp_path / "experiments" / "paper"
    place.mkdir(parents=True)
    (place / "table_7.toml").write_text(COMPARISON)
    (place / "figure_9.py").write_text(STUDY)
    (place / "table_10.toml").write_text(COMPARISON.replace("Table 7", "Table 10").replace(
        "repetitions = 2", 'repetitions = 2\nneeds = "gpu"'))
    (place / "_shared.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(execute.concurrent.futures, "ProcessPoolExecutor", PoolHere)
    return tmp_path


def test_items_are_listed_with_what_they_need(repository: Path) -> None:
    result = call("reproduce")
    assert result.code == 0, result.err
    lines = [line for line in result.out.splitlines() if line.startswith("paper/")]
    assert [line.split()[0] for line in lines] == ["paper/figure_9", "paper/table_7", "paper/table_10"]
    assert "needs a GPU" in lines[2]
    assert [item.name for item in items.runnable(items.find(Path("experiments")))] == [
        "paper/figure_9", "paper/table_7"]
    assert not items.runnable(items.find(Path("experiments"))[:1], "steps")  # a study has one budget


def test_an_unknown_item_is_refused_with_those_there_are(repository: Path) -> None:
    result = call("reproduce", "paper/table_8")
    assert result.code == 2
    assert "table_7" in result.err
    assert "Traceback" not in result.err


def test_without_a_repository_it_says_where_the_items_are(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(descant, "__file__", str(tmp_path / "a" / "b" / "descant" / "__init__.py"))
    with pytest.raises(UsageError, match="in descant's repository, not in the installed"):
        items.place()
    with pytest.raises(UsageError, match="holds no items"):
        items.place(tmp_path)


@pytest.mark.thorough
def test_a_comparison_is_run_judged_and_kept(repository: Path) -> None:
    result = call("reproduce", "paper/table_7", "--budget", "rounds")
    assert result.code == 0, result.err
    kept = repository / "experiments" / "paper" / "results" / "table_7"
    names = {"results.csv", "orderings.csv", "claims.csv", "baselines.csv", "about.json"}
    assert {path.name for path in kept.iterdir()} == names
    with (kept / "results.csv").open() as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    ours = {name: float(rows["localtrain"][name]) for name in ("personal", "personal_low", "personal_high")}
    found = {claim.paper: claim for claim in claims.read(kept / "claims.csv")}
    level = found["localtrain: 99.00 %"]
    assert level.ours.startswith(f"{100 * ours['personal']:.2f} %")
    assert level.verdict == claims.near_to(ours["personal"], 0.99, share=True)
    assert found["fedavg: 5.00 %"].verdict == "not reproduced (ours is higher)"
    one, other = (found[says].verdict for says in ("training alone is ahead of FedAvg's model for all",
                                                   "and the other way round"))
    assert (one, other) in {("appears", "reversed"), ("reversed", "appears"), ("open", "open")}
    apart = ours["personal"] - float(rows["fedavg"]["personal"])
    assert found["FedAvg is near"].verdict == ("holds" if apart <= 0.05 else "does not hold")
    assert found["FedAvg is near"].ours.startswith("fedavg ")
    with (kept / "orderings.csv").open() as file:
        [ordering] = csv.DictReader(file)
    assert level[3:6] == tuple(ours[f"personal{end}"] for end in ("", "_low", "_high"))
    order = found["the order of 2 methods, 1 pair"]
    assert order.verdict == {"appears": "holds", "reversed": "does not hold", "open": "open"}[
        ordering["appearance"]]
    if order.verdict != "holds":
        assert f"{order.verdict.replace('does not hold', 'reversed')}: localtrain above fedavg." in result.out
    about = json.loads((kept / "about.json").read_text())
    assert about["command"] == "descant reproduce paper/table_7"
    assert about["commit"] == source_commit()
    assert (about["repetitions"], about["of"], about["budget"]) == (2, 2, "rounds")
    text = (repository / "docs" / "results" / "paper.md").read_text()
    assert text == pages.page(repository / "experiments" / "paper", repository / "docs" / "results")
    assert f"| localtrain: 99.00 % | {level.ours} | {level.verdict} |" in text
    assert f"{times.took(about)}, commit" in text
    runs = (repository / "results" / "paper" / "table_7" / "runs").glob("*/*/summary.json")
    summaries = [json.loads(path.read_text()) for path in runs]
    assert about["processor_seconds"] == round(sum(summary["processor_seconds"] for summary in summaries))
    assert "(../../experiments/paper/results/table_7/results.csv)" in text
    [far] = [line for line in text.splitlines() if line.startswith("1 of 3 items has been run")]
    assert "; 1 of the others needs a GPU or other data. Verdicts, with the paper's budget: " in far
    assert Counter({verdict: int(count) for count, verdict in (
        each.split(" ", 1) for each in far.rpartition(": ")[2].rstrip(".").split(", "))}) == Counter(
        claim.verdict for claim in found.values())
    assert "A paper, Table 10: `descant reproduce paper/table_10` (needs a GPU)" in text
    assert "Not run: `descant reproduce paper/table_7 --budget steps`" in text
    again = call("reproduce", "paper/table_7", "--budget", "rounds")
    assert "6 of 6 are already done" in again.out  # with the baseline that was missing
    assert f"took {times.took(about)}" in call("reproduce").out


@pytest.mark.thorough
def test_a_method_that_diverges_has_no_figure(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so in its last round; the others' claims are judged and kept."""
    def absorb(self: FedAvg, server: Model, mean: Model, round: Round) -> tuple[Model, dict[str, Any]]:
        return Model(mean.theta / (round.number != 2 or self.finetune > 0), mean.stats), {}

    monkeypatch.setattr(FedAvg, "absorb", absorb)
    path = repository / "experiments" / "paper" / "table_7.toml"
    path.write_text(COMPARISON.replace("[model]", "validation = 0.0\n[model]"))
    result = call("reproduce", "paper/table_7", "--budget", "rounds")
    assert result.code == 0, result.err
    found = {claim.paper: claim for claim in claims.read(path.parent / "results" / "table_7" / "claims.csv")}
    often = "fedavg diverged in 2 of 2 repetitions"
    assert found["localtrain: 99.00 %"].verdict not in {"diverged", "missing"}
    lost = [claim for claim in found.values() if claim.verdict == "diverged"]
    assert [claim.paper for claim in lost] == [
        "fedavg: 5.00 %", "training alone is ahead of FedAvg's model for all", "and the other way round",
        "FedAvg is near"]
    assert {claim.ours for claim in lost} == {often}
    assert f"| fedavg: 5.00 % | {often} | diverged |" in (
        repository / "docs" / "results" / "paper.md").read_text()


@pytest.mark.thorough
def test_both_budgets_are_run_and_a_run_serves_both(repository: Path) -> None:
    path = repository / "experiments" / "paper" / "table_7.toml"
    path.write_text(COMPARISON.replace("[paper]\n", '[[algorithms]]\nname = "pfedme"\n[paper]\n', 1))
    found = descant.reproduce("paper/table_7", repetitions=1)
    assert list(found.claims) == ["paper/table_7", "paper/table_7, same steps"]
    assert found.found[1].directory.name == "steps"
    place = repository / "results" / "paper"
    made = {label: [(place / out / "runs" / label / "seed-0" / "summary.json") for out in (
        "table_7", "table_7-steps")] for label in ("localtrain", "fedavg", "pfedme")}
    at = {label: [each.stat().st_mtime_ns for each in both] for label, both in made.items()}
    assert at["localtrain"][0] == at["localtrain"][1]  # copied, not made again
    assert at["fedavg"][0] == at["fedavg"][1]
    assert at["pfedme"][0] != at["pfedme"][1]
    assert [json.loads(each.read_text())["rounds"] for each in made["pfedme"]] == [2, 1]
    text = (repository / "docs" / "results" / "paper.md").read_text()
    assert "### With the same number of gradient steps" in text
    assert f"{pages.what_changes(items.Item(path))}\n" in text
    assert "1 repetition of the 2 that are planned" in text
    assert "descant reproduce paper/table_7 --budget steps --repetitions 1" in text
    with pytest.raises(UsageError, match="no other budget"):
        descant.reproduce("paper/figure_9", budget="steps")


@pytest.mark.thorough
def test_a_table_that_both_budgets_share_is_shown_once(repository: Path) -> None:
    """Its methods take a gradient a step each, so that equal rounds are equal steps."""
    descant.reproduce("paper/table_7", repetitions=1)
    text = (repository / "docs" / "results" / "paper.md").read_text()
    assert text.count("| claim of the paper |") == 1
    assert text.split("### With the same number of gradient steps\n\n")[1].startswith("Nothing changes: all ")


@pytest.mark.parametrize(("before", "now", "both"), [
    ("a", "a", "a"), ("a", "b", "a, then b"), ("a, then b", "b", "a, then b"),
    ("a", "a, then b", "a, then b"), ("c", "a, then b", "c, then a, then b")])
def test_the_commits_of_runs_that_were_taken_are_told(before: str, now: str, both: str) -> None:
    found = joined_versions({"commit": before}, {"commit": now, "torch": "2"})
    assert found == {"commit": both, "torch": "2"}


def beside(stands: str, method: str = "apfl") -> Beside:
    return Beside("localtrain", method, "97.00 %", "98.00 %", "0.001", stands)  # type: ignore[arg-type]


def test_what_changes_with_matched_steps_is_computed(repository: Path) -> None:
    item = items.Item(repository / "experiments" / "paper" / "table_7.toml")
    (item.results / "steps").mkdir(parents=True)
    assert pages.what_changes(item).startswith("What changes is not known")
    claims.write([Claim("a: 1", "1", "agrees"), Claim("b: 1", "1", "agrees")], item.results / "claims.csv")
    claims.write([Claim("a: 1", "1", "agrees")], item.results / "steps" / "claims.csv")
    assert pages.what_changes(item) == "No verdict changes."
    claims.write([Claim("a: 1", "2", "ours is higher")], item.results / "steps" / "claims.csv")
    baselines.write([beside("ahead"), beside("open", "ditto")], item.results)
    baselines.write([beside("behind"), beside("open", "ditto")], item.results / "steps")
    assert pages.what_changes(item) == (
        "Verdicts that change: a: 1 (agrees, then ours is higher). What stands otherwise beside the "
        "baselines: apfl beside localtrain (ahead, then behind).")


def test_what_stands_beside_a_baseline_is_said() -> None:
    assert baselines.sentences([beside("ahead"), beside("open", "ditto"), beside("open", "l2gd")]) == [
        "**localtrain** has 97.00 %; ahead of it: apfl (98.00 %); no significant difference: ditto "
        "(98.00 %), l2gd (98.00 %)."]


def test_a_study_is_measured_once_and_goes_on(repository: Path) -> None:
    found = descant.reproduce("paper/figure_9", repetitions=1)
    assert [claim.verdict for claim in found.claims["paper/figure_9"]] == ["open", "does not hold"]
    place = repository / "results" / "paper" / "figure_9" / "points"
    first = {path: path.stat().st_mtime_ns for path in place.iterdir()}
    found = descant.reproduce("paper/figure_9")
    assert [claim.verdict for claim in found.claims["paper/figure_9"]] == ["appears", "does not hold"]
    assert len(list(place.iterdir())) == 6
    assert all(path.stat().st_mtime_ns == at for path, at in first.items())
    assert repr(found) == "Reproduction(1 item, 2 claims: 1 appears, 1 does not hold)"
    assert found.table().loc["paper/figure_9"]["verdict"].tolist() == ["appears", "does not hold"]
    assert "<td>squares are negative</td>" in found._repr_html_()
    with (found.found[0].directory / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["square"]) for row in rows[:3]] == [4.0, 9.0, 4.01]


def test_a_point_that_fails_is_named(repository: Path) -> None:
    path = repository / "experiments" / "paper" / "figure_9.py"
    path.write_text(path.read_text().replace("    return {", '    assert x < 3, "too large"\n    return {'))
    result = call("reproduce", "paper/figure_9")
    assert result.code == 1
    assert "3 of 6 points failed; the first: x 3.0, seed 0: too large" in result.err


@pytest.mark.parametrize("text", ["SEEDS = 3", 'SOURCE = "x"\nSEEDS = "many"', "def"])
def test_what_is_no_study_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "figure.py").write_text(text)
    with pytest.raises(UsageError, match=r"is not a study|cannot read"):
        study.read_facts(tmp_path / "figure.py")


def test_verdicts_of_figures_and_orderings() -> None:
    assert claims.near_to(0.97, 0.98, share=True) == "agrees"
    assert claims.near_to(0.96, 0.98, share=True) == "ours is lower"
    assert claims.near_to(1.0, 0.98, share=True) == "ours is higher"
    assert claims.near_to(0.89, 0.98, share=True) == "ours is lower"
    assert claims.near_to(0.87, 0.98, share=True) == "not reproduced (ours is lower)"
    assert claims.near_to(0.8, 0.7, share=True) == claims.near_to(0.7, 0.6, share=True) == "ours is higher"
    assert claims.near_to(0.3, 0.1, share=True) == "not reproduced (ours is higher)"
    assert [claims.near_to(ours, 10.0) for ours in (10.9, 19.0, 21.0, 5.1, 4.9, -10.0)] == [
        "agrees", "ours is higher", "not reproduced (ours is higher)", "ours is lower",
        "not reproduced (ours is lower)", "not reproduced (ours is lower)"]
    assert [claims.near_to(ours, -10.0) for ours in (-10.9, -19.0, -21.0, 10.0)] == [
        "agrees", "ours is lower", "not reproduced (ours is lower)", "not reproduced (ours is higher)"]
    rng = np.random.default_rng(0)
    lost = claims.corrected([claims.ordering("", [1.0, 2.0, math.nan], [1.0, 2.0, 3.0], words=("a", "b"))])
    assert lost == [claims.Claim("", "a diverged", "diverged")]
    near = rng.normal(0, 1, 6)
    assert claims.ordering("", near, near + 5 + 0.1 * rng.normal(size=6)).verdict == "appears"
    assert claims.ordering("", near, near + 5 + 0.1 * rng.normal(size=6), lower=False).verdict == "reversed"
    assert claims.ordering("", near, near + 0.1 * rng.normal(size=6)).verdict == "open"


@pytest.mark.parametrize(("appears", "reversed", "open", "verdict"), [
    (3, 0, 0, "holds"), (2, 0, 1, "holds in part"), (0, 0, 3, "open"), (2, 1, 0, "does not hold"),
    (0, 1, 2, "does not hold"), (0, 0, 0, "open")])
def test_an_order_holds_if_all_of_its_pairs_appear(appears: int, reversed: int, open: int, verdict: str
                                                   ) -> None:
    count: Counter[Appearance] = Counter({"appears": appears, "reversed": reversed, "open": open})
    assert claims.order_verdict(count) == verdict


def test_which_pairs_do_not_appear_is_said() -> None:
    some = [Kept("a", "b", "appears"), Kept("c", "d", "reversed"), Kept("e", "f", "open")]
    assert orderings.sentences(some, "file") == ["Pairs that are reversed: c above d.",
                                                 "Pairs that are open: e above f."]
    many = [Kept("a", str(k), "open") for k in range(9)]
    assert orderings.sentences(many, "file") == ["Pairs that are open: 9 (file)."]
    assert orderings.sentences(many[:8], "file")[0].endswith("a above 6, a above 7.")


def test_orderings_of_a_study_are_corrected_for_their_number() -> None:
    gaps = np.array([2.0, 3.0, 4.0])
    [alone] = claims.corrected([claims.ordering("", [0, 0, 0], gaps, words=("a", "b"))])
    p = 2 * stats.t.sf(3 * math.sqrt(3), 2)
    assert alone == Claim("", "a 0, b 3", "appears", p=float(f"{p:.2g}"))
    assert alone.cells == ("", "a 0, b 3, p = 0.035", "appears")
    both = claims.corrected([claims.ordering("", [0, 0, 0], gaps), claims.fact("", "", True),
                             claims.ordering("", gaps, [0, 0, 0])])
    assert [claim.verdict for claim in both] == ["open", "holds", "open"]
    assert both[0].p == pytest.approx(1 - (1 - p) ** 2, abs=0.001)
    assert claims.ordering("", gaps, [0, 0, 0]).verdict == "reversed"
    once = claims.corrected([claims.ordering("", [0], [1])])
    assert (once[0].verdict, once[0].p) == ("open", None)


def test_a_p_value_is_told_on_its_side_of_the_level() -> None:
    assert [claims._told(p) for p in (None, 0.0004, 0.0124, 0.04996, 0.0501, 1.0)] == [
        None, 0.0, 0.012, 0.04996, 0.05, 1.0]
    assert Claim("a", "b", "appears", p=0.0).cells == ("a", "b, p < 0.001", "appears")


def test_what_a_study_says_is_corrected_and_judged_by_what_is_kept(repository: Path) -> None:
    path = repository / "experiments" / "paper" / "figure_9.py"
    path.write_text(STUDY.replace("+ 0.01 * seed", "+ 2 * seed * (x > 2) + seed / 3").replace(
        'return [', 'return [ordering("again", small, large), ').replace('f"{small[0]:g}"', "repr(small[1])"))
    assert "repr(small[1])" in path.read_text()
    [found] = descant.reproduce("paper/figure_9").found
    assert [claim.verdict for claim in found.claims] == ["open", "open", "does not hold"]
    with (found.directory / "results.csv").open() as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    module = study.load(path)
    assert claims.ordering("", *([row["square"] for row in rows if row["x"] == x] for x in (2.0, 3.0))
                           ).verdict == "appears"  # if it were the only one
    assert claims.corrected(module.claims(rows)) == found.claims
    assert claims.read(found.directory / "claims.csv") == found.claims
    about = json.loads((found.directory / "about.json").read_text())
    assert "seconds" not in about
    assert about["processor_seconds"] >= 0


def test_what_a_paper_scores_by_a_model_for_all_is_not_beside_the_baselines() -> None:
    """mh-G is mh-P, scored by its model for all."""
    algorithms = {"localtrain": LocalTrain(), "mh-P": FedAvg(), "mh-G": FedAvg(), "other": FedAvg()}
    paper = Paper("Table 4", "accuracy", {"mh-P": Figure(0.8, "personal"),
                                          "mh-G": Figure(0.3, "global_pooled")})
    plan = SimpleNamespace(paper=paper, methods={
        label: SimpleNamespace(algorithm=algorithm) for label, algorithm in algorithms.items()})
    scores = np.array([[0.9, 0.8, 0.8, 0.7], [0.91, 0.8, 0.8, 0.7]])
    rows = [SimpleNamespace(label=label, figures={"personal": interval(scores[:, k])})
            for k, label in enumerate(algorithms)]
    found = SimpleNamespace(plan=plan, rows=rows, compared=[*algorithms], analysis=statistics.compare(scores),
                            metric="accuracy", unfinished={})
    assert [each.method for each in baselines.of(found)] == ["mh-P", "other"]  # type: ignore[arg-type]
    plan.paper = None
    assert len(baselines.of(found)) == 3  # type: ignore[arg-type]


def test_computing_is_processor_time_where_all_runs_know_it() -> None:
    old, new = {"seconds": 10.4}, {"seconds": 20.0, "processor_seconds": 15.2}
    assert computing([new, new]) == {"seconds": 40, "processor_seconds": 30}
    assert computing([old, new]) == {"seconds": 30}
    assert computing([new, {**new, "processor_seconds": None}]) == {"seconds": 40}
    assert times.took({"seconds": 40, "processor_seconds": 30}) == "30.0 s of processor time"
    assert times.took({"seconds": 40}) == "40.0 s by the clock"


def test_the_list_has_the_time_that_an_item_took(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "read", lambda place: {"paper/figure_9": 5.0, "paper/table_7": 600.0})
    descant.reproduce("paper/figure_9", repetitions=1)
    lines = call("reproduce").out.splitlines()
    rows = {line.split()[0]: line for line in lines if line.startswith("paper/")}
    assert "took" in rows["paper/figure_9"]
    assert "of processor time" in rows["paper/figure_9"]
    assert "5.0 s" not in rows["paper/figure_9"]
    assert "about 10 min 0 s" in rows["paper/table_7"]
    assert lines[-1] == ("3 items; an ordinary machine can run 1 more, in about 10 min 0 s of one core here, "
                         "at the papers' budgets")


def test_what_is_kept_is_not_replaced_by_fewer_repetitions(repository: Path) -> None:
    descant.reproduce("paper/figure_9", repetitions=2)
    kept = repository / "experiments" / "paper" / "results" / "figure_9"
    before = {path.name: path.read_bytes() for path in kept.iterdir()}
    with pytest.raises(UsageError, match=r"2 repetitions of paper/figure_9 are kept, and 1 would take their "
                                         r"place: leave --repetitions out, or"):
        descant.reproduce("paper/figure_9", repetitions=1)
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == before


def test_what_an_item_needs_is_said_before_it_runs(repository: Path) -> None:
    path = repository / "experiments" / "paper" / "figure_9.py"
    path.write_text(STUDY + '\nNEEDS = "gpu"\n')
    assert "note: paper/figure_9 needs a GPU; without, it takes very long" in call(
        "reproduce", "paper/figure_9", "--repetitions", "1").out.replace("\n", " ")


def test_an_estimate_has_the_evaluations(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = repository / "experiments" / "paper" / "table_7.toml"
    path.write_text(COMPARISON.replace("rounds = 2", "rounds = 10").replace("every = 1\n", "every = 4\n"))
    asked = []

    def cost(setup, found, budget, *, scored):
        asked.append((budget, scored))
        return {"a": Cost(10, 1.0, 5.0), "b": Cost(10, 2.0, 0.0)}

    monkeypatch.setattr(times, "rounds_of", cost)
    assert times.measured(items.Item(path)) == 2 * (10 * 1.0 + 3 * 5.0 + 10 * 2.0)  # at rounds 4, 8 and 10
    assert asked == [("rounds", True)]


@pytest.mark.parametrize(("work", "seconds"), [
    ("def work(n): return n", 2 * 3.0 * (5 + 1 + 2)), ("", 2 * 3.0 * 3)])
def test_an_estimate_of_a_study_knows_which_points_are_more_work(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: str, seconds: float) -> None:
    path = tmp_path / "paper" / "figure_1.py"
    path.parent.mkdir()
    path.write_text("SOURCE = 'A'\nSEEDS = 2\nPOINTS = [{'n': 5}, {'n': 1}, {'n': 2}]\n"
                    f"def measure(seed, n): ...\ndef claims(rows): ...\n{work}\n")
    now, asked = [0.0], []

    def measure(path: Path, seed: int, point: dict[str, int]) -> dict[str, float]:
        now[0] += 3.0
        asked.append(point)
        return {}

    monkeypatch.setattr(times.study, "measure", measure)
    monkeypatch.setattr(times.time, "process_time", lambda: now[0])
    assert times.measured(items.Item(path)) == seconds
    assert asked == [{"n": 1 if work else 5}]


def test_a_claim_that_must_hold_in_every_repetition() -> None:
    assert claims.always("a", np.array([True, True])) == Claim("a", "in 2 of 2 repetitions", "holds")
    assert claims.always("a", np.array([True, False]), "b") == Claim("a", "in 1 of 2 repetitions (b)",
                                                                     "does not hold")


def test_claims_are_read_as_they_were_written(tmp_path: Path) -> None:
    given = [Claim('a, "b" | c', "1, 2", "agrees", 0.1, 0.05, np.float64(0.2)), Claim("d", "", "missing"),
             Claim("e", "f", "open", p=0.5)]
    claims.write(given, tmp_path / "claims.csv")
    assert claims.read(tmp_path / "claims.csv") == given


def test_times_are_scaled_to_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "pace", lambda: 0.5)
    assert times.read(tmp_path) == {}
    times.write(tmp_path, {"a/b": 10.0})
    monkeypatch.setattr(times, "pace", lambda: 1.0)  # a machine of half the speed
    assert times.read(tmp_path) == {"a/b": 20.0}
    assert times.measured_in(tmp_path) == {"a/b": 10.0}
    times.write(tmp_path, {"c/d": 3.0})
    kept = json.loads((tmp_path / "times.json").read_text())
    assert kept == {"pace": 0.5, "seconds": {"a/b": 10.0, "c/d": 1.5}}  # what was there is not scaled again
    assert times.read(tmp_path) == {"a/b": 20.0, "c/d": 3.0}


@pytest.mark.slow
def test_an_item_is_timed_by_a_round_of_each_method(repository: Path) -> None:
    assert call("reproduce", "paper", "--time", "--experiments", "experiments").code == 0
    found = json.loads((repository / "experiments" / "times.json").read_text())["seconds"]
    assert set(found) == {"paper/figure_9", "paper/table_7"}  # not what needs a GPU
    assert found["paper/table_7"] > 0
    page = pages.page(repository / "experiments" / "paper", repository / "docs" / "results")
    assert "`descant reproduce paper/table_7` (about " in page


def test_wrong_wishes_are_refused(tmp_path: Path) -> None:
    for wrong in ({"jobs": 0}, {"repetitions": 0}, {"budget": "converge"}):
        with pytest.raises(UsageError):
            ReproduceOptions(tmp_path, **wrong)

"""`descant reproduce`: items are found, run, judged and kept; verdicts are computed from the figures."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

import descant
from cli_helpers import call
from descant import UsageError
from descant.comparison import execute
from descant.comparison.make import source_commit
from descant.comparison.plan import joined_versions
from descant.comparison.reproduce import baselines, claims, items, pages, study, times
from descant.comparison.reproduce.baselines import Beside
from descant.comparison.reproduce.claims import Claim
from descant.comparison.reproduce.execute import ReproduceOptions
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
        ours = {row["method"]: float(row["personal"]) for row in csv.DictReader(file)}
    found = {claim.paper: claim for claim in claims.read(kept / "claims.csv")}
    level = found["localtrain: 99.00 %"]
    assert level.ours.startswith(f"{100 * ours['localtrain']:.2f} %")
    assert level.verdict == ("agrees" if abs(ours["localtrain"] - 0.99) <= 0.01 else "ours is lower")
    assert found["fedavg: 5.00 %"].verdict == "ours is higher"
    one, other = (found[says].verdict for says in ("training alone is ahead of FedAvg's model for all",
                                                   "and the other way round"))
    assert (one, other) in {("appears", "reversed"), ("reversed", "appears"), ("open", "open")}
    with (kept / "orderings.csv").open() as file:
        [ordering] = csv.DictReader(file)
    order = found["the order of 2 methods, 1 pair"]
    assert order.verdict == {"appears": "holds", "reversed": "does not hold", "open": "open"}[
        ordering["appearance"]]
    about = json.loads((kept / "about.json").read_text())
    assert about["command"] == "descant reproduce paper/table_7"
    assert about["commit"] == source_commit()
    assert (about["repetitions"], about["of"], about["budget"]) == (2, 2, "rounds")
    text = (repository / "docs" / "results" / "paper.md").read_text()
    assert text == pages.page(repository / "experiments" / "paper", repository / "docs" / "results")
    assert f"| localtrain: 99.00 % | {level.ours} | {level.verdict} |" in text
    assert "(../../experiments/paper/results/table_7/results.csv)" in text
    assert "1 of 3 items has been run" in text
    assert "A paper, Table 10: `descant reproduce paper/table_10` (needs a GPU)" in text
    assert "Not run: `descant reproduce paper/table_7 --budget steps`" in text
    again = call("reproduce", "paper/table_7", "--budget", "rounds")
    assert "6 of 6 are already done" in again.out  # with the baseline that was missing


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
    assert claims.near_to(0.976, 0.98, 0.01) == "agrees"
    assert claims.near_to(0.96, 0.98, 0.01) == "ours is lower"
    assert claims.near_to(1.0, 0.98, 0.01) == "ours is higher"
    rng = np.random.default_rng(0)
    near = rng.normal(0, 1, 6)
    assert claims.ordering("", near, near + 5 + 0.1 * rng.normal(size=6)).verdict == "appears"
    assert claims.ordering("", near, near + 5 + 0.1 * rng.normal(size=6), lower=False).verdict == "reversed"
    assert claims.ordering("", near, near + 0.1 * rng.normal(size=6)).verdict == "open"


def test_claims_are_read_as_they_were_written(tmp_path: Path) -> None:
    given = [Claim('a, "b" | c', "1, 2", "agrees"), Claim("d", "", "missing")]
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

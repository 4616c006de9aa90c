"""Comparing methods: the list, the plan, what is done again and what is not, the table and the answer."""

from __future__ import annotations

import csv
import dataclasses
import json
import multiprocessing
import os
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from rich.console import Console

from descant.algorithms import CGPFL, Ditto, FedAvg, LocalTrain, pFedBreD, pFedMe
from descant.cli import main
from descant.comparison import (
    budget,
    conclusions,
    execute,
    finished,
    methods,
    outlook,
    page,
    results,
)
from descant.comparison import plan as planning
from descant.comparison.make import make
from descant.core.permit import ran
from descant.core.vector import Model
from descant.data.spec import DataSpec
from descant.engine.backends.base import InProcess
from descant.engine.settings import Train
from descant.errors import DescantError, UsageError
from descant.experiment import directory as layout
from descant.experiment import run as runs
from descant.experiment.config import Experiment, read_toml
from descant.priors.solve import SGD
from descant.view.comparison import draw_comparison, show_comparison
from helpers import PoolHere, require_data

pytestmark = pytest.mark.thorough

TOML = """
[data]
dataset = "digits"
partition = "classes"
clients = 6
[algorithm]
name = "pfedme"
K = 3
[train]
rounds = 4
cohort = 3
local = { steps = 2 }
backend = "vectorised"
[eval]
every = 2
[[algorithms]]
name = "localtrain"
[[algorithms]]
label = "tuned"
name = "fedavg"
finetune = 2
"""


@pytest.fixture
def tables(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "e.toml").write_text(TOML)
    return read_toml(tmp_path / "e.toml")


class Seen:
    """A display that remembers."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.failed: dict[str, str] = {}
        self.notes: list[str] = []

    def progress(self, working: Any) -> None:
        pass

    def ended(self, job: Any, failure: str | None) -> None:
        if failure is None:
            self.done.append(job.title)
        else:
            self.failed[job.title] = failure

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Runs are carried out in this process, one after another."""
    monkeypatch.setattr(execute.concurrent.futures, "ProcessPoolExecutor", PoolHere)
    return Seen()


def done(plan: planning.Plan, seen: Seen, labels: list[str] | None = None, seeds: list[int] | None = None
         ) -> results.Results:
    assert execute.execute(plan, plan.runs(labels, seeds), 1, seen) == []
    return results.read(plan)


def made(tables: dict[str, Any], out: Path, seeds: Any, **options: Any) -> tuple[planning.Plan, list[str]]:
    with planning.held(out):
        return make(tables, out, seeds, **{"permit": ran()} | options)


# -- the list of methods -------------------------------------------------------------------------------


def listed(text: str | None, tables: dict[str, Any] | None = None, *, baselines: bool = False
           ) -> dict[str, methods.Contender]:
    found = methods.contenders(tables or {}, text, Train(local={"steps": 7}), baselines=baselines)
    return {contender.label: contender for contender in found}


def test_a_list_with_settings() -> None:
    found = listed("fedavg,ditto:lam=0.5,solver.lr=0.2,pfedbred:strategy=mh,lam=15,label=mine")
    assert {label: each.algorithm for label, each in found.items()} == {
        "fedavg": FedAvg(), "ditto": Ditto(lam=0.5, solver=SGD(lr=0.2)),
        "mine": pFedBreD(strategy="mh", lam=15)}
    assert found["ditto"].given == {"lam", "solver.lr"}


def test_a_grid_is_a_contender_for_each_value() -> None:
    found = listed("pfedbred:strategy=[mh,lg],lam=[15,30],K=2")
    assert list(found) == ["pfedbred strategy=mh lam=15", "pfedbred strategy=mh lam=30",
                           "pfedbred strategy=lg lam=15", "pfedbred strategy=lg lam=30"]
    last = found["pfedbred strategy=lg lam=30"]
    assert last.algorithm == pFedBreD(strategy="lg", lam=30, K=2)
    assert last.grid == ("pfedbred", {"strategy": "lg", "lam": 30})
    assert listed(None, {"algorithm": {"name": "ditto", "grid": {"solver.lr": [0.1, 0.2]}}}).keys() == {
        "ditto solver.lr=0.1", "ditto solver.lr=0.2"}


def test_methods_of_the_same_name_are_told_apart_by_their_settings() -> None:
    assert list(listed("pfedme:lam=5,pfedme:lam=15,fedavg")) == ["pfedme lam=5", "pfedme lam=15", "fedavg"]
    with pytest.raises(UsageError, match="two methods are called 'pfedme'"):
        listed("pfedme,pfedme")


def test_a_name_of_the_file_stands_for_what_the_file_says(tables: dict[str, Any]) -> None:
    found = listed("tuned:finetune=5,pfedme", tables)
    assert found["tuned"].algorithm == FedAvg(finetune=5)
    assert found["pfedme"].algorithm == pFedMe(K=3)


def test_the_methods_of_a_file(tables: dict[str, Any]) -> None:
    assert {label: each.algorithm for label, each in listed(None, tables, baselines=True).items()} == {
        "pfedme": pFedMe(K=3), "localtrain": LocalTrain(), "tuned": FedAvg(finetune=2)}  # they are there


def test_baselines_are_added() -> None:
    found = listed("ditto:solver.lr=0.3", baselines=True)
    assert found["localtrain"].algorithm == LocalTrain(solver=SGD(lr=0.3))
    assert found["fedavg + fine-tuning"].algorithm == FedAvg(solver=SGD(lr=0.3), finetune=7)
    assert [each.added for each in found.values()] == [False, True, True]
    assert listed("fedavg,pfedme", baselines=True)["fedavg + fine-tuning"].algorithm.finetune == 7


@pytest.mark.parametrize(("text", "words"), [
    ("fedavgg", ["algorithm 'fedavgg'", "did you mean 'fedavg'?"]),
    ("pfedme:lamb=3", ["'lamb'", "did you mean 'lam'?"]),
    ("pfedme:lam=-1", ["--algorithms pfedme.lam", "at least 0"]),
    ("pfedme:lam=[1,-1]", ["at least 0"]),
    ("pfedme:lam=[]", ["grid", "list of values"]),
    ("pfedme:lam=[1,2", ["left open"]),
    ("lam=3", ["after the name of a method"]),
    ("pfedme:lam", ["name:field=value"]),
    ("pfedme:label=a/b", ["directory", "label=mine"]),
    ("pfedme:label=''", ["label"]),
    ("", ["a name is missing"]),
    ("fedavg,,ditto", ["a name is missing"]),
])
def test_bad_lists(text: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        listed(text)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(("change", "words"), [
    ({"algorithms": [{"name": "fedavgg"}]}, ["algorithms[0].name", "did you mean 'fedavg'?"]),
    ({"algorithms": [{"name": "fedavg", "label": "../up"}]}, ["label", "directory"]),
    ({"algorithms": ["fedavg"]}, ["algorithms[0]", "section"]),
    ({"algorithms": {"name": "fedavg"}}, ["[[algorithms]]"]),
    ({"algorithms": [{"name": "fedavg", "finetune": -1}]}, ["algorithms[0].finetune", "at least 0"]),
    ({"algorithms": [{"name": "fedavg", "grid": {"finetune": 3}}]}, ["algorithms[0].grid", "list"]),
])
def test_bad_files(tables: dict[str, Any], change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        listed(None, tables | change)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["pfedbred", "one_stage_fedprox", "cgpfl", "fedmap", "pfedgt"])
def test_every_experiment_of_the_project_can_be_read(name: str) -> None:
    tables = read_toml(Path(__file__).parents[2] / "experiments" / f"{name}.toml")
    assert tables["algorithm"]["name"] == name
    Experiment.parse(tables)
    labels = listed(None, tables, baselines=True)
    assert not any(each.added for each in labels.values())  # with settings of their own
    for baseline in ("localtrain", "fedavg", "fedavg + fine-tuning", "pfedme"):
        assert baseline in labels


# -- the plan ------------------------------------------------------------------------------------------


def test_equal_budgets(tables: dict[str, Any], tmp_path: Path) -> None:
    """pFedMe makes 3 steps on a batch, the others 1: they get 3 times its rounds, and as many evaluations."""
    plan, labels = made(tables, tmp_path / "out", [0, 5])
    assert labels == ["pfedme", "localtrain", "tuned"]
    assert [(p.label, p.seed, p.size, p.experiment.eval.every) for p in plan.runs()] == [
        (label, seed, rounds, every) for seed in (0, 5)
        for label, rounds, every in (("pfedme", 4, 2), ("localtrain", 12, 6), ("tuned", 12, 6))]
    for p in plan.runs():  # the same clients for all; a seed is one split and initial model, and the cohorts
        assert (p.experiment.data.seed, p.experiment.data.split, p.experiment.train.seed) == (
            0, p.seed, p.seed)
    rounds, _ = made(tables, tmp_path / "rounds", [0], budget="rounds")
    assert {p.size for p in rounds.runs()} == {4}
    assert planning.read(tmp_path / "out") == plan


def test_an_opening_does_not_spoil_the_budget(tables: dict[str, Any], tmp_path: Path) -> None:
    """pFedGT asks everybody once before it trains, and may not spend all its rounds on that; the rounds of
    others do not depend on whether it is there."""
    data = {"dataset": "digits", "partition": "dirichlet", "alpha": 0.1, "clients": 6}
    unbalanced = tables | {"data": data, "train": tables["train"] | {"local": {"epochs": 1}},
                           "algorithms": [{"name": "ditto"}]}
    alone, _ = made(unbalanced, tmp_path / "alone", [0], baselines=False)
    opened = unbalanced | {"algorithms": [{"name": "ditto"}, {"name": "pfedgt", "init": "gradient"}]}
    plan, _ = made(opened, tmp_path / "out", [0], baselines=False)
    assert plan.methods["ditto"].rounds == alone.methods["ditto"].rounds == 6  # 2 steps where pFedMe has 3
    short = opened | {"train": opened["train"] | {"rounds": 1}, "algorithm": {"name": "fedavg"}}
    plan, _ = made(short, tmp_path / "short", [0], baselines=False)
    assert plan.methods["pfedgt"].rounds == 2


def test_a_method_that_diverges_at_once_does_not_stop_the_others(tables: dict[str, Any], tmp_path: Path,
                                                                 seen: Seen) -> None:
    plan, _ = made(tables, tmp_path / "out", [0], algorithms="fedavg,ditto:solver.lr=1e38", baselines=False)
    [(run, why)] = execute.execute(plan, plan.runs(), 1, seen)
    assert run.label == "ditto"
    assert "diverges" in why
    assert seen.done == ["fedavg, seed 0"]


def test_a_run_that_diverges_on_its_way_is_a_result(tables: dict[str, Any], tmp_path: Path, seen: Seen,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """Its figures are those of the round before, but without validation data nobody would have stopped there:
    the method is not compared, and not tried again."""
    def absorb(self: FedAvg, server: Model, mean: Model, round: Any) -> Any:
        return Model(mean.theta / (round.number != 3), mean.stats), {}

    monkeypatch.setattr(FedAvg, "absorb", absorb)
    tables["data"]["validation"] = 0.0
    asked: dict[str, Any] = {"algorithms": "fedavg,ditto", "baselines": False, "budget": "rounds"}
    plan, _ = made(tables, tmp_path / "out", [0], **asked)
    found = done(plan, seen)
    assert found.diverged == {"fedavg": (1, 1)}
    assert found.left_out == {"fedavg": "it diverged in 1 of 1 repetitions"}
    assert found.failures == {}
    [run] = [run for run in found.finished if run.label == "fedavg"]
    assert (run.summary["stopped"], run.summary["rounds"], run.summary["best"]) == ("diverged", 2, None)
    assert run.summary["diverged"]
    assert run.lost == 0
    [note] = seen.notes
    assert note.startswith("fedavg, seed 0: the training has diverged: the server's theta is not finite "
                           "after round 3")
    assert done(plan, seen).diverged == found.diverged
    assert sorted(seen.done) == ["ditto, seed 0", "fedavg, seed 0"]
    assert page.page_data(plan.out)["finished"]

    tables["data"]["validation"] = 0.2  # with it, the best round is chosen, and that one is sound
    plan, _ = made(tables, tmp_path / "chosen", [0], **asked)
    found = done(plan, seen)
    assert found.diverged == found.left_out == {}
    assert [(run.label, run.summary["stopped"]) for run in found.finished] == [
        ("fedavg", "diverged"), ("ditto", None)]
    last = {row.label: "personal_last" in row.figures for row in found.rows}
    assert last == {"fedavg": False, "ditto": True}  # the last round before is no result
    for same in ("steps", "converge"):
        told = [*budget.notes(plan._replace(budget=same), found.finished)]
        assert told[0] == "fedavg with seed 0 diverged after 2 rounds, and ended there."
        assert not any(line.startswith("fedavg ") for line in told[1:])


def test_all_methods_see_the_same(tables: dict[str, Any], tmp_path: Path, seen: Seen) -> None:
    """The same initial model, cohorts and batches: FedProx without its pull is FedAvg, to the last bit."""
    plan, _ = made(tables, tmp_path / "out", [3], algorithms="fedavg,fedprox:mu=0", baselines=False)
    done(plan, seen)
    a, b = ((run.place / finished.FILE).read_bytes() for run in plan.runs())
    assert a == b


@pytest.mark.slow
def test_what_is_missing_is_done_and_the_budgets_are_equal_on_disk(tables: dict[str, Any], tmp_path: Path,
                                                                   seen: Seen, drawing: Any) -> None:
    out = tmp_path / "out"
    plan, _ = made(tables, out, [0, 1])
    done(plan, seen, ["pfedme", "localtrain"], [0])
    assert seen.done == ["pfedme, seed 0", "localtrain, seed 0"]
    found = done(plan, seen)
    assert seen.done[2:] == ["tuned, seed 0", "pfedme, seed 1", "localtrain, seed 1", "tuned, seed 1"]
    done(plan, seen)
    assert len(seen.done) == 6
    summaries = {(p.label, p.seed): json.loads((p.place / "summary.json").read_text()) for p in plan.runs()}
    assert {s["grad_steps"] for s in summaries.values()} == {4 * 3 * 2 * 3}
    cohorts = {p.label: [row["participants"] for row in layout.read_metrics(p.place)] for p in plan.runs()}
    assert all(set(each) == {3} for each in cohorts.values())

    rows = {row.label: row for row in found.rows}
    means = [row.figures["personal"].mean for row in found.rows]
    assert means == sorted(means, reverse=True)  # best first
    assert found.best == found.rows[0].label
    values = [summaries["tuned", seed]["best"]["personal"]["test"]["accuracy"]["mean"] for seed in (0, 1)]
    personal = rows["tuned"].figures["personal"]
    assert personal.mean == pytest.approx(sum(values) / 2, abs=1e-6)
    these = {row.label: row for row in results.read(plan._replace(population="rows")).rows}
    alone = these["tuned"].figures["personal"]  # speaks of these rows: what the repetitions say, and no more
    reach = 12.706 * abs(values[0] - values[1]) / 2
    assert alone.low == pytest.approx(max(0.0, alone.mean - reach), rel=1e-3)
    assert alone.high == pytest.approx(min(1.0, alone.mean + reach), rel=1e-3)
    assert found.has_rows
    assert "global" not in rows["localtrain"].figures
    assert {"personal_loss", "personal_balanced_accuracy", "personal_auroc", "personal_calibration_error",
            "personal_last", "worst_decile", "gain", "worse_off"} <= rows["pfedme"].figures.keys()
    assert rows["localtrain"].figures["gain"].mean == 0
    assert rows["localtrain"].figures["worse_off"].mean == 0
    assert rows["tuned"].figures["gain"].mean == pytest.approx(
        personal.mean - rows["localtrain"].figures["personal"].mean, abs=1e-12)

    by = {row.label: row for row in results.read(plan, "balanced_accuracy").rows}
    assert by["tuned"].figures["personal"] == rows["tuned"].figures["personal_balanced_accuracy"]
    assert by["tuned"].figures["personal_accuracy"] == personal
    with pytest.raises(UsageError, match="unknown metric 'acuracy': did you mean 'accuracy'"):
        results.read(plan, "acuracy")

    results.write(found, out / "results.csv")
    table = list(csv.DictReader((out / "results.csv").read_text().splitlines()))
    assert [row["method"] for row in table] == [*rows]
    by_name = {row["method"]: row for row in table}
    assert float(by_name["tuned"]["personal"]) == personal.mean
    assert float(by_name["tuned"]["personal_low"]) == personal.low
    assert by_name["localtrain"]["global"] == ""
    pairs = list(csv.DictReader((out / "differences.csv").read_text().splitlines()))
    assert [(row["method"], row["against"]) for row in pairs] == [
        (a, b) for k, a in enumerate(found.compared) for b in found.compared[k + 1 :]]
    gaps = {(gap.label, gap.against): gap for gap in found.differences}
    for row in pairs[:2]:
        gap = gaps[row["method"], row["against"]]
        assert (float(row["mean"]), float(row["low"]), float(row["high"]), float(row["p"])) == (
            gap.mean, gap.low, gap.high, gap.p)

    data = page.page_data(out)
    assert data["finished"]
    assert [row["best"] for row in data["table"]] == [True, False, False]
    assert data["population_words"] == "The answer applies to new rows of these 6 clients."
    json.dumps(data, allow_nan=False)
    assert [row["cells"]["personal"]["mean"] for row in data["table"]] == [
        float(row["personal"]) for row in table]
    assert data["curves"]["tuned"]["round"] == [6, 12]
    assert data["curves"]["tuned"]["steps"] == [36, 72]
    assert data["curve_metric"] == "accuracy"
    other = page.page_data(out, "calibration_error")  # which is known of finished runs only
    assert other["curve_metric"] == "loss"
    assert [*other["curves"]] == [*data["curves"]]
    assert data["reference"] == "localtrain"
    assert len(data["federation"]["names"]) == 6
    with drawing():
        draw_comparison(data, out / "comparison.png")
    assert (out / "comparison.png").read_bytes().startswith(b"\x89PNG")
    console = Console(width=200, record=True)
    show_comparison(console, found)
    text = console.export_text()
    assert f"{personal.mean:.4f} " in text
    assert conclusions.answer(found)[0] in text
    narrow = Console(width=80, record=True, force_terminal=True)
    show_comparison(narrow, found)
    lines = narrow.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert any(f"{personal.mean:.4f} " in line for line in lines)
    assert any(line.startswith("in results.csv, or in a wider terminal: ") for line in lines)


def test_methods_and_seeds_are_added_and_a_changed_one_is_refused(tables: dict[str, Any], tmp_path: Path
                                                                  ) -> None:
    out = tmp_path / "out"
    made(tables, out, [0], algorithms="pfedme", baselines=False)
    plan, labels = made(tables, out, [2], algorithms="ditto", baselines=False,
                        command="descant compare")
    assert (list(plan.methods), labels, plan.seeds) == (["pfedme", "ditto"], ["ditto"], [0, 2])
    assert plan.methods["ditto"].rounds == 6
    assert plan.commands == ["descant compare"]
    bare = {name: table for name, table in tables.items() if name not in ("algorithm", "algorithms")}
    made(bare, tmp_path / "bare", [0], algorithms="fedavg", baselines=False)
    plan, _ = made(bare, tmp_path / "bare", [0], algorithms="ditto", baselines=False)
    assert {label: method.rounds for label, method in plan.methods.items()} == {"fedavg": 4, "ditto": 2}
    with pytest.raises(UsageError, match=r"'ditto' with another setting \(lam: 1.0 became 2.0\): give one"):
        made(tables, out, [0], algorithms="ditto:lam=2.0")


@pytest.mark.parametrize(("change", "words"), [
    ({"data": {"dataset": "digits", "clients": 5}}, "data.clients: 6 became 5"),
    ({"train": {"rounds": 5}}, "train.rounds: 4 became 5"),
    ({"model": {"name": "dnn"}}, "model"),
])
def test_a_directory_holds_one_federation_and_one_budget(tables: dict[str, Any], tmp_path: Path,
                                                         change: dict[str, Any], words: str) -> None:
    out = tmp_path / "out"
    made(tables, out, [0])
    with pytest.raises(UsageError, match="another comparison") as caught:
        made(tables | change, out, [0])
    assert words in str(caught.value)
    with pytest.raises(UsageError, match=r"budget: 'steps' became 'rounds'"):
        made(tables, out, [0], budget="rounds")


def test_rows_that_changed_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "sites"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for site in ("a", "b"):
        np.savez(folder / f"{site}.npz", x=rng.normal(size=(20, 3)), y=rng.integers(0, 2, 20))
    tables = {"data": {"dataset": str(folder)}, "algorithm": {"name": "fedavg"},
              "train": {"rounds": 1, "backend": "vectorised"}}
    made(tables, tmp_path / "out", [0])
    np.savez(folder / "b.npz", x=rng.normal(size=(20, 3)), y=rng.integers(0, 2, 20))
    with pytest.raises(UsageError, match=r"the rows of the federation: fingerprint .* became"):
        made(tables, tmp_path / "out", [0])


def test_places_that_hold_no_comparison(tables: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(UsageError, match="not empty"):
        made(tables, tmp_path / "full", [0])
    for place in ("full", "nowhere"):
        with pytest.raises(UsageError, match="holds no comparison"):
            planning.read(tmp_path / place)
    made(tables, tmp_path / "out", [0])
    path = tmp_path / "out" / "comparison.json"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DescantError, match=r"comparison.json is damaged .* restore it"):
        page.page_data(tmp_path / "out")
    for metric, why in (("acuracy", "unknown metric 'acuracy': did you mean 'accuracy'"),
                        ("sensitivity", "unknown metric"),  # it is for two classes
                        ("calibration_error", "cannot select rounds")):
        with pytest.raises(UsageError, match=why):
            made(tables, tmp_path / "other", [0], metric=metric)
    for seeds in ([], [1, 1], [-1]):
        with pytest.raises(UsageError, match="seeds"):
            made(tables, tmp_path / "other", seeds)
    assert not (tmp_path / "other").exists()


# -- splits --------------------------------------------------------------------------------------------


def held_out(plan: planning.Plan, seed: int) -> list[np.ndarray]:
    """The test rows of each client in the repetition with a seed, the same for all methods."""
    [data] = {json.dumps(run.experiment.data.dump()) for run in plan.runs(seeds=[seed])}
    federation = DataSpec.parse(json.loads(data)).federation()
    return [federation.test[k] for k in range(federation.population)]


def test_repetitions_test_other_rows_and_all_methods_the_same(tables: dict[str, Any], tmp_path: Path) -> None:
    plan, _ = made(tables, tmp_path / "out", [0, 1, 2])
    assert plan.splits == "repeated"
    assert len({tuple(sorted(held_out(plan, seed)[0])) for seed in plan.seeds}) == 3
    more, _ = made(tables, tmp_path / "out", [7])  # the same federation, whatever the split
    assert more.seeds == [0, 1, 2, 7]
    sizes = json.loads((tmp_path / "out" / "federation.json").read_text())["sizes"]["test"]
    assert sizes == [len(rows) for rows in held_out(plan, 0)]
    with pytest.raises(UsageError, match="splits: 'repeated' became 'folds'"):
        made(tables, tmp_path / "out", [0], splits="folds")


def test_over_the_folds_every_row_is_tested_once(tables: dict[str, Any], tmp_path: Path) -> None:
    plan, _ = made(tables, tmp_path / "out", [*range(8)], splits="folds")
    for first in (0, 4):  # two cross-validations of four folds each
        rows = [np.concatenate(held_out(plan, seed)) for seed in range(first, first + 4)]
        assert sorted(np.concatenate(rows)) == list(range(1797))
    assert not np.array_equal(held_out(plan, 0)[0], held_out(plan, 4)[0])
    assert plan.remarks() == []
    odd, _ = made(tables, tmp_path / "odd", [*range(5)], splits="folds")
    assert odd.remarks() == ["5 repetitions are not a whole cross-validation of 4 folds: some "
                             "rows are tested more often than others."]
    with pytest.raises(UsageError, match="makes no folds"):
        made(tables | {"data": tables["data"] | {"test": 0.7}}, tmp_path / "none", [0], splits="folds")


def test_a_split_that_is_given_is_fixed(tables: dict[str, Any], tmp_path: Path) -> None:
    fixed, _ = made(tables, tmp_path / "fixed", [0, 1], splits="fixed")
    assert np.array_equal(held_out(fixed, 0)[0], held_out(fixed, 1)[0])
    assert fixed.remarks() == []  # it was asked for
    federation = Experiment.parse(tables).data.federation()
    federation.save_partition(tmp_path / "p.npz")
    given = tables | {"data": {"dataset": "digits", "partition_file": str(tmp_path / "p.npz")}}
    plan, _ = made(given, tmp_path / "out", [0, 1])
    assert plan.splits == "fixed"
    assert plan.remarks() == ["All repetitions test the same rows, which data.partition_file sets: the "
                              "results say nothing about other splits."]
    with pytest.raises(UsageError, match=r"data\.partition_file says which rows are tested"):
        made(given, tmp_path / "other", [0], splits="repeated")


# -- budgets -------------------------------------------------------------------------------------------


def test_steps_are_counted_also_of_a_method_that_diverges_at_once(tables: dict[str, Any], tmp_path: Path
                                                                  ) -> None:
    plan, _ = made(tables, tmp_path / "out", [0], algorithms="ditto,ditto:solver.lr=1e38,label=wild")
    assert plan.methods["wild"].rounds == plan.methods["ditto"].rounds == 6
    assert all(method.seconds > 0 for method in plan.methods.values())


def test_what_a_server_does_once_is_not_counted_for_every_round(
        tables: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """CGPFL-Heur chooses K in its first round, which can take many times as long as the clients do."""
    now = 0.0

    def absorb(self: FedAvg, server: Any, mean: Any, round: Any) -> Any:
        nonlocal now
        now += 90.0 if round.number == 1 else 2.0
        return mean, {}

    monkeypatch.setattr(budget.time, "process_time", lambda: now)
    monkeypatch.setattr(FedAvg, "absorb", absorb)
    setup = runs.Setup.of(Experiment.parse({**tables, "algorithm": {"name": "fedavg"}, "algorithms": []}))
    assert budget.rounds_of(setup, [*listed("fedavg").values()], "rounds")["fedavg"].seconds == 2.0


def test_who_is_left_out_takes_no_time_and_counts_all_the_same(
        tables: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ten rounds two are scored; a round takes a second for each client that is trained."""
    now = 0.0
    plain = InProcess.run

    def run(self: InProcess, job: Any, clients: Any, *rest: Any) -> Any:
        nonlocal now
        now += len(clients)
        return plain(self, job, clients, *rest)

    monkeypatch.setattr(budget.time, "process_time", lambda: now)
    monkeypatch.setattr(InProcess, "run", run)
    train = {**tables["train"], "rounds": 10, "cohort": 2, "participation": "all"}
    setup = runs.Setup.of(Experiment.parse({**tables, "train": train, "eval": {"every": 5}, "algorithms": [],
                                            "algorithm": {"name": "fedavg"}}))
    m = setup.federation.population
    found = budget.rounds_of(setup, [*listed("fedavg,pfedme,ditto").values()], "steps")
    assert found["fedavg"].seconds == pytest.approx(2)
    assert found["pfedme"].seconds == pytest.approx(0.8 * 2 + 0.2 * m)
    assert found["ditto"].seconds == pytest.approx(m)
    assert {label: cost.rounds for label, cost in found.items()} == {"fedavg": 10, "pfedme": 2, "ditto": 5}


@pytest.mark.slow
def test_methods_are_trained_until_they_no_longer_improve(tables: dict[str, Any], tmp_path: Path, seen: Seen
                                                          ) -> None:
    quick = tables | {"train": tables["train"] | {"local": {"steps": 10}}, "eval": {"every": 1}}
    plan, _ = made(quick, tmp_path / "out", [0], baselines=False, budget="converge",
                   algorithms="localtrain:solver.lr=1.0,localtrain:solver.lr=1e-4,label=slow")
    fast, _ = plan.runs()
    assert fast.experiment.train.rounds == 10 * plan._matched(plan.methods["localtrain"]) == 120
    assert (fast.experiment.train.patience, fast.experiment.eval.every) == (5, 3)
    found = done(plan, seen)
    summaries = {run.label: run.summary for run in found.finished}
    assert summaries["localtrain"]["stopped"] == "converged"
    assert summaries["localtrain"]["rounds"] < 120
    assert fast.done
    assert fast.size_done == fast.size
    assert (summaries["slow"]["stopped"], summaries["slow"]["rounds"]) == (None, 120)
    seen.done.clear()
    done(plan, seen)
    assert seen.done == []  # it knows that they are done
    notes = conclusions.notes(found)
    assert any(note.startswith("localtrain stopped improving after ") for note in notes)
    assert any(note.startswith("slow was still improving at the limit of 120 rounds with 1 of 1 seed (120 "
                               "rounds, 3,600 gradient steps)") for note in notes)
    assert not any("was extended" in note for note in notes)
    search = plan.trial_of(plan.methods["slow"], 1)
    assert (search.train.rounds, search.train.patience) == (12, None)


def test_patience_and_equal_budgets_do_not_go_together(tables: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"train\.patience stops runs early, and --budget steps gives"):
        made(tables | {"train": tables["train"] | {"patience": 3}}, tmp_path / "out", [0])
    blind = tables | {"data": tables["data"] | {"validation": 0.0}}
    with pytest.raises(UsageError, match="clients have no validation rows"):
        made(blind, tmp_path / "out", [0], budget="converge")
    assert not (tmp_path / "out").exists()


# -- what decides --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_metric_is_one_for_all_runs_and_stays(tables: dict[str, Any], tmp_path: Path, seen: Seen) -> None:
    out = tmp_path / "out"
    plan, _ = made(tables, out, [0], algorithms="fedavg,localtrain", baselines=False, metric="auroc")
    assert (plan.metric, plan.metric_why, plan.looks, plan.population) == ("auroc", None, 1, "clients")
    assert {run.experiment.eval.metric for run in plan.runs()} == {"auroc"}
    found = done(plan, seen)
    assert found.metric == "auroc"
    curve = page.page_data(out)["curves"]["fedavg"]["personal"]["mean"]
    assert all(0.5 < value <= 1 for value in curve)
    again, _ = made(tables, out, [0], algorithms="fedavg", baselines=False, population="rows")
    assert (again.metric, again.population) == ("auroc", "rows")
    with pytest.raises(UsageError, match="selected by auroc, not by accuracy: choose another"):
        made(tables, out, [0], algorithms="fedavg", baselines=False, metric="accuracy")


def test_unbalanced_classes_are_told(tmp_path: Path) -> None:
    require_data("heart_disease")
    tables = {"data": {"dataset": "heart_disease", "scale": "client", "impute": "client"},
              "algorithm": {"name": "fedavg"}, "train": {"rounds": 1, "backend": "vectorised"}}
    plan, _ = made(tables, tmp_path / "out", [0])
    assert plan.metric == "balanced_accuracy"
    assert plan.metric_why is not None
    assert "of the training rows of client 'switzerland' are of one class" in plan.metric_why
    again, _ = made(tables, tmp_path / "out", [1])
    assert again.metric_why == plan.metric_why


def test_as_many_clusters_as_clients_are_told_before_anything_runs(tables: dict[str, Any], tmp_path: Path
                                                                   ) -> None:
    plan, _ = made(tables, tmp_path / "out", [0], algorithms="cgpfl:K=6", baselines=False)
    assert plan.remarks() == ["cgpfl has 6 clusters for 6 clients: each client can be its own cluster, and "
                              "then nothing is shared. Use fewer clusters."]


def test_a_directory_of_an_older_format_is_refused(tables: dict[str, Any], tmp_path: Path) -> None:
    made(tables, tmp_path / "out", [0])
    path = tmp_path / "out" / "comparison.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2}))
    for act in (lambda: planning.read(tmp_path / "out"), lambda: made(tables, tmp_path / "out", [1])):
        with pytest.raises(DescantError, match=r"has format 2, and this version .* reads 3: .*anew in"):
            act()


# -- repetitions until it is decided -------------------------------------------------------------------


def looking(monkeypatch: pytest.MonkeyPatch, *answers: tuple[bool, int | None, str]) -> None:
    left = iter(answers)
    monkeypatch.setattr(outlook, "outlook", lambda found: outlook.Outlook(*next(left)))


@pytest.mark.slow
def test_repetitions_are_added_until_it_is_decided(tables: dict[str, Any], tmp_path: Path, seen: Seen,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = made(tables, tmp_path / "out", [0, 1], algorithms="fedavg,localtrain", baselines=False,
                   looks=outlook.LOOKS)
    found = done(plan, seen)
    looking(monkeypatch, (False, 2, "ditto is close"), (True, 0, "all are apart"))
    first = outlook.extended(plan, found)
    assert (first.seeds, first.plan.seeds, first.plan.looked_at) == ([2, 3], [0, 1, 2, 3], [2])
    assert first.words.startswith("not decided after 2 repetitions: ditto is close; adding 2, about ")
    assert first.words.endswith("of work (look 1 of 3)")
    first.plan.write()
    assert planning.read(plan.out) == first.plan
    second = outlook.extended(first.plan, found)
    assert (second.seeds, second.words) == ([], "decided after 4 repetitions: all are apart")


@pytest.mark.slow
def test_the_command_adds_repetitions_and_stops(tables: dict[str, Any], tmp_path: Path, seen: Seen,
                                                monkeypatch: pytest.MonkeyPatch,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    looking(monkeypatch, (False, 1, "fedavg is close"), (True, 0, "all are apart"))
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", [
        "descant", "compare", str(tmp_path / "e.toml"), "--algorithms", "fedavg,localtrain", "--no-baselines",
        "--seeds", "0,1", "--until-decided", "--population", "new-clients", "--splits", "folds",
        "--metric", "balanced_accuracy", "--out", str(out)])
    with pytest.raises(SystemExit) as end:
        main()
    text = capsys.readouterr().out
    assert end.value.code in (None, 0)
    assert "not decided after 2 repetitions: fedavg is close; adding 1, about " in text
    assert "decided after 3 repetitions: all are apart" in text
    plan = planning.read(out)
    assert (plan.seeds, plan.looked_at, plan.looks) == ([0, 1, 2], [2, 3], 3)
    assert (plan.population, plan.splits, plan.metric) == ("new clients", "folds", "balanced_accuracy")
    assert all(run.done for run in plan.runs())


@pytest.mark.parametrize(("looked_at", "seeds", "answer", "words"), [
    ([2, 5], 9, (False, 6, "close"), "not decided after 9 repetitions, and all 3 looks are used: close"),
    ([], 30, (False, 6, "close"), "not decided after 30 repetitions, and 30 are the limit: close"),
    ([], 5, (False, None, "test rows are too few"), "not decided after 5 repetitions: test rows are too few"),
])
def test_there_is_an_end_to_it(tables: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                               looked_at: list[int], seeds: int, answer: Any, words: str) -> None:
    plan, _ = made(tables, tmp_path / "out", range(seeds), looks=outlook.LOOKS)
    looking(monkeypatch, answer)
    found = outlook.extended(plan._replace(looked_at=looked_at), results.read(plan))
    assert (found.seeds, found.words) == ([], words)


def test_the_same_look_again_is_no_other(tables: dict[str, Any], tmp_path: Path,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = made(tables, tmp_path / "out", [0, 1], looks=outlook.LOOKS)
    looking(monkeypatch, (False, 40, "close"))
    found = outlook.extended(plan._replace(looked_at=[2]), results.read(plan))
    assert (found.plan.looked_at, len(found.plan.seeds)) == ([2], outlook.MOST_SEEDS)


# -- runs that stop, fail, or are missing ----------------------------------------------------------------


def test_a_stopped_run_is_resumed(tables: dict[str, Any], tmp_path: Path, seen: Seen) -> None:
    whole, _ = made(tables, tmp_path / "whole", [0], algorithms="pfedme", baselines=False)
    done(whole, seen)
    plan, _ = made(tables, tmp_path / "out", [0], algorithms="pfedme", baselines=False)
    [run] = plan.runs()
    train = dataclasses.replace(run.experiment.train, rounds=2)
    half = run._replace(experiment=dataclasses.replace(run.experiment, train=train))
    assert execute.execute(plan, [half], 1, seen) == []
    assert not run.done
    assert page.page_data(tmp_path / "out")["progress"] == [
        {"label": "pfedme", "seed": 0, "rounds": 2, "of": 4, "state": "waiting",
         "note": "stopped after round 2"}]
    done(plan, seen)
    assert layout.rounds(run.place) == 4
    [other] = whole.runs()
    state = "checkpoint/state.safetensors"
    assert (run.place / state).read_bytes() == (other.place / state).read_bytes()
    assert (run.place / finished.FILE).read_bytes() == (other.place / finished.FILE).read_bytes()


def test_a_run_that_fails_does_not_stop_the_others(tables: dict[str, Any], tmp_path: Path, seen: Seen
                                                   ) -> None:
    plan, _ = made(tables, tmp_path / "out", [0])
    place = plan.runs()[0].place
    place.mkdir(parents=True)
    (place / "something").write_text("of the user's")
    [(run, why)] = execute.execute(plan, plan.runs(), 1, seen)
    assert run.label == "pfedme"
    assert "not empty" in why
    assert [row.label for row in results.read(plan).rows] == ["localtrain", "tuned"]
    data = page.page_data(plan.out)
    assert [(p["state"], p["note"]) for p in data["progress"]] == [
        ("failed", why), ("done", ""), ("done", "")]
    assert not data["finished"]
    assert "pfedme lacks seed 0" in data["notes"][0]

    shutil.rmtree(place)  # fixed: what is missing is made
    assert execute.execute(plan, plan.runs(), 1, seen) == []
    assert page.page_data(plan.out)["finished"]


def test_nothing_has_finished_yet(tables: dict[str, Any], tmp_path: Path) -> None:
    plan, _ = made(tables, tmp_path / "out", [0])
    data = page.page_data(plan.out)
    assert data["answer"] == ["No run has finished yet."]
    assert {p["state"] for p in data["progress"]} == {"waiting"}
    assert (data["table"], data["curves"], data["differences"]) == ([], {}, [])


def test_a_damaged_run_is_told(tables: dict[str, Any], tmp_path: Path, seen: Seen) -> None:
    plan, _ = made(tables, tmp_path / "out", [0], algorithms="fedavg", baselines=False)
    done(plan, seen)
    [run] = plan.runs()
    (run.place / "summary.json").write_text("{")
    with pytest.raises(DescantError, match=r"seed-0 is damaged .* remove that directory"):
        results.read(plan)


def test_a_damaged_method_is_told_where_it_is_read(tables: dict[str, Any], tmp_path: Path) -> None:
    made(tables, tmp_path / "out", [0], algorithms="ditto")
    path = tmp_path / "out" / "comparison.json"
    whole = json.loads(path.read_text())
    [baseline] = [k for k, method in enumerate(whole["methods"]) if method["label"] == "localtrain"]
    del whole["methods"][baseline]["asked"]["solver"]  # a field that is missing has its default
    path.write_text(json.dumps(whole))
    assert any("were added with sgd at " in note for note in conclusions.notes(results.read(
        planning.read(tmp_path / "out"))))
    whole["methods"][baseline]["asked"]["solver"] = 3
    path.write_text(json.dumps(whole))
    with pytest.raises(DescantError, match=rf"json is damaged \(methods\[{baseline}\].asked.solver must be"):
        planning.read(tmp_path / "out")


@pytest.mark.slow
def test_one_method_has_a_seed_that_another_lacks(tables: dict[str, Any], tmp_path: Path, seen: Seen) -> None:
    plan, _ = made(tables, tmp_path / "out", [0, 1, 2], algorithms="fedavg,ditto", baselines=False)
    done(plan, seen, seeds=[0, 1])
    found = done(plan, seen, ["ditto"])
    [gap] = found.differences
    assert found.repetitions == 2
    assert gap.p is not None
    assert any("fedavg lacks seed 2" in note for note in conclusions.notes(found))
    means = {run.seed: np.mean(list(run.values("accuracy").values())) for run in found.finished
             if run.label == found.best and run.seed < 2}
    assert found.level is not None
    assert found.level.mean == pytest.approx(np.mean(list(means.values())))  # over the seeds that both have
    more, _ = made(tables, tmp_path / "out", [3, 4], algorithms="ditto", baselines=False)
    found = done(more, seen, ["ditto"])
    assert found.left_out == {"fedavg": "it has too few seeds so far"}
    first = conclusions.answer(found)[0]
    assert first.startswith("There is no other method to compare ditto with. Its clients")
    assert "fedavg is not compared: it has too few seeds so far." in conclusions.notes(found)


@pytest.mark.slow
def test_clients_that_a_method_fails(tables: dict[str, Any], tmp_path: Path, seen: Seen, drawing: Any
                                     ) -> None:
    """They count before any figure, in the answer as in the choice of a grid; and a method that fails all of
    them is left out."""
    plan, _ = made(tables, tmp_path / "out", [0], algorithms="fedavg,ditto,localtrain", baselines=False,
                   metric="loss")
    found = done(plan, seen)
    best = found.best
    assert best is not None

    def spoil(label: str, clients: range) -> None:
        path = plan.runs([label])[0].place / finished.FILE
        header, *lines = path.read_text().splitlines()
        at = header.split(",").index("loss")
        for k, line in enumerate(lines):
            cells = line.split(",")
            if int(cells[3]) in clients:
                cells[at] = ""
                lines[k] = ",".join(cells)
        path.write_text("\n".join([header, *lines]) + "\n")

    spoil(best, range(1))
    found = results.read(plan)
    assert found.best != best
    assert {gap.against for gap in found.differences} >= {best}
    assert found.lost[best] == 1
    assert any(f"{best} leaves 1 client with a diverged model" in note for note in conclusions.notes(found))
    for k, label in enumerate(sorted(plan.methods, key=lambda label: label != best)):
        spoil(label, range(2 * k, 2 * k + 2))  # every client has been failed by one of the three
    found = results.read(plan)
    assert (found.level, found.differences) == (None, [])
    assert conclusions.answer(found) == [
        "Nothing can be compared: no client has a finite test loss with all methods."]
    spoil(best, range(6))
    found = results.read(plan)
    assert found.left_out == {best: "it diverged in 1 of 1 repetitions"}
    data = page.page_data(plan.out)
    assert next(row for row in data["table"] if row["label"] == best)["cells"]["personal"]["text"] == "-"
    assert data["table"][-1]["label"] == best
    with drawing():
        draw_comparison(data, tmp_path / "picture.png")
    for label in plan.methods:
        spoil(label, range(6))
    *told, last = conclusions.answer(results.read(plan))
    assert [sentence.split(" and ")[0] for sentence in told] == [
        f"{label} diverged in 1 of 1 repetition" for label in plan.methods]
    assert last == "Nothing can be compared: no client has a finite test loss with all methods."


@pytest.mark.slow
def test_a_run_that_was_extended_is_told(tables: dict[str, Any], tmp_path: Path, seen: Seen) -> None:
    plan, _ = made(tables, tmp_path / "out", [0], algorithms="fedavg,ditto", baselines=False)
    done(plan, seen)
    runs.resume(plan.runs()[0].place, rounds=20, observer=execute._Silent())
    found = done(plan, seen)
    assert "fedavg, seed 0, has 20 rounds instead of 12" in conclusions.notes(found)[0]


class Job(NamedTuple):
    number: int

    @property
    def title(self) -> str:
        return str(self.number)


def _die(job: Job) -> str:
    if job.number == 0:
        os._exit(1)
    return f"done {job.number}"


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_process_that_dies_does_not_stop_the_others(start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However they are started: a fork has nothing to import."""
    context = multiprocessing.get_context(start)
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
    seen = Seen()
    found = dict(execute.in_processes(_die, [Job(1), Job(0), Job(2), Job(3)], 2, seen))
    assert {job.number: str(each) for job, each in found.items()} == {
        0: "its process died (out of memory? use fewer --jobs)", 1: "done 1", 2: "done 2", 3: "done 3"}
    assert seen.failed == {"0": "its process died (out of memory? use fewer --jobs)"}
    assert sorted(seen.done) == ["1", "2", "3"]


def test_a_run_of_a_version_with_fewer_fields_is_still_its_own(tables: dict[str, Any], tmp_path: Path,
                                                               seen: Seen) -> None:
    plan, _ = made(tables, tmp_path / "out", [0], algorithms="ditto", baselines=False)
    found = done(plan, seen)
    [run] = plan.runs()
    config = layout.config(run.place)
    del config["algorithm"]["lam"]  # which has its default
    layout.write_config(run.place, config)
    assert results.read(plan).rows == found.rows
    config["algorithm"]["lam"] = 0.75
    layout.write_config(run.place, config)
    with pytest.raises(DescantError, match=r"not belong to this comparison \(algorithm.lam: 0.75 became"):
        results.read(plan)


def test_a_run_from_elsewhere_is_refused(tables: dict[str, Any], tmp_path: Path, seen: Seen) -> None:
    plan, _ = made(tables, tmp_path / "out", [0], algorithms="fedavg,ditto", baselines=False)
    other, _ = made(tables | {"data": tables["data"] | {"clients": 4}}, tmp_path / "other", [0],
                    algorithms="ditto", baselines=False)
    done(other, seen)
    shutil.copytree(other.runs()[0].place, plan.runs(["ditto"])[0].place)
    with pytest.raises(DescantError, match=r"not belong to this comparison \(data.clients: 4 became 6\)"):
        done(plan, seen)
    (plan.runs(["ditto"])[0].place / "summary.json").unlink()  # nor is it continued
    [(run, why)] = execute.execute(plan, plan.runs(), 1, seen)
    assert run.label == "ditto"
    assert "does not belong to this comparison" in why


def test_a_run_without_its_config_fails_alone(tables: dict[str, Any], tmp_path: Path, seen: Seen) -> None:
    plan, _ = made(tables, tmp_path / "out", [0], algorithms="fedavg,ditto", baselines=False)
    done(plan, seen)
    (plan.runs(["ditto"])[0].place / "config.toml").unlink()
    [(_, why)] = execute.execute(plan, plan.runs(), 1, seen)
    assert "not empty" in why
    found = results.read(plan)
    assert [row.label for row in found.rows] == ["fedavg"]
    assert f"ditto, seed 0 failed: {why}." in conclusions.notes(found)


def test_a_grid_without_validation_data_is_methods_like_others(tables: dict[str, Any], tmp_path: Path,
                                                               seen: Seen) -> None:
    blind = tables | {"data": tables["data"] | {"validation": 0.0}}
    plan, _ = made(blind, tmp_path / "out", [0], algorithms="localtrain:solver.lr=[1e-6,0.1]",
                   baselines=False)
    found = done(plan, seen)
    assert (found.chosen, found.left_out) == ({}, {})
    assert found.best == "localtrain solver.lr=0.1"


@pytest.mark.slow
def test_a_metric_of_the_users_own_can_be_added_later(tables: dict[str, Any], tmp_path: Path, seen: Seen,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_metrics.py").write_text("""
def top_two(outputs, y):
    \"\"\"share of the rows whose class is among the two most probable\"\"\"
    return (outputs.topk(2, 1).indices == y[:, None]).any(1).double().mean()

def surprise(outputs, y):
    return float(len(y))

surprise.lower_is_better = True
""")
    monkeypatch.syspath_prepend(tmp_path)
    plan, _ = made(tables, tmp_path / "out", [0], algorithms="fedavg,localtrain", baselines=False)
    done(plan, seen)
    wanted = tables | {"eval": tables["eval"] | {"metrics": ["my_metrics:top_two", "my_metrics:surprise"]}}
    plan, _ = made(wanted, tmp_path / "out", [0], algorithms="fedavg,localtrain", baselines=False)
    seen.done.clear()
    found = done(plan, seen)
    assert seen.done == ["fedavg, seed 0", "localtrain, seed 0"]  # measured again, not trained
    with pytest.raises(UsageError, match="add --allow my_metrics"):  # the directory alone cannot ask for it
        made(tables, tmp_path / "out", [0, 1], algorithms="fedavg", baselines=False)
    plan, _ = made(tables, tmp_path / "out", [0, 1], algorithms="fedavg", baselines=False,
                   permit=ran(["my_metrics"]))  # it stays
    assert plan.experiment.eval.metrics == ("my_metrics:top_two", "my_metrics:surprise")
    assert {run.summary["rounds"] for run in found.finished} == {12}
    for row in found.rows:
        assert row.figures["personal_top_two"].mean >= row.figures["personal"].mean
    by = results.read(plan, "surprise")
    assert by.lower_is_better
    titles = {column["title"]: column["help"] for column in page.page_data(tmp_path / "out")["columns"]}
    assert titles["top two"].endswith("share of the rows whose class is among the two most probable")
    (tmp_path / "others.py").write_text("def surprise(outputs, y): return 0.0")
    with pytest.raises(UsageError, match="another metric is called 'surprise' too"):
        made(tables | {"eval": tables["eval"] | {"metrics": ["others:surprise"]}}, tmp_path / "out", [0],
             permit=ran(["my_metrics"]))
    with pytest.raises(UsageError, match="my_metrics"):
        made(tables | {"eval": {"metrics": ["my_metrics:top_tow"]}}, tmp_path / "new", [0])
    assert not (tmp_path / "new").exists()


# -- what comes out --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_of_a_grid_the_member_that_is_best_on_validation_is_compared(tables: dict[str, Any], tmp_path: Path,
                                                                     seen: Seen, drawing: Any) -> None:
    plan, _ = made(tables, tmp_path / "out", [0, 1], baselines=False,
                   algorithms="fedavg:finetune=2,localtrain:solver.lr=[1e-6,0.1]")
    found = done(plan, seen)
    assert found.chosen == {"localtrain": "localtrain solver.lr=0.1"}
    assert {gap.label for gap in found.differences} | {gap.against for gap in found.differences} == {
        "fedavg", "localtrain solver.lr=0.1"}
    assert len(found.rows) == 3
    assert found.reference == "localtrain solver.lr=0.1"  # what clients gain, they gain over the better one
    only = results.read(plan._replace(methods={label: method for label, method in plan.methods.items()
                                               if method.grid is not None}))
    assert conclusions.answer(only)[0].startswith(
        "There is no other method to compare localtrain solver.lr=0.1 with. Its clients' own models reach")
    [grid] = page.page_data(plan.out)["grids"]
    assert (grid["label"], grid["field"], grid["values"]) == ("localtrain", "solver.lr", [1e-6, 0.1])
    rows = {row.label: row.figures["personal"].mean for row in found.rows}
    assert grid["mean"] == [rows["localtrain solver.lr=1e-06"], rows["localtrain solver.lr=0.1"]]
    with drawing():
        draw_comparison(page.page_data(plan.out), tmp_path / "grid.png")
    # the choice does not look at test rows: with all test figures turned round, it is the same
    for run in plan.runs():
        columns = (run.place / finished.FILE).read_text().splitlines()
        at = columns[0].split(",").index("accuracy")
        turned = [columns[0]]
        for line in columns[1:]:
            cells = line.split(",")
            cells[at] = repr(1 - float(cells[at]))
            turned.append(",".join(cells))
        (run.place / finished.FILE).write_text("\n".join(turned) + "\n")
    assert results.read(plan).chosen == found.chosen


def test_the_answer_in_words(tables: dict[str, Any], tmp_path: Path, seen: Seen) -> None:
    plan, _ = made(tables, tmp_path / "out", [0], algorithms="localtrain:solver.lr=0.1", splits="fixed")
    found = done(plan, seen)
    [first, second, third, fourth] = conclusions.answer(found)
    assert first.startswith("localtrain ranks first: its clients' own models reach a mean test accuracy of ")
    assert first.endswith(" on new rows of these 6 clients (1 repetition).")
    assert second.startswith("fedavg + fine-tuning is next, ")
    assert "One repetition gives no intervals and no verdict" in second
    assert third == "No method is better than training alone."
    assert fourth == "No method was tuned: --tune may change the ranking."
    assert (found.differences[0].verdict, found.differences[0].low) == ("withheld", None)
    assert outlook.outlook(found) == (False, 4, "one repetition gives no interval")
    many, _ = made(tables, tmp_path / "out", range(6), algorithms="localtrain:solver.lr=0.1")  # as before
    found = done(many, seen)
    [gap] = found.differences
    assert gap.verdict == "better"
    sentences = conclusions.answer(found)
    assert sentences[1] == (
        f"localtrain is significantly better than fedavg + fine-tuning ({100 * gap.mean:.1f} points, "
        f"{100 * gap.low:.1f} to {100 * gap.high:.1f}). Ranges are simultaneous 95 % intervals.")
    assert sentences[2] == (
        "Whether this holds for other clients is unknown: that takes 10 clients, and there are 6.")
    assert conclusions.difference(found, gap).startswith(
        "localtrain is significantly better than fedavg + fine-tuning (")
    assert conclusions.clients(gap) is None  # a Wilcoxon test over six clients is none
    close = gap._replace(verdict="no difference found", low=-0.01)
    assert conclusions.answer(found._replace(differences=[close]))[1].startswith(
        "No significant difference from fedavg + fine-tuning (")


def test_clusters_and_a_loss_for_a_metric(tables: dict[str, Any], tmp_path: Path, seen: Seen) -> None:
    plan, _ = made(tables, tmp_path / "out", [0], algorithms="cgpfl:K=2,fedavg", baselines=False)
    found = done(plan, seen)
    data = page.page_data(plan.out, "loss")
    assert data["lower_is_better"]
    losses = {row["label"]: row["cells"]["personal"]["mean"] for row in data["table"]}
    assert data["differences"][0]["label"] == min(losses, key=lambda label: losses[label])
    clusters = data["clusters"]["cgpfl"]
    assert {k for row in clusters["of_client"] for k in row} <= {0, 1, None}
    assert isinstance(plan.methods["cgpfl"].algorithm, CGPFL)
    assert found.metric == "accuracy"


@pytest.mark.slow
def test_a_search_changes_the_method_and_its_runs_only(tables: dict[str, Any], tmp_path: Path, seen: Seen
                                                       ) -> None:
    plan, labels = made(tables, tmp_path / "out", [0, 1],
                        algorithms="fedavg:finetune=2,localtrain:solver.lr=0.1")
    wanted = execute.searches(plan, labels, 3, 1)
    assert [search.label for search in wanted] == ["fedavg"]  # the other's step size is the user's
    for search in wanted:  # on a split of its own
        assert (search.experiment.data.split, search.experiment.train.seed) == (10_000, 10_000)
    found = execute.search(wanted, 1, seen)
    plan = plan.tuned("fedavg", found["fedavg"].values)
    plan.write()
    assert planning.read(plan.out) == plan
    assert plan.methods["fedavg"].algorithm == found["fedavg"].algorithm
    assert {run.experiment.algorithm.solver.lr for run in plan.runs(["fedavg"])} == {
        found["fedavg"].values["solver.lr"]}
    done(plan, seen)
    again, _ = made(tables, plan.out, [0], algorithms="fedavg:finetune=2")  # which is what was asked
    assert again.methods == plan.methods
    record = page.page_data(plan.out)["tuning"]["fedavg"]
    assert len(record["rows"]) == 3
    with pytest.raises(UsageError, match="with other hyper-parameters than this search"):
        plan.tuned("fedavg", {"solver.lr": 0.123})
    untuned = plan._replace(methods={label: method._replace(tuned=None)
                                     for label, method in plan.methods.items()})
    with pytest.raises(UsageError, match="runs of fedavg made without a search"):
        execute.searches(untuned, labels, 3, 1)
    assert conclusions.answer(results.read(plan))[-1] == "Not tuned: localtrain."


@pytest.mark.slow
def test_a_method_of_which_nothing_trains_does_not_stop_the_others(tables: dict[str, Any], tmp_path: Path,
                                                                   seen: Seen) -> None:
    pytest.importorskip("optuna")
    longer = tables | {"train": tables["train"] | {"local": {"steps": 6}}}
    plan, labels = made(longer, tmp_path / "out", [0], baselines=False, algorithms="fedavg,fedprox:mu=1e38")
    assert plan.methods["fedprox"].rounds == plan.methods["fedavg"].rounds == 12
    wanted = execute.searches(plan, labels, 2, 1)
    assert execute.seconds_of(plan, wanted, 1) == pytest.approx(
        2 * 12 * sum(method.seconds for method in plan.methods.values()))
    found = execute.search(wanted, 1, seen)
    for label, of in found.items():
        plan = plan.tuned(label, getattr(of, "values", None), of.note)
    plan.write()
    assert plan.methods["fedavg"].tuned is not None
    assert plan.methods["fedprox"].tuned is None
    assert "fedprox: none of the 7 trials of its search trained, down to solver.lr = 1e-07" in (
        plan.remarks()[0])
    assert seen.notes == [plan.remarks()[0].removesuffix(".")]
    [(run, why)] = execute.execute(plan, plan.runs(), 1, seen)
    assert run.label == "fedprox"
    assert "diverges" in why
    assert [row.label for row in results.read(plan).rows] == ["fedavg"]

"""Hyper-parameters by validation: what is searched, what is found, and that a search survives everything."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from descant.algorithms import (
    ALGORITHMS,
    CGPFL,
    Ditto,
    FedAvg,
    FedMAP,
    FedProx,
    OneStageFedProx,
    pFedBreD,
    pFedGT,
    pFedMe,
)
from descant.algorithms.pfedgt import ByValidation
from descant.comparison import trials, tune
from descant.core import fields
from descant.core.algorithm import Algorithm
from descant.core.fields import describe
from descant.core.files import locked
from descant.core.ranges import Linear, Log, Step, Whole
from descant.engine.backends import choose
from descant.engine.rounds import NobodyLeft
from descant.errors import DescantError, UsageError
from descant.experiment import run as runs
from descant.experiment.config import Experiment
from descant.priors.precision import Adaptive, LearnedVariance
from descant.priors.solve import SGD, Adam

pytestmark = pytest.mark.thorough

pytest.importorskip("optuna")

BAD = FedAvg(SGD(lr=0.001))  # far too small for so few steps


def experiment(algorithm: Algorithm = BAD, *, rounds: int = 4, every: int = 1, steps: int = 3,
               data: dict[str, Any] | None = None, **train: Any) -> Experiment:
    """Digits, five clients of two classes; a trial takes about 30 ms."""
    usual = {"dataset": "digits", "partition": "classes", "clients": 5, "classes_per_client": 2}
    made = Experiment.parse({
        "data": usual | (data or {}), "model": {"name": "mclr"}, "algorithm": {"name": "fedavg"},
        "train": {"rounds": rounds, "batch": 20, "local": {"steps": steps}, "backend": "vectorised"} | train,
        "eval": {"every": every}})
    return dataclasses.replace(made, algorithm=algorithm)


def quadratics(algorithm: Algorithm, **train: Any) -> Experiment:
    made = Experiment.parse({
        "data": {"dataset": "quadratics", "clients": 4, "dim": 4, "rows": 6},
        "model": {"name": "quadratic"}, "algorithm": {"name": "fedavg"},
        "train": {"rounds": 4, "batch": 4, "local": {"steps": 4}, "backend": "vectorised"} | train,
        "eval": {"every": 1}})
    return dataclasses.replace(made, algorithm=algorithm)


def table(record: Path) -> list[dict[str, Any]]:
    found = trials.read(record)
    assert found is not None
    return [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]


def files(record: Path) -> list[bytes]:
    return [(record / name).read_bytes() for name in ("trials.csv", "best.json")]


# -- what is searched ------------------------------------------------------------------------------------


def test_ranges_are_values() -> None:
    assert str(Log(0.001, 1.0)) == "0.001 to 1 (log scale)"
    assert Log(0.1, 1.0).holding(5.0) == Log(0.1, 5.0)
    assert Log(0.1, 1.0).holding(0.5) == Log(0.1, 1.0)
    assert Log(0.1, 1.0) != Linear(0.1, 1.0)
    assert Log(0.001, 1.0).rounded(0.0123456) == 0.0123
    assert Log(0.12345, 1.0).rounded(0.12345) == 0.12345  # not below the range
    assert Whole(1, 10).rounded(3) == 3
    for wrong in (lambda: Log(1.0, 1.0), lambda: Linear(2.0, 1.0), lambda: Log(0.0, 1.0)):
        with pytest.raises(ValueError, match="range"):
            wrong()


def test_a_field_says_where_it_is_searched() -> None:
    searched = {field.name: field.search for field in describe(pFedMe)}
    assert searched["lam"] == Log(1.0, 100.0)
    assert searched["K"] is None  # it changes what a round costs


def test_fields_of_parts_are_searched_by_their_dotted_names() -> None:
    assert set(tune.space(FedAvg())) == {"solver.lr"}
    assert set(tune.space(FedMAP())) == {"prior.sigma2", "solver.lr"}
    by_adam, by_sgd = tune.space(Ditto(solver=Adam())), tune.space(Ditto())
    assert set(by_adam) == set(by_sgd) == {"lam", "solver.lr"}
    assert by_adam["solver.lr"].high < by_sgd["solver.lr"].high  # each optimizer has its own


def test_what_costs_more_is_never_searched() -> None:
    searched = {field for method in ALGORITHMS.values() for field in tune.space(method())}
    assert not searched & {"S", "finetune", "k_rounds", "starts", "prior.hidden"}
    assert all("K" not in tune.space(method()) for name, method in ALGORITHMS.items() if name != "cgpfl")


def test_fixed_fields_are_left_out() -> None:
    assert set(tune.space(pFedMe(), {"lam"})) == {"eta", "alpha"}
    assert set(tune.space(Ditto(), {"solver.lr"})) == {"lam"}
    assert set(tune.space(Ditto(), {"solver"})) == {"lam"}
    assert set(tune.space(Ditto(), {"solver.momentum", "solver.name", "weights"})) == {"lam", "solver.lr"}
    assert set(tune.space(pFedBreD(), {"a"})) == {"lam", "eta", "a_m"}  # a is no beginning of a_m


def test_what_is_no_number_is_left_alone() -> None:
    assert "lam" not in tune.space(pFedMe(lam=Adaptive()))
    assert "lam" not in tune.space(Ditto(lam=(1.0, 2.0)))
    assert "K" not in tune.space(CGPFL(K="auto"))
    assert "gamma" not in tune.space(pFedGT(gamma=ByValidation()))
    assert set(tune.space(FedMAP(LearnedVariance()))) == {"solver.lr"}


def test_what_is_switched_off_stays_off() -> None:
    assert set(tune.space(FedProx(mu=0.0))) == {"solver.lr"}


def test_a_range_is_stretched_to_the_present_value() -> None:
    assert tune.space(FedAvg(SGD(lr=1e-5)))["solver.lr"] == Step(1e-5, 1.0)
    assert tune.space(pFedGT(gamma=1.0))["gamma"] == Linear(0.1, 1.0)
    assert tune.space(CGPFL(K=15))["K"] == Whole(1, 15)


def test_a_field_that_may_not_be_changed_is_left_alone() -> None:
    theory = OneStageFedProx(lam=0.1, steps="theory", L=1.0, mu=0.1)  # which takes eta from the theory
    assert set(tune.space(theory)) == {"lam"}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_values_are_put_in_and_nothing_else_changes(name: str) -> None:
    method = ALGORITHMS[name]()
    ranges = tune.space(method)
    now = {field: fields.value_of(method, field) for field in ranges}
    changed = fields.replaced(method, {field: declared.high for field, declared in ranges.items()})
    assert {field: fields.value_of(changed, field) for field in ranges} \
        == {field: declared.high for field, declared in ranges.items()}
    assert fields.replaced(changed, now) == method
    assert fields.replaced(method, {}) == method


def test_several_values_of_one_part_go_in_together() -> None:
    changed = fields.replaced(Ditto(), {"lam": 2.0, "solver.lr": 0.5, "solver.momentum": 0.9})
    assert changed == Ditto(lam=2.0, solver=SGD(lr=0.5, momentum=0.9))


@pytest.mark.parametrize("name", ["lamb", "solver.speed", "lam.x", "nothing.lr"])
def test_values_of_unknown_fields_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="unknown field"):
        fields.replaced(Ditto(), {name: 1.0})


# -- what is found ---------------------------------------------------------------------------------------


def test_the_search_finds_what_is_better(tmp_path: Path) -> None:
    tuned = tune.search(experiment(), 8, tmp_path)
    first, *others = table(tmp_path)
    assert first["solver.lr"] == 0.001  # the method as it stands comes first
    assert tuned.values["solver.lr"] > 0.03
    assert tuned.validation > first["validation"] + 0.2
    assert tuned.algorithm == FedAvg(SGD(lr=tuned.values["solver.lr"]))
    complete = [row for row in (first, *others) if row["state"] == "complete"]
    assert tuned.validation == max(row["validation"] for row in complete)

    best = json.loads((tmp_path / "best.json").read_text())
    found = trials.read(tmp_path)
    assert found is not None
    figures = [row["validation"] for row in table(tmp_path)]
    assert found["best"] == best["best"] == figures.index(tuned.validation)
    assert best["figure"] == "accuracy"
    assert best["algorithm"]["solver"]["lr"] == best["values"]["solver.lr"] == tuned.values["solver.lr"]


def test_the_figure_is_that_of_the_selected_round(tmp_path: Path) -> None:
    tuned = tune.search(experiment(rounds=3), 2, tmp_path)
    setup = dataclasses.replace(runs.Setup.of(experiment(rounds=3)), algorithm=tuned.algorithm)
    best = runs.start(setup).summary["best"]
    assert tuned.validation == pytest.approx(best["personal"]["val"]["accuracy"]["mean"], abs=1e-12)


def test_test_rows_have_no_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = tune.search(experiment(), 7, tmp_path / "right")
    whole = runs.Setup.of

    def scrambled(made: Experiment) -> runs.Setup:
        setup = whole(made)
        federation, rows = setup.federation, setup.federation.test.indices
        y, x = federation.y.clone(), federation.x.clone()
        y[rows] = (y[rows] + 1 + np.random.default_rng(0).integers(9)) % 10
        x[rows] = float("inf")  # no loss on them is finite
        return dataclasses.replace(setup, federation=dataclasses.replace(federation, x=x, y=y))

    monkeypatch.setattr(runs.Setup, "of", scrambled)
    assert tune.search(experiment(), 7, tmp_path / "wrong") == tuned
    assert files(tmp_path / "wrong") == files(tmp_path / "right")


def test_without_an_accuracy_the_loss_counts(tmp_path: Path) -> None:
    tuned = tune.search(quadratics(FedAvg(SGD(lr=0.001))), 6, tmp_path)
    rows = table(tmp_path)
    assert json.loads((tmp_path / "best.json").read_text())["figure"] == "minus loss"
    assert all(row["validation"] < 0 for row in rows)
    assert tuned.validation == max(row["validation"] for row in rows)
    assert tuned.values["solver.lr"] > 0.01


def test_whole_numbers_are_searched_as_such(tmp_path: Path) -> None:
    tuned = tune.search(experiment(CGPFL(S=1), rounds=2, data={"clients": 6}), 9, tmp_path,
                        fixed={"lam", "eta", "beta"})
    rows = table(tmp_path)
    assert all(isinstance(row["K"], int) for row in rows)
    assert {row["state"] for row in rows if row["K"] > 6} <= {"failed"}  # there are six clients
    assert isinstance(tuned.algorithm, CGPFL)
    assert tuned.values["K"] == tuned.algorithm.K


def test_lost_clients_count_more_than_figures() -> None:
    keys = [(-2.0, 0.99, -0.1), (-1.0, 0.1, -9.0), (-1.0, 0.2, -9.0), (0.0, 0.05, -4.0), (0.0, 0.9, -2.0)]
    figures = [trials.figure(key) for key in keys]
    assert None not in figures
    assert figures == sorted(figures)
    assert trials.figure((-5.0,)) is trials.figure(None) is trials.figure((0.0, -float("inf"))) is None


# -- budgets ---------------------------------------------------------------------------------------------


def test_every_trial_has_the_same_budget_and_bad_ones_are_stopped(tmp_path: Path) -> None:
    told: list[int] = []
    tuned = tune.search(experiment(rounds=6), 12, tmp_path, progress=told.append)
    rows = table(tmp_path)
    budget = 5 * 6 * 3  # clients, rounds, steps
    assert len(rows) == tuned.trials == 12
    states = [row["state"] for row in rows]
    assert tuned.pruned == states.count("pruned") > 0
    assert tuned.failed == states.count("failed") == 0
    assert "pruned" not in states[: tune.STARTUP]
    for row in rows:
        assert row["grad_steps"] == 5 * 3 * row["rounds"]
        assert row["rounds"] == 6 if row["state"] == "complete" else 2 <= row["rounds"] < 6
    assert {row["grad_steps"] for row in rows if row["state"] == "complete"} == {budget}
    assert tuned.grad_steps == sum(row["grad_steps"] for row in rows) < 12 * budget
    assert told == sorted(told)
    assert told[-1] == 12 * 6


def test_stopping_looks_at_evaluated_rounds_only(tmp_path: Path) -> None:
    tune.search(experiment(rounds=6, every=3), 12, tmp_path)
    assert {row["rounds"] for row in table(tmp_path)} == {3, 6}


def test_budgets_that_depend_on_a_searched_field_are_refused(tmp_path: Path) -> None:
    theory = OneStageFedProx(lam=0.1, steps="theory", L=1.0, mu=0.1)
    with pytest.raises(UsageError, match="gradient steps, since these depend on lam"):
        tune.search(quadratics(theory, rounds=1, local={"steps": 1}), 4, tmp_path)
    with pytest.raises(UsageError, match="no field left to tune"):
        tune.search(quadratics(theory), 4, tmp_path / "other", fixed={"lam"})


# -- trials that fail ------------------------------------------------------------------------------------


# 1 - lr (mu + h) is what is left of an error after a step: it grows if lr > 0.002, without bound if lr > 0.02
DIVERGING = FedProx(mu=1000.0, solver=SGD(lr=0.001))


def test_diverging_trials_fail_and_the_search_goes_on(tmp_path: Path) -> None:
    made = quadratics(DIVERGING, local={"steps": 30})
    tuned = tune.search(made, 8, tmp_path, fixed={"mu"})
    rows = table(tmp_path)
    failed = [row for row in rows if row["state"] == "failed"]
    assert tuned.failed == len(failed) > 0
    assert all(row["solver.lr"] > 0.002 and row["validation"] is None for row in failed)
    assert tuned.values["solver.lr"] < 0.002
    assert all(row["rounds"] < 4 for row in failed)


def test_a_search_of_failures_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(*_: Any) -> runs.Run:
        raise NobodyLeft("no upload of round 1 could be taken")

    monkeypatch.setattr(runs, "start", diverge)
    found = tune.search(experiment(), 3, tmp_path)
    assert isinstance(found, tune.Untrained)
    assert found.note == ("none of the 7 trials of its search trained, down to solver.lr = 1e-07: no upload "
                          "of round 1 could be taken; it runs with its own settings")
    rows = table(tmp_path)
    assert [row["state"] for row in rows] == ["failed"] * 7
    assert [row["solver.lr"] for row in rows[tune.FIRST:]] == [1e-3, 1e-4, 1e-5, 1e-6, 1e-7]
    assert trials.read(tmp_path)["best"] is None  # type: ignore[index]
    assert tune.search(experiment(), 3, tmp_path) == found  # nothing is done again


def test_a_search_without_steps_does_not_go_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(*_: Any) -> runs.Run:
        raise NobodyLeft("no upload of round 1 could be taken")

    monkeypatch.setattr(runs, "start", diverge)
    found = tune.search(experiment(FedProx()), 3, tmp_path, fixed={"solver.lr"})
    assert (found.trials, found.note) == (
        3, "none of the 3 trials of its search trained: no upload of round 1 could be taken; it runs with "
           "its own settings")


@pytest.mark.parametrize("count", [1, 8])
def test_a_search_whose_trials_all_diverge_goes_down_until_something_trains(tmp_path: Path, count: int
                                                                            ) -> None:
    """With steps from 0.001 the error grows by 1 - 0.001 * 1e5 each time: without bound in a few rounds."""
    stiff = quadratics(FedProx(mu=1e5, solver=SGD(lr=0.01)), local={"steps": 30})
    found = tune.search(stiff, count, tmp_path, fixed={"mu"})
    assert isinstance(found, tune.Tuning)
    rows = table(tmp_path)
    assert [row["state"] for row in rows[:4]] == ["failed"] * 4
    assert [row["solver.lr"] for row in rows[2:5]] == [1e-3, 1e-4, 1e-5]
    assert rows[4]["state"] == "complete"
    assert len(rows) == max(count, 5)
    assert found.values["solver.lr"] < 2e-5
    assert found.note == ("the first 4 trials of its search diverged, so it went on below the usual step "
                          f"sizes, down to solver.lr = {min(row['solver.lr'] for row in rows):.3g}")
    ranges = json.loads((tmp_path / "best.json").read_text())["ranges"]
    assert ranges == {"solver.lr": "1e-05 to 1 (log scale)"}


@pytest.mark.slow
def test_going_down_is_the_same_whatever_was_asked_for_first(tmp_path: Path) -> None:
    stiff = quadratics(FedProx(mu=1e5, solver=SGD(lr=0.01)), local={"steps": 30})
    for count in (1, 5, 9):
        tune.search(stiff, count, tmp_path / "bit by bit", fixed={"mu"})
    tune.search(stiff, 9, tmp_path / "at once", fixed={"mu"})
    assert files(tmp_path / "bit by bit") == files(tmp_path / "at once")


def test_a_trial_that_loses_half_of_the_clients_fails() -> None:
    setup = runs.Setup.of(experiment())  # five clients
    assert [tune._is_lost((-lost, 0.9, -0.1), setup) for lost in range(6)] == [False] * 3 + [True] * 3


def test_trials_are_judged_by_the_metric_that_decides(tmp_path: Path) -> None:
    made = experiment(rounds=2)
    made = dataclasses.replace(made, eval=dataclasses.replace(made.eval, metric="balanced_accuracy"))
    tuned = tune.search(made, 2, tmp_path)
    best = runs.start(dataclasses.replace(runs.Setup.of(made), algorithm=tuned.algorithm)).summary["best"]
    assert tuned.validation == pytest.approx(best["personal"]["val"]["balanced_accuracy"]["mean"], abs=1e-12)
    assert json.loads((tmp_path / "best.json").read_text())["figure"] == "balanced_accuracy"


def test_a_wrong_experiment_is_no_failed_trial(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cgpfl\.K is 7, but the federation has only 5"):
        tune.search(experiment(CGPFL(K=7)), 3, tmp_path)


def test_bugs_are_not_failed_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: Any) -> runs.Run:
        raise ZeroDivisionError

    monkeypatch.setattr(runs, "start", bug)
    with pytest.raises(ZeroDivisionError):
        tune.search(experiment(), 3, tmp_path)


# -- the record ------------------------------------------------------------------------------------------


TRIALS = 7  # some of them by the sampler's own choice


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    record = tmp_path_factory.mktemp("unbroken")
    tune.search(experiment(), TRIALS, record)
    return record


@pytest.mark.slow
def test_searches_are_repeatable(unbroken: Path, tmp_path: Path) -> None:
    tune.search(experiment(), TRIALS, tmp_path)
    assert files(tmp_path) == files(unbroken)
    tune.search(experiment(seed=1), TRIALS, tmp_path / "other seed")
    others = table(tmp_path / "other seed")
    assert [row["solver.lr"] for row in others] != [row["solver.lr"] for row in table(tmp_path)]


class Stopped(Exception):
    pass


def stopping(at: int, error: type[BaseException]) -> Callable[[int], None]:
    def stop(rounds: int) -> None:
        if rounds >= at:
            raise error

    return stop


@pytest.mark.parametrize("error", [Stopped, pytest.param(KeyboardInterrupt, marks=pytest.mark.slow)])
def test_a_stopped_search_goes_on_as_if_nothing_had_happened(
        unbroken: Path, tmp_path: Path, error: type[BaseException]) -> None:
    for at, done in ((6, 1), (14, 3), (14, 3), (23, 5)):  # in the middle of a trial of four rounds each
        with pytest.raises(error):
            tune.search(experiment(), TRIALS, tmp_path, progress=stopping(at, error))
        assert len(table(tmp_path)) == done
        assert trials.read(tmp_path)["best"] is None  # type: ignore[index]
    tune.search(experiment(), TRIALS, tmp_path)
    assert files(tmp_path) == files(unbroken)


def test_what_a_kill_leaves_behind_does_not_matter(unbroken: Path, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        tune.search(experiment(), TRIALS, tmp_path, progress=stopping(14, Stopped))
    journal = tmp_path / "journal.log"
    with journal.open("ab") as file:
        file.write(b'{"op_code":4,"worker_id":"x","stu')  # half a line
    (tmp_path / "journal.log.lock").symlink_to(journal)  # Optuna's own, which would be waited for
    (tmp_path / "trials.csv").unlink()
    tune.search(experiment(), TRIALS, tmp_path)
    assert files(tmp_path) == files(unbroken)


def test_a_finished_search_is_read(unbroken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = files(unbroken)
    monkeypatch.setattr(runs, "start", None)  # nothing is run
    tuned = tune.search(experiment(), TRIALS, unbroken)
    assert tuned.trials == TRIALS
    assert files(unbroken) == before


@pytest.mark.slow
def test_more_trials_extend_a_search(unbroken: Path, tmp_path: Path) -> None:
    tune.search(experiment(), 3, tmp_path)
    tune.search(experiment(), TRIALS, tmp_path)
    assert files(tmp_path) == files(unbroken)
    assert tune.search(experiment(), 3, tmp_path) == tune.search(experiment(), 3, tmp_path / "short")
    assert files(tmp_path) == files(tmp_path / "short")


@pytest.mark.parametrize(("other", "told"), [
    (experiment(FedAvg(SGD(lr=0.001), beta=2.0)), r"algorithm\.beta: 1\.0 became 2\.0"),
    (experiment(FedAvg(Adam(lr=0.001))), r"algorithm\.solver"),
    (experiment(rounds=5), "rounds: 4 became 5"),
    (experiment(steps=4), r"train\.local\.steps: 3 became 4"),
    (experiment(data={"seed": 1}), r"data\.seed: 0 became 1"),
    (experiment(Ditto(solver=SGD(lr=0.001))), "algorithm"),
    (experiment(seed=3), r"train\.seed: 0 became 3"),
], ids=["field", "solver", "rounds", "steps", "data", "method", "seed"])
def test_the_record_of_something_else_is_refused(
        unbroken: Path, other: Experiment, told: str) -> None:
    before = files(unbroken)
    with pytest.raises(UsageError, match=rf"holds another search \({told}"):
        tune.search(other, TRIALS + 1, unbroken)
    assert files(unbroken) == before


def test_other_ranges_are_refused(tmp_path: Path) -> None:
    tune.search(experiment(Ditto(), rounds=1), 1, tmp_path)
    with pytest.raises(UsageError, match=r"\(ranges.lam: '0.01 to 10 \(log scale\)' became None"):
        tune.search(experiment(Ditto(), rounds=1), 1, tmp_path, fixed={"lam"})


def test_how_clients_are_run_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    measure = choose.measure
    monkeypatch.setattr(choose, "measure", lambda *rest: measured.append(1) or measure(*rest))
    made = experiment(rounds=2, backend="auto", workers=1)
    tune.search(made, 2, tmp_path)
    assert len(measured) == 1
    tune.search(made, 3, tmp_path)
    assert len(measured) == 1


def test_a_damaged_journal_is_told(unbroken: Path, tmp_path: Path) -> None:
    lines = (unbroken / "journal.log").read_text().splitlines(keepends=True)
    (tmp_path / "journal.log").write_text("".join([lines[0], "nonsense\n", *lines[2:]]))
    with pytest.raises(DescantError, match=r"journal\.log is damaged"):
        tune.search(experiment(), TRIALS, tmp_path)


def test_two_searches_do_not_share_a_record(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(DescantError, match="another process is working in"):
        tune.search(experiment(), 1, tmp_path)


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DescantError, match="cannot write the search in"):
        tune.search(experiment(), 1, tmp_path / "file" / "record")


def test_reading_what_is_not_there(tmp_path: Path) -> None:
    assert trials.read(tmp_path) is None


# -- requests that cannot be met -------------------------------------------------------------------------


def test_without_validation_rows_nothing_is_tuned(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"set data\.validation above 0"):
        tune.search(experiment(data={"validation": 0.0}), 2, tmp_path / "record")
    assert not (tmp_path / "record").exists()


def test_with_everything_fixed_nothing_is_tuned(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"fedavg has no field left to tune: `descant show fedavg`"):
        tune.search(experiment(), 2, tmp_path / "record", fixed={"solver.lr"})
    assert not (tmp_path / "record").exists()


def test_there_must_be_a_trial(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least 1, not 0"):
        tune.search(experiment(), 0, tmp_path)


def test_optuna_is_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UsageError, match=r"pip install 'descant\[tune\]'"):
        tune.search(experiment(), 2, tmp_path)


# -- kills -----------------------------------------------------------------------------------------------


PROGRAM = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from test_tune import experiment
from descant.comparison import tune
tune.search(experiment(), 7, Path(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_search_ends_as_an_unbroken_one(unbroken: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-c", PROGRAM, str(tmp_path),
             str(Path(__file__).parent), str(Path(__file__).parents[1])]
    rng = np.random.default_rng(0)
    for _ in range(20):
        process = subprocess.Popen(words)
        done = tmp_path / "trials.csv"
        before = done.stat().st_mtime_ns if done.exists() else 0
        while process.poll() is None and (not done.exists() or done.stat().st_mtime_ns == before):
            time.sleep(0.005)  # until a trial is finished: then somewhere in the next one
        time.sleep(rng.uniform(0, 0.05))
        if process.poll() is not None:
            break
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    tune.search(experiment(), TRIALS, tmp_path)
    assert files(tmp_path) == files(unbroken)

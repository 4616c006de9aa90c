"""Training as people do it: schedules, clipping, AdamW, callbacks, sampling by size, a warm start; all of it
the same on every backend and after a resume."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import descant
from descant import SGD, AdamW, UsageError
from descant.algorithms import APFL, Ditto, FedAvg, FedRep, pFedBayes, pFedHN, pFedMe
from descant.core.splits import Table
from descant.core.task import inputs
from descant.engine.backends.base import InProcess
from descant.experiment.config import parse_algorithm
from descant.priors.schedule import Cosine, Exponential, Stepwise, at_round
from helpers import assert_same, engine, ragged

SCHEDULED = SGD(lr=0.2, clip=0.5, schedule=Cosine(rounds=6, warmup=2))


# -- schedules ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "reference"), [
    (Cosine(rounds=8, final=0.1), lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 8, eta_min=0.1)),
    (Exponential(0.7), lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.7)),
    (Stepwise(3, 0.5), lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5)),
])
def test_schedules_are_those_of_torch(schedule, reference):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = reference(optimizer)
    for number in range(1, 9):
        assert schedule.factor(number) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
        optimizer.step()
        scheduler.step()
    if isinstance(schedule, Cosine):
        assert schedule.factor(9) == schedule.factor(100) == 0.1


def test_a_warm_up_rises_to_the_whole_step():
    made = Cosine(rounds=10, warmup=4)
    assert [made.factor(k) for k in range(1, 6)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert made.factor(6) < 1
    with pytest.raises(UsageError, match="warmup = 10 must be less than rounds = 10"):
        Cosine(rounds=10, warmup=10)


def test_every_solver_of_a_method_follows_its_schedule():
    method = pFedHN(solver=SGD(lr=0.4, schedule=Exponential(0.5)),
                    server=SGD(lr=0.8, schedule=Stepwise(2, 0.5)))
    third = at_round(method, 3)
    assert third.solver == SGD(lr=0.1)
    assert third.server == SGD(lr=0.4)
    plain = FedAvg()
    assert at_round(plain, 3) is plain


@pytest.mark.parametrize("model", ["mclr", "dnn"])
def test_a_round_has_the_steps_of_its_schedule(model):
    """Each round of a scheduled run is that of a run without schedule whose lr is the one of this round."""
    with engine(FedAvg(SGD(lr=0.3, schedule=Exponential(0.5))), ragged(), model) as found:
        for number in (1, 2, 3):
            with engine(FedAvg(SGD(lr=0.3 * 0.5 ** (number - 1))), ragged(), model) as expected:
                expected.training.number, expected.training.server = found.training.number, found.server
                found.play(1)
                expected.play(1)
                assert_same(found.server, expected.server)


@pytest.mark.parametrize("method", [
    FedAvg(SCHEDULED), Ditto(solver=AdamW(lr=0.05, schedule=Exponential(0.5))), FedRep(solver=SCHEDULED)],
    ids=lambda method: method.name)
@pytest.mark.thorough
def test_backends_agree(method):
    with engine(method, ragged(), "dnn") as one, \
            engine(method, ragged(), "dnn", backend="vectorised") as many, \
            engine(method, ragged(), "dnn", backend="processes", workers=2, chunk=2) as apart:
        for each in (one, many, apart):
            each.play(3)
        assert_same(many.server, one.server, 1e-10)
        assert_same(apart.server, one.server, 1e-10)


@pytest.mark.thorough
def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path):
    federation = descant.federation("digits", partition="classes", clients=5)
    settings: dict[str, Any] = {"federation": federation, "cohort": 3, "sampling": "samples",
                                "backend": "vectorised", "local": {"steps": 3}, "eval": {"every": 1}}
    descant.run(FedAvg(SCHEDULED), **settings, rounds=6, out=tmp_path / "whole")
    descant.run(FedAvg(SCHEDULED), **settings, rounds=3, out=tmp_path / "parts")
    descant.resume(tmp_path / "parts", rounds=6)
    names = ["state.safetensors", "best/state.safetensors"]
    for name in names:
        whole, parts = ((tmp_path / run / "checkpoint" / name).read_bytes() for run in ("whole", "parts"))
        assert whole == parts
    with pytest.raises(UsageError, match=r"changed setup.*schedule"):
        descant.run(FedAvg(SGD(lr=0.2, clip=0.5)), **settings, rounds=6, out=tmp_path / "parts", resume=True)


def test_solvers_in_a_file():
    made = parse_algorithm({"name": "fedavg", "solver": {
        "name": "adamw", "lr": 0.01, "clip": 1.0, "schedule": {"name": "cosine", "rounds": 40}}})
    assert made == FedAvg(AdamW(lr=0.01, clip=1.0, schedule=Cosine(rounds=40)))
    with pytest.raises(UsageError, match="cosine"):
        parse_algorithm({"name": "fedavg", "solver": {"name": "sgd", "schedule": {"name": "cosin"}}})


def test_a_solver_that_is_only_named_is_told_how_to_write_it():
    with pytest.raises(UsageError, match=r'write { name = "adam" }, in Python {"name": "adam"}'):
        FedAvg(solver="adam")


@pytest.mark.parametrize("method", [APFL, pFedBayes])
def test_a_ridge_is_not_decoupled(method):
    with pytest.raises(UsageError, match="is a ridge in its loss"):
        method(solver=AdamW())


def test_only_what_is_trained_counts_in_the_norm():
    """FedRep trains the head first: a body with large gradients must not shorten the steps of the head."""
    from descant.core.parts import Part
    from descant.priors.solve import solve
    from helpers import make_work

    work = make_work(FedAvg(), ragged(), nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.Linear(5, 3)),
                     local={"steps": 1})
    layout, start = work.task.layout, work.task.init()
    is_head = torch.zeros(layout.dim, dtype=torch.bool)
    is_head[-18:] = True  # 5 x 3 weights and 3 biases
    part = Part((False, False, True, True), is_head)
    data = work.view("local", 0, 1)
    with torch.no_grad():
        moved = solve(work.task, start, data, SGD(lr=1.0, clip=0.01), only=part).theta - start.theta
    assert not moved[:-18].any()
    # the step is as long as the clip lets it be: clipped with the body, it would be shorter
    assert moved[-18:].norm() == pytest.approx(0.01, rel=1e-3)


# -- who is sampled ----------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_clients_are_sampled_by_their_rows():
    sizes = np.array([10, 20, 70])
    rows = Table.packed(np.arange(100), sizes)
    made = descant.Federation(torch.zeros(100, 2), torch.zeros(100, dtype=torch.long), rows,
                              Table.packed(np.arange(0), [0] * 3), Table.packed(np.arange(0), [0] * 3), 2,
                              ("a", "b", "c"))
    with engine(FedAvg(), made, cohort=1, sampling="samples") as e:
        seen = []
        for number in range(1, 2001):
            e.training.number = number
            seen.append(int(e.training.sample()[0][0]))
    shares = np.bincount(seen, minlength=3) / 2000
    assert shares == pytest.approx(sizes / 100, abs=0.03)


# -- callbacks ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits() -> descant.Federation:
    return descant.federation("digits", partition="classes", clients=4)


@pytest.mark.thorough
def test_callbacks_see_every_round_and_can_stop(digits, tmp_path):
    rounds: list[int] = []
    evaluated: list[int] = []

    def on_round(run: descant.Run, row: dict[str, Any]) -> None:
        assert run.history[-1] is row
        assert run.rounds == row["round"]  # it is committed
        rounds.append(row["round"])

    def on_evaluate(run: descant.Run, row: dict[str, Any]) -> None:
        evaluated.append(row["round"])
        if row["round"] >= 4:
            run.stop("enough")

    settings: dict[str, Any] = {"federation": digits, "backend": "vectorised", "local": {"steps": 2},
                                "eval": {"every": 2}}
    stopped = descant.run("fedavg", **settings, rounds=9, out=tmp_path / "run", on_round=on_round,
                          on_evaluate=on_evaluate)
    assert (rounds, evaluated) == ([1, 2, 3, 4], [2, 4])
    assert stopped.rounds == 4
    assert stopped.summary["stopped"] == "asked"
    assert '"stopped": "asked"' in (tmp_path / "run" / "summary.json").read_text()
    # what is left can be played later, and is what it would have been
    again = descant.resume(tmp_path / "run")
    whole = descant.run("fedavg", **settings, rounds=9)
    assert again.summary["stopped"] is None
    assert again.rounds == 9
    assert_same(again.snapshot("last").server, whole.snapshot("last").server)
    with pytest.raises(UsageError, match="on_round must be a function"):
        descant.run("fedavg", **settings, on_round=3)


def test_an_observer_and_callbacks_go_together(digits):
    class Log:
        rows = 0

        def started(self, run: Any, measured: Any) -> None: ...

        def played(self, row: dict[str, Any]) -> None:
            self.rows += 1

    seen, log = [], Log()
    descant.run("fedavg", federation=digits, rounds=2, backend="vectorised", observer=log,
                on_round=lambda run, row: seen.append(log.rows))
    assert seen == [1, 2]


# -- a warm start ------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_warm_start_is_the_module_with_these_parameters(digits, tmp_path):
    settings: dict[str, Any] = {"federation": digits, "rounds": 2, "backend": "vectorised"}
    before = descant.run("fedavg", model="dnn", **settings)
    state = before.global_model("last").state_dict()
    warm = descant.run("ditto", model="dnn", initial=state, **settings, out=tmp_path / "warm")
    same = descant.run("ditto", model=before.global_model("last"), **settings)
    assert_same(warm.snapshot("last").server, same.snapshot("last").server)
    assert warm.setup.task.init().theta.equal(before.snapshot("last").server.theta)
    with pytest.raises(UsageError, match="resume with the same call"):
        descant.resume(tmp_path / "warm")
    again = descant.run("ditto", model="dnn", initial=state, **settings, out=tmp_path / "warm", resume=True)
    assert again.rounds == 2


@pytest.mark.parametrize(("initial", "words"), [
    ({"weight": torch.zeros(3)}, "`initial` does not fit the model: .*Missing key"),
    ({"weight": 3}, "must be a state_dict"), (Path("weights.pt"), "must be a state_dict"),
])
def test_a_wrong_start_is_refused(initial, words, digits):
    with pytest.raises(UsageError, match=words):
        descant.run("fedavg", federation=digits, initial=initial, rounds=1)


# -- schedules by steps ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "reference"), [
    (Cosine(rounds=3, final=0.1, by="step"),
     lambda o, k: torch.optim.lr_scheduler.CosineAnnealingLR(o, 3 * k, eta_min=0.1)),
    (Exponential(0.5, by="step"), lambda o, k: torch.optim.lr_scheduler.ExponentialLR(o, 0.5 ** (1 / k))),
])
@pytest.mark.parametrize("solver", ["sgd", "momentum", "adamw"])
def test_by_steps_a_client_is_trained_as_by_torch(schedule, reference, solver):
    """One client, whole batches: its rounds are torch's steps, with its scheduler stepped after each."""
    federation, steps = ragged(), 4
    one = descant.Federation(federation.x, federation.y, Table.of([federation.train[0]]),
                             Table.of([federation.validation[0]]), Table.of([federation.test[0]]),
                             federation.classes, ("a",))
    ours = {"sgd": SGD(lr=0.3, weight_decay=0.1, schedule=schedule),
            "momentum": SGD(lr=0.1, momentum=0.5, schedule=schedule),
            "adamw": AdamW(lr=0.05, weight_decay=0.1, schedule=schedule)}[solver]
    with engine(FedAvg(ours), one, "dnn", batch="full", local={"steps": steps}) as e:
        work = e.training.work
        module = work.task.module(work.task.init())
        rows = torch.from_numpy(one.train[0])
        x, y = inputs(one.x[rows], torch.float64), one.y[rows]
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)  # has the factor for its lr
        scheduler = reference(optimizer, steps)
        for _ in range(3):
            e.play(1)
            again = _torch_of(ours, module)  # the memory of a solver begins anew in every round
            for _ in range(steps):
                again.param_groups[0]["lr"] = ours.lr * optimizer.param_groups[0]["lr"]
                again.zero_grad()
                nn.functional.cross_entropy(module(x), y).backward()
                again.step()
                optimizer.step()
                scheduler.step()
            expected = torch.cat([p.detach().flatten() for p in module.parameters()])
            assert_same(e.server.theta, expected, 1e-9)


def _torch_of(solver: Any, module: nn.Module) -> torch.optim.Optimizer:
    if isinstance(solver, AdamW):
        return torch.optim.AdamW(module.parameters(), lr=1.0, weight_decay=solver.weight_decay)
    return torch.optim.SGD(module.parameters(), lr=1.0, momentum=solver.momentum,
                           weight_decay=solver.weight_decay)


def test_a_warm_up_by_steps_ends_with_the_whole_step():
    made, steps = Cosine(rounds=10, warmup=2, by="step"), 4
    length = torch.tensor(1 / steps)
    found = [float(made.within(torch.tensor(k / steps), length)) for k in range(3 * steps)]
    assert found[:8] == [(k + 1) / 8 for k in range(8)]
    assert found[8] == 1.0
    assert all(a > b for a, b in itertools.pairwise(found[8:]))
    # with one step a round, both are the same
    assert [float(made.within(torch.tensor(float(n - 1)), torch.tensor(1.0))) for n in range(1, 12)] == (
        pytest.approx([made.factor(n) for n in range(1, 12)], rel=1e-5))


@pytest.mark.parametrize("method", [
    FedAvg(SGD(lr=0.2, schedule=Exponential(0.5, by="step"))),
    Ditto(solver=AdamW(lr=0.05, schedule=Cosine(rounds=3, warmup=1, by="step"))),
    APFL(adaptive=True, solver=SGD(lr=0.1, schedule=Exponential(0.5, by="step")))],
    ids=lambda method: method.name)
def test_backends_agree_by_steps(method):
    """Clients that run together take different numbers of steps, and each has its own step sizes."""
    with engine(method, ragged(), "dnn", local={"epochs": 2}) as one, \
            engine(method, ragged(), "dnn", local={"epochs": 2}, backend="vectorised") as many:
        one.play(2)
        many.play(2)
        assert_same(many.server, one.server, 1e-10)


def test_a_run_of_one_process_knows_its_processor_time(digits, tmp_path):
    """Also over a resume; with workers nobody knows it, and rounds of older versions do not."""
    settings: dict[str, Any] = {"federation": digits, "local": {"steps": 2}, "eval": {"every": 2}}
    descant.run("fedavg", **settings, rounds=2, out=tmp_path / "run", backend="vectorised")
    again = descant.resume(tmp_path / "run", rounds=3)
    known = [row["processor_seconds"] for row in again.history]
    assert len(known) == 3
    assert min(known) > 0
    assert again.summary["processor_seconds"] == pytest.approx(sum(known), abs=1e-3)
    assert again.summary["processor_seconds"] < again.summary["seconds"] + 0.5
    workers = descant.run("fedavg", **settings, rounds=1, backend="processes", workers=2)
    assert "processor_seconds" not in workers.history[0]
    assert workers.summary["processor_seconds"] is None


def test_a_run_trains_those_whom_somebody_looks_at(digits, tmp_path, monkeypatch):
    """Everyone takes part; who is in no cohort is trained where it is scored; a resume is exact."""
    settings: dict[str, Any] = {"federation": digits, "local": {"steps": 2}, "eval": {"every": 3},
                                "cohort": 2, "participation": "all", "backend": "vectorised"}
    trained: list[int] = []
    plain = InProcess.run

    def run(self, job, clients, *rest):
        if job == "local":
            trained.append(len(clients))
        return plain(self, job, clients, *rest)

    monkeypatch.setattr(InProcess, "run", run)
    m = digits.population
    whole = descant.run(pFedMe(K=2), **settings, rounds=5, out=tmp_path / "whole")
    assert trained == [2, 2, 2, m - 2, 2, 2, m - 2]  # the cohort by itself, then the others
    assert [row["participants"] for row in whole.history] == [m] * 5
    assert {row["grad_steps"] for row in whole.history} == {4 * m}
    descant.run(pFedMe(K=2), **settings, rounds=2, out=tmp_path / "parts")
    parts = descant.resume(tmp_path / "parts", rounds=5)
    for client in range(m):
        assert_same(parts.personal(client, "last"), whole.personal(client, "last"))
    trained.clear()
    descant.run(Ditto(), **settings, rounds=4)  # goes on from what a client keeps
    descant.run(pFedMe(K=2), **settings | {"drop": 0.5}, rounds=1)
    descant.run("fedavg", **settings, rounds=4)
    assert trained[:4] == [m] * 4
    assert trained[4] < m
    assert trained[5:] == [2] * 4


CROWD = {"model": "dnn", "cohort": 11, "participation": "all", "backend": "vectorised", "chunk": 4,
         "local": {"steps": 2}}


def server_after(rounds: int, every: int, out: Path | None = None, **settings: Any) -> Any:
    fed = descant.federation("digits", partition="iid", clients=30, seed=0)
    run = descant.run(pFedMe(K=2), federation=fed, rounds=rounds, eval={"every": every}, out=out,
                      **CROWD | settings)
    return run.snapshot("last").server


@pytest.mark.parametrize("backend", ["vectorised", pytest.param("processes", marks=pytest.mark.slow)])
def test_when_clients_are_scored_shows_in_no_bit_of_the_server(tmp_path, backend):
    """Neither does a run that is extended, whose last round was scored. The cohort has the same chunks."""
    settings: dict[str, Any] = {"backend": backend} | ({"workers": 2} if backend == "processes" else {})
    whole = server_after(7, 7, **settings)
    assert_same(server_after(7, 2, **settings), whole)
    server_after(4, 7, tmp_path / "run", **settings)
    assert_same(descant.resume(tmp_path / "run", rounds=7).snapshot("last").server, whole)


def test_attackers_forge_from_everyone_in_every_round():
    """So that it does not matter when clients are scored."""
    attack = {"kind": "alie", "share": 0.2}
    assert_same(server_after(4, 1, attack=attack), server_after(4, 4, attack=attack))
    with pytest.raises(AssertionError):  # the attack does something
        assert_same(server_after(4, 4, attack=attack), server_after(4, 4))

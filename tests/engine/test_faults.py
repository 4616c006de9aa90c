"""Clients, workers and methods that misbehave: the others are not harmed, and it is told who did what."""

from __future__ import annotations

import dataclasses
import gc
import math
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor

import descant
from descant.algorithms import Ditto, FedAvg
from descant.core.algorithm import ClientData, Message, Round
from descant.core.federation import Federation
from descant.core.fields import hyper
from descant.core.task import Batch, Task
from descant.core.tree import leaves, map_tree, take
from descant.core.vector import Model
from descant.engine.evaluation import summarise
from descant.engine.rounds import NobodyLeft, Training
from descant.errors import DescantError
from descant.experiment import checkpoint
from descant.experiment import run as runs
from descant.experiment.run import Interrupted
from descant.priors.solve import SGD
from helpers import MODELS, SIZES, Engine, assert_same, clone, engine, quadratics, ragged

FEDERATION = ragged()
CULPRIT = 3  # the only client with 7 training rows
BACKENDS: dict[str, dict[str, Any]] = {
    "loop": {"backend": "loop"},
    "vectorised": {"backend": "vectorised", "chunk": 3},
    "processes": {"backend": "processes", "chunk": 2, "workers": 2},
}
every_backend = pytest.mark.parametrize("backend", BACKENDS)


class Failure(RuntimeError):
    pass


Fault: TypeAlias = Literal["raise", "shape", "dtype", "parts", "no tensor", "nan", "inf in state",
                           "personalize"]


@dataclass(frozen=True)
class Faulty(Ditto):
    """Ditto, in which the clients with `victim` training rows misbehave. That a client looks at its own
    number makes a vectorised chunk raise, as much of users' code does."""

    name: ClassVar[str] = "faulty"
    fault: Fault = hyper("raise", "what it does")
    victim: int = hyper(SIZES[CULPRIT], "number of training rows")

    def local(self, task: Task, message: Message, state: Model, data: ClientData) -> Any:
        upload, new = super().local(task, message, state, data)
        if data.size != self.victim:
            return upload, new
        if self.fault == "raise":
            raise Failure("the dog ate it\nand more")
        theta, stats = upload.model
        faults: dict[str, Any] = {
            "shape": upload._replace(model=Model(theta[:-1], stats)),
            "dtype": map_tree(Tensor.float, upload),
            "parts": (theta,),
            "no tensor": upload._replace(model=Model(theta, 0.5)),  # type: ignore[arg-type]
            "nan": upload._replace(model=Model(theta * math.nan, stats)),
        }
        if self.fault == "inf in state":
            return upload, Model(new.theta / 0, new.stats)
        return faults.get(self.fault, upload), new

    def personalize(self, task: Task, message: Message, state: Model, data: ClientData) -> Model:
        if self.fault == "personalize" and data.size == self.victim:
            raise Failure("no model")
        return state


def play_without(e: Engine, culprit: int) -> None:
    """A round of everyone but one client, by hand."""
    training, algorithm = e.training, e.training.work.algorithm
    training.number += 1
    others = np.setdiff1d(e.everyone, [culprit])
    message = algorithm.broadcast(e.server, training.round_of(others))
    outcome = e.backend.run("local", others, training.number, message, training.store.read(others))
    assert not outcome.failed
    training.server, _ = algorithm.aggregate(e.server, outcome.values.upload, training.round_of(others))
    training.store.stage(others, outcome.values.state, training.number)
    training.store.write()


def check_that_the_others_are_not_harmed(e: Engine, model: str, rounds: int) -> None:
    with engine(Ditto(), FEDERATION, MODELS[model]()) as reference:
        initial = take(clone(reference.states()), CULPRIT)
        for _ in range(rounds):
            play_without(reference, CULPRIT)
        assert_same(e.server, reference.server, 1e-10)
        assert_same(e.states(), reference.states(), 1e-10)
    assert_same(take(e.states(), CULPRIT), initial)  # bit for bit
    assert e.training.store.last_round.tolist() == [rounds, rounds, rounds, 0, rounds]


REASONS = {
    "raise": "Failure: the dog ate it",
    "shape": "upload.model.theta has shape (50,) of torch.float64, expected (51,)",
    "dtype": "torch.float32",
    "parts": "expected",
    "no tensor": "float",
    "nan": "upload.model.theta is not finite",
    "inf in state": "state.theta is not finite",
}


@every_backend
@pytest.mark.parametrize("fault", REASONS)
def test_a_client_that_misbehaves_is_left_out(fault: Any, backend: str) -> None:
    with engine(Faulty(fault=fault), FEDERATION, "mclr", **BACKENDS[backend]) as e:
        for report in e.play(2):
            assert list(report.rejected) == [CULPRIT]
            assert REASONS[fault] in report.rejected[CULPRIT]
            assert "\n" not in report.rejected[CULPRIT]
            assert report.participants == len(SIZES)
            assert math.isfinite(report.loss)
        check_that_the_others_are_not_harmed(e, "mclr", 2)
        scores = e.score()
        assert scores.newcomer.tolist() == [False, False, False, True, False]
        assert not scores.failed


def with_nan_features(split: Literal["train", "test"] = "train") -> Federation:
    x = FEDERATION.x.clone()
    x[FEDERATION.split(split)[CULPRIT]] = math.nan
    return dataclasses.replace(FEDERATION, x=x)


@every_backend
@pytest.mark.parametrize("model", ["mclr", "batchnorm+dropout", "conv"])
def test_nan_in_the_features_of_one_client(model: str, backend: str) -> None:
    with engine(Ditto(), with_nan_features(), MODELS[model](), **BACKENDS[backend]) as e:
        for report in e.play(2):
            assert list(report.rejected) == [CULPRIT]
            assert "not finite" in report.rejected[CULPRIT]
        check_that_the_others_are_not_harmed(e, model, 2)
        assert all(bool(torch.isfinite(t).all()) for _, t in leaves((e.server, e.states())))


@every_backend
def test_nan_in_the_test_rows_of_one_client_stays_with_it(backend: str) -> None:
    found = []
    for federation in (FEDERATION, with_nan_features("test")):
        with engine(Ditto(), federation, "mclr", **BACKENDS[backend]) as e:
            e.play(1)
            found.append(e.score())
    for clean, broken in ((found[0].personal, found[1].personal), (found[0].shared, found[1].shared)):
        assert broken.test[CULPRIT, 0].isnan()
        for kind in ("validation", "test"):
            rows = [0, 1, 2, 4]
            assert_same(getattr(broken, kind)[rows], getattr(clean, kind)[rows])
    figures = summarise(found[1], FEDERATION)["personal"]["test"]["loss"]
    # client 1 has no test rows, the culprit has no figure
    assert figures["mean"] == pytest.approx(float(found[0].personal.test[[0, 2, 4], 0].mean()))


@every_backend
def test_a_client_that_cannot_be_scored_is_counted(backend: str) -> None:
    with engine(Faulty(fault="personalize"), FEDERATION, "mclr", **BACKENDS[backend]) as e, \
         engine(Ditto(), FEDERATION, "mclr") as reference:
        assert not e.play(1)[0].rejected
        reference.play(1)
        scores, expected = e.score(), reference.score()
    assert scores.failed == {CULPRIT: "Failure: no model"}
    assert summarise(scores, FEDERATION)["personal"]["failed"] == 1
    assert scores.personal.test[CULPRIT].isnan().all()
    rows = [0, 1, 2, 4]
    assert_same(take(scores.personal, rows), take(expected.personal, rows), 1e-10)


def test_rejections_are_written_down(tmp_path: Path) -> None:
    run = descant.run(Faulty(), federation=FEDERATION, out=tmp_path / "run", rounds=2, batch=4,
                      local={"steps": 1}, backend="vectorised", chunk=3)
    for row in run.history:
        assert row["rejected"] == 1
        assert row["rejections"] == {"client3": "Failure: the dog ate it"}
    assert run.summary["rejected"] == 2
    assert run.history[-1]["personal"]["newcomers"] == 1


def test_the_first_client_may_be_the_culprit() -> None:
    """The form of results is learned from a client without batches: it need not be the first."""
    with engine(Faulty(victim=SIZES[0]), FEDERATION, "mclr") as e:
        assert list(e.play(1)[0].rejected) == [0]


def test_what_is_rejected_counts_neither_in_the_average_nor_in_the_bytes_up() -> None:
    """The average is over the accepted: p_i = n_i / 18 for sizes 9, 5, 1, 3."""
    with engine(Faulty(fault="raise"), FEDERATION, "mclr") as e:
        algorithm = e.training.work.algorithm
        others = np.array([0, 1, 2, 4])
        message = algorithm.broadcast(e.server, e.training.round_of(others))
        upload = e.backend.run("local", others, 1, message, e.training.store.read(others)).values.upload
        [report] = e.play(1)
        weights = torch.tensor([9, 5, 1, 3], dtype=torch.float64) / 18
        torch.testing.assert_close(e.model.theta, weights @ upload.model.theta, rtol=0, atol=1e-14)
        assert report.bytes_up == 4 * 51 * 8
        assert report.bytes_down == 5 * 51 * 8  # the culprit was sent the message, too


# -- nobody is left ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hopeless(FedAvg):
    """Works on no data only: a rehearsal does not tell."""

    name: ClassVar[str] = "hopeless"
    fault: Literal["raise", "shape", "nan"] = hyper("raise", "what it does")

    def local(self, task: Task, message: Message, state: tuple[()], data: ClientData) -> Any:
        seen: list[Batch] = []

        def step(carry: Tensor, batch: Batch) -> Tensor:
            seen.append(batch)
            return carry

        data.scan(step, torch.zeros(()))
        w: Model = message.shared
        if not seen:
            return w, ()
        if self.fault == "raise":
            raise Failure("always")
        return Model(w.theta[:-1] if self.fault == "shape" else w.theta * math.nan, w.stats), ()


@every_backend
@pytest.mark.parametrize(("fault", "reason"), [("raise", "Failure: always"), ("shape", "shape"),
                                               ("nan", "not finite")])
def test_a_round_without_a_single_upload_has_not_happened(fault: Any, reason: str, backend: str) -> None:
    with engine(Hopeless(fault=fault), FEDERATION, "mclr", **BACKENDS[backend]) as e:
        server, states = clone(e.server), clone(e.states())
        with pytest.raises(NobodyLeft, match=f"every upload in round 1 was rejected; .*client0.*{reason}"):
            e.play(1)
        assert e.training.number == 0
        assert not e.training.store.took_part(e.everyone).any()
        assert_same(e.server, server)
        assert_same(e.states(), states)


def test_a_method_that_fails_on_everyone_is_told_before_training(tmp_path: Path) -> None:
    class Broken(Ditto):
        def local(self, task: Task, message: Message, state: Model, data: ClientData) -> Any:
            raise Failure("never works")

    with pytest.raises(DescantError, match=r"fails on every client.*never works"):
        descant.run(Broken(), federation=FEDERATION, out=tmp_path / "run", rounds=1)
    assert not (tmp_path / "run").exists()


def test_a_diverging_run_leaves_the_last_good_round(tmp_path: Path) -> None:
    """Steps of 1e160 on a quadratic: w is about 1e160 after round 1 and 1e320 > 1.8e308 after round 2."""
    out = tmp_path / "run"
    settings: dict[str, Any] = {
        "federation": quadratics(3), "model": "quadratic", "batch": "full", "local": {"steps": 1},
        "rounds": 4, "dtype": "float64", "backend": "loop", "eval": {"every": 4},
    }
    with pytest.raises(DescantError, match="every upload in round 2 was rejected"):
        descant.run(FedAvg(SGD(lr=1e160)), out=out, **settings)
    run = descant.load(out)
    assert (run.rounds, len(run.history)) == (1, 1)
    assert bool(torch.isfinite(run.snapshot("last").server.theta).all())
    assert run.snapshot("last").server.theta.abs().max() > 1e159
    with pytest.raises(DescantError, match="every upload in round 2 was rejected"):
        descant.resume(out)


def test_a_server_that_overflows_is_told_and_undone() -> None:
    with engine(FedAvg(SGD(lr=1e3), beta=1e308), FEDERATION, "mclr") as e:
        server = clone(e.server)
        with pytest.raises(DescantError, match="server's theta is not finite after round 1"):
            e.play(1)
        assert_same(e.server, server)
        assert e.training.number == 0
        assert not e.training.store.took_part(e.everyone).any()


@dataclass(frozen=True)
class BadServer(FedAvg):
    name: ClassVar[str] = "badserver"

    def aggregate(self, server: Model, uploads: Model, round: Round) -> Any:
        if round.number == 2:
            raise Failure("server")
        return super().aggregate(server, uploads, round)


def test_a_failure_of_the_server_undoes_the_round() -> None:
    with engine(BadServer(), FEDERATION, "mclr", cohort=2) as e:
        e.play(1)
        server, states, last = clone(e.server), clone(e.states()), e.training.store.last_round.copy()
        with pytest.raises(Failure):
            e.play(1)
        assert e.training.number == 1
        assert_same(e.server, server)
        assert_same(e.states(), states)
        assert np.array_equal(e.training.store.last_round, last)


@pytest.mark.parametrize("place", ["evaluate", "play"])
@pytest.mark.thorough
def test_ctrl_c_in_the_middle_of_a_round_keeps_the_rounds_before(place: str, tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"federation": FEDERATION, "rounds": 3, "batch": 4, "local": {"steps": 1},
                                "backend": "loop", "eval": {"every": 1}}
    owner, name = (runs, "evaluate") if place == "evaluate" else (Training, "_play")
    function, calls = getattr(owner, name), 0

    def interrupted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        found = function(*args)
        if calls == 2:
            raise KeyboardInterrupt
        return found

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(Interrupted, match="stopped after round 1 of 3"):
            descant.run(Ditto(), out=tmp_path / "parts", **settings)
    _, facts = checkpoint.read(tmp_path / "parts" / "checkpoint" / "state.safetensors")
    assert facts["round"] == 1
    parts = descant.run(Ditto(), out=tmp_path / "parts", resume=True, **settings)
    whole = descant.run(Ditto(), **settings)
    assert_same(parts.snapshot("last").server, whole.snapshot("last").server)
    assert [row["round"] for row in parts.history] == [1, 2, 3]


# -- workers --------------------------------------------------------------------------------------------


def children() -> list[Any]:
    deadline = time.monotonic() + 5
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.05)
    return multiprocessing.active_children()


@pytest.mark.thorough
def test_workers_are_gone_when_a_run_ends_or_fails() -> None:
    settings: dict[str, Any] = {"federation": FEDERATION, "rounds": 1, "batch": 4, "local": {"steps": 1},
                                **BACKENDS["processes"]}
    descant.run(Ditto(), **settings)
    assert children() == []
    with pytest.raises(NobodyLeft):
        descant.run(Hopeless(), **settings)
    assert children() == []


class Killer:
    """An observer that kills a worker after a round."""

    def __init__(self, number: int) -> None:
        self.number = number

    def started(self, run: Any, measured: Any) -> None:
        assert len(multiprocessing.active_children()) == 2

    def played(self, row: dict[str, Any]) -> None:
        if row["round"] == self.number:
            victim = multiprocessing.active_children()[0]
            assert victim.pid is not None
            os.kill(victim.pid, signal.SIGKILL)
            victim.join(5)


@dataclass(frozen=True)
class Suicidal(Ditto):
    """A client with so many rows kills the worker it runs in, if a file says so."""

    name: ClassVar[str] = "suicidal"
    flag: str = hyper("", "path of the file")

    def local(self, task: Task, message: Message, state: Model, data: ClientData) -> Any:
        in_worker = multiprocessing.parent_process() is not None
        if in_worker and data.size == SIZES[CULPRIT] and Path(self.flag).exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().local(task, message, state, data)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["between rounds", "in a round"])
def test_a_killed_worker_ends_the_run_with_a_valid_checkpoint(moment: str, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    algorithm = Suicidal(flag=str(flag))
    settings: dict[str, Any] = {"federation": FEDERATION, "rounds": 4, "batch": 4, "local": {"steps": 1},
                                "eval": {"every": 2}, **BACKENDS["processes"]}

    class Flagger(Killer):
        def played(self, row: dict[str, Any]) -> None:
            if row["round"] == self.number:
                flag.touch()

    observer = Killer(2) if moment == "between rounds" else Flagger(2)
    with pytest.raises(DescantError, match=r"worker process ended unexpectedly .*killed"):
        descant.run(algorithm, out=tmp_path / "parts", observer=observer, **settings)
    assert children() == []
    _, facts = checkpoint.read(tmp_path / "parts" / "checkpoint" / "state.safetensors")
    assert facts["round"] == 2
    flag.unlink(missing_ok=True)
    parts = descant.run(algorithm, out=tmp_path / "parts", resume=True, **settings)
    whole = descant.run(algorithm, **settings)
    assert parts.rounds == 4
    assert_same(parts.snapshot("last").server, whole.snapshot("last").server)
    everyone = np.arange(len(SIZES))
    assert_same(parts.snapshot("last").store.read(everyone), whole.snapshot("last").store.read(everyone))
    assert children() == []


class Threads:
    """Like an object with threads: ending it anywhere but where it was made would wait for them for ever."""

    def __init__(self, told: Path) -> None:
        self.told, self.made_in, self.circle = told, os.getpid(), self

    def __del__(self) -> None:
        if os.getpid() != self.made_in:
            self.told.touch()


@dataclass(frozen=True)
class Collecting(FedAvg):
    """A method whose clients collect garbage, in workers."""

    name: ClassVar[str] = "collecting"

    def local(self, task: Task, message: Message, state: Any, data: ClientData) -> Any:
        if multiprocessing.parent_process() is not None:
            gc.collect()
        return super().local(task, message, state, data)


def test_workers_leave_the_garbage_of_the_parent_alone(tmp_path: Path) -> None:
    told = tmp_path / "ended in a worker"
    gc.disable()  # so that it is garbage still when the workers are forked
    try:
        Threads(told)
        descant.run(Collecting(), federation=FEDERATION, rounds=1, batch=4, local={"steps": 1},
                    **BACKENDS["processes"])
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert not told.exists()

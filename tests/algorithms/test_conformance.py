"""What every method must keep to. A method that is added to the registry is covered without a change here.

The rules that a method of a user's own must keep to as well are in `descant.testing`.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
import tomllib
from collections.abc import Collection
from functools import cache
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import pytest
import torch

import descant
from descant.algorithms import (
    ALGORITHMS,
    APFL,
    CGPFL,
    IFCA,
    L2GD,
    SCAFFOLD,
    Dichotomous,
    Ditto,
    FedAMP,
    FedAvg,
    FedBABU,
    FedEM,
    FedFomo,
    FedMAP,
    FedPAC,
    FedPer,
    FedProx,
    FedRep,
    GlobalTrain,
    HeurFedAMP,
    LGFedAvg,
    LocalTrain,
    OneStageFedProx,
    PerFedAvg,
    pFedBayes,
    pFedBreD,
    pFedGT,
    pFedHN,
    pFedMe,
)
from descant.algorithms.pfedgt import ByValidation
from descant.comparison.tune import space
from descant.core import fields, tree
from descant.core.algorithm import Algorithm, Message
from descant.core.task import FunctionTask
from descant.engine.backends.base import InProcess
from descant.engine.backends.choose import templates
from descant.engine.evaluation import summarise
from descant.engine.work import Work
from descant.errors import UsageError
from descant.experiment.config import parse_algorithm
from descant.experiment.run import Interrupted
from descant.priors.energy import InputConvex
from descant.priors.precision import Adaptive, FixedVariance, LearnedVariance
from descant.priors.solve import SGD, Adam, Proximal
from descant.testing import check_algorithm
from helpers import MODELS, SIZES, Engine, assert_same, clone, engine, ragged

VARIANTS: dict[str, Algorithm] = {
    **{name: method() for name, method in ALGORITHMS.items()},
    "pfedme": pFedMe(K=2),  # the usual 5 only take longer
    "fedavg finetune": FedAvg(SGD(lr=0.05), finetune=3),
    "fedavg beta": FedAvg(SGD(lr=0.05), beta=2.0, weights="uniform"),
    "fedavg adam": FedAvg(Adam(lr=0.01, weight_decay=0.01)),
    "fedavg momentum": FedAvg(SGD(lr=0.05, momentum=0.9, weight_decay=0.01)),
    "fedprox proximal": FedProx(mu=3.0, solver=Proximal(lr=0.05)),
    "ditto proximal": Ditto(lam=3.0, solver=Proximal(lr=0.05)),
    "pfedme start": pFedMe(start="w", weights="uniform", K=3),
    "scaffold I": SCAFFOLD(eta_l=0.05, option="I"),
    "pfedbred": pFedBreD(K=2, eta_a=0.1),
    "pfedbred code": pFedBreD(K=2, eta_a=0.1, strategy="mh_code", start="w", finetune=1),
    "pfedbred exact": pFedBreD(K=2, eta_a=0.1, strategy="mh_nested", order="exact", start="mu"),
    "pfedbred learned": pFedBreD(LearnedVariance(epsilon=1e-3), K=2, beta=2.0, weights="uniform"),
    "pfedgt literal": pFedGT(messages="minibatch", c_start="c_i", lam=0.7, start="initial"),
    "pfedgt alone": pFedGT(gamma=(0.5, 0.6, 0.7, 0.8, 1.0), rho=0.1, solver=Proximal(lr=0.05), start="w",
                           server_model=False),
    "pfedgt by validation": pFedGT(gamma=ByValidation((0.6, 1.0), 0.6), solver=SGD(lr=0.05, momentum=0.9)),
    "globaltrain momentum": GlobalTrain(momentum=0.9, weight_decay=0.01, weights="uniform"),
    "one_stage_fedprox gamma": OneStageFedProx(lam=2.0, gamma=0.8, K=2, weights="samples"),
    "one_stage_fedprox own lam": OneStageFedProx(lam=Adaptive(rounds=1, per_client=True, cap=3.0)),
    "one_stage_fedprox learned": OneStageFedProx(lam=LearnedVariance(epsilon=1e-3)),
    # not its usual Adam: before BatchNorm a bias has rounding noise for a gradient, which Adam makes large
    "fedmap": FedMAP(solver=SGD(lr=0.05)),
    "fedmap samples": FedMAP(FixedVariance(0.5), SGD(lr=0.05), weights="samples", server_lr=0.3,
                             likelihood="sum", start="global"),
    "fedmap learned": FedMAP(LearnedVariance(epsilon=1e-3), SGD(lr=0.05), weights="mean_log", init="client"),
    "fedmap own lam": FedMAP(Adaptive(rounds=1, per_client=True, cap=3.0), SGD(lr=0.05), weights="uniform"),
    "fedmap convex": FedMAP(InputConvex(hidden=3), Adam(lr=0.01, weight_decay=0.01), temperature=20.0,
                            server_lr=0.5),
    "cgpfl": CGPFL(K=3, S=2),
    "cgpfl auto": CGPFL(K="auto", S=2, mu=1e4, alpha=0.5),
    "cgpfl learned": CGPFL(K=2, S=2, lam=LearnedVariance(epsilon=1e-3), alpha=1.5),
    "cgpfl own lam": CGPFL(K=2, S=2, lam=Adaptive(rounds=2, per_client=True, cap=20.0), k_rounds=2),
    # weights are shared and biases private, which every model has
    "fedper": FedPer(shared=("*weight",)),
    "lg_fedavg": LGFedAvg(shared=("*bias",), beta=1.5, finetune=1),
    "fedrep": FedRep(shared=("*weight",), heads=2, solver=SGD(lr=0.05, momentum=0.9)),
    "fedbabu": FedBABU(shared=("*weight",), finetune=2),
    "pfedme shared": pFedMe(K=2, start="w", shared=("*weight",), finetune=1),
    "pfedbred shared": pFedBreD(LearnedVariance(epsilon=1e-3), K=2, shared=("*weight",)),
    "l2gd": L2GD(lam=2.0, p=0.5),  # of few coins both sides should be seen
    "perfedavg fo": PerFedAvg(variant="fo", finetune=3, server_lr=2.0, weights="samples"),
    "apfl adaptive": APFL(0.7, adaptive=True, solver=SGD(0.05, momentum=0.9, weight_decay=0.01), beta=0.5),
    "fedfomo two": FedFomo(M=2, eps=0.9, decay=0.5, solver=SGD(lr=0.05, momentum=0.9)),
    "fedem paper": FedEM(M=2, aggregation="samples", beta=1.5, spread=0.3, solver=SGD(lr=0.05, momentum=0.9)),
    "ifca finetune": IFCA(K=2, finetune=2, beta=1.5, weights="uniform", solver=SGD(lr=0.05, momentum=0.9)),
    "pfedhn linear": pFedHN(embedding=3, layers=0, server=Adam(lr=0.01), solver=SGD(lr=0.05, momentum=0.9)),
    "pfedbayes": pFedBayes(zeta=0.01, K=2, solver=SGD(lr=0.05)),  # not its usual Adam, as with fedmap
    "pfedbayes momentum": pFedBayes(zeta=0.1, sigma=0.3, K=1, solver=SGD(lr=0.02, momentum=0.5), beta=2.0),
    "fedpac aligned": FedPAC(lam=5.0, head=0.5, eta_f=0.1, weight_decay=0.01, weights="uniform"),
    "dichotomous unsplit": Dichotomous(SGD(lr=0.05, momentum=0.9), split="none", weights="uniform"),
}
#: Prior, precision and groups combine from a file alone.
COMPOSED = {
    "fedmap groups": """name = "fedmap"\nweights = "omega"\ntemperature = 20.0\ninit = "client"
                        prior = { name = "learned", epsilon = 1e-3 }\nsolver = { name = "sgd", lr = 0.05 }
                        groups = { name = "kmeans", K = 2, k_rounds = 2 }""",
    "fedmap convex groups": """name = "fedmap"\nserver_lr = 0.5\nsolver = { name = "sgd", lr = 0.05 }
                               prior = { name = "input_convex", hidden = 2 }\ngroups = { K = 2 }""",
    "cgpfl adaptive": """name = "cgpfl"\nK = 2\nS = 2\nlam = { name = "adaptive", rounds = 1, cap = 20.0 }""",
    "ditto groups": """name = "ditto"\nlam = { name = "learned", epsilon = 1e-3 }\ngroups = { K = 3 }""",
    "ditto shared groups": """name = "ditto"\nlam = { name = "learned", epsilon = 1e-3 }\ngroups = { K = 2 }
                              shared = ["*weight"]\nfinetune = 1""",
    "fedmap shared": """name = "fedmap"\nshared = ["*weight"]\nsolver = { name = "sgd", momentum = 0.5 }
                        prior = { name = "learned", epsilon = 1e-3 }\ntemperature = 20.0""",
    "pfedbred groups": """name = "pfedbred"\nK = 2\nweight_decay = 0.1\ngroups = { K = "auto", mu = 1e4 }""",
}
VARIANTS |= {name: parse_algorithm(tomllib.loads(text)) for name, text in COMPOSED.items()}
every_variant = pytest.mark.parametrize("method", VARIANTS)


def variant(name: str, *more: Any, quick: Collection[str] = ALGORITHMS) -> Any:
    """What the engine does with a method depends little on its fields: with other fields than its own it is
    slow."""
    return pytest.param(name, *more, marks=() if name in quick else pytest.mark.slow)


every_method = pytest.mark.parametrize("method", [variant(name) for name in VARIANTS])
#: No message, no state, a state of each kind, a tracked one, groups, several models, parts, a network of the
#: server's. Where the trees of a method matter and its steps do not, the other methods are slow.
TREES = ("localtrain", "fedavg", "ditto", "scaffold", "cgpfl", "fedmap", "fedem", "fedrep", "pfedgt",
         "pfedhn")
#: Variants that differ from another one in a number, or in a tree that others have as well.
IN_A_NUMBER = ("fedavg finetune", "fedavg beta", "fedprox proximal", "pfedme start", "scaffold I",
               "pfedbred code", "pfedgt literal", "globaltrain momentum", "one_stage_fedprox gamma",
               "one_stage_fedprox learned", "fedmap samples", "fedmap own lam", "cgpfl learned",
               "pfedbred shared", "fedfomo two", "ifca finetune", "pfedhn linear", "pfedbayes momentum",
               "dichotomous unsplit")
WITH_TREES = [name for name in VARIANTS if name not in IN_A_NUMBER]
every_tree = pytest.mark.parametrize("method", [variant(name, quick=TREES) for name in WITH_TREES])
# where the fields of a method make no difference either
registered = pytest.mark.parametrize("method", [variant(name, quick=TREES) for name in ALGORITHMS])
FEDERATION = ragged()
POPULATION = len(SIZES)


# -- all backends agree ---------------------------------------------------------------------------------


class Result(NamedTuple):
    server: Any
    states: Any
    personal: Any  # figures of the personal models
    shared: Any  # of the global model
    counts: tuple[Any, ...]


def result(e: Engine, rounds: int) -> Result:
    reports = e.play(rounds)
    scores = e.score()
    assert not scores.failed
    counts = tuple((r.number, r.participants, r.rejected, r.grad_steps, r.bytes_down, r.bytes_up)
                   for r in reports)
    losses = torch.tensor([r.loss for r in reports], dtype=torch.float64)
    return Result(e.server, e.states(), (tuple(scores.personal), losses),
                  () if scores.shared is None else (tuple(scores.shared), scores.pooled), counts)


def agree(found: Result, expected: Result, tolerance: float) -> None:
    assert found.counts == expected.counts
    for part in ("server", "states", "personal", "shared"):
        assert_same(getattr(found, part), getattr(expected, part), tolerance, part)


# Batches, local work and cohorts in which clients differ in every way.
WORK: dict[str, dict[str, Any]] = {
    "steps": {"batch": 4, "local": {"steps": 2}},
    "epochs": {"batch": 4, "local": {"epochs": 1}, "cohort": 4},
    "full": {"batch": "full", "local": {"steps": 2}, "cohort": 3},
}


def rounds_of(method: str) -> int:
    """In the second round clients have states; in the third, schedules have ended, which variants have."""
    return 2 if method in ALGORITHMS else 3


@cache
def by_loop(method: str, model: str, work: str) -> Result:
    with engine(VARIANTS[method], FEDERATION, MODELS[model](), backend="loop", **WORK[work]) as e:
        return result(e, rounds_of(method))


@pytest.fixture
def only_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """No falling back to one client after another, which would hide that a chunk cannot be vectorised."""
    one_by_one = Work._one_by_one

    def refuse(self: Work, job: Any, clients: np.ndarray, *rest: Any) -> Any:
        assert len(clients) == 1, "the chunk was not vectorised"
        return one_by_one(self, job, clients, *rest)

    monkeypatch.setattr(Work, "_one_by_one", refuse)


# every method with the hardest model and one of the others in turn (the simplest is below, with every kind of
# local work), quickly where its trees are another; variants with the hardest, of which those that differ from
# another one in a number are slow
OTHERS = [model for model in MODELS if model not in ("mclr", "batchnorm+dropout")]
COMBINATIONS = [
    *(variant(method, "batchnorm+dropout", quick=WITH_TREES) for method in VARIANTS),
    *(variant(method, OTHERS[k % len(OTHERS)], quick=TREES) for k, method in enumerate(ALGORITHMS))]


@pytest.mark.usefixtures("only_together")
@pytest.mark.parametrize(("method", "model"), COMBINATIONS)
def test_vectorised_is_the_loop(method: str, model: str) -> None:
    """In chunks of 3 and 2, or 3 and 1: the chunk does not divide the cohort, and mixes long and short."""
    work = {"conv": "epochs", "groupnorm": "full"}.get(model, "steps")
    chunk = 2 if work == "full" else 3
    with engine(VARIANTS[method], FEDERATION, MODELS[model](), backend="vectorised", chunk=chunk,
                **WORK[work]) as e:
        agree(result(e, rounds_of(method)), by_loop(method, model, work), 1e-10)


@pytest.mark.usefixtures("only_together")
@pytest.mark.parametrize(("method", "work"), [
    *(variant(name, "epochs") for name in VARIANTS),
    *(variant(name, "full", quick=TREES) for name in WITH_TREES)])
def test_vectorised_is_the_loop_for_every_kind_of_local_work(method: str, work: str) -> None:
    with engine(VARIANTS[method], FEDERATION, "mclr", backend="vectorised", chunk=64, **WORK[work]) as e:
        agree(result(e, rounds_of(method)), by_loop(method, "mclr", work), 1e-10)


@every_tree
def test_processes_are_the_loop(method: str) -> None:
    with engine(VARIANTS[method], FEDERATION, MODELS["batchnorm+dropout"](), backend="processes", workers=2,
                chunk=2, **WORK["steps"]) as e:
        agree(result(e, rounds_of(method)), by_loop(method, "batchnorm+dropout", "steps"), 1e-10)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.thorough
def test_processes_are_the_loop_for_every_model(model: str) -> None:
    work = {"conv": "epochs", "groupnorm": "full"}.get(model, "steps")
    with engine(VARIANTS["ditto"], FEDERATION, MODELS[model](), backend="processes", workers=3, chunk=1,
                **WORK[work]) as e:
        agree(result(e, rounds_of("ditto")), by_loop("ditto", model, work), 1e-10)


@every_tree
def test_a_cohort_of_one(method: str) -> None:
    found = []
    for backend in ("loop", "vectorised"):
        with engine(VARIANTS[method], FEDERATION, "mclr", backend=backend, cohort=1) as e:
            found.append(result(e, 2))
    agree(found[0], found[1], 1e-10)


@pytest.mark.usefixtures("only_together")
@pytest.mark.parametrize(("method", "model"), [
    *(pytest.param(name, "mclr", marks=pytest.mark.slow) for name in TREES),
    *(variant(name, "batchnorm+dropout", quick=TREES) for name in WITH_TREES)])
def test_float32_agrees_after_one_local_step(method: str, model: str) -> None:
    settings = {"dtype": "float32", "local": {"steps": 1}}
    # to processes go the same trees as in double precision, which are compared for every method
    others = ("vectorised", "processes") if method in ("ditto", "scaffold", "cgpfl") else ("vectorised",)
    results = []
    for backend in ("loop", *others):
        with engine(VARIANTS[method], FEDERATION, MODELS[model](), backend=backend, **settings) as e:
            results.append(result(e, 1))
            dtypes = {t.dtype for _, t in tree.leaves((e.server, e.states())) if t.is_floating_point()}
            assert dtypes == {torch.float32}
    for found in results[1:]:
        agree(results[0], found, 1e-5)


@pytest.mark.parametrize("method", TREES)  # the checks and the resumed runs repeat what all others compute
def test_a_run_can_be_repeated_bit_for_bit(method: str) -> None:
    with engine(VARIANTS[method], FEDERATION, MODELS["batchnorm+dropout"](), backend="loop",
                **WORK["steps"]) as e:
        agree(result(e, rounds_of(method)), by_loop(method, "batchnorm+dropout", "steps"), 0)


# -- the order of the clients ------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "chunk"), [
    *(variant(name, POPULATION, quick=TREES) for name in WITH_TREES),
    *(variant(name, 1, quick=()) for name in TREES)])
def test_the_order_of_a_cohort_changes_nothing(method: str, chunk: int) -> None:
    """Bit for bit, in one chunk and one by one."""
    with engine(VARIANTS[method], FEDERATION, MODELS["batchnorm+dropout"]()) as e:
        e.play(1)
        work, algorithm = e.training.work, e.training.work.algorithm
        order = np.array([3, 0, 4, 2, 1])
        message = algorithm.broadcast(e.server, e.training.round_of(e.everyone))
        mixed = Message(message.shared, tree.take(message.each, order))
        newcomer = algorithm.newcomer(e.server, e.training.round_of(e.everyone))
        assert_same(e.training.store.read(order), tree.take(e.states(), order))
        backend = InProcess(work, chunk)
        for job, straight, shuffled in (("local", message, mixed), ("score", message, mixed),
                                        ("score_newcomer", newcomer, newcomer)):
            expected = backend.run(job, e.everyone, 3, straight, e.states())
            found = backend.run(job, order, 3, shuffled, e.training.store.read(order))
            assert expected.grad_steps == found.grad_steps
            assert_same(found.values, tree.take(expected.values, order))


# -- the rules of a method ---------------------------------------------------------------------------------


@every_tree
def test_a_method_passes_the_checks_that_users_have(method: str) -> None:
    """Purity, trees and their forms, random numbers, cohorts, newcomers, clients together and alone."""
    check_algorithm(VARIANTS[method])


# -- checkpoints -------------------------------------------------------------------------------------------


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes()
            for path in sorted(directory.rglob("*")) if path.is_file()}


class StopAfter:
    """An observer that ends the run, as Ctrl-C does."""

    def __init__(self, number: int) -> None:
        self.number = number

    def started(self, run: Any, measured: Any) -> None:
        pass

    def played(self, row: dict[str, Any]) -> None:
        if row["round"] == self.number:
            raise KeyboardInterrupt


# a run without a directory keeps what another one writes: no state of clients, one of each, a tracked
# message, a changing number of groups, a network on the server
KEPT_IN_MEMORY = ("fedavg", "ditto", "scaffold", "cgpfl auto", "pfedhn")


@every_tree
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(method: str, tmp_path: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("descant.experiment.run.draw_curve", lambda *args: None)  # takes time, and is tested
    settings: dict[str, Any] = {
        "federation": FEDERATION, "model": MODELS["batchnorm+dropout"](), "cohort": 3, "batch": 4,
        "rounds": 4, "local": {"steps": 2}, "backend": "vectorised", "chunk": 2, "eval": {"every": 2},
    }
    whole = descant.run(VARIANTS[method], out=tmp_path / "whole", **settings)
    with pytest.raises(Interrupted, match="stopped after round 2 of 4"):
        descant.run(VARIANTS[method], out=tmp_path / "parts", observer=StopAfter(2), **settings)
    parts = descant.run(VARIANTS[method], out=tmp_path / "parts", resume=True, **settings)
    assert files(tmp_path / "parts" / "checkpoint") == files(tmp_path / "whole" / "checkpoint")
    assert files(tmp_path / "parts")["clients.csv"] == files(tmp_path / "whole")["clients.csv"]
    assert [row["round"] for row in parts.history] == [1, 2, 3, 4]
    everyone = np.arange(POPULATION)
    in_memory = [descant.run(VARIANTS[method], **settings)] if method in KEPT_IN_MEMORY else []
    for run in (parts, *in_memory):
        assert run.best_round == whole.best_round
        for which in ("best", "last"):
            number, server, store = run.snapshot(which)
            expected = whole.snapshot(which)
            assert number == expected.number
            assert_same(server, expected.server)
            assert_same(store.read(everyone), expected.store.read(everyone))
        assert_same(run.personal(2, "last"), whole.personal(2, "last"))


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("method", ["ditto", "scaffold", "localtrain"])
def test_the_best_state_is_the_state_after_the_best_round(method: str, on_disk: bool, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that ends at the best round of a longer one has its best state as its last. With large steps and
    this seed the best round is in the middle."""
    monkeypatch.setattr("descant.experiment.run.draw_curve", lambda *args: None)
    algorithm = {"ditto": Ditto(solver=SGD(lr=0.8)), "scaffold": SCAFFOLD(eta_l=0.8),
                 "localtrain": LocalTrain(SGD(lr=0.8))}[method]
    settings: dict[str, Any] = {"federation": FEDERATION, "cohort": 3, "batch": 4, "local": {"steps": 2},
                                "backend": "vectorised", "eval": {"every": 1}, "seed": 2}
    long = descant.run(algorithm, rounds=9, out=tmp_path / "long" if on_disk else None, **settings)
    assert long.best_round is not None
    assert 1 < long.best_round < 9
    short = descant.run(algorithm, rounds=long.best_round, **settings)
    everyone = np.arange(POPULATION)
    found, expected = long.snapshot("best"), short.snapshot("last")
    assert_same(found.server, expected.server)
    assert_same(found.store.read(everyone), expected.store.read(everyone))
    assert np.array_equal(found.store.last_round, expected.store.last_round)
    assert not np.array_equal(found.store.last_round, long.snapshot("last").store.last_round)


# -- costs -------------------------------------------------------------------------------------------------


def grad_steps(algorithm: Algorithm, batches: list[int]) -> int | None:
    """How many gradients a round takes: from each client's number of batches; None if not known here."""
    # SCAFFOLD's option I and pFedGT's messages read all rows once more: as many batches as that is
    again = sum(math.ceil(n / 4) for n in SIZES)
    per_batch: dict[type[Algorithm], Any] = {
        ALGORITHMS["localtrain"]: 1, FedAvg: 1, FedProx: 1, GlobalTrain: 1, FedMAP: 1,
        Ditto: 2,  # the global and the personal model
        Dichotomous: 2,
        pFedMe: getattr(algorithm, "K", None),  # steps on theta for each batch
        OneStageFedProx: getattr(algorithm, "K", None),
        SCAFFOLD: 1,
        # beside the steps on theta: of the mean, and two for each product with a Hessian
        pFedBreD: 2 + {"mh": 1, "mh_code": 2, "mh_nested": 2 + 4}.get(getattr(algorithm, "strategy", ""), 0),
        pFedGT: len(getattr(getattr(algorithm, "gamma", None), "candidates", "1")),  # a solve for each
        CGPFL: getattr(algorithm, "S", None),
        PerFedAvg: 4 if getattr(algorithm, "variant", "") == "hf" else 2,
        APFL: 2,  # of the global model and of the mixture
        L2GD: 1,  # at a coin that shows one, too
        IFCA: 1,  # losses of K models are no gradients
        FedAMP: 1, HeurFedAMP: 1, FedFomo: 1,
        FedEM: getattr(algorithm, "M", None),
        pFedHN: 1,
        FedPAC: 1,
        pFedBayes: getattr(algorithm, "K", None),
    }
    if type(algorithm) not in per_batch:
        return None
    reads_all = getattr(algorithm, "option", "") == "I" or getattr(algorithm, "messages", "") == "full"
    return per_batch[type(algorithm)] * (sum(batches) + (again if reads_all else 0))


@pytest.mark.parametrize(("method", "local"), [
    *(variant(name, {"epochs": 2}) for name in VARIANTS),
    *((name, {"steps": 5}) for name in TREES)])
def test_gradient_steps_are_counted_exactly(method: str, local: dict[str, int]) -> None:
    """Steps of a client without a batch (padding of a chunk) do not count."""
    algorithm = VARIANTS[method]
    # where the two batches of a step share no rows, an epoch is one of the larger half
    share = 2 if algorithm.disjoint_batches and algorithm.batches_per_step() == 2 else 1
    batches = [5] * POPULATION if "steps" in local else [2 * math.ceil(n / share / 4) for n in SIZES]
    # in a chunk, where there is padding; `agree` compares the counts of the backends
    with engine(algorithm, FEDERATION, "mclr", backend="vectorised", chunk=4, local=local) as e:
        [report] = e.play(1)
    expected = grad_steps(algorithm, batches)
    assert report.grad_steps == (report.grad_steps if expected is None else expected)
    assert report.grad_steps > 0


def test_gradient_steps_of_a_pass_over_more_than_one_block_of_rows() -> None:
    """600 rows in batches of 4 are 150 more gradients (read in two blocks), 2 rows are one more."""
    federation = ragged((600, 2), shape=(2,))
    for backend in ("loop", "vectorised"):
        with engine(SCAFFOLD(option="I"), federation, "mclr", backend=backend) as e:
            assert e.play(1)[0].grad_steps == 2 * 2 + 150 + 1


@every_method
def test_bytes_are_those_of_the_tensors(method: str) -> None:
    """Down: the message, to each of 4 clients; up: the uploads of the 4. Statistics travel too."""
    algorithm, dtype = VARIANTS[method], "float64" if method in ("fedavg", "ditto") else "float32"
    with engine(algorithm, FEDERATION, MODELS["batchnorm+dropout"](), cohort=4, dtype=dtype) as e:
        some = np.arange(4)
        message = algorithm.broadcast(e.server, e.training.round_of(some))
        upload = e.backend.run("local", some, 1, message, e.training.store.read(some)).values.upload
        [report] = e.play(1)
    assert report.bytes_down == 4 * tree.nbytes(message.shared) + tree.nbytes(message.each)
    assert report.bytes_up == tree.nbytes(upload)
    # 16*6 + 6 + 2*6 + 6*3 + 3 = 135 parameters and 12 statistics make a model
    model = (135 + 12) * (4 if dtype == "float32" else 8)
    extra = 135 * (4 if dtype == "float32" else 8)  # SCAFFOLD sends a control variate besides
    expected = {"localtrain": 0, "fedavg": model, "fedprox": model, "ditto": model, "pfedme": model,
                "globaltrain": model, "dichotomous": model, "scaffold": model + extra,
                "one_stage_fedprox": model, "fedmap samples": model,
                "pfedbred": model, "pfedbred learned": model + extra,
                "one_stage_fedprox own lam": model + 4,  # lam_i down, ||w_i - w_g||^2 up
                "cgpfl": model, "cgpfl own lam": model + 4, "cgpfl learned": model + extra,
                "cgpfl adaptive": model + 4, "ditto groups": model + extra,
                "one_stage_fedprox learned": model + extra,  # the same of each parameter
                # the weights 16*6 + 6 + 6*3 = 120 are shared, or the biases 15, and no statistics
                "fedper": 480, "fedrep": 480, "fedbabu": 480, "lg_fedavg": 60, "pfedme shared": 480,
                "pfedbred shared": 960, "ditto shared groups": 960, "fedbn": 4 * (135 - 12),
                "perfedavg": model, "apfl": model,
                "pfedhn": model,
                "pfedbayes": model + extra}
    # pFedGT: a message besides; the number of clients down, the accuracy up, and gamma where clients differ
    sent = model + extra
    unequal = {"pfedgt": (sent + 4, sent + 4), "pfedgt literal": (sent + 4, sent),
               "pfedgt alone": (extra + 8, extra + 4), "pfedgt by validation": (sent + 4, sent + 8),
               "l2gd": (model + 8, model)}  # the key of the coins
    if method in unequal:
        assert (report.bytes_down, report.bytes_up) == tuple(4 * each for each in unequal[method])
    elif (of := method if method in expected else algorithm.name) in expected:
        assert (report.bytes_down, report.bytes_up) == (4 * expected[of],) * 2


# -- who takes part ----------------------------------------------------------------------------------------


@every_method
def test_newcomers_are_scored_by_their_rule_and_counted(method: str) -> None:
    algorithm = VARIANTS[method]
    # all backends score alike: `agree`
    with engine(algorithm, FEDERATION, "mclr", cohort=2, backend="vectorised") as e:
        e.play(1)
        scores = e.score()
        known = e.training.store.took_part(e.everyone)
        assert known.sum() == 2
        assert np.array_equal(scores.newcomer, ~known)
        assert summarise(scores, e.training.work.federation)["personal"]["newcomers"] == POPULATION - 2
        facts = e.training.round_of(e.everyone)
        new = e.backend.run("adapt", e.everyone, 1, algorithm.newcomer(e.server, facts), e.states())
        message = algorithm.broadcast(e.server, facts)
        old = e.backend.run("personalize", e.everyone, 1, message, e.states())
        fed, task = e.training.work.federation, e.training.work.task
        for client in range(POPULATION):
            rows = fed.test[client]
            found = scores.personal.test[client]
            if not len(rows):
                assert found.isnan().all()
                continue
            personal = tree.take((old if known[client] else new).values, client)
            with torch.no_grad():
                outputs = algorithm.predict(task, personal, fed.x[rows])
                expected = task.metrics(outputs, descant.Batch(fed.x[rows], fed.y[rows]))
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@registered
def test_clients_that_do_not_take_part_keep_their_states(method: str) -> None:
    with engine(VARIANTS[method], FEDERATION, MODELS["batchnorm+dropout"](), cohort=3, drop=0.4) as e:
        for _ in range(3):
            before, last = clone(e.states()), e.training.store.last_round.copy()
            [report] = e.play(1)
            assert report.participants == 2  # of 3, round(0.4 * 3) = 1 drops out
            moved = e.training.store.last_round == report.number
            assert moved.sum() == 2
            still = np.flatnonzero(~moved)
            assert_same(tree.take(e.states(), still), tree.take(before, still))
            assert np.array_equal(e.training.store.last_round[still], last[still])


@registered
def test_everyone_can_train_while_the_cohort_is_aggregated(method: str) -> None:
    algorithm = VARIANTS[method]
    settings = {"cohort": 2, "participation": "all"}
    if algorithm.tracking:
        with pytest.raises(UsageError, match=f"participation.*{algorithm.name}"), \
             engine(algorithm, FEDERATION, "mclr", **settings):
            pass
        with engine(algorithm, FEDERATION, "mclr", cohort="all", participation="all") as e:
            assert e.play(1)[0].participants == POPULATION
        return
    with engine(algorithm, FEDERATION, "mclr", **settings) as e, \
         engine(algorithm, FEDERATION, "mclr", cohort=2) as usual:
        [report] = e.play(1)
        [reference] = usual.play(1)
        assert (report.participants, reference.participants) == (POPULATION, 2)
        assert e.training.store.took_part(e.everyone).all()
        assert_same(e.server, usual.server)  # the others' uploads do not count
        assert report.bytes_up == reference.bytes_up
        cohort = np.flatnonzero(usual.training.store.took_part(usual.everyone))
        assert_same(e.training.store.read(cohort), usual.training.store.read(cohort))


@registered
def test_who_need_not_be_trained_is_left_out_and_nothing_changes(method: str) -> None:
    """Everyone trains in every round, and is scored after every second one."""
    algorithm = VARIANTS[method]
    if algorithm.tracking:
        pytest.skip("tracking methods refuse it")
    settings = {"cohort": 2, "participation": "all"}
    with engine(algorithm, FEDERATION, "mclr", **settings) as e, \
         engine(algorithm, FEDERATION, "mclr", **settings) as whole:
        e.training.scored_in(lambda number: number % 2 == 0)
        for number in range(1, 5):
            is_quiet = not any(tree.leaves(e.training.store.template)) or (algorithm.forgets() and number % 2)
            opens = algorithm.opens() and number == 1
            assert e.training.overlooks_others(number) == bool(is_quiet)
            cohort, trained = e.training.upcoming().clients, whole.training.upcoming().clients
            assert len(trained) == POPULATION
            assert len(cohort) == (2 if is_quiet and not opens else POPULATION)
            [report], [reference] = e.play(1), whole.play(1)
            assert_same(e.server, whole.server, 1e-9)
            for name in ("participants", "grad_steps", "bytes_down", "bytes_up"):
                assert getattr(report, name) == getattr(reference, name), name
            if number % 2 == 0:
                assert_same(e.states(), whole.states(), 1e-9)
                assert np.array_equal(e.training.store.last_round, whole.training.store.last_round)
                assert_same(e.personal(), whole.personal(), 1e-9)


@registered
def test_a_method_forgets_if_it_says_so(method: str) -> None:
    """Clients with other states make the same of a round, and otherwise do not."""
    algorithm = VARIANTS[method]
    with engine(algorithm, FEDERATION, "mclr") as e:
        if not any(leaf.numel() for _, leaf in tree.leaves(e.training.store.template)):
            pytest.skip("clients keep nothing")
        e.play(2)
        message = algorithm.broadcast(e.server, e.training.round_of(e.everyone))
        states = e.states()
        others = tree.map_tree(lambda rows: ~rows if rows.dtype == torch.bool else rows + (
            0.01 if rows.is_floating_point() else 1), states)
        usual, other = (e.backend.run("local", e.everyone, 3, message, each).values
                        for each in (states, others))
        same = all(torch.equal(a, b) for (_, a), (_, b) in
                   zip(tree.leaves(usual[:2]), tree.leaves(other[:2]), strict=True))
        assert same == algorithm.forgets()


@registered
def test_drop_with_everyone_training(method: str) -> None:
    if VARIANTS[method].tracking:
        pytest.skip("tracking methods refuse it")
    with engine(VARIANTS[method], FEDERATION, "mclr", cohort=3, participation="all", drop=0.5) as e:
        reports = e.play(3)
    assert all(1 <= r.participants < POPULATION + 1 for r in reports)
    assert sum(r.participants for r in reports) < 3 * POPULATION


# -- objects -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "model"), [
    ("fedavg", "mclr"), *(variant(name, "batchnorm+dropout", quick=TREES) for name in WITH_TREES)])
def test_work_can_be_sent_to_another_process(method: str, model: str) -> None:
    """As `spawn` does it; the copy gives the same results bit for bit."""
    with engine(VARIANTS[method], FEDERATION, MODELS[model]()) as e:
        work, everyone = e.training.work, e.everyone
        message = work.algorithm.broadcast(e.server, e.training.round_of(everyone))
        arguments = (work, templates(e.training))
        expected = InProcess(work, 3).run("local", everyone, 1, message, e.states())
        for copied, _ in (pickle.loads(pickle.dumps(arguments)),
                          pickle.loads(bytes(ForkingPickler.dumps(arguments)))):
            found = InProcess(copied, 3).run("local", everyone, 1, message, e.states())
            assert_same(found.values, expected.values)


# -- weight decay ------------------------------------------------------------------------------------------


def decayed(method: Algorithm, strength: float) -> Algorithm:
    """The method with weight decay: a field of its own, or one of its solver."""
    if hasattr(method, "weight_decay"):
        return dataclasses.replace(method, weight_decay=strength)
    solver = dataclasses.replace(method.solver, weight_decay=strength)  # type: ignore[attr-defined]
    return dataclasses.replace(method, solver=solver)  # type: ignore[call-arg]


def regression(ridge: float) -> FunctionTask:
    """Linear regression of the class number, with (ridge / 2) ||theta||^2 in the loss of every row."""
    def losses(theta: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.flatten(1) @ theta - y).square() / 20 + ridge / 2 * theta.square().sum()

    return FunctionTask(losses, torch.linspace(-1, 1, 16, dtype=torch.float64))


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.thorough
def test_weight_decay_is_a_ridge_in_the_loss(name: str) -> None:
    """The same server and clients as without weight decay on losses with the ridge. (FedMAP's omega and
    FedEM's posteriors are of likelihoods, in which no ridge counts, nor in what IFCA's clients choose by, or
    FedFomo's from the second round on; pFedGT's is the ridge rho of its game, not part of the f_i. FedPAC,
    which needs a network, has a test of its own.)"""
    if name == "fedpac":
        return
    plain = {"fedmap": FedMAP(solver=SGD(lr=0.05), weights="samples"), "ifca": IFCA(K=1),
             "fedem": FedEM(M=1)}.get(name, VARIANTS[name])
    if hasattr(plain, "shared"):
        plain = dataclasses.replace(plain, shared="all")  # a function has no layers
    expected = (pFedGT(rho=0.3), regression(0.0)) if name == "pfedgt" else (plain, regression(0.3))
    with engine(decayed(plain, 0.3), FEDERATION, regression(0.0), cohort=3) as e, \
         engine(expected[0], FEDERATION, expected[1], cohort=3) as ridge, \
         engine(plain, FEDERATION, regression(0.0), cohort=3) as without:
        for each in (e, ridge, without):
            each.play(1 if name == "fedfomo" else 2)
        assert_same((e.server, e.states()), (ridge.server, ridge.states()), 1e-12)
        assert (e.personal().theta - without.personal().theta).abs().max() > 1e-3


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_numeric_field_refuses_what_is_out_of_range(name: str) -> None:
    """Every number of a method has a range, and NaN, text and booleans are in none. What is absent is derived
    from other fields, or in no range either."""
    method = ALGORITHMS[name]
    hints = get_type_hints(method)
    for field in dataclasses.fields(method):
        if hints[field.name] not in (int, float):
            with pytest.raises(UsageError, match=field.name):
                method(**{field.name: "nonsense"})
            continue
        bounds = field.metadata["bounds"]
        assert "ge" in bounds or "gt" in bounds, f"{field.name} has no lower bound"
        lowest = bounds.get("ge", bounds.get("gt"))
        wrong: list[Any] = [lowest - 1, math.nan, math.inf, "1", True]
        if field.metadata["derived"] is None:
            wrong.append(None)
        if "gt" in bounds:
            wrong.append(lowest)
        for value in wrong:
            with pytest.raises(UsageError, match=f"{name}.{field.name}"):
                method(**{field.name: value})


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_method_tells_what_it_is(name: str) -> None:
    method = ALGORITHMS[name]
    assert method.name == name
    assert method.citation
    assert method.__doc__
    assert all(field.metadata["doc"] for field in dataclasses.fields(method))
    assert method() == method()
    with pytest.raises(dataclasses.FrozenInstanceError):
        method().name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_method_can_be_tuned(name: str) -> None:
    """It declares where its best values lie, within what is allowed and around its defaults."""
    method = ALGORITHMS[name]()
    ranges = space(method)
    assert ranges, f"no field of {name} has a range to search: hyper(..., search=Log(0.001, 1.0))"
    for field, searched in ranges.items():
        *parts, last = field.split(".")
        owner: Any = method
        for part in parts:
            owner = getattr(owner, part)
        [declared] = [each.search for each in fields.describe(type(owner)) if each.name == last]
        assert declared == searched, f"the range of {field} does not hold its default"
    for end in ("low", "high"):
        fields.replaced(method, {field: getattr(searched, end) for field, searched in ranges.items()})


@every_variant
def test_a_method_survives_its_table(method: str) -> None:
    """What is written to config.toml makes the same method again."""
    assert parse_algorithm(fields.dump(VARIANTS[method])) == VARIANTS[method]


def test_training_refuses_a_cohort_that_is_too_large() -> None:
    with pytest.raises(UsageError, match="only 5 clients"), engine(FedAvg(), FEDERATION, cohort=6):
        pass

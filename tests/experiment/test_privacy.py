"""Runs with [privacy]: what they spend, when they stop, what they refuse, what an attacker can measure."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import descant
from audit import lower_bound
from descant.algorithms import ALGORITHMS, FedAvg
from descant.core.federation import Federation
from descant.core.permit import ran
from descant.core.privacy import gradients
from descant.core.privacy.settings import Mechanism, Privacy
from descant.core.random import stream
from descant.core.tree import leaves
from descant.engine.account import Account, Queries, front
from descant.engine.batches import LocalWork
from descant.engine.draws import toss
from descant.engine.protect import account_of, protected
from descant.engine.rounds import Training
from descant.engine.settings import Train
from descant.engine.work import Work
from descant.errors import UsageError
from descant.experiment import run as runs
from descant.experiment.config import Experiment, override
from descant.experiment.run import Run, Setup
from descant.experiment.site_privacy import sites
from descant.models.module import ModuleTask
from descant.priors.solve import SGD
from descant.theory.accountant import Event, epsilon, gaussian_epsilon
from descant.view.tables import _choice, privacy_words
from helpers import on_any_model

KNOWN = {"privacy.sampling": "known"}  # exact, and without opacus
TABLES: dict[str, Any] = {
    "data": {"dataset": "digits", "partition": "dirichlet", "clients": 6, "alpha": 1.0},
    "model": {"name": "mclr"}, "algorithm": {"name": "fedavg"},
    "train": {"rounds": 3, "batch": 20, "local": {"epochs": 1}, "dtype": "float64", "backend": "loop"},
    "eval": {"every": 3},
}


def made(settings: dict[str, Any]) -> Experiment:
    return Experiment.parse(override(TABLES, {"privacy.noise": 1.0} | settings), ran())


def played(settings: dict[str, Any], out: Path | None = None) -> Run:
    return runs.start(Setup.of(made(settings)), out)


def server_of(run: Run) -> Tensor:
    return torch.cat([leaf.flatten() for _, leaf in leaves(run.snapshot("last").server)])


@pytest.mark.parametrize("settings", [
    {"algorithm.name": "ditto"}, {"model.name": "dnn", "algorithm.name": "fedavg"} | KNOWN,
    *(pytest.param({"algorithm.name": name}, marks=pytest.mark.slow)
      for name in ("fedavg", "pfedme", "dichotomous", "scaffold", "pfedbayes", "apfl"))], ids=str)
@pytest.mark.thorough
def test_clients_come_to_the_same_wherever_they_run(settings: dict[str, Any],
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Account, "spent", lambda self, number: 1.0)  # which has its own tests
    settings = {"train.rounds": 2} | settings
    found = [server_of(played(settings | {"train.backend": backend, "train.chunk": chunk}))
             for backend, chunk in (("loop", 1), ("vectorised", 4))]
    assert torch.allclose(*found, rtol=0, atol=1e-13)  # sums of other shapes are rounded otherwise


QUICK = ("ditto", "fedavg", "pfedme")


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
                                  for name in sorted(ALGORITHMS) if name not in (
                                      "fedem", "fedfomo", "fedmap", "fedpac", "ifca", "pfedgt", "globaltrain",
                                      "perfedavg", "localtrain",
                                      "pfedbayes")])  # its Adam makes any gradient as long as any other
@pytest.mark.parametrize("backend", ["loop", "vectorised"])
def test_nothing_of_the_rows_passes_by_the_clip(name: str, backend: str,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clip and noise of next to nothing, uploads that depend on rows by private gradients alone do not
    depend on them at all: other samples and other labels, and the server comes to the same."""
    monkeypatch.setattr(Account, "spent", lambda self, number: 1.0)
    experiment = Experiment.parse({
        **TABLES, "algorithm": {"name": name} | on_any_model(name),
        "train": TABLES["train"] | {"backend": backend, "rounds": 2, "local": {"steps": 2}, "chunk": 3},
        "privacy": {"noise": 1e-3, "clip": 1e-9, "sampling": "known"}}, ran())
    setup = Setup.of(experiment)
    federation = setup.federation
    other = dataclasses.replace(federation, x=1 - federation.x.flip(1), y=(federation.y + 3) % 10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [server_of(runs.start(dataclasses.replace(setup, federation=each)))
                 for each in (federation, other)]
    assert torch.allclose(*found, atol=1e-6)


@pytest.mark.thorough
def test_worker_processes_draw_the_same_noise() -> None:
    here, there = (server_of(played(KNOWN | {"train.backend": name, "train.workers": 2, "train.chunk": 2}))
                   for name in ("loop", "processes"))
    assert torch.allclose(here, there, atol=1e-12)
    other = server_of(played(KNOWN | {"train.seed": 1}))
    assert not torch.allclose(here, other, atol=1e-3)


def test_every_round_says_what_it_has_spent(tmp_path: Path) -> None:
    run = played(KNOWN | {"privacy.noise": 2.0}, tmp_path / "run")
    # each epoch shows a row once: after k rounds, mu = sqrt(k) / noise
    expected = [gaussian_epsilon(math.sqrt(k) / 2.0, 1e-5) for k in (1, 2, 3)]
    assert [row["epsilon"] for row in run.history] == pytest.approx(expected)
    spent = json.loads((tmp_path / "run" / "summary.json").read_text())["privacy"]
    assert spent["epsilon"] == pytest.approx(expected[-1])
    assert (spent["unit"], spent["noise"], spent["budget"]) == ("record", 2.0, None)
    assert 0 < spent["clipped"] <= 1
    with (tmp_path / "run" / "privacy.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["epsilon"]) for row in rows] == pytest.approx([expected[-1]] * 6, rel=1e-3)
    assert [row["rounds"] for row in rows] == ["3"] * 6


@pytest.mark.slow
def test_every_client_has_its_own_epsilon_and_the_largest_is_told() -> None:
    run = played({"train.local": {"steps": 4}, "train.batch": 16, "train.rounds": 1, "data.clients": 3})
    sizes, account = run.setup.federation.train.sizes, run.account
    assert account is not None
    assert len({*sizes}) > 1
    expected = [epsilon(Event(1.0, min(1.0, 16 / n), 4), 1e-5) for n in sizes.tolist()]
    assert account.each(1) == pytest.approx(expected)
    assert run.history[-1]["epsilon"] == max(expected) == pytest.approx(expected[int(sizes.argmin())])


@pytest.mark.thorough
def test_noise_is_fitted_to_a_budget_and_a_run_that_is_extended_stops_before_it_exceeds_it(
        tmp_path: Path) -> None:
    wanted = KNOWN | {"privacy.epsilon": 4.0}
    tables = override(TABLES, wanted)
    run = runs.start(Setup.of(Experiment.parse(tables)), tmp_path / "run")
    assert run.rounds == 3
    assert 3.95 < run.history[-1]["epsilon"] <= 4.0
    longer = runs.resume(tmp_path / "run", rounds=6)
    assert longer.rounds == 3
    assert longer.summary["stopped"] == "budget"
    given = runs.start(Setup.of(Experiment.parse(override(tables, {"privacy.noise": 1.7}))))
    assert given.rounds == 2  # with less noise than it takes for three
    assert given.history[-1]["epsilon"] <= 4.0 < gaussian_epsilon(math.sqrt(3) / 1.7, 1e-5)


@pytest.mark.thorough
def test_a_resumed_run_draws_the_noise_that_it_would_have_drawn(tmp_path: Path) -> None:
    whole = played(KNOWN | {"train.rounds": 4})
    played(KNOWN | {"train.rounds": 2}, tmp_path / "run")
    resumed = runs.resume(tmp_path / "run", rounds=4)
    assert server_of(resumed).equal(server_of(whole))
    assert resumed.history[-1]["epsilon"] == whole.history[-1]["epsilon"]


REFUSED = {"fedem": "pass over all its rows", "fedfomo": "pass over all", "fedmap": "pass over all",
           "fedpac": "pass over all", "ifca": "pass over all", "pfedgt": "pass over all",
           "globaltrain": "a secret", "perfedavg": "variant"}


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_method_that_looks_at_rows_otherwise_is_refused(name: str) -> None:
    experiment = Experiment.parse({**TABLES, "algorithm": {"name": name} | on_any_model(name)}, ran())
    setup = Setup.of(experiment)
    if name in REFUSED:
        with pytest.raises(UsageError, match=REFUSED[name]):
            account_of(setup.work(), setup.train, Privacy(noise=1.0))
        return
    account = account_of(setup.work(), setup.train, Privacy(noise=1.0))
    asked = {"apfl": (2,), "ditto": (2,), "localtrain": (0,), "dichotomous": (1, 1)}
    if name in asked:
        assert account.queries.per_batch == asked[name]
    assert account.queries.nothing == (name == "localtrain")


def test_methods_fit_with_the_settings_that_the_refusal_names() -> None:
    for settings in ({"algorithm.name": "perfedavg", "algorithm.variant": "fo"},
                     {"algorithm.name": "globaltrain"} | KNOWN,
                     {"algorithm.name": "fedmap", "algorithm.weights": "samples", "algorithm.init": "model"}):
        assert Setup.of(made(settings)).work().private is not None


def test_who_trains_alone_tells_nothing_and_needs_no_noise() -> None:
    plain = runs.start(Setup.of(Experiment.parse(override(TABLES, {"algorithm.name": "localtrain"}))))
    run = played(KNOWN | {"algorithm.name": "localtrain"})
    assert run.history[-1]["epsilon"] == 0
    assert run.summary["last"]["personal"]["test"] == plain.summary["last"]["personal"]["test"]


def test_several_looks_at_a_batch_cost_more_than_one() -> None:
    sizes, train = np.array([100]), Train(rounds=1, batch=10, local=LocalWork(steps=5))

    def of(queries: Queries, **own: Any) -> Event:
        privacy = Privacy(noise=2.0, **own)
        return Account(privacy, train, sizes, queries, lambda number: np.array([0])).events(3, 2.0)[0]

    assert of(Queries()) == Event(2.0, 0.1, 15)
    assert of(Queries((4,))) == Event(1.0, 0.1, 15)  # as with half the noise
    assert of(Queries((1, 1))) == Event(2.0, 0.1, 30)
    assert of(Queries((1, 1), disjoint=True)) == Event(2.0, 0.2, 15)  # of 50 rows each
    assert of(Queries(), sampling="known") == Event(2.0, 1.0, 3)  # 50 rows of 100: once in a round
    assert of(Queries((1, 1)), sampling="known") == Event(2.0, 1.0, 3)
    assert of(Queries((0,))).times == 0


def test_only_the_worst_clients_are_looked_at() -> None:
    events = [Event(1.0, rate, times) for rate, times in ((0.1, 5), (0.2, 5), (0.1, 9), (0.05, 9), (0.3, 0))]
    assert {*front(events)} == {Event(1.0, 0.2, 5), Event(1.0, 0.1, 9)}


@pytest.mark.thorough
def test_what_hardly_protects_is_told() -> None:
    with pytest.warns(UserWarning, match="delta = 0.02 is more than 1 /"):
        played(KNOWN | {"privacy.delta": 0.02})
    spent = {"unit": "record", "epsilon": 1.0, "delta": 1e-5, "noise": 1.0, "clip": 1.0}
    assert "never binds" in privacy_words(spent | {"clipped": 0.0})
    assert "always binds" in privacy_words(spent | {"clipped": 1.0})
    assert "binds for 40% of the rows" in privacy_words(spent | {"clipped": 0.4})
    assert played(KNOWN | {"privacy.clip": 1e3, "privacy.noise": 1e-4}).history[-1]["clipped"] == 0


@pytest.mark.parametrize(("settings", "words"), [
    ({"privacy.unit": "client", "data.clients": 1, "data.partition": "iid"}, "one alone"),
    ({"privacy.unit": "client", "train.participation": "all", "train.cohort": 2}, "participation"),
    ({"privacy.unit": "client", "train.sampling": "samples", "train.cohort": 2}, "uniform"),
    ({"privacy.colour": 1}, "privacy field"), ({"privacy.epsilon": 0}, "greater than 0"),
    ({"model.name": "cnn", "model.norm": "batch"}, "GroupNorm")])
def test_what_does_not_fit_is_refused(settings: dict[str, Any], words: str) -> None:
    if "model.norm" in settings:
        task = ModuleTask(nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.BatchNorm1d(4), nn.Linear(4, 10)),
                          loss="cross_entropy", classes=10, dtype=torch.float64)
        plain = Setup.of(Experiment.parse(TABLES)).work()
        with pytest.raises(UsageError, match=words):
            protected(Work(FedAvg(), task, plain.federation, 0, 20, LocalWork(steps=1)), Train(),
                      Privacy(noise=1.0))
        return
    with pytest.raises(UsageError, match=words):
        Setup.of(made(settings)).decided()


@pytest.mark.parametrize("settings", [
    {"scale": "client"}, pytest.param({"impute": "client"}, marks=pytest.mark.slow)], ids=str)
@pytest.mark.thorough
def test_rows_that_are_changed_by_other_rows_are_refused(settings: dict[str, Any]) -> None:
    """One row that moves the mean of its client moves what all other rows add, each by up to twice the clip:
    the noise is for one. A client with all its rows may do with them what it likes."""
    rng = np.random.default_rng(0)
    federation = Federation.from_arrays(rng.standard_normal((60, 4)), np.arange(60) % 2, np.arange(60) % 3,
                                        **settings)
    for name in ("fedavg", "ditto"):
        with pytest.raises(UsageError, match=r'"constants" with numbers that are known without'):
            descant.run(name, federation=federation, rounds=1, privacy={"noise": 2.0, "sampling": "known"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = {"noise": 2.0, "sampling": "known", "unit": "client"}
        assert descant.run("fedavg", federation=federation, rounds=1, privacy=whole).rounds == 1
        alone = descant.run("localtrain", federation=federation, rounds=1, privacy={"noise": 2.0})
        assert alone.history[-1]["epsilon"] == 0
    known = Federation.from_arrays(rng.standard_normal((60, 4)), np.arange(60) % 2, np.arange(60) % 3,
                                   scale="constants", mean=[0.5], std=[2.0])
    assert descant.run("fedavg", federation=known, rounds=1,
                       privacy={"noise": 2.0, "sampling": "known"}).rounds == 1


def test_coins_are_fair_and_empty_batches_are_batches() -> None:
    shares = [np.arange(40)]
    found = [toss(stream(0, "coins.local", k, 0), shares, 4, 50) for k in range(20)]
    counts = np.concatenate([each.lengths for each in found])
    assert counts.mean() == pytest.approx(4, abs=0.3)
    assert counts.var() == pytest.approx(40 * 0.1 * 0.9, rel=0.25)
    rows = np.concatenate([each.rows for each in found])
    assert np.bincount(rows, minlength=40) == pytest.approx(100, abs=45)
    assert (toss(stream(0, "coins.local", 1, 0), shares, 40, 3).lengths == 40).all()  # all are in it
    secret = [toss(None, shares, 4, 50).lengths for _ in range(2)]
    assert not (secret[0] == secret[1]).all()


def audited(with_canary: bool, privacy: Privacy, seed: int, clients: int) -> tuple[Tensor, Account]:
    """Uploads of so many clients that have the same six rows, one of which is the canary or nothing; what is
    seen of each is its model along the canary."""
    x = np.zeros((6, 2), np.float64)
    x[0, 0] = 30.0 * with_canary
    own = np.arange(clients).repeat(6)
    federation = Federation.from_arrays(np.tile(x, (clients, 1)), -np.ones((6 * clients, 1)), own, test=0.0,
                                        validation=0.0)
    torch.manual_seed(0)
    module = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(module.weight)
    task = ModuleTask(module, loss="mse", dtype=torch.float64).fitted(federation)
    train = Train(rounds=1, batch=3, local=LocalWork(steps=4), seed=seed)
    plain = Work(FedAvg(solver=SGD(lr=1e-3)), task, federation, seed, 3, train.local)
    work = protected(plain, train, privacy)
    training = Training(work, train)
    training.number = 1
    everyone = np.arange(clients)
    message = work.algorithm.broadcast(training.server, training.round_of(everyone))
    outcome = work.execute("local", everyone, 1, message, ())
    assert training.account is not None
    assert not outcome.failed
    return outcome.values.upload.theta[:, 0], training.account


def audit(sampling: Any) -> tuple[float, Account]:
    """What an attacker measures who looks for a canary, a row whose gradient no other row shares, by the
    model along it."""
    clients, delta = 6000, 1e-2
    privacy = Privacy(noise=1.0, clip=0.5, delta=delta, sampling=sampling)
    with_it, account = audited(True, privacy, 1, clients)
    without, _ = audited(False, privacy, 2, clients)
    return lower_bound(with_it.numpy(), without.numpy(), delta), account


@pytest.mark.parametrize("sampling", ["known", pytest.param("poisson", marks=pytest.mark.slow)])
@pytest.mark.thorough
def test_an_audit_never_measures_more_than_is_claimed(sampling: Any) -> None:
    """And not far less, so that a wrong account would be noticed."""
    measured, account = audit(sampling)
    claimed = account.spent(1)
    assert 0.35 * claimed < measured <= claimed
    assert measured > account.largest(1, 2.5)  # noise of 2.5 was not there


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["known", "poisson"])
@pytest.mark.parametrize("fault", ["no noise", "a third of the noise", "no clip"])
def test_an_audit_notices_what_is_missing(fault: str, sampling: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    noise_of, clipped = gradients.noise_of, gradients.clipped
    if fault == "no clip":
        monkeypatch.setattr(gradients, "clipped", lambda *given: torch.ones_like(clipped(*given)))
    else:
        left = 0.0 if fault == "no noise" else 1 / 3

        def less(mechanism: Mechanism, *given: Any) -> gradients.Noise:
            return noise_of(dataclasses.replace(mechanism, noise=left * mechanism.noise), *given)

        monkeypatch.setattr(gradients, "noise_of", less)
    measured, account = audit(sampling)
    assert measured > account.spent(1)


@pytest.mark.thorough
def test_python_takes_the_section(tmp_path: Path) -> None:
    federation = descant.federation("digits", partition="iid", clients=3)
    run = descant.run("fedavg", federation=federation, rounds=1, privacy={"noise": 2.0, "sampling": "known"},
                      out=tmp_path / "run")
    assert run.history[0]["epsilon"] > 0
    again = descant.run("fedavg", federation=federation, rounds=2, out=tmp_path / "run", resume=True,
                        privacy={"noise": 2.0, "sampling": "known"})
    assert again.rounds == 2
    with pytest.raises(UsageError, match=r"privacy must hold the fields of \[privacy\]"):
        descant.run("fedavg", federation=federation, privacy=3)  # type: ignore[arg-type]


@pytest.mark.thorough
def test_a_best_round_that_a_real_federation_would_not_know_is_told() -> None:
    run = played(KNOWN | {"train.rounds": 4, "eval.every": 1, "privacy.noise": 30.0})
    best, last = run.summary["best"]["round"], run.summary["last"]["round"]
    assert best != last  # with this noise it gets worse
    for changes, words in ((run.summary, "a real federation"),
                           ({"best": None, "last": None}, "keeps the figures that select it"),
                           ({"privacy": run.summary["privacy"] | {"figures": "told"}}, "")):
        found = _choice(run.summary | changes)
        assert words in found
        assert bool(found) == bool(words)


def test_sites_are_told_what_they_can_hope_for() -> None:
    smallest, median, largest = sites(made(KNOWN | {"train.local": {"steps": 30}, "privacy.noise": 3.0}))
    assert smallest.rows <= median.rows <= largest.rows
    assert [*smallest.epsilons] == [0.5, 1.0, 2.0, 3.0, 4.0]
    for noise in smallest.epsilons:
        assert smallest.epsilons[noise] >= largest.epsilons[noise] > 0
    assert [*largest.epsilons.values()] == sorted(largest.epsilons.values(), reverse=True)

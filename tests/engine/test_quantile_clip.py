"""A bound that follows a quantile of the clients' norms: by the formula of Andrew et al. (2021), by where it
settles, by what its noise costs, and through a resumed run."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from descant.algorithms import FedAvg
from descant.core.privacy.settings import Mechanism, Privacy, Quantile
from descant.core.random import stream
from descant.engine.protect import protected, settled
from descant.engine.quantile import followed, noised_votes, share_within
from descant.engine.rounds import Training
from descant.engine.settings import Train
from descant.errors import UsageError
from descant.experiment import run as runs
from descant.experiment.config import Experiment
from descant.experiment.run import Setup
from descant.theory.accountant import Event, epsilon
from descant.view.tables import privacy_words
from helpers import Engine, engine, make_work, ragged

FEDERATION = ragged()
RULE = Quantile(quantile=0.5, start=0.3, lr=0.2, count_noise=2.0)
PRIVACY = Privacy(unit="client", clip=RULE, noise=1.0, sampling="known")


def mechanism(quantile: float, *, cohort: float, count_noise: float | None = None, secret: bool = False
              ) -> Mechanism:
    rule = Quantile(quantile=quantile, start=0.05, count_noise=count_noise)
    return Mechanism(Privacy(unit="client", clip=rule, noise=1.0), 1.0, cohort, secret)


# -- the rule --------------------------------------------------------------------------------------------


def test_the_bound_follows_by_the_formula() -> None:
    """C <- C exp(-lr (b - quantile)), b being 7 of 10 with noise of -0.5 on the sum."""
    one = mechanism(0.9, cohort=10.0)
    votes = 7 * 0.5 - 3 * 0.5 - 0.5
    assert share_within(votes, one) == pytest.approx(0.65)
    assert followed(2.0, votes, one) == pytest.approx(2.0 * math.exp(-0.2 * (0.65 - 0.9)))


def test_who_does_not_come_counts_neither_way() -> None:
    """The number that came is hidden: half a vote is missing for each, and the divisor stays."""
    one = mechanism(0.5, cohort=10.0, count_noise=1e-12)
    assert share_within(noised_votes(one, 0, 0, 0, 1), one) == pytest.approx(0.5)
    assert share_within(noised_votes(one, 4, 0, 0, 1), one) == pytest.approx(0.7)


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.9])
def test_the_bound_settles_at_the_planted_quantile(quantile: float) -> None:
    """400 clients with planted norms, by brute force: how many are within the bound is counted. The share
    within wavers by the noise of a twentieth, smoothed by lr."""
    norms = np.exp(np.random.default_rng(1).standard_normal(400))
    one, bound, seen = mechanism(quantile, cohort=400.0), 0.05, []
    for number in range(1, 301):
        votes = noised_votes(one, 400, int((norms > bound).sum()), 0, number)
        bound = followed(bound, votes, one)
        seen.append(float((norms <= bound).mean()))
    assert np.mean(seen[100:]) == pytest.approx(quantile, abs=0.02)
    assert np.std(seen[100:]) < 0.05


@pytest.mark.parametrize("secret", [False, True])
def test_the_votes_have_the_noise_that_is_paid_for(secret: bool) -> None:
    """1000 draws: mean and variance within five deviations of what they are said to be."""
    one, n = mechanism(0.5, cohort=60.0, count_noise=3.0, secret=secret), 1000
    drawn = np.array([noised_votes(one, 10, 4, 0, number) for number in range(n)])
    assert abs(drawn.mean() - 1.0) < 5 * 3.0 / n**0.5
    assert abs(drawn.var() / 9.0 - 1) < 5 * (2 / n) ** 0.5
    assert (noised_votes(one, 10, 4, 0, 7) == drawn[7]) != secret


def test_sum_and_votes_together_cost_what_is_accounted_for() -> None:
    """Two Gaussians at once are one whose mu^2 is the sum of theirs: a contribution has length 1 in units of
    the bound, a vote 1/2. So the whole is as private as `noise` alone, for any split."""
    for count_noise in (0.6, 2.0, 50.0):
        both = Mechanism(dataclasses.replace(PRIVACY, clip=Quantile(count_noise=count_noise)), 1.0, 60.0)
        together = math.sqrt((1 / both.sum_noise) ** 2 + (0.5 / count_noise) ** 2)
        assert epsilon(Event(1 / together, 1.0, 5), 1e-5) == pytest.approx(
            epsilon(Event(both.noise, 1.0, 5), 1e-5), rel=1e-9)
        assert both.sum_noise > both.noise


def test_noise_alone_drives_the_bound_nowhere_for_ever() -> None:
    one, bound = mechanism(0.5, cohort=1.0, count_noise=1e6), 1.0
    for number in range(2000):
        bound = followed(bound, noised_votes(one, 1, 0, 0, number), one)
        assert 0 < bound < math.inf


def test_a_count_that_tells_more_than_all_may_is_refused_before_the_run() -> None:
    greedy = dataclasses.replace(PRIVACY, clip=Quantile(count_noise=0.4))
    with pytest.raises(UsageError, match=r"privacy\.clip\.count_noise = 0\.4 is too little.*more than 0\.5"):
        settled(make_work(FedAvg(), FEDERATION), Train(), greedy)


# -- in rounds -------------------------------------------------------------------------------------------


def played(privacy: Privacy, rounds: int, *, secret: bool = False, **train: Any) -> tuple[Engine, list[Any]]:
    with engine(FedAvg(), FEDERATION, **{"backend": "loop"} | train) as e:
        work = protected(e.training.work, e.training.train, privacy, secret=secret)
        playing = Engine(Training(work, e.training.train), e.backend)
        return playing, playing.play(rounds)


def test_a_round_shortens_to_the_bound_that_the_rounds_before_made() -> None:
    e, reports = played(PRIVACY, 4)
    one = e.training.work.privacy
    assert one is not None
    expected = RULE.start
    for report in reports:
        assert report.clip == expected
        clients = FEDERATION.population
        noise = float(stream(e.training.work.seed, "server.privacy.count", report.number).standard_normal())
        votes = clients / 2 - report.clipped * clients + 2.0 * noise
        expected *= math.exp(-0.2 * (min(max(0.5 + votes / clients, 0.0), 1.0) - 0.5))
        assert expected != report.clip
    assert e.training.clip == pytest.approx(expected, rel=1e-12)


def test_the_noise_on_the_sum_is_that_after_the_split() -> None:
    """The same round with a number for the bound: the noise differs by the factor alone, so that the models'
    distances from the noiseless one do."""
    number = dataclasses.replace(PRIVACY, clip=RULE.start)
    free = dataclasses.replace(number, noise=1e-18)
    quantile, fixed, still = (played(privacy, 1)[0].model.theta for privacy in (PRIVACY, number, free))
    factor = 1 / math.sqrt(1 - (2 * 2.0) ** -2)
    torch.testing.assert_close(quantile - still, factor * (fixed - still), rtol=1e-9, atol=1e-12)


def test_a_round_that_fails_leaves_the_bound_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    e, _ = played(PRIVACY, 1)
    before = e.training.clip

    def full(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(e.training.store, "stage", full)
    with pytest.raises(KeyboardInterrupt):
        e.play(1)
    assert e.training.clip == before


def test_what_a_real_server_tells_of_the_clients_has_noise() -> None:
    """Of a number for the bound it tells nothing; of a quantile, the noised share."""
    fixed = dataclasses.replace(PRIVACY, clip=0.3)
    assert [r.clipped for r in played(fixed, 2, secret=True)[1]] == [None, None]
    exact = played(PRIVACY, 1)[1][0].clipped
    assert len({played(PRIVACY, 1, secret=True)[1][0].clipped for _ in range(4)} - {exact}) > 1


# -- in runs ---------------------------------------------------------------------------------------------


def wanted(rounds: int) -> Experiment:
    return Experiment.parse({
        "algorithm": {"name": "fedavg"}, "model": {"name": "mclr"},
        "data": {"dataset": "digits", "partition": "dirichlet", "clients": 6, "alpha": 1.0},
        "train": {"rounds": rounds, "batch": 5, "local": {"steps": 2}, "seed": 3, "backend": "loop",
                  "cohort": 3},
        "privacy": {"unit": "client", "noise": 1.0, "sampling": "known",
                    "clip": {"quantile": 0.7, "start": 0.2, "count_noise": 1.0}}})


@pytest.mark.filterwarnings("ignore:each sum is of about 3 clients")
@pytest.mark.thorough
def test_a_resumed_run_goes_on_with_its_bound_bit_for_bit(tmp_path: Path) -> None:
    whole = runs.start(Setup.of(wanted(4)), tmp_path / "whole")
    runs.start(Setup.of(wanted(2)), tmp_path / "parts")
    parts = runs.resume(tmp_path / "parts", rounds=4)
    told = [row["clip"] for row in whole.history]
    assert len({*told}) == 4
    assert [row["clip"] for row in parts.history] == told
    assert torch.equal(parts.snapshot("last").server.theta, whole.snapshot("last").server.theta)
    spent = parts.summary["privacy"]
    assert spent["last_clip"] == told[-1]
    assert f"clip at quantile 0.7, {told[-1]:.3g} in the last round" in privacy_words(spent)
    lines = (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["clip"] for line in lines] == told

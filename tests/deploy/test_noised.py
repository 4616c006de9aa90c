"""Clients that hide themselves in a secure sum: how far one can move it, what noise it has, that the server
sees no sum without, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import flower_helpers as flower
from descant.deploy import noised as module
from descant.deploy.backend import Rules
from descant.deploy.masking import _attempt
from descant.deploy.messages import WireMessage
from descant.deploy.noised import NoisedSummand, noised
from descant.deploy.secure.agreement import BOUND
from descant.deploy.secure.encoding import FixedPoint, Numbers
from descant.deploy.transport import NoReply, Payload, Rejected
from descant.engine import adding, quantile
from descant.errors import DescantError, UsageError
from descant.experiment import run as runs
from descant.experiment.config import Experiment
from descant.experiment.run import Run, Setup
from descant.theory.accountant import Event, epsilon
from flower_helpers import CLIENTS, DATA, MemoryServer
from helpers import assert_same

ENCODING = FixedPoint(BOUND, CLIENTS)
SECURE = Rules(deadline=30, secure=True, threshold=3)
PRIVACY = {"unit": "client", "noise": 1.0, "clip": 0.4, "sampling": "known"}
pytestmark = pytest.mark.filterwarnings("ignore:each sum is of about")


def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without noise, on both sides."""
    monkeypatch.setattr(module, "secret_normals", np.zeros)
    for place in (adding, quantile):
        monkeypatch.setattr(place, "normals", lambda shape, dtype, _: torch.zeros(shape, dtype=dtype))


def experiment(method: str = "fedavg", rounds: int = 1, **privacy: Any) -> Experiment:
    tables = flower.experiment(method).dump()
    tables["privacy"] = PRIVACY | privacy
    tables["train"]["rounds"] = rounds
    return Experiment.parse(tables)


def federated(wanted: Experiment, place: Path, rules: Rules = SECURE) -> Run:
    answers = flower.make_clients(DATA, place)
    return flower.federate(wanted, MemoryServer(answers), place / "server", rules=rules, alone=False)


# -- one client ------------------------------------------------------------------------------------------


def test_on_the_grid_a_contribution_is_no_longer_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "secret_normals", np.zeros)
    rng = np.random.default_rng(0)
    for coarse in (FixedPoint(2.0**50, 4), ENCODING):
        for _ in range(50):
            value = rng.standard_normal(60)
            value /= np.linalg.norm(value)
            words = noised(value, np.ones(60), coarse).view(np.int64)
            on_grid = np.ldexp(words.astype(float), -coarse.fraction)
            assert np.linalg.norm(on_grid) <= 1 + 1e-15
            assert np.abs(on_grid - value).max() < math.ldexp(1, -coarse.fraction)


def test_the_shares_of_all_but_one_are_the_noise_that_is_accounted_for() -> None:
    """Planted: 3 clients at least, so that two shares have variance sigma^2: four have twice that. Mean,
    variance and three quantiles of 40,000 coordinates, each within five deviations."""
    n, sigma, least = 40_000, 1.5, 3
    values, deviations = np.full(n, 0.25), np.full(n, sigma / math.sqrt(least - 1))
    with np.errstate(over="ignore"):
        words = sum((noised(values, deviations, ENCODING) for _ in range(4)), np.zeros(n, np.uint64))
    noise = (ENCODING.decode(words, 4) - 1.0) / (sigma * math.sqrt(2))
    assert abs(noise.mean()) < 5 / n**0.5
    assert abs(noise.var() - 1) < 5 * (2 / n) ** 0.5
    for z, share in ((0.0, 0.5), (1.0, 0.841345), (2.0, 0.977250)):
        assert abs((noise < z).mean() - share) < 5 * (share * (1 - share) / n) ** 0.5
    assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 5 / n**0.5


def _normal(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


@pytest.mark.parametrize("deviation", [1.0, 3.0])
def test_sums_of_rounded_noise_hide_what_a_gaussian_does(deviation: float) -> None:
    """By brute force, on a grid that is far too coarse: deviations of 1 and 3 units, where the encoding has
    2^14 at least. The probabilities of a sum of three rounded Gaussians with and without one client that
    moves it by whole units: delta at several epsilons is that of a Gaussian mechanism, or less."""
    reach = np.arange(-60, 61)
    one = np.diff([_normal(edge / deviation) for edge in np.append(reach - 0.5, 60.5)])
    whole = np.convolve(np.convolve(one, one), one)
    for moved in (1, 2, 4):
        there, gone = np.append(np.zeros(moved), whole), np.append(whole, np.zeros(moved))
        for bound in (0.1, 0.5, 1.0, 2.0):
            delta = np.maximum(there - math.exp(bound) * gone, 0).sum()
            mu = moved / (deviation * math.sqrt(3))
            claimed = _normal(mu / 2 - bound / mu) - math.exp(bound) * _normal(-mu / 2 - bound / mu)
            assert delta <= claimed + 1e-12


def test_noise_is_drawn_anew_each_time() -> None:
    one, other = (noised(np.zeros(500), np.ones(500), ENCODING) for _ in range(2))
    assert not (one == other).any()


# -- federations -----------------------------------------------------------------------------------------


CLIPS = {"number": 0.4, "quantile": {"quantile": 0.5, "start": 0.4, "count_noise": 3.0}}


@pytest.mark.parametrize(("method", "clip"), [
    ("fedavg", "number"), ("fedavg", "quantile"), pytest.param("ditto", "quantile", marks=pytest.mark.slow),
    pytest.param("pfedme", "quantile", marks=pytest.mark.slow)])
@pytest.mark.thorough
def test_without_noise_nodes_come_to_what_the_simulator_comes_to(
        method: str, clip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent(monkeypatch)
    wanted = experiment(method, 3, clip=CLIPS[clip])
    found, expected = federated(wanted, tmp_path), runs.start(Setup.of(wanted))
    assert_same(found.snapshot("last").server, expected.snapshot("last").server, 1e-9)
    told = [row["clip"] for row in found.history]
    assert told == pytest.approx([row["clip"] for row in expected.history], rel=1e-9)
    assert len({*told}) == (1 if clip == "number" else 3)
    assert [row["epsilon"] for row in found.history] == [row["epsilon"] for row in expected.history]


@pytest.mark.thorough
def test_the_server_sees_no_sum_without_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the protocol decodes, beside the sum of the same round without noise: four shares, of which two
    make sigma C. 650 coordinates: the variance is within five deviations."""
    seen: list[Numbers] = []
    total = NoisedSummand.total

    def watched(self: NoisedSummand, vector: Numbers, *given: Any) -> Any:
        seen.append(vector)
        return total(self, vector, *given)

    monkeypatch.setattr(NoisedSummand, "total", watched)
    run = federated(experiment(), tmp_path / "noised")
    with monkeypatch.context() as patched:
        silent(patched)
        federated(experiment(), tmp_path / "silent")
    noise = (seen[0] - seen[1]) / math.sqrt(CLIENTS / 2)
    n = len(noise)
    assert abs(noise.mean()) < 5 / n**0.5
    assert abs(noise.var() - 1) < 5 * (2 / n) ** 0.5
    assert np.linalg.norm(seen[1]) <= CLIENTS
    assert run.history[0]["loss"] is None


@pytest.mark.thorough
def test_a_client_keeps_its_budget_by_its_own_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds are within the budget, three are not. A server that goes on all the same gets no sum."""
    once, twice, thrice = (epsilon(Event(1.0, 1.0, k), 1e-5) for k in (1, 2, 3))
    wanted = experiment(rounds=3, epsilon=(twice + thrice) / 2)
    run = federated(wanted, tmp_path / "honest")
    assert [row["epsilon"] for row in run.history] == pytest.approx([once, twice])
    assert run.summary["stopped"] == "budget"
    monkeypatch.setattr(Run, "is_spent", False)
    answers = flower.make_clients(DATA, tmp_path / "greedy")
    whole, sent = answers["0"], []

    def loses_the_end(payload: Payload) -> Payload | NoReply | None:
        """It is in two sums, and hears of neither: the others unmask them."""
        facts = WireMessage.decode(payload).facts
        if facts.get("phase") == "unmask":
            return NoReply("gone")
        reply = whole(payload)
        if facts.get("job") == "local":
            assert isinstance(reply, Payload)
            sent.append("masked" in WireMessage.decode(reply).tensors)
        return reply

    answers["0"] = loses_the_end
    with pytest.raises(DescantError, match="this client may be in 2 sums, and one more would exceed"):
        flower.federate(wanted, MemoryServer(answers), tmp_path / "greedy" / "server", rules=SECURE,
                        alone=False)
    lines = (tmp_path / "greedy" / "server" / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2
    assert sent == [True, True, False]


@pytest.mark.parametrize(("changes", "says"), [
    ({"noise": 1e-4}, r"privacy\.noise comes to 0\.0001.*must be between"),
    ({"noise": 1e4}, r"privacy\.noise comes to 1e\+04.*must be between"),
    ({"noise": 1.0, "clip": {"quantile": 0.5, "count_noise": 1e5}}, r"count_noise comes to 1e\+05"),
    ({"noise": None, "epsilon": 8.0}, r"privacy\.noise is a part of what is agreed on")])
def test_noise_that_does_not_fit_is_refused(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        federated(experiment(**changes), tmp_path)


@pytest.mark.thorough
def test_cohorts_that_coins_may_make_too_small_are_refused(tmp_path: Path) -> None:
    """A round of two could not be summed, and with the same seed never could."""
    tables = experiment(rounds=3, sampling="poisson").dump()
    tables["train"]["drop"] = 0.25
    with pytest.raises(UsageError, match=r"train\.drop .* too few for a secure sum"):
        federated(Experiment.parse(tables), tmp_path / "coins")
    tables["privacy"]["sampling"] = "known"
    assert federated(Experiment.parse(tables), tmp_path / "known").rounds == 3


def test_clients_that_are_sent_different_things_are_refused(tmp_path: Path) -> None:
    tables = experiment("fedprox").dump()
    tables["algorithm"]["mu"] = [0.1, 0.2, 0.3, 0.4]
    with pytest.raises(UsageError, match="all clients are sent the same"):
        federated(Experiment.parse(tables), tmp_path)


@pytest.mark.parametrize("terms", [{"cap": 9.0}, {"cap": 9.0, "clip": 0.0}, {"cap": 9.0, "clip": "1"},
                                   {"cap": 9.0, "clip": math.inf}, {"clip": 1.0}])
def test_terms_without_a_bound_are_refused(terms: dict[str, Any]) -> None:
    joined: Any = SimpleNamespace(
        work=SimpleNamespace(privacy=SimpleNamespace(unit="client")),
        remote=SimpleNamespace(session="s", train=SimpleNamespace(rounds=3)))

    def request(found: dict[str, Any]) -> WireMessage:
        return WireMessage({"attempt": ["s", "local", 1, "token", json.dumps(found)]})

    assert _attempt(joined, request({"cap": 9.0, "clip": 1.0})).number == 1
    with pytest.raises(Rejected):
        _attempt(joined, request(terms))


# -- a server that is trusted to add the noise ---------------------------------------------------------


@pytest.mark.parametrize("clip", [*CLIPS, "wide"])
@pytest.mark.thorough
def test_without_noise_a_trusted_server_comes_to_what_the_simulator_comes_to(
        clip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the server would shorten half of the uploads to the median of the round: a client that comes
    or goes would move the median, and with it what all others add, far beyond the bound that noise is for."""
    silent(monkeypatch)
    wanted = experiment(rounds=3, clip=(CLIPS | {"wide": 100.0})[clip])
    found = federated(wanted, tmp_path, Rules(deadline=30, clip=1.0))
    expected = runs.start(Setup.of(wanted))
    assert_same(found.snapshot("last").server, expected.snapshot("last").server, 1e-12)
    assert [row["clip"] for row in found.history] == [row["clip"] for row in expected.history]


@pytest.mark.thorough
def test_the_seed_tells_nothing_of_the_noise_of_a_trusted_server(tmp_path: Path) -> None:
    wanted = experiment(clip=CLIPS["quantile"])
    one, other, simulated = (run.snapshot("last").server.theta for run in (
        federated(wanted, tmp_path / "one", Rules(deadline=30)),
        federated(wanted, tmp_path / "other", Rules(deadline=30)), runs.start(Setup.of(wanted))))
    assert not torch.isclose(one, other).any()
    assert not torch.isclose(one, simulated).any()
    assert not torch.isclose(other, simulated).any()

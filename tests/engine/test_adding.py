"""Uploads that are added up where they are made come to what they come to one by one, to the last bit."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from descant.algorithms import ALGORITHMS, APFL, SCAFFOLD, Ditto, FedAvg, FedMAP, OneStageFedProx, pFedMe
from descant.core.algorithm import Algorithm, Message
from descant.core.sums import Total, added
from descant.core.tree import leaves
from descant.engine.rounds import NobodyLeft, RoundReport, Training
from descant.priors.grouping import KMeans
from descant.priors.precision import Adaptive, FixedVariance, LearnedVariance
from descant.priors.solve import SGD
from helpers import engine, on_any_model, ragged

FEDERATION = ragged()
METHODS: dict[str, Algorithm] = {
    **{name: method(**on_any_model(name)) for name, method in ALGORITHMS.items()},
    "pfedme learned": pFedMe(LearnedVariance(epsilon=1e-3), K=2, beta=1.5),
    "one_stage list": OneStageFedProx(lam=(0.5, 1.0, 0.2, 0.1, 2.0), gamma=0.5),
    "fedmap samples": FedMAP(FixedVariance(0.5), SGD(lr=0.05), weights="samples", temperature=2.0),
    "fedmap learned": FedMAP(LearnedVariance(epsilon=1e-3), SGD(lr=0.05), weights="uniform"),
}
SUMS = [name for name, method in METHODS.items() if not method.needs_rows]


def played(method: Algorithm, rounds: int = 2, **train: Any) -> tuple[list[bytes], list[RoundReport]]:
    """The bits of server and clients after some rounds, and the reports."""
    with engine(method, FEDERATION, **{"batch": 4, "local": {"steps": 2}, "backend": "loop"} | train) as e:
        reports = e.play(rounds)
        both = [tensor.numpy().tobytes() for tree in (e.server, e.states()) for _, tensor in leaves(tree)]
    return both, reports


def facts(reports: list[RoundReport]) -> list[tuple[Any, ...]]:
    return [(r.number, r.participants, r.rejected, r.grad_steps, r.bytes_down, r.bytes_up, r.loss)
            for r in reports]


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> Any:
    def switch() -> None:
        monkeypatch.setattr(Training, "adding", lambda *_: None)
    return switch


def test_who_needs_rows() -> None:
    """Who clusters, mixes or weighs the clients by what they upload."""
    assert {name for name in ALGORITHMS if METHODS[name].needs_rows} == {
        "cgpfl", "fedamp", "fedfomo", "fedmap", "fedpac", "heurfedamp", "ifca", "pfedhn"}
    for method in (Ditto(groups=KMeans(2)), Ditto(lam=Adaptive()), FedMAP(weights="samples", init="client"),
                   FedMAP(weights="samples", temperature=0.01), type("Own", (FedAvg,), {"aggregate": 0})()):
        assert method.needs_rows


@pytest.mark.parametrize("method", SUMS)
def test_added_up_is_one_by_one(method: str, one_by_one: Any) -> None:
    train: dict[str, Any] = {"cohort": 4, "dtype": "float32"}
    if METHODS[method].tracking:
        train["drop"] = 0.3
    else:
        train |= {"participation": "all", "drop": 0.2}
    adding, reports = played(METHODS[method], **train)
    one_by_one()
    rows, expected = played(METHODS[method], **train)
    assert adding == rows
    assert facts(reports) == facts(expected)


@pytest.mark.parametrize("method", [FedAvg(), SCAFFOLD(), APFL()], ids=lambda method: method.name)
@pytest.mark.thorough
def test_workers_chunks_and_timing_do_not_show(method: Algorithm) -> None:
    """Each client runs alone, so that its upload is the same; what differs is who adds up whom, and when."""
    expected, reports = played(method)
    for workers in (1, 3):
        found, told = played(method, backend="processes", workers=workers, chunk=1)
        assert found == expected
        assert facts(told) == facts(reports)


class Faulty(FedAvg):
    """Client 2 uploads NaN, client 4 more than can be added up."""

    def local(self, task: Any, message: Message, state: Any, data: Any) -> Any:
        upload, state = super().local(task, message, state, data)
        theta = torch.where(data.size == SIZE[4], torch.full_like(upload.theta, 1e300), upload.theta)
        return upload._replace(theta=torch.where(data.size == SIZE[2], torch.nan, theta)), state


SIZE: Tensor = torch.from_numpy(FEDERATION.train.sizes)


@pytest.mark.parametrize("backend", ["loop", "vectorised", "processes"])
def test_what_is_not_finite_is_left_out_and_told(backend: str, one_by_one: Any) -> None:
    train = {"backend": backend, "chunk": 2, "workers": 2} if backend != "loop" else {}
    found, [report] = played(Faulty(), 1, **train)
    assert report.rejected == dict.fromkeys((2, 4), "upload.theta is not finite")
    one_by_one()
    rows, [expected] = played(Faulty(), 1, **train)
    assert found == rows
    assert facts([report]) == facts([expected])


class Hopeless(FedAvg):
    """Nobody's upload is finite."""

    def local(self, task: Any, message: Message, state: Any, data: Any) -> Any:
        upload, state = super().local(task, message, state, data)
        return upload._replace(theta=upload.theta * torch.nan), state


def test_a_round_in_which_nobody_is_left_is_undone() -> None:
    with engine(Hopeless(), FEDERATION, backend="loop") as e, pytest.raises(NobodyLeft, match="not finite"):
        e.play()
    assert e.training.number == 0


def test_a_total_travels_between_processes() -> None:
    rng = np.random.default_rng(0)
    total = Total.of((torch.from_numpy(rng.standard_normal((3, 4))),), torch.ones(3))
    again = pickle.loads(pickle.dumps(total))
    form = (torch.zeros(4, dtype=torch.float64),)
    torch.testing.assert_close(added([total, again]).mean(form), total.mean(form), rtol=0, atol=0)

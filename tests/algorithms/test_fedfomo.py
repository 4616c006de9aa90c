"""FedFomo: weights by hand on three clients, what the server sends, and who stays alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from descant.algorithms import FedFomo, LocalTrain
from descant.algorithms.fedfomo import Server
from descant.core.algorithm import Round, renewed
from descant.core.federation import Federation
from descant.core.splits import Table
from descant.core.task import FunctionTask
from descant.core.vector import Model
from descant.engine.evaluation import evaluate
from descant.errors import UsageError
from descant.priors.solve import SGD
from helpers import assert_same, engine, ragged

FULL: dict[str, Any] = {"batch": "full", "local": {"steps": 1}, "backend": "vectorised"}


def three() -> Federation:
    """Client i has the loss (theta - y)^2 / 2 of its rows y: train 0, 3, -2, validation 1, 2, none."""
    y = torch.tensor([0.0, 3.0, -2.0, 1.0, 2.0], dtype=torch.float64)
    lists = [np.array([k]) for k in range(5)]
    empty = np.zeros(0, np.int64)
    return Federation(torch.zeros((5, 1), dtype=torch.float64), y, Table.of(lists[:3]),
                      Table.of([lists[3], lists[4], empty]), Table.of([empty] * 3), None, ("a", "b", "c"))


TASK = FunctionTask(lambda theta, x, y: (theta[0] - y).square() / 2, torch.zeros(1, dtype=torch.float64))


def state(*theta: float) -> Model:
    return Model(torch.tensor(theta, dtype=torch.float64)[:, None], torch.zeros((len(theta), 0)))


def test_a_round_of_three_clients_by_hand() -> None:
    """theta = (0, 3, -1), each client is sent both others.
    a, validation 1: L(0) = 1/2, L(3) = 2, L(-1) = 2: nobody helps, w = (0, 0), theta = 0;
       then a step of 1/2 towards 0 stays.
    b, validation 2: L(3) = 1/2, L(0) = 2, L(-1) = 9/2: w = (0, 0), theta = 3, and stays.
    c has no validation rows: theta = -1, and half of the way to -2 is -1.5.
    With theta = (4, 3, 2):
    a: L(4) = 9/2; b: (9/2 - 2) / 1 = 5/2; c: (9/2 - 1/2) / 2 = 2; w = (5/9, 4/9): 4 - 5/9 - 8/9 = 23/9,
       and half of the way to 0 is 23/18.
    b: L(3) = 1/2; a: below 0; c: (1/2 - 0) / 1: w = (0, 1), theta = 2, and half of the way to 3 is 5/2.
    c: half of the way from 2 to -2 is 0."""
    zero = torch.zeros((3, 3), dtype=torch.float64)
    for theta, expected, P in [((0.0, 3.0, -1.0), (0.0, 3.0, -1.5), zero),
                               ((4.0, 3.0, 2.0), (23 / 18, 2.5, 0.0), zero.new_tensor(
                                   [[0, 5 / 9, 4 / 9], [0, 0, 1], [0, 0, 0]]))]:
        with engine(FedFomo(solver=SGD(lr=0.5)), three(), TASK, **FULL) as e:
            models = state(*theta)._replace(stats=e.server.theta.stats)
            e.training.server = Server(models, zero)
            e.training.store.stage(e.everyone, models, 1)
            e.training.store.write()
            [report] = e.play()
            found = e.server.theta.theta[:, 0]
            torch.testing.assert_close(found, zero.new_tensor(expected), rtol=0, atol=1e-14)
            torch.testing.assert_close(e.server.P, P, rtol=0, atol=1e-14)
            assert_same(e.personal(), e.server.theta)
            assert float(report.info["alone"]) == pytest.approx(float((P.sum(1) == 0).double().mean()))


def facts(m: int, number: int = 1, seed: int = 0) -> Round:
    return Round(seed, number, torch.arange(m), torch.ones(m, dtype=torch.float64), m)


def test_whom_the_server_sends() -> None:
    """Without exploring, the M of largest P; with eps = 1 any by chance. Never a client's own, none twice,
    and the same whoever else is in the cohort."""
    m, M = 30, 4
    P = torch.rand((m, m), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    others = P.clone().fill_diagonal_(-1)
    places = FedFomo(M=M, eps=0.0).places(P, facts(m))
    assert torch.equal(places, others.topk(M).indices)
    explored = FedFomo(M=M, eps=1.0, decay=0.0)
    for number in (1, 2):
        places = explored.places(P, facts(m, number))
        assert not (places == torch.arange(m)[:, None]).any()
        assert all(len({*row}) == M for row in places.tolist())
    assert not torch.equal(places, explored.places(P, facts(m, 1)))
    some = torch.tensor([2, 17])
    assert torch.equal(explored.places(P, facts(m, 2).of(some)), places[some])
    counts = sum(explored.places(P, facts(m, 1, seed)).flatten().bincount(minlength=m) for seed in range(50))
    assert counts.min() > 0.7 * counts.double().mean()


def test_exploring_fades() -> None:
    """The share of places that are not among the M of largest P is about eps_t = eps (1 - decay)^(t - 1),
    less what chance finds among the M: eps_t (1 - M / (m - 1))."""
    m, M = 200, 5
    P = torch.rand((m, m), generator=torch.Generator().manual_seed(0), dtype=torch.float64).fill_diagonal_(-1)
    best = P.topk(M).indices
    method = FedFomo(M=M, eps=0.6, decay=0.1)
    for number in (1, 10):
        places = method.places(P, facts(m, number))
        new = 1 - (places[:, :, None] == best[:, None]).any(2).double().mean()
        assert float(new) == pytest.approx(0.6 * 0.9 ** (number - 1) * (1 - M / (m - 1)), abs=0.05)


def test_who_was_worth_as_much_is_chosen_by_chance() -> None:
    """At the beginning P is zero: without exploring, too, not everybody is sent the first clients."""
    places = FedFomo(M=3, eps=0.0).places(torch.zeros((40, 40), dtype=torch.float64), facts(40))
    assert places.unique().numel() > 30


def test_a_newcomer_begins_at_the_mean() -> None:
    """Mean of (4, 3, 2) is 3, the others' most wanted (P) are b and c, models 3 and 2.
    As a newcomer a: L(3) = 2; b: at distance 0; c: (2 - 1/2) / 1: theta = 2, and half way to 0 is 1."""
    with engine(FedFomo(M=2, solver=SGD(lr=0.5)), three(), TASK, **FULL) as e:
        server = Server(state(4.0, 3.0, 2.0)._replace(stats=e.server.theta.stats), torch.tensor(
            [[0.0, 1, 1], [0, 0, 1], [0.5, 0, 0]], dtype=torch.float64))
        message = e.training.work.algorithm.newcomer(server, e.training.round_of(e.everyone))
        assert message.shared[1].theta[:, 0].tolist() == [2.0, 3.0]
        found = e.backend.run("adapt", e.everyone, 1, message, e.states()).values.theta
        assert float(found[0]) == pytest.approx(1.0)


def test_clients_that_nobody_helps_train_alone() -> None:
    """Where only one client has validation rows, all others are LocalTrain."""
    federation = ragged()
    only = Table.of([federation.validation[0], *[np.zeros(0, np.int64)] * 4])
    federation = dataclasses.replace(federation, validation=only)
    with engine(FedFomo(solver=SGD(lr=0.1)), federation) as e, \
         engine(LocalTrain(SGD(lr=0.1)), federation) as alone:
        e.play(3)
        alone.play(3)
        assert torch.equal(e.states().theta[1:], alone.states().theta[1:])
        assert not torch.equal(e.states().theta[0], alone.states().theta[0])


def test_it_is_refused_without_validation_rows() -> None:
    none = dataclasses.replace(ragged(), validation=Table.of([np.zeros(0, np.int64)] * 5))
    with pytest.raises(UsageError, match=r"fedfomo works with validation rows, and no client has any: set "
                                         r"data\.validation above 0"), engine(FedFomo(), none):
        pass


def test_who_took_part_predicts_without_the_models_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be M models for each client: made for training alone."""
    with engine(FedFomo(M=2), ragged(), "mclr", backend="vectorised") as e:
        e.play()
        monkeypatch.setattr(FedFomo, "broadcast", None)
        assert torch.equal(e.personal().theta, e.states().theta)
        evaluate(e.training, e.backend, e.everyone)


def test_rows_of_the_cohort_are_renewed() -> None:
    rows, new = torch.zeros(3, 2), torch.ones(3, 2).cumsum(0)
    facts = Round(0, 1, torch.tensor([0, 1, 2]), torch.ones(3), 3)
    assert torch.equal(renewed(rows, new, facts), new)
    assert renewed(rows, new[:1], facts.of(torch.tensor([1]))).tolist() == [[0, 0], [1, 1], [0, 0]]
    turned = renewed(rows, new, facts.of(torch.tensor([2, 1, 0])))
    assert torch.equal(turned, new.flip(0))

"""Weight averaging at the end, against means that are taken by hand; training itself does not change."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import descant
from descant import UsageError
from descant.algorithms import CGPFL, Ditto, FedAvg, FedPer, FedRep, pFedHN, pFedMe
from descant.core.tree import map_tree, take
from descant.engine.averaging import averaged
from descant.testing import check_algorithm
from helpers import assert_same, engine, ragged

ROUNDS, LAST = 6, 3
FIRST = ROUNDS - LAST + 1


def mean(trees: list[Any]) -> Any:
    return map_tree(lambda *each: torch.stack(each).mean(0), *trees)


def test_the_global_model_is_the_mean_of_the_last_rounds():
    with engine(FedAvg(), ragged(), cohort=2) as plain, \
            engine(averaged(FedAvg(), FIRST), ragged(), cohort=2) as found:
        models = []
        for number in range(1, ROUNDS + 1):
            plain.play(1)
            found.play(1)
            models.append(plain.server)
            assert_same(found.server.now, plain.server)  # training goes on as ever
            assert_same(found.model, mean(models[FIRST - 1 :]) if number >= FIRST else plain.server, 1e-12)


@pytest.mark.parametrize("backend", ["loop", "vectorised"])
def test_personal_models_are_means_over_the_rounds_of_a_client(backend):
    """Ditto's personal model is the client's state."""
    method = Ditto(lam=0.3)
    with engine(method, ragged(), cohort=2, backend=backend) as plain, \
            engine(averaged(method, FIRST), ragged(), cohort=2, backend=backend) as found:
        kept: dict[int, list[Any]] = {}
        for number in range(1, ROUNDS + 1):
            plain.play(1)
            found.play(1)
            if number >= FIRST:
                for client in plain.training.sample()[0].tolist():
                    kept.setdefault(client, []).append(take(plain.states(), client))
        personal = found.personal()
        assert 0 < len(kept) <= len(found.everyone)
        for client in found.everyone.tolist():
            own = mean(kept[client]) if client in kept else take(plain.states(), client)
            assert_same(take(personal, client), own, 1e-12)


@pytest.mark.thorough
def test_an_extended_run_forgets_the_means_of_before(tmp_path):
    settings: dict[str, Any] = {
        "federation": descant.federation("digits", partition="classes", clients=5), "cohort": 2,
        "local": {"steps": 2}, "backend": "vectorised", "average": 3, "eval": {"every": 1}}
    whole = descant.run("ditto", rounds=8, **settings)
    descant.run("ditto", rounds=4, out=tmp_path / "run", **settings)
    later = descant.resume(tmp_path / "run", rounds=8)
    for client in range(5):
        assert_same(later.personal(client, "last"), whole.personal(client, "last"))
    assert later.history[-1]["personal"] == whole.history[-1]["personal"]
    plain = descant.run("ditto", rounds=8, **settings | {"average": None})
    assert [row["loss"] for row in plain.history] == [row["loss"] for row in whole.history]
    assert plain.history[-1]["personal"] != whole.history[-1]["personal"]
    assert later.personal_model(0, "last") is not None


@pytest.mark.parametrize("method", [
    FedAvg(), FedPer(shared=["*weight"]), pFedMe(K=1),
    *(pytest.param(each, marks=pytest.mark.slow) for each in (
        FedRep(shared=["*weight"]), CGPFL(K=2), pFedHN()))], ids=lambda method: method.name)
def test_it_keeps_to_the_rules_of_a_method(method, monkeypatch):
    made = averaged(method, 2)
    monkeypatch.setattr(type(made), "name", "averaged_method")  # that of a method is taken
    check_algorithm(made, skip=["class"])  # which a user's class is to be


def test_it_can_be_sent_to_another_process():
    made = averaged(Ditto(lam=0.3), 4)
    again = pickle.loads(pickle.dumps(made))
    assert type(again) is type(made)
    assert again == made
    assert isinstance(made, Ditto)


def test_what_is_refused():
    federation = ragged()
    with pytest.raises(UsageError, match=r"average = 9 is more than train.rounds = 5"):
        descant.run("fedavg", federation=federation, rounds=5, average=9)
    with pytest.raises(UsageError, match=r"train.patience may end a run"):
        descant.run("fedavg", federation=federation, rounds=5, average=2, patience=2)

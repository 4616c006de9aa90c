"""Attackers and the robust server in rounds: what each does, in which methods, on which backends."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

import descant
from descant.algorithms import ALGORITHMS
from descant.algorithms.fedavg import FedAvg
from descant.core import fields, robust
from descant.core.algorithm import Round
from descant.core.tree import leaves
from descant.core.vector import Model
from descant.engine.attack import Attack, hidden
from descant.engine.robust import Robust, capped
from descant.errors import UsageError
from descant.experiment.config import Experiment
from descant.experiment.run import Run
from helpers import on_any_model, quadratics, ragged, unbalanced

FLIP = {"kind": "sign_flip", "scale": 10.0, "share": 0.2}


@dataclass(frozen=True)
class Recorded(FedAvg):
    """FedAvg, which writes down what its server is given."""

    name: ClassVar[str] = "recorded"
    seen: ClassVar[list[tuple[Model, Round]]] = []

    def aggregate(self, server: Model, uploads: Model, round: Round) -> tuple[Model, dict[str, Any]]:
        self.seen.append((uploads, round))
        return super().aggregate(server, uploads, round)


def played(method: Any = "fedavg", clients: int = 10, rounds: int = 1, **more: Any) -> Run:
    chosen: dict[str, Any] = {"backend": "vectorised", "dtype": "float64", "local": {"steps": 3},
                              "batch": 2} | more
    federation = unbalanced(quadratics(clients, rows=8), [1 + k % 4 for k in range(clients)])
    return descant.run(method, federation=federation, model="quadratic", rounds=rounds, progress=False,
                       **chosen)


def uploads(**more: Any) -> tuple[Tensor, Round]:
    Recorded.seen.clear()
    played(Recorded(), **more)
    seen, round = Recorded.seen[-1]
    return seen.theta, round


def start(run: Run) -> Tensor:
    return run.setup.task.init().theta


# -- attackers -----------------------------------------------------------------------------------------


def test_who_attacks_follows_from_the_seed() -> None:
    attack = Attack(share=0.3)
    first = attack.attackers(10, 0)
    assert len(set(first.tolist())) == 3
    np.testing.assert_array_equal(first, attack.attackers(10, 0))
    assert {tuple(attack.attackers(10, seed)) for seed in range(8)} != {tuple(first)}
    for share, who in ((0.01, "nobody"), (0.99, "everyone")):
        with pytest.raises(UsageError, match=who):
            Attack(share=share).attackers(10, 0)


def test_what_attackers_send() -> None:
    changes = torch.tensor([[1.0, 2.0], [3.0, -2.0], [8.0, 9.0]])
    liars = torch.tensor([False, False, True])
    mean, std = torch.tensor([2.0, 0.0]), torch.tensor([1.0, 2.0])

    def sent(**how: Any) -> Tensor:
        return Attack(**how).forged(changes, liars)[2]

    torch.testing.assert_close(sent(kind="sign_flip"), -changes[2])
    torch.testing.assert_close(sent(kind="sign_flip", scale=10.0), -10 * changes[2])
    torch.testing.assert_close(sent(kind="scaled"), 10 * changes[2])
    torch.testing.assert_close(sent(kind="inner_product", scale=0.5), -0.5 * mean)
    torch.testing.assert_close(sent(kind="alie", scale=1.5), mean - 1.5 * std)
    torch.testing.assert_close(sent(kind="label_flip"), changes[2])


def test_alie_s_own_scale_is_the_paper_s() -> None:
    assert hidden(50, 24) == pytest.approx(1.43, abs=0.01)  # 24 of 50: s = 2, the quantile of 24/26
    assert hidden(10, 2) == 0  # s = 4: the quantile of 4/8
    assert hidden(20, 9) == pytest.approx(0.908, abs=0.001)  # s = 2: the quantile of 9/11


@pytest.mark.thorough
def test_a_round_with_attackers_has_their_forged_uploads() -> None:
    honest, _ = uploads()
    wrong, round = uploads(attack=FLIP)
    run = played(Recorded(), attack=FLIP)
    liars = np.isin(round.cohort, run.setup.attackers)
    w0 = start(run)
    torch.testing.assert_close(wrong[~liars], honest[~liars])
    torch.testing.assert_close(wrong[liars], w0 - 10 * (honest[liars] - w0))


def test_labels_are_flipped_in_the_attackers_training_rows_alone() -> None:
    federation = descant.federation("digits", partition="classes", clients=10, classes_per_client=3)
    attack = Attack(kind="label_flip", share=0.3)
    poisoned = attack.poisoned(federation, 0)
    wrong = torch.nonzero(poisoned.y != federation.y).flatten().numpy()
    theirs = np.concatenate([federation.train[client] for client in attack.attackers(10, 0)])
    assert set(wrong) <= set(theirs)
    np.testing.assert_array_equal(poisoned.y[theirs], 9 - federation.y[theirs])
    with pytest.raises(UsageError, match="real numbers"):
        attack.poisoned(quadratics(10), 0)
    with pytest.raises(UsageError, match="leave it out"):
        Attack(kind="label_flip", scale=2.0)


@pytest.mark.parametrize("more", [{}, {"unseen": 2}])
def test_honest_clients_are_scored(more: dict[str, int], tmp_path: Path) -> None:
    federation = descant.federation("digits", partition="classes", clients=12, classes_per_client=3, **more)
    run = descant.run("fedavg", federation=federation, rounds=1, backend="vectorised", progress=False,
                      attack=FLIP, out=tmp_path / "run")
    attackers = {int(client) for client in run.setup.attackers}
    assert run.summary["attackers"] == [federation.names[client] for client in sorted(attackers)]
    scored = {int(line.split(",")[1]) for line in (tmp_path / "run/clients.csv").read_text().splitlines()[1:]}
    assert scored == set(range(12)) - attackers


@pytest.mark.parametrize(("backend", "attack"), [("loop", FLIP),
                                                 ("processes", {"kind": "alie", "scale": 1.5})])
def test_backends_agree(backend: str, attack: dict[str, Any]) -> None:
    both = [played("ditto", rounds=3, attack=attack, robust={"rule": "norm"}, backend=name)
            for name in (backend, "vectorised")]
    for (name, a), (_, b) in zip(*(leaves(run.snapshot("last").server) for run in both), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.thorough
def test_a_run_with_attackers_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    table = {"data": {"dataset": "digits", "partition": "classes", "clients": 10, "classes_per_client": 3},
             "model": {"name": "mclr"}, "algorithm": {"name": "fedavg"},
             "train": {"rounds": 4, "backend": "vectorised", "local": {"steps": 2}},
             "attack": {"kind": "label_flip", "share": 0.3}, "robust": {"rule": "multi_krum", "share": 0.3}}
    from descant.experiment import run as runs
    from descant.experiment.run import Setup

    whole = runs.start(Setup.of(Experiment.parse(table)), tmp_path / "whole")
    half = Experiment.parse(table | {"train": {**table["train"], "rounds": 2}})
    runs.start(Setup.of(half), tmp_path / "half")
    again = runs.resume(tmp_path / "half", rounds=4)
    for (_, a), (_, b) in zip(leaves(whole.snapshot("last").server), leaves(again.snapshot("last").server),
                              strict=True):
        assert torch.equal(a, b)
    assert "label_flip" in (tmp_path / "half/config.toml").read_text()


# -- the robust server ---------------------------------------------------------------------------------


def expected(how: Robust, rows: Tensor, round: Round, w0: Tensor) -> Tensor:
    """The mean of a round by the definition of the rule."""
    sizes = round.sizes.clamp(max=how.count * float(round.sizes.median()))
    weights, n = sizes / sizes.sum(), len(rows)
    wrong = int(np.ceil(how.share * n))
    if how.rule == "norm":
        length = (rows - w0).norm(dim=1)
        limit = how.clip * length.sort().values[n // 2]
        return w0 + weights @ ((rows - w0) * (limit / length).clamp(max=1)[:, None])
    if how.rule in ("krum", "multi_krum"):
        at = robust.krum(rows, wrong, 1 if how.rule == "krum" else n - wrong)
        return weights[at] @ rows[at] / weights[at].sum()
    rules = {"median": robust.median, "geometric": robust.geometric_median,
             "trimmed": lambda rows, weights: robust.trimmed_mean(rows, weights, how.share)}
    return rules[how.rule](rows, weights)


@pytest.mark.parametrize("rule", ["norm", "median", "trimmed", "geometric", "krum", "multi_krum"])
def test_the_server_s_model_is_the_rule_s(rule: Any) -> None:
    how = Robust(rule=rule)
    rows, round = uploads(attack=FLIP)
    run = played("fedavg", attack=FLIP, robust=fields.dump(how))
    found = run.setup.algorithm.global_model(run.snapshot("last").server)
    assert found is not None
    torch.testing.assert_close(found.theta, expected(how, rows, round, start(run)), rtol=1e-6, atol=1e-9)


def test_bounds_that_do_not_bind_change_no_bit() -> None:
    plain, wide = played("ditto", rounds=3), played("ditto", rounds=3, robust={"rule": "norm", "clip": 1e6})
    for (_, a), (_, b) in zip(leaves(plain.snapshot("last").server), leaves(wide.snapshot("last").server),
                              strict=True):
        assert torch.equal(a, b)


def test_nobody_counts_for_much_more_than_the_others() -> None:
    facts = Round(0, 1, torch.arange(5), torch.tensor([10.0, 10.0, 12.0, 8.0, 10_000.0]), 5)
    assert capped(facts, 3.0).sizes.tolist() == [10, 10, 12, 8, 30]
    assert capped(facts, 3.0).most == pytest.approx(0.6)
    assert capped(facts._replace(most=0.5), 3.0).most == 0.5


def test_krum_leaves_clients_out_and_control_variates_stay_their_mean() -> None:
    run = played("scaffold", rounds=4, robust={"rule": "multi_krum"}, attack=FLIP)
    snapshot = run.snapshot("last")
    states = snapshot.store.read(np.arange(10))
    assert all(row["info"]["robust"] == {"left_out": 2} for row in run.history)
    # what attackers say they changed is not what they changed: without them the mean is exact
    honest = played("scaffold", rounds=4, robust={"rule": "multi_krum"}).snapshot("last")
    torch.testing.assert_close(honest.server.c, honest.store.read(np.arange(10)).mean(0))
    assert len(states) == 10


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_method_takes_a_rule_or_says_which_fits(name: str) -> None:
    method = ALGORITHMS[name](**on_any_model(name))
    settings = {"federation": ragged(), "rounds": 1, "backend": "vectorised", "progress": False, "batch": 4,
                "local": {"steps": 2}, "attack": {"kind": "sign_flip", "share": 0.2}}
    fits = {"norm": not method.tracking, "median": not (method.tracking or method.needs_rows),
            "multi_krum": True}
    for rule, is_fit in fits.items():
        with nullcontext() if is_fit else pytest.raises(UsageError, match='use "'):
            descant.run(method, robust={"rule": rule, "share": 0.1}, **settings)


@pytest.mark.parametrize(("method", "rule", "clients", "words"), [
    ("scaffold", "median", 10, 'use "krum" or "multi_krum"'),
    ("scaffold", "norm", 10, 'use "krum" or "multi_krum"'),
    ("fedamp", "geometric", 10, "one by one"),
    ("fedavg", "krum", 4, "needs at least 5 clients"),
])
def test_what_does_not_fit_is_refused(method: str, rule: str, clients: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        played(method, clients, robust={"rule": rule})


@pytest.mark.parametrize(("section", "words"), [
    ({"attack": {"kind": "shout"}}, "attack.kind"),
    ({"attack": {"share": 1.0}}, "attack.share"),
    ({"robust": {"rule": "mode"}}, "robust.rule"),
    ({"robust": {"share": 0.5}}, "robust.share"),
    ({"robust": {"klip": 2}}, "klip"),
    ({"robust": "median"}, "must hold the fields"),
])
def test_wrong_fields_are_named(section: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        played(**section)


def test_a_single_client_is_its_own_median() -> None:
    alone, plain = (played("fedavg", 1, robust=how) for how in ({"rule": "median"}, None))
    torch.testing.assert_close(alone.snapshot("last").server, plain.snapshot("last").server)

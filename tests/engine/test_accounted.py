"""What is accounted for is what is run: how often a row is looked at, by which coins, and who is in a sum."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from descant.algorithms import FedAvg
from descant.core import random
from descant.core.federation import Federation
from descant.core.privacy.settings import Privacy
from descant.core.tree import leaves
from descant.engine import batches as batches_module
from descant.engine import draws
from descant.engine.account import Account, Queries
from descant.engine.batches import ClientTensors, LocalWork, Plan, _lengths, _shares, plan_chunk
from descant.engine.cohort import sampled
from descant.engine.draws import Coins, order_of, toss
from descant.engine.pool import Pool
from descant.engine.protect import account_of, settled
from descant.engine.settings import Train
from descant.errors import UsageError
from descant.experiment import run as runs
from descant.experiment.config import Experiment
from descant.experiment.run import Setup
from helpers import make_work, ragged

SIZES = (1, 2, 5, 11, 20)
WORK = (LocalWork(steps=1), LocalWork(steps=5), LocalWork(steps=13), LocalWork(epochs=1), LocalWork(epochs=3))


@pytest.mark.parametrize(("per_step", "disjoint"), [(1, False), (2, False), (2, True), (3, True)])
def test_no_row_is_looked_at_more_often_than_is_accounted_for(per_step: int, disjoint: bool) -> None:
    """The batches of a round as they are drawn. A row that is k times in one batch moves its sum by k clips,
    which costs k^2 looks: so the squares are counted. By coins, the largest rate and the most batches."""
    for size in SIZES:
        for batch in (1, 3, 7, "full"):
            for local in WORK:
                rate, batches, passes = Queries((1,) * per_step, disjoint).of(
                    Train(batch=batch, local=local), size)
                shares = _shares(np.arange(size), per_step if disjoint else 1)
                wide = size if batch == "full" else batch
                lengths = _lengths(shares, wide, local, per_step)
                order = order_of(np.random.default_rng(0), shares, lengths, False)
                looks = np.zeros(size, np.int64)
                for rows in np.split(order, np.cumsum(lengths)[:-1]):
                    looks += np.bincount(rows, minlength=size) ** 2
                assert looks.max() <= passes
                found = toss(random.stream(0, "coins.local", 1, 0), shares, wide, len(lengths))
                assert max(found.expected / len(share) for share in shares) <= rate + 1e-12
                assert -(-len(found.lengths) // len(shares)) <= batches


@pytest.mark.parametrize("name", ["fedavg", "ditto", *(
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("pfedme", "scaffold", "dichotomous", "fedrep", "apfl", "l2gd", "pfedhn", "pfedbred"))])
def test_nothing_but_the_sums_depends_on_the_coins(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clip and noise of next to nothing, who is in a batch does not show, nor how many are: a coin
    that showed would hide nobody. All heads on one side, none on the other."""
    monkeypatch.setattr(Account, "spent", lambda self, number: 1.0)
    setup = Setup.of(Experiment.parse({
        "data": {"dataset": "digits", "partition": "iid", "clients": 3}, "algorithm": {"name": name},
        "model": {"name": "dnn", "hidden": 5}, "eval": {"every": 2},
        "train": {"rounds": 2, "batch": 20, "local": {"steps": 2}, "dtype": "float64", "backend": "loop"},
        "privacy": {"noise": 1e-3, "clip": 1e-9}}))

    def model(heads: float) -> Tensor:
        def tossed(coins: Any, shares: list[np.ndarray], batch: int, count: int) -> Any:
            found = toss(coins, shares, batch, count)
            if heads == 0:
                return found._replace(lengths=0 * found.lengths, rows=found.rows[:0])
            turns = [shares[k % len(shares)] for k in range(count)]
            return found._replace(lengths=np.array([*map(len, turns)], np.int64),
                                  rows=np.concatenate([shares[0][:0], *turns]))

        monkeypatch.setattr(batches_module, "toss", tossed)
        return torch.cat([leaf.flatten() for _, leaf in leaves(runs.start(setup).snapshot("last").server)])

    none, every = model(0.0), model(1.0)
    assert torch.allclose(none, every, rtol=0, atol=1e-7)


def _planned(coins: Coins) -> tuple[Pool, Plan, ClientTensors]:
    """Three clients with 30 rows each, six batches of 9 rows by coins."""
    rng = np.random.default_rng(0)
    federation = Federation.from_arrays(rng.standard_normal((90, 2)), np.arange(90) % 2, np.arange(90) % 3,
                                        test=0.0, validation=0.0)
    pool = Pool.of(federation, torch.float64)
    return pool, *plan_chunk(
        pool, np.arange(3), seed=0, purpose="local", number=1, batch=9,
        work=LocalWork(steps=6), per_step=1, dtype=torch.float64, draws=True, splits=(), coins=coins)


def test_batches_by_coins_are_of_their_shares_in_turn_and_filled_up_evenly() -> None:
    """The coins of all steps are looked at together. Whatever fills a chunk up, a client has its own rows."""
    shares = [np.arange(0, 30, 2), np.arange(1, 30, 2)]
    stream = random.stream(0, "coins.local", 1, 7)
    heads = [stream.random((count, 15)) < 4 / 15 for count in (3, 2)]
    found = toss(random.stream(0, "coins.local", 1, 7), shares, 4, 5)
    batches = np.split(found.rows, np.cumsum(found.lengths)[:-1])
    for k, rows in enumerate(batches):
        assert rows.tolist() == shares[k % 2][heads[k % 2][k // 2]].tolist()
    assert toss(random.stream(0, "coins.local", 1, 7), shares, 4, 0).rows.tolist() == []
    pool, plan, tensors = _planned("stream")
    assert all(width % 8 == 0 for width in plan.widths)
    for k in range(3):  # the pool has its own numbers of a client's rows
        mine = toss(random.stream(0, "coins.local", 1, k), [pool.train.table[k]], 9, 6)
        theirs = zip(tensors.rows[k].split(plan.widths), tensors.lengths[k], strict=True)
        given = [rows[:n] for rows, n in theirs]
        assert torch.cat(given).tolist() == mine.rows.tolist()


def test_the_coins_of_a_real_federation_do_not_come_from_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "secret_uniform", lambda count: np.zeros(count))  # all heads
    shares = [np.arange(40)]
    assert (toss(None, shares, 4, 50).lengths == 40).all()
    assert (toss(random.stream(0, "coins.local", 1, 0), shares, 4, 50).lengths < 40).all()
    assert (_planned("secret")[2].lengths == 30).all()
    assert (_planned("stream")[2].lengths < 30).all()


def test_who_drops_out_of_a_cohort_of_coins_makes_room_for_nobody() -> None:
    """Each client is in a sum by coins of its own: the number has the variance of a binomial one. A fixed
    share of a cohort that drops out would have a third of it."""
    federation = Federation.from_arrays(np.zeros((200, 2), np.float32), np.arange(200) % 2,
                                        np.arange(40).repeat(5), test=0.0, validation=0.0)
    train, privacy = Train(cohort=20, drop=0.5), Privacy(unit="client", noise=1.0)
    counts = np.array([len(sampled(federation, train, k, privacy)[0]) for k in range(1, 2001)])
    assert counts.mean() == pytest.approx(10, abs=5 * (7.5 / 2000) ** 0.5)
    assert counts.var() == pytest.approx(7.5, rel=5 * (2 / 2000) ** 0.5)


def test_the_step_that_looks_most_is_accounted_for() -> None:
    """A method of somebody's own may look again from its second step on, or at a batch that it has kept."""

    @dataclasses.dataclass(frozen=True)
    class Second(FedAvg):
        later: bool = False

        def local(self, task: Any, message: Any, state: Any, data: Any) -> Any:
            kept: list[Any] = []

            def step(model: Any, batch: Any) -> Any:
                for _ in range(3 if kept else 1):
                    model = model._replace(theta=model.theta - 0.1 * task.grad(model, batch).theta)
                kept.append(batch)
                return model

            model = data.scan(step, message.shared)
            if self.later:
                task.grad(model, kept[-1])
            return model, state

    privacy = Privacy(noise=1.0, sampling="known")
    assert account_of(make_work(Second(), ragged()), Train(), privacy).queries.per_batch == (3,)
    with pytest.raises(UsageError, match="the gradient of a batch outside its step"):
        account_of(make_work(Second(later=True), ragged()), Train(), privacy)


def test_a_first_round_that_asks_everybody_is_refused() -> None:
    @dataclasses.dataclass(frozen=True)
    class Opening(FedAvg):
        def opens(self) -> bool:
            return True

    with pytest.raises(UsageError, match="its first round asks every client"):
        settled(make_work(Opening(), ragged()), Train(), Privacy(unit="client", noise=1.0, sampling="known"))

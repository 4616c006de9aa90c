"""What epsilon the sites of a federation can hope for."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from descant.engine.account import Account
from descant.engine.protect import account_of
from descant.experiment.config import Experiment
from descant.experiment.setup import Setup

NOISES = (0.5, 1.0, 2.0, 4.0)


class Site(NamedTuple):
    """One of the sites, and what the whole run would cost its rows."""

    which: str
    rows: int
    epsilons: dict[float, float]  # noise -> epsilon


def sites(experiment: Experiment) -> list[Site]:
    """The smallest, the median and the largest site, each taking part as often as it will; with
    unit = "client", what holds for all."""
    privacy = experiment.privacy
    assert privacy is not None
    setup = Setup.of(dataclasses.replace(experiment, privacy=None))
    account = account_of(setup.work(), setup.train, privacy)
    noises = sorted({*NOISES, *([] if privacy.noise is None else [privacy.noise])})
    if privacy.unit == "client":
        return [Site("every client", int(np.median(account.sizes)), _spent(account, noises))]
    order = np.argsort(account.sizes, kind="stable")
    chosen = {"smallest": order[0], "median": order[len(order) // 2], "largest": order[-1]}
    rounds = account.times(setup.train.rounds)
    return [Site(which, int(account.sizes[client]), _spent(_alone(account, int(client), rounds), noises))
            for which, client in chosen.items()]


def _alone(account: Account, client: int, rounds: np.ndarray) -> Account:
    """The account of one client, in as many rounds as it trains."""
    train = dataclasses.replace(account.train, rounds=max(1, int(rounds[client])))
    return dataclasses.replace(account, train=train, sizes=account.sizes[client : client + 1],
                               trained=lambda number: np.zeros(1, np.int64))


def _spent(account: Account, noises: list[float]) -> dict[float, float]:
    return {noise: account.largest(account.train.rounds, noise) for noise in noises}

"""A bound on the clients' contributions that follows a quantile of their norms (Andrew et al. 2021).

Each client tells whether it is within the bound of the round, as +-1/2, so that one client changes the sum by
1/2 at most. The sum gets noise of its own, for which the noise on the contributions pays
(`Mechanism.sum_noise`). What follows from the noised sum costs nothing more.
"""

from __future__ import annotations

import math

import torch

from descant.core.privacy.noise import normals
from descant.core.privacy.settings import Mechanism, Quantile
from descant.core.random import stream

LEAST, MOST = 1e-12, 1e12  # of a bound: noise alone may drive it for many rounds


def first_bound(mechanism: Mechanism | None) -> float | None:
    """The bound of the first round, where clients are protected."""
    if mechanism is None or mechanism.unit != "client":
        return None
    return mechanism.clip.start if isinstance(mechanism.clip, Quantile) else mechanism.clip


def noised_votes(mechanism: Mechanism, clients: int, shortened: int, seed: int, number: int) -> float:
    """The noised sum of +-1/2 over the clients of a round, of which some were shortened."""
    assert mechanism.count_noise is not None
    generator = None if mechanism.secret else stream(seed, "server.privacy.count", number)
    noise = float(normals((1,), torch.float64, generator))
    return clients / 2 - shortened + mechanism.count_noise * noise


def share_within(votes: float, mechanism: Mechanism) -> float:
    """The share of the clients within the bound, as the noised sum tells it. The divisor is the number of
    clients that was expected: that which came is a secret."""
    return min(max(0.5 + votes / mechanism.cohort, 0.0), 1.0)


def followed(bound: float, votes: float, mechanism: Mechanism) -> float:
    """The bound of the next round."""
    rule = mechanism.clip
    if not isinstance(rule, Quantile):
        return bound
    grown = bound * math.exp(-rule.lr * (share_within(votes, mechanism) - rule.quantile))
    return min(max(grown, LEAST), MOST)

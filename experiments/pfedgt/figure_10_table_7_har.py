"""One user's gamma is varied and the others' stays at 0.8; on HAR in place of CIFAR-10, for the person with
most and the one with fewest rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from _har import accuracy, train

import descant
from descant import SGD
from descant.algorithms import pFedGT
from descant.comparison.reproduce.claims import Claim, fact, of

SOURCE = "pFedGT, Figure 10 and Table 7, on HAR: one user's gamma"
SEEDS = 3
GAMMAS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9)
POINTS = [{"user": user, "gamma": gamma} for user in ("MAX", "MIN") for gamma in GAMMAS]


def measure(seed: int, user: str, gamma: float) -> dict[str, float]:
    sizes = descant.federation("har", seed=0, split=seed, test=0.25, validation=0.0).train.sizes
    client = int(sizes.argmax() if user == "MAX" else sizes.argmin())
    gammas = [0.8] * len(sizes)
    gammas[client] = gamma
    run = train(pFedGT(gamma=tuple(gammas), solver=SGD(lr=0.1)), seed)
    return {"accuracy": accuracy(run, client)}


def claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    found = []
    printed = {"MAX": "86.59 % at 0.1, 93.66 % at 0.5", "MIN": "71.82 % at 0.1, 90.38 % at 0.8"}
    for user, there in printed.items():
        means = {gamma: float(np.mean(of(rows, "accuracy", user=user, gamma=gamma))) for gamma in GAMMAS}
        best = max(means, key=lambda gamma: means[gamma])
        found.append(fact(f"{user} user: a small gamma is worst (CIFAR-10: {there})", ", ".join(
            f"{gamma:g}: {100 * mean:.1f} %" for gamma, mean in means.items()),
            min(means, key=lambda gamma: means[gamma]) == GAMMAS[0]))
        found.append(fact(f"{user} user: an inner gamma is best", f"{best:g}", GAMMAS[0] < best < GAMMAS[-1]))
    return found

"""The oracle of Eq. 1 for single users, on HAR in place of CIFAR-10: interpolation beats both ends.

A user's model is trained with everyone's data on gamma f_i + (1 - gamma) mean f_j, 600 steps on batches
of 128, for the first six people. gamma = 1 is training alone, gamma = 0 one model for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import descant
from descant import SGD
from descant.comparison.reproduce.claims import Claim, fact, of
from descant.models import make_task
from descant.theory.oracle import oracle

SOURCE = "pFedGT, Figure 1, on HAR: the oracle of gamma"
SEEDS = 3
GAMMAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
POINTS = [{"gamma": gamma} for gamma in GAMMAS]
USERS = 6


def measure(seed: int, gamma: float) -> dict[str, float]:
    import torch

    federation = descant.federation("har", seed=0, split=seed, test=0.25, validation=0.0)
    task = make_task("har_cnn", federation, loss=None, dtype=torch.float32, seed=seed, initial=None)
    found = [oracle(task, federation, client, gamma, steps=600, batch=128, solver=SGD(lr=0.1), seed=seed)
             for client in range(USERS)]
    return {"accuracy": float(np.mean([each.test["accuracy"] for each in found]))}


def claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    means = {gamma: float(np.mean(of(rows, "accuracy", gamma=gamma))) for gamma in GAMMAS}
    inner = max(GAMMAS[1:-1], key=lambda gamma: means[gamma])
    said = ", ".join(f"{gamma:g}: {100 * mean:.1f} %" for gamma, mean in means.items())
    return [fact("target interpolation is ahead of training alone (gamma = 1)", said,
                 means[inner] > means[1.0]),
            fact("target interpolation is ahead of one model for all (gamma = 0)", f"best at {inner:g}",
                 means[inner] > means[0.0])]

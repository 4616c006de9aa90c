"""The oracle of Eq. 1 for single users, on HAR in place of CIFAR-10: interpolation beats both ends.

A user's model is trained with everyone's data on gamma f_i + (1 - gamma) mean f_j. gamma = 1 is training
alone, gamma = 0 one model for all. The inner gamma is chosen by the user's validation rows, a fifth of those
that are not tested. The paper shows one user; here are the first six people, and their mean. 600 steps on
batches of 128 at learning rate 0.1 are ours: the paper names neither. No method plays: neither our pFedGT
nor Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import descant
from descant import SGD
from descant.comparison.reproduce.claims import Claim, of, ordering
from descant.models import make_task
from descant.theory.oracle import oracle

SOURCE = "pFedGT, Figure 1, on HAR: the oracle of gamma"
SEEDS = 3
GAMMAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
POINTS = [{"gamma": gamma} for gamma in GAMMAS]
USERS = 6


def measure(seed: int, gamma: float) -> dict[str, float]:
    import torch

    federation = descant.federation("har", seed=0, split=seed, test=0.25, validation=0.2)
    task = make_task("har_cnn", federation, loss=None, dtype=torch.float32, seed=seed, initial=None)
    found = [oracle(task, federation, client, gamma, steps=600, batch=128, solver=SGD(lr=0.1), seed=seed)
             for client in range(USERS)]
    return {f"{name} {user}": getattr(each, name)["accuracy"] for user, each in enumerate(found)
            for name in ("test", "validation")}


def accuracies(rows: Sequence[dict[str, Any]], which: str, gamma: float) -> np.ndarray:
    """[users, repetitions]"""
    return np.array([of(rows, f"{which} {user}", gamma=gamma) for user in range(USERS)])


def claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    inner = GAMMAS[1:-1]
    test, validation = (np.stack([accuracies(rows, which, gamma) for gamma in inner])
                        for which in ("test", "validation"))
    chosen = np.take_along_axis(test, validation.argmax(0)[None], 0)[0].mean(0)
    ends = {gamma: accuracies(rows, "test", gamma).mean(0) for gamma in (1.0, 0.0)}
    return [ordering(f"target interpolation is ahead of {name} (gamma = {gamma:g})", chosen.tolist(),
                     ends[gamma].tolist(), lower=False, words=("inner gamma", f"gamma = {gamma:g}"))
            for gamma, name in ((1.0, "training alone"), (0.0, "one model for all"))]

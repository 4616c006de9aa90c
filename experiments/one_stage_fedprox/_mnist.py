"""MNIST over the rounds: 10 clients of 180 training rows, 5 epochs a round, 20 rounds, step size 0.01. The
training loss of the clients' own models on their own rows is the loss that a round reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import descant
from descant.algorithms import OneStageFedProx
from descant.comparison.reproduce.claims import Claim, of, ordering

EARLY = 5


def losses(seed: int, classes: int, lam: float, model: str, batch: int) -> dict[str, float]:
    federation = descant.federation(
        "mnist", partition="classes", clients=10, classes_per_client=classes, sizes="uniform", smallest=240,
        largest=240, seed=seed, test=0.25, validation=0.0)
    run = descant.run(OneStageFedProx(lam=lam, eta=0.01, weights="samples"), federation=federation,
                      model=model, rounds=20, batch=batch, local={"epochs": 5}, backend="vectorised",
                      seed=seed, eval={"every": 20})
    return {"early": run.history[EARLY - 1]["loss"], "last": run.history[-1]["loss"]}


def faster(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    """The smaller lambda, the lower the loss is early."""
    return [ordering(f"{classes} classes, round {EARLY}: {less} lambda has a lower training loss than {more}",
                     *(of(rows, "early", classes=classes, lam=lam) for lam in (less, more)),
                     words=(less, more))
            for classes in (2, 10) for less, more in (("small", "medium"), ("medium", "large"))]

"""MNIST with logistic regression over the rounds: smaller lambda converges faster, above all early.

10 clients of 180 training rows, 5 epochs a round, batches of 32, 20 rounds, step size 0.01. The training
loss of the clients' own models on their own rows is the loss that a round reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import descant
from descant.algorithms import OneStageFedProx
from descant.comparison.reproduce.claims import Claim, of, ordering

SOURCE = "One-stage FedProx, Figures 1(e) and 4(b), MNIST-Logit"
SEEDS = 5
LAMS = {"small": 0.5, "medium": 1.5, "large": 2.5}
POINTS = [{"classes": classes, "lam": lam} for classes in (2, 10) for lam in LAMS]
EARLY = 5


def measure(seed: int, classes: int, lam: str) -> dict[str, float]:
    federation = descant.federation(
        "mnist", partition="classes", clients=10, classes_per_client=classes, sizes="uniform", smallest=240,
        largest=240, seed=seed, test=0.25, validation=0.0)
    run = descant.run(OneStageFedProx(lam=LAMS[lam], eta=0.01, weights="samples"), federation=federation,
                      model="mclr", rounds=20, batch=32, local={"epochs": 5}, backend="vectorised", seed=seed,
                      eval={"every": 20})
    return {"early": run.history[EARLY - 1]["loss"], "last": run.history[-1]["loss"]}


def claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    return [ordering(f"{classes} classes, round {EARLY}: {less} lambda has a lower training loss than {more}",
                     *(of(rows, "early", classes=classes, lam=lam) for lam in (less, more)),
                     words=(less, more))
            for classes in (2, 10) for less, more in (("small", "medium"), ("medium", "large"))]

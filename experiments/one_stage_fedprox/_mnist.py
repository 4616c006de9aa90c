"""MNIST over the rounds: 10 clients of 180 training rows (of the authors' code; the paper does not say),
5 epochs a round, 20 rounds (the paper says "20 total runs"), step size 0.01. The training loss is that
of the clients' own models on their own training rows after a round.

The paper says that smaller lambda converges faster, of Figure 4(b) above all early. "A lower training loss
after 5 rounds" stands for it, and is weak: with smaller lambda the loss of own models on own rows also ends
lower, so that it would be lower at the same speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import descant
from descant.algorithms import OneStageFedProx
from descant.comparison.reproduce.claims import Claim, of, ordering
from descant.core.task import inputs
from descant.experiment.run import Run

ROUNDS, EARLY = 20, 5
EPOCHS = (1, 5, 20)  # of Figure 6; the paper does not say which


def losses(seed: int, classes: int, lam: float, model: str, batch: int, epochs: int = 5) -> dict[str, float]:
    """Training loss early and at the end, and the test loss of the global model at the end."""
    federation = descant.federation(
        "mnist", partition="classes", clients=10, classes_per_client=classes, sizes="uniform", smallest=240,
        largest=240, seed=seed, test=0.25, validation=0.0)
    after: dict[int, float] = {}
    run = descant.run(OneStageFedProx(lam=lam, eta=0.01, weights="samples"), federation=federation,
                      model=model, rounds=ROUNDS, batch=batch, local={"epochs": epochs},
                      backend="vectorised", seed=seed, eval={"every": EARLY},
                      on_evaluate=lambda run, row: after.update({row["round"]: training_loss(run)}))
    return {"early": after[EARLY], "last": after[ROUNDS],
            "global": run.history[-1]["global"]["pooled"]["loss"]}


def training_loss(run: Run) -> float:
    """The mean loss of the clients' own models on their own training rows, after the present round."""
    task, federation = run.setup.task, run.setup.federation
    losses = []
    for client, rows in enumerate(federation.train[k] for k in range(federation.population)):
        batch = descant.Batch(inputs(federation.x[rows], task.dtype), federation.y[rows])
        found = task.metrics(task.predict(run.personal(client, "last"), batch.x), batch)
        losses.append(float(found[task.metric_names.index("loss")]))
    return float(np.mean(losses))


def faster(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    """The smaller lambda, the lower the loss is early."""
    return [ordering(f"{classes} classes, round {EARLY}: {less} lambda has a lower training loss than {more}",
                     *(of(rows, "early", classes=classes, lam=lam) for lam in (less, more)),
                     words=(less, more))
            for classes in (2, 10) for less, more in (("small", "medium"), ("medium", "large"))]


def saved_by_epochs(rows: Sequence[dict[str, Any]], figure: str) -> list[Claim]:
    """More epochs a round bring a loss down, more so with small lambda than with large."""
    few, many = EPOCHS[0], EPOCHS[-1]
    gained = [np.subtract(of(rows, figure, lam=lam, epochs=few), of(rows, figure, lam=lam, epochs=many))
              for lam in ("small", "large")]
    return [
        ordering(f"small lambda: {many} epochs a round have a lower loss after 20 rounds than {few}",
                 of(rows, figure, lam="small", epochs=many), of(rows, figure, lam="small", epochs=few),
                 words=(f"{many} epochs", f"{few} epoch")),
        ordering("more epochs bring the loss down more with small lambda than with large", *gained,
                 lower=False, words=("small", "large"))]

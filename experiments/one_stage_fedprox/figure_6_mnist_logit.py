"""MNIST with logistic regression: with small lambda local epochs save rounds, with large lambda hardly.

As Figure 1(e), with 1, 5 and 20 epochs a round; the paper does not say which. The training loss after 20
rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import descant
from descant.algorithms import OneStageFedProx
from descant.comparison.reproduce.claims import Claim, fact, of, ordering

SOURCE = "One-stage FedProx, Figure 6, MNIST-Logit, local models"
SEEDS = 5
LAMS = {"small": 0.5, "large": 2.5}
EPOCHS = (1, 5, 20)
POINTS = [{"lam": lam, "epochs": epochs} for lam in LAMS for epochs in EPOCHS]


def measure(seed: int, lam: str, epochs: int) -> dict[str, float]:
    federation = descant.federation(
        "mnist", partition="classes", clients=10, classes_per_client=6, sizes="uniform", smallest=240,
        largest=240, seed=seed, test=0.25, validation=0.0)
    run = descant.run(OneStageFedProx(lam=LAMS[lam], eta=0.01, weights="samples"), federation=federation,
                      model="mclr", rounds=20, batch=32, local={"epochs": epochs}, backend="vectorised",
                      seed=seed, eval={"every": 20})
    return {"loss": run.history[-1]["loss"]}


def claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    few, many = EPOCHS[0], EPOCHS[-1]
    gained = {lam: np.mean(of(rows, "loss", lam=lam, epochs=few)) - np.mean(of(rows, "loss", lam=lam,
                                                                               epochs=many)) for lam in LAMS}
    return [
        ordering(f"small lambda: {many} epochs a round have a lower loss after 20 rounds than {few}",
                 of(rows, "loss", lam="small", epochs=many), of(rows, "loss", lam="small", epochs=few),
                 words=(f"{many} epochs", f"{few} epoch")),
        fact("more epochs gain more with small lambda than with large",
             f"the loss falls by {gained['small']:.3g} (small), {gained['large']:.3g} (large)",
             bool(gained["small"] > gained["large"]))]

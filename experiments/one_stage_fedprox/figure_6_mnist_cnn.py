"""MNIST with a CNN: with small lambda local epochs save rounds, with large lambda hardly.

As Figure 1(f), with clients of 6 classes and 1, 5 or 20 epochs a round: the paper says neither, and that the
figure has global models, but not what of them. Here it is their test loss on all rows after 20 rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from _mnist import EPOCHS, losses, saved_by_epochs

from descant.comparison.reproduce.claims import Claim

SOURCE = "One-stage FedProx, Figure 6, MNIST-CNN, global models"
SEEDS = 3
LAMS = {"small": 0.2, "large": 2.5}
POINTS = [{"lam": lam, "epochs": epochs} for lam in LAMS for epochs in EPOCHS]


def work(lam: str, epochs: int) -> float:
    return epochs


def measure(seed: int, lam: str, epochs: int) -> dict[str, float]:
    return {"global": losses(seed, 6, LAMS[lam], "cnn2", 16, epochs)["global"]}


def claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    return saved_by_epochs(rows, "global")

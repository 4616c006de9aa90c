"""MNIST with logistic regression: with small lambda local epochs save rounds, with large lambda hardly.

As Figure 1(e), with clients of 6 classes and 1, 5 or 20 epochs a round: the paper says neither, and that the
figure has local models, but not what of them. Here it is their training loss after 20 rounds, on their own
rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from _mnist import EPOCHS, losses, saved_by_epochs

from descant.comparison.reproduce.claims import Claim

SOURCE = "One-stage FedProx, Figure 6, MNIST-Logit, local models"
SEEDS = 5
LAMS = {"small": 0.5, "large": 2.5}
POINTS = [{"lam": lam, "epochs": epochs} for lam in LAMS for epochs in EPOCHS]


def work(lam: str, epochs: int) -> float:
    return epochs


def measure(seed: int, lam: str, epochs: int) -> dict[str, float]:
    return losses(seed, 6, LAMS[lam], "mclr", 32, epochs)


def claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    return saved_by_epochs(rows, "last")

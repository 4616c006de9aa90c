"""MNIST with a CNN over the rounds: smaller lambda converges faster. Batches of 16; otherwise as
`_mnist.py` says. 6 classes are left out. The number of repetitions is not in the paper.
"""

from __future__ import annotations

from _mnist import faster, losses

SOURCE = "One-stage FedProx, Figure 1(f), MNIST-CNN"
SEEDS = 3
LAMS = {"small": 0.2, "medium": 0.5, "large": 2.5}
POINTS = [{"classes": classes, "lam": lam} for classes in (2, 10) for lam in LAMS]
claims = faster


def measure(seed: int, classes: int, lam: str) -> dict[str, float]:
    return losses(seed, classes, LAMS[lam], "cnn2", 16)

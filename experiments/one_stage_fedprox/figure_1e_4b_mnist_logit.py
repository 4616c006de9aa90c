"""MNIST with logistic regression over the rounds: smaller lambda converges faster, above all early. Batches
of 32; otherwise as `_mnist.py` says. 6 classes are left out, and so are GlobalTrain and LocalTrain, which
Figure 4(b) has. Its caption says training loss, the text testing loss. The number of repetitions is not in
the paper.
"""

from __future__ import annotations

from _mnist import faster, losses

SOURCE = "One-stage FedProx, Figures 1(e) and 4(b), MNIST-Logit"
SEEDS = 5
LAMS = {"small": 0.5, "medium": 1.5, "large": 2.5}
POINTS = [{"classes": classes, "lam": lam} for classes in (2, 10) for lam in LAMS]
claims = faster


def measure(seed: int, classes: int, lam: str) -> dict[str, float]:
    return losses(seed, classes, LAMS[lam], "mclr", 32)

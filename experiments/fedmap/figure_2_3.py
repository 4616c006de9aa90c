"""The linear example of appendix A.4: a learned prior finds what five lines share.

y = -x + 4 (k - 1) + noise with 60, 1, 2, 3 and 50 points. FedMAP with a learned variance (epsilon = 1e-4,
s from 0), exact local solutions, 10 rounds, and at the minimum of M (500 rounds).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import descant
from descant.comparison.reproduce.claims import Claim, fact, near_to, of, ordering
from descant.priors.precision import stationary_s

SOURCE = "FedMAP, appendix A.4, Figures 2 and 3"
SEEDS = 20
POINTS = [{"rounds": 10}, {"rounds": 500}]
EPSILON = 1e-4
PRINTED = {"mu_a": -1.0735, "mu_b": 9.4882, "s_a": 1.9431, "s_b": 97.7605}


def problem(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """H_k and c_k of L_k(t) = t' H_k t / 2 - c_k' t + const for t = (a, b), and N_k / N."""
    made = descant.federation("fedmap_linear", test=0.0, validation=0.0, seed=seed).to(torch.float64)
    H, c = [], []
    for k in range(5):
        rows = made.train[k]
        design = torch.cat([made.x[rows], torch.ones((len(rows), 1), dtype=torch.float64)], 1)
        H.append(2 * design.T @ design / len(rows))
        c.append(2 * design.T @ made.y[rows] / len(rows))
    return torch.stack(H), torch.stack(c), torch.tensor([60, 1, 2, 3, 50], dtype=torch.float64) / 116


def errors(theta: Tensor) -> Tensor:
    """The expected squared error of each client's line on new data, less the noise."""
    k = torch.arange(5, dtype=torch.float64)
    slope = theta[:, 0] + 1
    return (slope * k + theta[:, 1] - 4 * k).square() + slope.square()


def measure(seed: int, rounds: int) -> dict[str, float]:
    H, c, w = problem(seed)
    mu = torch.randn(2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    s = torch.zeros(2, dtype=torch.float64)
    for _ in range(rounds):  # what a round comes to where clients solve their problems exactly
        alpha = 1 / (s + 1)
        theta = torch.linalg.solve(H + torch.diag(alpha), c + alpha * mu)
        mu = alpha * (w @ theta) / (alpha + 2 * EPSILON)
        s = stationary_s(w @ (theta - mu).square(), 1.0, EPSILON)
    pooled = torch.linalg.solve(torch.einsum("k,kij->ij", w, H), w @ c)
    ditto = torch.linalg.solve(H + 0.1 * torch.eye(2, dtype=torch.float64), c + 0.1 * pooled)
    return {"mu_a": float(mu[0]), "mu_b": float(mu[1]), "s_a": float(s[0]), "s_b": float(s[1]),
            "pooled_a": float(pooled[0]), "small": float(errors(theta)[1:4].mean()),
            "small ditto": float(errors(ditto)[1:4].mean())}


def claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    found = []
    for name, printed in PRINTED.items():
        ours = of(rows, name, rounds=10)
        found.append(Claim(f"{name} = {printed} after 10 rounds",
                           f"{np.mean(ours):.4g} ({min(ours):.4g} to {max(ours):.4g} over 20 draws)",
                           near_to(float(np.mean(ours)), printed, 0.1 * abs(printed))))
    for rounds in (10, 500):
        slopes, ratio = of(rows, "mu_a", rounds=rounds), [
            (b + 1) / (a + 1) for a, b in zip(of(rows, "s_a", rounds=rounds), of(rows, "s_b", rounds=rounds),
                                              strict=True)]
        found.append(fact(f"the prior's mean line falls (mu_a < 0), {rounds} rounds",
                          f"{max(slopes):.3g} at most", max(slopes) < 0))
        found.append(fact(f"the slope is held more firmly than the intercept, {rounds} rounds",
                          f"{min(ratio):.3g} to {max(ratio):.3g} times as firmly", min(ratio) > 1))
    pooled = of(rows, "pooled_a", rounds=10)
    found.append(fact("the line of all data together rises", f"slope {min(pooled):.3g} at least",
                      min(pooled) > 0))
    found.append(ordering("clients with 1, 2 and 3 points: FedMAP's lines are ahead of Ditto's",
                          of(rows, "small", rounds=500), of(rows, "small ditto", rounds=500),
                          words=("FedMAP", "Ditto")))
    return found

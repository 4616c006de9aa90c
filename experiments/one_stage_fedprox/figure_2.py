"""The effect of local steps: with small lambda they save rounds, with large lambda hardly.

As Figure 1(d), with K = 5, 20 and 150 local steps a round; the paper does not say which. 100 rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from _synthetic import LAMS, curve, rounds_to

from descant.comparison.reproduce.claims import Claim, fact, of, ordering

SOURCE = "One-stage FedProx, Figure 2, Synthetic-Logit"
SEEDS = 5
STEPS = (5, 20, 150)
POINTS = [{"lam": name, "K": K} for name in ("small", "large") for K in STEPS]


def measure(seed: int, lam: str, K: int) -> dict[str, float]:
    errors = curve(seed, 0.5, LAMS[lam], K, 100)
    return {"rounds": rounds_to(errors), "last": errors[-1]}


def claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    few, many = STEPS[0], STEPS[-1]
    saved = {lam: np.mean(of(rows, "rounds", lam=lam, K=few)) / np.mean(of(rows, "rounds", lam=lam, K=many))
             for lam in ("small", "large")}
    return [
        ordering(f"with small lambda, {many} local steps take fewer rounds than {few}",
                 of(rows, "rounds", lam="small", K=many), of(rows, "rounds", lam="small", K=few),
                 words=(f"K = {many}", f"K = {few}")),
        fact("local steps save relatively more rounds with small lambda than with large",
             f"rounds shrink by a factor of {saved['small']:.2f} (small), {saved['large']:.2f} (large)",
             bool(saved["small"] > saved["large"]))]

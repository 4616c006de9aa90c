"""The effect of local steps: with small lambda they save rounds, with large lambda hardly.

As Figure 1(d) at R = 0.5, with K = 5, 20 and 150 local steps a round and 100 rounds: the paper says neither
R nor K nor how many rounds. Medium lambda is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from _synthetic import LAMS, curve, rounds_to

from descant.comparison.reproduce.claims import Claim, of, ordering

SOURCE = "One-stage FedProx, Figure 2, Synthetic-Logit"
SEEDS = 5
STEPS = (5, 20, 150)
POINTS = [{"lam": name, "K": K} for name in ("small", "large") for K in STEPS]


def work(lam: str, K: int) -> float:
    return K


def measure(seed: int, lam: str, K: int) -> dict[str, float]:
    errors = curve(seed, 0.5, LAMS[lam], K, 100)
    return {"rounds": rounds_to(errors), "last": errors[-1]}


def claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    few, many = STEPS[0], STEPS[-1]
    saved = [np.divide(of(rows, "rounds", lam=lam, K=few), of(rows, "rounds", lam=lam, K=many))
             for lam in ("small", "large")]
    return [
        ordering(f"with small lambda, {many} local steps take fewer rounds than {few}",
                 of(rows, "rounds", lam="small", K=many), of(rows, "rounds", lam="small", K=few),
                 words=(f"K = {many}", f"K = {few}")),
        ordering("local steps save relatively more rounds with small lambda than with large: the factor by "
                 "which rounds shrink", *saved, lower=False, words=("small", "large"))]

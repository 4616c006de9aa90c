"""Total error of the local models over the rounds: larger lambda takes more communication.

10 clients of 200 rows, R = 0.5, 50 rounds of 150 full-gradient steps with the step sizes of the paper,
gamma = (lambda + L) / (lambda L) and eta = 1 / (lambda + L); a ridge of 0.01. Rounds to converge: until
the error stays within 0.1 % of its range around its last value.

In a first run only errors above the last value counted, so that a curve that rises to its limit converged
at once. It found 13 rounds with small lambda, 7 with medium and 3 with large: small against large
significantly reversed, the other two open. Distances to both sides count since; nothing else was changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from _synthetic import LAMS, curve, rounds_to

from descant.comparison.reproduce.claims import Claim, of, ordering

SOURCE = "One-stage FedProx, Figure 1(d), Synthetic-Logit"
SEEDS = 5
POINTS = [{"lam": name} for name in LAMS]


def measure(seed: int, lam: str) -> dict[str, float]:
    errors = curve(seed, 0.5, LAMS[lam], 150, 50)
    return {"rounds": rounds_to(errors), "first": errors[0], "last": errors[-1]}


def claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    return [ordering(f"{less} lambda converges in fewer rounds than {more} lambda",
                     of(rows, "rounds", lam=less), of(rows, "rounds", lam=more), words=(less, more))
            for less, more in (("small", "medium"), ("medium", "large"), ("small", "large"))]

"""100 and 1000 clients, of which 10 % take part in a round: smaller lambda is faster at first, and better
where clients differ more.

As Figure 1(d), with 50 local steps and 50 rounds. The paper does not say at which R; 0.5 and 3 here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from _synthetic import LAMS, curve

from descant.comparison.reproduce.claims import Claim, of, ordering

SOURCE = "One-stage FedProx, Figure 5, many clients"
SEEDS = 5
POINTS = [{"clients": clients, "R": R, "lam": lam} for clients in (100, 1000) for R in (0.5, 3.0)
          for lam in ("small", "large")]
EARLY = 5


def measure(seed: int, clients: int, R: float, lam: str) -> dict[str, float]:
    errors = curve(seed, R, LAMS[lam], 50, 50, clients, clients // 10)
    return {"early": errors[EARLY - 1], "last": errors[-1]}


def claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    found = []
    for clients in (100, 1000):
        where = {"clients": clients, "R": 3.0}
        found += [
            ordering(f"{clients} clients: small lambda is ahead after {EARLY} rounds (R = 3)",
                     of(rows, "early", lam="small", **where), of(rows, "early", lam="large", **where),
                     words=("small", "large")),
            ordering(f"{clients} clients: small lambda is ahead at the end where R = 3",
                     of(rows, "last", lam="small", **where), of(rows, "last", lam="large", **where),
                     words=("small", "large"))]
        where = {"clients": clients, "R": 0.5}
        found.append(ordering(f"{clients} clients: large lambda is ahead at the end where R = 0.5",
                              of(rows, "last", lam="large", **where), of(rows, "last", lam="small", **where),
                              words=("large", "small")))
    return found

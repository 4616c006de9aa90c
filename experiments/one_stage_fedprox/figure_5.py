"""100 and 1000 clients, of which 10 % take part in a round: smaller lambda is faster at first, and better
where clients differ more.

As Figure 1(d), with 50 local steps and 50 rounds, R = 0.5 and 3: the paper says none of these. Medium lambda
is left out. "Faster at first" is a smaller total error after 5 rounds. That larger lambda takes more rounds
to converge is judged in Figure 1(d) alone. The paper says that smaller lambda is gradually ahead as R grows,
not from which R on: that larger lambda is ahead at 0.5 is our reading.
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


def work(clients: int, R: float, lam: str) -> float:
    return clients


def measure(seed: int, clients: int, R: float, lam: str) -> dict[str, float]:
    errors = curve(seed, R, LAMS[lam], 50, 50, clients, clients // 10)
    return {"early": errors[EARLY - 1], "last": errors[-1]}


def claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    found = []
    for clients in (100, 1000):
        found += [ordering(f"{clients} clients: small lambda is ahead after {EARLY} rounds (R = {R:g})",
                           *(of(rows, "early", clients=clients, R=R, lam=lam) for lam in ("small", "large")),
                           words=("small", "large")) for R in (0.5, 3.0)]
        found += [ordering(f"{clients} clients: {ahead} lambda is ahead at the end where R = {R:g}",
                           *(of(rows, "last", clients=clients, R=R, lam=lam) for lam in (ahead, behind)),
                           words=(ahead, behind))
                  for R, ahead, behind in ((0.5, "large", "small"), (3.0, "small", "large"))]
    return found

"""The generalized coherence estimate of the envelope gradients in every round, on FMNIST-MCLR.

100 clients of 2 classes as the authors' code deals them; the setting of Table 1. The envelope gradients
of a round are taken as the directions in which its 20 clients have moved the server's model (w_{i,R} -
w), each at its own w_i. With 20 vectors in 7850 dimensions GCE lies between 0 and 1; log(1 - GCE) is
compared besides. The convergence phase are the last 50 of 200 rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import descant
from descant.algorithms import pFedBreD, pFedMe
from descant.comparison.reproduce.claims import Claim, of, ordering
from descant.core.algorithm import Algorithm
from descant.view.lines import lines

SOURCE = "pFedBreD, Figure 2, FMNIST-MCLR"
SEEDS = 3
METHODS: dict[str, Algorithm] = {
    "pFedMe": pFedMe(lam=15.0, eta=0.01, alpha=0.01),
    **{name: pFedBreD.preset("paper", strategy=name) for name in ("lg", "meg", "mh")},
    "mh (code)": pFedBreD.preset("paper", strategy="mh_code", start="w")}
POINTS = [{"method": name} for name in METHODS]
ROUNDS, LAST, PARTS = 200, 50, 8


def measure(seed: int, method: str) -> dict[str, float]:
    federation = descant.federation("fashion_mnist", standardise="all", partition="neighbours", clients=100,
                                    classes_per_client=2, seed=seed, test=0.25, validation=0.0)
    run = descant.run(METHODS[method], federation=federation, model="mclr", rounds=ROUNDS, cohort=20,
                      participation="all", batch=20, local={"steps": 20}, backend="vectorised", seed=seed,
                      eval={"every": ROUNDS, "diagnostics": ["coherence"]})
    seen = [row["diagnostics"]["coherence"] for row in run.history]
    parts = np.array_split([each["gce"] for each in seen], PARTS)
    return {"gce": float(np.mean([each["gce"] for each in seen[-LAST:]])),
            "log_det": float(np.mean([each["log_det"] for each in seen[-LAST:]]))} | {
                f"part {k}": float(part.mean()) for k, part in enumerate(parts)}


def claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    return [ordering(f"in the convergence phase {name} has a smaller GCE than pFedMe",
                     of(rows, "gce", method=name), of(rows, "gce", method="pFedMe"), words=(name, "pFedMe"))
            for name in ("mh", "mh (code)", "meg", "lg")]


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    at = [(k + 0.5) * ROUNDS / PARTS for k in range(PARTS)]
    lines({name: [of(rows, f"part {k}", method=name) for k in range(PARTS)] for name in METHODS}, at, path,
          x="round", y="generalized coherence estimate, mean over 25 rounds")

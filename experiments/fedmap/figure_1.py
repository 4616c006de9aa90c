"""Balanced accuracy over the rounds on clients 1-5 and 6-10, in the three scenarios.

The shells of appendix B.1 with the network of Table 3 (one output, binary loss); 20 rounds of 50 epochs,
Adam at 1e-4, batches of 64, as in the authors' code; clients count by their samples. LocalTrain has as
many epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import descant
from descant import Adam
from descant.algorithms import FedMAP, LocalTrain
from descant.comparison.reproduce.claims import Claim, fact, of, ordering
from descant.core.algorithm import Algorithm

SOURCE = "FedMAP, Figure 1, and the starved clients of Tables 1 and 6"
SEEDS = 5
METHODS: dict[str, Algorithm] = {"FedMAP": FedMAP(weights="samples", solver=Adam(lr=1e-4)),
                                 "Individual": LocalTrain(Adam(lr=1e-4))}
POINTS = [{"scenario": scenario, "method": name} for scenario in ("feature", "quantity", "label")
          for name in METHODS]


def measure(seed: int, scenario: str, method: str) -> dict[str, float]:
    federation = descant.federation("fedmap_shell", scenario=scenario, seed=seed, test=0.3, validation=0.0)
    figures = {}
    for rounds, word in ((2, "early"), (20, "last")):
        run = descant.run(METHODS[method], federation=federation, model="fedmap_mlp",
                          loss="binary_cross_entropy", rounds=rounds, batch=64, local={"epochs": 50},
                          backend="vectorised", seed=seed, eval={"every": rounds})
        task = run.setup.task
        at = task.metric_names.index("balanced_accuracy")
        each = []
        for client in range(10):
            rows = federation.test[client]
            batch = descant.Batch(federation.x[rows], federation.y[rows])
            each.append(float(task.metrics(task.predict(run.personal(client, "last"), batch.x), batch)[at]))
        figures |= {f"{word} 1-5": float(np.mean(each[:5])), f"{word} 6-10": float(np.mean(each[5:]))}
    return figures


def claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    found = [ordering(f"{scenario} skew, clients 6-10: FedMAP is ahead of training alone",
                      *(of(rows, "last 6-10", scenario=scenario, method=name) for name in METHODS),
                      lower=False, words=("FedMAP", "Individual")) for scenario in ("label", "quantity")]
    found += [ordering(f"{scenario} skew, clients 1-5: FedMAP is ahead of training alone",
                       *(of(rows, "last 1-5", scenario=scenario, method=name) for name in METHODS),
                       lower=False, words=("FedMAP", "Individual"))
              for scenario in ("label", "quantity", "feature")]
    for scenario in ("quantity", "label"):
        where = {"scenario": scenario, "method": "FedMAP"}
        found.append(ordering(f"{scenario} skew: clients 6-10 begin below clients 1-5",
                              of(rows, "early 1-5", **where), of(rows, "early 6-10", **where), lower=False,
                              words=("1-5", "6-10")))
        before, after = (np.mean(of(rows, f"{word} 6-10", **where)) for word in ("early", "last"))
        found.append(fact(f"{scenario} skew: clients 6-10 improve with the rounds",
                          f"{100 * before:.1f} % after 2 rounds, {100 * after:.1f} % after 20",
                          bool(after > before)))
    return found

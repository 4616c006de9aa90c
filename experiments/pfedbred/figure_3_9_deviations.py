"""Deviations of the losses per class of the first client's model from the clients' mean (appendix B.4).

Of FMNIST-MCLR and MNIST-MCLR, in the setting of Table 1. On the global test a lower deviation on the
classes that the client has, on the local test a higher one on those that it lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import descant
from descant.algorithms import pFedBreD, pFedMe
from descant.comparison.reproduce.claims import Claim, of, ordering
from descant.core.algorithm import Algorithm
from descant.experiment.coherence import loss_deviations

SOURCE = "pFedBreD, Figures 3 and 9, MCLR"
SEEDS = 3
METHODS: dict[str, Algorithm] = {
    "pFedMe": pFedMe(lam=15.0, eta=0.01, alpha=0.01),
    "mh": pFedBreD.preset("paper", strategy="mh"),
    "mh (code)": pFedBreD.preset("paper", strategy="mh_code", start="w")}
POINTS = [{"dataset": dataset, "method": name} for dataset in ("fashion_mnist", "mnist") for name in METHODS]


def measure(seed: int, dataset: str, method: str) -> dict[str, float]:
    federation = descant.federation(dataset, standardise="all", partition="neighbours", clients=100,
                                    classes_per_client=2 if dataset == "fashion_mnist" else 3, seed=seed,
                                    test=0.25, validation=0.0)
    run = descant.run(METHODS[method], federation=federation, model="mclr", rounds=200, cohort=20,
                      participation="all", batch=20, local={"steps": 20}, backend="vectorised", seed=seed,
                      eval={"every": 200})
    found = loss_deviations(run, "last")
    has = torch.zeros(10, dtype=torch.bool)
    has[federation.y[federation.test[0]].long().unique()] = True
    return {"available, global test": float(found.everyone[0][has].mean()),
            "missing, local test": float(found.own[0][~has].nanmean())}


def claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    found = []
    for dataset in ("fashion_mnist", "mnist"):
        for name in ("mh", "mh (code)"):
            for figure, word in (("available, global test", "lower"), ("missing, local test", "higher")):
                both = [of(rows, figure, dataset=dataset, method=each) for each in (name, "pFedMe")]
                says = f"{dataset}, classes {figure}: {name} has a {word} deviation than pFedMe"
                found.append(ordering(says, *both, lower=word == "lower", words=(name, "pFedMe")))
    return found

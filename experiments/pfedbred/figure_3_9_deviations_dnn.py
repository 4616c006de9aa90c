"""Deviations of the losses per class, DNN: `_deviations.py` says of what, and in which setting.

Lambda 30 and the slope 0.1 of the leaky ReLU are those of the authors' scripts and code (the paper: lambda 15
to 60). 3 repetitions (5 in the paper), for the time that they take.
"""

from __future__ import annotations

from _deviations import claims, deviations_of, draw, methods, points, work

from descant.models import DNN

__all__ = ["POINTS", "SEEDS", "SOURCE", "claims", "draw", "measure", "work"]

SOURCE = "pFedBreD, Figures 3 and 9, DNN"
SEEDS = 3
METHODS = methods(30.0)
POINTS = points(METHODS)


def measure(seed: int, dataset: str, method: str) -> dict[str, float]:
    return deviations_of(seed, dataset, METHODS[method], DNN(slope=0.1))

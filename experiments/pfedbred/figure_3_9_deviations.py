"""Deviations of the losses per class, MCLR: `_deviations.py` says of what, and in which setting.

Lambda 15 as in the authors' scripts (the paper: 15 to 60).
"""

from __future__ import annotations

from _deviations import claims, deviations_of, draw, methods, points, work

__all__ = ["POINTS", "SEEDS", "SOURCE", "claims", "draw", "measure", "work"]

SOURCE = "pFedBreD, Figures 3 and 9, MCLR"
SEEDS = 5
METHODS = methods(15.0)
POINTS = points(METHODS)


def measure(seed: int, dataset: str, method: str) -> dict[str, float]:
    return deviations_of(seed, dataset, METHODS[method], "mclr")

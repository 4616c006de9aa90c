"""Was a method still improving when its training ended? By its figures on validation rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

LEAST_POINTS = 4  # evaluated rounds: fewer are not enough
WORTH = 0.005  # half a point in the last quarter of the training, or ...
LOSS = 4.0  # ... 2 percent of a loss, which goes on falling where nothing else changes
MOST = 2 / 3  # of the repetitions


def last_gain(rows: Sequence[Mapping[str, Any]], metric: str, *, lower: bool) -> float | None:
    """By how much the last quarter of a run's training is better than the one before: zero where it is no
    more than noise, None where there are too few. The loss is used where rounds do not record the metric."""
    found = [row["personal"]["val"] for row in rows if "personal" in row]
    if not all(metric in val for val in found):
        metric, lower = "loss", True
    curve = np.array([(val.get(metric) or {}).get("mean") for val in found], float)
    if len(curve) < LEAST_POINTS or not np.isfinite(curve).all() or (lower and (curve <= 0).any()):
        return None
    values = -np.log(curve) / LOSS if lower else curve
    quarter = len(values) // 4
    both = values[-2 * quarter :]
    gain = float(both[quarter:].mean() - both[:quarter].mean())
    if quarter < 2:
        return gain
    at = np.arange(len(both))
    noise = (both - np.polyval(np.polyfit(at, both, 1), at)).std(ddof=2)
    return gain if gain > 2 * noise * (2 / quarter) ** 0.5 else 0.0


def still_improving(gains: Sequence[float | None]) -> int | None:
    """In how many repetitions a method was still improving, if in most of them and by more than chance."""
    known = np.array([gain for gain in gains if gain is not None])
    count = int((known > WORTH).sum())
    if not len(known) or count < MOST * len(gains):
        return None
    error = known.std(ddof=1) / len(known) ** 0.5 if len(known) > 1 else 0.0
    return count if known.mean() > 2 * error else None

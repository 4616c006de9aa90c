"""What an attacker who guesses from numbers that it sees proves of epsilon."""

from __future__ import annotations

import math

import numpy as np
from scipy.stats import beta


def lower_bound(there: np.ndarray, gone: np.ndarray, delta: float) -> float:
    """A lower bound of epsilon from the wrong guesses of an attacker who compares what it sees with a
    threshold, if the one it looks for is there and if not (Jagielski et al. 2020). Probabilities are bounded
    by Clopper and Pearson: of a thousand such bounds about one is wrong, for each of 40 thresholds."""
    found = 0.0
    for threshold in np.quantile(np.concatenate([there, gone]), np.linspace(0.02, 0.98, 40)):
        for ours, theirs in ((there > threshold, gone > threshold), (there <= threshold, gone <= threshold)):
            hits, alarms = int(ours.sum()), int(theirs.sum())
            least = float(beta.ppf(0.001, hits, len(there) - hits + 1)) if hits else 0.0
            most = float(beta.ppf(0.999, alarms + 1, len(gone) - alarms)) if alarms < len(gone) else 1.0
            if least > delta:
                found = max(found, math.log((least - delta) / most))
    return found

"""How good one client's outputs are, exactly: figures that no sums over samples can give.

During training the tallies of `descant.core.metrics` are enough, and cheap; once a run has finished, more is
asked, such as an AUROC, for which all outputs must be there at once. Rows are samples, of sequences their
positions. A figure that is not defined, such as the sensitivity without a positive row, is NaN. Outputs are
taken for logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

BINS = 15  # of the top probability, for the calibration error
_BLOCK = 2**16  # rows whose logits are copied at once


class Metric(NamedTuple):
    """What a table should know of a figure."""

    lower_is_better: bool
    meaning: str


METRICS: dict[str, Metric] = {
    "loss": Metric(True, "mean loss"),
    "accuracy": Metric(False, "share of the rows that are right"),
    "balanced_accuracy": Metric(False, "mean of the recalls of the classes that occur"),
    "auroc": Metric(False, "area under the ROC curve: how often a row of a class gets a higher probability "
                           "of it than a row of another class; mean over the classes that occur"),
    "sensitivity": Metric(False, "share of the rows of class 1 that are found"),
    "specificity": Metric(False, "share of the rows of class 0 that are found"),
    "calibration_error": Metric(True, "how far the probability of what is predicted is from how often it is "
                                      f"right: expected calibration error with {BINS} equal bins"),
    "mse": Metric(True, "mean squared error"),
    "r2": Metric(False, "share of the variance that is explained"),
}


class Predictions(NamedTuple):
    """The outputs of a classifier, one row per sample or position."""

    logits: np.ndarray  # [n, classes]
    y: np.ndarray  # [n] class numbers
    predicted: np.ndarray  # [n]

    @classmethod
    def of(cls, outputs: np.ndarray, y: np.ndarray, classes: int) -> Predictions:
        """Of outputs [n], [n, 1] (two classes, one logit) or [n, classes, ...] for targets [n, ...]."""
        y = y.astype(np.int64)
        if outputs.ndim == 1 or (outputs.shape[1] == 1 and classes == 2):
            logit = outputs.reshape(-1)  # the second of two, the first being zero
            both = np.stack([np.zeros_like(logit), logit], 1)
            return cls(both, y.reshape(-1), (logit > 0).astype(np.int64))
        logits = np.moveaxis(outputs, 1, -1).reshape(-1, outputs.shape[1])
        return cls(logits, y.reshape(-1), logits.argmax(1))


def classification(outputs: np.ndarray, y: np.ndarray, classes: int) -> dict[str, float]:
    """All figures of a classifier; sensitivity and specificity where there are two classes."""
    found = Predictions.of(outputs, y, classes)
    odds = Odds.of(found.logits)
    of_two = {"sensitivity": recall(found.predicted, found.y, 1),
              "specificity": recall(found.predicted, found.y, 0)} if classes == 2 else {}
    right = found.predicted == found.y
    return {
        "accuracy": float(right.mean()) if len(right) else np.nan,
        "balanced_accuracy": balanced_accuracy(found.predicted, found.y),
        "auroc": macro_auroc(found.logits, found.y, odds),
        **of_two,
        "calibration_error": calibration_error(odds.confidence, right),
    }


# -- how much each row moves a figure ------------------------------------------------------------------
#
# Influences [n] add up to zero, and their squares to an unbiased estimate of the figure's variance over other
# rows of the same client: with them a figure is as easy to compare as a mean. A row is a sample: of
# sequences, what its positions add up to. The calibration error has none: its bins make it biased.


def mean_influence(values: np.ndarray) -> np.ndarray:
    """Of the mean of values [n]; zero where one row says nothing about others."""
    n = len(values)
    return np.asarray((values - values.mean()) / np.sqrt(n * (n - 1))) if n > 1 else np.zeros(n)


def classification_influences(outputs: np.ndarray, y: np.ndarray, classes: int) -> dict[str, np.ndarray]:
    """Of the figures of a classifier that have them."""
    found = Predictions.of(outputs, y, classes)
    right = (found.predicted == found.y).astype(float)
    recalls = {c: _recall_influence(right, found.y == c) for c in np.unique(found.y).tolist()}
    of_two = {"sensitivity": recalls[1] if 1 in recalls else np.full(len(right), np.nan),
              "specificity": recalls[0] if 0 in recalls else np.full(len(right), np.nan)
              } if classes == 2 else {}
    of_rows = {"balanced_accuracy": np.mean(list(recalls.values()), 0), "auroc": _auroc_influence(found),
               **of_two} if len(right) else {}
    return {"accuracy": mean_influence(_per_sample(right, len(y), np.mean)),
            **{name: _per_sample(values, len(y), np.sum) for name, values in of_rows.items()}}


def regression_influences(values: np.ndarray, y: np.ndarray) -> dict[str, np.ndarray]:
    """Of the mean squared error and of R2, the latter as far as it is linear."""
    y = y.reshape(len(y), -1).astype(np.float64)
    errors = np.square(values.reshape(y.shape).astype(np.float64) - y).mean(1)
    around = np.square(y - y.mean(0)).mean(1)
    mse, variance = errors.mean(), around.mean()
    of_errors = mean_influence(errors)
    with np.errstate(divide="ignore", invalid="ignore"):
        return {"mse": of_errors, "r2": -of_errors / variance + mse / variance**2 * mean_influence(around)}


def _per_sample(values: np.ndarray, samples: int, how: Callable[..., np.ndarray]) -> np.ndarray:
    """Values of positions [samples * positions] as values of samples."""
    return how(values.reshape(samples, -1), axis=1) if samples else values


def _recall_influence(right: np.ndarray, there: np.ndarray) -> np.ndarray:
    found = np.zeros(len(right))
    found[there] = mean_influence(right[there])
    return found


def _auroc_influence(found: Predictions) -> np.ndarray:
    """DeLong's: how a row is placed among those of the other kind, mean over the classes that occur."""
    occur = np.unique(found.y)
    if len(occur) < 2:
        return np.full(len(found.y), np.nan)
    if found.logits.shape[1] == 2:
        with np.errstate(invalid="ignore"):
            return _placements(found.logits[:, 1].astype(np.float64) - found.logits[:, 0], found.y == 1)
    odds = Odds.of(found.logits)
    return np.asarray(np.mean([_placements(odds.of_class(found.logits, c), found.y == c)
                               for c in occur.tolist()], 0))


def _placements(scores: np.ndarray, positive: np.ndarray) -> np.ndarray:
    if np.isnan(scores).any():
        return np.full(len(scores), np.nan)
    influence = np.zeros(len(scores))
    for ours, sign in ((positive, 1.0), (~positive, -1.0)):
        others = np.sort(scores[~ours])
        below = sum(np.searchsorted(others, scores[ours], side) for side in ("left", "right"))
        influence[ours] = sign * mean_influence(np.asarray(below) / (2 * len(others)))
    return influence


# -- the figures ---------------------------------------------------------------------------------------


def recall(predicted: np.ndarray, y: np.ndarray, of_class: int) -> float:
    """The share of the rows of a class that are taken for it: of class 1 the sensitivity, of class 0 the
    specificity."""
    there = y == of_class
    return float((predicted[there] == of_class).mean()) if there.any() else np.nan


def balanced_accuracy(predicted: np.ndarray, y: np.ndarray) -> float:
    """The mean of the recalls of the classes that occur."""
    there = np.bincount(y)
    right = np.bincount(y[predicted == y], minlength=len(there))
    occurs = there > 0
    return float((right[occurs] / there[occurs]).mean()) if occurs.any() else np.nan


def auroc(scores: np.ndarray, positive: np.ndarray) -> float:
    """The share of the pairs of a positive and another row in which the positive one has the higher score
    [n]; equal scores count half. Not defined if either kind is missing."""
    ours, others = scores[positive], np.sort(scores[~positive])
    if not len(ours) or not len(others) or np.isnan(scores).any():
        return np.nan
    below = np.searchsorted(others, ours, "left").sum() + np.searchsorted(others, ours, "right").sum()
    return float(below / (2 * len(ours) * len(others)))  # of whole numbers: nothing is rounded before


def macro_auroc(logits: np.ndarray, y: np.ndarray, odds: Odds) -> float:
    """Of two classes the AUROC of the second. Of more, each class against the rest by its probability, and
    the mean over the classes that occur: those have rows of both kinds if there are two of them."""
    occur = np.unique(y)
    if len(occur) < 2:
        return np.nan
    if logits.shape[1] == 2:
        with np.errstate(invalid="ignore"):
            return auroc(logits[:, 1].astype(np.float64) - logits[:, 0], y == 1)
    return float(np.mean([auroc(odds.of_class(logits, c), y == c) for c in occur.tolist()]))


def calibration_error(confidence: np.ndarray, right: np.ndarray) -> float:
    """The expected calibration error: rows are put in bins by the probability of what they are predicted to
    be, ((k-1)/15, k/15]; the mean over the rows of |mean probability - share that is right| of their bin."""
    if not len(right) or np.isnan(confidence).any():
        return np.nan
    bins = np.clip(np.ceil(confidence * BINS).astype(np.int64) - 1, 0, BINS - 1)
    gaps = np.bincount(bins, confidence - right, BINS)
    return float(np.abs(gaps).sum() / len(right))


class Odds(NamedTuple):
    """Softmax probabilities as logarithms of odds, log p/(1-p): they rank rows as probabilities do, and tell
    rows apart whose probability is rounded to one."""

    top: np.ndarray  # [n] the class with the largest logit
    largest: np.ndarray  # [n] that logit
    rest: np.ndarray  # [n] log sum exp of the other logits

    @classmethod
    def of(cls, logits: np.ndarray) -> Odds:
        parts = [_odds(logits[start : start + _BLOCK]) for start in range(0, max(1, len(logits)), _BLOCK)]
        return cls(*(np.concatenate(part) for part in zip(*parts, strict=True)))

    @property
    def confidence(self) -> np.ndarray:
        """The probability of the top class [n]."""
        with np.errstate(all="ignore"):
            return np.asarray(1 / (1 + np.exp(self.rest - self.largest)))

    def of_class(self, logits: np.ndarray, c: int) -> np.ndarray:
        """The log odds of class c [n]."""
        with np.errstate(all="ignore"):  # outputs that are not finite have none
            gap, rest = logits[:, c].astype(np.float64) - self.largest, self.rest - self.largest
            others = 1 + np.exp(rest) - np.exp(gap)  # but for a top class: at least one
            return np.asarray(np.where(self.top == c, -rest, gap - np.log(others)))


def _odds(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    values = logits.astype(np.float64)
    top = values.argmax(1)
    at = (np.arange(len(top)), top)
    largest = values[at]
    values[at] = -np.inf
    with np.errstate(all="ignore"):
        return top, largest, np.logaddexp.reduce(values, 1)

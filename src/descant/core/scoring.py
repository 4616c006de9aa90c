"""How the metrics of `metric` are computed.

While a run goes on, from tallies: vectors of sums (float64) over the rows that count. The figures of one
client come from its own tally, those of all clients from the sum of the tallies, exactly, though a balanced
accuracy or an R2 is no mean of the clients' values. An AUROC is made of no sums: it is computed where all
outputs of a client are at hand, and only where it decides. All of this works inside vmap.

Of a finished run, from all outputs of a client at once (numpy), with the influence of each row. Rows are
samples, of sequences their positions; outputs are logits. A metric that is undefined, such as the sensitivity
without a positive row, is NaN. scikit-learn is not used: it raises where a class is missing, and its AUROC
adds up rounded areas.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from descant.core.metric import BINS

_BLOCK = 2**16  # rows whose logits are copied at once


# -- of every round: tallies ------------------------------------------------------------------------------


def tally_losses(losses: Tensor, weight: Tensor | None) -> Tensor:
    """[clients, 2]: how many rows, and the sum of their losses [clients, n]."""
    counted = torch.full_like(losses, 1, dtype=torch.float64) if weight is None else weight.double()
    return torch.stack([counted.sum(1), _sum(losses, weight)], 1)


def tally_classification(outputs: Tensor, y: Tensor, weight: Tensor | None, classes: int) -> Tensor:
    """[clients, 1 + 2 classes]: rows that are right (of sequences: the share of positions), then for each
    class how many there are, and how many of them are right. Outputs are [clients, n, ...]."""
    is_binary = outputs.dim() == 2 or (outputs.shape[2] == 1 and classes == 2)
    # the largest of numbers that do not lie side by side is found several times as slowly
    predicted = (outputs.reshape(y.shape) > 0).to(y.dtype) if is_binary else outputs.contiguous().argmax(2)
    right = (predicted == y).double()
    counts = torch.ones_like(right) if weight is None else weight.double().view(
        *weight.shape, *[1] * (y.dim() - 2)).expand_as(right)
    rows_right = _sum(right if y.dim() == 2 else right.flatten(2).mean(2), weight)
    both = torch.cat([counts.flatten(1), (counts * right).flatten(1)], 1)
    at = y.flatten(1)
    of_class = both.new_zeros(len(y), 2 * classes).scatter_add(1, torch.cat([at, at + classes], 1), both)
    return torch.cat([rows_right[:, None], of_class], 1)


def tally_regression(values: Tensor, y: Tensor, weight: Tensor | None) -> Tensor:
    """[clients, 1 + 2 columns]: the sum of the squared errors, then for each column of y [clients, n, ...]
    its sum and its sum of squares."""
    y = y.double().reshape(*y.shape[:2], -1)
    errors = (values.double().reshape(y.shape) - y).square().mean(2)
    columns = torch.cat([y, y.square()], 2)
    counted = columns if weight is None else columns.where(weight[:, :, None], 0.0)
    return torch.cat([_sum(errors, weight)[:, None], counted.sum(1)], 1)


def loss_figure(tally: Tensor) -> Tensor:
    """The mean loss, of what `tally_losses` gives."""
    return tally[1] / tally[0]


def classification_figures(rows: Tensor, tally: Tensor) -> list[Tensor]:
    """Accuracy, and the mean of the recalls of the classes that occur."""
    there, right = tally[1:].chunk(2)
    recall = right / there.clamp(min=1)
    return [tally[0] / rows, recall.sum() / (there > 0).sum()]


def classification_flaw(rows: int, tally: Tensor) -> str | None:
    """Why this is not what `tally_classification` gives for so many rows."""
    there, right = tally[1:].chunk(2)
    if not 0 <= tally[0] <= rows:
        return f"it claims {tally[0]:g} right of {rows} rows"
    is_sound = bool(((right >= 0) & (right <= there)).all()) and math.isfinite(there.sum())
    return None if is_sound else "its counts by class contradict each other"


def regression_flaw(rows: int, tally: Tensor) -> str | None:
    """Why this is not what `tally_regression` gives for so many rows."""
    sums, squares = tally[1:].chunk(2)
    if tally[0] < 0:
        return f"its squared errors add up to {tally[0]:g}"
    is_sound = bool((rows * squares >= (1 - 1e-6) * sums.square()).all())  # no variance is negative
    return None if is_sound else "the sums of its targets contradict each other"


def regression_figures(rows: Tensor, tally: Tensor) -> list[Tensor]:
    """Mean squared error, and the share of the variance it leaves explained (R2)."""
    mean, square = (tally[1:] / rows).chunk(2)
    mse = tally[0] / rows
    return [mse, 1 - mse / (square - mean.square()).mean()]


def auroc(outputs: Tensor, y: Tensor, weight: Tensor, classes: int) -> Tensor:
    """The area under the ROC curve over the rows that count (inside vmap):
    of two classes that of the second; of more, each class against the rest by its probability, and the mean
    over the classes that occur. NaN where fewer than two do."""
    y = y.long()
    if outputs.dim() == 1 or (outputs.shape[1] == 1 and classes == 2):
        return _area(outputs.reshape(-1).double(), y.reshape(-1) == 1, weight)
    counts = weight if y.dim() == 1 else weight[:, None].expand_as(y).reshape(-1)
    logits, y = outputs.movedim(1, -1).reshape(-1, outputs.shape[1]).double(), y.reshape(-1)
    if classes == 2:
        return _area(logits[:, 1] - logits[:, 0], y == 1, counts)
    top = logits.argmax(1)
    largest = logits.gather(1, top[:, None])
    others = logits.masked_fill(F.one_hot(top, classes).bool(), -torch.inf)
    rest = others.logsumexp(1) - largest[:, 0]  # as log odds: probabilities are rounded to one
    total, occur = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for c in range(classes):
        gap = logits[:, c] - largest[:, 0]
        odds = torch.where(top == c, -rest, gap - torch.log(1 + rest.exp() - gap.exp()))
        there = ((y == c) & counts).any()
        total = total + torch.where(there, _area(odds, y == c, counts), 0.0)
        occur = occur + there
    return torch.where(occur > 1, total / occur, torch.nan)


def _area(scores: Tensor, positive: Tensor, weight: Tensor) -> Tensor:
    """The share of the pairs of a positive and another row in which the positive one has the higher score;
    equal scores count half."""
    broken = (scores.isnan() & weight).any()
    scores, order = scores.masked_fill(~weight, torch.inf).sort()
    ours = (positive & weight)[order].double()
    others = (~positive & weight)[order].double()
    below = others.cumsum(0)
    place = torch.arange(len(scores))
    is_first = torch.cat([torch.ones(1, dtype=torch.bool), scores[1:] != scores[:-1]])
    is_last = torch.cat([is_first[1:], torch.ones(1, dtype=torch.bool)])
    first = torch.where(is_first, place, 0).cummax(0).values  # of the rows with the same score
    last = torch.where(is_last, place, len(scores) - 1).flip(0).cummin(0).values.flip(0)
    half = (ours * (below[last] + below[first] - others[first])).sum() / 2
    return torch.where(broken, torch.nan, half / (ours.sum() * others.sum()))


def _sum(values: Tensor, weight: Tensor | None) -> Tensor:
    """The sums over the rows [clients, n] that count; the others may hold anything."""
    values = values.double()
    return (values if weight is None else values.where(weight, 0.0)).sum(1)


# -- of a finished run: all outputs of a client at once ----------------------------------------------------


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
    odds, of_class = Odds.of(found.logits), recalls(found.predicted, found.y)
    areas = [binary_auroc(*each) for each in _rankings(found, odds)]
    of_two = {"sensitivity": of_class.get(1, np.nan),
              "specificity": of_class.get(0, np.nan)} if classes == 2 else {}
    right = found.predicted == found.y
    return {
        "accuracy": float(right.mean()) if len(right) else np.nan,
        "balanced_accuracy": float(np.mean([*of_class.values()])) if of_class else np.nan,
        "auroc": float(np.mean(areas)) if areas else np.nan,
        **of_two,
        "calibration_error": calibration_error(odds.confidence, right),
    }


# -- how much each row moves a figure ------------------------------------------------------------------
#
# Influences [n] add up to zero, and their squares to an unbiased estimate of the figure's variance over other
# rows of the same client. A row is a sample: of sequences, the sum of its positions. The calibration error
# has none: its bins make it biased.


def mean_influence(values: np.ndarray) -> np.ndarray:
    """Of the mean of values [n]; zero where one row says nothing about others."""
    n = len(values)
    return np.asarray((values - values.mean()) / np.sqrt(n * (n - 1))) if n > 1 else np.zeros(n)


def classification_influences(outputs: np.ndarray, y: np.ndarray, classes: int) -> dict[str, np.ndarray]:
    """Of the figures of a classifier that have them."""
    found = Predictions.of(outputs, y, classes)
    right = (found.predicted == found.y).astype(float)
    of_class, undefined = {}, np.full(len(right), np.nan)
    for c in np.unique(found.y).tolist():
        of_class[c] = np.zeros(len(right))
        of_class[c][found.y == c] = mean_influence(right[found.y == c])
    areas = [_placements(*each) for each in _rankings(found, Odds.of(found.logits))]
    of_two = {"sensitivity": of_class.get(1, undefined),
              "specificity": of_class.get(0, undefined)} if classes == 2 else {}
    of_rows = {"balanced_accuracy": np.mean(list(of_class.values()), 0),
               "auroc": np.mean(areas, 0) if areas else undefined, **of_two} if len(right) else {}
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


def _placements(scores: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """DeLong's influence on an AUROC: how a row is placed among those of the other kind."""
    if np.isnan(scores).any():
        return np.full(len(scores), np.nan)
    influence = np.zeros(len(scores))
    for ours, sign in ((positive, 1.0), (~positive, -1.0)):
        others = np.sort(scores[~ours])
        below = sum(np.searchsorted(others, scores[ours], side) for side in ("left", "right"))
        influence[ours] = sign * mean_influence(np.asarray(below) / (2 * len(others)))
    return influence


# -- the figures ---------------------------------------------------------------------------------------


def recalls(predicted: np.ndarray, y: np.ndarray) -> dict[int, float]:
    """Of each class that occurs, the share of its rows that are taken for it."""
    there = np.bincount(y)
    right = np.bincount(y[predicted == y], minlength=len(there))
    return {c: float(right[c] / there[c]) for c in np.flatnonzero(there).tolist()}


def binary_auroc(scores: np.ndarray, positive: np.ndarray) -> float:
    """The share of the pairs of a positive and another row in which the positive one has the higher score;
    equal scores count half. NaN if either kind is missing."""
    ours, others = scores[positive], np.sort(scores[~positive])
    if not len(ours) or not len(others) or np.isnan(scores).any():
        return np.nan
    below = np.searchsorted(others, ours, "left").sum() + np.searchsorted(others, ours, "right").sum()
    return float(below / (2 * len(ours) * len(others)))  # of whole numbers: nothing is rounded before


def _rankings(found: Predictions, odds: Odds) -> list[tuple[np.ndarray, np.ndarray]]:
    """The scores of the rows, and which rows are positive, for each AUROC that the figure is a mean of: for
    the second of two classes; of more, for each class that occurs against the rest. None where all rows have
    the same class."""
    occur = np.unique(found.y)
    if len(occur) < 2:
        return []
    if found.logits.shape[1] == 2:
        with np.errstate(invalid="ignore"):
            return [(found.logits[:, 1].astype(np.float64) - found.logits[:, 0], found.y == 1)]
    return [(odds.of_class(found.logits, c), found.y == c) for c in occur.tolist()]


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

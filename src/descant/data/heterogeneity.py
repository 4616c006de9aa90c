"""How much the clients of a federation differ: in labels, in sizes, in features.

All rows of a client count, whichever split they are in, and unseen clients count like the others. The
pool is what all clients have together.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from descant.core.federation import Federation
from descant.core.random import stream
from descant.core.splits import SPLITS

MOST_FEATURES = 256  # of larger samples, this many features are looked at, chosen at random
_BLOCK = 16  # features at a time: a pool of a million rows need not be in memory as real numbers


def sizes(federation: Federation) -> np.ndarray:
    """Rows of each client, [clients]."""
    result: np.ndarray = sum(federation.split(name).sizes for name in SPLITS)  # type: ignore[assignment]
    return result


def class_counts(federation: Federation) -> np.ndarray | None:
    """Rows of each client and class, [clients, classes]; None where a row has no class."""
    classes = federation.classes
    if classes is None or federation.y.dim() != 1:
        return None
    counts = np.zeros(federation.everyone * classes, np.int64)
    for name in SPLITS:
        table = federation.split(name)
        owner = np.repeat(np.arange(len(table)), table.sizes)
        counts += np.bincount(owner * classes + federation.y.numpy()[table.indices], minlength=len(counts))
    return counts.reshape(-1, classes)


def label_distances(counts: np.ndarray) -> np.ndarray:
    """Total-variation distance of each client's label distribution from the pooled one, [clients].

    0 is alike; 1 would be a client that shares no class with the pool.
    """
    result: np.ndarray = 0.5 * np.abs(shares(counts) - shares(counts.sum(0, keepdims=True))).sum(1)
    return result


def effective_classes(counts: np.ndarray) -> np.ndarray:
    """The exponential of the entropy of each client's labels, [clients].

    A client with k equally frequent classes has k.
    """
    share = shares(counts)
    result: np.ndarray = np.exp(-(share * np.log(np.where(share > 0, share, 1.0))).sum(1))
    return result


def shares(counts: np.ndarray) -> np.ndarray:
    """Each row of a table as shares of its sum."""
    result: np.ndarray = counts / counts.sum(1, keepdims=True)
    return result


def gini(sizes: np.ndarray) -> float:
    """The Gini coefficient: 0 is equal sizes, near 1 is one client with nearly all rows."""
    n, ordered = len(sizes), np.sort(sizes).astype(float)
    return float(((2 * np.arange(1, n + 1) - n - 1) * ordered).sum() / (n * ordered.sum()))


class FeatureShift(NamedTuple):
    """How the features of each client differ from those of the pool, classes apart; all are [clients].

    The unit is the pool's standard deviation of a feature within its class; figures of several features
    are put together as the root of the mean square.
    """

    distance: np.ndarray  # between the client's mean and the pool's mean of rows of the same classes
    chance: np.ndarray  # how large the distance is on average where clients differ by chance alone
    spread: np.ndarray  # standard deviation within the client (and class); NaN for a single row

    @property
    def evident(self) -> bool:
        """Whether the clients clearly differ by more than chance."""
        by_chance = self.chance > 0  # not so where only this client has its classes
        ratio = np.square(self.distance[by_chance] / self.chance[by_chance])
        if len(ratio) and ratio.mean() > 2:  # it is 1 on average where there is no shift
            return True
        spread = self.spread[by_chance & (self.chance < 0.25)]  # of few rows, it says little
        # classes differ in spread, too: where clients have few of them, by about a tenth
        return bool(len(spread) and spread.std() > 0.25 * spread.mean())


def feature_shift(federation: Federation) -> FeatureShift | None:
    """The feature shift that labels do not explain; None where x holds no real features (or bytes)."""
    x = federation.x
    if not x.is_floating_point() and x.dtype != torch.uint8:
        return None
    rows = _by_owner(federation)
    size = sizes(federation)
    start = np.cumsum(size) - size
    features = x.reshape(len(x), -1)
    if features.shape[1] > MOST_FEATURES:
        chosen = stream(0, "looked at").choice(features.shape[1], MOST_FEATURES, replace=False)
        features = features[:, torch.from_numpy(np.sort(chosen))]
    features = features[torch.from_numpy(rows)]
    counts = class_counts(federation)
    counts = size[:, None] if counts is None else counts
    totals = counts.sum(0)
    label = torch.zeros(len(rows), dtype=torch.long) if counts.shape[1] == 1 else federation.y[rows]

    used, apart, square = 0, np.zeros(len(size)), np.zeros(len(rows))
    for first in range(0, features.shape[1], _BLOCK):
        block = features[:, first : first + _BLOCK].double()
        mean = torch.zeros(len(totals), block.shape[1], dtype=torch.float64).index_add_(0, label, block)
        mean /= torch.from_numpy(np.maximum(totals, 1))[:, None]
        scale = block.abs().amax(0)
        block -= mean[label]
        std = block.square().mean(0).sqrt()
        varies = std > 1e-9 * scale  # what is constant up to rounding tells nothing
        standard = (block[:, varies] / std[varies]).numpy()
        used += standard.shape[1]
        apart += np.square(np.add.reduceat(standard, start) / size[:, None]).sum(1)
        square += np.square(standard).sum(1)
    if not used:
        return None
    apart /= used
    # the mean of n of N exchangeable rows has the variance (1/n - 1/N), which is here mixed over classes
    chance = (1 - (counts / size[:, None] * counts / np.maximum(totals, 1)).sum(1)) / size
    within = np.add.reduceat(square, start) / size / used - apart
    with np.errstate(invalid="ignore", divide="ignore"):
        spread = np.where(size > 1, np.sqrt(np.maximum(within, 0) / (1 - chance)), np.nan)
    return FeatureShift(np.sqrt(apart), np.sqrt(np.maximum(chance, 0)), spread)


class Measured(NamedTuple):
    """What the figures and pictures of a federation are made of."""

    sizes: np.ndarray  # [clients]
    counts: np.ndarray | None  # [clients, classes]
    shift: FeatureShift | None


def measure(federation: Federation) -> Measured:
    """All of it, once: the features take a pass over the data."""
    return Measured(sizes(federation), class_counts(federation), feature_shift(federation))


def _by_owner(federation: Federation) -> np.ndarray:
    """The rows that have an owner, client by client."""
    tables = [federation.split(name) for name in SPLITS]
    owner = np.concatenate([np.repeat(np.arange(len(table)), table.sizes) for table in tables])
    rows: np.ndarray = np.concatenate([table.indices for table in tables])[np.argsort(owner, kind="stable")]
    return rows

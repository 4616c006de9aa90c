"""How much the clients of a federation differ: in labels, in sizes, in features.

All rows of a client count, whichever split they are in, unless splits are named; unseen clients count like
the others. The pool is what all clients have together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from descant.core.federation import Federation
from descant.core.random import stream
from descant.core.splits import SPLITS, SplitName

NAMED = 12  # the most classes that are listed by name
LONGEST = 16  # letters of a name
MOST_FEATURES = 256  # of larger samples, a random choice of this many is measured
_BLOCK = 16  # features at a time: a large pool is never in memory as float64


def sizes(federation: Federation) -> np.ndarray:
    """Rows of each client, [clients]."""
    return np.asarray(sum(federation.split(name).sizes for name in SPLITS))


def class_counts(federation: Federation, splits: Sequence[SplitName] = SPLITS) -> np.ndarray | None:
    """Rows of each client and class in these splits, [clients, classes]; None where a row has no class."""
    classes = federation.classes
    if classes is None or federation.y.dim() != 1:
        return None
    counts = np.zeros(federation.everyone * classes, np.int64)
    for name in splits:
        table = federation.split(name)
        owner = np.repeat(np.arange(len(table)), table.sizes)
        counts += np.bincount(owner * classes + federation.y.numpy()[table.indices], minlength=len(counts))
    return counts.reshape(-1, classes)


def label_distances(counts: np.ndarray) -> np.ndarray:
    """Total variation of each client's labels from the pooled ones, [clients]; 1: no class in common."""
    return np.asarray(0.5 * np.abs(shares(counts) - shares(counts.sum(0, keepdims=True))).sum(1))


def effective_classes(counts: np.ndarray) -> np.ndarray:
    """The exponential of the entropy of each client's labels, [clients]: k for k equally frequent ones."""
    share = shares(counts)
    return np.asarray(np.exp(-(share * np.log(np.where(share > 0, share, 1.0))).sum(1)))


def shares(counts: np.ndarray) -> np.ndarray:
    """Each row of a table as shares of its sum."""
    return np.asarray(counts / counts.sum(1, keepdims=True))


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
    chance: np.ndarray  # the average distance if clients differ by chance alone
    spread: np.ndarray  # standard deviation within the client (and class); NaN for a single row

    @property
    def evident(self) -> bool:
        """Whether the clients clearly differ by more than chance."""
        by_chance = self.chance > 0  # 0 if only this client has its classes
        ratio = np.square(self.distance[by_chance] / self.chance[by_chance])
        if len(ratio) and ratio.mean() > 2:  # 1 on average without a shift
            return True
        spread = self.spread[by_chance & (self.chance < 0.25)]  # imprecise with few rows
        # classes differ in spread too, by about a tenth if clients have few of them
        return bool(len(spread) and spread.std() > 0.25 * spread.mean())


def feature_shift(federation: Federation) -> FeatureShift | None:
    """The feature shift that labels do not explain; None unless x holds real features or bytes."""
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
        varies = std > 1e-9 * scale  # a constant feature carries no information
        standard = (block[:, varies] / std[varies]).numpy()
        used += standard.shape[1]
        apart += np.square(np.add.reduceat(standard, start) / size[:, None]).sum(1)
        square += np.square(standard).sum(1)
    if not used:
        return None
    apart /= used
    # the mean of n of N exchangeable rows has the variance (1/n - 1/N), here mixed over classes
    chance = (1 - (counts / size[:, None] * counts / np.maximum(totals, 1)).sum(1)) / size
    within = np.add.reduceat(square, start) / size / used - apart
    with np.errstate(invalid="ignore", divide="ignore"):
        spread = np.where(size > 1, np.sqrt(np.maximum(within, 0) / (1 - chance)), np.nan)
    return FeatureShift(np.sqrt(apart), np.sqrt(np.maximum(chance, 0)), spread)


class Measured(NamedTuple):
    """The measurements behind the figures and pictures of a federation."""

    sizes: np.ndarray  # [clients]
    counts: np.ndarray | None  # [clients, classes]
    shift: FeatureShift | None


def measure(federation: Federation) -> Measured:
    """All measurements; the feature shift takes a pass over the data."""
    return Measured(sizes(federation), class_counts(federation), feature_shift(federation))


def _by_owner(federation: Federation) -> np.ndarray:
    """The rows that have an owner, client by client."""
    tables = [federation.split(name) for name in SPLITS]
    owner = np.concatenate([np.repeat(np.arange(len(table)), table.sizes) for table in tables])
    return np.asarray(np.concatenate([table.indices for table in tables])[np.argsort(owner, kind="stable")])


# -- in words ------------------------------------------------------------------------------------------


def facts(federation: Federation, measured: Measured) -> dict[str, str]:
    """Sizes, splits and heterogeneity by name."""
    sizes, counts, shift = measured
    shape = " x ".join(map(str, federation.x.shape[1:])) or "1"
    unseen = f", and {federation.unseen:,} unseen (never train)" if federation.unseen else ""
    found = {
        "data": federation.heading,
        "clients": f"{federation.population:,}{unseen}",
        "rows": f"{sizes.sum():,}, each {shape} ({str(federation.x.dtype).removeprefix('torch.')})",
        "rows per client": f"{sizes.min():,} to {sizes.max():,}, median {np.median(sizes):,.6g}",
        "splits": ", ".join(f"{name} {federation.split(name).sizes.sum():,}" for name in SPLITS),
        "size Gini": f"{gini(sizes):.3f} (0: equal sizes)",
    }
    if counts is None:
        found["classes"] = "none: targets are numbers"
    else:
        distances, pool = label_distances(counts), counts.sum(0, keepdims=True)
        names = federation.class_names
        named = "" if names is None or len(names) > NAMED else f" ({', '.join(map(short, names))})"
        own = (counts > 0).sum(1)
        per_client = f"{own.min()}" if own.min() == own.max() else f"{own.min()} to {own.max()}"
        found |= {
            "classes": f"{counts.shape[1]}{named}; a client has {per_client}",
            "effective classes": f"{effective_classes(counts).mean():.2f} per client on average "
                                 f"(pool: {effective_classes(pool).item():.2f})",
            "label distance": f"{distances.mean():.3f} on average, {distances.max():.3f} at most "
                              "(total variation from the pool; 0: identical)",
        }
    if shift is not None:
        found["feature shift"] = (f"{shift.distance.mean():.3f} standard deviations on average "
                                  f"(expected by chance: {shift.chance.mean():.3f})")
        spread = shift.spread[~np.isnan(shift.spread)]
        if len(spread):
            found["feature spread"] = (f"{spread.min():.2f} to {spread.max():.2f} standard deviations within "
                                       "a client")
    return found


def short(name: str) -> str:
    """A name as it fits into a table."""
    return name if len(name) <= LONGEST else f"{name[:LONGEST - 1]}…"

"""Neighbouring classes for each client, as the code of pFedMe and pFedBreD deals them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from descant.core.fields import hyper
from descant.core.random import stream
from descant.data.partitions import base
from descant.data.partitions.base import NOBODY, Partition
from descant.data.samples import Samples
from descant.errors import UsageError


@dataclass(frozen=True)
class Neighbours(Partition):
    """Neighbouring classes, client i those from i mod C on, and sizes with a lognormal part.

    The deal of the authors' code of pFedMe (arXiv:2006.08848) and pFedBreD (arXiv:2310.09183). Everyone first
    gets `least` rows of each of its classes i, i + 1, ... mod C. Then, client after client and class after
    class, it gets floor(s) a + b more, a from 1..`times`, b from `smallest`..`largest`, or none if the
    class has not more than that left; twice as many where there are at most 20 clients. The s of a class
    are lognormal shares of its rows less `reserve`, one for each client and place among its classes; as
    the code has it, client i of n takes that of client i // (n // C), so that most are taken by nobody.
    Rows that are left belong to nobody.

    `mislabelled` repeats an oversight of pFedBreD's code for MNIST: the first `least` rows of a client's
    j-th class are labelled j. A row of a nine may be called a zero, in training and in test data.
    """

    name: ClassVar[str] = "neighbours"

    classes_per_client: int = hyper(2, "number of classes that each client has", ge=1)
    least: int = hyper(10, "rows of each of its classes that everyone gets first", ge=1)
    sigma: float = hyper(2.0, "standard deviation of the logarithm of the shares", ge=0, le=5)
    reserve: int = hyper(1000, "rows of a class that are not shared out by the shares", ge=0)
    times: int = hyper(10, "the largest factor of a share", ge=1)
    smallest: int = hyper(10, "least number of further rows of a class", ge=0)
    largest: int = hyper(200, "largest number of further rows of a class, without its share", ge=0)
    mislabelled: bool = hyper(False, "the first rows of a client's j-th class are labelled j")

    def __post_init__(self) -> None:
        super().__post_init__()
        base.check_order(self.smallest, self.largest)

    def assign(self, samples: Samples, clients: int, seed: int) -> np.ndarray:
        classes, label, totals = base.need_classes(samples, clients, self.name, self.classes_per_client)
        rng = stream(seed, "partition")
        counts = self._counts(classes, totals, clients, rng)
        # the rows of a class in random order: the first `least` of every client, then what else it gets
        result = np.full(len(label), NOBODY)
        for k, count in enumerate(counts):
            owners = np.repeat(np.tile(np.arange(clients), 2), count.T.ravel())
            result[rng.permutation(np.flatnonzero(label == k))[: len(owners)]] = owners
        return result

    def _counts(self, classes: np.ndarray, totals: np.ndarray, clients: int, rng: np.random.Generator
                ) -> np.ndarray:
        """How many rows each client gets of each class, [classes, clients, 2]: at first, and then."""
        number, places = len(classes), np.arange(self.classes_per_client)
        counts = np.zeros((number, clients, 2), int)
        held = (np.arange(clients)[:, None] + places) % number
        counts[held, np.arange(clients)[:, None], 0] = self.least
        left = totals - counts[..., 0].sum(1)
        for k in np.flatnonzero(left < 0)[:1]:
            raise UsageError(f"class {classes[k]} has {totals[k]} rows for {totals[k] - left[k]} that are "
                             "dealt first: use fewer clients, fewer classes_per_client or a smaller least")
        shares = rng.lognormal(0.0, self.sigma, (number, clients, self.classes_per_client))
        shares *= (np.maximum(totals - self.reserve, 0) / shares.sum((1, 2)))[:, None, None]
        per_share = max(1, clients // number)
        for client in range(clients):
            for j, k in enumerate(held[client]):
                factor = rng.integers(1, self.times, endpoint=True)
                more = int(shares[k, client // per_share, j]) * int(factor)
                more += int(rng.integers(self.smallest, self.largest, endpoint=True))
                more *= 2 if clients <= 20 else 1
                if more < left[k]:
                    counts[k, client, 1] = more
                    left[k] -= more
        return counts

    def transform(self, samples: Samples, client: np.ndarray, clients: int, seed: int) -> Samples:
        if not self.mislabelled:
            return samples
        labels = base.need_labels(samples, clients, self.name)
        classes, label = np.unique(labels, return_inverse=True)
        y = labels.copy()
        order = stream(seed, "partition labels").permutation(len(label))
        for number in range(clients):
            for j in range(self.classes_per_client):
                mine = order[(client[order] == number) & (label[order] == (number + j) % len(classes))]
                y[mine[: self.least]] = classes[j]
        return dataclasses.replace(samples, y=torch.from_numpy(y))

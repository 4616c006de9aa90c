"""Rules that deal the rows of a dataset to clients. A new one is a class and a line in `PARTITIONS`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from descant.data.samples import Samples
from descant.errors import UsageError
from descant.fields import Checked, hyper
from descant.random import stream

_NOBODY = -1
_DRAWS = 20  # of Dirichlet shares, before the smallest clients are topped up


class Partition(Checked, ABC):
    """Base of all partitions; the first line of a docstring is what `descant list` shows."""

    name: ClassVar[str]

    @abstractmethod
    def assign(self, samples: Samples, clients: int, seed: int) -> np.ndarray:
        """For each row the number of its client, 0..clients-1, or -1 if nobody gets it.

        Every client gets at least one row.
        """


@dataclass(frozen=True)
class Iid(Partition):
    """Rows dealt at random, equally many to each client."""

    name: ClassVar[str] = "iid"

    def assign(self, samples: Samples, clients: int, seed: int) -> np.ndarray:
        _check_clients(clients, len(samples.x))
        return stream(seed, "partition").permutation(np.arange(len(samples.x)) % clients)


@dataclass(frozen=True)
class Classes(Partition):
    """A fixed number of classes per client, each class shared out evenly among those who have it.

    The label skew of McMahan et al., Communication-Efficient Learning of Deep Networks from
    Decentralized Data, AISTATS 2017, arXiv:1602.05629, with classes in place of shards.
    """

    name: ClassVar[str] = "classes"

    classes_per_client: int = hyper(2, "number of classes that each client has", low=1)

    def assign(self, samples: Samples, clients: int, seed: int) -> np.ndarray:
        labels = _need_labels(samples, self.name)
        _check_clients(clients, len(labels))
        classes, label = np.unique(labels, return_inverse=True)
        if self.classes_per_client > len(classes):
            raise UsageError(f"classes_per_client = {self.classes_per_client}, but the data has "
                             f"{len(classes)} classes: use at most that many")
        rng = stream(seed, "partition")

        holds = np.zeros((clients, len(classes)), bool)
        for client in range(clients):
            # taking the least used classes keeps all use counts within one of each other
            by_use = np.lexsort((rng.random(len(classes)), holds.sum(0)))
            holds[client, by_use[: self.classes_per_client]] = True

        result = np.full(len(labels), _NOBODY)
        for k in range(len(classes)):
            holders = rng.permutation(np.flatnonzero(holds[:, k]))
            rows = rng.permutation(np.flatnonzero(label == k))
            if len(rows) < len(holders):
                raise UsageError(f"class {classes[k]} has {len(rows)} rows for the {len(holders)} clients "
                                 "that are to share it: use fewer clients or fewer classes_per_client")
            if len(holders):
                result[rows] = holders[np.arange(len(rows)) % len(holders)]
        return result


@dataclass(frozen=True)
class Dirichlet(Partition):
    """Each class divided among the clients in Dirichlet(alpha) shares.

    Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual
    Classification, 2019, arXiv:1909.06335; by class, as in Yurochkin et al., Bayesian Nonparametric
    Federated Learning of Neural Networks, ICML 2019, arXiv:1905.12022. Shares are drawn up to 20 times
    until every client has `min_size` rows; after that, the largest clients hand rows to the smallest.
    """

    name: ClassVar[str] = "dirichlet"

    alpha: float = hyper(0.5, "concentration: small is heterogeneous, large is iid", above=0)
    min_size: int = hyper(10, "least number of rows of a client", low=1)

    def assign(self, samples: Samples, clients: int, seed: int) -> np.ndarray:
        labels = _need_labels(samples, self.name)
        _check_clients(clients, len(labels))
        if clients * self.min_size > len(labels):
            raise UsageError(f"{clients} clients with min_size = {self.min_size} need "
                             f"{clients * self.min_size} rows, but there are {len(labels)}: "
                             "use fewer clients or a smaller min_size")
        rng = stream(seed, "partition")
        _, label, totals = np.unique(labels, return_inverse=True, return_counts=True)

        for _ in range(_DRAWS):
            shares = rng.dirichlet(np.full(clients, self.alpha), size=len(totals))
            counts = _cut(totals, shares)  # [classes, clients]
            if counts.sum(0).min() >= self.min_size:
                break
        else:
            _top_up(counts, self.min_size)

        result = np.full(len(labels), _NOBODY)
        for k, count in enumerate(counts):
            result[rng.permutation(np.flatnonzero(label == k))] = np.repeat(np.arange(clients), count)
        return result


@dataclass(frozen=True)
class Natural(Partition):
    """Each row to the client that naturally owns it: client k is the k-th owner in sorted order."""

    name: ClassVar[str] = "natural"

    def assign(self, samples: Samples, clients: int, seed: int) -> np.ndarray:
        if samples.owner is None:
            raise UsageError("partition 'natural' needs data whose rows have owners, and these have none: "
                             "choose 'iid' or another partition")
        owners, number = np.unique(samples.owner, return_inverse=True)
        if clients != len(owners):
            raise UsageError(f"clients = {clients}, but the data has {len(owners)} natural owners: "
                             f"set clients = {len(owners)}, or choose another partition")
        return number


def _check_clients(clients: int, rows: int) -> None:
    if clients < 1:
        raise UsageError(f"clients must be at least 1, not {clients}")
    if clients > rows:
        raise UsageError(f"clients = {clients}, but the data has {rows} rows: use at most that many clients")


def _need_labels(samples: Samples, name: str) -> np.ndarray:
    if samples.labels is None:
        raise UsageError(f"partition {name!r} needs class labels, and this dataset has none: "
                         "choose 'iid' or 'natural'")
    return samples.labels


def _cut(totals: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """`shares` [classes, clients] of `totals` [classes] in whole rows, none lost and none made up."""
    return np.diff(np.rint(np.cumsum(shares, 1) * totals[:, None]).astype(int), prepend=0)


def _top_up(counts: np.ndarray, least: int) -> None:
    """Move rows, in place, until every client (column) has `least`.

    Ends because there are rows enough: while one client has too few, the largest has more than `least`.
    """
    sizes = counts.sum(0)
    while sizes.min() < least:
        poor, rich = sizes.argmin(), sizes.argmax()
        label = counts[:, rich].argmax()  # what it can best spare
        counts[label, rich] -= 1
        counts[label, poor] += 1
        sizes[rich] -= 1
        sizes[poor] += 1


PARTITIONS: dict[str, type[Partition]] = {
    partition.name: partition
    for partition in (
        Iid,
        Classes,
        Dirichlet,
        Natural,
    )
}

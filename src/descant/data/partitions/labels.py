"""Partitions by label: clients differ in their classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from descant.core.fields import hyper
from descant.core.random import stream
from descant.data.partitions import base
from descant.data.partitions.base import NOBODY, Partition
from descant.data.samples import Samples
from descant.errors import UsageError

_DRAWS = 20  # of Dirichlet shares, before the smallest clients are topped up
_HOPELESS = 20  # clients that are too small: the chance that another draw has none is about exp(-20)


@dataclass(frozen=True)
class Classes(Partition):
    """A fixed number of classes per client, and clients of equal or unequal size.

    The label skew of McMahan et al., Communication-Efficient Learning of Deep Networks from
    Decentralized Data, AISTATS 2017, arXiv:1602.05629, with classes in place of shards. All classes have
    equally many clients (up to one). With `sizes = "equal"` each class is shared out evenly
    among those who have it. "lognormal": sizes are in proportion to exp(sigma N(0, 1)), and as large as
    the data allow. "uniform": sizes are drawn from `smallest`..`largest` (CGPFL: 400..5000); where a
    class has fewer rows than its clients want, all sizes are multiplied by the one factor with which the
    scarcest class suffices. In both a client has equally many rows of each of its classes, at least one.
    """

    name: ClassVar[str] = "classes"

    classes_per_client: int = hyper(2, "number of classes that each client has", ge=1)
    sizes: Literal["equal", "lognormal", "uniform"] = hyper("equal", "how the clients' sizes are drawn")
    sigma: float = hyper(1.0, "lognormal: standard deviation of the logarithm of the sizes", ge=0, le=5)
    smallest: int = hyper(400, "uniform: smallest size", ge=1)
    largest: int = hyper(5000, "uniform: largest size", ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        base.check_order(self.smallest, self.largest)

    def assign(self, samples: Samples, clients: int, seed: int) -> np.ndarray:
        classes, label, totals = base.need_classes(samples, clients, self.name, self.classes_per_client)
        rng = stream(seed, "partition")
        holds = self._holds(clients, len(classes), rng)
        holders = holds.sum(0)
        for k in np.flatnonzero(totals < holders)[:1]:
            raise UsageError(f"class {classes[k]} has {totals[k]} rows for the {holders[k]} clients "
                             "that are to share it: use fewer clients or fewer classes_per_client")
        if self.sizes != "equal":
            return base.deal_counts(label, self._counts(holds, totals, seed), rng)
        result = np.full(len(label), NOBODY)
        for k in range(len(classes)):
            mine = rng.permutation(np.flatnonzero(holds[:, k]))
            rows = rng.permutation(np.flatnonzero(label == k))
            if len(mine):
                result[rows] = mine[np.arange(len(rows)) % len(mine)]
        return result

    def _holds(self, clients: int, classes: int, rng: np.random.Generator) -> np.ndarray:
        """Which classes each client has, [clients, classes]."""
        holds = np.zeros((clients, classes), bool)
        used = np.zeros(classes, int)
        for client in range(clients):
            # taking the least used classes keeps all use counts within one of each other
            chosen = np.lexsort((rng.random(classes), used))[: self.classes_per_client]
            holds[client, chosen] = True
            used[chosen] += 1
        return holds

    def _counts(self, holds: np.ndarray, totals: np.ndarray, seed: int) -> np.ndarray:
        """How many rows of each class each client gets, [classes, clients]: one, and what its size adds."""
        drawn = self._drawn(len(holds), seed)
        if self.sizes == "uniform":
            drawn = np.maximum(drawn / self.classes_per_client - 1, 0)
        wanted = holds.T * drawn  # [classes, clients]
        spare, total = totals - holds.sum(0), wanted.sum(1)
        factor = np.min(spare[total > 0] / total[total > 0], initial=np.inf)
        factor *= 1 - 1e-12  # rounding must not ask for a row too many
        if self.sizes == "uniform":
            factor = min(factor, 1.0)
        counts: np.ndarray = holds.T * (1 + np.floor(wanted * factor).astype(int))
        return counts

    def _drawn(self, clients: int, seed: int) -> np.ndarray:
        rng = stream(seed, "partition sizes")
        if self.sizes == "lognormal":
            return np.exp(self.sigma * rng.standard_normal(clients))
        return rng.integers(self.smallest, self.largest, clients, endpoint=True).astype(float)

    def report(self, samples: Samples, client: np.ndarray, clients: int, seed: int) -> tuple[str, ...]:
        notes = super().report(samples, client, clients, seed)
        if self.sizes != "uniform":
            return notes
        wanted, dealt = self._drawn(clients, seed).sum(), int((client != NOBODY).sum())
        if wanted - dealt < clients * self.classes_per_client:  # lost to rounding, if at all
            return notes
        return (*notes, f"sizes in {self.smallest}..{self.largest} scaled by {dealt / wanted:.3g}: "
                        "there are not enough rows")


@dataclass(frozen=True)
class Shards(Partition):
    """Rows sorted by label and cut into equal shards, some of which each client gets at random.

    McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS
    2017, arXiv:1602.05629 (2 shards); pFedGT uses 20, 50 and 100. A shard can lie across two labels.
    """

    name: ClassVar[str] = "shards"

    shards_per_client: int = hyper(2, "number of shards that each client gets: small is heterogeneous", ge=1)

    def assign(self, samples: Samples, clients: int, seed: int) -> np.ndarray:
        labels = base.need_labels(samples, clients, self.name)
        shards = clients * self.shards_per_client
        if shards > len(labels):
            raise UsageError(f"{clients} clients with shards_per_client = {self.shards_per_client} need "
                             f"{shards} shards, but there are {len(labels)} rows: use fewer of them")
        rng = stream(seed, "partition")
        order = rng.permutation(len(labels))
        order = order[np.argsort(labels[order], kind="stable")]
        owner = rng.permutation(shards) // self.shards_per_client  # of each shard
        result = np.empty(len(labels), int)
        result[order] = owner[np.arange(len(labels)) * shards // len(labels)]
        return result


@dataclass(frozen=True)
class Dirichlet(Partition):
    """Each class divided among the clients in Dirichlet(alpha) shares.

    Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual
    Classification, 2019, arXiv:1909.06335; by class, as in Yurochkin et al., Bayesian Nonparametric
    Federated Learning of Neural Networks, ICML 2019, arXiv:1905.12022. Shares are drawn up to 20 times
    until every client has `min_size` rows; after that, or where it is hopeless, the largest clients hand
    rows to the smallest.
    """

    name: ClassVar[str] = "dirichlet"

    alpha: float = hyper(0.5, "concentration: small is heterogeneous, large is iid", gt=0)
    min_size: int = hyper(10, "least number of rows of a client", ge=1)

    def assign(self, samples: Samples, clients: int, seed: int) -> np.ndarray:
        labels = base.need_labels(samples, clients, self.name)
        base.check_enough(clients, self.min_size, len(labels))
        rng = stream(seed, "partition")
        _, label, totals = np.unique(labels, return_inverse=True, return_counts=True)
        for _ in range(_DRAWS):
            shares = rng.dirichlet(np.full(clients, self.alpha), size=len(totals))
            counts = base.cut(totals, shares)  # [classes, clients]
            short = np.count_nonzero(counts.sum(0) < self.min_size)
            if short == 0 or short > _HOPELESS:
                break
        client = base.deal_counts(label, counts, rng)
        base.top_up(client, clients, self.min_size, rng)
        return client


@dataclass(frozen=True)
class LabelMajority(Partition):
    """One class makes up a given share of a client's rows, and the others are equally frequent.

    FedMAP's label skew (85 %, half of the clients) for any data. All clients have the same size, the
    largest for which the rows suffice. The first clients are balanced, the last `skewed` of them have a
    majority; all classes are the majority of equally many clients (up to one).
    """

    name: ClassVar[str] = "label_majority"

    majority: float = hyper(0.85, "share of the client's rows that are of one class", gt=0, le=1)
    skewed: float = hyper(1.0, "share of the clients that have a majority; the others are balanced",
                          gt=0, le=1)

    def assign(self, samples: Samples, clients: int, seed: int) -> np.ndarray:
        labels = base.need_labels(samples, clients, self.name)
        classes, label, totals = np.unique(labels, return_inverse=True, return_counts=True)
        if len(classes) < 2 or self.majority < 1 / len(classes):
            raise UsageError(f"majority = {self.majority:g} is no majority among {len(classes)} classes: "
                             "use data with more classes, or a greater share")
        rng = stream(seed, "partition")
        skewed = np.arange(clients) >= clients - max(round(self.skewed * clients), 1)
        first = np.empty(clients, int)  # the class that a client begins with
        for kind in (skewed, ~skewed):
            first[kind] = rng.permutation(np.arange(kind.sum()) % len(classes))

        low, high = 0, len(labels) // clients + 1  # the largest possible size lies in [low, high)
        while high - low > 1:
            size = (low + high) // 2
            enough = (self._counts(size, first, skewed, len(classes)).sum(1) <= totals).all()
            low, high = (size, high) if enough else (low, size)
        if not low:
            raise UsageError(f"{clients} clients are too many for majority = {self.majority:g}: the rarest "
                             f"class has {totals.min()} rows; use fewer clients")
        return base.deal_counts(label, self._counts(low, first, skewed, len(classes)), rng)

    def _counts(self, size: int, first: np.ndarray, skewed: np.ndarray, classes: int) -> np.ndarray:
        """How many rows of each class a client of this size has, [classes, clients]; grows with the size."""
        place = (np.arange(classes)[:, None] - first) % classes  # 0: the client's own class
        most = round(self.majority * size)
        # r rows in turn over c classes: class j gets one more for each time that the turn comes to it
        rest = np.where(place == 0, most, (size - most + classes - 1 - place) // (classes - 1))
        even = (size + classes - 1 - place) // classes
        return np.where(skewed, rest, even)

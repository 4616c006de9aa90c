"""The base of all partitions, and helpers that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from descant.core.fields import Checked
from descant.data.samples import Samples
from descant.errors import UsageError

NOBODY = -1


class Partition(Checked, ABC):
    """Base of all partitions; the first line of a docstring is what `descant list` shows."""

    name: ClassVar[str]

    @abstractmethod
    def assign(self, samples: Samples, clients: int, seed: int) -> np.ndarray:
        """For each row the number of its client, 0..clients-1, or -1 if nobody gets it."""

    def deal(self, samples: Samples, clients: int, seed: int) -> np.ndarray:
        """`assign`, with groups kept together: a group counts as one row, its first."""
        if samples.group is None:
            return self.assign(samples, clients, seed)
        _, first, group = np.unique(samples.group, return_index=True, return_inverse=True)
        owner = None if samples.owner is None else samples.owner[first]
        heads = Samples(samples.x[first], samples.y[first], samples.classes, owner)
        try:
            return self.assign(heads, clients, seed)[group]
        except UsageError as error:
            raise UsageError(f"{error} (the rows of a group stay together and count as one here)") from None

    def transform(self, samples: Samples, client: np.ndarray, clients: int, seed: int) -> Samples:
        """The samples as their clients see them; `client` is the result of `deal`."""
        return samples

    def report(self, samples: Samples, client: np.ndarray, clients: int, seed: int) -> tuple[str, ...]:
        """Notes for the user on `client`, the result of `deal`: one line each."""
        left = int((client == NOBODY).sum())
        return (f"{left} of {len(client)} rows belong to no client",) if left else ()

    @property
    def keeps_owners(self) -> bool:
        """Whether all rows of a client have one natural owner, which gives it its name."""
        return False


def check_clients(clients: int, rows: int) -> None:
    if clients < 1:
        raise UsageError(f"clients must be at least 1, not {clients}")
    if clients > rows:
        raise UsageError(f"clients = {clients}, but the data has {rows} rows: use at most that many clients")


def check_enough(clients: int, least: int, rows: int) -> None:
    if clients * least > rows:
        raise UsageError(f"{clients} clients with min_size = {least} need {clients * least} rows, but there "
                         f"are {rows}: use fewer clients or a smaller min_size")


def need_labels(samples: Samples, clients: int, name: str) -> np.ndarray:
    if samples.labels is None or samples.labels.ndim != 1:
        raise UsageError(f"partition {name!r} needs class labels, and this dataset has none: "
                         "choose 'iid' or 'natural'")
    check_clients(clients, len(samples.labels))
    return samples.labels


def need_classes(samples: Samples, clients: int, name: str, per_client: int
                 ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The classes, the class of each row as a place among them, and how many rows each has."""
    labels = need_labels(samples, clients, name)
    classes, label, totals = np.unique(labels, return_inverse=True, return_counts=True)
    if per_client > len(classes):
        raise UsageError(f"classes_per_client = {per_client}, but the data has {len(classes)} classes: "
                         "use at most that many")
    return classes, label, totals


def check_order(smallest: int, largest: int) -> None:
    if smallest > largest:
        raise UsageError(f"smallest = {smallest} is greater than largest = {largest}: swap them")


def cut(total: int | np.ndarray, shares: np.ndarray) -> np.ndarray:
    """`shares` (along the last axis, which sum to 1) of `total` in whole rows that sum to `total`."""
    ends = np.rint(np.cumsum(shares, -1) * np.asarray(total)[..., None]).astype(int)
    return np.diff(ends, prepend=0)


def deal_counts(label: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """`counts` [classes, clients] random rows of each class to each client; the rest to nobody."""
    result = np.full(len(label), NOBODY)
    by_label = np.split(np.argsort(label, kind="stable"), np.cumsum(np.bincount(label))[:-1])
    for rows, count in zip(by_label, counts, strict=True):
        clients = np.repeat(np.arange(len(count)), count)
        result[rng.permutation(rows)[: len(clients)]] = clients
    return result


def rank_in_client(client: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """For each row its place, 0, 1, ..., in a random order of the rows of its client (-1 counts as one)."""
    order = rng.permutation(len(client))
    order = order[np.argsort(client[order], kind="stable")]
    _, start, size = np.unique(client[order], return_index=True, return_counts=True)
    rank = np.empty(len(client), int)
    rank[order] = np.arange(len(client)) - np.repeat(start, size)
    return rank


def top_up(client: np.ndarray, clients: int, least: int, rng: np.random.Generator) -> None:
    """Move rows, in place, until every client has `least`; there must be enough rows.

    The largest clients give up random rows, down to a common size that is at least `least`.
    """
    sizes = np.bincount(client, minlength=clients)
    missing = np.maximum(least - sizes, 0)
    give = _levelled(sizes, int(missing.sum()), least)
    released = np.flatnonzero(rank_in_client(client, rng) < give[client])
    client[rng.permutation(released)] = np.repeat(np.arange(clients), missing)


def _levelled(sizes: np.ndarray, total: int, least: int) -> np.ndarray:
    """What to take from each of `sizes` so that it adds up to `total` and the largest become equal."""
    low, high = least, int(sizes.max(initial=least)) + 1  # the level lies in [low, high)
    while high - low > 1:
        level = (low + high) // 2
        low, high = (level, high) if np.maximum(sizes - level, 0).sum() >= total else (low, level)
    take: np.ndarray = np.maximum(sizes - low, 0)
    take[np.flatnonzero(take)[: take.sum() - total]] -= 1  # fewer than there are takers: `low` is largest
    return take

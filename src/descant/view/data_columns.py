"""Clients side by side: one to a column, or several where there are more than fit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from descant.core.federation import Federation
from descant.data.heterogeneity import shares


@dataclass(frozen=True)
class Columns:
    """Which clients stand in which column: column k holds order[edges[k]:edges[k + 1]]."""

    order: np.ndarray
    edges: np.ndarray
    seen: float  # columns of the clients that train; those of the unseen ones follow

    @classmethod
    def of(cls, federation: Federation, most: int, by: tuple[np.ndarray, ...] = ()) -> Columns:
        """At most `most` columns. Clients are ordered by the keys `by` [clients], the last one first: like
        clients should share a column. Without a key they stay as they are."""
        clients = federation.everyone
        columns = min(clients, most)
        order = np.lexsort((*by, np.arange(clients) >= federation.population))  # which is stable
        edges = np.arange(columns + 1) * clients // columns
        return cls(order, edges, federation.population * columns / clients)

    def __len__(self) -> int:
        return len(self.edges) - 1

    @property
    def merged(self) -> float | None:
        """How many clients share a column, if any do."""
        return None if len(self) == len(self.order) else len(self.order) / len(self)

    def mean(self, values: np.ndarray) -> np.ndarray:
        """`values` [clients, ...] averaged over the clients of each column."""
        totals = np.add.reduceat(values[self.order].astype(float), self.edges[:-1])
        result: np.ndarray = totals / np.diff(self.edges).reshape(-1, *[1] * (values.ndim - 1))
        return result


def by_class(counts: np.ndarray) -> tuple[np.ndarray, ...]:
    """Keys that put clients with the same most frequent class together, those with most of it first."""
    share = shares(counts)
    return -share.max(1), share.argmax(1)

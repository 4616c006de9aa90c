"""Clients side by side: one to a column, or several where there are more than fit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from descant.data.heterogeneity import shares, sizes
from descant.pool import Federation


@dataclass(frozen=True)
class Columns:
    """Which clients stand in which column: column k holds order[edges[k]:edges[k + 1]]."""

    order: np.ndarray
    edges: np.ndarray
    seen: float  # columns of the clients that train; those of the unseen ones follow

    @classmethod
    def of(cls, federation: Federation, counts: np.ndarray | None, most: int, ordered: bool) -> Columns:
        """At most `most` columns; `ordered` puts like clients together, by their most frequent class (by
        size where there are no classes), and must be set where several are to share a column."""
        clients = federation.everyone
        order, columns = np.arange(clients), min(clients, most)
        if ordered and counts is not None:
            share = shares(counts)
            order = np.lexsort((-share.max(1), share.argmax(1), order >= federation.population))
        elif ordered:
            order = np.lexsort((-sizes(federation), order >= federation.population))
        edges = np.arange(columns + 1) * clients // columns
        return cls(order, edges, federation.population * columns / clients)

    def __len__(self) -> int:
        return len(self.edges) - 1

    def mean(self, values: np.ndarray) -> np.ndarray:
        """`values` [clients, ...] averaged over the clients of each column."""
        totals = np.add.reduceat(values[self.order].astype(float), self.edges[:-1])
        result: np.ndarray = totals / np.diff(self.edges).reshape(-1, *[1] * (values.ndim - 1))
        return result

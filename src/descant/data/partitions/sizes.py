"""Partitions that ignore labels: clients differ by chance, or in size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from descant.core.fields import hyper
from descant.core.random import stream
from descant.data.partitions.base import NOBODY, Partition, check_clients, check_enough, cut, top_up
from descant.data.samples import Samples
from descant.errors import UsageError


@dataclass(frozen=True)
class Iid(Partition):
    """Rows dealt at random, equally many to each client."""

    name: ClassVar[str] = "iid"

    def assign(self, samples: Samples, clients: int, seed: int) -> np.ndarray:
        check_clients(clients, len(samples.x))
        return stream(seed, "partition").permutation(np.arange(len(samples.x)) % clients)


@dataclass(frozen=True)
class Quantity(Partition):
    """Rows dealt at random, in unequal numbers: Dirichlet(alpha) shares, or sizes that are given.

    The quantity skew of Li, Diao, Chen, He: Federated Learning on Non-IID Data Silos, ICDE 2022,
    arXiv:2102.02079. Clients with less than `min_size` rows get the difference from the largest.
    """

    name: ClassVar[str] = "quantity"

    alpha: float = hyper(0.5, "concentration: small is unequal, large is equal", gt=0)
    min_size: int = hyper(10, "least number of rows of a client, where shares are drawn", ge=1)
    sizes: tuple[int, ...] = hyper((), "number of rows of each client; none: shares are drawn")

    def assign(self, samples: Samples, clients: int, seed: int) -> np.ndarray:
        rows = len(samples.x)
        check_clients(clients, rows)
        rng = stream(seed, "partition")
        if self.sizes:
            self._check_sizes(clients, rows)
            dealt = np.repeat(np.arange(clients), self.sizes)
            return rng.permutation(np.pad(dealt, (0, rows - len(dealt)), constant_values=NOBODY))
        check_enough(clients, self.min_size, rows)
        client = np.repeat(np.arange(clients), cut(rows, rng.dirichlet(np.full(clients, self.alpha))))
        client = rng.permutation(client)
        top_up(client, clients, self.min_size, rng)
        return client

    def _check_sizes(self, clients: int, rows: int) -> None:
        if len(self.sizes) != clients:
            raise UsageError(f"sizes has {len(self.sizes)} entries, but clients = {clients}: "
                             "give each client one")
        if min(self.sizes) < 1:
            raise UsageError(f"sizes must be at least 1, not {min(self.sizes)}")
        if sum(self.sizes) > rows:
            raise UsageError(f"sizes add up to {sum(self.sizes)} rows, but there are {rows}: "
                             "make them smaller")

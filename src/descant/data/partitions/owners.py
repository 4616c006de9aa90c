"""The natural partition: by owner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from descant.core.fields import hyper
from descant.core.random import stream
from descant.data.partitions.base import NOBODY, Partition, cut, rank_in_client
from descant.data.samples import Samples
from descant.errors import UsageError

_NAMED = 5  # owners in a note


@dataclass(frozen=True)
class Natural(Partition):
    """Each row to the client that naturally owns it: client k is the k-th owner in sorted order.

    Owners with few rows are left out, those with many keep a random subset. Where there are more
    owners than `clients`, these can be a sample of the owners, or groups of them: pFedBreD makes the users
    of Sent140 into 10 clients of at least 10 users each, the others in Dirichlet(0.5) shares.
    """

    name: ClassVar[str] = "natural"

    min_size: int = hyper(1, "least number of rows of an owner; one with fewer is left out", ge=1)
    max_size: int | None = hyper(None, "most rows of an owner; of one with more, this many are kept", ge=1)
    fewer: Literal["refuse", "sample", "merge"] = hyper(
        "refuse", "what to do with more owners than clients: refuse, sample owners, or merge them")
    merge_alpha: float = hyper(0.5, "merge: concentration of the clients' shares of the owners", gt=0)
    merge_least: int = hyper(1, "merge: least number of owners of a client", ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_size is not None and self.max_size < self.min_size:
            raise UsageError(f"max_size = {self.max_size} is less than min_size = {self.min_size}: "
                             "swap them")

    @property
    def keeps_owners(self) -> bool:
        return self.fewer != "merge"

    def deal(self, samples: Samples, clients: int, seed: int) -> np.ndarray:
        return self.assign(samples, clients, seed)  # groups belong to one owner and stay together anyway

    def assign(self, samples: Samples, clients: int, seed: int) -> np.ndarray:
        owners, number, sizes = _owners(samples)
        allowed = np.flatnonzero(sizes >= self.min_size)
        if not len(allowed):
            raise UsageError(f"no owner has min_size = {self.min_size} rows (the largest has {sizes.max()}): "
                             "use a smaller min_size")
        rng = stream(seed, "partition")
        result: np.ndarray = self._client_of(owners, allowed, clients, rng)[number]
        if self.max_size is not None:
            result[rank_in_client(number, rng) >= self.max_size] = NOBODY
        return result

    def _client_of(
        self, owners: np.ndarray, allowed: np.ndarray, clients: int, rng: np.random.Generator
    ) -> np.ndarray:
        """For each owner its client."""
        client = np.full(len(owners), NOBODY)
        if self.fewer == "refuse":
            if clients != len(owners):
                remedy = "" if clients > len(owners) else ', or fewer = "sample" or "merge"'
                raise UsageError(f"clients = {clients}, but the data has {len(owners)} natural owners: "
                                 f"set clients = {len(owners)}{remedy}, or choose another partition")
            client[allowed] = allowed
            return client
        least = 1 if self.fewer == "sample" else self.merge_least
        if clients * least > len(allowed):
            raise UsageError(f"{clients} clients need {clients * least} owners with min_size = "
                             f"{self.min_size} rows, but there are {len(allowed)}: use fewer clients")
        if self.fewer == "sample":
            client[np.sort(rng.choice(allowed, clients, replace=False))] = np.arange(clients)
        else:
            shares = rng.dirichlet(np.full(clients, self.merge_alpha))
            counts = least + cut(len(allowed) - clients * least, shares)
            client[rng.permutation(allowed)] = np.repeat(np.arange(clients), counts)
        return client

    def report(self, samples: Samples, client: np.ndarray, clients: int, seed: int) -> tuple[str, ...]:
        notes = super().report(samples, client, clients, seed)
        owners, _, sizes = _owners(samples)
        small = owners[sizes < self.min_size]
        if not len(small):
            return notes
        names = ", ".join(str(owner) for owner in small[:_NAMED]) + (", ..." if len(small) > _NAMED else "")
        return (*notes, f"{len(small)} of {len(owners)} owners left out: fewer than min_size = "
                        f"{self.min_size} rows ({names})")


def _owners(samples: Samples) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The owners in sorted order, each row's owner as a number, and the number of rows of each."""
    if samples.owner is None:
        raise UsageError("partition 'natural' needs data whose rows have owners, and these have none: "
                         "choose 'iid' or another partition")
    return np.unique(samples.owner, return_inverse=True, return_counts=True)

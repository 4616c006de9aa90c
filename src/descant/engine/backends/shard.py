"""The part of a federation that one machine holds: the rows of some clients.

Clients keep their numbers in the whole federation, which name their random numbers (`random.py`). The index
tables have an empty list for all others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from descant.core.federation import Federation
from descant.core.splits import SPLITS, Table


class Rows(NamedTuple):
    """The rows of some clients, and who owns which. Arrays, since Ray would copy tensors."""

    x: np.ndarray
    y: np.ndarray
    train: Table
    validation: Table
    test: Table

    @classmethod
    def of(cls, federation: Federation, clients: np.ndarray) -> Rows:
        """The rows of these clients (ascending)."""
        picked = [federation.split(split).pick(clients) for split in SPLITS]
        rows = np.concatenate([table.indices for table in picked])
        tables, start = [], 0
        for table in picked:
            sizes = np.zeros(federation.everyone, np.int64)
            sizes[clients] = table.sizes
            tables.append(Table.packed(np.arange(start, start + len(table.indices)), sizes))
            start += len(table.indices)
        return cls(federation.x[rows].numpy(), federation.y[rows].numpy(), *tables)


def table_of_zeros(sizes: Sequence[int]) -> Table:
    """So many rows for each client, all of them the first; in memory it takes no room."""
    offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    return Table(np.broadcast_to(np.int64(0), int(offsets[-1])), offsets)


class Shard(Federation):
    """A federation with the rows of some clients."""

    def __post_init__(self) -> None:
        """The whole federation was checked when it was made."""

    @classmethod
    def frame(cls, federation: Federation) -> Shard:
        """A federation without its rows."""
        nobody = Table.packed(np.zeros(0, np.int64), np.zeros(federation.everyone, np.int64))
        known = {field.name: getattr(federation, field.name) for field in dataclasses.fields(Federation)}
        return cls(**known | {"x": federation.x[:0].clone(), "y": federation.y[:0].clone(),
                              "train": nobody, "validation": nobody, "test": nobody})

    def holding(self, rows: Rows) -> Shard:
        """This federation with these rows."""
        return dataclasses.replace(self, **rows._replace(
            x=torch.tensor(rows.x), y=torch.tensor(rows.y))._asdict())  # type: ignore[arg-type]

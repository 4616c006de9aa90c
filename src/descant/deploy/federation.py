"""A remote federation: what the server knows of its clients' data.

The server has two samples of zeros with the shape and type of the clients' samples, and each client's name
and number of rows. That is enough to make the model, to weight clients, and to know the shape of an upload.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from descant.core.sample import SampleFormat
from descant.core.splits import Table
from descant.engine.backends.shard import Shard


class ClientInfo(NamedTuple):
    """A client as the server knows it."""

    name: str
    train: int  # rows
    validation: int
    test: int


class RemoteFederation(Shard):
    """A federation of which only the sizes are known: every row of every client is the first sample."""

    is_remote: ClassVar[bool] = True

    @classmethod
    def of(cls, sample: SampleFormat, clients: Sequence[ClientInfo], dtype: torch.dtype, unseen: int = 0
           ) -> RemoteFederation:
        x, y = sample.zeros(dtype)

        def table(sizes: list[int]) -> Table:
            return Table.packed(np.zeros(sum(sizes), np.int64), sizes)

        return cls(x, y, table([client.train for client in clients]),
                   table([client.validation for client in clients]),
                   table([client.test for client in clients]), sample.classes,
                   tuple(client.name for client in clients), unseen=unseen)

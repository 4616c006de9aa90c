"""A federation without data: what the server knows of its clients, and what a model is fitted to.

The server has two samples of zeros, of the shape and type that the clients' samples have, and of each client
a name and how many rows it has. That is enough to make the model, to weigh clients, and to learn what form
an upload has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from descant.core.sample import SampleFormat
from descant.core.splits import Table
from descant.engine.backends.shard import Shard


class Member(NamedTuple):
    """A client as the server knows it."""

    name: str
    train: int  # rows
    validation: int
    test: int


class Frame(Shard):
    """A federation of which only the sizes are known: every row of every client is the first sample."""

    elsewhere: ClassVar[bool] = True

    @classmethod
    def of(cls, sample: SampleFormat, members: Sequence[Member], dtype: torch.dtype, unseen: int = 0
           ) -> Frame:
        x, y = sample.zeros(dtype)

        def table(sizes: list[int]) -> Table:
            return Table.packed(np.zeros(sum(sizes), np.int64), sizes)

        return cls(x, y, table([m.train for m in members]), table([m.validation for m in members]),
                   table([m.test for m in members]), sample.classes, tuple(m.name for m in members),
                   unseen=unseen)

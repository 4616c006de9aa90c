"""Partitioners of flwr-datasets, passed from Python in place of a partition's name."""

from __future__ import annotations

import copy
import importlib
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from descant.data.partitions.base import NOBODY, Partition
from descant.data.samples import Samples
from descant.errors import UsageError


def is_partitioner(value: object) -> bool:
    """Whether this is a partitioner of flwr-datasets, or acts like one."""
    return hasattr(value, "load_partition")


@dataclass(frozen=True)
class Flower(Partition):
    """A partitioner of flwr-datasets; it sets the number of clients.

    It gets a `datasets.Dataset` with the columns "row" (the row's number), "label" (the targets, where
    there is one per row) and "owner" (where rows have owners), by which it can partition.
    """

    name: ClassVar[str] = "flower"

    partitioner: object

    def assign(self, samples: Samples, clients: int, seed: int) -> np.ndarray:
        columns: dict[str, Any] = {"row": np.arange(len(samples.x))}
        if samples.y.dim() == 1:
            columns["label"] = samples.y.numpy()
        if samples.owner is not None:
            columns["owner"] = samples.owner
        try:
            datasets = importlib.import_module("datasets")
        except ImportError:
            raise UsageError("a partitioner needs the package flwr-datasets: "
                             "pip install 'descant[partitioners]'") from None
        partitioner: Any = copy.deepcopy(self.partitioner)  # it accepts a dataset only once
        try:
            partitioner.dataset = datasets.Dataset.from_dict(columns)
            parts = [np.asarray(partitioner.load_partition(k)["row"][:], np.int64)
                     for k in range(partitioner.num_partitions)]
        except Exception as error:  # foreign code can raise anything
            raise UsageError(f"{type(self.partitioner).__name__} failed: {error}; the columns it can use are "
                             f"{', '.join(columns)}") from error
        rows = np.concatenate([np.zeros(0, np.int64), *parts])
        if len(np.unique(rows)) < len(rows):
            raise UsageError(f"{type(self.partitioner).__name__} gives some rows to several clients: use one "
                             "that gives each row once")
        result = np.full(len(samples.x), NOBODY)
        result[rows] = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        return result

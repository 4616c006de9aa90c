"""Datasets, partitions, preprocessing, and the federations they make.

May import core only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from descant.core.federation import Federation
from descant.data.datasets import DATASETS
from descant.data.folder import OwnArrays
from descant.data.partitions import PARTITIONS
from descant.data.samples import Samples
from descant.data.schema import Schema
from descant.data.spec import DataSpec

__all__ = ["DATASETS", "PARTITIONS", "DataSpec", "Samples", "Schema", "federation"]


def federation(dataset: str | Path | tuple[Any, Any] = "digits", **fields: Any) -> Federation:
    """A federation in one call; `fields` are those of the [data] section of an experiment.

    `dataset` is a name, the path of a folder with one file per client (CSV and Parquet need a `schema`),
    or a pair (x, y) of arrays, which the partition splits among the clients.
    """
    chosen = OwnArrays.of(*dataset) if isinstance(dataset, tuple) and len(dataset) == 2 else dataset
    return DataSpec.parse({"dataset": chosen, **fields}).federation()

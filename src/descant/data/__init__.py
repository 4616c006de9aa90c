"""Datasets, partitions, preprocessing, and the federations they make.

May import core only.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from descant.core.federation import Federation
from descant.data.datasets import DATASETS
from descant.data.folder import OwnArrays
from descant.data.partitions import PARTITIONS
from descant.data.samples import Dataset, Samples
from descant.data.schema import Schema
from descant.data.spec import DataSpec
from descant.errors import UsageError, one

__all__ = ["DATASETS", "PARTITIONS", "DataSpec", "Samples", "Schema", "federation"]


def federation(dataset: str | Path | tuple[Any, Any] = "digits", **fields: Any) -> Federation:
    """A federation in one call; `fields` are those of the [data] section of an experiment.

    `dataset` is a name, the path of a folder with one file per client (CSV and Parquet need a `schema`),
    or a pair (x, y) of arrays, which the partition splits among the clients.
    """
    is_pair = isinstance(dataset, tuple) and len(dataset) == 2
    if not is_pair and not isinstance(dataset, str | os.PathLike | Dataset):
        raise UsageError(f"the dataset must be a name, a folder or a pair (x, y), not {one(dataset)}: tables "
                         "are read by Federation.from_frame(table, target=..., client=...), arrays with the "
                         "client of each row by Federation.from_arrays(x, y, client)")
    chosen: Any = dataset
    if is_pair:
        chosen = OwnArrays.of(*chosen)
    elif isinstance(dataset, os.PathLike):  # a folder, also without a slash
        chosen = str(Path.cwd() / dataset)
    return DataSpec.parse({"dataset": chosen, **fields}).federation()

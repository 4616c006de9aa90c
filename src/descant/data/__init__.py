"""Datasets, partitions, and the federations they make."""

from __future__ import annotations

from typing import Any

from descant.data.datasets import DATASETS
from descant.data.partitions import PARTITIONS
from descant.data.samples import Samples
from descant.data.spec import DataSpec
from descant.pool import Federation

__all__ = ["DATASETS", "PARTITIONS", "DataSpec", "Samples", "federation"]


def federation(dataset: str = "digits", **fields: Any) -> Federation:
    """A federation in one call; `fields` are those of the [data] section of an experiment."""
    return DataSpec.parse({"dataset": dataset, **fields}).federation()

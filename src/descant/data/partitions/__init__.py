"""Partitions of a dataset among clients. A new one is a class and a line in `PARTITIONS`."""

from __future__ import annotations

from descant.data.partitions.base import Partition
from descant.data.partitions.features import Feature
from descant.data.partitions.labels import Classes, Dirichlet, LabelMajority, Shards
from descant.data.partitions.neighbours import Neighbours
from descant.data.partitions.owners import Natural
from descant.data.partitions.sizes import Iid, Quantity

__all__ = ["PARTITIONS", "Classes", "Dirichlet", "Feature", "Iid", "LabelMajority", "Natural", "Neighbours",
           "Partition", "Quantity", "Shards"]

PARTITIONS: dict[str, type[Partition]] = {
    partition.name: partition
    for partition in (
        Iid,
        Classes,
        Shards,
        Neighbours,
        Dirichlet,
        LabelMajority,
        Quantity,
        Feature,
        Natural,
    )
}

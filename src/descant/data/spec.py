"""The [data] section of an experiment: which dataset, dealt how, to how many clients."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from descant import fields
from descant.data.datasets import DATASETS
from descant.data.partitions import PARTITIONS, Natural, Partition
from descant.data.samples import Dataset
from descant.errors import unknown
from descant.fields import Checked, hyper
from descant.pool import Federation


@dataclasses.dataclass(frozen=True)
class DataSpec(Checked):
    """Everything that determines a federation."""

    name: ClassVar[str] = "data"

    dataset: Dataset
    partition: Partition
    clients: int = hyper(20, "number of clients", low=1)
    seed: int = hyper(0, "seed of the samples, the partition and the splits", low=0)
    test: float = hyper(0.25, "share of each client's rows kept for testing", low=0, below=1)
    validation: float = hyper(0.2, "share of the rest kept for validation", low=0, below=1)

    @classmethod
    def parse(cls, table: Mapping[str, Any], where: str = "data") -> DataSpec:
        """The spec that a flat table describes: these fields, the dataset's and the partition's."""
        dataset = _choose(DATASETS, table.get("dataset", "digits"), f"{where}.dataset")
        usual = "natural" if dataset.natural else "iid"
        partition = _choose(PARTITIONS, table.get("partition", usual), f"{where}.partition")

        known = {kind: [field.name for field in fields.describe(kind)] for kind in (cls, dataset, partition)}
        for key in table:
            if not any(key in names for names in known.values()):
                raise unknown(f"{where} field", key, [name for names in known.values() for name in names])
        own = {kind: {key: table[key] for key in names if key in table} for kind, names in known.items()}
        chosen = {
            "clients": dataset.default_clients,
            **own[cls],
            "dataset": fields.parse(dataset, own[dataset], where),
            "partition": fields.parse(partition, own[partition], where),
        }
        return fields.parse(cls, chosen, where)

    def dump(self) -> dict[str, Any]:
        """The flat table with every field written out; `parse` makes the same spec of it."""
        table: dict[str, Any] = fields.dump(self) | fields.dump(self.dataset) | fields.dump(self.partition)
        del table["name"]
        return table | {"dataset": self.dataset.name, "partition": self.partition.name}

    def federation(self) -> Federation:
        samples = self.dataset.load(self.clients, self.seed)
        client = self.partition.assign(samples, self.clients, self.seed)
        names = [str(k) for k in range(self.clients)]
        natural = isinstance(self.partition, Natural)
        if natural and samples.owner is not None and samples.owner.dtype.kind == "U":
            names = [str(owner) for owner in np.unique(samples.owner)]
        federation = Federation.from_arrays(
            samples.x, samples.y, client, test=self.test, validation=self.validation, classes=samples.classes,
            seed=self.seed, names=names,
            truth=samples.truth if natural else None,  # what is known is about the natural clients
        )
        return dataclasses.replace(federation, origin=self.dump())


def _choose(registry: Mapping[str, Any], name: Any, path: str) -> Any:
    if not isinstance(name, str) or name not in registry:
        raise unknown(path, name, registry)
    return registry[name]

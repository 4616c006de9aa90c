"""The [data] section of an experiment: which dataset, dealt how, to how many clients."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from descant import fields
from descant.data.datasets import DATASETS
from descant.data.partitions import PARTITIONS, Partition
from descant.data.partitions.flower import Flower, is_partitioner
from descant.data.preprocess import Preprocess
from descant.data.samples import Dataset, Samples
from descant.errors import UsageError, unknown
from descant.fields import Checked, hyper
from descant.pool import Division, Federation, fingerprint_of


@dataclasses.dataclass(frozen=True)
class DataSpec(Checked):
    """Everything that determines a federation."""

    name: ClassVar[str] = "data"

    dataset: Dataset
    partition: Partition
    preprocess: Preprocess
    clients: int = hyper(20, "number of clients", low=1)
    seed: int = hyper(0, "seed of the samples, the partition and the splits", low=0)
    test: float = hyper(0.25, "share of each client's rows kept for testing", low=0, below=1)
    validation: float = hyper(0.2, "share of the rest kept for validation", low=0, below=1)
    unseen: int = hyper(0, "number of clients that are held out: they are evaluated, and never train", low=0)
    partition_file: str | None = hyper(
        None, "a partition that was saved: it says who has which row in which split, and who is unseen")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.partition_file is not None and self.unseen:
            raise UsageError("data.partition_file says who is unseen: leave unseen out")

    @classmethod
    def parse(cls, table: Mapping[str, Any], where: str = "data") -> DataSpec:
        """The spec that a flat table describes: these fields, and those of the dataset, of the partition
        and of the preprocessing. From Python, the partition may be an object."""
        dataset = _choose(DATASETS, table.get("dataset", "digits"), f"{where}.dataset")
        usual = "natural" if dataset.natural else "iid"
        partition = _partition(table.get("partition", usual), where)
        parts = (dataset, Preprocess, partition) if isinstance(partition, type) else (dataset, Preprocess)

        known = {kind: [field.name for field in fields.describe(kind)] for kind in (cls, *parts)}
        known[cls].remove("preprocess")  # whose fields stand here themselves
        for key in table:
            if not any(key in names for names in known.values()):
                raise unknown(f"{where} field", key, [name for names in known.values() for name in names])
        own = {kind: {key: table[key] for key in names if key in table} for kind, names in known.items()}
        made = {kind: fields.parse(kind, own[kind], where) for kind in parts}
        if isinstance(partition, Flower) and "clients" in table:
            raise UsageError(f"{where}.clients is set by the partitioner: leave it out")
        chosen = {
            "clients": dataset.default_clients,
            **own[cls],
            "dataset": made[dataset],
            "partition": made[partition] if isinstance(partition, type) else partition,
            "preprocess": made[Preprocess],
        }
        return fields.parse(cls, chosen, where)

    def dump(self) -> dict[str, Any]:
        """The flat table with every field written out; `parse` makes the same spec of it."""
        parts = (self, self.dataset, self.partition, self.preprocess)
        table: dict[str, Any] = {key: value for part in parts for key, value in fields.dump(part).items()}
        del table["name"], table["preprocess"]
        return table | {"dataset": self.dataset.name, "partition": self.partition.name}

    def federation(self) -> Federation:
        samples = self.dataset.load(self.clients, self.seed)
        if self.partition_file is None:
            client = self.partition.deal(samples, self.clients, self.seed)
            division = self._divide(samples, client)
        else:
            division = Division.read(self.partition_file, fingerprint_of(samples.x, samples.y))
            client = self._numbers(division)[division.client_of_rows(len(samples.x))]
        seen = self.partition.transform(samples, client, self.clients, self.seed)
        source = None if seen is samples else fingerprint_of(samples.x, samples.y)
        federation = Federation.divided(seen.x, seen.y, division, samples.classes, self.preprocess, source)
        known = self.partition.name in PARTITIONS  # not an object that only Python can pass
        return dataclasses.replace(federation, truth=self._truth(samples, division),
                                   origin=self.dump() if known else None)

    def _divide(self, samples: Samples, client: np.ndarray) -> Division:
        numbers, first = np.unique(client, return_index=True)
        first = first[numbers >= 0]
        names = [str(number) for number in client[first]]
        if self.partition.keeps_owners and samples.owner is not None:
            names = [str(owner) for owner in samples.owner[first]]
        division = Division.of(
            client, labels=samples.labels if samples.y.dim() == 1 else None, group=samples.group,
            test=self.test, validation=self.validation, seed=self.seed, unseen=self.unseen, names=names)
        notes = self.partition.report(samples, client, self.clients, self.seed)
        return division._replace(notes=notes + division.notes)

    def _numbers(self, division: Division) -> np.ndarray:
        """The numbers that the partition gave to the clients of a division, and -1 for nobody; those with
        names of their own are not told apart by numbers."""
        numbers = [int(name) if name.isdecimal() else k for k, name in enumerate(division.names)]
        return np.array([*numbers, -1])

    def _truth(self, samples: Samples, division: Division) -> dict[str, torch.Tensor]:
        """What is known about the clients, if they are the natural ones."""
        if not self.partition.keeps_owners or samples.owner is None:
            return {}
        _, number = np.unique(samples.owner, return_inverse=True)
        train = division.train
        owner = torch.from_numpy(number[train.indices[train.offsets[:-1]]])
        return {name: rows[owner] for name, rows in samples.truth.items()} | samples.common


def _partition(value: Any, where: str) -> Partition | type[Partition]:
    """A partition's class by name, or one that is made."""
    if isinstance(value, Partition):
        return value
    if is_partitioner(value):
        return Flower(value)
    chosen: type[Partition] = _choose(PARTITIONS, value, f"{where}.partition")
    return chosen


def _choose(registry: Mapping[str, Any], name: Any, path: str) -> Any:
    if not isinstance(name, str) or name not in registry:
        raise unknown(path, name, registry)
    return registry[name]

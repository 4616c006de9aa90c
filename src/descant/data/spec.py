"""The [data] section of an experiment: dataset, partition, number of clients, splits."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from descant.core import fields
from descant.core.federation import Federation, fingerprint_of
from descant.core.fields import Checked, hyper
from descant.core.preprocess import Preprocess
from descant.core.splits import Division, folds_of
from descant.data.datasets import DATASETS
from descant.data.folder import Folder, OnNodes
from descant.data.partitions import PARTITIONS, Partition
from descant.data.partitions.flower import Flower, is_partitioner
from descant.data.samples import Dataset, Samples
from descant.data.schema import Schema
from descant.errors import UsageError, unknown


@dataclasses.dataclass(frozen=True)
class DataSpec(Checked):
    """Everything that determines a federation."""

    name: ClassVar[str] = "data"

    dataset: Dataset
    partition: Partition
    preprocess: Preprocess
    clients: int = hyper(20, "number of clients", ge=1)
    seed: int = hyper(0, "seed of the samples, the partition and the splits", ge=0)
    test: float = hyper(0.25, "share of each client's rows kept for testing", ge=0, lt=1)
    validation: float = hyper(0.2, "share of the rest kept for validation", ge=0, lt=1)
    unseen: int = hyper(0, "number of clients that are held out: they are evaluated, and never train", ge=0)
    split: int | None = hyper(
        None, "seed of each client's split into training, validation and test rows; absent: seed", ge=0)
    fold: int | None = hyper(
        None, "cross-validation: which of the round(1 / test) folds is tested; absent: no folds", ge=0)
    partition_file: str | None = hyper(
        None, "a saved partition: which client has which row in which split, and who is unseen")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.partition_file is not None and self.unseen:
            raise UsageError("data.partition_file sets the unseen clients: remove unseen")
        if self.partition_file is not None and (self.split is not None or self.fold is not None):
            raise UsageError("data.partition_file sets the test rows: remove split and fold")
        if self.fold is not None:
            folds_of(self.test, self.fold)

    @property
    def split_seed(self) -> int:
        return self.seed if self.split is None else self.split

    @classmethod
    def parse(cls, table: Mapping[str, Any], where: str = "data") -> DataSpec:
        """The spec that a flat table describes: these fields, and those of the dataset, of the partition
        and of the preprocessing. From Python, the dataset and the partition may be objects."""
        dataset = _dataset(table.get("dataset", "digits"), table.get("schema"), where)
        usual = "natural" if dataset.natural else "iid"
        partition = _partition(table.get("partition", usual), where)
        parts = tuple(part for part in (dataset, Preprocess, partition) if isinstance(part, type))

        known = {kind: [field.name for field in fields.describe(kind)] for kind in (cls, *parts)}
        known[cls].remove("preprocess")  # its fields are part of this table
        if isinstance(dataset, Folder):
            known[Folder] = ["schema"]  # already in the folder
        for key in table:
            if not any(key in names for names in known.values()):
                raise unknown(f"{where} field", key, [name for names in known.values() for name in names])
        own = {kind: {key: table[key] for key in names if key in table} for kind, names in known.items()}
        made = {kind: fields.parse(kind, own[kind], where) for kind in parts}
        if isinstance(partition, Flower) and "clients" in table:
            raise UsageError(f"{where}.clients is set by the partitioner: remove it")
        if "clients" not in table:
            count = len(dataset.files()) if isinstance(dataset, Folder) else 0
            own[cls]["clients"] = count or dataset.default_clients
        chosen = {
            **own[cls],
            "dataset": made[dataset] if isinstance(dataset, type) else dataset,
            "partition": made[partition] if isinstance(partition, type) else partition,
            "preprocess": made[Preprocess],
        }
        return fields.parse(cls, chosen, where)

    def dump(self) -> dict[str, Any]:
        """The flat table with every field written out; `parse` makes the same spec of it."""
        dataset = (self.dataset.dump() if isinstance(self.dataset, Folder)
                   else fields.dump(self.dataset) | {"dataset": self.dataset.name})
        parts = (fields.dump(part) for part in (self, self.partition, self.preprocess))
        table: dict[str, Any] = {key: value for part in (*parts, dataset) for key, value in part.items()}
        del table["name"], table["preprocess"]
        return table | {"partition": self.partition.name}

    @property
    def schema(self) -> Schema | None:
        return self.dataset.schema if isinstance(self.dataset, Folder) else None

    def federation(self) -> Federation:
        samples = self.dataset.load(self.clients, self.seed)
        if isinstance(self.dataset, Folder) and self.preprocess.impute == "none":
            self.dataset.require_complete(samples)  # it knows file and line
        if self.partition_file is None:
            client = self.partition.deal(samples, self.clients, self.seed)
            division = self._divide(samples, client)
        else:
            division = Division.read(self.partition_file, fingerprint_of(samples.x, samples.y),
                                     len(samples.x))
            client = self._numbers(division)[division.client_of_rows(len(samples.x))]
        seen = self.partition.transform(samples, client, self.clients, self.seed)
        source = None if seen is samples else fingerprint_of(samples.x, samples.y)
        federation = Federation.divided(
            seen.x, seen.y, division, samples.classes, self.preprocess, source,
            samples.class_names or self.dataset.class_names,
            samples.column_names or self.dataset.column_names)
        known = self.partition.name in PARTITIONS and (  # an object from Python cannot be written down
            isinstance(self.dataset, Folder) or self.dataset.name in DATASETS)
        return dataclasses.replace(federation, truth=self._truth(samples, division),
                                   notes=samples.notes + federation.notes,
                                   origin=anchored(self.dump(), Path.cwd()) if known else None)

    def _divide(self, samples: Samples, client: np.ndarray) -> Division:
        numbers, first = np.unique(client, return_index=True)
        first = first[numbers >= 0]
        names = [str(number) for number in client[first]]
        if self.partition.keeps_owners and samples.owner is not None:
            names = [str(owner) for owner in samples.owner[first]]
        division = Division.of(
            client, labels=samples.labels if samples.y.dim() == 1 else None, group=samples.group,
            test=self.test, validation=self.validation, seed=self.seed, split=self.split, fold=self.fold,
            unseen=self.unseen, names=names)
        notes = self.partition.report(samples, client, self.clients, self.seed)
        return division._replace(notes=notes + division.notes)

    def _numbers(self, division: Division) -> np.ndarray:
        """The numbers of the clients of a division in the partition, and -1 for nobody."""
        numbers = [int(name) if name.isdecimal() else k for k, name in enumerate(division.names)]
        return np.array([*numbers, -1])

    def _truth(self, samples: Samples, division: Division) -> dict[str, torch.Tensor]:
        """The ground truth of the clients, if they are natural owners."""
        if not self.partition.keeps_owners or samples.owner is None:
            return {}
        _, number = np.unique(samples.owner, return_inverse=True)
        train = division.train
        owner = torch.from_numpy(number[train.indices[train.offsets[:-1]]])
        return {name: rows[owner] for name, rows in samples.truth.items()} | samples.common


def anchored(table: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """The table with absolute paths; relative ones start at `directory`."""
    paths = {key: _resolved(table[key], directory, f"data.{key}")
             for key in ("dataset", "partition_file") if isinstance(table.get(key), str | os.PathLike)}
    if "dataset" in paths and not _is_folder(table["dataset"], directory):
        del paths["dataset"]
    return dict(table) | paths


def _resolved(value: str | os.PathLike[str], directory: Path, where: str) -> str:
    try:
        return str((directory / Path(value).expanduser()).resolve())
    except (OSError, ValueError, RuntimeError) as error:  # a null byte, a user who does not exist
        raise UsageError(f"{where} = {os.fspath(value)!r:.80} is not a path on this machine: {error}"
                         ) from None


def _is_folder(value: Any, directory: Path) -> bool:
    """Whether this names a folder of the user's; names of datasets take precedence."""
    if not isinstance(value, str | os.PathLike) or value in (OnNodes.name, *DATASETS):
        return False
    try:
        return "/" in os.fspath(value) or (directory / value).is_dir()
    except OSError:  # a name that is too long
        return False


def _dataset(value: Any, schema: Any, where: str) -> Dataset | type[Dataset]:
    """A dataset's class by name, or a dataset object."""
    if value == OnNodes.name:
        return OnNodes(OnNodes.name, schema if isinstance(schema, Schema | None) else Schema.parse(schema))
    if _is_folder(value, Path()):
        path = _resolved(value, Path(), f"{where}.dataset")  # the current directory may change
        return Folder(path, schema if isinstance(schema, Schema | None) else Schema.parse(schema))
    try:
        chosen: Dataset | type[Dataset] = (
            value if isinstance(value, Dataset) else _choose(DATASETS, value, f"{where}.dataset"))
    except UsageError as error:
        raise UsageError(f"{error}; your own folder is given by a path such as ./hospitals") from None
    if schema is not None:
        raise UsageError(f"[schema] describes your own files, but {where}.dataset is not a folder: "
                         "remove [schema], or set dataset to the path of the folder")
    return chosen


def _partition(value: Any, where: str) -> Partition | type[Partition]:
    """A partition's class by name, or a partition object."""
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

"""The user's own data: a folder with one file per client, or arrays."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from descant.core.fields import hyper
from descant.core.labels import as_classes
from descant.core.notes import about_labels
from descant.data import tables
from descant.data.samples import Dataset, Samples
from descant.data.schema import Schema
from descant.data.tables import Arrays
from descant.errors import UsageError


@dataclass(frozen=True)
class Folder(Dataset):
    """Your own files, one per client; a client has the name of its file.

    CSV and Parquet files are read by the schema. NPZ files hold x and y, and may hold `group`: rows with the
    same id stay in one split. With a schema they must have its features.
    """

    name: ClassVar[str] = "folder"
    natural: ClassVar[bool] = True

    path: str
    schema: Schema | None = hyper(None, "what the files must hold; CSV and Parquet need it")

    def dump(self) -> dict[str, Any]:
        """The fields of the [data] section that make this dataset again."""
        return {"dataset": self.path} | ({} if self.schema is None else {"schema": self.schema.dump()})

    def files(self) -> dict[str, Path]:
        """The clients' files by name, in the order of the names."""
        folder = Path(self.path)
        try:
            found = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
        except OSError as error:
            raise UsageError(f"data.dataset: cannot read the folder {folder}: {error.strerror}") from None
        files: dict[str, Path] = {}
        for path in found:
            # other files are refused too: a wrong ending must not silently drop a client
            if path.suffix.lower() not in tables.ENDINGS or not path.is_file():
                raise UsageError(f"{path} is not a client's file, which ends in one of "
                                 f"{', '.join(tables.ENDINGS)}: convert it, or move it elsewhere")
            if path.stem in files:
                raise UsageError(f"{files[path.stem]} and {path} both belong to client {path.stem!r}: keep "
                                 "or rename one")
            files[path.stem] = path
        if not files:
            raise UsageError(f"data.dataset: the folder {folder} is empty: put a file for each client there, "
                             f"which ends in one of {', '.join(tables.ENDINGS)}")
        return dict(sorted(files.items()))

    def load(self, clients: int, seed: int) -> Samples:
        files = self.files()
        parts = {path: read_file(path, self.schema) for path in files.values()}
        _check_alike(parts)
        y = np.concatenate([part.y for part in parts.values()])
        names = None if self.schema is None else self.schema.classes  # even if nobody has one of them
        labels = None
        if names is None:
            y, labels = as_classes(y)
            names = labels
        classes = None if y.dtype.kind == "f" else int(y.max()) + 1 if names is None else len(names)
        return Samples(
            x=torch.from_numpy(np.concatenate([part.x for part in parts.values()])),
            y=torch.from_numpy(y),
            classes=classes,
            owner=np.repeat(list(files), [len(part.y) for part in parts.values()]),
            group=_groups(list(parts.values())),
            class_names=names,
            notes=about_labels(labels),
            column_names=None if self.schema is None else self.schema.features,
        )

    def require_complete(self, samples: Samples) -> None:
        """Refuse missing values in the samples that `load` returned; the message names file and line."""
        if samples.owner is None or not samples.x.is_floating_point():
            return
        missing = samples.x.isnan()
        if not bool(missing.any()):
            return
        row, *place = torch.nonzero(missing)[0].tolist()
        name = samples.owner[row]
        path = self.files()[str(name)]
        row -= int(np.argmax(samples.owner == name))
        remedy = 'set impute = "client" or "constants" in [data], or leave the row out'
        if self.schema is None or path.suffix.lower() not in tables.TABLES:
            raise UsageError(f"{path}: x[{', '.join(map(str, (row, *place)))}] is missing (NaN): {remedy}")
        column = [column.name for column in self.schema.columns for _ in column.features][place[0]]
        raise UsageError(f"{tables.place_of_row(path, row)}, column {column!r}: the value is missing: "
                         f"{remedy}")


class OnNodes(Folder):
    """The data of the clients of a real federation; nobody has all of it."""

    name: ClassVar[str] = "nodes"

    def files(self) -> dict[str, Path]:
        return {}

    def load(self, clients: int, seed: int) -> Samples:
        raise UsageError('data.dataset is "nodes": the data stay with the clients of a federation '
                         "(`descant server`); to simulate it, set dataset to a folder of their files")


def read_file(path: Path, schema: Schema | None) -> Arrays:
    """The samples in the file of one client."""
    if path.suffix.lower() == ".npz":
        arrays = tables.read_npz(path)
        return arrays if schema is None else schema.check(arrays, f"{path}: ")
    if schema is None:
        raise UsageError(f"{path} is a table: describe its columns and the target in a section "
                         "[schema]")
    return schema.read_arrays(path)


@dataclass(frozen=True, eq=False)
class OwnArrays(Dataset):
    """Your own arrays, from Python."""

    name: ClassVar[str] = "arrays"

    samples: Samples

    @classmethod
    def of(cls, x: Any, y: Any) -> OwnArrays:
        x, y, _ = Arrays.of(x, y)
        y, names = as_classes(y)
        classes = None if y.dtype.kind == "f" else int(y.max()) + 1
        return cls(Samples(torch.from_numpy(x), torch.from_numpy(y), classes, class_names=names,
                           notes=about_labels(names)))

    def load(self, clients: int, seed: int) -> Samples:
        return self.samples


def _check_alike(parts: dict[Path, Arrays]) -> None:
    """Refuse files whose samples differ in shape or type."""
    (first, one), *others = parts.items()
    for path, other in others:
        for name, a, b in (("x", one.x, other.x), ("y", one.y, other.y)):
            if a.shape[1:] != b.shape[1:] or _kind(a) != _kind(b):
                raise UsageError(f"{path}: {name} has rows of shape {b.shape[1:]} and type {b.dtype}, but "
                                 f"that of {first} has {a.shape[1:]} and {a.dtype}: make them match")


def _kind(array: np.ndarray) -> str:
    return "real" if array.dtype.kind == "f" else str(array.dtype)


def _groups(parts: list[Arrays]) -> np.ndarray | None:
    """The groups of all clients as numbers: ids are local to their file, and a row without id is its own
    group."""
    if all(part.group is None for part in parts):
        return None
    groups, first = [], 0
    for part in parts:
        ids = np.arange(len(part.y)) if part.group is None else part.group
        groups.append(first + np.unique(ids, return_inverse=True)[1])
        first += len(part.y)
    return np.concatenate(groups)

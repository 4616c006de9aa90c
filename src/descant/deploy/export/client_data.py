"""The data of ONE client: a file of its own, or, for trials, one client of a known dataset."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from descant.core.cast import cast_real
from descant.core.federation import Federation
from descant.core.preprocess import Treatment
from descant.core.sample import SampleFormat
from descant.core.splits import Table, split_rows
from descant.data import DATASETS, tables
from descant.data.folder import read_file
from descant.data.spec import DataSpec
from descant.engine.backends.shard import Rows, Shard
from descant.errors import UsageError, unknown


class ClientData(NamedTuple):
    """The rows of a client before they are split, or as a known dataset splits them."""

    x: torch.Tensor
    y: torch.Tensor
    classes: int | None
    group: np.ndarray | None = None
    split: tuple[Table, Table, Table] | None = None  # each with one list
    treatment: Treatment | None = None  # that dataset's preprocessing

    @property
    def kind(self) -> SampleFormat:
        return SampleFormat.of(self.x, self.y, self.classes)

    def within(self, whole: Federation, client: int, spec: DataSpec, dtype: torch.dtype) -> Federation:
        """The federation `whole` in which only client number `client` has rows: these."""
        if self.split is not None:
            x, split, treatment = self.x, self.split, self.treatment
        else:
            labels = self.y.numpy() if whole.classes is not None and self.y.dim() == 1 else None
            parts = split_rows(np.arange(len(self.x)), labels, spec.split_seed, client, spec.test,
                               spec.validation, self.group, spec.fold)
            split = (Table.of([parts[0]]), Table.of([parts[1]]), Table.of([parts[2]]))
            spec.preprocess.check(self.x)
            x, treatment = (spec.preprocess.apply(self.x, *split) if spec.preprocess.changes
                            else (self.x, None))
        train, validation, test = (self._placed(table, client, whole.everyone) for table in split)
        x = cast_real(x, dtype, lambda row: f"x[{row}]")
        y = cast_real(self.y, dtype, lambda row: f"y[{row}]")
        if treatment is not None:  # the others have no rows
            treatment = treatment.pick(np.zeros(whole.everyone, np.int64))
        return Shard(x, y, train, validation, test, whole.classes, whole.names, unseen=whole.unseen,
                     treatment=treatment)

    @staticmethod
    def _placed(table: Table, client: int, everyone: int) -> Table:
        sizes = np.zeros(everyone, np.int64)
        sizes[client] = len(table.indices)
        return Table.packed(table.indices, sizes)


def require_source(data: str) -> Path | None:
    """The file that --data names, which must exist; None if it names a client of a dataset."""
    name, colon, _ = data.partition(":")
    if colon and name in DATASETS:
        return None
    path = Path(data).expanduser()
    if path.suffix.lower() not in tables.ENDINGS:
        raise UsageError(f"--data {data}: a client's file ends in one of {', '.join(tables.ENDINGS)}; or "
                         "name a client of a known dataset, such as heart_disease:va")
    if not path.is_file():
        raise UsageError(f"--data {data}: there is no such file")
    return path


def read_client_data(data: str, spec: DataSpec) -> ClientData:
    """The data that `--data` names, read for an experiment."""
    path = require_source(data)
    if path is None:
        name, _, client = data.partition(":")
        return _from_dataset(name, client, spec)
    arrays = read_file(path, spec.schema)
    x, y = torch.from_numpy(arrays.x), torch.from_numpy(arrays.y)
    if spec.preprocess.impute == "none" and x.is_floating_point() and bool(x.isnan().any()):
        row = int(torch.nonzero(x.isnan())[0, 0])
        raise UsageError(f"{tables.place_of_row(path, row)}: a value is missing, and the experiment does not "
                         "impute (data.impute): complete the row, or leave it out")
    classes = None if y.is_floating_point() else int(y.max()) + 1
    if spec.schema is not None and spec.schema.classes is not None:
        classes = len(spec.schema.classes)
    if len(x) < (least := 2 if spec.test > 0 else 1):
        raise UsageError(f"{path} has {len(x)} rows: a client needs at least {least}, one to train on"
                         + (" and one to test on" if least > 1 else ""))
    return ClientData(x, y, classes, arrays.group)


def _from_dataset(name: str, client: str, spec: DataSpec) -> ClientData:
    if spec.dataset.name != name:
        raise UsageError(f"--data {name}:{client} does not fit the experiment, whose dataset is "
                         f"{spec.dataset.name!r}: name one of its clients, or a file")
    federation = spec.federation()
    if client in federation.names:
        number = federation.names.index(client)
    elif client.isdecimal() and int(client) < federation.everyone:
        number = int(client)
    else:
        raise unknown(f"client of {name}", client, federation.names)
    rows = Rows.of(federation, np.array([number]))
    split = [table.pick(np.array([number])) for table in (rows.train, rows.validation, rows.test)]
    return ClientData(torch.from_numpy(rows.x), torch.from_numpy(rows.y), federation.classes, None,
                (split[0], split[1], split[2]),
                None if federation.treatment is None else federation.treatment.pick([number]))

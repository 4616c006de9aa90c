"""A federation: the samples of all clients, and for each client three lists of rows."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from descant.core.cast import cast_real
from descant.core.given import as_constants, as_ids, as_pair, as_tensor, is_pair, owners, require_whole
from descant.core.splits import SPLITS, Division, SplitName, Table, check_unseen
from descant.core.units import times
from descant.errors import UsageError, one, unknown

if TYPE_CHECKING:
    from descant.core.preprocess import Preprocess, Treatment


@dataclasses.dataclass(frozen=True)
class Federation:
    """The samples of all clients, and who owns which.

    `x` is float, uint8 (stands for [0, 1]; stays bytes until a batch is formed) or another integer type
    (tokens). `y` holds class numbers (integers, with `classes` set) or real targets. `truth` holds the true
    models, and the like, of synthetic data. The last `unseen` clients are evaluated and never train.
    """

    x: Tensor
    y: Tensor
    train: Table
    validation: Table
    test: Table
    classes: int | None
    names: tuple[str, ...]
    truth: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    origin: Mapping[str, Any] | None = None  # the [data] section that makes this federation again
    unseen: int = 0
    notes: tuple[str, ...] = ()  # one line each: clients that were left out, doubtful data
    source: str | None = None  # the fingerprint of the samples as loaded, where x was changed
    treatment: Treatment | None = None  # how x was scaled and imputed
    class_names: tuple[str, ...] | None = None
    column_names: tuple[str, ...] | None = None

    is_remote: ClassVar[bool] = False  # whether rows and client states are on the clients' machines
    has_rows: ClassVar[bool] = True  # False: they are gone, or elsewhere, and those here are zeros

    def __post_init__(self) -> None:
        if not len(self.train):
            raise UsageError("the federation has zero clients: give it at least one")
        for name in ("validation", "test", "names"):
            if len(getattr(self, name)) != len(self.train):
                raise UsageError(f"the federation has {len(self.train)} clients with training rows, "
                                 f"but {len(getattr(self, name))} in `{name}`")
        for client in np.flatnonzero(self.train.sizes == 0)[:1]:
            raise UsageError(f"client {self.names[client]!r} has no training data: give it some, "
                             "or leave it out of the federation")
        for name, count in Counter(self.names).items():
            if count > 1 or not name.isprintable():
                why = "is the name of two clients" if count > 1 else "has characters that cannot be printed"
                raise UsageError(f"{name!r} {why}: give the clients other names")
        rows = np.concatenate([self.split(split).indices for split in SPLITS])
        if len(rows) and (rows.min() < 0 or rows.max() >= len(self.x)):
            raise UsageError(f"the index tables name rows {rows.min()}..{rows.max()}, but x has "
                             f"{len(self.x)} rows")
        if (twice := np.flatnonzero(np.bincount(rows) > 1)).size:
            raise UsageError(f"row {twice[0]} is in two lists of the index tables: each row belongs to one "
                             "client, in one split")
        check_unseen(self.unseen, len(self.train))
        if self.classes is not None and len(self.y):
            low, high = int(self.y.min()), int(self.y.max())
            if low < 0 or high >= self.classes:
                raise UsageError(f"labels lie in {low}..{high}, outside the range 0..{self.classes - 1} "
                                 f"of classes = {self.classes}: number the classes from 0")
        columns = self.x.shape[1] if self.x.dim() == 2 else None
        for what, own, names in (("classes", self.classes, self.class_names),
                                 ("columns", columns, self.column_names)):
            if names is not None and own is not None and len(names) != own:
                raise UsageError(f"there are {own} {what}, and names for {len(names)}: give each its own")

    def __repr__(self) -> str:
        """In a line, and without a row of anyone's data."""
        kind = "real targets" if self.classes is None else f"{self.classes} classes"
        unseen = f" and {self.unseen} unseen" if self.unseen else ""
        splits = ", ".join(f"{len(self.split(name).indices):,} {name}" for name in SPLITS)
        shape = " x ".join(map(str, self.x.shape[1:])) or "1"
        return (f"Federation({self.heading}: {times(self.population, 'client')}{unseen}, samples of {shape} "
                f"({str(self.x.dtype).removeprefix('torch.')}), {kind}; rows: {splits})")

    @property
    def population(self) -> int:
        """How many clients take part: clients 0..population-1."""
        return len(self.train) - self.unseen

    @property
    def everyone(self) -> int:
        """How many clients there are, with the unseen ones, which come last."""
        return len(self.train)

    @property
    def heading(self) -> str:
        """What it was made of, as far as that is known."""
        if self.origin is None:
            return "arrays"
        dataset = Path(self.origin["dataset"]).name  # of a folder, not all of its path
        return f"{dataset}, partition {self.origin['partition']}"

    @property
    def weights(self) -> np.ndarray:
        """Each participating client's share of the training rows."""
        sizes = self.train.sizes[: self.population]
        return np.asarray(sizes / sizes.sum())

    def number_of(self, client: int | str) -> int:
        """The number of a client that is given by its number or its name."""
        if isinstance(client, str):
            if client not in self.names:
                raise unknown("client", client, self.names)
            return self.names.index(client)
        if not isinstance(client, int | np.integer) or isinstance(client, bool):
            raise UsageError(f"a client is its number or its name, not {client!r}")
        if not 0 <= client < self.everyone:
            raise UsageError(f"client {client} does not exist: there are clients 0 to {self.everyone - 1}")
        return int(client)

    def split(self, name: SplitName) -> Table:
        table: Table = getattr(self, name)
        return table

    def to(self, dtype: torch.dtype) -> Federation:
        """The same federation with real numbers in `dtype` (bytes, tokens and labels stay)."""
        x = cast_real(self.x, dtype, lambda row: self._place("x", row))
        y = cast_real(self.y, dtype, lambda row: self._place("y", row))
        if x is self.x and y is self.y:
            return self
        return dataclasses.replace(self, x=x, y=y, source=self.source_fingerprint())

    def _place(self, name: str, row: int) -> str:
        """Whose row of the pool this is."""
        owners = (self.names[client] for table in (self.train, self.validation, self.test)
                  for client in range(len(table)) if row in table[client])
        return f"{name} of client {next(owners, 'nobody')!r}"

    def fingerprint(self) -> str:
        """A hash of the clients, their samples and their splits."""
        digest = hashlib.sha256(repr((self.classes, self.names, self.unseen)).encode())
        _update(digest, self.x, self.y)
        for table in (self.train, self.validation, self.test):
            digest.update(table.offsets.data)
            digest.update(table.indices.data)
        return digest.hexdigest()[:16]

    def pool_fingerprint(self) -> str:
        """A hash of the clients and their rows, whatever the split."""
        digest = hashlib.sha256(repr((self.classes, self.names, self.unseen)).encode())
        digest.update(self.source_fingerprint().encode())
        division = Division(self.train, self.validation, self.test, self.names, self.unseen)
        digest.update(division.client_of_rows(len(self.x)).astype(np.int64).data)
        return digest.hexdigest()[:16]

    def source_fingerprint(self) -> str:
        """A hash of the samples as loaded: before partitions, scaling or `to` changed them."""
        return self.source or fingerprint_of(self.x, self.y)

    def save_partition(self, path: str | Path) -> None:
        """Write who owns which rows, in which split, to a file such as `partition.npz`, which
        `from_arrays(partition=...)` and `partition_file` in [data] read again, for the same data only."""
        division = Division(self.train, self.validation, self.test, self.names, self.unseen)
        division.write(path, self.source_fingerprint())

    @classmethod
    def from_arrays(
        cls,
        x: Any,
        y: Any,
        client: Any = None,
        *,
        group: Any = None,
        split: Any = None,
        partition: str | Path | None = None,
        test: float = 0.25,
        validation: float = 0.2,
        unseen: int = 0,
        classes: int | None = None,
        seed: int = 0,
        names: Sequence[str] | None = None,
        class_names: Sequence[str] | None = None,
        column_names: Sequence[str] | None = None,
        scale: Literal["none", "client", "constants"] = "none",
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        impute: Literal["none", "client", "constants"] = "none",
        fill: Sequence[float] | None = None,
    ) -> Federation:
        """A federation from samples `x`, targets `y` and, per sample, the id of its client.

        Ids are numbers or text; clients are numbered in sorted order, and named by their ids unless `names`
        are given. Samples with id -1 belong to no client. Each client's rows are split into test, then
        validation (a share of the rest), then training, stratified by class; rows of one `group` stay in one
        split. Where `split` says "train", "validation" or "test" for each sample, that is what it is. Clients
        without enough rows for training and test are left out (see `notes`). `unseen` clients,
        chosen by the seed, come last and never train. Integers in `y` are classes; unless `classes` is given,
        labels with gaps are renumbered. `partition` is a file that `save_partition` wrote, in place of
        `client`. `scale` and `impute` are described in `descant.core.preprocess`.
        """
        from descant.core.labels import as_classes
        from descant.core.notes import about_labels
        from descant.core.preprocess import Preprocess

        xt, yt = as_tensor(x, "x"), as_tensor(y, "y")
        labels = None
        if not yt.is_floating_point():
            yt = yt.long()
            if classes is None:
                numbers, labels = as_classes(yt.numpy())
                yt, class_names = torch.from_numpy(numbers), class_names or labels
                classes = int(yt.max()) + 1 if len(yt) else 1
        for name, number in (("classes", 1 if classes is None else classes), ("seed", seed),
                             ("unseen", unseen)):
            require_whole(number, name)
        preprocess = Preprocess(scale=scale, mean=as_constants(mean, "mean"), std=as_constants(std, "std"),
                                impute=impute, fill=as_constants(fill, "fill"))
        if partition is not None:
            if client is not None or names is not None or group is not None or split is not None or unseen:
                raise UsageError("the partition says which client, name and split each row has, and who is "
                                 "unseen: leave out client, names, group, split and unseen")
            division = Division.read(partition, fingerprint_of(xt, yt), len(xt))
        else:
            ids = owners(client, xt, yt)
            groups = None if group is None else as_ids(group, "group", len(ids))
            division = Division.given(
                ids, as_ids(split, "split", len(ids)), group=groups, seed=seed, unseen=unseen, names=names
            ) if split is not None else Division.of(
                ids, labels=yt.numpy() if classes is not None and yt.dim() == 1 else None, group=groups,
                test=test, validation=validation, seed=seed, unseen=unseen, names=names)
        made = cls.divided(xt, yt, division, classes, preprocess, None, class_names, column_names)
        return dataclasses.replace(made, notes=about_labels(labels) + made.notes)

    @classmethod
    def from_frame(cls, frame: Any, *, target: Any = None, client: Any = None, group: Any = None,
                   split: Any = None, columns: Sequence[Any] | None = None, **options: Any) -> Federation:
        """A federation from a table with a column for the client of each row.

        `frame` is a pandas DataFrame, a Hugging Face dataset, a mapping of columns, or anything with a length
        whose items are mappings or tuples, such as a torch Dataset (columns are then positions). `target` is
        the column to predict: text and truth values are classes, whole numbers class numbers, real numbers
        real targets. `group` and `split` are columns too, as in `from_arrays`. The features are the other
        columns, or `columns`: numbers, true and false, text (one-hot), or one column of arrays. Options as in
        `from_arrays`, such as `scale="client"`.
        """
        from descant.core import frames

        known = inspect.signature(cls.from_arrays).parameters
        for option in options:
            if option not in known:
                raise unknown("option", option, [name for name in known if name not in ("x", "y")])
        roles = {"target": target, "client": client, "group": group, "split": split}
        x, y, own = frames.arrays(frame, roles, columns)
        own |= options
        return cls.from_arrays(x, y, **own)

    @classmethod
    def divided(
        cls, x: Tensor, y: Tensor, division: Division, classes: int | None, preprocess: Preprocess,
        source: str | None = None, class_names: Sequence[str] | None = None,
        column_names: Sequence[str] | None = None,
    ) -> Federation:
        """The federation of a division; `source` as in the fields."""
        from descant.core.notes import observed

        preprocess.check(x, column_names)
        if y.is_floating_point() and not bool(torch.isfinite(y).all()):
            row = int(torch.nonzero(~torch.isfinite(y).reshape(len(y), -1).all(1))[0])
            raise UsageError(f"y has a missing or infinite value in row {row}: leave the row out")
        treatment = None
        notes = observed(x, y, division, column_names, preprocess.scale != "none")
        if preprocess.changes:
            source = source or fingerprint_of(x, y)
            x, treatment = preprocess.apply(x, division.train, division.validation, division.test)
        return cls(x, y, division.train, division.validation, division.test, classes, division.names,
                   unseen=division.unseen, notes=division.notes + notes, source=source, treatment=treatment,
                   class_names=None if class_names is None else tuple(class_names),
                   column_names=None if column_names is None else tuple(column_names))

    @classmethod
    def from_datasets(cls, datasets: Mapping[str, Any] | Sequence[Any], **options: Any) -> Federation:
        """A federation from one dataset per client: a pair (x, y), or anything with `len` and `[k]`
        that yields (x, y), such as a `torch.utils.data.Dataset`. Options as in `from_arrays`."""
        if not isinstance(datasets, Iterable):
            raise UsageError("give a dataset for each client, by their names or in a list, not "
                             f"{one(datasets)}")
        if not isinstance(datasets, Mapping):
            datasets = {str(k): dataset for k, dataset in enumerate(datasets)}
        if not datasets:
            raise UsageError("the federation has zero clients: give it at least one")
        for name, dataset in datasets.items():
            if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
                raise UsageError(f"the dataset of client {name!r} is {one(dataset)}: give a pair "
                                 "(x, y), or something with a length and items")
            n_x, n_y = map(len, dataset) if is_pair(dataset) else (len(dataset),) * 2
            if n_x != n_y:
                raise UsageError(f"client {name!r} has {n_x} samples x but {n_y} targets y")
            if not n_x:
                raise UsageError(f"client {name!r} has no training data: give it some, "
                                 "or leave it out of the federation")
        pairs = [as_pair(dataset) for dataset in datasets.values()]
        for part, name in enumerate(("samples", "targets")):
            shapes = {tuple(pair[part].shape[1:]) for pair in pairs}
            if len(shapes) > 1:
                raise UsageError(f"the clients' {name} have different shapes: {sorted(shapes)}")
        client = np.repeat(np.arange(len(pairs)), [len(x) for x, _ in pairs])
        x, y = (torch.cat([pair[part] for pair in pairs]) for part in (0, 1))
        return cls.from_arrays(x, y, client, names=list(datasets), **options)


def fingerprint_of(x: Tensor, y: Tensor) -> str:
    """A hash of samples and targets."""
    digest = hashlib.sha256()
    _update(digest, x, y)
    return digest.hexdigest()[:16]


def _update(digest: Any, *tensors: Tensor) -> None:
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy().data)

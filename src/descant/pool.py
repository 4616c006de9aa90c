"""A federation: one pool of samples, and for each client three lists of indices into it."""

from __future__ import annotations

import dataclasses
import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from descant.errors import UsageError
from descant.files import replacing
from descant.random import stream

if TYPE_CHECKING:
    from descant.data.preprocess import Preprocess

SplitName: TypeAlias = Literal["train", "validation", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")

_MOST_NOTES = 10  # clients that are reported one by one; the others are counted


@dataclasses.dataclass(frozen=True)
class Table:
    """Ragged lists of pool indices, one per client, end to end: client i has [offsets[i], offsets[i+1])."""

    indices: np.ndarray  # int64 [total]
    offsets: np.ndarray  # int64 [clients + 1]

    @classmethod
    def of(cls, lists: Sequence[np.ndarray]) -> Table:
        return cls.packed(np.concatenate([np.zeros(0, np.int64), *lists]), [len(rows) for rows in lists])

    @classmethod
    def packed(cls, indices: np.ndarray, sizes: Sequence[int] | np.ndarray) -> Table:
        """The lists that lie end to end in `indices`, of these sizes."""
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        return cls(indices.astype(np.int64), offsets.astype(np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> np.ndarray:
        return self.indices[self.offsets[client] : self.offsets[client + 1]]

    @property
    def sizes(self) -> np.ndarray:
        return np.diff(self.offsets)

    def pick(self, clients: np.ndarray) -> Table:
        """The lists of these clients, in this order."""
        sizes = self.sizes[clients]
        return Table.packed(self.indices[np.repeat(self.offsets[clients], sizes) + _counters(sizes)], sizes)


class Division(NamedTuple):
    """Who owns which rows of a pool, and in which split; the last `unseen` clients never train."""

    train: Table
    validation: Table
    test: Table
    names: tuple[str, ...]
    unseen: int = 0
    notes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        client: np.ndarray,
        *,
        labels: np.ndarray | None,
        group: np.ndarray | None,
        test: float,
        validation: float,
        seed: int,
        unseen: int = 0,
        names: Sequence[str] | None = None,
    ) -> Division:
        """Splits each client's rows; the arguments are those of `Federation.from_arrays`.

        A client that cannot have both a training and a test row is left out, and a note says so.
        Clients keep their number (the rank of their id) as the key of their split, whoever is left out.
        """
        for name, share in (("test", test), ("validation", validation)):
            if not 0 <= share < 1:
                raise UsageError(f"{name} must be a share in [0, 1), not {share}")
        ids, rows, sizes = _rows_by_id(client)
        if not len(ids):
            raise UsageError("the federation has zero clients: give it at least one")
        if names is not None and len(names) != len(ids):
            raise UsageError(f"names has {len(names)} entries for {len(ids)} clients: give each client one")
        every = tuple(str(i) for i in ids) if names is None else tuple(names)

        tables, units = _split(
            rows, sizes, None if labels is None else labels[rows], None if group is None else group[rows],
            seed, np.arange(len(ids)), test, validation)
        possible = units >= 1 + int(test > 0)
        notes = _dropped(every, units, np.flatnonzero(~possible), "row" if group is None else "group of rows")
        kept = np.flatnonzero(possible)
        if not len(kept):
            raise UsageError("no client has enough rows for a training and a test row each: give the clients "
                             "more data, or set test = 0")
        order = _unseen_last(kept, unseen, seed)
        train, held_out, tested = (table.pick(order) for table in tables)
        return cls(train, held_out, tested, tuple(every[k] for k in order), unseen, notes)

    @classmethod
    def read(cls, path: str | Path, fingerprint: str) -> Division:
        """The division that `Federation.save_partition` wrote, if it is one of these data."""
        try:
            with Path(path).open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                tables = [Table(file[f"{name}_indices"], file[f"{name}_offsets"]) for name in SPLITS]
                names = tuple(str(name) for name in file["names"])
                unseen, known = int(file["unseen"]), str(file["fingerprint"])
        except OSError as error:
            raise UsageError(f"cannot read the partition {path}: {error.strerror or error}") from None
        except (KeyError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
            raise UsageError(f"{path} is not a partition that descant saved: {error}") from None
        if known != fingerprint:
            raise UsageError(f"the partition {path} was saved for other data (fingerprint {known}, and these "
                             f"have {fingerprint}): use the data, and their fields, that it was made with")
        return cls(tables[0], tables[1], tables[2], names, unseen)

    def write(self, path: str | Path, fingerprint: str) -> None:
        arrays = {f"{name}_{part}": getattr(getattr(self, name), part)
                  for name in SPLITS for part in ("indices", "offsets")}
        arrays |= {"names": np.array(self.names), "unseen": self.unseen, "fingerprint": fingerprint}
        try:
            with replacing(Path(path)) as file:
                np.savez(file, **arrays)
        except OSError as error:
            raise UsageError(f"cannot write the partition {path}: {error.strerror or error}") from None

    def client_of_rows(self, rows: int) -> np.ndarray:
        """For each row of the pool its client, or -1."""
        client = np.full(rows, -1)
        for table in (self.train, self.validation, self.test):
            client[table.indices] = np.repeat(np.arange(len(table)), table.sizes)
        return client


@dataclasses.dataclass(frozen=True)
class Federation:
    """Samples of all clients, and who owns which.

    `x` may be float, uint8 (bytes that stand for [0, 1]: they stay bytes until a batch is formed) or
    another integer type (tokens, left alone). `y` holds class numbers (integers, with `classes` set)
    or real targets. `truth` holds what is known about a synthetic federation, such as the true models.
    The last `unseen` clients are held out: they are there to be evaluated, and never train.
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
    notes: tuple[str, ...] = ()  # what was left out when the federation was made, one line each
    source: str | None = None  # the fingerprint of the samples, where x is no longer what was loaded

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
        _check_unseen(self.unseen, len(self.train))
        if self.classes is not None and len(self.y):
            low, high = int(self.y.min()), int(self.y.max())
            if low < 0 or high >= self.classes:
                raise UsageError(f"labels lie in {low}..{high}, outside the range 0..{self.classes - 1} "
                                 f"of classes = {self.classes}")

    @property
    def population(self) -> int:
        """How many clients take part: clients 0..population-1."""
        return len(self.train) - self.unseen

    @property
    def everyone(self) -> int:
        """How many clients there are with the unseen ones, which come last."""
        return len(self.train)

    def split(self, name: SplitName) -> Table:
        table: Table = getattr(self, name)
        return table

    def to(self, dtype: torch.dtype) -> Federation:
        """The same federation with real numbers in `dtype` (bytes, tokens and labels stay)."""
        x, y = (t.to(dtype) if t.is_floating_point() else t for t in (self.x, self.y))
        if x is self.x and y is self.y:
            return self
        return dataclasses.replace(self, x=x, y=y, source=self.source_fingerprint())

    def fingerprint(self) -> str:
        """A hash of the clients, their samples and their splits."""
        digest = hashlib.sha256(repr((self.classes, self.names, self.unseen)).encode())
        _update(digest, self.x, self.y)
        for table in (self.train, self.validation, self.test):
            digest.update(table.offsets.data)
            digest.update(table.indices.data)
        return digest.hexdigest()[:16]

    def source_fingerprint(self) -> str:
        """A hash of the samples as they were loaded: before partitions, scaling or `to` changed them."""
        return self.source or fingerprint_of(self.x, self.y)

    def save_partition(self, path: str | Path) -> None:
        """Write who owns which rows, in which split, to a file such as `partition.npz`.

        `Federation.from_arrays(x, y, partition=path)`, or `partition_file` in the [data] section, makes
        the same division of the same data again, and refuses other data.
        """
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
        partition: str | Path | None = None,
        test: float = 0.25,
        validation: float = 0.2,
        unseen: int = 0,
        classes: int | None = None,
        seed: int = 0,
        names: Sequence[str] | None = None,
        scale: Literal["none", "client", "constants"] = "none",
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        impute: Literal["none", "client", "constants"] = "none",
        fill: Sequence[float] | None = None,
    ) -> Federation:
        """A federation from samples `x`, targets `y` and, per sample, the id of its client.

        Ids may be numbers or text; clients are numbered in sorted order. Samples whose id is -1 (a
        number) belong to nobody. `names` overrides the names that ids would give. Each client's rows
        are split into test, then validation (a share of the rest), then training, stratified by class;
        rows of one `group` stay in one split. Clients that cannot have a training and a test row are
        left out (see `notes`). `unseen` clients, chosen by the seed, come last and never train.
        In place of `client`, `partition` names a file that `save_partition` wrote.

        `scale` and `impute` are described in `descant.data.preprocess`.
        """
        from descant.data.preprocess import Preprocess  # which belongs to the data, and these to the pool

        xt, yt = _as_tensor(x, "x"), _as_tensor(y, "y")
        if not yt.is_floating_point():
            yt = yt.long()
            classes = classes if classes is not None else int(yt.max()) + 1 if len(yt) else 1
        preprocess = Preprocess(scale=scale, mean=None if mean is None else tuple(mean),
                                std=None if std is None else tuple(std), impute=impute,
                                fill=None if fill is None else tuple(fill))
        if partition is not None:
            if client is not None or names is not None or group is not None or unseen:
                raise UsageError("the partition says which client, name and split each row has, and who is "
                                 "unseen: leave out client, names, group and unseen")
            division = Division.read(partition, fingerprint_of(xt, yt))
            return cls.divided(xt, yt, division, classes, preprocess)
        if client is None:
            raise UsageError("client is missing: give the id of each sample's client, or a saved partition")
        ids, groups = np.asarray(client), None if group is None else np.asarray(group)
        if not len(xt) == len(yt) == len(ids):
            raise UsageError(f"x has {len(xt)} rows, y {len(yt)} and client {len(ids)}: "
                             "they must describe the same samples")
        if groups is not None and len(groups) != len(ids):
            raise UsageError(f"group has {len(groups)} rows, but x has {len(ids)}: give each sample one")
        division = Division.of(
            ids, labels=yt.numpy() if classes is not None and yt.dim() == 1 else None, group=groups,
            test=test, validation=validation, seed=seed, unseen=unseen, names=names)
        return cls.divided(xt, yt, division, classes, preprocess)

    @classmethod
    def divided(
        cls, x: Tensor, y: Tensor, division: Division, classes: int | None, preprocess: Preprocess,
        source: str | None = None,
    ) -> Federation:
        """The federation of a division; `source` as in the fields."""
        preprocess.check(x)
        if y.is_floating_point() and not bool(torch.isfinite(y).all()):
            row = int(torch.nonzero(~torch.isfinite(y).reshape(len(y), -1).all(1))[0])
            raise UsageError(f"y has a missing or infinite value in row {row}: leave the row out")
        if preprocess.changes:
            source = source or fingerprint_of(x, y)
            x = preprocess.apply(x, division.train, division.validation, division.test)
        return cls(x, y, division.train, division.validation, division.test, classes, division.names,
                   unseen=division.unseen, notes=division.notes, source=source)

    @classmethod
    def from_datasets(cls, datasets: Mapping[str, Any] | Sequence[Any], **options: Any) -> Federation:
        """A federation from one dataset per client: a pair (x, y), or anything with `len` and `[k]`
        that yields (x, y), such as a `torch.utils.data.Dataset`. Options as in `from_arrays`."""
        if not isinstance(datasets, Mapping):
            datasets = {str(k): dataset for k, dataset in enumerate(datasets)}
        if not datasets:
            raise UsageError("the federation has zero clients: give it at least one")
        for name, dataset in datasets.items():
            n_x, n_y = map(len, dataset) if _is_pair(dataset) else (len(dataset),) * 2
            if n_x != n_y:
                raise UsageError(f"client {name!r} has {n_x} samples x but {n_y} targets y")
            if not n_x:
                raise UsageError(f"client {name!r} has no training data: give it some, "
                                 "or leave it out of the federation")
        pairs = [_as_pair(dataset) for dataset in datasets.values()]
        for part, name in enumerate(("samples", "targets")):
            shapes = {tuple(pair[part].shape[1:]) for pair in pairs}
            if len(shapes) > 1:
                raise UsageError(f"the clients' {name} have different shapes: {sorted(shapes)}")
        client = np.repeat(np.arange(len(pairs)), [len(x) for x, _ in pairs])
        x, y = (torch.cat([pair[part] for pair in pairs]) for part in (0, 1))
        return cls.from_arrays(x, y, client, names=list(datasets), **options)


def split_rows(
    rows: np.ndarray, labels: np.ndarray | None, seed: int, client: int, test: float, validation: float,
    group: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One client's rows as (train, validation, test).

    Stratified: the shuffled rows are ordered by label and every (1/share)-th is taken. Rows of one group
    go together: then groups are counted in place of rows, and ordered by the label of their first row.
    Depends only on the seed, the client's number and its own rows, so that a real node makes the same
    split. At least one row (or group) is left for training; with two there is one for testing.
    """
    tables, _ = _split(rows, np.array([len(rows)]), labels, group, seed, np.array([client]), test, validation)
    return tables[0][0], tables[1][0], tables[2][0]


def fingerprint_of(x: Tensor, y: Tensor) -> str:
    """A hash of samples and targets."""
    digest = hashlib.sha256()
    _update(digest, x, y)
    return digest.hexdigest()[:16]


def _split(
    rows: np.ndarray, sizes: np.ndarray, labels: np.ndarray | None, group: np.ndarray | None, seed: int,
    clients: np.ndarray, test: float, validation: float,
) -> tuple[list[Table], np.ndarray]:
    """`split_rows` for many clients at once, whose rows lie end to end: the three tables, and how many
    units (rows, or groups of rows) each client has."""
    owner = np.repeat(np.arange(len(sizes)), sizes)
    if group is None:
        unit, first, units = np.arange(len(rows)), np.arange(len(rows)), sizes
    else:
        _, code = np.unique(group, return_inverse=True)
        # owner comes first in the code, so that units lie in the order of their owners
        _, first, unit = np.unique(owner * (code.max(initial=0) + 1) + code,
                                   return_index=True, return_inverse=True)
        units = np.bincount(owner[first], minlength=len(sizes))

    shuffled = [stream(seed, "split", int(client)).permutation(n)
                for client, n in zip(clients, units, strict=True)]
    order = (np.concatenate([np.zeros(0, np.int64), *shuffled])
             + np.repeat(np.cumsum(units) - units, units))
    if labels is not None:
        order = order[np.lexsort((labels[first][order], owner[first][order]))]
    n_test = np.clip(np.rint(units * test).astype(int), int(test > 0), np.maximum(units - 1, 0))
    tested, order = _take_spread(order, units, n_test)
    rest = units - n_test
    n_validation = np.minimum(np.rint(rest * validation).astype(int), np.maximum(rest - 1, 0))
    held_out, _ = _take_spread(order, rest, n_validation)

    part = np.zeros(len(first), np.int8)
    part[held_out], part[tested] = 1, 2
    part = part[unit]
    return [Table.packed(rows[part == k], np.bincount(owner[part == k], minlength=len(sizes)))
            for k in range(len(SPLITS))], units


def _take_spread(order: np.ndarray, sizes: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """From each of the lists that lie end to end in `order`, `counts` entries that are evenly spread over
    it, and the others."""
    start = np.cumsum(sizes) - sizes
    chosen = np.zeros(len(order), bool)
    place = (_counters(counts) + 0.5) * np.repeat(sizes, counts) / np.repeat(np.maximum(counts, 1), counts)
    chosen[np.repeat(start, counts) + place.astype(int)] = True
    return order[chosen], order[~chosen]


def _counters(sizes: np.ndarray) -> np.ndarray:
    """0, 1, ..., n-1 for each n of `sizes`, end to end."""
    counters: np.ndarray = np.arange(int(np.sum(sizes))) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return counters


def _rows_by_id(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The ids in sorted order, the row numbers of each end to end, and how many there are."""
    belongs = ids != -1 if np.issubdtype(ids.dtype, np.number) else np.ones(len(ids), bool)
    kept = np.flatnonzero(belongs)
    owners, owner = np.unique(ids[kept], return_inverse=True)
    return owners, kept[np.argsort(owner, kind="stable")], np.bincount(owner, minlength=len(owners))


def _dropped(names: Sequence[str], units: np.ndarray, clients: np.ndarray, unit: str) -> tuple[str, ...]:
    notes = [f"client {names[k]!r} dropped: {units[k]} {unit}" for k in clients[:_MOST_NOTES]]
    more = len(clients) - len(notes)
    return (*notes, f"{more} more dropped: 1 {unit} each") if more else tuple(notes)


def _unseen_last(kept: np.ndarray, unseen: int, seed: int) -> np.ndarray:
    """The clients with `unseen` of them, chosen by the seed, moved to the end."""
    _check_unseen(unseen, len(kept))
    if not unseen:
        return kept
    chosen = np.zeros(len(kept), bool)
    chosen[stream(seed, "unseen").choice(len(kept), unseen, replace=False)] = True
    return np.concatenate([kept[~chosen], kept[chosen]])


def _check_unseen(unseen: int, clients: int) -> None:
    if not 0 <= unseen < clients:
        raise UsageError(f"unseen = {unseen}, but there are {clients} clients: hold out at least 0 and leave "
                         "at least one to train")


def _update(digest: Any, *tensors: Tensor) -> None:
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy().data)


def _as_tensor(values: Any, name: str) -> Tensor:
    try:
        return torch.as_tensor(values if isinstance(values, Tensor) else np.asarray(values))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{name} must be an array of numbers: {error}") from None


def _is_pair(dataset: Any) -> bool:
    return isinstance(dataset, tuple) and len(dataset) == 2


def _as_pair(dataset: Any) -> tuple[Tensor, Tensor]:
    if _is_pair(dataset):
        return _as_tensor(dataset[0], "x"), _as_tensor(dataset[1], "y")
    xs, ys = zip(*(dataset[k] for k in range(len(dataset))), strict=True)
    return (torch.stack([torch.as_tensor(x) for x in xs]),
            torch.stack([torch.as_tensor(y) for y in ys]))

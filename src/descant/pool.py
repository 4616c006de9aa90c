"""A federation: one pool of samples, and for each client three lists of indices into it."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from descant.errors import UsageError
from descant.random import stream

SplitName: TypeAlias = Literal["train", "validation", "test"]


@dataclasses.dataclass(frozen=True)
class Table:
    """Ragged lists of pool indices, one per client, end to end: client i has [offsets[i], offsets[i+1])."""

    indices: np.ndarray  # int64 [total]
    offsets: np.ndarray  # int64 [clients + 1]

    @classmethod
    def of(cls, lists: Sequence[np.ndarray]) -> Table:
        sizes = [len(rows) for rows in lists]
        indices = np.concatenate([np.zeros(0, np.int64), *lists]).astype(np.int64)
        return cls(indices, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> np.ndarray:
        return self.indices[self.offsets[client] : self.offsets[client + 1]]

    @property
    def sizes(self) -> np.ndarray:
        return np.diff(self.offsets)


@dataclasses.dataclass(frozen=True)
class Federation:
    """Samples of all clients, and who owns which.

    `x` may be float, uint8 (bytes that stand for [0, 1]: they stay bytes until a batch is formed) or
    another integer type (tokens, left alone). `y` holds class numbers (integers, with `classes` set)
    or real targets. `truth` holds what is known about a synthetic federation, such as the true models.
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
        if self.classes is not None and len(self.y):
            low, high = int(self.y.min()), int(self.y.max())
            if low < 0 or high >= self.classes:
                raise UsageError(f"labels lie in {low}..{high}, outside the range 0..{self.classes - 1} "
                                 f"of classes = {self.classes}")

    @property
    def population(self) -> int:
        """How many clients there are."""
        return len(self.train)

    def split(self, name: SplitName) -> Table:
        table: Table = getattr(self, name)
        return table

    def to(self, dtype: torch.dtype) -> Federation:
        """The same federation with real numbers in `dtype` (bytes, tokens and labels stay)."""
        x, y = (t.to(dtype) if t.is_floating_point() else t for t in (self.x, self.y))
        return dataclasses.replace(self, x=x, y=y)

    def fingerprint(self) -> str:
        """A hash of the clients, their samples and their splits."""
        digest = hashlib.sha256(repr((self.classes, self.names)).encode())
        for tensor in (self.x, self.y):
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().data)
        for table in (self.train, self.validation, self.test):
            digest.update(table.offsets.data)
            digest.update(table.indices.data)
        return digest.hexdigest()[:16]

    @classmethod
    def from_arrays(
        cls,
        x: Any,
        y: Any,
        client: Any,
        *,
        test: float = 0.25,
        validation: float = 0.2,
        classes: int | None = None,
        seed: int = 0,
        names: Sequence[str] | None = None,
        truth: Mapping[str, Tensor] | None = None,
    ) -> Federation:
        """A federation from samples `x`, targets `y` and, per sample, the id of its client.

        Ids may be numbers or text; clients are numbered in sorted order. Samples whose id is -1 (a
        number) belong to nobody. `names` overrides the names that ids would give. Each client's rows
        are split into test, then validation (a share of the rest), then training.
        """
        xt, yt = _as_tensor(x, "x"), _as_tensor(y, "y")
        ids = np.asarray(client)
        if not len(xt) == len(yt) == len(ids):
            raise UsageError(f"x has {len(xt)} rows, y {len(yt)} and client {len(ids)}: "
                             "they must describe the same samples")
        for name, share in (("test", test), ("validation", validation)):
            if not 0 <= share < 1:
                raise UsageError(f"{name} must be a share in [0, 1), not {share}")
        for name, values in (("x", xt), ("y", yt)):
            if values.is_floating_point() and not bool(torch.isfinite(values).all()):
                row = int(torch.nonzero(~torch.isfinite(values).reshape(len(values), -1).all(1))[0])
                raise UsageError(f"{name} has a missing or infinite value in row {row}: impute it first, "
                                 "or leave the row out")
        if not yt.is_floating_point():
            yt = yt.long()
            classes = classes if classes is not None else int(yt.max()) + 1 if len(yt) else 1
        labels = yt.numpy() if classes is not None and yt.dim() == 1 else None  # what to stratify by

        owners, rows = _rows_by_owner(ids)
        splits = [split_rows(r, None if labels is None else labels[r], seed, k, test, validation)
                  for k, r in enumerate(rows)]
        train, held_out, tested = zip(*splits, strict=True) if splits else ((), (), ())
        return cls(xt, yt, Table.of(train), Table.of(held_out), Table.of(tested), classes,
                   tuple(names) if names is not None else tuple(str(o) for o in owners), truth or {})

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
    rows: np.ndarray, labels: np.ndarray | None, seed: int, client: int, test: float, validation: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One client's rows as (train, validation, test).

    Stratified: the shuffled rows are ordered by label and every (1/share)-th is taken. Depends only on
    the seed, the client's number and its own labels, so that a real node makes the same split. At
    least one row is left for training; a client with too few rows has no validation, or no test, set.
    """
    order = stream(seed, "split", client).permutation(len(rows))
    if labels is not None:
        order = order[np.argsort(labels[order], kind="stable")]
    n_test = min(max(round(len(order) * test), int(test > 0)), len(order) - 1)
    tested, order = _take_spread(order, n_test)
    n_validation = min(round(len(order) * validation), len(order) - 1)
    held_out, order = _take_spread(order, n_validation)
    return rows[np.sort(order)], rows[np.sort(held_out)], rows[np.sort(tested)]


def _take_spread(order: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """`count` entries spread evenly over `order`, and the others."""
    chosen = np.zeros(len(order), bool)
    chosen[((np.arange(count) + 0.5) * len(order) / max(count, 1)).astype(int)] = True
    return order[chosen], order[~chosen]


def _rows_by_owner(ids: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """The owners in sorted order, and the row numbers of each."""
    belongs = ids != -1 if np.issubdtype(ids.dtype, np.number) else np.ones(len(ids), bool)
    kept = np.flatnonzero(belongs)
    owners, owner = np.unique(ids[kept], return_inverse=True)
    by_owner = kept[np.argsort(owner, kind="stable")]
    return owners, np.split(by_owner, np.cumsum(np.bincount(owner, minlength=1))[:-1])[: len(owners)]


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

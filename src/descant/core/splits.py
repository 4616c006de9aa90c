"""Splits: which client owns which rows, and in which split."""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from descant.core import npz
from descant.core.files import replacing
from descant.core.random import stream
from descant.errors import UsageError

SplitName: TypeAlias = Literal["train", "validation", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")

_MOST_NOTES = 10  # clients that are named; the others are counted


@dataclasses.dataclass(frozen=True)
class Table:
    """Lists of rows, one per client, end to end: client i has indices[offsets[i]:offsets[i+1]]."""

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

    @functools.cached_property
    def sizes(self) -> np.ndarray:
        return np.diff(self.offsets)

    def pick(self, clients: np.ndarray) -> Table:
        """The lists of these clients, in this order."""
        sizes = self.sizes[clients]
        return Table.packed(self.indices[np.repeat(self.offsets[clients], sizes) + _counters(sizes)], sizes)


class Division(NamedTuple):
    """Who owns which rows, and in which split; the last `unseen` clients never train."""

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
        split: int | None = None,
        fold: int | None = None,
        unseen: int = 0,
        names: Sequence[str] | None = None,
    ) -> Division:
        """Split each client's rows; the arguments are those of `Federation.from_arrays`.

        `split` is the seed of the splits, if not `seed`, and `fold` as in `split_rows`: neither changes the
        clients or who is unseen. A client without a training and a test row is left out, with a note. The
        rank of a client's id is the key of its split, whoever is left out.
        """
        for name, share in (("test", test), ("validation", validation)):
            if not isinstance(share, numbers.Real) or not 0 <= share < 1:
                raise UsageError(f"{name} must be a share in [0, 1), not {share!r}")
        ids, rows, sizes = _rows_by_id(client)
        if not len(ids):
            raise UsageError("the federation has zero clients: give it at least one")
        if names is not None and len(names) != len(ids):
            raise UsageError(f"there are {len(ids)} clients, and names for {len(names)}: give each client "
                             "one")
        every = tuple(str(i) for i in ids) if names is None else tuple(names)

        tables, units = _split(
            rows, sizes, None if labels is None else labels[rows], None if group is None else group[rows],
            seed if split is None else split, np.arange(len(ids)), test, validation, fold)
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
    def given(cls, client: np.ndarray, split: np.ndarray, *, group: np.ndarray | None, seed: int, unseen: int,
              names: Sequence[str] | None) -> Division:
        """The division whose `split` says where each row belongs. A client without a training row is left
        out, with a note; a group of rows on two sides is refused."""
        for row, word in enumerate(split.tolist()):
            if word not in SPLITS:
                raise UsageError(f"split must be one of {', '.join(SPLITS)}, not {word!r} (row {row})")
        owners, rows, sizes = _rows_by_id(client)
        if not len(owners):
            raise UsageError("the federation has zero clients: give it at least one")
        every = tuple(str(i) for i in owners) if names is None else tuple(names)
        if len(every) != len(owners):
            raise UsageError(f"there are {len(owners)} clients, and names for {len(every)}: give each client "
                             "one")
        owner, part = np.repeat(np.arange(len(owners)), sizes), split[rows]
        if group is not None:
            sides: dict[tuple[int, str], str] = {}
            for k, mark, side in zip(owner.tolist(), group[rows].tolist(), part.tolist(), strict=True):
                if sides.setdefault((k, mark), side) != side:
                    raise UsageError(f"the group {mark!r} of client {every[k]!r} has rows in "
                                     f"{sides[k, mark]} and in {side}: a group must be in one split")
        tables = [Table.packed(rows[part == name], np.bincount(owner[part == name], minlength=len(owners)))
                  for name in SPLITS]
        kept = np.flatnonzero(tables[0].sizes)
        if not len(kept):
            raise UsageError("no client has a row whose split is train")
        without = [f"client {every[k]!r} dropped: no row whose split is train"
                   for k in np.flatnonzero(tables[0].sizes == 0)]
        notes = without[:_MOST_NOTES] + (
            [f"{len(without) - _MOST_NOTES} more dropped"] if len(without) > _MOST_NOTES else [])
        order = _unseen_last(kept, unseen, seed)
        train, validation, test = (table.pick(order) for table in tables)
        return cls(train, validation, test, tuple(every[k] for k in order), unseen, tuple(notes))

    @classmethod
    def read(cls, path: str | Path, fingerprint: str, rows: int) -> Division:
        """The division that `Federation.save_partition` wrote, if it is one of these data."""
        try:
            with npz.opened(Path(path)) as file:
                tables = [Table(file.array(f"{name}_indices"), file.array(f"{name}_offsets"))
                          for name in SPLITS]
                names = tuple(str(name) for name in file.array("names"))
                unseen, known = int(file.array("unseen")), str(file.array("fingerprint"))
            _check_tables(tables, len(names), rows if known == fingerprint else None)
        except OSError as error:
            raise UsageError(f"cannot read the partition {path}: {error.strerror or error}") from None
        except (ValueError, TypeError) as error:
            raise UsageError(f"{path} is not a partition that descant saved: {error}") from None
        if known != fingerprint:
            raise UsageError(f"the partition {path} was saved for other data (fingerprint {known}, and these "
                             f"have {fingerprint}): use the data, and their fields, that it was made with")
        check_unseen(unseen, len(names))
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


def split_rows(
    rows: np.ndarray, labels: np.ndarray | None, seed: int, client: int, test: float, validation: float,
    group: np.ndarray | None = None, fold: int | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One client's rows as (train, validation, test).

    Stratified: the shuffled rows are ordered by label and every (1/share)-th is taken; where that cannot be
    of every label, chance decides which it is of. Rows of one group stay together: groups are then counted
    instead of rows, ordered by the label of their first row. The split depends on the seed, the client's
    number and its own rows only, so that a real node makes the same. At least one row (or group) is left for
    training; of two, one is for testing.

    With `fold`, the test rows are one of `folds_of(test)` parts, so that every row is tested in one fold. A
    client with fewer rows than folds has folds without a test row.
    """
    tables, _ = _split(rows, np.array([len(rows)]), labels, group, seed, np.array([client]), test, validation,
                       fold)
    return tables[0][0], tables[1][0], tables[2][0]


def folds_of(test: float, fold: int = 0) -> int:
    """The number of folds with about this share of the rows in each; `fold` must be one of them."""
    if not 0 < test <= 0.5:
        raise UsageError(f"data.test = {test:g} makes no folds: for cross-validation, set it to a share of "
                         "at most 0.5, such as 0.2 for five folds")
    count = round(1 / test)
    if not 0 <= fold < count:
        raise UsageError(f"data.fold must be one of 0 to {count - 1}, not {fold}: data.test = {test:g} makes "
                         f"{count} folds")
    return count


def _split(
    rows: np.ndarray, sizes: np.ndarray, labels: np.ndarray | None, group: np.ndarray | None, seed: int,
    clients: np.ndarray, test: float, validation: float, fold: int | None = None,
) -> tuple[list[Table], np.ndarray]:
    """`split_rows` for many clients, whose rows lie end to end: the three tables, and each client's number of
    units (rows, or groups)."""
    owner = np.repeat(np.arange(len(sizes)), sizes)
    if group is None:
        unit, first, units = np.arange(len(rows)), np.arange(len(rows)), sizes
    else:
        _, code = np.unique(group, return_inverse=True)
        # owner comes first in the code, so that units lie in the order of their owners
        _, first, unit = np.unique(owner * (code.max(initial=0) + 1) + code,
                                   return_index=True, return_inverse=True)
        units = np.bincount(owner[first], minlength=len(sizes))

    streams = [stream(seed, "split", int(client)) for client in clients]
    shuffled = [numbers.permutation(n) for numbers, n in zip(streams, units, strict=True)]
    order = (np.concatenate([np.zeros(0, np.int64), *shuffled])
             + np.repeat(np.cumsum(units) - units, units))
    kind = np.zeros(len(first), np.int64) if labels is None else labels[first]
    if labels is not None:
        order = order[np.lexsort((kind[order], owner[first][order]))]
    if fold is None:
        n_test = np.clip(np.rint(units * test).astype(int), int(test > 0), np.maximum(units - 1, 0))
        tested, order = _take_spread(order, units, n_test, _begin(kind[order], units, n_test, streams))
    else:
        count = folds_of(test, fold)
        # clients start at different folds, lest fold 0 gets the odd rows of all
        first_fold = np.array([numbers.integers(count) for numbers in streams])
        is_tested = (_counters(units) + np.repeat(first_fold, units)) % count == fold
        n_test = np.bincount(owner[first][order][is_tested], minlength=len(sizes))
        tested, order = order[is_tested], order[~is_tested]
    rest = units - n_test
    n_validation = np.minimum(np.rint(rest * validation).astype(int), np.maximum(rest - 1, 0))
    held_out, _ = _take_spread(order, rest, n_validation, _begin(kind[order], rest, n_validation, streams))

    part = np.zeros(len(first), np.int8)
    part[held_out], part[tested] = 1, 2
    part = part[unit]
    return [Table.packed(rows[part == k], np.bincount(owner[part == k], minlength=len(sizes)))
            for k in range(len(SPLITS))], units


def _begin(
    kind: np.ndarray, sizes: np.ndarray, counts: np.ndarray, streams: Sequence[np.random.Generator],
) -> np.ndarray:
    """Where `_take_spread` begins in each of the lists, whose labels lie end to end in `kind`, in order.

    In the middle, so that each label gets its share, rounded. Where fewer entries are taken, or left, than
    there are labels, the middle would always take, or leave, the same labels, at all clients: there a number
    of the client's own stream decides, and every entry is as likely to be taken as any other. A label may
    then have all its entries taken. To keep one back would leave rare labels without validation instead.
    """
    begin = sizes / 2
    owner = np.repeat(np.arange(len(sizes)), sizes)
    is_new = np.ones(len(kind), bool)
    is_new[1:] = (kind[1:] != kind[:-1]) | (owner[1:] != owner[:-1])
    kinds = np.bincount(owner[is_new], minlength=len(sizes))
    too_few = (counts > 0) & (np.minimum(counts, sizes - counts) < kinds) & (kinds > 1)
    for k in np.flatnonzero(too_few).tolist():
        begin[k] = streams[k].integers(sizes[k])
    return begin


def _take_spread(
    order: np.ndarray, sizes: np.ndarray, counts: np.ndarray, begin: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """From each of the lists that lie end to end in `order`, `counts` evenly spread entries; and the rest."""
    start = np.cumsum(sizes) - sizes
    chosen = np.zeros(len(order), bool)
    place = ((_counters(counts) * np.repeat(sizes, counts) + np.repeat(begin, counts))
             / np.repeat(np.maximum(counts, 1), counts))
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


def _check_tables(tables: Sequence[Table], clients: int, rows: int | None) -> None:
    """ValueError if tables do not divide so many rows (None: it is not known how many) among the clients."""
    for table in tables:
        indices, offsets = table.indices, table.offsets
        if indices.dtype != np.int64 or offsets.dtype != np.int64 or indices.ndim != 1 or \
                offsets.shape != (clients + 1,):
            raise ValueError("its tables have other types or lengths")
        if offsets[0] != 0 or offsets[-1] != len(indices) or (np.diff(offsets) < 0).any():
            raise ValueError("its tables do not say which rows are whose")
    every = np.unique(np.concatenate([table.indices for table in tables]))
    if rows is not None and (((every < 0) | (every >= rows)).any()
                             or len(every) < sum(len(table.indices) for table in tables)):
        raise ValueError("it has a row that is not there, or that is given twice")


def _dropped(names: Sequence[str], units: np.ndarray, clients: np.ndarray, unit: str) -> tuple[str, ...]:
    notes = [f"client {names[k]!r} dropped: {units[k]} {unit}" for k in clients[:_MOST_NOTES]]
    more = len(clients) - len(notes)
    return (*notes, f"{more} more dropped: 1 {unit} each") if more else tuple(notes)


def _unseen_last(kept: np.ndarray, unseen: int, seed: int) -> np.ndarray:
    """The clients with `unseen` of them, chosen by the seed, moved to the end."""
    check_unseen(unseen, len(kept))
    if not unseen:
        return kept
    chosen = np.zeros(len(kept), bool)
    chosen[stream(seed, "unseen").choice(len(kept), unseen, replace=False)] = True
    return np.concatenate([kept[~chosen], kept[chosen]])


def check_unseen(unseen: int, clients: int) -> None:
    if not 0 <= unseen < clients:
        raise UsageError(f"unseen = {unseen}, but there are {clients} clients: hold out at least 0 and leave "
                         "at least one to train")

"""The pool, the index tables, and the splits."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from descant import data
from descant.core.federation import Federation
from descant.core.splits import Division, SplitName, Table, folds_of, split_rows
from descant.data.spec import DataSpec
from descant.errors import UsageError

SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")


def make(n: int = 240, clients: int = 4, seed: int = 0, **options: Any) -> Federation:
    rng = np.random.default_rng(n + clients)
    x = rng.standard_normal((n, 3)).astype(np.float32)
    return Federation.from_arrays(x, rng.integers(3, size=n), rng.integers(clients, size=n), seed=seed,
                                  **options)


def test_table_keeps_ragged_lists_apart() -> None:
    table = Table.of([np.array([4, 2]), np.array([], np.int64), np.array([7])])
    assert len(table) == 3
    assert [list(table[k]) for k in range(3)] == [[4, 2], [], [7]]
    assert list(table.sizes) == [2, 0, 1]
    assert table.indices.dtype == table.offsets.dtype == np.int64


def test_table_of_nothing() -> None:
    assert len(Table.of([])) == 0


def test_every_row_lies_in_exactly_one_split_of_its_owner() -> None:
    client = np.random.default_rng(0).integers(5, size=300)
    fed = Federation.from_arrays(np.zeros((300, 1)), np.zeros(300, int), client)
    assert fed.population == 5
    for k in range(5):
        rows = np.concatenate([fed.split(name)[k] for name in SPLITS])
        assert sorted(rows) == list(np.flatnonzero(client == k))


def test_shares_are_of_the_rows_and_of_the_rest() -> None:
    fed = Federation.from_arrays(np.zeros((80, 1)), np.zeros(80), [0] * 80, test=0.25, validation=0.2)
    assert [int(fed.split(name).sizes[0]) for name in SPLITS] == [48, 12, 20]


def test_splits_are_stratified() -> None:
    """40 + 40 + 20 rows of three classes: every split has them in the proportion 2 : 2 : 1."""
    labels = np.repeat([0, 1, 2], [40, 40, 20])
    for seed in range(5):
        for rows, share in zip(split_rows(np.arange(100), labels, seed, 3, 0.25, 0.2), (0.6, 0.15, 0.25),
                               strict=True):
            expected = share * np.array([40, 40, 20])
            assert (np.abs(np.bincount(labels[rows], minlength=3) - expected) <= 1).all()


@pytest.mark.parametrize(("test", "validation", "part", "taken"), [
    (0.0, 1 / 6, 1, 2),  # two of twelve are for validation, of four labels
    (1 / 6, 0.0, 2, 2),
    (0.75, 0.0, 0, 3),  # three are left
    (0.75, 1 / 3, 1, 1),  # one of the three that are left
])
def test_of_few_entries_chance_decides_which_labels_they_have(test: float, validation: float, part: int,
                                                              taken: int) -> None:
    """Every entry is as likely as any other, so that a label has its share of them over many seeds."""
    labels, seeds = np.repeat([0, 1, 2, 3], [6, 3, 2, 1]), 1500
    found = np.zeros(4)
    for seed in range(seeds):
        rows = split_rows(np.arange(12), labels, seed, 5, test, validation)[part]
        assert len(rows) == taken
        found += np.bincount(labels[rows], minlength=4)
    expected = taken / 12 * np.bincount(labels)
    # the number of a label in one split is one of two neighbours: a deviation of at most 1/2
    assert found / seeds == pytest.approx(expected, abs=5 * 0.5 / seeds**0.5)


def test_clients_with_few_entries_validate_on_different_labels() -> None:
    """Each alone as in the federation, by a stream of its own."""
    client, labels = np.repeat(np.arange(40), 5), np.tile(np.arange(5), 40)
    made = Division.of(client, labels=labels, group=None, test=0.25, validation=0.3, seed=2)
    for table in (made.validation, made.test):
        assert (table.sizes == 1).all()
        assert set(labels[table.indices]) == set(range(5))
    for k in range(40):
        alone = split_rows(np.arange(5), np.arange(5), 2, k, 0.25, 0.3)
        assert [list(made.validation[k]), list(made.test[k])] == [list(5 * k + rows) for rows in alone[1:]]


@pytest.mark.parametrize(("labels", "fold", "validated", "tested"), [
    (np.arange(24) % 3, None, [4, 8, 10, 15], [0, 5, 7, 17, 21, 22]),
    (None, None, [0, 5, 11, 18], [15, 17, 20, 21, 22, 23]),
    (np.arange(24) % 3, 1, [4, 8, 10, 15], [0, 5, 7, 17, 21, 22]),
    (np.arange(24) % 8, 1, None, [7, 8, 10, 12, 14, 19]),  # a fold begins by chance as ever
])
def test_splits_with_enough_entries_are_what_they_always_were(
    labels: np.ndarray | None, fold: int | None, validated: list[int] | None, tested: list[int],
) -> None:
    _, held_out, test = split_rows(np.arange(24), labels, 7, 3, 0.25, 0.2, None, fold)
    assert list(test) == tested
    assert validated is None or list(held_out) == validated


def test_split_of_a_client_is_the_one_it_would_make_alone() -> None:
    rng = np.random.default_rng(1)
    client, labels = rng.integers(4, size=200), rng.integers(3, size=200)
    fed = Federation.from_arrays(rng.standard_normal((200, 2)), labels, client, seed=9)
    for k in range(4):
        pool = np.flatnonzero(client == k)
        alone = split_rows(np.arange(len(pool)), labels[pool], 9, k, 0.25, 0.2)
        for name, rows in zip(SPLITS, alone, strict=True):
            assert np.array_equal(fed.split(name)[k], pool[rows])


def test_split_depends_on_seed_and_client() -> None:
    def tested(seed: int, client: int) -> list[int]:
        return list(split_rows(np.arange(60), None, seed, client, 0.25, 0.2)[2])

    assert tested(0, 0) == tested(0, 0)
    assert tested(0, 0) != tested(1, 0)
    assert tested(0, 0) != tested(0, 1)


@settings(deadline=None, max_examples=80)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.floats(0, 0.9), st.floats(0, 0.9),
       st.integers(0, 99))
def test_groups_are_not_split(sizes: list[int], test: float, validation: float, seed: int) -> None:
    """Whatever the groups: they lie in one split each, and there is one to train and one to test on."""
    rng = np.random.default_rng(seed)
    group = rng.permutation(np.repeat(np.arange(len(sizes)) * 7, sizes))
    labels = rng.integers(3, size=len(group))
    splits = split_rows(np.arange(len(group)), labels, seed, 0, test, validation, group)
    assert sorted(np.concatenate(splits)) == list(range(len(group)))
    parts = [set(group[rows]) for rows in splits]
    assert sum(map(len, parts)) == len(sizes)
    assert parts[0]
    assert bool(parts[2]) == (test > 0 and len(sizes) > 1)
    assert len(parts[2]) == min(max(round(len(sizes) * test), int(test > 0)), len(sizes) - 1)


def test_groups_are_stratified_by_their_label() -> None:
    group = np.repeat(np.arange(60), 5)
    labels = np.repeat(np.arange(60) % 3, 5)
    for rows, share in zip(split_rows(np.arange(300), labels, 1, 0, 0.25, 0.2, group), (0.6, 0.15, 0.25),
                           strict=True):
        assert np.bincount(labels[rows]).tolist() == [share * 100] * 3


def test_groups_of_single_rows_change_nothing() -> None:
    labels = np.random.default_rng(0).integers(3, size=50)
    plain = split_rows(np.arange(50), labels, 0, 0, 0.25, 0.2)
    grouped = split_rows(np.arange(50), labels, 0, 0, 0.25, 0.2, np.arange(50))
    assert all(np.array_equal(a, b) for a, b in zip(plain, grouped, strict=True))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 5), min_size=2, max_size=30), st.sampled_from([0.5, 0.3, 0.25, 0.2, 0.1]),
       st.integers(0, 99))
@pytest.mark.thorough
def test_over_the_folds_every_row_is_tested_once(sizes: list[int], test: float, seed: int) -> None:
    """Groups stay together, classes are spread, and there is always something to train on."""
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(len(sizes)), sizes)
    labels = np.repeat(rng.integers(3, size=len(sizes)), sizes)
    count = folds_of(test)
    splits = [split_rows(np.arange(len(group)), labels, seed, 1, test, 0.2, group, fold)
              for fold in range(count)]
    assert sorted(np.concatenate([tested for *_, tested in splits])) == list(range(len(group)))
    of_class = []
    for train, held_out, tested in splits:
        assert sorted(np.concatenate([train, held_out, tested])) == list(range(len(group)))
        assert len(train)
        assert not {*group[tested]} & {*group[train], *group[held_out]}
        first = np.unique(group[tested])
        of_class.append(np.bincount(labels[np.searchsorted(group, first)], minlength=3))
    assert (np.ptp(of_class, axis=0) <= 1).all()


def test_folds_are_those_that_a_client_makes_alone_and_clients_stay_who_they_are() -> None:
    rng = np.random.default_rng(1)
    client, labels = rng.integers(6, size=200), rng.integers(3, size=200)

    def divided(split: int | None, fold: int | None) -> Division:
        return Division.of(client, labels=labels, group=None, test=0.25, validation=0.2, seed=9, split=split,
                           fold=fold, unseen=2)

    plain, again, other = divided(None, None), divided(9, None), divided(3, None)
    assert all(np.array_equal(getattr(plain, name).indices, getattr(again, name).indices) for name in SPLITS)
    assert not np.array_equal(plain.test.indices, other.test.indices)
    assert plain.names == other.names == divided(3, 1).names  # the unseen are the same ones
    for k, name in enumerate(divided(3, 1).names):
        pool = np.flatnonzero(client == int(name))
        alone = split_rows(np.arange(len(pool)), labels[pool], 3, int(name), 0.25, 0.2, None, 1)
        assert np.array_equal(divided(3, 1).test[k], pool[alone[2]])


def test_the_pool_is_the_same_whatever_the_split() -> None:
    def of(**fields: object) -> Federation:
        return DataSpec.parse({"dataset": "digits", "clients": 5, "scale": "client", **fields}).federation()

    one, other, fold = of(), of(split=1), of(split=1, fold=2)
    assert one.pool_fingerprint() == other.pool_fingerprint() == fold.pool_fingerprint()
    assert len({each.fingerprint() for each in (one, other, fold)}) == 3
    assert of(seed=1).pool_fingerprint() != one.pool_fingerprint()  # which deals the rows anew


@pytest.mark.parametrize(("fields", "words"), [
    ({"fold": 4}, ["data.fold must be one of 0 to 3, not 4"]),
    ({"fold": 0, "test": 0.0}, ["data.test = 0 makes no folds"]),
    ({"fold": 0, "test": 0.8}, ["makes no folds"]),
    ({"split": -1}, ["data.split", "at least 0"]),
    ({"split": 1, "partition_file": "p.npz"}, ["remove split and fold"]),
])
def test_splits_that_make_no_sense_are_refused(fields: dict[str, object], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        DataSpec.parse({"dataset": "digits", **fields})
    for word in words:
        assert word in str(caught.value)


def test_a_group_with_several_owners_is_kept_whole_by_each() -> None:
    client, group = np.arange(120) % 2, np.arange(120) // 10
    fed = Federation.from_arrays(np.zeros((120, 1)), np.zeros(120), client, group=group)
    for k in range(2):
        parts = [set(group[fed.split(name)[k]]) for name in SPLITS]
        assert sum(map(len, parts)) == 12


def test_clients_too_small_for_a_test_row_are_dropped_and_reported() -> None:
    client = ["a", "b", "b", "c", "c", "c", "d"]
    fed = Federation.from_arrays(np.arange(7.0)[:, None], np.zeros(7), client)
    assert fed.names == ("b", "c")
    assert fed.notes == ("client 'a' dropped: 1 row", "client 'd' dropped: 1 row",
                         "clients 'b' (2) and 'c' (3) have fewer than 5 rows: scores measured there are "
                         "mostly noise")
    assert (fed.test.sizes > 0).all()
    alone = split_rows(np.array([3, 4, 5]), None, 0, 2, 0.25, 0.2)  # client c is still number 2
    assert np.array_equal(fed.test[1], alone[2])
    everyone = Federation.from_arrays(np.zeros((7, 1)), np.zeros(7), client, test=0)
    assert everyone.names == ("a", "b", "c", "d")
    [told] = everyone.notes
    assert told.startswith("clients 'a' (1), 'b' (2), 'c' (3) and 1 more have fewer than 5 rows")
    with pytest.raises(UsageError, match="no client has enough rows for a training and a test row each"):
        Federation.from_arrays(np.zeros((3, 1)), np.zeros(3), [0, 1, 2])


def test_a_client_of_one_group_is_dropped_and_many_are_counted() -> None:
    fed = Federation.from_arrays(np.zeros((9, 1)), np.zeros(9), [0] * 5 + [1] * 4,
                                 group=[0, 1, 2, 3, 4] + [7] * 4)
    assert fed.notes == ("client '1' dropped: 1 group of rows",)
    many = Federation.from_arrays(np.zeros((40, 1)), np.zeros(40), np.minimum(np.arange(40), 30))
    assert len(many.notes) == 11
    assert many.notes[-1] == "20 more dropped: 1 row each"


def test_unseen_clients_come_last_and_keep_their_splits() -> None:
    seen, held = make(clients=10), make(clients=10, unseen=3)
    assert (seen.population, seen.everyone, seen.unseen) == (10, 10, 0)
    assert (held.population, held.everyone, held.unseen) == (7, 10, 3)
    assert sorted(held.names) == sorted(seen.names)
    assert list(held.names[:7]) == sorted(held.names[:7])
    for k, name in enumerate(held.names):
        for split in SPLITS:
            assert np.array_equal(held.split(split)[k], seen.split(split)[seen.names.index(name)])
    assert held.names == make(clients=10, unseen=3).names
    assert len({make(240, 10, seed, unseen=3).names[7:] for seed in range(8)}) > 3
    assert held.fingerprint() != dataclasses.replace(held, unseen=0).fingerprint()


@pytest.mark.parametrize("unseen", [4, 5, -1])
def test_somebody_must_train(unseen: int) -> None:
    with pytest.raises(UsageError, match=f"unseen = {unseen}, but there are 4 clients"):
        make(clients=4, unseen=unseen)


def test_a_saved_partition_is_made_again(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((200, 3)), rng.integers(3, size=200)
    client = np.array(["west", "é", "south", "north"])[rng.integers(4, size=200)]
    fed = Federation.from_arrays(x, y, client, seed=8, unseen=1)
    file = tmp_path / "partition.npz"
    fed.save_partition(file)
    assert [p.name for p in tmp_path.iterdir()] == ["partition.npz"]
    again = Federation.from_arrays(x, y, partition=file)
    assert again.fingerprint() == fed.fingerprint()
    assert (again.names, again.unseen) == (fed.names, 1)

    # the data are what was loaded: what is done to them after that does not matter
    scaled = Federation.from_arrays(x, y, client, seed=8, unseen=1, scale="client")
    for changed in (fed.to(torch.float32), scaled):
        changed.save_partition(file)
        assert Federation.from_arrays(x, y, partition=str(file)).fingerprint() == fed.fingerprint()
    assert Federation.from_arrays(x, y, partition=file, scale="client").fingerprint() == scaled.fingerprint()


def test_a_saved_partition_refuses_other_data(tmp_path: Path) -> None:
    x, y = np.zeros((40, 2)), np.arange(40) % 2
    file = tmp_path / "partition.npz"
    Federation.from_arrays(x, y, np.arange(40) % 4).save_partition(file)
    for other in (x + 1e-9, x[:39], x.astype(np.float32)):
        with pytest.raises(UsageError, match=r"partition\.npz was saved for other data \(fingerprint"):
            Federation.from_arrays(other, y[: len(other)], partition=file)
    with pytest.raises(UsageError, match="was saved for other data"):
        Federation.from_arrays(x, 1 - y, partition=file)
    with pytest.raises(UsageError, match="leave out client, names, group, split and unseen"):
        Federation.from_arrays(x, y, np.zeros(40), partition=file)
    with pytest.raises(UsageError, match="client is missing"):
        Federation.from_arrays(x, y)


def test_files_that_are_not_partitions(tmp_path: Path) -> None:
    x, y, file = np.zeros((4, 1)), np.zeros(4), tmp_path / "partition.npz"
    with pytest.raises(UsageError, match=r"cannot read the partition .*partition\.npz: No such file"):
        Federation.from_arrays(x, y, partition=file)
    np.savez(file, names=np.array(["a"]))
    with pytest.raises(UsageError, match="is not a partition that descant saved"):
        Federation.from_arrays(x, y, partition=file)
    with file.open("wb") as array:
        np.save(array, x)
    with pytest.raises(UsageError, match="is not a partition that descant saved"):
        Federation.from_arrays(x, y, partition=file)
    for content in (b"", b"PK\x03\x04 cut off", b"text"):
        file.write_bytes(content)
        with pytest.raises(UsageError, match="is not a partition that descant saved"):
            Federation.from_arrays(x, y, partition=file)
    with pytest.raises(UsageError, match="cannot write the partition"):
        make().save_partition(tmp_path / "nowhere" / "partition.npz")


@pytest.mark.parametrize("fields", [
    {"dataset": "digits", "partition": "dirichlet", "clients": 8, "unseen": 2},
    {"dataset": "digits", "partition": "feature", "clients": 8, "unseen": 3},
    {"dataset": "digits", "partition": "feature", "clients": 8, "scale": "client"},
    {"dataset": "fedmap_linear"},
    {"dataset": "logistic", "clients": 6, "unseen": 2},
], ids=str)
def test_a_data_section_with_a_saved_partition(fields: dict[str, Any], tmp_path: Path) -> None:
    fed = data.federation(**fields)
    file = tmp_path / "partition.npz"
    fed.save_partition(file)
    rest = {name: value for name, value in fields.items() if name != "unseen"}  # which the file says
    again = data.federation(**rest, partition_file=str(file))
    assert again.fingerprint() == fed.fingerprint()
    assert all(torch.equal(again.truth[name], fed.truth[name]) for name in fed.truth)
    assert again.origin is not None
    assert again.origin["partition_file"] == str(file)
    assert data.federation(**again.origin).fingerprint() == fed.fingerprint()
    with pytest.raises(UsageError, match="was saved for other data"):
        data.federation("digits" if fed.classes != 10 else "logistic", partition_file=str(file))


@pytest.mark.parametrize(("rows", "sizes"), [(1, (1, 0, 0)), (2, (1, 0, 1)), (4, (2, 1, 1))])
def test_a_small_client_trains_first(rows: int, sizes: tuple[int, ...]) -> None:
    assert tuple(len(part) for part in split_rows(np.arange(rows), None, 0, 0, 0.25, 0.2)) == sizes


def test_no_held_out_rows_when_none_are_wanted() -> None:
    fed = make(test=0, validation=0)
    assert fed.test.sizes.sum() == fed.validation.sizes.sum() == 0
    assert fed.train.sizes.sum() == 240


def test_clients_are_numbered_in_sorted_order_and_minus_one_is_nobody() -> None:
    fed = Federation.from_arrays(np.zeros((6, 1)), np.zeros(6), ["b", "a", "b", "c", "a", "b"], test=0)
    assert fed.names == ("a", "b", "c")
    fed = Federation.from_arrays(np.zeros((6, 1)), np.zeros(6), [7, -1, 3, 3, -1, 7], test=0)
    assert fed.names == ("3", "7")
    assert list(fed.train[0]) == [2, 3]
    assert list(fed.train[1]) == [0, 5]


def test_kinds_of_targets() -> None:
    ids = np.zeros(4, int)
    labelled = Federation.from_arrays(np.zeros((4, 1)), np.array([0, 2, 1, 0], np.int32), ids)
    assert labelled.classes == 3
    assert labelled.y.dtype == torch.int64
    assert Federation.from_arrays(np.zeros((4, 1)), [0, 2, 1, 0], ids, classes=10).classes == 10
    assert Federation.from_arrays(np.zeros((4, 1)), [0.5, 2, 1, 0], ids).classes is None


def test_dtype_changes_only_real_numbers() -> None:
    fed = Federation.from_arrays(torch.zeros(4, 2, dtype=torch.uint8), [0, 1, 0, 1], np.zeros(4, int))
    assert fed.to(torch.float64).x.dtype == torch.uint8
    doubled = make().to(torch.float64)
    assert doubled.x.dtype == torch.float64
    assert doubled.y.dtype == torch.int64


def test_from_datasets_takes_pairs_and_torch_datasets() -> None:
    x, y = torch.randn(30, 2), torch.randint(0, 2, (30,))
    pairs = [(x[:12].numpy(), y[:12].numpy()), (x[12:].numpy(), y[12:].numpy())]
    wrapped = [TensorDataset(x[:12], y[:12]), TensorDataset(x[12:], y[12:])]
    whole = Federation.from_arrays(x, y, [0] * 12 + [1] * 18, seed=5)
    for datasets in (pairs, wrapped):
        fed = Federation.from_datasets(datasets, seed=5)
        assert fed.fingerprint() == whole.fingerprint()
        assert fed.names == ("0", "1")


def test_from_datasets_keeps_the_order_of_names() -> None:
    hospitals = {"west": (np.ones((8, 1)), np.zeros(8)), "east": (np.zeros((8, 1)), np.zeros(8))}
    fed = Federation.from_datasets(hospitals)
    assert fed.names == ("west", "east")
    assert bool((fed.x[torch.from_numpy(fed.train[0])] == 1).all())


def test_fingerprint_changes_with_data_and_splits() -> None:
    fed = make()
    assert fed.fingerprint() == make().fingerprint()
    x = fed.x.clone()
    x[17, 1] += 1e-6
    y = fed.y.clone()
    y[3] = (y[3] + 1) % 3
    others = [dataclasses.replace(fed, x=x), dataclasses.replace(fed, y=y), fed.to(torch.float64),
              make(seed=1), make(test=0.3)]
    assert len({f.fingerprint() for f in (fed, *others)}) == 6


ZEROS = np.zeros((4, 1))


@pytest.mark.parametrize(("x", "y", "client", "options", "message"), [
    (ZEROS, np.zeros(3), np.zeros(4, int), {}, "x has 4 rows, y 3 and client 4"),
    (ZEROS, np.zeros(4), np.zeros(4, int), {"test": 1.0}, "test must be a share in [0, 1), not 1.0"),
    (ZEROS, np.zeros(4), np.zeros(4, int), {"validation": -0.1}, "validation must be a share in [0, 1)"),
    (np.array([[0.0], [np.nan], [0.0], [0.0]]), np.zeros(4), np.zeros(4, int), {}, "missing value in row 1,"),
    (np.array([[0.0], [0.0], [0.0], [np.inf]]), np.zeros(4), [0] * 4, {}, "an infinite value in row 3"),
    (ZEROS, np.zeros(4), np.zeros(4, int), {"group": [0]}, "group has 1 rows, but x has 4"),
    (ZEROS, [0, 1, 5, 0], np.zeros(4, int), {"classes": 3}, "labels lie in 0..5, outside the range 0..2"),
    (ZEROS, [0, -1, 1, 0], np.zeros(4, int), {}, "labels lie in -1..1, outside the range 0..1"),
    (ZEROS, np.zeros(4), np.full(4, -1), {}, "zero clients"),
    (ZEROS, np.zeros(4), [0] * 4, {"names": ["a", "b"]}, "there are 1 clients, and names for 2"),
    ([["a"]] * 4, np.zeros(4), np.zeros(4, int), {}, "x must be an array of numbers"),
])
def test_bad_arrays(x: object, y: object, client: object, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        Federation.from_arrays(x, y, client, **options)
    assert message in str(error.value)


@pytest.mark.parametrize(("datasets", "message"), [
    ([], "zero clients"),
    ({"a": (np.zeros((2, 1)), np.zeros(2)), "b": ([], [])}, "client 'b' has no training data"),
    ([TensorDataset(torch.zeros(0, 1), torch.zeros(0))], "client '0' has no training data"),
    ([(np.zeros((2, 1)), np.zeros(2)), (np.zeros((2, 3)), np.zeros(2))], "different shapes: [(1,), (3,)]"),
    # the rows add up, but would be paired with targets of the other client
    ([(np.zeros((3, 1)), np.zeros(2)), (np.zeros((2, 1)), np.zeros(3))], "client '0' has 3 samples x but 2"),
])
def test_bad_datasets(datasets: Any, message: str) -> None:
    with pytest.raises(UsageError) as error:
        Federation.from_datasets(datasets)
    assert message in str(error.value)


def test_a_client_without_training_rows_is_named() -> None:
    some, none = Table.of([np.array([0]), np.array([], np.int64)]), Table.of([np.array([], np.int64)] * 2)
    with pytest.raises(UsageError, match="client 'east' has no training data"):
        Federation(torch.zeros(1, 1), torch.zeros(1), some, none, none, None, ("west", "east"))


@pytest.mark.parametrize(("change", "message"), [
    ({"names": ("a", "a")}, "'a' is the name of two clients"),
    ({"names": ("a", "b\nc")}, "cannot be printed"),
    ({"test": Table.of([np.array([0]), np.array([9])])}, "row 0 is in two lists"),
    ({"test": Table.of([np.array([8]), np.array([10])])}, "name rows 0..10, but x has 10 rows"),
])
def test_a_federation_is_whole(change: dict[str, Any], message: str) -> None:
    parts = {"x": torch.zeros(10, 1), "y": torch.zeros(10), "classes": None, "names": ("a", "b"),
             "train": Table.of([np.arange(3), np.arange(3, 6)]),
             "validation": Table.of([np.arange(6, 8), np.arange(0)]),
             "test": Table.of([np.array([8]), np.array([9])])}
    federation = Federation(**parts)
    assert federation.weights.tolist() == [0.5, 0.5]
    with pytest.raises(UsageError, match=re.escape(message)):
        Federation(**(parts | change))


@pytest.mark.parametrize(("arguments", "message"), [
    ({"x": 3.0}, "x must be an array with one row per sample"),
    ({"client": 3}, "client must hold one id"),
    ({"client": [[0, 1]] * 6}, "client must hold one id"),
    ({"client": [0, 1, None, 0, 1, 0]}, "client must hold one id"),
    ({"client": [0, 1, float("nan"), 0, 1, 0]}, "none missing"),
    ({"classes": "3"}, "classes must be a whole number"),
])
def test_arguments_of_the_wrong_kind(arguments: dict[str, Any], message: str) -> None:
    given = {"x": np.zeros((6, 2)), "y": np.zeros(6, int), "client": [0, 0, 0, 1, 1, 1]} | arguments
    with pytest.raises(UsageError, match=message):
        Federation.from_arrays(**given)


def test_a_dataset_that_is_none() -> None:
    with pytest.raises(UsageError, match="the dataset of client 'a' is a NoneType"):
        Federation.from_datasets({"a": None})

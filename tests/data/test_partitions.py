"""Partitions: properties that hold for all data, and the errors where they cannot."""

from __future__ import annotations

import math
import sys
import time
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from descant import data
from descant.core.federation import Federation
from descant.data.partitions import (
    PARTITIONS,
    Classes,
    Dirichlet,
    Feature,
    Iid,
    LabelMajority,
    Natural,
    Neighbours,
    Partition,
    Quantity,
    Shards,
)
from descant.data.samples import Samples
from descant.errors import UsageError

quick = settings(deadline=None, max_examples=60)
seeds = st.integers(0, 2**32)


@st.composite
def labelled(draw: st.DrawFn, least: int = 1) -> np.ndarray:
    """Shuffled labels of 1 to 6 classes, unequally frequent, with gaps between the class numbers."""
    counts = draw(st.lists(st.integers(least, least + 40), min_size=1, max_size=6))
    labels = np.repeat(np.arange(len(counts)) * 3, counts)
    return np.random.default_rng(draw(seeds)).permutation(labels)


def deal(
    partition: Partition, labels: np.ndarray | None, owner: np.ndarray | None, clients: int, seed: int
) -> np.ndarray:
    """The assignment of rows of which only the labels and the owners matter."""
    rows = labels if labels is not None else owner
    assert rows is not None
    y = torch.from_numpy(labels) if labels is not None else torch.zeros(len(rows))
    classes = int(labels.max()) + 1 if labels is not None else None
    return partition.assign(Samples(torch.zeros(len(rows), 1), y, classes, owner), clients, seed)


def table(labels: np.ndarray, client: np.ndarray, clients: int) -> np.ndarray:
    """How many rows of each class each client has, [clients, classes]."""
    classes = np.unique(labels)
    return np.array([[((client == k) & (labels == c)).sum() for c in classes] for k in range(clients)])


def drawn_partition(name: str, draw: st.DrawFn) -> Partition:
    """A partition of this name with fields that suit 60 rows or more of 3 classes, for 4 clients."""
    sizes = st.lists(st.integers(1, 15), min_size=4, max_size=4).map(tuple)
    made: dict[str, st.SearchStrategy[Partition]] = {
        "iid": st.builds(Iid),
        "classes": st.builds(Classes, classes_per_client=st.integers(1, 3),
                             sizes=st.sampled_from(["equal", "lognormal", "uniform"]),
                             sigma=st.floats(0, 5), smallest=st.integers(1, 20), largest=st.integers(20, 90)),
        "shards": st.builds(Shards, st.integers(1, 15)),
        "neighbours": st.builds(Neighbours, classes_per_client=st.integers(1, 3), least=st.integers(1, 4),
                                sigma=st.floats(0, 5), reserve=st.integers(0, 40), smallest=st.integers(0, 2),
                                largest=st.integers(2, 9)),
        "dirichlet": st.builds(Dirichlet, st.floats(1e-3, 1e3), st.integers(1, 15)),
        "label_majority": st.builds(LabelMajority, st.floats(0.34, 1), st.floats(0.01, 1)),
        "quantity": st.builds(Quantity, st.floats(1e-3, 1e3), st.integers(1, 15), st.just(()) | sizes),
        "feature": st.builds(Feature, st.sampled_from(["affine", "rotation", "noise"])),
        "natural": st.builds(Natural, st.integers(1, 3), st.none() | st.integers(3, 30),
                             st.sampled_from(["sample", "merge"])),
    }
    return draw(made[name])


@st.composite
def grouped(draw: st.DrawFn, kind: str) -> tuple[Partition, Samples]:
    """A partition of a kind, and samples of 3 classes, of 8 owners or more, with or without groups."""
    partition = drawn_partition(kind, draw)
    rows = draw(st.integers(60, 150))
    rng = np.random.default_rng(draw(seeds))
    labels = rng.permutation(np.arange(rows) % 3)
    owner = rng.permutation(np.arange(rows) % draw(st.integers(8, 12)))
    group = None
    if draw(st.booleans()):  # pairs and triples of rows of one class and one owner count as one
        repeat = rng.integers(1, 4, rows)
        group = np.repeat(rng.permutation(rows), repeat)
        labels, owner = np.repeat(labels, repeat), np.repeat(owner, repeat)
    x = torch.from_numpy(rng.standard_normal((len(labels), 4)))
    return partition, Samples(x, torch.from_numpy(labels), 3, owner, group)


@pytest.mark.parametrize("examples", [10, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", PARTITIONS)
def test_every_partition(kind: str, examples: int) -> None:
    """No row twice, none lost unless reported, no group split, every client served, and seeds repeat."""

    @settings(deadline=None, max_examples=examples)
    @given(grouped(kind), seeds)
    def check(made: tuple[Partition, Samples], seed: int) -> None:
        partition, samples = made
        client = partition.deal(samples, 4, seed)
        assert client.shape == samples.y.shape
        assert set(np.unique(client)) - {-1} == set(range(4))
        assert np.array_equal(client, partition.deal(samples, 4, seed))

        report = partition.report(samples, client, 4, seed)
        lost = int((client == -1).sum())
        assert any(f"{lost} of {len(client)} rows" in line for line in report) == (lost > 0)

        fed = Federation.from_arrays(samples.x, samples.y, client, group=samples.group, seed=seed)
        tables = [fed.train, fed.validation, fed.test]
        used = np.concatenate([table.indices for table in tables])
        assert len(np.unique(used)) == len(used)
        assert len(used) == len(client) - lost or any("dropped" in note for note in fed.notes)
        assert (fed.train.sizes > 0).all()
        assert (fed.test.sizes > 0).all()
        if samples.group is not None:
            place = np.full(len(client), -1)
            for k, table in enumerate(tables):
                place[table.indices] = k
            mine = np.flatnonzero(place >= 0)
            for values in (client, place):  # neither clients nor splits share a group
                pairs = np.unique(np.stack([samples.group[mine], values[mine]]), axis=1)
                assert len(np.unique(pairs[0])) == pairs.shape[1]

        seen = partition.transform(samples, client, 4, seed)
        assert seen.x.shape == samples.x.shape
        assert seen.x.dtype == samples.x.dtype
        assert torch.equal(seen.x, partition.transform(samples, client, 4, seed).x)
        assert (seen is samples) == (kind != "feature")

    check()


@quick
@given(labelled(), st.data(), seeds)
def test_iid_deals_equally(labels: np.ndarray, data: st.DataObject, seed: int) -> None:
    clients = data.draw(st.integers(1, len(labels)))
    client = deal(Iid(), labels, None, clients, seed)
    sizes = np.bincount(client, minlength=clients)
    assert client.min() >= 0
    assert len(sizes) == clients
    assert sizes.max() - sizes.min() <= 1


def test_iid_is_random_and_needs_no_labels() -> None:
    client = deal(Iid(), None, np.zeros(100), 4, 0)
    assert not np.array_equal(client, np.arange(100) % 4)
    assert not np.array_equal(client, np.sort(client))


@quick
@given(st.integers(1, 15), st.data(), seeds)
def test_classes_deals_classes_and_rows_evenly(clients: int, data: st.DataObject, seed: int) -> None:
    labels = data.draw(labelled(least=clients))
    classes = len(np.unique(labels))
    per_client = data.draw(st.integers(1, classes))
    client = deal(Classes(per_client), labels, None, clients, seed)

    counts = table(labels, client, clients)
    has = counts > 0
    assert (has.sum(1) == per_client).all()
    holders = has.sum(0)
    assert holders.max() - holders.min() <= 1
    if clients * per_client >= classes:
        assert holders.min() >= 1
    for c, label in enumerate(np.unique(labels)):
        shares = counts[has[:, c], c]
        if len(shares):
            assert shares.max() - shares.min() <= 1
            assert shares.sum() == (labels == label).sum()
        else:
            assert (client[labels == label] == -1).all()


def test_classes_differ_between_clients() -> None:
    labels = np.repeat(np.arange(10), 50)
    has = table(labels, deal(Classes(2), labels, None, 20, 0), 20) > 0
    assert len(np.unique(has, axis=0)) > 10  # not the same five pairs over and over


@quick
@given(st.integers(3, 60), st.integers(1, 4), st.integers(1, 5), seeds)
@pytest.mark.thorough
def test_neighbours_have_the_classes_that_follow_their_number(
    clients: int, per_client: int, least: int, seed: int
) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(5) * 3, 400))
    made = Neighbours(per_client, least=least, reserve=100, smallest=1, largest=9)
    counts = table(labels, deal(made, labels, None, clients, seed), clients)
    for client, row in enumerate(counts):
        assert set(np.flatnonzero(row)) == {(client + j) % 5 for j in range(per_client)}
        assert row[row > 0].min() >= least


@pytest.mark.parametrize(("clients", "doubled"), [(30, 1), (20, 2)])
def test_neighbours_get_a_share_of_each_class_until_it_is_used_up(clients: int, doubled: int) -> None:
    """Without chance: sigma = 0 makes all shares (n - reserve) / (clients classes_per_client) equal."""
    labels = np.repeat(np.arange(10), 200)
    made = Neighbours(2, least=5, sigma=0, reserve=80, times=1, smallest=40, largest=40)
    counts = table(labels, deal(made, labels, None, clients, 0), clients)
    more = doubled * (120 // (clients * 2) + 40)
    expected = np.zeros_like(counts)
    left = np.full(10, 200 - 5 * clients * 2 // 10)
    for client in range(clients):
        for k in (client % 10, (client + 1) % 10):
            expected[client, k] = 5 + (more if more < left[k] else 0)
            left[k] -= expected[client, k] - 5
    assert np.array_equal(counts, expected)
    assert set(np.unique(counts)) == {0, 5, 5 + more}  # the last ones come too late


def test_neighbours_differ_in_size_as_the_authors_clients_do() -> None:
    """7000 rows of each of 10 classes, 100 clients: a few hundred rows each, some ten times as large."""
    labels = np.repeat(np.arange(10), 7000)
    sizes = np.bincount(deal(Neighbours(2), labels, None, 100, 0) + 1, minlength=101)[1:]
    assert sizes.min() >= 40
    assert 150 < np.median(sizes) < 600
    assert sizes.max() > 5 * np.median(sizes)
    assert sizes.sum() < 0.9 * len(labels)


def test_neighbours_with_the_labels_of_the_authors_mnist() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 300))
    samples = Samples(torch.zeros(3000, 1), torch.from_numpy(labels), 10)
    made = Neighbours(3, reserve=0, mislabelled=True)
    client = made.deal(samples, 12, 0)
    seen = made.transform(samples, client, 12, 0).labels
    assert seen is not None
    for number in range(12):
        mine = client == number
        for j in range(3):
            of_class = mine & (labels == (number + j) % 10)
            wrong = 0 if (number + j) % 10 == j else 10
            assert (seen[of_class] != labels[of_class]).sum() == wrong
            assert set(seen[of_class]) <= {j, (number + j) % 10}
    assert np.array_equal(samples.y, labels)


def test_neighbours_that_cannot_be_dealt() -> None:
    labels = np.repeat(np.arange(3), 30)
    with pytest.raises(UsageError, match="class 0 has 30 rows for 40 that are dealt first"):
        deal(Neighbours(2), labels, None, 6, 0)
    with pytest.raises(UsageError, match="classes_per_client = 4, but the data has 3 classes"):
        deal(Neighbours(4), labels, None, 3, 0)
    with pytest.raises(UsageError, match="smallest = 9 is greater than largest = 3"):
        Neighbours(smallest=9, largest=3)


@quick
@given(labelled(), st.floats(1e-6, 1e4), st.integers(1, 10), st.data(), seeds)
def test_dirichlet_uses_every_row_and_respects_min_size(
    labels: np.ndarray, alpha: float, min_size: int, data: st.DataObject, seed: int
) -> None:
    min_size = min(min_size, len(labels))
    clients = data.draw(st.integers(1, len(labels) // min_size))
    client = deal(Dirichlet(alpha, min_size), labels, None, clients, seed)
    sizes = np.bincount(client, minlength=clients)  # fails on -1
    assert len(sizes) == clients
    assert sizes.sum() == len(labels)
    assert sizes.min() >= min_size


@quick
@given(labelled(), st.integers(1, 10), seeds)
def test_dirichlet_explains_that_there_are_too_few_rows(labels: np.ndarray, min_size: int, seed: int) -> None:
    clients = len(labels) // min_size + 1
    with pytest.raises(UsageError, match=r"use (fewer|at most that many) clients"):
        deal(Dirichlet(0.5, min_size), labels, None, clients, seed)


def test_dirichlet_alpha_sets_the_heterogeneity() -> None:
    labels = np.repeat(np.arange(10), 200)

    def distance(alpha: float) -> float:
        """Mean total variation between a client's label distribution and the uniform one."""
        counts = table(labels, deal(Dirichlet(alpha), labels, None, 20, 0), 20)
        return float(np.abs(counts / counts.sum(1, keepdims=True) - 0.1).sum(1).mean() / 2)

    assert distance(1000) < 0.1 < distance(1) < 0.55 < distance(0.05)


def test_dirichlet_shares_have_the_right_moments() -> None:
    """A share of Dirichlet(alpha) over m clients has mean 1/m and variance (1/m)(1 - 1/m)/(m alpha + 1)."""
    m, alpha = 5, 2.0
    labels = np.zeros(1000, int)
    shares = np.array([np.bincount(deal(Dirichlet(alpha, 1), labels, None, m, seed), minlength=m)
                       for seed in range(400)]) / 1000
    assert np.allclose(shares.mean(0), 1 / m, atol=0.02)
    assert np.allclose(shares.var(0), (1 / m) * (1 - 1 / m) / (m * alpha + 1), rtol=0.3)


@quick
@given(st.lists(st.integers(0, 30), min_size=1, max_size=60), st.booleans(), seeds)
def test_natural_gives_client_k_the_rows_of_owner_k(ids: list[int], text: bool, seed: int) -> None:
    owner = np.array([f"site{i}" for i in ids] if text else ids)
    owners = sorted(set(owner.tolist()))
    client = deal(Natural(), None, owner, len(owners), seed)
    assert [owners[k] for k in client] == owner.tolist()


def test_natural_sizes() -> None:
    owner = np.repeat(["a", "b", "c"], [3, 40, 12])
    samples = Samples(torch.zeros(55, 1), torch.zeros(55), None, owner)
    partition = Natural(min_size=4, max_size=20)
    client = partition.assign(samples, 3, 0)
    assert [int((client == k).sum()) for k in (-1, 0, 1, 2)] == [23, 0, 20, 12]  # a number is an owner's
    assert partition.report(samples, client, 3, 0) == (
        "23 of 55 rows belong to no client", "1 of 3 owners left out: fewer than min_size = 4 rows (a)")


def test_natural_sample_of_owners() -> None:
    owner = np.repeat(np.arange(100), 3)
    client = deal(Natural(fewer="sample"), None, owner, 10, 1)
    chosen = [np.unique(owner[client == k]) for k in range(10)]
    assert all(len(owners) == 1 for owners in chosen)
    assert np.array_equal(np.concatenate(chosen), np.unique(owner[client >= 0]))  # in sorted order
    assert (client >= 0).sum() == 30


def test_natural_merges_owners_as_pfedbred_does() -> None:
    """Sent140: 10 clients of at least 10 users, the rest of the users in Dirichlet(0.5) shares."""
    owner = np.repeat(np.arange(1000), 2)
    shares = []
    for seed in range(200):
        client = deal(Natural(fewer="merge", merge_alpha=0.5, merge_least=10), None, owner, 10, seed)
        assert np.array_equal(client[::2], client[1::2])  # owners stay whole
        counts = np.bincount(client[::2], minlength=10)
        assert counts.sum() == 1000
        assert counts.min() >= 10
        shares.append((counts - 10) / 900)
    assert np.var(shares) == pytest.approx(0.1 * 0.9 / (10 * 0.5 + 1), rel=0.15)


def test_shards_hold_few_labels() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 600))
    for shards in (1, 2, 5):
        client = deal(Shards(shards), labels, None, 20, 0)
        assert (np.bincount(client) == 300).all()
        has = table(labels, client, 20) > 0
        assert has.sum(1).max() <= (shards if 600 % (300 // shards) == 0 else 2 * shards)
    assert len(np.unique(has, axis=0)) > 10


@quick
@given(labelled(least=20), st.integers(1, 5), st.integers(1, 4), seeds)
def test_shards_are_equal_runs_of_the_sorted_labels(
    labels: np.ndarray, clients: int, shards: int, seed: int
) -> None:
    client = deal(Shards(shards), labels, None, clients, seed)
    sizes = np.bincount(client, minlength=clients)
    assert sizes.max() - sizes.min() <= shards
    # as many changes of client along the sorted labels as there can be between shards, at most
    counts = table(labels, client, clients)
    assert (counts > 0).sum() <= clients * shards + len(np.unique(labels)) - 1


def test_classes_of_uniform_size() -> None:
    """CGPFL: 40 clients of 2 classes and 400 to 5000 rows; there are rows for about half of that."""
    labels = np.repeat(np.arange(10), 6000)
    partition = Classes(2, sizes="uniform")
    samples = Samples(torch.zeros(60000, 1), torch.from_numpy(labels), 10)
    client = partition.assign(samples, 40, 0)
    counts = table(labels, client, 40)
    assert ((counts > 0).sum(1) == 2).all()
    assert (counts.sum(0) <= 6000).all()
    assert counts.sum(0).max() > 5980  # the scarcest class is used up
    sizes = counts.sum(1)
    assert all(np.ptp(row[row > 0]) == 0 for row in counts)  # equally many of both
    assert sizes.max() / sizes.min() > 4
    wanted = partition._drawn(40, 0)
    assert np.abs(sizes / wanted - sizes.sum() / wanted.sum()).max() < 0.01  # one factor for all
    note, = (line for line in partition.report(samples, client, 40, 0) if "scaled" in line)
    assert note.startswith(f"sizes in 400..5000 scaled by {sizes.sum() / wanted.sum():.3g}")

    small = Classes(2, sizes="uniform", smallest=40, largest=200)  # for which there are enough
    client = small.assign(samples, 40, 0)
    sizes = table(labels, client, 40).sum(1)
    assert (np.abs(sizes - small._drawn(40, 0)) <= 2).all()
    assert not any("scaled" in line for line in small.report(samples, client, 40, 0))


@pytest.mark.thorough
def test_classes_of_lognormal_size() -> None:
    labels = np.repeat(np.arange(10), 20000)
    counts = table(labels, deal(Classes(2, sizes="lognormal", sigma=0.7), labels, None, 200, 0), 200)
    assert np.log(counts.sum(1)).std() == pytest.approx(0.7, rel=0.15)
    assert counts.sum(0).max() > 19900
    even = table(labels, deal(Classes(2, sizes="lognormal", sigma=0), labels, None, 20, 0), 20).sum(1)
    assert np.ptp(even) == 0


@quick
@given(labelled(least=30), st.floats(0.01, 1), st.floats(0.01, 1), st.integers(1, 12), seeds)
def test_label_majority_is_met(
    labels: np.ndarray, share: float, skewed: float, clients: int, seed: int
) -> None:
    classes = len(np.unique(labels))
    partition = LabelMajority(share, skewed)
    if classes < 2 or share < 1 / classes:
        with pytest.raises(UsageError, match="is no majority among"):
            deal(partition, labels, None, clients, seed)
        return
    counts = table(labels, deal(partition, labels, None, clients, seed), clients)
    size = counts[0].sum()
    assert (counts.sum(1) == size).all()
    special = max(round(skewed * clients), 1)
    for k, row in enumerate(counts):
        if k < clients - special:
            assert np.ptp(row) <= 1  # balanced
        else:
            rest = np.sort(row)
            most = round(share * size)
            others = np.delete(rest, np.flatnonzero(rest == most)[0])
            assert np.ptp(others) <= 1


def test_label_majority_takes_all_it_can() -> None:
    labels = np.repeat([0, 1], 1000)
    counts = table(labels, deal(LabelMajority(0.85, 0.5), labels, None, 10, 0), 10)
    size = 186  # 5 balanced clients, 3 with this majority, 2 with the other: 5.35 sizes of a class at most
    assert (counts.sum(1) == size).all()
    assert (counts[:5] == size // 2).all()
    assert sorted(counts[5:].argmax(1)) in ([0, 0, 0, 1, 1], [0, 0, 1, 1, 1])
    assert (counts[5:].max(1) == round(0.85 * size)).all()


def test_quantity_sizes() -> None:
    labels = np.zeros(1000, int)
    fixed = deal(Quantity(sizes=(100, 200, 300)), labels, None, 3, 0)
    assert [int((fixed == k).sum()) for k in (-1, 0, 1, 2)] == [400, 100, 200, 300]
    shares = np.array([np.bincount(deal(Quantity(2.0, 1), labels, None, 5, seed), minlength=5)
                       for seed in range(400)]) / 1000
    assert shares.var() == pytest.approx(0.2 * 0.8 / 11, rel=0.15)
    assert np.bincount(deal(Quantity(0.01, 50), labels, None, 20, 0)).tolist() == [50] * 20


@quick
@given(labelled(least=10), st.integers(1, 8), st.floats(1e-3, 10), seeds)
def test_topping_up_takes_from_the_largest(labels: np.ndarray, clients: int, alpha: float, seed: int) -> None:
    clients = min(clients, len(labels))
    least = len(labels) // clients
    sizes = np.bincount(deal(Dirichlet(alpha, least), labels, None, clients, seed), minlength=clients)
    assert sizes.min() >= least  # then nobody can have much more
    assert sizes.sum() == len(labels)
    half = max(least // 2, 1)
    poor = np.bincount(deal(Dirichlet(alpha, half), labels, None, clients, seed), minlength=clients)
    assert poor.min() >= half


def images(*shape: int, dtype: torch.dtype = torch.float32) -> Samples:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.random((80, *shape)))
    return Samples((x * 255).to(dtype) if dtype == torch.uint8 else x.to(dtype), torch.zeros(80), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_rotation_of_images_by_quarters_is_exact(dtype: torch.dtype) -> None:
    samples = images(3, 5, 5, dtype=dtype)
    partition = Feature("rotation", rotations=4)
    client = partition.deal(samples, 8, 0)
    seen = partition.transform(samples, client, 8, 0).x
    for k in range(8):
        mine = torch.from_numpy(client == k)
        assert torch.equal(seen[mine], torch.rot90(samples.x[mine], k % 4, (-2, -1)))


def test_rotation_of_images_by_an_angle() -> None:
    """A small angle moves a spot counter-clockwise, about the centre, and keeps most of its mass."""
    x = torch.zeros(2, 21, 21)
    x[:, 10, 17] = 1.0  # to the right of the centre
    seen = Feature("rotation", rotations=8).transform(
        Samples(x, torch.zeros(2), None), np.array([0, 1]), 2, 0).x
    assert torch.equal(seen[0], x[0])
    row, column = divmod(int(seen[1].argmax()), 21)
    assert (row, column) == (10 - 5, 10 + 5)  # 7 at 45 degrees, upwards
    assert 0.7 < seen[1].sum() < 1.3


def test_rotation_of_flat_features() -> None:
    samples = images(7, dtype=torch.float64)
    partition = Feature("rotation", rotations=3)
    client = partition.deal(samples, 6, 0)
    seen = partition.transform(samples, client, 6, 0).x
    assert torch.allclose(seen.norm(dim=1), samples.x.norm(dim=1))
    assert torch.allclose(seen[client % 3 == 0], samples.x[client % 3 == 0])
    assert not torch.allclose(seen[client % 3 == 1], samples.x[client % 3 == 1])
    again = partition.transform(samples, np.ones(80, int), 6, 0)
    thrice = partition.transform(partition.transform(again, np.ones(80, int), 6, 0), np.ones(80, int), 6, 0)
    assert torch.allclose(thrice.x, samples.x)  # three thirds of a turn


def test_affine_change_is_one_map_per_client() -> None:
    rng = np.random.default_rng(0)
    samples = Samples(torch.from_numpy(rng.standard_normal((2000, 4))), torch.zeros(2000), None)
    client = np.arange(2000) % 5
    seen = Feature("affine", strength=0.5).transform(samples, client, 5, 0).x
    maps = []
    for k in range(5):
        design = np.column_stack([samples.x[client == k], np.ones(400)])
        fit, error, *_ = np.linalg.lstsq(design, seen[client == k], rcond=None)
        assert error.max() < 1e-20
        maps.append(fit)
    deviation = np.stack(maps) - np.vstack([np.eye(4), np.zeros(4)])
    assert deviation[:, :4].std() == pytest.approx(0.5 / math.sqrt(4), rel=0.3)
    assert deviation[:, 4].std() == pytest.approx(0.5, rel=0.4)
    assert not np.allclose(maps[0], maps[1])


def test_affine_change_of_images_is_by_channel() -> None:
    samples = images(3, 4, 4)
    seen = Feature("affine", strength=0.3).transform(samples, np.zeros(80, int), 1, 0).x
    for channel in range(3):
        before, after = samples.x[:, channel].flatten().numpy(), seen[:, channel].flatten().numpy()
        assert abs(np.corrcoef(before, after)[0, 1]) > 0.9999


def test_noise_grows_with_the_client() -> None:
    samples = Samples(torch.zeros(9000, 3), torch.zeros(9000), None)
    client = np.arange(9000) % 3
    seen = Feature("noise", strength=0.6).transform(samples, client, 3, 0).x
    assert [float(seen[client == k].std()) for k in range(3)] == pytest.approx([0.2, 0.4, 0.6], rel=0.05)


def test_changed_bytes_stay_bytes() -> None:
    samples = images(1, 4, 4, dtype=torch.uint8)
    for change in ("affine", "noise"):
        seen = PARTITIONS["feature"](change).transform(samples, np.arange(80) % 2, 2, 0).x  # type: ignore[call-arg]
        assert seen.dtype == torch.uint8
        assert not torch.equal(seen, samples.x)
    gentle = Feature("noise", strength=0.01).transform(samples, np.zeros(80, int), 1, 0).x
    assert (gentle.int() - samples.x.int()).abs().max() < 15  # nothing wraps around


def test_rows_of_nobody_are_not_changed() -> None:
    samples = images(4)
    client = np.where(np.arange(80) < 10, -1, np.arange(80) % 3)
    for partition in (Feature("affine"), Feature("rotation"), Feature("noise")):
        seen = partition.transform(samples, client, 3, 0).x
        assert torch.equal(seen[:10], samples.x[:10])
        assert not torch.equal(seen[10:], samples.x[10:])


@pytest.mark.parametrize("partition", [Iid(), Classes(), Classes(sizes="lognormal"), Classes(sizes="uniform"),
                                       Dirichlet(), Shards(), LabelMajority(), Quantity(), Feature()],
                         ids=lambda p: p.name)
def test_a_seed_fixes_the_partition(partition: Partition) -> None:
    labels = np.random.default_rng(0).integers(5, size=400)

    def assigned(seed: int) -> list[int]:
        client: list[int] = deal(partition, labels, None, 10, seed).tolist()
        return client

    assert assigned(3) == assigned(3) != assigned(4)


LABELS = np.repeat([0, 1, 2], 10)


@pytest.mark.parametrize(("partition", "labels", "owner", "clients", "message"), [
    (Iid(), LABELS, None, 0, "clients must be at least 1, not 0"),
    (Iid(), LABELS, None, 31, "clients = 31, but the data has 30 rows"),
    (Classes(), LABELS, None, 31, "clients = 31, but the data has 30 rows"),
    (Classes(4), LABELS, None, 5, "classes_per_client = 4, but the data has 3 classes"),
    (Classes(3), LABELS, None, 12, "class 0 has 10 rows for the 12 clients that are to share it: use fewer"),
    (Classes(3, sizes="uniform"), LABELS, None, 12, "class 0 has 10 rows for the 12 clients"),
    (Classes(), None, np.zeros(30), 5, "partition 'classes' needs class labels"),
    (Shards(), None, np.zeros(30), 5, "partition 'shards' needs class labels"),
    (Shards(8), LABELS, None, 4, "shards_per_client = 8 need 32 shards, but there are 30 rows"),
    (LabelMajority(), None, np.zeros(30), 5, "partition 'label_majority' needs class labels"),
    (LabelMajority(0.3), LABELS, None, 5, "majority = 0.3 is no majority among 3 classes"),
    (LabelMajority(), np.array([0] * 29 + [1]), None, 5, "5 clients are too many for majority = 0.85"),
    (Quantity(), LABELS, None, 4, "4 clients with min_size = 10 need 40 rows, but there are 30"),
    (Quantity(sizes=(1, 2)), LABELS, None, 3, "sizes has 2 entries, but clients = 3"),
    (Quantity(sizes=(20, 20)), LABELS, None, 2, "sizes add up to 40 rows, but there are 30"),
    (Quantity(sizes=(20, 0)), LABELS, None, 2, "sizes must be at least 1, not 0"),
    (Feature(), LABELS, None, 31, "clients = 31, but the data has 30 rows"),
    (Dirichlet(), None, np.zeros(30), 5, "partition 'dirichlet' needs class labels"),
    (Dirichlet(), LABELS, None, -1, "clients must be at least 1, not -1"),
    (Dirichlet(), LABELS, None, 4, "4 clients with min_size = 10 need 40 rows, but there are 30"),
    (Natural(), LABELS, None, 5, "partition 'natural' needs data whose rows have owners"),
    (Natural(), None, LABELS, 5, "but the data has 3 natural owners: set clients = 3, or choose"),
    (Natural(), None, LABELS, 2, 'set clients = 3, or fewer = "sample" or "merge", or choose another'),
    (Natural(min_size=11), None, LABELS, 3, "no owner has min_size = 11 rows (the largest has 10)"),
    (Natural(fewer="sample"), None, LABELS, 4, "4 owners with min_size = 1 rows, but there are 3"),
    (Natural(fewer="merge", merge_least=2), None, LABELS, 2, "2 clients need 4 owners with min_size = 1"),
])
def test_impossible_requests(
    partition: Partition, labels: np.ndarray | None, owner: np.ndarray | None, clients: int, message: str
) -> None:
    with pytest.raises(UsageError) as error:
        deal(partition, labels, owner, clients, 0)
    assert message in str(error.value)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Dirichlet(0.0), "dirichlet.alpha must be greater than 0, not 0"),
    (lambda: Dirichlet(-1.0), "dirichlet.alpha must be greater than 0, not -1"),
    (lambda: Dirichlet(float("inf")), "dirichlet.alpha must be a finite number, not inf"),
    (lambda: Dirichlet(min_size=0), "dirichlet.min_size must be at least 1, not 0"),
    (lambda: Classes(0), "classes.classes_per_client must be at least 1, not 0"),
    (lambda: Classes(smallest=9, largest=8), "smallest = 9 is greater than largest = 8"),
    (lambda: Classes(sizes="unequal"), "unknown classes.sizes 'unequal': did you mean 'equal'?"),
    (lambda: Shards(0), "shards.shards_per_client must be at least 1, not 0"),
    (lambda: LabelMajority(1.1), "label_majority.majority must be at most 1, not 1.1"),
    (lambda: LabelMajority(skewed=0.0), "label_majority.skewed must be greater than 0, not 0"),
    (lambda: Quantity(alpha=0.0), "quantity.alpha must be greater than 0, not 0"),
    (lambda: Feature("shear"), "unknown feature.change 'shear'"),
    (lambda: Feature(strength=-1.0), "feature.strength must be at least 0, not -1"),
    (lambda: Natural(min_size=5, max_size=4), "max_size = 4 is less than min_size = 5"),
    (lambda: Natural(fewer="drop"), "unknown natural.fewer 'drop'"),
    (lambda: Natural(merge_alpha=0.0), "natural.merge_alpha must be greater than 0, not 0"),
])
def test_bad_fields(make: type[Partition], message: str) -> None:
    with pytest.raises(UsageError) as error:
        make()
    assert message in str(error.value)


def test_registry_names_its_classes() -> None:
    assert all(partition.name == name and partition.__doc__ for name, partition in PARTITIONS.items())


@pytest.mark.parametrize(("x", "partition", "message"), [
    (torch.zeros(4, 3, dtype=torch.int64), Feature(), "real features or images, and x holds torch.int64"),
    (torch.zeros(4), Feature(), "needs samples with features, and x has the shape (4,)"),
    (torch.zeros(4, 1), Feature("rotation"), "needs samples with features, and x has the shape (4, 1)"),
    (torch.zeros(4, 9, 128), Feature("rotation"), "needs square images or flat features, and a sample"),
    (torch.zeros(4, 9, dtype=torch.uint8), Feature("rotation"), "cannot turn flat bytes"),
])
def test_features_that_cannot_be_changed(x: torch.Tensor, partition: Feature, message: str) -> None:
    with pytest.raises(UsageError) as error:
        partition.transform(Samples(x, torch.zeros(4), None), np.zeros(4, int), 1, 0)
    assert message in str(error.value)


def test_too_few_groups_are_told_as_such() -> None:
    samples = Samples(torch.zeros(30, 1), torch.zeros(30), None, group=np.arange(30) // 10)
    with pytest.raises(UsageError, match=r"the data has 3 rows: .*the rows of a group stay together"):
        Iid().deal(samples, 4, 0)


@pytest.mark.slow
@pytest.mark.parametrize("partition", [Dirichlet(0.5), Shards()], ids=lambda p: p.name)
def test_a_hundred_thousand_clients(partition: Partition) -> None:
    labels = torch.from_numpy(np.random.default_rng(0).integers(10, size=1_000_000))
    samples = Samples(torch.zeros(1_000_000, 1), labels, 10)
    start = time.perf_counter()
    client = partition.deal(samples, 100_000, 0)
    dealt = time.perf_counter()
    fed = Federation.from_arrays(samples.x, samples.y, client)
    done = time.perf_counter()
    print(f"{partition.name}: dealt in {dealt - start:.1f} s, made a federation in {done - dealt:.1f} s")
    assert fed.population == 100_000
    assert done - start < 60


class FakeDataset:
    """As much of `datasets.Dataset` as a partitioner needs."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self.columns = {name: list(values) for name, values in columns.items()}

    @classmethod
    def from_dict(cls, columns: dict[str, Any]) -> FakeDataset:
        return cls(columns)

    def __getitem__(self, name: str) -> list[Any]:
        return self.columns[name]

    def select(self, rows: Sequence[int]) -> FakeDataset:
        return FakeDataset({name: [values[k] for k in rows] for name, values in self.columns.items()})


class FakePartitioner:
    """The interface of a flwr-datasets partitioner: each value of a column to its own client."""

    def __init__(self, partition_by: str, overlap: int = 0) -> None:
        self.partition_by, self.overlap = partition_by, overlap
        self._dataset: FakeDataset | None = None

    @property
    def dataset(self) -> FakeDataset:
        if self._dataset is None:
            raise AttributeError("the dataset should be set first")
        return self._dataset

    @dataset.setter
    def dataset(self, value: FakeDataset) -> None:
        if self._dataset is not None:
            raise ValueError("the dataset should be assigned only once")
        self._dataset = value

    @property
    def num_partitions(self) -> int:
        return len(set(self.dataset[self.partition_by]))

    def load_partition(self, partition_id: int) -> FakeDataset:
        values = self.dataset[self.partition_by]
        value = sorted(set(values))[partition_id]
        rows = [k for k, v in enumerate(values) if v == value]
        return self.dataset.select(rows + list(range(self.overlap)))


@pytest.fixture
def fake_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("datasets")
    module.Dataset = FakeDataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)


@pytest.mark.usefixtures("fake_datasets")
def test_a_partitioner_can_be_passed() -> None:
    partitioner = FakePartitioner("label")
    for _ in range(2):  # the object stays as it was
        fed = data.federation("digits", partition=partitioner)
        assert fed.population == 10
        assert all(len(fed.y[torch.from_numpy(fed.train[k])].unique()) == 1 for k in range(10))
        assert fed.origin is None  # no [data] section says this
    fed = data.federation("logistic", partition=FakePartitioner("owner"))
    assert fed.population == 20


@pytest.mark.usefixtures("fake_datasets")
def test_what_a_partitioner_cannot_do() -> None:
    with pytest.raises(UsageError, match="failed: 'age'; the columns it can use are row, label"):
        data.federation("digits", partition=FakePartitioner("age"))
    with pytest.raises(UsageError, match="gives some rows to several clients"):
        data.federation("digits", partition=FakePartitioner("label", overlap=2))
    with pytest.raises(UsageError, match=r"data\.clients is set by the partitioner: remove it"):
        data.federation("digits", partition=FakePartitioner("label"), clients=10)
    with pytest.raises(UsageError, match=r"unknown data\.partition"):
        data.federation("digits", partition=object())


def test_a_partitioner_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"pip install 'descant\[partitioners\]'"):
        data.federation("digits", partition=FakePartitioner("label"))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # not all of them are ours
def test_partitioners_of_flower() -> None:
    partitioners = pytest.importorskip("flwr_datasets.partitioner")
    for made in (partitioners.IidPartitioner(5), partitioners.ShardPartitioner(5, "label", 2),
                 partitioners.DirichletPartitioner(5, "label", 0.5, 10)):
        fed = data.federation("digits", partition=made)
        assert fed.population == 5
    assert data.federation("logistic", partition=partitioners.NaturalIdPartitioner("owner")).population == 20


def test_a_partition_can_be_an_object() -> None:
    fed = data.federation("digits", partition=Dirichlet(alpha=0.1), clients=5)
    assert fed.fingerprint() == data.federation("digits", partition="dirichlet", alpha=0.1,
                                                clients=5).fingerprint()
    assert fed.origin is not None
    with pytest.raises(UsageError, match="unknown data field 'alpha'"):
        data.federation("digits", partition=Dirichlet(alpha=0.1), alpha=0.2)

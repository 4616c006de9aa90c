"""Partitions: properties that hold for all data, and the errors where they cannot."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from descant.data.partitions import PARTITIONS, Classes, Dirichlet, Iid, Natural, Partition
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


@pytest.mark.parametrize("partition", [Iid(), Classes(), Dirichlet()], ids=lambda p: p.name)
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
    (Classes(), None, np.zeros(30), 5, "partition 'classes' needs class labels"),
    (Dirichlet(), None, np.zeros(30), 5, "partition 'dirichlet' needs class labels"),
    (Dirichlet(), LABELS, None, -1, "clients must be at least 1, not -1"),
    (Dirichlet(), LABELS, None, 4, "4 clients with min_size = 10 need 40 rows, but there are 30"),
    (Natural(), LABELS, None, 5, "partition 'natural' needs data whose rows have owners"),
    (Natural(), None, LABELS, 5, "clients = 5, but the data has 3 natural owners: set clients = 3"),
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
])
def test_bad_fields(make: type[Partition], message: str) -> None:
    with pytest.raises(UsageError) as error:
        make()
    assert message in str(error.value)


def test_registry_names_its_classes() -> None:
    assert all(partition.name == name and partition.__doc__ for name, partition in PARTITIONS.items())

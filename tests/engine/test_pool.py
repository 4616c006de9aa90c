"""The samples as they are arranged for work: the same rows, by client, as numbers while they fit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from descant.core.federation import Federation
from descant.core.splits import SPLITS, Table
from descant.core.task import inputs
from descant.engine import pool as pools
from descant.engine.pool import Part, Pool
from helpers import ragged


def images() -> Federation:
    federation = ragged()
    x = (federation.x - federation.x.min()) / (federation.x.max() - federation.x.min())
    return dataclasses.replace(federation, x=(255 * x).to(torch.uint8))


def rows(part: Part, client: int) -> torch.Tensor:
    return part.x[torch.from_numpy(part.table[client])]


@pytest.mark.parametrize("limit", [2**30, 1000, 10])
def test_every_client_has_its_rows_in_their_order(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "BUDGET", limit)
    federation = images()
    pool = Pool.of(federation, torch.float32)
    assert pool.train.x.dtype == torch.uint8
    assert pool.test.x.dtype == (torch.float32 if limit == 2**30 else torch.uint8)
    assert (pool.train.x is federation.x) == (limit == 10)
    for split in SPLITS:
        part = pool.part(split)
        assert part.in_order == (limit > 10)
        for client in range(federation.population):
            at = torch.from_numpy(federation.split(split)[client])
            assert torch.equal(inputs(rows(part, client), torch.float32),
                               inputs(federation.x[at], torch.float32))
            assert torch.equal(part.y[torch.from_numpy(part.table[client])], federation.y[at])


def test_numbers_that_lie_in_order_are_not_copied() -> None:
    first = Pool.of(ragged(), torch.float64).train
    assert first.copied(torch.float64).x is first.x
    assert first.copied(torch.float32).x.dtype == torch.float32


def test_clients_of_one_size_side_by_side_are_a_slice() -> None:
    part = Pool.of(ragged((4, 4, 4, 3, 4)), torch.float64).train
    found = part.slice_of(np.array([1, 2]))
    assert found is not None
    assert torch.equal(part.x[found], torch.cat([rows(part, 1), rows(part, 2)]))
    for clients in ([2, 3], [0, 2], [1, 0]):  # another size, a gap, another order
        assert part.slice_of(np.array(clients)) is None
    assert Pool.as_it_lies(ragged((4, 4))).train.slice_of(np.array([0, 1])) is None


def test_samples_that_all_splits_share_are_moved_once() -> None:
    moved = Pool.as_it_lies(ragged()).to(torch.device("meta"))
    assert moved.train.x is moved.validation.x is moved.test.x
    assert moved.train.y is moved.test.y


def test_a_split_without_rows_keeps_one_to_fill_up() -> None:
    federation = ragged((4, 3))
    federation = dataclasses.replace(federation, validation=Table.of([np.arange(0)] * 2))
    pool = Pool.of(federation, torch.float64)
    assert len(pool.validation.table.indices) == 0
    assert len(pool.validation.x) == len(pool.validation.y) == 1

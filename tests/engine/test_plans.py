"""The batches of a chunk, held against their definition, client by client."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from descant.core import random
from descant.core.federation import Federation
from descant.core.splits import Table
from descant.engine.batches import LocalWork, plan_chunk
from descant.engine.pool import Pool
from descant.engine.steps import groups

SIZES = (7, 12, 1, 12, 30, 5, 9, 12, 3, 8, 12, 2, 6, 11, 4, 13, 10)  # so many that streams are made at once
SEED, NUMBER = 3, 4


def pool_of(sizes: tuple[int, ...]) -> Pool:
    own = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    none = Table.of([rows[:0] for rows in own])
    x = torch.arange(sum(sizes), dtype=torch.float32)[:, None]
    federation = Federation(x, torch.zeros(sum(sizes), dtype=torch.int64), Table.of(own), none, none, 2,
                            tuple(map(str, range(len(sizes)))))
    return Pool.of(federation, torch.float32)


def batches_of(own: np.ndarray, client: int, batch: int, steps: int) -> tuple[int, list[list[int]]]:
    """A client's key and its batches: shuffled epochs one after the other, whose last batch may be short."""
    generator = random.stream(SEED, "batches.local", NUMBER, client)
    key, found = int(generator.bit_generator.random_raw()) >> 1, []
    while len(found) < steps:
        epoch = generator.permutation(own)
        found += [epoch[k : k + batch].tolist() for k in range(0, len(own), batch)]
    return key, found[:steps]


@pytest.mark.parametrize("clients", [[*range(len(SIZES))], [4, 2, 9], [6]])
@pytest.mark.parametrize("work", [LocalWork(steps=5), LocalWork(epochs=1), LocalWork(epochs=3)])
@pytest.mark.parametrize("batch", [4, 12, 100])
def test_batches_are_shuffled_epochs_of_the_client_alone(clients: list[int], work: LocalWork, batch: int
                                                         ) -> None:
    pool = pool_of(SIZES)
    plan, tensors = plan_chunk(pool, np.array(clients), seed=SEED, purpose="local", number=NUMBER,
                               batch=batch, work=work, per_step=1, dtype=torch.float32, draws=False,
                               splits=("train",))
    ends = np.cumsum(plan.widths)
    for k, client in enumerate(clients):
        own = pool.train.table[client]
        steps = work.steps or (work.epochs or 0) * -(-len(own) // batch)
        key, wanted = batches_of(own, client, batch, steps)
        rows = np.split(tensors.rows[k].numpy(), ends[:-1])
        assert int(tensors.key[k]) == key
        assert float(tensors.steps[k]) == steps
        assert [part[:n].tolist() for part, n in zip(rows, tensors.lengths[k].tolist(), strict=True)
                ][:steps] == wanted
        for part, real in zip(rows, [*wanted, *[[]] * len(rows)], strict=False):
            assert set(part[len(real) :].tolist()) <= {own[0]}  # padding is the client's own
    assert plan.active == tuple(sum(float(s) > t for s in tensors.steps) for t in range(len(plan.widths)))


def test_full_batches_are_in_order() -> None:
    pool = pool_of(SIZES)
    _, tensors = plan_chunk(pool, np.arange(len(SIZES)), seed=SEED, purpose="local", number=NUMBER,
                            batch="full", work=LocalWork(epochs=1), per_step=1, dtype=torch.float32,
                            draws=False, splits=())
    for client, size in enumerate(SIZES):
        assert tensors.rows[client, :size].tolist() == pool.train.table[client].tolist()


@pytest.mark.parametrize(("widths", "rows", "found"), [
    ([4, 4, 4], 100, [[0, 1, 2]]), ([4, 4, 4], 8, [[0, 1], [2]]), ([4, 4, 4], 0, [[0], [1], [2]]),
    ([4, 4, 1, 4, 4, 1], 100, [[0, 1], [2], [3, 4], [5]]),  # rows of one group lie in lines, or none do
])
def test_what_is_looked_up_at_once(widths: list[int], rows: int, found: list[list[int]]) -> None:
    assert [[*group] for group in groups(np.array(widths), rows)] == found

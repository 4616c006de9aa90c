"""A small federation whose clients differ in every way, to check methods on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from descant.core.federation import Federation
from descant.core.splits import Table

SIZES = (9, 5, 1, 7, 3)  # training rows of the clients: more and fewer than a batch, and a single one
SHAPE = (1, 4, 4)
CLASSES = 3


def ragged(sizes: Sequence[int] = SIZES, *, shape: tuple[int, ...] = SHAPE, classes: int | None = CLASSES,
           seed: int = 0) -> Federation:
    """Clients of very different sizes; 2, 4, ... have no validation rows, client 1 has no test rows."""
    rng = np.random.default_rng(seed)
    held_out = [0 if k and k % 2 == 0 else 2 + k % 4 for k in range(len(sizes))]
    tested = [0 if k == 1 else 3 + k % 2 for k in range(len(sizes))]
    order = rng.permutation(sum(sizes) + sum(held_out) + sum(tested))  # nobody's rows lie together
    lists = np.split(order, np.cumsum([*sizes, *held_out, *tested])[:-1])
    n = len(sizes)
    y = rng.integers(classes, size=len(order)) if classes is not None else rng.standard_normal(len(order))
    x = rng.standard_normal((len(order), *shape)) + y.reshape(-1, *[1] * len(shape)) / 2
    return Federation(torch.from_numpy(x), torch.from_numpy(y), Table.of(lists[:n]),
                      Table.of(lists[n : 2 * n]), Table.of(lists[2 * n :]), classes,
                      tuple(f"client{k}" for k in range(n)))


def retested(federation: Federation) -> Federation:
    """The same clients with other test rows."""
    rows = torch.from_numpy(np.asarray(federation.test.indices))
    x, y = federation.x.clone(), federation.y.clone()
    x[rows], y[rows] = 1 - x[rows], (y[rows] + 1) % CLASSES
    return dataclasses.replace(federation, x=x, y=y)

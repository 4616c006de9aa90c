"""The batches of a chunk's steps, for all its clients at once: what training sees that has left vmap."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from descant.core import meter, random
from descant.core.kernels.products import in_lines, room
from descant.core.task import Batch

if TYPE_CHECKING:
    from descant.engine.batches import Plan


def step_batches(plan: Plan, which: int, rows: Tensor, lengths: Tensor, key: Tensor, counts: Tensor | None
                 ) -> Iterator[tuple[int, Batch]]:
    """A batch of each step of a chunk, for as many of the first clients as take the step. Its samples may lie
    where those of the next batch will."""
    spent, now = meter.current() or meter.Meter(0), time.perf_counter
    ends = [0, *accumulate(plan.widths)]
    groups = plan.gathered if plan.per_step == 1 else [
        range(b, b + 1) for b in range(which % plan.per_step, len(plan.widths), plan.per_step)]
    x, y = plan.pool.train.x, plan.pool.train.y[rows].split(plan.widths, 1)
    given = None if counts is None else counts.split(plan.widths, 1)
    place = torch.arange(max(plan.widths))
    keys = random.fold(key[:, None], torch.arange(len(plan.widths))) if plan.draws else None
    made = _Inputs(x, plan.dtype, len(rows), max(plan.widths))
    for batches in groups:
        begun, n = now(), plan.active[batches[0]]
        found = lookup(x, rows[:n, ends[batches[0]] : ends[batches[-1] + 1]])
        parts = found.split(plan.widths[batches[0] : batches[-1] + 1], 1)
        spent.gathering += now() - begun
        for b, part in zip(batches, parts, strict=True):
            begun, n = now(), plan.active[b]
            taken = made.of(_first(part, n))
            spent.gathering += now() - begun
            yield n, Batch(taken, _first(y[b], n),
                           None if plan.whole[b] else place[: plan.widths[b]] < lengths[:n, b : b + 1],
                           None if keys is None else keys[:n, b],
                           None if given is None else _first(given[b], n))


class _Inputs:
    """Batches as a model takes them. What a client has in them begins alike within a line of the cache,
    wherever it stands in the chunk."""

    def __init__(self, x: Tensor, dtype: torch.dtype, clients: int, widest: int) -> None:
        self._is_bytes = x.dtype == torch.uint8
        self._whole = room(x, (clients, widest, *x.shape[1:]), dtype if self._is_bytes else x.dtype)
        self._place = cache(lambda clients, width: self._whole[:clients, :width])

    def of(self, samples: Tensor) -> Tensor:
        """Samples [clients, B, ...] of a look-up; bytes become numbers in [0, 1]."""
        if not self._is_bytes and in_lines(samples):
            return samples
        place: Tensor = self._place(*samples.shape[:2]).copy_(samples)
        return place.mul_(1 / 255) if self._is_bytes else place


def groups(widths: np.ndarray, rows: int) -> tuple[range, ...]:
    """The batches in groups of at most so many rows, but one batch at least. Those of a group have one width:
    a short one would move the next client's rows off their line of the cache, and all would be copied."""
    found, start, taken = [], 0, 0
    for b, width in enumerate(widths.tolist()):
        if b > start and (taken + width > rows or width != widths[start]):
            found.append(range(start, b))
            start, taken = b, 0
        taken += width
    return (*found, range(start, len(widths)))


def lookup(x: Tensor, rows: Tensor) -> Tensor:
    """Samples as they lie in the pool; several times faster than indexing."""
    return F.embedding(rows, x.reshape(len(x), -1)).reshape(*rows.shape, *x.shape[1:])


def _first(tensor: Tensor, clients: int) -> Tensor:
    return tensor if tensor.size(0) == clients else tensor[:clients]

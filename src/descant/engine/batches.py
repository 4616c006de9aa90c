"""The batches of a chunk of clients, and one client's view of them.

A chunk is a few clients that run together. Index tables are padded to a common shape, and padding has no
effect: padding rows have weight False, and a client's carry does not change on steps that it does not have.
Clients of equal size pay for neither. The padding of a client is its own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from descant.core import meter, random
from descant.core.federation import Federation
from descant.core.fields import Checked, hyper
from descant.core.kernels.lift import over_clients
from descant.core.splits import SplitName, Table
from descant.core.task import BLOCK, Batch, inputs
from descant.core.tree import Tree, map_tree
from descant.errors import UsageError

SCORED = 128  # rows per pass where a split is only predicted
GATHERED = 2**20  # bytes of samples that are looked up at once: they stay in the cache


@dataclass(frozen=True)
class LocalWork(Checked):
    """How much a client does in a round: steps or epochs."""

    steps: int | None = hyper(None, "batches per round", ge=0)
    epochs: int | None = hyper(None, "passes over the client's training rows per round", ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.steps is None) == (self.epochs is None):
            raise UsageError("train.local must be either { steps = n } or { epochs = n }")

    def lengths(self, size: int, batch: int, per_step: int = 1) -> np.ndarray:
        """The sizes of the batches of a client with `size` rows: epoch after epoch, short ones last.

        Where a step takes several batches, there are as many steps as there would be of one batch.
        """
        whole, rest = divmod(size, batch)
        epoch = np.array([batch] * whole + [rest] * (rest > 0), np.int64)
        steps = self.steps if self.epochs is None else self.epochs * len(epoch)
        if not steps:
            return epoch[:0]
        return np.resize(epoch, steps * per_step)


class ClientTensors(NamedTuple):
    """The tensors of one client's view; with a leading axis, of a chunk."""

    size: Tensor  # [] training rows
    steps: Tensor  # [] local steps
    key: Tensor  # [] int64, starts the client's random numbers of the round
    rows: Tensor  # [sum of widths] pool indices of all batches, end to end
    lengths: Tensor  # [batches of the chunk] real rows in each batch
    train: Tensor  # [longest] pool indices of the splits, end to end ...
    validation: Tensor
    test: Tensor
    counts: Tensor  # [3] ... and how many of them are real
    truth: Tree = ()  # [d] the client's true model, where it is known and scored


@dataclass(frozen=True)
class Plan:
    """What is known of a chunk before it runs; the same for all its clients."""

    x: Tensor  # [n, ...] the pool
    y: Tensor  # [n, ...]
    dtype: torch.dtype
    clients: int
    per_step: int  # batches that each local step takes
    widths: tuple[int, ...]  # rows of each batch, padding included
    gathered: tuple[range, ...]  # the batches in groups that are looked up at once
    whole: tuple[bool, ...]  # whether no batch of an active client has padding
    active: tuple[int, ...]  # how many clients have this batch
    full_pass: int  # gradient steps of a pass over all training rows, summed over the chunk
    draws: bool  # whether the task needs random numbers


class View:
    """One client's data in one round: the `ClientData` of the interface."""

    def __init__(self, plan: Plan, tensors: ClientTensors) -> None:
        self._plan = plan
        self._tensors = tensors
        self.size = tensors.size
        self.steps = tensors.steps
        self.truth: Tensor | None = tensors.truth if isinstance(tensors.truth, Tensor) else None

    def scan(self, step: Callable[..., Any], carry: Any) -> Any:
        plan, batches, opened = self._plan, self._batches(), meter.current()
        gathers = nullcontext if opened is None else opened.gathers
        for t in range(len(plan.widths) // plan.per_step):
            clients = plan.active[t * plan.per_step]
            active = None if clients == plan.clients else self.steps > t
            if opened is not None:
                opened.stand_for(clients, active)
            with gathers():
                given = [*islice(batches, plan.per_step)]
            moved = step(carry, *given)
            carry = moved if active is None else _where(active, moved, carry)
        if opened is not None:
            opened.stand_for(plan.clients, None)
        return carry

    def mean(self, f: Callable[[Batch], Tree], split: Literal["train", "validation"] = "train") -> Tree:
        _, count = self._split(split)
        opened, total = meter.current(), None
        for k, batch in enumerate(self.blocks(split)):
            if opened is not None:  # the first block stands for the whole pass
                opened.stand_for(self._plan.full_pass if k == 0 else 0, count > k * BLOCK)
            value = f(batch)
            share = cast(Tensor, batch.weight).sum().to(self._plan.dtype) / count
            part = map_tree(lambda v, s=share: torch.where(s == 0, 0.0, v * s), value)
            total = part if total is None else map_tree(torch.add, total, part)
        if opened is not None:
            opened.stand_for(self._plan.clients, None)
        return total

    def blocks(self, split: SplitName) -> Iterator[Batch]:
        """All rows of a split, a bounded number at a time; padded to the longest of the chunk."""
        rows, count = self._split(split)
        for start in range(0, len(rows), BLOCK):
            block = rows[start : start + BLOCK]
            weight = start + torch.arange(len(block)) < count
            yield Batch(self._samples(block), self._plan.y[block], weight)

    def samples(self, split: SplitName) -> Iterator[Tensor]:
        """The samples of a split, padded, in blocks that are small enough for the cache."""
        rows, _ = self._split(split)
        for start in range(0, len(rows), SCORED):
            yield self._samples(rows[start : start + SCORED])

    def targets(self, split: SplitName, with_x: bool) -> Batch:
        """The targets of a split, padded; with the samples, which are large, only if asked for."""
        rows, count = self._split(split)
        x = self._samples(rows) if with_x else rows[:0]
        return Batch(x, self._plan.y[rows], torch.arange(len(rows)) < count)

    def _split(self, split: SplitName) -> tuple[Tensor, Tensor]:
        part = ("train", "validation", "test").index(split)
        return getattr(self._tensors, split), self._tensors.counts[part]

    def _batches(self) -> Iterator[Batch]:
        plan, start = self._plan, 0
        y = plan.y[self._tensors.rows]  # of all batches at once: targets are small
        for batches in plan.gathered:
            first = start
            found = self._lookup(self._tensors.rows[start : start + sum(plan.widths[b] for b in batches)])
            for b in batches:
                stop = start + plan.widths[b]
                weight = None if plan.whole[b] else torch.arange(stop - start) < self._tensors.lengths[b]
                key = random.fold(self._tensors.key, b) if plan.draws else None
                x = self._inputs(found, start - first, stop - first)
                yield Batch(x, y[start:stop], weight, key)
                start = stop

    def _samples(self, rows: Tensor) -> Tensor:
        return inputs(self._lookup(rows), self._plan.dtype)

    def _lookup(self, rows: Tensor) -> Tensor:
        """Samples as they lie in the pool."""
        def found(rows: Tensor) -> tuple[Tensor]:
            x = self._plan.x
            # several times faster than indexing
            return (F.embedding(rows, x.reshape(len(x), -1)).reshape(*rows.shape, *x.shape[1:]),)

        return (over_clients(found, rows) or found(rows))[0]

    def _inputs(self, samples: Tensor, start: int, stop: int) -> Tensor:
        """Some of the samples, as a model takes them."""
        def taken(samples: Tensor) -> tuple[Tensor]:
            return (inputs(samples[:, start:stop], self._plan.dtype),)

        found = over_clients(taken, samples)
        return inputs(samples[start:stop], self._plan.dtype) if found is None else found[0]


def _where(condition: Tensor, new: Tree, old: Tree) -> Tree:
    return map_tree(lambda a, b: torch.where(condition, a, b), new, old)


def plan_chunk(
    federation: Federation,
    clients: np.ndarray,
    *,
    seed: int,
    purpose: str,
    number: int,
    batch: int | Literal["full"],
    work: LocalWork,
    per_step: int,
    dtype: torch.dtype,
    draws: bool,
    splits: tuple[SplitName, ...],
    disjoint: bool = False,
) -> tuple[Plan, ClientTensors]:
    """The plan of a chunk and its tensors, with the clients as leading axis.

    The batches of a client depend on (seed, purpose, number, client) and on its own rows only. With
    `disjoint`, each of the batches of a step is drawn from a share of the rows of its own.
    """
    sizes = federation.train.sizes[clients]
    per_pass = [int(n) if batch == "full" else batch for n in sizes]
    owned = [_shares(federation.train[int(client)], per_step if disjoint else 1) for client in clients]
    lengths = [_lengths(shares, b, work, per_step) for shares, b in zip(owned, per_pass, strict=True)]
    batches = np.array([len(each) for each in lengths], np.int64)
    shape = np.zeros((len(clients), batches.max()), np.int64)
    for k, each in enumerate(lengths):
        shape[k, : len(each)] = each
    widths = shape.max(0)
    starts = np.concatenate([[0], np.cumsum(widths)])
    is_active = shape > 0

    rows = np.empty((len(clients), int(widths.sum())), np.int64)
    keys = np.zeros(len(clients), np.int64)
    for k, (client, each) in enumerate(zip(clients, lengths, strict=True)):
        if not len(each):  # without batches there is nothing to draw
            rows[k] = owned[k][0][0]
            continue
        generator = random.stream(seed, f"batches.{purpose}", number, int(client))
        keys[k] = generator.integers(2**63)
        order = _order(generator, owned[k], each, batch == "full")
        if len(order) == len(rows[k]):  # as many as anybody: nothing to fill up
            rows[k] = order
            continue
        rows[k] = owned[k][0][0]
        offset = np.arange(len(order)) - np.repeat(np.cumsum(each) - each, each)
        rows[k, np.repeat(starts[: len(each)], each) + offset] = order

    tables = {split: _padded(federation.split(split), clients) if split in splits
              else np.zeros((len(clients), 0), np.int64) for split in ("train", "validation", "test")}
    counts = np.stack([federation.split(s).sizes[clients] for s in ("train", "validation", "test")], 1)
    plan = Plan(
        federation.x, federation.y, dtype, len(clients), per_step, tuple(widths.tolist()),
        _groups(widths, GATHERED // max(1, len(clients) * federation.x[0].nbytes)),
        tuple(((shape == widths) | ~is_active).all(0).tolist()), tuple(is_active.sum(0).tolist()),
        int(sum(-(-int(n) // b) for n, b in zip(sizes, per_pass, strict=True))),
        draws,
    )
    tensors = ClientTensors(
        torch.from_numpy(sizes).to(dtype), torch.from_numpy(batches // per_step).to(dtype),
        torch.from_numpy(keys), torch.from_numpy(rows), torch.from_numpy(np.where(is_active, shape, widths)),
        torch.from_numpy(tables["train"]), torch.from_numpy(tables["validation"]),
        torch.from_numpy(tables["test"]), torch.from_numpy(counts),
    )
    return plan, tensors


def _groups(widths: np.ndarray, rows: int) -> tuple[range, ...]:
    """The batches in groups of at most so many rows, but one batch at least."""
    groups, start, taken = [], 0, 0
    for b, width in enumerate(widths.tolist()):
        if b > start and taken + width > rows:
            groups.append(range(start, b))
            start, taken = b, 0
        taken += width
    return (*groups, range(start, len(widths)))


def _shares(own: np.ndarray, count: int) -> list[np.ndarray]:
    """A client's rows in `count` interleaved shares (rows may be sorted by class); one share if too few."""
    return [own[k::count] for k in range(count)] if len(own) >= count else [own]


def _lengths(shares: list[np.ndarray], batch: int, work: LocalWork, per_step: int) -> np.ndarray:
    """The sizes of a client's batches, the shares taking turns; an epoch is one of the largest share."""
    if len(shares) == 1:
        return work.lengths(len(shares[0]), batch, per_step)
    each = [work.lengths(len(share), min(batch, len(share))) for share in shares]
    return np.stack([np.resize(of_share, len(each[0])) for of_share in each], 1).ravel()


def _order(generator: np.random.Generator, shares: list[np.ndarray], lengths: np.ndarray, in_order: bool
           ) -> np.ndarray:
    """The rows of a client's batches, end to end."""
    if len(shares) == 1:
        return _shuffled(generator, shares[0], int(lengths.sum()), in_order)
    turns = [lengths[k :: len(shares)] for k in range(len(shares))]
    each = [np.split(_shuffled(generator, share, int(turn.sum()), in_order), np.cumsum(turn)[:-1])
            for share, turn in zip(shares, turns, strict=True)]
    return np.concatenate([shares[0][:0], *(batch for step in zip(*each, strict=True) for batch in step)])


def _shuffled(generator: np.random.Generator, own: np.ndarray, count: int, in_order: bool) -> np.ndarray:
    """The first `count` rows of a client's endless sequence of shuffled epochs."""
    epochs = -(-count // len(own))
    parts = [own if in_order else generator.permutation(own) for _ in range(epochs)]
    return np.concatenate([own[:0], *parts])[:count]


def _padded(table: Table, clients: np.ndarray) -> np.ndarray:
    """The clients' rows side by side, padded with the client's last row; at least one column."""
    sizes = table.sizes[clients]
    column = np.arange(max(1, int(sizes.max())))
    if not len(table.indices):
        return np.zeros((len(clients), 1), np.int64)
    offset = np.maximum(np.minimum(column[None, :], sizes[:, None] - 1), 0)
    # a client without rows gets another's, with weight False
    at = np.minimum(table.offsets[clients][:, None] + offset, len(table.indices) - 1)
    return np.asarray(table.indices[at])

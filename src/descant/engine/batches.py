"""The batches of a chunk of clients, and one client's view of them.

A chunk is a few clients that run together. Index tables are padded to a common shape, and padding has no
effect: padding rows have weight False, and a client's carry does not change on steps that it does not have.
Clients of equal size pay for neither. The padding of a client is its own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from descant.core import meter, random
from descant.core.fields import Checked, hyper
from descant.core.kernels.lift import over_clients
from descant.core.privacy.task import NotPrivate
from descant.core.splits import SplitName
from descant.core.task import BLOCK, Batch, inputs
from descant.core.tree import Tree, map_tree
from descant.engine.draws import Coins, Tossed, draw, toss
from descant.engine.pool import Pool
from descant.engine.steps import groups, lookup, step_batches
from descant.errors import UsageError

GATHERED = 2**23  # bytes of samples that are looked up at once: they stay in the last cache

EVEN = 8  # batches by coins have any number of rows, and are filled up to a multiple: 32 rows take two thirds
# of the time that 27 take in the product with weights of 784 x 100


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
        found, _ = self.all_lengths(np.array([size]), np.array([batch]), per_step)
        return np.asarray(found[0])

    def all_lengths(self, sizes: np.ndarray, batch: np.ndarray, per_step: int
                    ) -> tuple[np.ndarray, np.ndarray]:
        """The same for clients with so many rows, of batches of so many: [clients, most batches of a client],
        zero where a client has no batch; and how many it has [clients]."""
        epoch = -(-sizes // batch)
        counts = per_step * (np.full_like(sizes, self.steps) if self.epochs is None else self.epochs * epoch)
        column = np.arange(counts.max(initial=0))
        before = batch[:, None] * (column % np.maximum(epoch, 1)[:, None])  # rows of the epoch
        found = np.minimum(batch[:, None], sizes[:, None] - before)
        return np.where(column < counts[:, None], found, 0), counts


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
    expected: Tensor  # [] rows that a batch has on average, where coins draw it; else 0
    truth: Tree = ()  # [d] the client's true model, where it is known and scored


@dataclass(frozen=True)
class Plan:
    """What is known of a chunk before it runs; the same for all its clients."""

    pool: Pool
    dtype: torch.dtype
    clients: int
    per_step: int  # batches that each local step takes
    widths: tuple[int, ...]  # rows of each batch, padding included
    gathered: tuple[range, ...]  # the batches in groups that are looked up at once
    whole: tuple[bool, ...]  # whether no batch of an active client has padding
    active: tuple[int, ...]  # how many clients have this batch
    full_pass: int  # gradient steps of a pass over all training rows, summed over the chunk
    draws: bool  # whether the task needs random numbers
    slices: Mapping[SplitName, slice]  # the chunk's rows of a split, where each client has as many
    is_drawn: bool = False  # whether coins say which rows are in a batch


class View:
    """One client's data in one round: the `ClientData` of the interface."""

    def __init__(self, plan: Plan, tensors: ClientTensors, counts: Tensor | None = None, *,
                 private: bool = False) -> None:
        if plan.is_drawn:  # a mean is over the rows that were expected: how many came is a secret
            counts = (1 / tensors.expected).expand(tensors.rows.shape[-1])
        self._private = private  # rows may be looked at by private gradients alone
        self._plan = plan
        self._tensors = tensors
        self._counts = counts  # [sum of widths, ...] of the rows of all batches
        self.size = tensors.size
        self.steps = tensors.steps
        self.truth: Tensor | None = tensors.truth if isinstance(tensors.truth, Tensor) else None

    def scan(self, step: Callable[..., Any], carry: Any) -> Any:
        plan, batches, opened = self._plan, self._batches(), meter.current()
        gathers = nullcontext if opened is None else opened.gathers
        if opened is not None:
            opened.begin_pass()
        for t in range(len(plan.widths) // plan.per_step):
            clients = plan.active[t * plan.per_step]
            active = None if clients == plan.clients else self.steps > t
            if opened is not None:
                opened.stand_for(clients, active)
            with gathers():
                given = [*islice(batches, plan.per_step)]
            if opened is not None:
                opened.offered, opened.at_step = [batch.y for batch in given], (t, self.steps)
            moved = step(carry, *given)
            carry = moved if active is None else _where(active, moved, carry)
        if opened is not None:
            opened.stand_for(plan.clients, None)
            opened.at_step = None
        return carry

    def together(self, work: Callable[..., tuple[Tensor, ...]], *own: Tensor | None, which: int = 0
                 ) -> tuple[Tensor, ...] | None:
        plan, tensors = self._plan, self._tensors
        if not plan.widths:  # without a step, what one model is for all stays so
            return None
        if (opened := meter.current()) is not None:
            opened.begin_pass()

        def run(steps: Tensor, rows: Tensor, lengths: Tensor, key: Tensor, *theirs: Tensor | None
                ) -> tuple[Tensor, ...]:
            if min(plan.active, default=plan.clients) == plan.clients:
                return work(step_batches(plan, which, rows, lengths, key, theirs[0]), *theirs[1:])
            # who has the most steps comes first, so that those who take a step are the first so many
            order = steps.argsort(descending=True, stable=True)
            counts, *mine = [None if t is None else t[order] for t in theirs]
            found = work(step_batches(plan, which, rows[order], lengths[order], key[order], counts), *mine)
            back = order.argsort()
            return tuple([t[back] for t in found])

        return over_clients(run, self.steps, tensors.rows, tensors.lengths, tensors.key, self._counts, *own)

    def mean(self, f: Callable[[Batch], Tree], split: Literal["train", "validation"] = "train") -> Tree:
        self._require_open()
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

    def each(self, f: Callable[[Batch], Tensor]) -> Tensor:
        self._require_open()
        return torch.cat([f(batch) for batch in self.blocks("train")])

    def counted(self, counts: Tensor) -> View:
        self._require_open()

        def found(rows: Tensor, train: Tensor, counts: Tensor) -> tuple[Tensor]:
            order = train.argsort(1)  # a client's rows may lie anywhere
            at = order.gather(1, torch.searchsorted(train.gather(1, order), rows))
            return (counts[torch.arange(len(at))[:, None], at],)

        own = (self._tensors.rows, self._tensors.train, counts)
        looked_up = over_clients(found, *own) or [each[0] for each in found(*[t[None] for t in own])]
        return View(self._plan, self._tensors, looked_up[0])

    def _require_open(self) -> None:
        if self._private:
            raise NotPrivate("a pass over all its rows")

    def blocks(self, split: SplitName) -> Iterator[Batch]:
        """All rows of a split, a bounded number at a time; padded to the longest of the chunk."""
        rows, count = self._split(split)
        for start in range(0, len(rows), BLOCK):
            block = rows[start : start + BLOCK]
            weight = start + torch.arange(len(block)) < count
            yield Batch(self._samples(split, block), self._plan.pool.part(split).y[block], weight)

    def samples(self, split: SplitName, at_once: int) -> Iterator[Tensor]:
        """The samples of a split, padded, so many at a time."""
        rows, _ = self._split(split)
        whole = self._slice(split, rows)
        for start in range(0, len(rows), at_once):
            block = slice(start, start + at_once)
            yield self._samples(split, rows[block]) if whole is None else inputs(
                whole[block], self._plan.dtype)

    def targets(self, split: SplitName, with_x: bool) -> Batch:
        """The targets of a split, padded; with the samples, which are large, only if asked for."""
        rows, count = self._split(split)
        x = self._samples(split, rows) if with_x else rows[:0]
        weight = None if split in self._plan.slices else torch.arange(len(rows)) < count
        return Batch(x, self._plan.pool.part(split).y[rows], weight)

    def _slice(self, split: SplitName, rows: Tensor) -> Tensor | None:
        """The samples of a split where they lie, if all clients of the chunk have as many, side by side."""
        plan = self._plan

        def found(rows: Tensor) -> tuple[Tensor]:
            return (plan.pool.part(split).x[plan.slices[split]].unflatten(0, rows.shape),)

        views = over_clients(found, rows) if split in plan.slices else None
        return None if views is None else views[0]

    def _split(self, split: SplitName) -> tuple[Tensor, Tensor]:
        part = ("train", "validation", "test").index(split)
        return getattr(self._tensors, split), self._tensors.counts[part]

    def _batches(self) -> Iterator[Batch]:
        plan, start = self._plan, 0
        y = plan.pool.train.y[self._tensors.rows]  # of all batches at once: targets are small
        for batches in plan.gathered:
            first, stop = start, start + sum(plan.widths[b] for b in batches)
            found = self._lookup("train", self._tensors.rows[first:stop])
            for b in batches:
                stop = start + plan.widths[b]
                weight = None if plan.whole[b] else torch.arange(stop - start) < self._tensors.lengths[b]
                key = random.fold(self._tensors.key, b) if plan.draws else None
                x = self._inputs(found, start - first, stop - first)
                counts = None if self._counts is None else self._counts[start:stop]
                yield Batch(x, y[start:stop], weight, key, counts)
                start = stop

    def _samples(self, split: SplitName, rows: Tensor) -> Tensor:
        return inputs(self._lookup(split, rows), self._plan.dtype)

    def _lookup(self, split: SplitName, rows: Tensor) -> Tensor:
        """Samples as they lie in the pool."""
        def found(rows: Tensor) -> tuple[Tensor]:
            return (lookup(self._plan.pool.part(split).x, rows),)

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
    pool: Pool,
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
    coins: Coins | None = None,
) -> tuple[Plan, ClientTensors]:
    """The plan of a chunk and its tensors, with the clients as leading axis.

    The batches of a client depend on (seed, purpose, number, client) and on its own rows only. With
    `disjoint`, each of the batches of a step is drawn from a share of the rows of its own. With `coins`, each
    row is in each batch with the same probability, such that as many rows are expected as there would be.
    """
    table = pool.train.table
    sizes = table.sizes[clients]
    per_pass = sizes if batch == "full" else np.full_like(sizes, batch)
    owned = [_shares(table[client], per_step if disjoint else 1) for client in clients.tolist()]
    shape, batches = work.all_lengths(sizes, per_pass, per_step)
    if disjoint:  # a client's batches are its own matter
        shape, batches = _side_by_side([_lengths(shares, b, work, per_step)
                                        for shares, b in zip(owned, per_pass.tolist(), strict=True)])
    tossed: list[Tossed] = []
    if coins is not None:
        streams = random.Streams(seed, f"coins.{purpose}", number, last=clients)
        tossed = [toss(streams[k] if coins == "stream" else None, *each)
                  for k, each in enumerate(zip(owned, per_pass.tolist(), batches.tolist(), strict=True))]
        shape, _ = _side_by_side([each.lengths for each in tossed])
    widths = np.maximum(shape.max(0), 1)
    if coins is not None:
        widths = -(-widths // EVEN) * EVEN
    is_active = np.arange(len(widths)) < batches[:, None]
    streams = random.Streams(seed, f"batches.{purpose}", number, last=clients)
    rows, keys = draw(streams, owned, shape, batches, widths, batch == "full", tossed)

    tables = {split: pool.part(split).padded(clients) if split in splits
              else np.zeros((len(clients), 0), np.int64) for split in ("train", "validation", "test")}
    counts = np.stack([pool.part(s).table.sizes[clients] for s in ("train", "validation", "test")], 1)
    plan = Plan(
        pool, dtype, len(clients), per_step, tuple(widths.tolist()),
        groups(widths, GATHERED // max(1, len(clients) * pool.train.x[0].nbytes)),
        tuple(((shape == widths) | ~is_active).all(0).tolist()), tuple(is_active.sum(0).tolist()),
        int((-(-sizes // per_pass)).sum()),
        draws,
        {split: found for split in splits if (found := pool.part(split).slice_of(clients)) is not None},
        coins is not None,
    )
    tensors = ClientTensors(
        torch.from_numpy(sizes).to(dtype), torch.from_numpy(batches // per_step).to(dtype),
        torch.from_numpy(keys), torch.from_numpy(rows), torch.from_numpy(np.where(is_active, shape, widths)),
        torch.from_numpy(tables["train"]), torch.from_numpy(tables["validation"]),
        torch.from_numpy(tables["test"]), torch.from_numpy(counts),
        torch.tensor([each.expected for each in tossed] or [0.0] * len(clients), dtype=dtype),
    )
    return plan, tensors


def steps_in_round(size: int, batch: int | Literal["full"], work: LocalWork, per_step: int, disjoint: bool
                   ) -> int:
    """How many steps a client with so many rows takes in a round."""
    shares = _shares(np.arange(size), per_step if disjoint else 1)
    return len(_lengths(shares, size if batch == "full" else batch, work, per_step)) // per_step


def _shares(own: np.ndarray, count: int) -> list[np.ndarray]:
    """A client's rows in `count` interleaved shares (rows may be sorted by class); one share if too few."""
    return [own[k::count] for k in range(count)] if 1 < count <= len(own) else [own]


def _side_by_side(lengths: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """As `LocalWork.all_lengths` has them, of each client's own."""
    counts = np.array([len(each) for each in lengths], np.int64)
    shape = np.zeros((len(lengths), counts.max(initial=0)), np.int64)
    for k, each in enumerate(lengths):
        shape[k, : len(each)] = each
    return shape, counts


def _lengths(shares: list[np.ndarray], batch: int, work: LocalWork, per_step: int) -> np.ndarray:
    """The sizes of a client's batches, the shares taking turns; an epoch is one of the largest share."""
    if len(shares) == 1:
        return work.lengths(len(shares[0]), batch, per_step)
    each = [work.lengths(len(share), min(batch, len(share))) for share in shares]
    return np.stack([np.resize(of_share, len(each[0])) for of_share in each], 1).ravel()

"""Which rows are in a batch: by shuffled epochs, or by coins.

By coins, each row is in each batch with the same probability, whatever the other rows do: that is what
amplification by sampling is proved for (Poisson sampling). Batches have as many rows as come up, also none.
In a real federation the coins are the operating system's, and nobody but the client knows them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from descant.core import random
from descant.core.privacy.noise import secret_uniform

Coins: TypeAlias = Literal["stream", "secret"]


class Tossed(NamedTuple):
    """The batches of one client."""

    lengths: np.ndarray  # [batches] how many rows came up
    rows: np.ndarray  # of all batches, end to end
    expected: float  # rows of a batch


def toss(coins: np.random.Generator | None, shares: list[np.ndarray], batch: int, count: int) -> Tossed:
    """`count` batches of a client, of its shares in turn. Its coins are those of a stream; None: of the
    operating system."""
    expected = min(batch, *map(len, shares))
    lengths, batches, rows = np.zeros(count, np.int64), [], []
    for k, share in enumerate(shares):
        size = (len(range(k, count, len(shares))), len(share))
        heads = (secret_uniform(size[0] * size[1]).reshape(size) if coins is None
                 else coins.random(size)) < expected / len(share)
        turns, up = np.divmod(np.flatnonzero(heads), len(share))  # faster than of both axes
        lengths[k :: len(shares)] = np.bincount(turns, minlength=size[0])
        batches.append(k + len(shares) * turns)
        rows.append(share[up])
    if len(shares) == 1:
        return Tossed(lengths, rows[0], float(expected))
    in_turn = np.concatenate(batches).argsort(kind="stable")
    return Tossed(lengths, np.concatenate(rows)[in_turn], float(expected))


def draw(streams: random.Streams, owned: list[list[np.ndarray]], lengths: np.ndarray, batches: np.ndarray,
         widths: np.ndarray, in_order: bool, tossed: list[Tossed]) -> tuple[np.ndarray, np.ndarray]:
    """The rows of all batches end to end, of each client in batches as wide as the widest, filled up with its
    first row; and a key for each client, from which its other random numbers follow."""
    starts, column = np.concatenate([[0], np.cumsum(widths)]), np.arange(len(widths))
    # whose batches are as wide as the widest, but for the last one: nothing to fill up in between
    is_dense = ((lengths == widths) | (column >= batches[:, None] - 1)).all(1)
    rows = np.empty((len(owned), starts[-1]), np.int64)
    keys = np.zeros(len(owned), np.int64)
    facts = zip(owned, batches.tolist(), lengths.sum(1).tolist(), is_dense.tolist(), strict=True)
    for k, (shares, count, taken, dense) in enumerate(facts):
        if not count:  # without batches there is nothing to draw
            rows[k] = shares[0][0]
            continue
        generator = streams[k]
        keys[k] = random.first_key(generator)
        if dense and len(shares) == 1 and not tossed:
            _shuffle_into(rows[k, :taken], generator, shares[0], in_order)
            rows[k, taken:] = shares[0][0]
            continue
        each = lengths[k, :count]
        order = tossed[k].rows if tossed else order_of(generator, shares, each, in_order)
        rows[k] = shares[0][0]
        offset = np.arange(len(order)) - np.repeat(np.cumsum(each) - each, each)
        rows[k, np.repeat(starts[:count], each) + offset] = order
    return rows, keys


def order_of(generator: np.random.Generator, shares: list[np.ndarray], lengths: np.ndarray, in_order: bool
             ) -> np.ndarray:
    """The rows of a client's batches, end to end."""
    turns = [lengths[k :: len(shares)] for k in range(len(shares))]
    each = []
    for share, turn in zip(shares, turns, strict=True):
        place = np.empty(turn.sum(), share.dtype)
        _shuffle_into(place, generator, share, in_order)
        each.append(np.split(place, np.cumsum(turn)[:-1]))
    return np.concatenate([shares[0][:0], *(batch for step in zip(*each, strict=True) for batch in step)])


def _shuffle_into(place: np.ndarray, generator: np.random.Generator, own: np.ndarray, in_order: bool) -> None:
    """The first rows of a client's endless sequence of shuffled epochs, as many as there is room for."""
    for start in range(0, len(place), len(own)):
        part = place[start : start + len(own)]
        epoch = part if len(part) == len(own) else np.empty_like(own)  # of the last epoch, the first rows
        epoch[:] = own
        if not in_order:
            generator.shuffle(epoch)
        if epoch is not part:
            part[:] = epoch[: len(part)]

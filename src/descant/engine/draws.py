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


def toss(coins: Coins, own: tuple[int, str, int, int], shares: list[np.ndarray], batch: int, count: int
         ) -> Tossed:
    """`count` batches of a client, of its shares in turn; `own` is what its stream is named by: seed,
    purpose, round, client."""
    seed, purpose, number, client = own
    expected = min(batch, *map(len, shares))
    stream = random.stream(seed, f"coins.{purpose}", number, client)
    lengths, batches, rows = np.zeros(count, np.int64), [], []
    for k, share in enumerate(shares):
        size = (len(range(k, count, len(shares))), len(share))
        heads = (secret_uniform(size[0] * size[1]).reshape(size) if coins == "secret"
                 else stream.random(size)) < expected / len(share)
        turns, up = np.divmod(np.flatnonzero(heads), len(share))  # faster than of both axes
        lengths[k :: len(shares)] = np.count_nonzero(heads, axis=1)
        batches.append(k + len(shares) * turns)
        rows.append(share[up])
    if len(shares) == 1:
        return Tossed(lengths, rows[0], float(expected))
    in_turn = np.concatenate(batches).argsort(kind="stable")
    return Tossed(lengths, np.concatenate(rows)[in_turn], float(expected))


def order_of(generator: np.random.Generator, shares: list[np.ndarray], lengths: np.ndarray, in_order: bool
           ) -> np.ndarray:
    """The rows of a client's batches, end to end."""
    if len(shares) == 1:
        return _shuffled(generator, shares[0], sum(lengths.tolist()), in_order)
    turns = [lengths[k :: len(shares)] for k in range(len(shares))]
    each = [np.split(_shuffled(generator, share, int(turn.sum()), in_order), np.cumsum(turn)[:-1])
            for share, turn in zip(shares, turns, strict=True)]
    return np.concatenate([shares[0][:0], *(batch for step in zip(*each, strict=True) for batch in step)])


def _shuffled(generator: np.random.Generator, own: np.ndarray, count: int, in_order: bool) -> np.ndarray:
    """The first `count` rows of a client's endless sequence of shuffled epochs."""
    epochs = -(-count // len(own))
    parts = [own if in_order else generator.permutation(own) for _ in range(epochs)]
    return parts[0][:count] if epochs == 1 else np.concatenate([own[:0], *parts])[:count]

"""Random numbers that depend only on what they are for.

Every draw comes from a stream named by (seed, purpose, keys): the batches of client 7 in round 3 are the same
on every backend, after a resume, and on a real node. descant has no global generator.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch
from torch import Tensor


def stream(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """The generator of a stream."""
    return np.random.default_rng([seed, zlib.crc32(purpose.encode()), *keys])


def key(seed: int, purpose: str, *keys: int) -> int:
    """A 63-bit number that names a stream, to start the tensor generators below."""
    return int(stream(seed, purpose, *keys).integers(2**63))


def fold(key: Tensor, number: int) -> Tensor:
    """The key of sub-stream `number`; works on int64 tensors of any shape, also under vmap."""
    offset = (_GOLDEN * (number + 1) + 2**63) % 2**64 - 2**63  # wrapped to int64
    return _mix(key + offset)


def uniform(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uniform numbers in [0, 1) that are a pure function of `key` (one int64, or several: a row for each).

    torch's stateful generators cannot be vectorised over clients; a counter-based one (SplitMix64's output
    function on key + counter) can.
    """
    count = 1
    for n in shape:
        count *= n
    bits = _mix(key.unsqueeze(-1) + _GOLDEN * torch.arange(1, count + 1))
    # the top 24 bits are exact in float32
    return ((bits >> 40) & 0xFFFFFF).to(dtype).mul(2.0**-24).reshape(*key.shape, *shape)


def normal(key: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Standard normal numbers that are a pure function of `key`, by the inverse of their distribution."""
    # 2^24 values, each in the middle of its share of (0, 1): all finite
    found: Tensor = torch.special.ndtri(uniform(key, shape, torch.float64) + 2.0**-25)
    return found.to(dtype)


_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's output function; int64 products wrap around as uint64 ones do."""
    z = (z ^ _shift(z, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    z = (z ^ _shift(z, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical shift to the right of signed numbers (>> keeps the sign)."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)

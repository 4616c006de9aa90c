"""Random numbers that depend only on what they are for.

Every draw comes from a stream named by (seed, purpose, keys): the batches of client 7 in round 3 are the same
on every backend, after a resume, and on a real node. descant has no global generator.
"""

from __future__ import annotations

import pickle
import random as python_random
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

MANY = 16  # streams, for which it pays to make them at once


def stream(seed: int, purpose: str, *keys: int) -> np.random.Generator:
    """The generator of a stream."""
    words = [seed, zlib.crc32(purpose.encode()), *keys]
    # numpy would make the same array of a list of small numbers, but one by one
    is_small = min(words) >= 0 and max(words) < 2**32
    entropy: np.ndarray | list[int] = np.array(words, np.uint32) if is_small else words
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))


class Streams:
    """The streams of many, whose names differ in the last key: `stream(seed, purpose, *keys, last)` for each.

    numpy's way from a name to a generator (SeedSequence, PCG64) is gone for all at once, and ONE generator is
    set anew, at a sixth of the cost: it is good until the next one is asked for.
    """

    def __init__(self, seed: int, purpose: str, *keys: int, last: np.ndarray) -> None:
        self._seed, self._purpose, self._keys, self._last = seed, purpose, keys, last

    @cached_property
    def _states(self) -> list[tuple[int, int]] | None:
        """Where the streams begin; None where it does not pay to find all at once."""
        words = [self._seed, zlib.crc32(self._purpose.encode()), *self._keys]
        named = [*words, *self._last.tolist()]
        if len(self._last) < MANY or min(named) < 0 or max(named) >= 2**32:
            return None
        columns = [np.full(len(self._last), word, np.uint32) for word in words]
        return _pcg_states(_seed_words([*columns, self._last.astype(np.uint32)]))

    @cached_property
    def _one(self) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64(0))

    def __getitem__(self, k: int) -> np.random.Generator:
        """The stream of the k-th."""
        if self._states is None:
            return stream(self._seed, self._purpose, *self._keys, int(self._last[k]))
        state, increment = self._states[k]
        self._one.bit_generator.state = {
            "bit_generator": "PCG64", "state": {"state": state, "inc": increment}, "has_uint32": 0,
            "uinteger": 0}
        return self._one


def _seed_words(entropy: list[np.ndarray]) -> np.ndarray:
    """[8, n] what numpy's SeedSequence makes of words of entropy [n] (uint32, which wraps around)."""
    constant = 0x43B0D7E5

    def hashed(value: np.ndarray) -> np.ndarray:
        nonlocal constant
        value = value ^ np.uint32(constant)
        constant = constant * 0x931E8875 % 2**32
        value = value * np.uint32(constant)
        return value ^ (value >> np.uint32(16))

    def mixed(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        found: np.ndarray = x * np.uint32(0xCA01F9DD) - y * np.uint32(0x4973F715)
        return np.asarray(found ^ (found >> np.uint32(16)))

    given = [*entropy, *[np.zeros_like(entropy[0])] * (4 - len(entropy))]
    pool = [hashed(word) for word in given[:4]]
    for source in range(4):
        for k in range(4):
            if k != source:
                pool[k] = mixed(pool[k], hashed(pool[source]))
    for word in given[4:]:
        for k in range(4):
            pool[k] = mixed(pool[k], hashed(word))
    constant, found = 0x8B51F9DD, []
    for k in range(8):
        value = pool[k % 4] ^ np.uint32(constant)
        constant = constant * 0x58F38DED % 2**32
        value = value * np.uint32(constant)
        found.append(value ^ (value >> np.uint32(16)))
    return np.stack(found)


def _pcg_states(words: np.ndarray) -> list[tuple[int, int]]:
    """State and increment of numpy's PCG64 for such words."""
    states = []
    for a, b, c, d, e, f, g, h in words.T.tolist():
        start = b << 96 | a << 64 | d << 32 | c
        increment = ((f << 96 | e << 64 | h << 32 | g) << 1 | 1) % 2**128
        multiplier = 0x2360ED051FC65DA44385DF649FCCF645
        states.append((((increment + start) * multiplier + increment) % 2**128, increment))
    return states


def key(seed: int, purpose: str, *keys: int) -> int:
    """A 63-bit number that names a stream, to start the tensor generators below."""
    return first_key(stream(seed, purpose, *keys))


def first_key(generator: np.random.Generator) -> int:
    """The same as `generator.integers(2**63)` of a fresh generator, at a tenth of the cost."""
    return int(generator.bit_generator.random_raw()) >> 1


# -- generators that descant does not use ----------------------------------------------------------------


@contextmanager
def torch_seeded(key: int) -> Iterator[None]:
    """What draws from torch's own generators, as modules of users do, draws from a key; they are restored."""
    with torch.random.fork_rng(devices=[]):
        if torch.accelerator.is_available():
            torch.manual_seed(key)
        else:  # which would write down the stack for each kind of device that is absent: longer than a step
            torch.default_generator.manual_seed(key)
        yield


GENERATORS: dict[str, Callable[[], bytes]] = {
    "torch": lambda: torch.get_rng_state().numpy().tobytes(),
    "numpy": lambda: pickle.dumps(np.random.get_state()),
    "Python": lambda: pickle.dumps(python_random.getstate()),
}


@contextmanager
def generators_used() -> Iterator[set[str]]:
    """Which global generators the block uses; they are restored."""
    moved: set[str] = set()
    before = {name: state() for name, state in GENERATORS.items()}
    of_numpy, of_python = np.random.get_state(), python_random.getstate()
    with torch.random.fork_rng(devices=[]):
        try:
            yield moved
            moved |= {name for name, state in GENERATORS.items() if state() != before[name]}
        finally:
            np.random.set_state(of_numpy)
            python_random.setstate(of_python)


DRAWN = 2**15  # numbers of 64 bits that are made together: fewer have more calls, more are out of the cache
# All places are in the table; of numpy's ways to treat others, "raise" copies and "clip" looks twice.
IN_TABLE: Literal["wrap"] = "wrap"


# -- tensors ---------------------------------------------------------------------------------------------


def fold(key: Tensor, number: int | Tensor) -> Tensor:
    """The key of sub-stream `number`; works on int64 tensors of any shape, also under vmap."""
    if isinstance(number, Tensor):
        return _mix(key + _GOLDEN * (number + 1))
    offset = (_GOLDEN * (number + 1) + 2**63) % 2**64 - 2**63  # wrapped to int64
    return _mix(key + offset)


def fold_rows(keys: Tensor, number: int) -> Tensor:
    """As `fold`, of keys [n] that are under no transform: of few, numpy has it at a fifth of the cost."""
    if keys.device.type != "cpu":
        return fold(keys, number)
    bits = keys.numpy().view("<u8") + _number(_GOLDEN * (number + 1) % 2**64)
    _mix_rows(bits, np.empty_like(bits))
    return torch.from_numpy(bits.view("<i8"))


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


def coarse_normal(key: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """As `normal`, but of 2^16 values with mean 0 and variance 1, none beyond 4.4, and several times faster:
    for noise on all parameters at every step."""
    bits = _mix(key.unsqueeze(-1) + _GOLDEN * torch.arange(1, -(-count // 4) + 1))
    table = _quantiles(dtype).to(key.device)
    places = torch.stack([(bits >> shift) & 0xFFFF for shift in (0, 16, 32, 48)], -1)  # four numbers of each
    return table.index_select(0, places.flatten()).view(*bits.shape[:-1], -1)[..., :count]


def draw_coarse_normal_(rows: Tensor, keys: Tensor, start: int = 0) -> None:
    """The same numbers, in place: of each key a row of the [count] that follow the first `start`."""
    if rows.device.type != "cpu":
        rows.copy_(coarse_normal(keys, start + rows.shape[1], rows.dtype)[:, start:])
        return
    table, into = _quantiles(rows.dtype).numpy(), rows.numpy()
    for some, here, places in _places(keys, start, rows.shape[1]):
        table.take(places, out=into[some, here], mode=IN_TABLE)


def add_coarse_normal_(rows: Tensor, keys: Tensor, scale: Tensor, start: int = 0) -> None:
    """rows <- rows + scale * numbers, in place, while they are in the cache; `scale` has one for each row."""
    if rows.device.type != "cpu":
        rows += coarse_normal(keys, start + rows.shape[1], rows.dtype)[:, start:] * scale[:, None]
        return
    table, into, factor = _quantiles(rows.dtype).numpy(), rows.numpy(), scale.to(rows.dtype).numpy()[:, None]
    made = table[:0]
    for some, here, places in _places(keys, start, rows.shape[1]):
        if len(made) < places.size:  # the first are the most
            made = np.empty(places.size, table.dtype)
        normals, target = made[: places.size].reshape(places.shape), into[some, here]
        table.take(places, out=normals, mode=IN_TABLE)
        np.multiply(normals, factor[some], normals)
        np.add(target, normals, target)


def _places(keys: Tensor, start: int, count: int) -> Iterator[tuple[slice, slice, np.ndarray]]:
    """Where in the table the numbers of each key are that follow the first `start`, some at a time: which
    keys, which of the `count`, and the places [keys, numbers], which lie where the next ones will.

    numpy does it, which has what torch has not: unsigned numbers, and indices of 16 bits.
    """
    first, own = start // 4, keys.numpy().view("<u8")[:, None]
    counters = _counters(-(-(start + count) // 4))[first:]
    at_once = min(max(1, DRAWN // len(counters)), len(own))
    mixed, spare = np.empty((2, at_once, min(DRAWN, len(counters))), "<u8")  # used again and again
    found = np.empty(4 * mixed.size, np.intp)
    for word in range(0, len(counters), DRAWN):
        counted = counters[word : word + DRAWN]
        begin = 4 * (first + word) - start  # the place of their first number; before 0 are those of others
        here = slice(max(begin, 0), min(begin + 4 * len(counted), count))
        for k in range(0, len(own), at_once):
            some = slice(k, min(k + at_once, len(own)))
            bits, other = (each[: some.stop - k, : len(counted)] for each in (mixed, spare))
            np.add(own[some], counted, bits)
            _mix_rows(bits, other)
            parts = bits.view("<u2")[:, here.start - begin : here.stop - begin]
            places = found[: parts.size].reshape(parts.shape)
            places[:] = parts
            yield some, here, places


def _mix_rows(bits: np.ndarray, other: np.ndarray) -> None:
    """`_mix`, in place; `other` is room for as many."""
    for shift, factor in _ROUNDS:
        np.bitwise_xor(bits, np.right_shift(bits, shift, other), bits)
        if factor is not None:
            np.multiply(bits, factor, bits)


def _number(value: int) -> np.ndarray:
    """As numpy takes it fastest."""
    return np.array(value, "<u8")


# of SplitMix64's output function, as in `_mix`
_ROUNDS = ((_number(30), _number(0xBF58476D1CE4E5B9)), (_number(27), _number(0x94D049BB133111EB)),
           (_number(31), None))


@cache
def _counters(count: int) -> np.ndarray:
    found: np.ndarray = np.arange(1, count + 1, dtype="<u8") * np.uint64(_GOLDEN % 2**64)
    found.flags.writeable = False
    return found


@cache
def _quantiles(dtype: torch.dtype) -> Tensor:
    """The middles of 2^16 equal shares of a standard normal distribution, scaled to variance 1."""
    shares = (torch.arange(2**16, dtype=torch.float64, device="cpu") + 0.5) / 2**16
    found: Tensor = torch.special.ndtri(shares)
    return (found / found.square().mean().sqrt()).to(dtype)


_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's output function; int64 products wrap around as uint64 ones do."""
    z = (z ^ _shift(z, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    z = (z ^ _shift(z, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical shift to the right of signed numbers (>> keeps the sign)."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)

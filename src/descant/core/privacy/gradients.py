"""Private gradients of a chunk of clients: each row's is shortened to a norm, and their sum gets noise.

For networks of linear layers no row's gradient is ever formed. The gradient of a weight is an outer product,
slope x input, so that its norm is the product of two norms (Goodfellow 2015); once a row's norm is known over
all layers, its slopes are scaled, and the sum is the product that a plain gradient takes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from descant.core import meter, random
from descant.core.kernels.chain import Chain, Term
from descant.core.kernels.chain_layers import Linear, Reshape
from descant.core.kernels.chunk import ChunkGradients, Slopes
from descant.core.privacy.noise import secret_normals
from descant.core.privacy.settings import Mechanism

STREAM = 2**21  # the sub-streams of a batch's key for noise: Dropout draws from the first ones


class Noise(ABC):
    """The noise on the gradients of some clients. Which numbers it has is settled when it is made."""

    @abstractmethod
    def add(self, into: Tensor, start: int, factor: float) -> None:
        """into <- into + factor * noise, of a parameter [clients, ...] that begins there in the vector."""


class StreamNoise(Noise):
    """Of a simulation: it follows from the clients' keys, and is drawn when it is added, while it is in the
    cache. So what nobody adds is not drawn."""

    def __init__(self, deviation: Tensor, keys: Tensor) -> None:
        self._deviation, self._keys = deviation, keys

    def add(self, into: Tensor, start: int, factor: float) -> None:
        random.add_coarse_normal_(into.view(len(into), -1), self._keys, self._deviation * factor, start)


class SecretNoise(Noise):
    """Of a real federation: of the operating system. It is drawn once, however often it is added."""

    def __init__(self, deviation: Tensor, count: int) -> None:
        drawn = torch.from_numpy(secret_normals(len(deviation) * count)).to(deviation.dtype)
        self._noise = drawn.view(len(deviation), count).mul_(deviation[:, None])

    def add(self, into: Tensor, start: int, factor: float) -> None:
        rows = into.view(len(into), -1)
        rows.add_(self._noise[:, start : start + rows.shape[1]], alpha=factor)


class PrivateTerm(NamedTuple):
    """The gradient of one parameter, before it is formed, and its noise."""

    term: Term
    noise: Noise
    start: int  # where the parameter begins in the vector

    def add(self, into: Tensor, keep: float, factor: float) -> None:
        """into <- keep * into + factor * (gradient + noise)."""
        self.term.add(into, keep, factor)
        self.noise.add(into, self.start, factor)


class PrivateGradients(ChunkGradients):
    """As the plain ones, of clipped rows and with noise. In a batch that was drawn by coins, `counts` is one
    over the number of rows that were expected; the sum is divided by that."""

    def __init__(self, plain: ChunkGradients, mechanism: Mechanism) -> None:
        super().__init__(plain.chain, plain._context, plain._layout, plain._loss)
        self._mechanism = mechanism

    @property
    def spanning(self) -> None:
        """Noise is not in the span of a batch."""
        return None

    def of_chain(self, chain: Chain) -> NoReturn:
        raise AssertionError("another network's gradients would not be private")

    def slopes(self, parameters: list[Tensor], stats: Tensor | None, x: Tensor, y: Tensor,
               weight: Tensor | None, key: Tensor | None, counts: Tensor | None = None, *,
               scale: Tensor | None = None, pull: Callable[[Tensor], Tensor] | None = None) -> Slopes:
        assert pull is None and stats is None  # refused before
        share = shares(x, weight, counts, parameters[0].dtype)

        def loss(outputs: Tensor) -> tuple[Tensor, Tensor]:
            losses, slopes = self._loss(outputs, y)
            if weight is None:
                return losses, slopes
            real = weight.to(losses.dtype)
            return losses * real, slopes.mul_(real.view(*real.shape, *[1] * (slopes.dim() - 2)))

        with self._context.of_pass(weight, key, {}) as context:
            losses, terms = self.chain.slopes(parameters, x, context, loss)
        factor = clipped(self._squares(terms).sqrt_(), weight, self._mechanism)
        each = share if scale is None else share * scale
        factor.mul_(each[:, None])
        for term in terms:
            if term.which == 0:  # the slopes of a layer's weight are those of its bias
                term.terms[0].mul_(factor.unsqueeze(-1))
        *starts, count = accumulate((t[0].numel() for t in parameters), initial=0)
        noise = noise_of(self._mechanism, each, count, key)
        found: list[Term] = [PrivateTerm(term, noise, start)  # type: ignore[misc]
                             for term, start in zip(terms, starts, strict=True)]
        return Slopes(losses * share[:, None], found, 1, None)

    def _squares(self, terms: list[Term]) -> Tensor:
        """The squared norms of the rows' gradients [clients, B]."""
        total: Tensor | None = None
        for term in terms:
            if term.which == 0:
                slope, rows = term.terms
                reach = squares(rows)
                if len(term.layer.owns) == 2:
                    reach = reach + 1  # the bias: its input is 1
                part = squares(slope) * reach
                total = part if total is None else total + part
        assert total is not None
        return total


def squares(rows: Tensor) -> Tensor:
    """The squared norms of rows [clients, B, n]. torch has them at once for rows that lie in memory one after
    the other; where columns do, as slopes and hidden values, that takes ten times as long."""
    if rows.stride(-1) == 1:
        return torch.linalg.vector_norm(rows, dim=-1).square_()
    return rows.square().sum(-1)


def shares(x: Tensor, weight: Tensor | None, counts: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What a sum over each client's batch x [clients, B, ...] is multiplied by, to be a mean [clients]."""
    if counts is not None:
        return counts[:, 0]
    if weight is None:
        return torch.full((len(x),), 1 / x.shape[1], dtype=dtype, device=x.device)
    return 1 / weight.sum(1).to(dtype)  # a whole number by itself would be divided in single precision


def clipped(norms: Tensor, weight: Tensor | None, mechanism: Mechanism) -> Tensor:
    """The factors [clients, B] that shorten rows of these norms."""
    assert isinstance(mechanism.clip, float)
    factor: Tensor = mechanism.clip / norms.clamp(min=mechanism.clip)
    if (opened := meter.current()) is not None:
        short = factor < 1
        opened.shortened += int((short if weight is None else short & weight).sum())
        opened.rows += short.numel() if weight is None else int(weight.sum())
    return factor


def noise_of(mechanism: Mechanism, share: Tensor, count: int, key: Tensor | None) -> Noise:
    """The noise on the clients' means, of `count` numbers each."""
    assert isinstance(mechanism.clip, float)
    deviation = mechanism.noise * mechanism.clip * share
    if mechanism.secret:
        return SecretNoise(deviation, count)
    assert key is not None  # of the batch: in every call another number follows from it
    opened = meter.current()
    return StreamNoise(deviation, random.fold(key, STREAM + (0 if opened is None else opened.next_noise())))


def forms_no_rows(chain: Chain, sample_axes: int) -> bool:
    """Whether norms of rows follow from those of slopes and inputs: all parameters are those of linear layers
    that see a sample as one vector."""
    layers = [place.layer for place in chain.places]
    first = next(k for k, layer in enumerate(layers) if layer.owns)
    is_vector = sample_axes == 1 or any(
        isinstance(layer, Reshape) and layer.is_flat for layer in layers[:first])
    return is_vector and all(isinstance(layer, Linear) for layer in layers if layer.owns)

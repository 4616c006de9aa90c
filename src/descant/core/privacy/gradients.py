"""Private gradients of a chunk of clients: each row's is shortened to a norm, and their sum gets noise.

For networks of linear layers no row's gradient is ever formed. The gradient of a weight is an outer product,
slope x input, so that its norm is the product of two norms (Goodfellow 2015); once a row's norm is known over
all layers, its slopes are scaled, and the sum is the product that a plain gradient takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import takewhile
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
LARGE = 2**14  # numbers of a parameter: all clients' noise on it would not stay in the cache


class Noise:
    """The noise on the gradients of some clients: of each parameter, its numbers [clients, n]."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self._parts = dict(enumerate(parts))

    def add(self, into: Tensor, which: int, factor: float) -> None:
        """into <- into + factor * noise, of a parameter [clients, ...]."""
        into.view(len(into), -1).add_(self._parts[which], alpha=factor)


class StreamNoise(Noise):
    """Of a simulation: it follows from the clients' keys, and is drawn when it is added. That of a large
    parameter is added while it is in the cache; of others, neighbours' are drawn together."""

    def __init__(self, deviation: Tensor, keys: Tensor, sizes: Sequence[int]) -> None:
        super().__init__([])
        self._deviation, self._keys, self._sizes = deviation, keys, sizes

    def add(self, into: Tensor, which: int, factor: float) -> None:
        if self._sizes[which] >= LARGE:
            random.add_coarse_normal_(into.view(len(into), -1), self._keys, self._deviation * factor,
                                      sum(self._sizes[:which]))
            return
        if which not in self._parts:
            self._draw_beside(which)
        super().add(into, which, factor)

    def _draw_beside(self, which: int) -> None:
        """That of a small parameter, and of all small ones that follow it."""
        some = [*takewhile(lambda k: self._sizes[k] < LARGE, range(which, len(self._sizes)))]
        own = [self._sizes[k] for k in some]
        drawn = self._deviation.new_empty(len(self._deviation), sum(own))
        random.draw_coarse_normal_(drawn, self._keys, sum(self._sizes[:which]))
        self._parts.update(zip(some, drawn.mul_(self._deviation[:, None]).split(own, 1), strict=True))


class PrivateTerm(NamedTuple):
    """The gradient of one parameter, before it is formed, and its noise."""

    term: Term
    noise: Noise
    which: int  # of the parameters

    def add(self, into: Tensor, keep: float, factor: float) -> None:
        """into <- keep * into + factor * (gradient + noise)."""
        self.term.add(into, keep, factor)
        self.noise.add(into, self.which, factor)


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
        with self._context.of_pass(weight, key, {}) if self._reads_context else nullcontext(
                self._context) as context:
            losses, terms = self.chain.slopes(parameters, x, context, lambda outputs: self._loss(outputs, y))
        factor = clipped(self._squares(terms).sqrt_(), weight, self._mechanism)
        each = share if scale is None else share * scale
        factor.mul_(each[:, None])
        if weight is not None:  # what only fills up adds nothing
            factor.mul_(weight)
            losses = losses * weight
        for term in terms:
            if term.which == 0:  # the slopes of a layer's weight are those of its bias
                term.terms[0].mul_(factor.unsqueeze(-1))
        noise = noise_of(self._mechanism, each, self.chain.sizes, key)
        found: list[Term] = [PrivateTerm(term, noise, k)  # type: ignore[misc]
                             for k, term in enumerate(terms)]
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
    lie_as_rows = rows.stride(-1) == 1
    found: Tensor = torch.linalg.vector_norm(rows, dim=-1).square_() if lie_as_rows else rows.square().sum(-1)
    return found


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
        opened.shortened += int(torch.count_nonzero(short if weight is None else short & weight))
        opened.rows += short.numel() if weight is None else int(torch.count_nonzero(weight))
    return factor


def noise_of(mechanism: Mechanism, share: Tensor, sizes: Sequence[int], key: Tensor | None) -> Noise:
    """The noise on the clients' means, of parameters of these sizes."""
    assert isinstance(mechanism.clip, float)
    deviation = mechanism.noise * mechanism.clip * share
    if mechanism.secret:
        whole = torch.from_numpy(secret_normals(len(share) * sum(sizes))).to(share.dtype)
        return Noise((whole.view(len(share), -1) * deviation[:, None]).split([*sizes], 1))
    assert key is not None  # of the batch: in every call another number follows from it
    opened = meter.current()
    number = 0 if opened is None else opened.next_noise()
    return StreamNoise(deviation, random.fold_rows(key, STREAM + number), sizes)


def forms_no_rows(chain: Chain, sample_axes: int) -> bool:
    """Whether norms of rows follow from those of slopes and inputs: all parameters are those of linear layers
    that see a sample as one vector."""
    layers = [place.layer for place in chain.places]
    first = next(k for k, layer in enumerate(layers) if layer.owns)
    is_vector = sample_axes == 1 or any(
        isinstance(layer, Reshape) and layer.is_flat for layer in layers[:first])
    return is_vector and all(isinstance(layer, Linear) for layer in layers if layer.owns)

"""Private gradients of a chunk of clients: each row's is shortened to a norm, and their sum gets noise.

For networks of linear layers no row's gradient is ever formed. The gradient of a weight is an outer product,
slope x input, so that its norm is the product of two norms (Goodfellow 2015); once a row's norm is known over
all layers, its slopes are scaled, and the sum is the product that a plain gradient takes.
"""

from __future__ import annotations

from collections.abc import Callable
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


class PrivateTerm(NamedTuple):
    """The gradient of one parameter, before it is formed, and its noise."""

    term: Term
    normal: Tensor  # [clients, ...]
    deviation: Tensor  # [clients, 1]

    def add(self, into: Tensor, keep: float, factor: float) -> None:
        """into <- keep * into + factor * (gradient + deviation * normal)."""
        self.term.add(into, keep, factor)
        into.addcmul_(self.normal, self.deviation.view(-1, *[1] * (into.dim() - 1)), value=factor)


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
        normals, deviation = drawn(self._mechanism, each, sum(t[0].numel() for t in parameters), key)
        found: list[Term] = [PrivateTerm(term, normal, deviation)  # type: ignore[misc]
                             for term, normal in zip(terms, self.parameters(normals), strict=True)]
        return Slopes(losses * share[:, None], found, 1, None)

    def _squares(self, terms: list[Term]) -> Tensor:
        """The squared norms of the rows' gradients [clients, B]."""
        total: Tensor | None = None
        for term in terms:
            if term.which == 0:
                slope, rows = term.terms
                reach = torch.linalg.vector_norm(rows, dim=-1).square_()
                if len(term.layer.owns) == 2:
                    reach = reach + 1  # the bias: its input is 1
                part = slope.square().sum(-1) * reach
                total = part if total is None else total + part
        assert total is not None
        return total


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


def drawn(mechanism: Mechanism, share: Tensor, count: int, key: Tensor | None) -> tuple[Tensor, Tensor]:
    """The noise on the clients' means: standard normal numbers [clients, count], and their deviation
    [clients, 1]."""
    assert isinstance(mechanism.clip, float)
    deviation = (mechanism.noise * mechanism.clip * share)[:, None]
    if mechanism.secret:
        whole = torch.from_numpy(secret_normals(len(share) * count)).to(share.dtype)
        return whole.view(len(share), count), deviation
    assert key is not None  # of the batch: in every call another number follows from it
    opened = meter.current()
    number = 0 if opened is None else opened.next_noise()
    normals = share.new_empty(len(share), count)
    random.draw_coarse_normal_(normals, random.fold(key, STREAM + number))
    return normals, deviation


def forms_no_rows(chain: Chain, sample_axes: int) -> bool:
    """Whether norms of rows follow from those of slopes and inputs: all parameters are those of linear layers
    that see a sample as one vector."""
    layers = [place.layer for place in chain.places]
    first = next(k for k, layer in enumerate(layers) if layer.owns)
    is_vector = sample_axes == 1 or any(
        isinstance(layer, Reshape) and layer.is_flat for layer in layers[:first])
    return is_vector and all(isinstance(layer, Linear) for layer in layers if layer.owns)

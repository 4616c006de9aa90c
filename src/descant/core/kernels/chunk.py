"""Losses and gradients of a chunk of clients whose networks are a chain, over a leading axis of clients.

A gradient is left as the terms it is made of until somebody says where to add it. A step of gradient descent
adds it to the parameters themselves: for a linear layer that is one product, and no gradient is ever formed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from descant.core.kernels.chain import Chain, Term
from descant.core.kernels.layers import Context
from descant.core.kernels.products import room
from descant.core.kernels.span import Spanning
from descant.core.vector import Layout
from descant.errors import UsageError


class Slopes(NamedTuple):
    """What a pass over a batch of each client gives."""

    losses: Tensor  # [clients, B] whose sums are the clients' mean losses, times `rows`
    terms: list[Term]  # of the gradient, for each parameter
    rows: int
    stats: Tensor | None  # [clients, s] the running statistics after it, where there are any

    @property
    def means(self) -> Tensor:
        """The mean losses [clients]."""
        return self.losses.sum(1) / self.rows


class ChunkGradients:
    """The gradients of the mean training losses of a chunk."""

    def __init__(self, chain: Chain, context: Context, layout: Layout,
                 loss: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        self.chain = chain
        self._context = context
        self._layout = layout
        self._loss = loss  # outputs and targets -> losses [clients, B], and their slopes
        self._reads_context = any(place.layer.reads_context for place in chain.places)

    @cached_property
    def spanning(self) -> Spanning | None:
        """The same for steps on one batch, where they can be made in its span."""
        return Spanning.of(self)

    def of_chain(self, chain: Chain) -> ChunkGradients:
        """The gradients of another network with this one's outputs and statistics."""
        return ChunkGradients(chain, self._context, self._layout, self._loss)

    def parameters(self, vectors: Tensor) -> list[Tensor]:
        """The networks' parameters as views of the clients' vectors [clients, d]."""
        return self.chain.parameters(vectors)

    def given(self, x: Tensor, stop: int) -> Tensor:
        """What a layer is given of the samples, where those before it have no parameters."""
        for layer, _ in self.chain.places[:stop]:
            x, _ = layer.forward([], x, self._context)
        return x

    def slopes(self, parameters: list[Tensor], stats: Tensor | None, x: Tensor, y: Tensor,
               weight: Tensor | None, key: Tensor | None, counts: Tensor | None = None, *,
               scale: Tensor | None = None, pull: Callable[[Tensor], Tensor] | None = None) -> Slopes:
        """A pass over the batches x [clients, B, ...]; the rows count `counts` [clients, B] times, and the
        gradients `scale` [clients] times. `pull` gives further slopes for what the last layer with parameters
        is given."""
        loss = partial(self._mean_loss, y, weight, counts, scale)
        rows = x.shape[1] if weight is None else 1
        if not self._reads_context:
            return Slopes(*self.chain.slopes(parameters, x, self._context, loss, pull), rows, None)
        running = {} if stats is None else self._layout.running(stats)
        with self._context.of_pass(weight, key, running) as context:
            found = self.chain.slopes(parameters, x, context, loss, pull)
            if stats is not None:
                stats = torch.cat([context.stats[s.name] for s in self._layout.statistics], -1)
        return Slopes(*found, rows, stats)

    def gradient(self, theta: Tensor, stats: Tensor | None, *batch: Tensor | None,
                 pull: Callable[[Tensor], Tensor] | None = None) -> tuple[Tensor, ...]:
        """The losses, the gradients [clients, d], and the new statistics, if any."""
        x, y, *rest = batch
        assert x is not None and y is not None
        slopes = self.slopes(self.parameters(theta), stats, x, y, *rest, pull=pull)
        gradient = room(theta, theta.shape)
        for term, into in zip(slopes.terms, self.parameters(gradient), strict=True):
            term.add(into, 0.0, 1.0)
        found = (slopes.means, gradient)
        return found if slopes.stats is None else (*found, slopes.stats)

    def pulled_gradient(self, theta: Tensor, stats: Tensor | None, x: Tensor, y: Tensor,
                        weight: Tensor | None, key: Tensor | None, counts: Tensor | None, centres: Tensor,
                        strength: Tensor) -> tuple[Tensor, ...]:
        """The same with the mean over the rows of strength_y ||feature - centre_y||^2, which does not count
        in the losses; centres [clients, classes, k], strength [clients, classes]."""
        pull = pull_of(y, weight, counts, centres, strength)
        return self.gradient(theta, stats, x, y, weight, key, counts, pull=pull)

    def _mean_loss(self, y: Tensor, weight: Tensor | None, counts: Tensor | None, scale: Tensor | None,
                   outputs: Tensor) -> tuple[Tensor, Tensor]:
        """The losses as in `Slopes`, and the slopes of their means for the outputs [clients, B, ...]."""
        losses, slopes = self._loss(outputs, y)
        share: Tensor | float = 1 / losses.shape[1]
        if weight is not None:
            real = weight.to(losses.dtype)  # whose sum is several times faster than that of bits
            share = real / real.sum(1, keepdim=True)
            losses = losses * share
        if counts is not None:
            share, losses = counts * share, losses * counts
        if scale is not None:
            share = scale[:, None] * share
        if isinstance(share, Tensor):
            share = share.view(*share.shape, *[1] * (slopes.dim() - 2))
        return losses, slopes.mul_(share)


def pull_of(y: Tensor, weight: Tensor | None, counts: Tensor | None, centres: Tensor, strength: Tensor
            ) -> Callable[[Tensor], Tensor]:
    """The slopes of the mean over the rows of strength_y ||feature - centre_y||^2, for the features."""
    clients, of = torch.arange(len(y))[:, None], y.long()
    share = 1 / y.shape[1] if weight is None else weight.to(centres.dtype) / weight.sum(1, keepdim=True)
    if counts is not None:
        share = counts * share
    factor = (2 * share * strength[clients, of]).unsqueeze(-1)

    def pull(features: Tensor) -> Tensor:
        return factor * (as_rows(features, 1) - centres[clients, of])

    return pull


def as_rows(features: Tensor, lead: int = 0) -> Tensor:
    """The features, if they are a vector for each sample."""
    if features.dim() != lead + 2:
        raise UsageError("the features of the model are not known: its last layer with parameters is given "
                         f"values of shape {tuple(features.shape[lead + 1:])} for a sample, not a vector")
    return features

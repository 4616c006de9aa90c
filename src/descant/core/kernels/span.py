"""Several steps on ONE batch, in the span of what they are made of.

The gradient of a linear layer is a product with its rows x. Where these are the rows of the batch itself, its
weights after any steps of gradient descent on this batch are

    W = T x + a W_0 + b V,

W_0 being those before, V what a quadratic prior adds (its mean or slope), T [outputs, B] and a, b numbers.
So steps are made on the coefficients (T, a, b) and on the outputs O = W x', which a gradient changes by its
product with x x': the weights themselves are read once before and written once after all steps. A bias is one
more column of weights, whose inputs are ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from descant.core.kernels.chain import Chain, Place
from descant.core.kernels.chain_layers import Layer, Linear, Saved, Terms
from descant.core.kernels.layers import Context
from descant.core.kernels.products import add_product_, in_lines, room

if TYPE_CHECKING:
    from descant.core.kernels.chunk import ChunkGradients

WHOLE = 16  # numbers of single precision in a line of the cache


class Coefficients(Layer):
    """The layer whose parameter is (O, T, a, b) [clients, outputs, 2 B + 2], side by side, and filled up with
    zeros (see `_width`); its rows are those of `Span.rows`."""

    owns = ("coefficients",)

    def forward(self, parameters: list[Tensor], x: Tensor, context: Context) -> tuple[Tensor, Saved]:
        return parameters[0][:, :, : x.shape[1]].mT, x

    def backward(self, parameters: list[Tensor], saved: Saved, slope: Tensor, wanted: bool
                 ) -> tuple[Tensor, Terms]:
        return slope, (slope, saved)

    def add_gradient(self, terms: Terms, which: int, into: Tensor, keep: float, factor: float) -> None:
        slope, rows = terms
        add_product_(into, slope.mT, rows, keep, factor)


class Spanning:
    """A network whose first layer with parameters is linear and is given the samples themselves, with the
    coefficients in place of this layer's parameters: they come first, then all others in their order."""

    def __init__(self, gradients: ChunkGradients, first: int) -> None:
        chain = gradients.chain
        self._first, own = first, chain.places[first].parameters
        self._own, self._others = own, [k for k in range(len(chain.layout.parameters)) if k not in own]
        at = {k: 1 + j for j, k in enumerate(self._others)}
        spanned = Chain(chain.layout, [Place(Coefficients(), [0]), *(
            Place(layer, [at[k] for k in theirs]) for layer, theirs in chain.places[first + 1 :])])
        self._whole, self.gradients = gradients, gradients.of_chain(spanned)

    @classmethod
    def of(cls, gradients: ChunkGradients) -> Spanning | None:
        """None: the network is another one."""
        for k, (layer, own) in enumerate(gradients.chain.places):
            if own or layer.reads_context:
                return cls(gradients, k) if type(layer) is Linear else None
        return None

    def span(self, x: Tensor, steps: int) -> Span | None:
        """The span of a batch x [clients, B, ...]; None where so many steps on the weights are cheaper."""
        rows = self._whole.given(x, self._first)
        shape = self._whole.chain.layout.parameters[self._own[0]].shape
        if rows.dim() != 3 or not _pays(rows.shape[1], shape[1], shape[0], steps):
            return None
        return Span(rows, len(self._own) == 2)

    def split(self, vectors: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The parameters of the first layer, and all others."""
        parameters = self._whole.parameters(vectors)
        return [parameters[k] for k in self._own], [parameters[k] for k in self._others]


class Span:
    """The coefficients for one batch of each client."""

    def __init__(self, rows: Tensor, has_bias: bool) -> None:
        clients, self._B, _ = rows.shape
        self._given = rows if in_lines(rows) else room(rows, rows.shape).copy_(rows)
        self.rows = room(rows, (clients, self._B, _width(self._B))).zero_()
        products = torch.bmm(self._given, self._given.mT)
        self.rows[:, :, : self._B] = products.add_(1) if has_bias else products
        self.rows.diagonal(self._B, 1, 2).fill_(1)

    def of(self, layer: list[Tensor], column: int) -> Tensor:
        """The coefficients of W_0 (column 0) or V (column 1) [clients, outputs, inputs], and its bias."""
        weight, *bias = layer
        made = room(weight, (*weight.shape[:2], _width(self._B))).zero_()
        outputs = torch.bmm(weight if in_lines(weight) else room(weight, weight.shape).copy_(weight),
                            self._given.mT)
        made[:, :, : self._B] = outputs.add_(bias[0].unsqueeze(2)) if bias else outputs
        made[:, :, 2 * self._B + column] = 1
        return made

    def form(self, coefficients: Tensor, layers: list[list[Tensor]], into: list[Tensor]) -> None:
        """The layer's parameters, from those of W_0, and of V if there is one."""
        T = coefficients[:, :, self._B : 2 * self._B]
        made = [torch.bmm(T, self._given), *([T.sum(2)] if len(into) == 2 else [])]
        shares = [coefficients[:, :1, 2 * self._B + k] for k in range(2)]  # alike for all outputs
        for which, (part, place) in enumerate(zip(made, into, strict=True)):
            for share, layer in zip(shares, layers, strict=False):
                share = share.view(-1, *[1] * (part.dim() - 1))
                part = torch.addcmul(part, layer[which], share, out=place)


def _width(rows: int) -> int:
    """Columns of the coefficients: whole lines of the cache, whatever the precision, so that those of one
    client follow upon another's and a step is one product (`add_product_`)."""
    return -(-(2 * rows + 2) // WHOLE) * WHOLE


def _pays(rows: int, inputs: int, outputs: int, steps: int) -> bool:
    """Whether the span takes fewer multiplications: three products with the weights and one for x x', where
    every step takes two with the weights."""
    spanned = (3 * outputs + rows) * inputs * rows + steps * outputs * rows * _width(rows)
    return spanned < 2 * steps * outputs * inputs * rows

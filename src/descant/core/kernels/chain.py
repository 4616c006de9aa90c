"""Networks that are chains of common layers, differentiated by the chain rule written out.

Autograd costs more than the arithmetic of a small network: it calls modules, keeps a graph, and under
`vmap` wraps every tensor twice. For chains of layers with known derivatives (`chain_layers.py`) the gradient
is written here, for any number of clients at once: every tensor has a leading axis of clients, and a linear
layer is one batched product. Every other network goes through autograd, for ONE client, with the same result
up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from descant.core.kernels.chain_layers import Layer, Terms, known_layer
from descant.core.kernels.layers import Context, runs_own
from descant.core.kernels.network import Network
from descant.core.vector import Layout


class Place(NamedTuple):
    """A layer of a chain, and which of the layout's parameters are its own."""

    layer: Layer
    parameters: list[int]


class Term(NamedTuple):
    """The gradient of one parameter, before it is formed."""

    layer: Layer
    which: int  # of the layer's parameters
    terms: Terms

    def add(self, into: Tensor, keep: float, factor: float) -> None:
        """into <- keep * into + factor * gradient."""
        self.layer.add_gradient(self.terms, self.which, into, keep, factor)


@dataclass
class Chain:
    """A network of layers that are all known here."""

    layout: Layout
    places: list[Place] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sizes = [s.stop - s.start for s in self.layout.parameters]
        self._shapes = [s.shape for s in self.layout.parameters]

    @property
    def head(self) -> int:
        """Which layer is the last with parameters."""
        return max(k for k, place in enumerate(self.places) if place.parameters)

    @classmethod
    def of(cls, module: nn.Module, layout: Layout) -> Chain | None:
        """The chain that a module is; None if it is none, or if any of its layers is not known here."""
        at = {s.name: k for k, s in enumerate(layout.parameters)}
        chain = cls(layout)
        for name, leaf in leaves(module):
            layer = None if leaf is None else known_layer(leaf, name)
            if layer is None:
                return None
            own = [f"{name}.{parameter}" if name else parameter for parameter in layer.owns]
            if not {*own} <= at.keys():  # frozen, or shared with another layer
                return None
            chain.places.append(Place(layer, [at.pop(parameter) for parameter in own]))
        return None if at else chain

    def outputs(self, theta: Tensor, x: Tensor, context: Context, stop: int | None = None) -> Tensor:
        """What the networks of the clients [clients, d] give for their samples x [clients, B, ...]; with a
        `stop`, what this layer is given."""
        parameters = self.parameters(theta)
        for layer, own in self.places[:stop]:
            x, _ = layer.forward([parameters[k] for k in own], x, context)
        return x

    def slopes(self, parameters: list[Tensor], x: Tensor, context: Context,
               loss: Callable[[Tensor], tuple[Tensor, Tensor]], pull: Callable[[Tensor], Tensor] | None = None
               ) -> tuple[Tensor, list[Term]]:
        """The losses that `loss` gives for the networks' outputs, with their slopes, and the terms of the
        clients' gradients, one for each parameter. `pull` gives further slopes for the head's inputs."""
        kept, features = [], x
        head = None if pull is None else self.places[self.head].layer
        for layer, own in self.places:
            theirs = [parameters[k] for k in own]
            if layer is head:
                features = x
            x, saved = layer.forward(theirs, x, context)
            kept.append((layer, own, theirs, saved))
        value, slope = loss(x)
        found: list[Term] = [None] * len(parameters)  # type: ignore[list-item]
        left = len(parameters)
        for layer, own, theirs, saved in reversed(kept):
            left -= len(own)
            slope, terms = layer.backward(theirs, saved, slope, left > 0)
            if pull is not None and layer is head and left > 0:
                slope = slope + pull(features)
            for which, k in enumerate(own):
                found[k] = Term(layer, which, terms)
            if left == 0:  # nothing below this layer is learned
                break
        return value, found

    def parameters(self, theta: Tensor) -> list[Tensor]:
        """The parameters as views of the clients' vectors."""
        clients = theta.shape[0]
        parts = torch.split_with_sizes(theta, self.sizes, 1)
        return [part if len(shape) == 1 else part.view(clients, *shape)
                for part, shape in zip(parts, self._shapes, strict=True)]


def leaves(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module | None]]:
    """The layers of a chain in their order; None where the module does something else between them."""
    if _has_hooks(module):
        yield name, None
    elif type(module) in (nn.Sequential, Network) and runs_own(module, type(module)):
        for part, child in module._modules.items():
            assert child is not None
            yield from leaves(child, f"{name}.{part}" if name else part)
    else:
        yield name, module


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
                or module._backward_pre_hooks)

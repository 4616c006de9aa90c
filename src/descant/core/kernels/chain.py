"""Networks that are chains of common layers, differentiated by the chain rule written out.

Autograd costs more than the arithmetic of a small network: it calls modules, keeps a graph, and under
`vmap` wraps every tensor twice. Most networks of the field are chains of a few kinds of layers whose
derivatives everybody knows. For those the gradient is written here, for any number of clients at once:
every tensor has a leading axis of clients, and a linear layer is one batched product. Every other
network goes through autograd, for ONE client, as does all else in descant (`task.py`); the result is
the same up to rounding.

Images lie with their channels last between convolutions, where convolutions and pooling on a CPU are
several times faster; their shapes remain (clients, batch, channels, height, width). Convolutions go from
client to client: on a CPU nothing is gained by grouping them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from descant.core.kernels.layers import Context, dropped, moments_of_batch, runs_own
from descant.core.kernels.network import Network, Shaped
from descant.core.vector import Layout

Saved: TypeAlias = Any  # what a layer's backward pass needs of its forward pass
aten = torch.ops.aten


class Layer(ABC):
    """A layer: x [clients, B, ...] -> out [clients, B, ...], and how slopes go back through it."""

    owns: Sequence[str] = ()  # its parameters, as they are called in the module

    @abstractmethod
    def forward(self, parameters: list[Tensor], x: Tensor, context: Context) -> tuple[Tensor, Saved]: ...

    @abstractmethod
    def backward(self, parameters: list[Tensor], saved: Saved, slope: Tensor, into: list[Tensor],
                 wanted: bool) -> Tensor:
        """Write the slopes for the parameters, and return those for x (anything if they are not wanted)."""


class Reshape(Layer):
    """Flatten, and what else only changes the shape of a sample."""

    def __init__(self, *shape: int) -> None:
        self._shape = shape

    def forward(self, parameters: list[Tensor], x: Tensor, context: Context) -> tuple[Tensor, Saved]:
        return x.reshape(*x.shape[:2], *self._shape), x.shape

    def backward(self, parameters: list[Tensor], saved: Saved, slope: Tensor, into: list[Tensor],
                 wanted: bool) -> Tensor:
        return slope.reshape(saved)


class Linear(Layer):
    def __init__(self, layer: nn.Linear) -> None:
        self.owns = ("weight",) if layer.bias is None else ("weight", "bias")

    def forward(self, parameters: list[Tensor], x: Tensor, context: Context) -> tuple[Tensor, Saved]:
        rows = x if x.dim() == 3 else x.flatten(1, -2)
        weight = parameters[0]
        if weight.stride(0) == 0:  # one model for all: one product
            out = F.linear(rows, weight[0], *[bias[0] for bias in parameters[1:]])
        elif len(parameters) == 1:
            out = torch.bmm(rows, weight.transpose(1, 2))
        else:
            out = torch.baddbmm(parameters[1].unsqueeze(1), rows, weight.transpose(1, 2))
        return out if x.dim() == 3 else out.unflatten(1, x.shape[1:-1]), rows

    def backward(self, parameters: list[Tensor], saved: Saved, slope: Tensor, into: list[Tensor],
                 wanted: bool) -> Tensor:
        flat = slope if slope.dim() == 3 else slope.flatten(1, -2)
        torch.bmm(flat.transpose(1, 2), saved, out=into[0])
        if len(into) == 2:
            torch.sum(flat, 1, out=into[1])
        if not wanted:
            return slope
        given = torch.bmm(flat, parameters[0])
        return given if slope.dim() == 3 else given.unflatten(1, slope.shape[1:-1])


class Convolution(Layer):
    """Over images, or over series, which are images one pixel high."""

    def __init__(self, layer: nn.Conv1d | nn.Conv2d) -> None:
        self.owns = ("weight",) if layer.bias is None else ("weight", "bias")
        self._flat = isinstance(layer, nn.Conv1d)
        assert not isinstance(layer.padding, str)
        self._stride, self._padding, self._dilation = (
            [none, *given] if self._flat else [*given]
            for none, given in ((1, layer.stride), (0, layer.padding), (1, layer.dilation)))
        self._groups = layer.groups

    def forward(self, parameters: list[Tensor], x: Tensor, context: Context) -> tuple[Tensor, Saved]:
        images = _channels_last(x.unsqueeze(3) if self._flat else x)
        bias = parameters[1] if len(parameters) == 2 else [None] * len(x)
        out = _stacked([
            F.conv2d(image, weight, b, self._stride, self._padding, self._dilation, self._groups)
            for image, weight, b in zip(images, self._weights(parameters), bias, strict=True)])
        return out.squeeze(3) if self._flat else out, images

    def backward(self, parameters: list[Tensor], saved: Saved, slope: Tensor, into: list[Tensor],
                 wanted: bool) -> Tensor:
        slopes = _channels_last(slope.unsqueeze(3) if self._flat else slope)
        given = []
        for k, weight in enumerate(self._weights(parameters)):
            back, *found = aten.convolution_backward(
                slopes[k], saved[k], weight, [len(weight)], self._stride, self._padding, self._dilation,
                False, [0, 0], self._groups, [wanted, True, len(into) == 2])
            given.append(back)
            for place, each in zip(into, found, strict=False):
                place[k].copy_(each.view(place[k].shape) if self._flat else each)
        if not wanted:
            return slope
        return _stacked(given).squeeze(3) if self._flat else _stacked(given)

    def _weights(self, parameters: list[Tensor]) -> Tensor:
        return parameters[0].unsqueeze(3) if self._flat else parameters[0]


class MaxPool(Layer):
    def __init__(self, layer: nn.MaxPool1d | nn.MaxPool2d) -> None:
        self._flat = isinstance(layer, nn.MaxPool1d)
        kernel, stride, padding, dilation = (
            _pair(given, none if self._flat else None)
            for none, given in ((1, layer.kernel_size), (1, layer.stride), (0, layer.padding),
                                (1, layer.dilation)))
        self._window = (kernel, stride, padding, dilation, layer.ceil_mode)

    def forward(self, parameters: list[Tensor], x: Tensor, context: Context) -> tuple[Tensor, Saved]:
        images = _channels_last(x.unsqueeze(3) if self._flat else x).flatten(0, 1)
        out, at = aten.max_pool2d_with_indices(images, *self._window)
        out = out.unflatten(0, x.shape[:2])
        return out.squeeze(3) if self._flat else out, (images, at)

    def backward(self, parameters: list[Tensor], saved: Saved, slope: Tensor, into: list[Tensor],
                 wanted: bool) -> Tensor:
        images, at = saved
        slopes = _channels_last(slope.unsqueeze(3) if self._flat else slope).flatten(0, 1)
        given = aten.max_pool2d_with_indices_backward(slopes, images, *self._window, at)
        given = given.unflatten(0, slope.shape[:2])
        return cast(Tensor, given.squeeze(3) if self._flat else given)


class Activation(Layer):
    """A function of each number alone, whose slope can be read off its value."""

    @abstractmethod
    def value(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def back(self, slope: Tensor, value: Tensor) -> Tensor: ...

    def forward(self, parameters: list[Tensor], x: Tensor, context: Context) -> tuple[Tensor, Saved]:
        value = self.value(x)
        return value, value

    def backward(self, parameters: list[Tensor], saved: Saved, slope: Tensor, into: list[Tensor],
                 wanted: bool) -> Tensor:
        return self.back(slope, saved)


class Identity(Activation):
    def value(self, x: Tensor) -> Tensor:
        return x

    def back(self, slope: Tensor, value: Tensor) -> Tensor:
        return slope


class ReLU(Activation):
    def value(self, x: Tensor) -> Tensor:
        return torch.relu(x)

    def back(self, slope: Tensor, value: Tensor) -> Tensor:
        return cast(Tensor, aten.threshold_backward(slope, value, 0))


class LeakyReLU(Activation):
    def __init__(self, leak: float) -> None:
        self._leak = leak

    def value(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, self._leak)

    def back(self, slope: Tensor, value: Tensor) -> Tensor:
        return cast(Tensor, aten.leaky_relu_backward(slope, value, self._leak, True))


class Tanh(Activation):
    def value(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def back(self, slope: Tensor, value: Tensor) -> Tensor:
        return cast(Tensor, aten.tanh_backward(slope, value))


class Sigmoid(Activation):
    def value(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)

    def back(self, slope: Tensor, value: Tensor) -> Tensor:
        return cast(Tensor, aten.sigmoid_backward(slope, value))


class Dropout(Layer):
    def __init__(self, layer: nn.Dropout | nn.Dropout1d | nn.Dropout2d) -> None:
        self._layer = layer

    def forward(self, parameters: list[Tensor], x: Tensor, context: Context) -> tuple[Tensor, Saved]:
        factor = dropped(context, self._layer, x, lead=1)
        return (x, None) if factor is None else (x * factor, factor)

    def backward(self, parameters: list[Tensor], saved: Saved, slope: Tensor, into: list[Tensor],
                 wanted: bool) -> Tensor:
        return slope if saved is None else slope * saved


class BatchNorm(Layer):
    """x^ = (x - mean) / sd over the batch, in training; over the running statistics otherwise."""

    def __init__(self, layer: nn.BatchNorm1d | nn.BatchNorm2d, name: str) -> None:
        self._layer, self._name = layer, name
        self.owns = ("weight", "bias") if layer.affine else ()

    def forward(self, parameters: list[Tensor], x: Tensor, context: Context) -> tuple[Tensor, Saved]:
        mean, var, alone = moments_of_batch(context, self._name, self._layer, x, lead=1)
        inverse = torch.rsqrt(var + self._layer.eps)
        normal = (x - _per_channel(mean, x)) * _per_channel(inverse, x)
        out = normal
        if parameters:
            out = normal * _per_channel(parameters[0], x) + _per_channel(parameters[1], x)
        return out, (normal, inverse, alone, context.weight)

    def backward(self, parameters: list[Tensor], saved: Saved, slope: Tensor, into: list[Tensor],
                 wanted: bool) -> Tensor:
        normal, inverse, alone, weight = saved
        axes = [1, *range(3, slope.dim())]
        # rows that only fill up have slope zero, and count neither here nor below
        found = [(slope * normal).sum(axes), slope.sum(axes)]
        for place, each in zip(into, found, strict=False):
            place.copy_(each)
        if not wanted:
            return slope
        values = slope[0, 0, 0].numel()
        count: Tensor | int = slope.shape[1] * values
        if weight is not None:
            rows = weight.to(slope.dtype)
            count = rows.sum(1, keepdim=True) * values
        # the mean and the variance of the batch move with x, but not where running ones took their place
        scale, shift = (torch.where(alone, 0.0, total / count) for total in found)
        given = slope - _per_channel(shift, slope) - normal * _per_channel(scale, slope)
        if weight is not None:
            given = given * rows.view(*rows.shape, *[1] * (slope.dim() - 2))
        return cast(Tensor, given * _per_channel(inverse * parameters[0] if parameters else inverse, slope))


class Place(NamedTuple):
    """A layer of a chain, and which of the layout's parameters are its own."""

    layer: Layer
    parameters: list[int]


@dataclass
class Chain:
    """A network of layers that are all known here."""

    layout: Layout
    places: list[Place] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._sizes = [s.stop - s.start for s in self.layout.parameters]
        self._shapes = [s.shape for s in self.layout.parameters]

    @classmethod
    def of(cls, module: nn.Module, layout: Layout) -> Chain | None:
        """The chain that a module is; None if it is none, or if any of its layers is not known here."""
        at = {s.name: k for k, s in enumerate(layout.parameters)}
        chain = cls(layout)
        for name, leaf in leaves(module):
            layer = None if leaf is None else _known(leaf, name)
            if layer is None:
                return None
            own = [f"{name}.{parameter}" if name else parameter for parameter in layer.owns]
            if not {*own} <= at.keys():  # frozen, or shared with another layer
                return None
            chain.places.append(Place(layer, [at.pop(parameter) for parameter in own]))
        return None if at else chain

    def outputs(self, theta: Tensor, x: Tensor, context: Context) -> Tensor:
        """What the networks of the clients [clients, d] give for their samples x [clients, B, ...]."""
        parameters = self._parameters(theta)
        for layer, own in self.places:
            x, _ = layer.forward([parameters[k] for k in own], x, context)
        return x

    def gradient(self, theta: Tensor, x: Tensor, context: Context,
                 loss: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """The clients' losses [clients] and gradients [clients, d]; `loss` gives the losses and their slopes
        for the networks' outputs."""
        parameters = self._parameters(theta)
        kept = []
        for layer, own in self.places:
            theirs = [parameters[k] for k in own]
            x, saved = layer.forward(theirs, x, context)
            kept.append((layer, own, theirs, saved))
        value, slope = loss(x)
        gradient = self._room(theta)
        places, left = self._parameters(gradient), len(parameters)
        for layer, own, theirs, saved in reversed(kept):
            left -= len(own)
            slope = layer.backward(theirs, saved, slope, [places[k] for k in own], left > 0)
            if left == 0:  # nothing below this layer is learned
                break
        return value, gradient

    def _room(self, theta: Tensor) -> Tensor:
        """Room for the gradients. Its rows begin on bounds of 64 bytes, all alike: how a matrix is aligned
        shows in the last bit of a product, and a client's result should not depend on its place in line."""
        clients, d = theta.shape
        per_line = 64 // theta.element_size()
        return theta.new_empty(clients, -(-d // per_line) * per_line)[:, :d]

    def _parameters(self, theta: Tensor) -> list[Tensor]:
        """The parameters as views of the clients' vectors."""
        clients = theta.shape[0]
        parts = torch.split_with_sizes(theta, self._sizes, 1)
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


def _known(layer: nn.Module, name: str) -> Layer | None:
    """The layer as it is written here, if it is; subclasses may do anything."""
    kind = type(layer)
    if not runs_own(layer, kind):  # its forward pass was replaced
        return None
    if isinstance(layer, nn.Linear) and kind is nn.Linear:
        return Linear(layer)
    if isinstance(layer, nn.Conv1d | nn.Conv2d) and kind in (nn.Conv1d, nn.Conv2d):
        return Convolution(layer) if layer.padding_mode == "zeros" and type(layer.padding) is tuple else None
    if isinstance(layer, nn.MaxPool1d | nn.MaxPool2d) and kind in (nn.MaxPool1d, nn.MaxPool2d):
        return None if layer.return_indices else MaxPool(layer)
    if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d) and kind in (nn.BatchNorm1d, nn.BatchNorm2d):
        return BatchNorm(layer, name)
    if isinstance(layer, nn.Dropout | nn.Dropout1d | nn.Dropout2d) and kind in (nn.Dropout, nn.Dropout1d,
                                                                                nn.Dropout2d):
        return Dropout(layer)
    if isinstance(layer, nn.LeakyReLU) and kind is nn.LeakyReLU and layer.negative_slope > 0:
        return LeakyReLU(layer.negative_slope)
    if isinstance(layer, nn.Flatten) and kind is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
        return Reshape(-1)
    if isinstance(layer, Shaped) and kind is Shaped:
        return Reshape(*layer.shape)
    return _PLAIN[kind]() if kind in _PLAIN else None


_PLAIN: dict[type[nn.Module], Callable[[], Layer]] = {
    nn.ReLU: ReLU, nn.Tanh: Tanh, nn.Sigmoid: Sigmoid, nn.Identity: Identity,
}


def _channels_last(x: Tensor) -> Tensor:
    """The same images [clients, B, C, H, W], in memory as [clients, B, H, W, C]; a copy only where needed."""
    last = x.permute(0, 1, 3, 4, 2).contiguous()
    if x.shape[2] == 1:  # either order is the same in memory: the strides must tell which is meant
        last = last.view(-1).view(last.shape)
    return last.permute(0, 1, 4, 2, 3)


def _stacked(images: list[Tensor]) -> Tensor:
    """The clients' images together, channels last."""
    if len(images) == 1:
        return images[0][None]
    return torch.stack([each.permute(0, 2, 3, 1) for each in images]).permute(0, 1, 4, 2, 3)


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    """Values [clients, channels] beside x [clients, B, channels, ...]."""
    return values.view(len(values), 1, -1, *[1] * (x.dim() - 3))


def _pair(given: Any, first: int | None) -> tuple[int, int]:
    """The two sides of a window; of a series' window, the first is given."""
    sides = given if isinstance(given, tuple) else (given,)
    return (sides[0] if first is None else first, sides[-1])

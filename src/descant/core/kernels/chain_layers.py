"""The layers of a chain (`chain.py`), each with its derivative, over a leading axis of clients.

Images lie with their channels last between convolutions, where convolutions and pooling on a CPU are
several times faster; their shapes remain (clients, batch, channels, height, width). Convolutions go from
client to client: on a CPU nothing is gained by grouping them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from descant.core.kernels.layers import Context, dropped, moments_of_batch, runs_own
from descant.core.kernels.network import Shaped
from descant.core.kernels.products import add_, add_product_

Saved: TypeAlias = Any  # what a layer's backward pass needs of its forward pass
Terms: TypeAlias = Any  # what the gradients of a layer's parameters are made of
aten = torch.ops.aten


class Layer(ABC):
    """A layer: x [clients, B, ...] -> out [clients, B, ...], and how slopes go back through it."""

    owns: Sequence[str] = ()  # its parameters, as they are called in the module
    reads_context: bool = False  # whether it is more than a function of one sample

    @abstractmethod
    def forward(self, parameters: list[Tensor], x: Tensor, context: Context) -> tuple[Tensor, Saved]: ...

    @abstractmethod
    def backward(self, parameters: list[Tensor], saved: Saved, slope: Tensor, wanted: bool
                 ) -> tuple[Tensor, Terms]:
        """The slopes for x (anything if they are not wanted), and the terms of those for the parameters."""

    def add_gradient(self, terms: Terms, which: int, into: Tensor, keep: float, factor: float) -> None:
        """into <- keep * into + factor * gradient, of one parameter; with keep = 0 it may hold anything."""
        add_(into, terms[which], keep, factor)


class Reshape(Layer):
    """Flatten, and what else only changes the shape of a sample."""

    def __init__(self, *shape: int) -> None:
        self._shape = shape
        self.is_flat = shape == (-1,)

    def forward(self, parameters: list[Tensor], x: Tensor, context: Context) -> tuple[Tensor, Saved]:
        return x.reshape(*x.shape[:2], *self._shape), x.shape

    def backward(self, parameters: list[Tensor], saved: Saved, slope: Tensor, wanted: bool
                 ) -> tuple[Tensor, Terms]:
        return slope.reshape(saved), ()


class Linear(Layer):
    """Outputs lie in memory as [clients, outputs, B], where products and losses are faster; their shape
    remains (clients, B, outputs)."""

    def __init__(self, layer: nn.Linear) -> None:
        self.owns = ("weight",) if layer.bias is None else ("weight", "bias")

    def forward(self, parameters: list[Tensor], x: Tensor, context: Context) -> tuple[Tensor, Saved]:
        rows = x if x.dim() == 3 else x.flatten(1, -2)
        columns = torch.bmm(parameters[0], rows.mT)
        out = (columns if len(parameters) == 1 else columns.add_(parameters[1].unsqueeze(2))).mT
        return out if x.dim() == 3 else out.unflatten(1, x.shape[1:-1]), rows

    def backward(self, parameters: list[Tensor], saved: Saved, slope: Tensor, wanted: bool
                 ) -> tuple[Tensor, Terms]:
        flat = slope if slope.dim() == 3 else slope.flatten(1, -2)
        if not wanted:
            return slope, (flat, saved)
        weight, lies_in_rows = parameters[0], saved.stride(2) == 1
        given = torch.bmm(flat, weight) if lies_in_rows else torch.bmm(weight.mT, flat.mT).mT
        return given if slope.dim() == 3 else given.unflatten(1, slope.shape[1:-1]), (flat, saved)

    def add_gradient(self, terms: Terms, which: int, into: Tensor, keep: float, factor: float) -> None:
        slope, rows = terms
        if which == 0:
            add_product_(into, slope.mT, rows, keep, factor)
        else:
            add_(into, slope.sum(1), keep, factor)


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

    def backward(self, parameters: list[Tensor], saved: Saved, slope: Tensor, wanted: bool
                 ) -> tuple[Tensor, Terms]:
        slopes = _channels_last(slope.unsqueeze(3) if self._flat else slope)
        has_bias = len(parameters) == 2
        given, gradients = [], []
        for k, weight in enumerate(self._weights(parameters)):
            back, *found = aten.convolution_backward(
                slopes[k], saved[k], weight, [len(weight)], self._stride, self._padding, self._dilation,
                False, [0, 0], self._groups, [wanted, True, has_bias])
            given.append(back)
            gradients.append(found[: len(parameters)])
        if not wanted:
            return slope, gradients
        return _stacked(given).squeeze(3) if self._flat else _stacked(given), gradients

    def add_gradient(self, terms: Terms, which: int, into: Tensor, keep: float, factor: float) -> None:
        for place, gradients in zip(into, terms, strict=True):
            gradient = gradients[which]
            add_(place, gradient.view(place.shape) if self._flat else gradient, keep, factor)

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

    def backward(self, parameters: list[Tensor], saved: Saved, slope: Tensor, wanted: bool
                 ) -> tuple[Tensor, Terms]:
        images, at = saved
        slopes = _channels_last(slope.unsqueeze(3) if self._flat else slope).flatten(0, 1)
        given = aten.max_pool2d_with_indices_backward(slopes, images, *self._window, at)
        given = given.unflatten(0, slope.shape[:2])
        return cast(Tensor, given.squeeze(3) if self._flat else given), ()


class Activation(Layer):
    """A function of each number alone, whose slope can be read off its value."""

    def __init__(self, value: Callable[[Tensor], Tensor], back: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._value, self._back = value, back

    def forward(self, parameters: list[Tensor], x: Tensor, context: Context) -> tuple[Tensor, Saved]:
        value = self._value(x)
        return value, value

    def backward(self, parameters: list[Tensor], saved: Saved, slope: Tensor, wanted: bool
                 ) -> tuple[Tensor, Terms]:
        return self._back(slope, saved), ()


# by their names: worker processes may be sent a chain
def _identity(x: Tensor) -> Tensor:
    return x


def _identity_back(slope: Tensor, value: Tensor) -> Tensor:
    return slope


def _relu_back(slope: Tensor, value: Tensor) -> Tensor:
    return cast(Tensor, aten.threshold_backward(slope, value, 0))


def _leaky_relu_back(leak: float, slope: Tensor, value: Tensor) -> Tensor:
    return cast(Tensor, aten.leaky_relu_backward(slope, value, leak, True))


def _tanh_back(slope: Tensor, value: Tensor) -> Tensor:
    return cast(Tensor, aten.tanh_backward(slope, value))


def _sigmoid_back(slope: Tensor, value: Tensor) -> Tensor:
    return cast(Tensor, aten.sigmoid_backward(slope, value))


_ACTIVATIONS: dict[type[nn.Module], tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    nn.ReLU: (torch.relu, _relu_back), nn.Tanh: (torch.tanh, _tanh_back),
    nn.Sigmoid: (torch.sigmoid, _sigmoid_back), nn.Identity: (_identity, _identity_back),
}


class Dropout(Layer):
    reads_context = True

    def __init__(self, layer: nn.Dropout | nn.Dropout1d | nn.Dropout2d) -> None:
        self._layer = layer

    def forward(self, parameters: list[Tensor], x: Tensor, context: Context) -> tuple[Tensor, Saved]:
        factor = dropped(context, self._layer, x, lead=1)
        return (x, None) if factor is None else (x * factor, factor)

    def backward(self, parameters: list[Tensor], saved: Saved, slope: Tensor, wanted: bool
                 ) -> tuple[Tensor, Terms]:
        return slope if saved is None else slope * saved, ()


class BatchNorm(Layer):
    """x^ = (x - mean) / sd over the batch, in training; over the running statistics otherwise."""

    reads_context = True

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

    def backward(self, parameters: list[Tensor], saved: Saved, slope: Tensor, wanted: bool
                 ) -> tuple[Tensor, Terms]:
        normal, inverse, alone, weight = saved
        axes = [1, *range(3, slope.dim())]
        # rows that only fill up have slope zero, and count neither here nor below
        found = [(slope * normal).sum(axes), slope.sum(axes)]
        terms = found[: len(parameters)]
        if not wanted:
            return slope, terms
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
        return given * _per_channel(inverse * parameters[0] if parameters else inverse, slope), terms


def known_layer(layer: nn.Module, name: str) -> Layer | None:
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
        leak = layer.negative_slope
        return Activation(partial(F.leaky_relu, negative_slope=leak), partial(_leaky_relu_back, leak))
    if isinstance(layer, nn.Flatten) and kind is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
        return Reshape(-1)
    if isinstance(layer, Shaped) and kind is Shaped:
        return Reshape(*layer.shape)
    return Activation(*_ACTIVATIONS[kind]) if kind in _ACTIVATIONS else None


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

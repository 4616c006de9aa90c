"""Networks that are chains of common layers, differentiated by the chain rule written out.

Autograd costs more than the arithmetic of a small network: it calls modules, keeps a graph, and under
`vmap` wraps every tensor twice. Most networks of the field are chains of a few kinds of layers whose
derivatives everybody knows. For those the gradient is written here for ONE client, in plain operations
that `vmap` turns into batched products. Every other network goes through autograd (`task.py`), with the
same result up to rounding.

Images lie with their channels last between convolutions, where convolutions and pooling on a CPU are
several times faster; shapes remain (batch, channels, height, width).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from descant.layers import Context, dropped, moments_of_batch
from descant.network import Network, Shaped
from descant.vector import Layout, Model

Saved: TypeAlias = Any  # what a layer's backward pass needs of its forward pass
aten = torch.ops.aten


class Layer(ABC):
    """A layer for ONE client: x [B, ...] -> out [B, ...], and how slopes of the loss go back through it."""

    owns: Sequence[str] = ()  # its parameters, as they are called in the module

    @abstractmethod
    def forward(self, parameters: list[Tensor], x: Tensor, context: Context) -> tuple[Tensor, Saved]: ...

    @abstractmethod
    def backward(self, parameters: list[Tensor], saved: Saved, slope: Tensor, wanted: bool
                 ) -> tuple[Tensor, list[Tensor]]:
        """The slopes for x (anything, if they are not `wanted`) and for the parameters."""


class Reshape(Layer):
    """Flatten, and what else only changes the shape of a sample."""

    def __init__(self, *shape: int) -> None:
        self._shape = shape

    def forward(self, parameters: list[Tensor], x: Tensor, context: Context) -> tuple[Tensor, Saved]:
        return x.reshape(len(x), *self._shape), x.shape

    def backward(self, parameters: list[Tensor], saved: Saved, slope: Tensor, wanted: bool
                 ) -> tuple[Tensor, list[Tensor]]:
        return slope.reshape(saved), []


class Linear(Layer):
    def __init__(self, layer: nn.Linear) -> None:
        self.owns = ("weight",) if layer.bias is None else ("weight", "bias")

    def forward(self, parameters: list[Tensor], x: Tensor, context: Context) -> tuple[Tensor, Saved]:
        weight = parameters[0]
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        out = torch.addmm(parameters[1], rows, weight.t()) if len(parameters) == 2 else rows @ weight.t()
        return out if x.dim() == 2 else out.reshape(*x.shape[:-1], -1), (rows, x.shape)

    def backward(self, parameters: list[Tensor], saved: Saved, slope: Tensor, wanted: bool
                 ) -> tuple[Tensor, list[Tensor]]:
        rows, shape = saved
        slope = slope if slope.dim() == 2 else slope.reshape(-1, slope.shape[-1])
        found = [slope.t() @ rows, slope.sum(0)]
        return (slope @ parameters[0]).reshape(shape) if wanted else slope, found[: len(parameters)]


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
        weight, bias = self._weight(parameters), parameters[1] if len(parameters) == 2 else None
        image = _channels_last(x.unsqueeze(2) if self._flat else x)
        out = F.conv2d(image, weight, bias, self._stride, self._padding, self._dilation, self._groups)
        return out.squeeze(2) if self._flat else out, image

    def backward(self, parameters: list[Tensor], saved: Saved, slope: Tensor, wanted: bool
                 ) -> tuple[Tensor, list[Tensor]]:
        slope = _channels_last(slope.unsqueeze(2) if self._flat else slope)
        given, weight, bias = aten.convolution_backward(
            slope, saved, self._weight(parameters), [len(parameters[0])], self._stride, self._padding,
            self._dilation, False, [0, 0], self._groups, [wanted, True, len(parameters) == 2])
        if wanted and self._flat:
            given = given.squeeze(2)
        return given if wanted else slope, [weight, bias][: len(parameters)]

    def _weight(self, parameters: list[Tensor]) -> Tensor:
        return parameters[0].unsqueeze(2) if self._flat else parameters[0]


class MaxPool(Layer):
    def __init__(self, layer: nn.MaxPool1d | nn.MaxPool2d) -> None:
        self._flat = isinstance(layer, nn.MaxPool1d)
        kernel, stride, padding, dilation = (
            (none, given) if self._flat else given if isinstance(given, tuple) else (given, given)
            for none, given in ((1, layer.kernel_size), (1, layer.stride), (0, layer.padding),
                                (1, layer.dilation)))
        self._window = (kernel, stride, padding, dilation, layer.ceil_mode)

    def forward(self, parameters: list[Tensor], x: Tensor, context: Context) -> tuple[Tensor, Saved]:
        image = _channels_last(x.unsqueeze(2) if self._flat else x)
        out, at = aten.max_pool2d_with_indices(image, *self._window)
        return out.squeeze(2) if self._flat else out, (image, at)

    def backward(self, parameters: list[Tensor], saved: Saved, slope: Tensor, wanted: bool
                 ) -> tuple[Tensor, list[Tensor]]:
        image, at = saved
        slope = _channels_last(slope.unsqueeze(2) if self._flat else slope)
        given = aten.max_pool2d_with_indices_backward(slope, image, *self._window, at)
        return given.squeeze(2) if self._flat else given, []


class Activation(Layer):
    """A function of each number alone, whose slope can be read off its value."""

    @abstractmethod
    def value(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def back(self, slope: Tensor, value: Tensor) -> Tensor: ...

    def forward(self, parameters: list[Tensor], x: Tensor, context: Context) -> tuple[Tensor, Saved]:
        value = self.value(x)
        return value, value

    def backward(self, parameters: list[Tensor], saved: Saved, slope: Tensor, wanted: bool
                 ) -> tuple[Tensor, list[Tensor]]:
        return self.back(slope, saved), []


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
        factor = dropped(context, self._layer, x)
        return (x, None) if factor is None else (x * factor, factor)

    def backward(self, parameters: list[Tensor], saved: Saved, slope: Tensor, wanted: bool
                 ) -> tuple[Tensor, list[Tensor]]:
        return slope if saved is None else slope * saved, []


class BatchNorm(Layer):
    """x^ = (x - mean) / sd over the batch, in training; over the running statistics otherwise."""

    def __init__(self, layer: nn.BatchNorm1d | nn.BatchNorm2d, name: str) -> None:
        self._layer, self._name = layer, name
        self.owns = ("weight", "bias") if layer.affine else ()

    def forward(self, parameters: list[Tensor], x: Tensor, context: Context) -> tuple[Tensor, Saved]:
        moments = moments_of_batch(context, self._name, self._layer, x)
        shape = [1, -1] + [1] * (x.dim() - 2)
        inverse = torch.rsqrt(moments.var + self._layer.eps).view(shape)
        normal = (x - moments.mean.view(shape)) * inverse
        out = normal
        if parameters:
            out = normal * parameters[0].view(shape) + parameters[1].view(shape)
        return out, (normal, inverse, moments.alone, context.weight)

    def backward(self, parameters: list[Tensor], saved: Saved, slope: Tensor, wanted: bool
                 ) -> tuple[Tensor, list[Tensor]]:
        normal, inverse, alone, weight = saved
        axes, shape = [0, *range(2, slope.dim())], [1, -1] + [1] * (slope.dim() - 2)
        # rows that only fill up have slope zero, and count neither here nor below
        found = [(slope * normal).sum(axes), slope.sum(axes)]
        count = slope.numel() // slope.shape[1]
        if weight is not None:
            rows = weight.to(slope.dtype)
            count = rows.sum() * (count // len(slope))
        # the mean and the variance of the batch move with x, but not where running ones took their place
        shift, scale = (torch.where(alone, 0.0, total / count).view(shape) for total in (found[1], found[0]))
        given = slope - shift - normal * scale
        if weight is not None:
            given = given * rows.view(-1, *[1] * (slope.dim() - 1))
        if parameters:
            inverse = inverse * parameters[0].view(shape)
        return given * inverse, found if parameters else []


class Place(NamedTuple):
    """A layer of a chain, and which of the layout's parameters are its own."""

    layer: Layer
    parameters: list[int]


@dataclass
class Chain:
    """A network of layers that are all known here."""

    layout: Layout
    places: list[Place] = field(default_factory=list)

    @classmethod
    def of(cls, module: nn.Module, layout: Layout) -> Chain | None:
        """The chain that a module is; None if it is none, or if any of its layers is not known here."""
        at = {s.name: k for k, s in enumerate(layout.parameters)}
        chain = cls(layout)
        for name, leaf in _leaves(module):
            layer = None if leaf is None else _known(leaf, name)
            if layer is None:
                return None
            own = [f"{name}.{parameter}" if name else parameter for parameter in layer.owns]
            if not {*own} <= at.keys():  # frozen, or shared with another layer
                return None
            chain.places.append(Place(layer, [at.pop(parameter) for parameter in own]))
        return None if at else chain

    def outputs(self, model: Model, x: Tensor, context: Context) -> Tensor:
        """What the network gives for samples x."""
        parameters = self.layout.parts(model.theta)
        for layer, own in self.places:
            x, _ = layer.forward([parameters[k] for k in own], x, context)
        return x

    def gradient(self, model: Model, x: Tensor, context: Context,
                 loss: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """The loss, and its gradient; `loss` gives a value and its slopes for the network's outputs."""
        parameters = self.layout.parts(model.theta)
        kept = []
        for layer, own in self.places:
            theirs = [parameters[k] for k in own]
            x, saved = layer.forward(theirs, x, context)
            kept.append((layer, own, theirs, saved))
        value, slope = loss(x)
        found: list[Tensor] = [slope] * len(parameters)
        left = len(parameters)
        for layer, own, theirs, saved in reversed(kept):
            left -= len(own)
            slope, slopes = layer.backward(theirs, saved, slope, left > 0)
            for k, each in zip(own, slopes, strict=True):
                found[k] = each
            if left == 0:  # nothing below this layer is learned
                break
        return value, torch.cat([each.reshape(-1) for each in found])


def _leaves(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module | None]]:
    """The layers of a chain in their order; None where the module does something else between them."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        yield name, None
    elif type(module) is nn.Sequential or type(module) is Network:
        for part, child in module._modules.items():
            assert child is not None
            yield from _leaves(child, f"{name}.{part}" if name else part)
    else:
        yield name, module


def _known(layer: nn.Module, name: str) -> Layer | None:
    """The layer as it is written here, if it is; subclasses may do anything."""
    kind = type(layer)
    if kind is nn.Linear:
        return Linear(layer)  # type: ignore[arg-type]
    if isinstance(layer, nn.Conv1d | nn.Conv2d) and kind in (nn.Conv1d, nn.Conv2d):
        return Convolution(layer) if layer.padding_mode == "zeros" and type(layer.padding) is tuple else None
    if isinstance(layer, nn.MaxPool1d | nn.MaxPool2d) and kind in (nn.MaxPool1d, nn.MaxPool2d):
        return None if layer.return_indices else MaxPool(layer)
    if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d) and kind in (nn.BatchNorm1d, nn.BatchNorm2d):
        return BatchNorm(layer, name)
    if isinstance(layer, nn.Dropout | nn.Dropout1d | nn.Dropout2d):
        return Dropout(layer)
    if isinstance(layer, nn.LeakyReLU) and layer.negative_slope > 0:
        return LeakyReLU(layer.negative_slope)
    if isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) == (1, -1):
        return Reshape(-1)
    if isinstance(layer, Shaped):
        return Reshape(*layer.shape)
    return _PLAIN[kind]() if kind in _PLAIN else None


_PLAIN: dict[type[nn.Module], Callable[[], Layer]] = {
    nn.ReLU: ReLU, nn.Tanh: Tanh, nn.Sigmoid: Sigmoid, nn.Identity: Identity,
}


def _channels_last(x: Tensor) -> Tensor:
    """The same images [B, C, H, W], in memory as [B, H, W, C]; a copy only where they are not."""
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)

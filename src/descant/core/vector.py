"""A model is a vector: the parameters of an `nn.Module` end to end, with named slices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from descant.errors import UsageError


class Model(NamedTuple):
    """What a client can predict with: the parameters, and the running statistics of BatchNorm and the like.

    Algorithms act on `theta`. `stats` (often of length zero) is never trained: it travels with the
    model that made it and is averaged with that model's weight; norms and proximal terms ignore it.
    """

    theta: Tensor  # [d]
    stats: Tensor  # [s]


class Slice(NamedTuple):
    """Where one parameter tensor lies in the vector, and which kinds of layer it belongs to."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    layer: tuple[str, ...]  # class names of the owning module, most specific first

    @property
    def owner(self) -> str:
        """The name of the layer it belongs to."""
        return self.name.rpartition(".")[0]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The named slices of a module's vector of parameters and of its vector of statistics.

    Parameters are those with `requires_grad`; statistics are the running means and variances of
    BatchNorm layers, and what other buffers are `written` by a forward pass in training. Frozen parameters
    and all other buffers are constants: they stay in the module.
    """

    parameters: tuple[Slice, ...]
    statistics: tuple[Slice, ...]

    @classmethod
    def of(cls, module: nn.Module, written: Collection[str] = ()) -> Layout:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if is_lazy(tensor):
                raise UsageError(f"{name!r} of the model is not initialised yet (a lazy layer): "
                                 "call the model once on a batch before handing it over")
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not trained:
            raise UsageError(f"the model {type(module).__name__} has no trainable parameters: give it some, "
                             "or call requires_grad_() on those to be trained")
        for name, parameter in trained.items():
            if not parameter.is_floating_point():
                raise UsageError(f"{name!r} of the model is of {parameter.dtype}: models are vectors of real "
                                 "numbers; make it two parameters, real and imaginary part, and put them "
                                 "together with torch.complex")
        running = {
            f"{prefix}.{name}" if prefix else name: getattr(layer, name)
            for prefix, layer in module.named_modules() if isinstance(layer, _BatchNorm)
            for name in ("running_mean", "running_var") if getattr(layer, name) is not None
        }
        running |= {name: buffer for name, buffer in module.named_buffers() if name in written}
        return cls(_slices(module, trained), _slices(module, running))

    @property
    def dim(self) -> int:
        return self.parameters[-1].stop

    @property
    def stats_dim(self) -> int:
        return self.statistics[-1].stop if self.statistics else 0

    def flatten(self, module: nn.Module, dtype: torch.dtype) -> Model:
        """The module's present parameters and statistics as a model (a copy)."""
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        parts = ([tensors[s.name].detach().reshape(-1).to(dtype) for s in slices]
                 for slices in (self.parameters, self.statistics))
        return Model(*(torch.cat(part) if part else torch.zeros(0, dtype=dtype) for part in parts))

    def load(self, module: nn.Module, model: Model) -> nn.Module:
        """Write a model into a module's own tensors; returns the module."""
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        with torch.no_grad():
            for slices, vector in ((self.parameters, model.theta), (self.statistics, model.stats)):
                for name, value in _views(slices, vector).items():
                    tensors[name].copy_(value)
        return module

    def running(self, stats: Tensor) -> dict[str, Tensor]:
        """The running statistics of a vector, by their names; there may be leading axes, of clients."""
        return _views(self.statistics, stats)

    def views(self, model: Model) -> dict[str, Tensor]:
        """The parameters and statistics of a model under their names in the module."""
        return _views(self.parameters, model.theta) | _views(self.statistics, model.stats)

    @property
    def last_layer(self) -> str:
        """The name of the last layer with parameters: the head, unless somebody says otherwise."""
        return self.parameters[-1].owner

    def head(self) -> Tensor:
        """Which coordinates of `theta` belong to the last layer with parameters: bool [d]. They come last."""
        start = next(s.start for s in self.parameters if s.owner == self.last_layer)
        return torch.arange(self.dim) >= start


def cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module itself, its numbers in this precision. `module.to` would drop imaginary parts."""
    def converted(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return tensor.to(dtype)
        return tensor.to(dtype.to_complex()) if tensor.is_complex() else tensor

    module._apply(converted)
    return module


def _slices(module: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[Slice, ...]:
    slices, start = [], 0
    for name, tensor in tensors.items():
        owner = module.get_submodule(name.rpartition(".")[0])
        layer = tuple(c.__name__ for c in type(owner).__mro__ if c not in (nn.Module, object))
        slices.append(Slice(name, tuple(tensor.shape), start, start + tensor.numel(), layer))
        start += tensor.numel()
    return tuple(slices)


def _views(slices: tuple[Slice, ...], vector: Tensor) -> dict[str, Tensor]:
    # one split, not many slices: its backward pass is a single concatenation
    parts = vector.split([math.prod(s.shape) for s in slices], -1) if slices else ()
    return {s.name: part.view((*part.shape[:-1], *s.shape)) for s, part in zip(slices, parts, strict=True)}

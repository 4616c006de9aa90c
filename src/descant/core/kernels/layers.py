"""BatchNorm and Dropout, whose forward pass is not a function of one sample alone.

In BatchNorm the padding of a short batch must not count. Dropout must draw from the stream of (seed, round,
client, step). In descant's private copy of a module these layers get another `forward`, which reads a
`Context`. A subclass with a `forward` of its own keeps it (see `calls.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from descant.core import random
from descant.core.kernels.lift import is_transformed
from descant.errors import UsageError


class Context:
    """What the layers of a module know about the batch, and the statistics that they return."""

    def __init__(self) -> None:
        self.kept: set[str] = set()  # the statistics that layers return, not write
        self.draws_needed = False  # whether any layer draws random numbers
        self.asked = False  # whether `calls.py` ever replaced a function of torch
        self._set(None, None, {})

    @contextmanager
    def of_pass(self, weight: Tensor | None, key: Tensor | None, stats: dict[str, Tensor]
                ) -> Iterator[Context]:
        """For one forward pass: which rows count ([B] bool, None: all), the random key, and the running
        statistics by name, which the layers update."""
        self._set(weight, key, stats)
        try:
            yield self
        finally:
            self._set(None, None, {})  # keep no tensor of a vmap

    def _set(self, weight: Tensor | None, key: Tensor | None, stats: dict[str, Tensor]) -> None:
        self.weight = weight
        self.key = key
        self.draws = 0
        self.stats = stats

    def next_key(self) -> Tensor:
        """The key of the next draw of this pass."""
        assert self.key is not None
        self.draws_needed = True
        self.draws += 1
        return random.fold(self.key, self.draws - 1)

    def rows(self, x: Tensor, lead: int = 0) -> Tensor | None:
        """Which rows of x [..., B, ...] count; None: all of them."""
        if self.weight is None or self.weight.shape[lead] == x.shape[lead]:
            return self.weight
        if not is_transformed(self.weight) and bool(self.weight.all()):
            return None
        raise ValueError(f"BatchNorm sees {x.shape[lead]} rows of a batch of {self.weight.shape[lead]}, some "
                         "of which are padding: which, is not known")


def runs_own(layer: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether calling a layer runs torch's own forward pass of one of these classes."""
    return (isinstance(layer, kinds) and "forward" not in vars(layer)
            and type(layer).__call__ is nn.Module.__call__
            and any(type(layer).forward is kind.forward for kind in kinds))


def rewire(module: nn.Module) -> Context:
    """Prepare a module (a private copy) for training; returns the context its layers read."""
    context = Context()
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm):
            if not layer.track_running_stats or layer.momentum is None:
                raise UsageError(f"layer {name!r}: BatchNorm needs track_running_stats=True and a "
                                 "momentum; without, predictions depend on who else is in the batch")
            if runs_own(layer, _BatchNorm, nn.SyncBatchNorm):
                context.kept |= {*_running(name)}
                layer.forward = partial(_batch_norm, context, name, layer)  # type: ignore[method-assign]
        elif runs_own(layer, *DROPOUTS):
            assert isinstance(layer, _DropoutNd)
            layer.forward = partial(_dropout, context, layer)
            context.draws_needed = True
    return context


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def _running(name: str) -> list[str]:
    """The names of a layer's running statistics."""
    return [f"{name}.{part}" if name else part for part in ("running_mean", "running_var")]


class Moments(NamedTuple):
    """The moments that normalise a batch."""

    mean: Tensor  # [channels]
    var: Tensor  # [channels]
    alone: Tensor  # [..., 1] whether these are the running ones


def moments_of_batch(context: Context, name: str, layer: _BatchNorm, x: Tensor, lead: int = 0) -> Moments:
    """In training, the moments of a batch [B, channels, ...], which update the running ones; else the running
    ones. `lead` axes of clients may come first."""
    # a second call of a layer starts from the statistics of the first
    mean0, var0 = (context.stats[key] for key in _running(name))
    if not layer.training:
        return Moments(mean0, var0, torch.tensor(True))
    assert layer.momentum is not None
    found, *moved = _moved(x, context.rows(x, lead), mean0, var0, layer.momentum, lead)
    context.stats |= zip(_running(name), moved, strict=True)
    return found


def _moved(x: Tensor, rows: Tensor | None, mean0: Tensor, var0: Tensor, momentum: float, lead: int
           ) -> tuple[Moments, Tensor, Tensor]:
    """The moments that normalise a batch, and the running mean and variance after it."""
    count, mean, var = _moments(x, rows, lead)
    # one value has no variance: the running statistics normalise it and stay as they are
    alone = count <= 1
    share = torch.where(alone, 0.0, torch.as_tensor(momentum, dtype=x.dtype))
    unbiased = var.detach() * count / (count - 1).clamp(min=1)
    return (Moments(torch.where(alone, mean0, mean), torch.where(alone, var0, var), alone),
            torch.lerp(mean0, mean.detach(), share), torch.lerp(var0, unbiased, share))


def _batch_norm(context: Context, name: str, layer: _BatchNorm, x: Tensor) -> Tensor:
    x = x.to(context.stats[_running(name)[0]].dtype)  # autocast may have shortened it
    mean, var, _ = moments_of_batch(context, name, layer, x)
    if not layer.training:
        return F.batch_norm(x, mean, var, layer.weight, layer.bias, False, 0.0, layer.eps)
    return _normalised(x, context.rows(x), mean, var, layer.weight, layer.bias, layer.eps)


def _normalised(x: Tensor, rows: Tensor | None, mean: Tensor, var: Tensor, weight: Tensor | None,
                bias: Tensor | None, eps: float) -> Tensor:
    """A batch in training, by its own moments."""
    if rows is None and len(x) > 1:
        return F.batch_norm(x, None, None, weight, bias, True, 0.0, eps)
    shape = [1, -1] + [1] * (x.dim() - 2)
    out = (x - mean.view(shape)) * torch.rsqrt(var + eps).view(shape)
    if weight is not None:
        out = out * weight.view(shape)
    return out if bias is None else out + bias.view(shape)


def batch_norm(context: Context, x: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
               weight: Tensor | None = None, bias: Tensor | None = None, training: bool = False,
               momentum: float = 0.1, eps: float = 1e-5) -> Any:
    """`F.batch_norm` of the rows that count; it writes into the running statistics, as torch's does."""
    rows = context.rows(x) if training else None
    if running_mean is not None:
        x = x.to(running_mean.dtype)  # autocast may have shortened it
    if not training or (running_mean is None and rows is None and len(x) > 1):
        return NotImplemented
    mean0 = x.new_zeros(x.shape[1]) if running_mean is None else running_mean
    var0 = x.new_ones(x.shape[1]) if running_var is None else running_var
    found, *moved = _moved(x, rows, mean0, var0, momentum, 0)
    for running, value in zip((running_mean, running_var), moved, strict=True):
        if running is not None:
            running.copy_(value)
    return _normalised(x, rows, found.mean, found.var, weight, bias, eps)


def _moments(x: Tensor, weight: Tensor | None, lead: int) -> tuple[Tensor, Tensor, Tensor]:
    """How many values a channel has [..., 1], their mean and their (biased) variance [..., channels]."""
    axes = [lead, *range(lead + 2, x.dim())]  # all but the clients and the channels
    values = x[(0,) * (lead + 2)].numel()
    if weight is None:
        var, mean = torch.var_mean(x, dim=axes, correction=0)
        return torch.tensor([x.shape[lead] * values], dtype=x.dtype), mean, var
    rows = weight.to(x.dtype)
    count = rows.sum(lead, keepdim=True) * values
    rows = rows.view(*rows.shape, *[1] * (x.dim() - lead - 1))
    mean = (x * rows).sum(axes) / count.clamp(min=1)
    centre = mean.unsqueeze(lead).reshape(*mean.shape[:lead], 1, -1, *[1] * (x.dim() - lead - 2))
    return count, mean, ((x - centre) * rows).square().sum(axes) / count.clamp(min=1)


def dropped(context: Context, layer: _DropoutNd, x: Tensor, lead: int = 0) -> Tensor | None:
    """The factor of x, 0 for what is dropped; None if nothing is. Each client of `lead` axes has its own
    key."""
    if not layer.training or layer.p == 0 or context.key is None:
        return None
    sides = next(k for k, kind in enumerate(DROPOUTS) if isinstance(layer, kind))
    return drop_factor(context, x, layer.p, sides, lead)


def drop_factor(context: Context, x: Tensor, p: float, sides: int, lead: int = 0) -> Tensor:
    """0 with probability p, and 1 / (1 - p) otherwise: for single values (no sides), or for whole channels
    with so many sides."""
    shape = x.shape[lead:]
    if sides:
        # torch takes what has one axis less for one sample [C, ...], but not so in two dimensions
        own = 1 if sides != 2 and len(shape) == sides + 1 else 2
        shape = shape[:own] + (1,) * (len(shape) - own)
    exact = x.dtype if x.dtype == torch.float64 else torch.float32  # bfloat16 would round chances
    keep = random.uniform(context.next_key(), tuple(shape), exact) >= p
    return keep.to(x.dtype) / (1 - p) if p < 1 else torch.zeros_like(keep, dtype=x.dtype)


def _dropout(context: Context, layer: _DropoutNd, x: Tensor) -> Tensor:
    factor = dropped(context, layer, x)
    if factor is None:
        return x
    return x.mul_(factor) if layer.inplace else x * factor

"""The layers whose forward pass is not a function of one sample alone: BatchNorm and Dropout.

BatchNorm looks at the whole batch, so rows that only fill up a short batch must not count. Dropout
draws random numbers, which must come from the stream of (seed, round, client, step). Both are made
right by giving the layers of descant's private copy of a module another `forward`, which reads what
it needs from a `Context`. Everything else runs as the user wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from descant import random
from descant.errors import UsageError


class Context:
    """What the layers of a module are told about the batch, and what they tell back."""

    def __init__(self) -> None:
        self.draws_needed = False  # whether any layer draws random numbers
        self._set(None, None, {})

    @contextmanager
    def of_pass(self, weight: Tensor | None, key: Tensor | None, stats: dict[str, Tensor]
                ) -> Iterator[Context]:
        """For one forward pass: which rows count ([B] bool, None for all), the random key, and the running
        statistics by name, which the layers replace by new ones."""
        self._set(weight, key, stats)
        try:
            yield self
        finally:
            self._set(None, None, {})  # hold on to nothing that lives inside vmap

    def _set(self, weight: Tensor | None, key: Tensor | None, stats: dict[str, Tensor]) -> None:
        self.weight = weight
        self.key = key
        self.draws = 0
        self.stats = stats


def rewire(module: nn.Module) -> Context:
    """Prepare a module (a private copy) for training; returns the context its layers read."""
    context = Context()
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm):
            if not layer.track_running_stats or layer.momentum is None:
                raise UsageError(f"layer {name!r}: BatchNorm needs track_running_stats=True and a "
                                 "momentum; without, predictions depend on who else is in the batch")
            layer.forward = partial(_batch_norm, context, name, layer)  # type: ignore[method-assign]
        elif isinstance(layer, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
            layer.forward = partial(_dropout, context, layer)  # type: ignore[method-assign]
            context.draws_needed = True
        elif isinstance(layer, _InstanceNorm) and layer.track_running_stats:
            raise UsageError(f"layer {name!r}: use InstanceNorm without track_running_stats")
        elif isinstance(layer, _DropoutNd) or _has_hidden_dropout(layer):
            raise UsageError(f"layer {name!r}: {type(layer).__name__} draws random numbers that cannot "
                             "be repeated per client; set its dropout to 0 and use nn.Dropout layers")
    return context


def _has_hidden_dropout(layer: nn.Module) -> bool:
    return isinstance(layer, nn.RNNBase | nn.MultiheadAttention) and layer.dropout > 0


class Moments(NamedTuple):
    """What a batch is normalised by."""

    mean: Tensor  # [channels]
    var: Tensor  # [channels]
    alone: Tensor  # [..., 1] whether these are the running ones


def moments_of_batch(context: Context, name: str, layer: _BatchNorm, x: Tensor, lead: int = 0) -> Moments:
    """The mean and variance of a batch [B, channels, ...] in training, which move the running ones; else
    the running ones. There may be leading axes, of clients."""
    names = [f"{name}.{part}" if name else part for part in ("running_mean", "running_var")]
    # a layer that is called again goes on from where its last call left the statistics
    mean0, var0 = (context.stats[key] for key in names)
    if not layer.training:
        return Moments(mean0, var0, torch.tensor(True))
    count, mean, var = _moments(x, context.weight, lead)
    # One value has no variance: it is normalised by the running statistics and leaves them alone.
    alone = count <= 1
    momentum = torch.where(alone, 0.0, torch.as_tensor(layer.momentum, dtype=x.dtype))
    unbiased = var.detach() * count / (count - 1).clamp(min=1)
    context.stats |= {names[0]: torch.lerp(mean0, mean.detach(), momentum),
                      names[1]: torch.lerp(var0, unbiased, momentum)}
    return Moments(torch.where(alone, mean0, mean), torch.where(alone, var0, var), alone)


def _batch_norm(context: Context, name: str, layer: _BatchNorm, x: Tensor) -> Tensor:
    mean, var, _ = moments_of_batch(context, name, layer, x)
    if not layer.training:
        return F.batch_norm(x, mean, var, layer.weight, layer.bias, False, 0.0, layer.eps)
    if context.weight is None and len(x) > 1:
        return F.batch_norm(x, None, None, layer.weight, layer.bias, True, 0.0, layer.eps)
    shape = [1, -1] + [1] * (x.dim() - 2)
    out = (x - mean.view(shape)) * torch.rsqrt(var + layer.eps).view(shape)
    if layer.weight is not None:
        out = out * layer.weight.view(shape) + layer.bias.view(shape)
    return out


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
    """What x is multiplied with: 0 for what is dropped; None where nothing is. There may be leading axes, of
    clients, each with a key of its own."""
    if not layer.training or layer.p == 0 or context.key is None:
        return None
    # Dropout drops single values; Dropout1d/2d/3d drop whole channels [B, C, ...]
    shape = x.shape[lead:]
    if type(layer) is not nn.Dropout:
        shape = shape[:2] + (1,) * (len(shape) - 2)
    key = random.fold(context.key, context.draws)
    context.draws += 1
    keep = random.uniform(key, tuple(shape), x.dtype) >= layer.p
    return keep.to(x.dtype) / (1 - layer.p) if layer.p < 1 else torch.zeros_like(keep, dtype=x.dtype)


def _dropout(context: Context, layer: _DropoutNd, x: Tensor) -> Tensor:
    factor = dropped(context, layer, x)
    return x if factor is None else x * factor

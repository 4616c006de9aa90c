"""Stacks of convolutions from a plan of `Conv` and `Pool`, and the smallest samples that fit them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from torch import nn

from descant.core.kernels.network import Shaped
from descant.core.sample import SampleFormat
from descant.errors import UsageError
from descant.models.base import require_numbers


class Conv(NamedTuple):
    """A convolution, BatchNorm if asked for, and ReLU."""

    channels: int
    kernel: int
    padding: int = 0
    stride: int = 1
    norm: bool = False


class Pool(NamedTuple):
    """The maximum over a window."""

    kernel: int = 2
    stride: int = 2
    padding: int = 0


Plan: TypeAlias = Sequence[Conv | Pool]
COLOURS = (1, 3, 4)  # channels of an image

_LAYERS: dict[int, tuple[type[nn.Module], type[nn.Module], type[nn.Module]]] = {
    1: (nn.Conv1d, nn.BatchNorm1d, nn.MaxPool1d),
    2: (nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d),
}


def convolutions(sample: SampleFormat, model: str, plan: Plan, rank: int = 2
                 ) -> tuple[list[nn.Module], tuple[int, ...]]:
    """The layers of a plan for images (rank 2) or series (rank 1), and the shape of their features."""
    channels, *sides = series_shape(sample, model) if rank == 1 else image_shape(sample, model)
    after = [_through(side, plan) for side in sides]
    if 0 in after:
        least = next(side for side in itertools.count(1) if _through(side, plan))
        raise UsageError(f"model {model!r} needs {'images' if rank == 2 else 'series'} of at least "
                         f"{_by(rank * [least])}, not {_by(sides)}")
    convolution, norm, pool = _LAYERS[rank]
    layers: list[nn.Module] = [Shaped(channels, *sides)]
    for part in plan:
        if isinstance(part, Pool):
            layers.append(pool(part.kernel, part.stride, part.padding))
            continue
        layers.append(convolution(channels, part.channels, part.kernel, part.stride, part.padding))
        layers += [norm(part.channels)] if part.norm else []
        layers.append(nn.ReLU())
        channels = part.channels
    return layers, (channels, *after)


def image_shape(sample: SampleFormat, model: str) -> tuple[int, int, int]:
    """Channels, height and width of the samples; without channels they are grey."""
    require_numbers(sample, model)
    shape = sample.shape
    if len(shape) == 2:
        return 1, shape[0], shape[1]
    if len(shape) == 3 and (shape[0] in COLOURS or shape[2] not in COLOURS):  # else they are surely last
        return shape[0], shape[1], shape[2]
    raise UsageError(f"model {model!r} needs images of shape (channels, height, width), not samples of "
                     f"shape {shape}{_advice(shape)}")


def series_shape(sample: SampleFormat, model: str) -> tuple[int, int]:
    """Channels and length of the samples."""
    require_numbers(sample, model)
    if len(sample.shape) != 2:
        raise UsageError(f"model {model!r} needs series of shape (channels, time), such as (9, 128), not "
                         f"samples of shape {sample.shape}")
    return sample.shape[0], sample.shape[1]


def _advice(shape: tuple[int, ...]) -> str:
    """How samples of a wrong shape could become images."""
    if len(shape) == 3:
        height, width, channels = shape
        return f": channels come first, so permute x to (n, {channels}, {height}, {width})"
    if len(shape) != 1:
        return ""
    for channels in (1, 3):
        side = math.isqrt(shape[0] // channels)
        if side > 1 and channels * side**2 == shape[0]:
            return (f": {shape[0]} flat numbers are not an image; if they were one, reshape x to "
                    f"(n, {channels}, {side}, {side}), else use a model such as \"dnn\"")
    return ': flat numbers are not an image; use a model such as "dnn"'


def _through(side: int, plan: Plan) -> int:
    """How long a side is after the plan; 0 where a window does not fit."""
    for part in plan:
        side = (side + 2 * part.padding - part.kernel) // part.stride + 1
        if side < 1:
            return 0
    return side


def _by(sides: Sequence[int]) -> str:
    return "x".join(map(str, sides)) if len(sides) > 1 else f"{sides[0]} steps"

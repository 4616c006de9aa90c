"""The residual network `resnet18`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn

from descant.core.fields import hyper
from descant.core.kernels.network import Network, Shaped
from descant.core.sample import SampleFormat
from descant.models.base import NetworkSpec
from descant.models.convolution import image_shape

Norm: TypeAlias = Literal["batch", "group"]
SMALL = 64  # pixels; images with a shorter side keep their size until the second stage


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = norm(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


def resnet(sample: SampleFormat, model: str, norm: Norm, widths: tuple[int, ...]) -> Network:
    """Two blocks for each width; from one width to the next, images halve."""
    channels, height, width = image_shape(sample, model)
    normalised = nn.BatchNorm2d if norm == "batch" else _group_norm
    first = widths[0]
    layers: list[nn.Module] = [Shaped(channels, height, width)]
    if min(height, width) < SMALL:
        layers += [nn.Conv2d(channels, first, 3, 1, 1, bias=False), normalised(first), nn.ReLU()]
    else:
        layers += [nn.Conv2d(channels, first, 7, 2, 3, bias=False), normalised(first), nn.ReLU(),
                   nn.MaxPool2d(3, 2, 1)]
    for stage, (inputs, outputs) in enumerate(zip((first, *widths), widths, strict=False)):
        layers += [Block(inputs, outputs, 1 if stage == 0 else 2, normalised),
                   Block(outputs, outputs, 1, normalised)]
    body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Network(body, nn.Linear(widths[-1], sample.outputs))


def _group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(math.gcd(32, channels), channels)


@dataclass(frozen=True)
class ResNet18(NetworkSpec):
    """ResNet-18, the model of pFedGT on CIFAR-10 and CIFAR-100.

    The paper gives the name. Images with a side below 64 pixels get the stem that is usual for CIFAR
    (a 3x3 convolution and no pooling: 11,173,962 parameters for 10 classes), larger ones that of the
    original (K. He et al., CVPR 2016). GroupNorm has 32 groups, as in Y. Wu and K. He, ECCV 2018.
    """

    name: ClassVar[str] = "resnet18"

    norm: Norm = hyper("batch", "BatchNorm, or GroupNorm, which has no running statistics")

    def network(self, sample: SampleFormat) -> nn.Module:
        return resnet(sample, self.name, self.norm, (64, 128, 256, 512))

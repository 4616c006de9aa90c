"""Convolutions, then linear layers: the CNNs of the papers for images, and the one for series."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from descant.core.fields import hyper
from descant.core.kernels.network import Network, dense
from descant.core.sample import SampleFormat
from descant.models.base import NetworkSpec
from descant.models.convolution import Conv, Plan, Pool, convolutions


def _cnn(sample: SampleFormat, model: str, plan: Plan, *hidden: int, rank: int = 2,
         norm: bool = False, dropout: float = 0.0) -> Network:
    layers, shape = convolutions(sample, model, plan, rank)
    widths = (math.prod(shape), *hidden)
    body = nn.Sequential(*layers, nn.Flatten(), *dense(widths, norm=norm, dropout=dropout))
    return Network(body, nn.Linear(widths[-1], sample.outputs))


@dataclass(frozen=True)
class CNN2(NetworkSpec):
    """Two convolutions and a hidden layer: the usual small CNN, for one-stage FedProx on MNIST.

    The paper says that there are two convolutions. The sizes are those of the CNN that federated
    learning is mostly tried with: 5x5, 32 and 64 channels, each with ReLU and 2x2 pooling, then 512
    units; 582,026 parameters on 28x28 pixels and 10 classes. The paper's published code has
    `kernel = 3`, `padding = 1` and `hidden = 128` instead.
    """

    name: ClassVar[str] = "cnn2"

    kernel: int = hyper(5, "side of the convolutions' windows", ge=1)
    padding: int = hyper(0, "rows and columns of zeros on each side", ge=0)
    hidden: int = hyper(512, "width of the hidden layer", ge=1)

    def network(self, sample: SampleFormat) -> nn.Module:
        plan = [part for channels in (32, 64)
                for part in (Conv(channels, self.kernel, self.padding), Pool())]
        return _cnn(sample, self.name, plan, self.hidden)


@dataclass(frozen=True)
class CNN3(NetworkSpec):
    """Three convolutions and a hidden layer, for one-stage FedProx on CIFAR-10.

    The paper says that there are three convolutions. The rest is our choice and continues its
    published network with two: 3x3 with 32, 64 and 128 channels, 2x2 pooling after each, then 128 units.
    """

    name: ClassVar[str] = "cnn3"

    def network(self, sample: SampleFormat) -> nn.Module:
        plan = [part for channels in (32, 64, 128) for part in (Conv(channels, 3, 1), Pool())]
        return _cnn(sample, self.name, plan, 128)


@dataclass(frozen=True)
class CNN5(NetworkSpec):
    """Five convolutions and a hidden layer, for one-stage FedProx on MNIST and EMNIST.

    The paper says that there are five convolutions. The rest is our choice and continues its published
    network with two: 3x3 with 32, 32, 64, 64 and 128 channels, 2x2 pooling after the second, fourth and
    fifth, then 128 units.
    """

    name: ClassVar[str] = "cnn5"

    def network(self, sample: SampleFormat) -> nn.Module:
        plan: Plan = [Conv(32, 3, 1), Conv(32, 3, 1), Pool(), Conv(64, 3, 1), Conv(64, 3, 1), Pool(),
                      Conv(128, 3, 1), Pool()]
        return _cnn(sample, self.name, plan, 128)


@dataclass(frozen=True)
class CifarNet(NetworkSpec):
    """Two convolutions and two hidden layers, the model of pFedBreD on CIFAR-10.

    The paper names CifarNet (Hosang et al., CVPR 2015) without its sizes. These are those of its
    published code, which are pFedMe's too: 5x5, 6 and 16 channels, 2x2 pooling, then 120 and 84 units.
    """

    name: ClassVar[str] = "cifarnet"

    def network(self, sample: SampleFormat) -> nn.Module:
        return _cnn(sample, self.name, [Conv(6, 5), Pool(), Conv(16, 5), Pool()], 120, 84)


@dataclass(frozen=True)
class CGPFLCNN(NetworkSpec):
    """Two convolutions and two linear layers, the model of CGPFL on CIFAR-10.

    The paper gives the layers without their sizes. Our choice: 5x5 with 32 and 64 channels and 2x2
    pooling, as in FedAvg's CNN, and 128 units, as in the paper's own hidden layer for other data.
    """

    name: ClassVar[str] = "cgpfl_cnn"

    def network(self, sample: SampleFormat) -> nn.Module:
        return _cnn(sample, self.name, [Conv(32, 5), Pool(), Conv(64, 5), Pool()], 128)


@dataclass(frozen=True)
class FEMNISTCNN(NetworkSpec):
    """The CNN of the LEAF benchmark for FEMNIST: two 5x5 convolutions and 2048 units.

    32 and 64 channels, padded so that only the 2x2 pooling makes images smaller; 6,603,710 parameters
    on 28x28 pixels and 62 classes. (S. Caldas et al.: LEAF, arXiv:1812.01097.)
    """

    name: ClassVar[str] = "femnist_cnn"

    def network(self, sample: SampleFormat) -> nn.Module:
        return _cnn(sample, self.name, [Conv(32, 5, 2), Pool(), Conv(64, 5, 2), Pool()], 2048)


@dataclass(frozen=True)
class FedMAPCNN(NetworkSpec):
    """Four convolutions with BatchNorm, 512 units with Dropout: FedMAP on FEMNIST (Table 7)."""

    name: ClassVar[str] = "fedmap_cnn"

    def network(self, sample: SampleFormat) -> nn.Module:
        plan: Plan = [Conv(32, 3, 1, norm=True), Conv(64, 3, 1, norm=True), Pool(),
                      Conv(64, 3, 1, norm=True), Conv(128, 3, 1, norm=True), Pool()]
        return _cnn(sample, self.name, plan, 512, norm=True, dropout=0.5)


@dataclass(frozen=True)
class HARCNN(NetworkSpec):
    """Two convolutions over time, for human activity recognition in pFedGT: samples (9, 128).

    The paper says that there are two convolutions. The sizes are those of PFLlib's network for these
    data: windows of 9 steps with 32 and 64 channels, pooling by 2 after each, then 1024 and 512 units.
    """

    name: ClassVar[str] = "har_cnn"

    def network(self, sample: SampleFormat) -> nn.Module:
        return _cnn(sample, self.name, [Conv(32, 9), Pool(), Conv(64, 9), Pool()], 1024, 512, rank=1)

"""Networks of linear layers: `mclr`, `dnn`, `mlp128` and `fedmap_mlp`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import nn

from descant.core.fields import hyper
from descant.core.kernels.network import Network, dense
from descant.core.sample import SampleFormat
from descant.models.base import NetworkSpec, require_numbers


def _perceptron(sample: SampleFormat, model: str, *hidden: int,
                activation: Callable[[], nn.Module] = nn.ReLU) -> Network:
    """Hidden layers on the flattened sample."""
    require_numbers(sample, model)
    widths = (math.prod(sample.shape), *hidden)
    body = nn.Sequential(nn.Flatten(), *dense(widths, activation=activation))
    return Network(body, nn.Linear(widths[-1], sample.outputs))


@dataclass(frozen=True)
class MCLR(NetworkSpec):
    """Multinomial logistic regression (softmax regression; linear regression on real targets)."""

    name: ClassVar[str] = "mclr"

    def network(self, sample: SampleFormat) -> nn.Module:
        return _perceptron(sample, self.name)


@dataclass(frozen=True)
class DNN(NetworkSpec):
    """One hidden layer with leaky ReLU, as in the experiments of pFedMe and pFedBreD.

    The papers do not give the slope; the code of pFedBreD has 0.1.
    """

    name: ClassVar[str] = "dnn"

    hidden: int = hyper(100, "width of the hidden layer", ge=1)
    slope: float = hyper(0.01, "slope of the leaky ReLU below zero", gt=0, lt=1)

    def network(self, sample: SampleFormat) -> nn.Module:
        return _perceptron(sample, self.name, self.hidden, activation=partial(nn.LeakyReLU, self.slope))


@dataclass(frozen=True)
class MLP128(NetworkSpec):
    """One hidden layer of 128 units, the non-convex model of CGPFL on MNIST and Fashion-MNIST.

    The width is the paper's; it does not name the activation, ReLU is our choice.
    """

    name: ClassVar[str] = "mlp128"

    def network(self, sample: SampleFormat) -> nn.Module:
        return _perceptron(sample, self.name, 128)


@dataclass(frozen=True)
class FedMAPMLP(NetworkSpec):
    """Hidden layers of 32 and 16 units, the model of FedMAP on its synthetic data (Table 3).

    The table ends in one unit and a sigmoid. That is what `loss = "binary_cross_entropy"` gives here:
    one output, and the sigmoid as part of the loss. With cross-entropy there is an output per class.
    """

    name: ClassVar[str] = "fedmap_mlp"

    def network(self, sample: SampleFormat) -> nn.Module:
        return _perceptron(sample, self.name, 32, 16)

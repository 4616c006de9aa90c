"""Networks of linear layers: `mclr` and `dnn`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from descant.fields import hyper
from descant.models.base import NetworkSpec


class _Network(nn.Module):
    def __init__(self, body: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x.flatten(1)))
        return out


@dataclass(frozen=True)
class MCLR(NetworkSpec):
    """Multinomial logistic regression (softmax regression; linear regression on real targets)."""

    name: ClassVar[str] = "mclr"

    def network(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        return _Network(nn.Identity(), nn.Linear(math.prod(shape), outputs))


@dataclass(frozen=True)
class DNN(NetworkSpec):
    """One hidden layer with leaky ReLU, as in the experiments of pFedMe and pFedBreD."""

    name: ClassVar[str] = "dnn"

    hidden: int = hyper(100, "width of the hidden layer", low=1)

    def network(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        body = nn.Sequential(nn.Linear(math.prod(shape), self.hidden), nn.LeakyReLU())
        return _Network(body, nn.Linear(self.hidden, outputs))

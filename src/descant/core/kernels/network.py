"""Networks as a body that makes features and a linear head."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

from torch import Tensor, nn


class Network(nn.Module):
    """`head(body(x))`, so that "head" and "body" name the two parts of the vector of parameters."""

    def __init__(self, body: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


class Shaped(nn.Module):
    """Samples in a given shape: a grey image gets its one channel."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), *self.shape)


def dense(widths: Iterable[int], *, norm: bool = False, dropout: float = 0.0,
          activation: Callable[[], nn.Module] = nn.ReLU) -> list[nn.Module]:
    """Linear layers from each width to the next, with what follows each of them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs)]
        layers += [nn.BatchNorm1d(outputs)] if norm else []
        layers += [activation()]
        layers += [nn.Dropout(dropout)] if dropout else []
    return layers

"""The named losses: of each sample, and their derivatives by the outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

LossName: TypeAlias = Literal["cross_entropy", "binary_cross_entropy", "mse"]
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]  # (outputs [B, ...], targets) -> losses [B]


class LossSlopes(NamedTuple):
    """The losses of the samples of some clients, with their derivatives."""

    losses: Tensor  # [clients, B]
    slopes: Tensor  # [clients, B, ...] by the sample's own outputs


def _cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    # not F.cross_entropy, which vmap takes apart in Python
    losses = -torch.log_softmax(outputs, 1).gather(1, y.unsqueeze(1)).squeeze(1)
    return losses if losses.dim() == 1 else losses.flatten(1).mean(1)  # sequences: mean over positions


@lru_cache(1024)  # the shapes of a chunk whose clients end one after the other
def _minus_one(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), -1.0, dtype=dtype, device=device).expand(shape)


def _sloped_cross_entropy(outputs: Tensor, y: Tensor) -> LossSlopes:
    # over classes that do not lie side by side it is several times faster, and linear layers leave them so
    is_plain = outputs.dim() == 3
    axis = 1 if is_plain else 2
    log_p, at = torch.log_softmax(outputs.mT if is_plain else outputs, axis), y.unsqueeze(axis)
    losses = log_p.gather(axis, at).neg_().squeeze(axis)
    # p - (1 at y)
    slopes = log_p.exp_().scatter_add_(axis, at, _minus_one(at.shape, log_p.dtype, log_p.device))
    if is_plain:
        return LossSlopes(losses, slopes.mT)
    return LossSlopes(losses.flatten(2).mean(2), slopes / losses[0, 0].numel())


def _binary_cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(outputs.reshape(y.shape), y.to(outputs.dtype), reduction="none")


def _sloped_binary_cross_entropy(outputs: Tensor, y: Tensor) -> LossSlopes:
    y = y.to(outputs.dtype)
    losses = F.binary_cross_entropy_with_logits(outputs.reshape(y.shape), y, reduction="none")
    return LossSlopes(losses, torch.sigmoid(outputs) - y.reshape(outputs.shape))


def _mse(outputs: Tensor, y: Tensor) -> Tensor:
    error = outputs.reshape(y.shape) - y
    return error.square() if error.dim() == 1 else error.square().flatten(1).mean(1)


def _sloped_mse(outputs: Tensor, y: Tensor) -> LossSlopes:
    error = outputs - y.reshape(outputs.shape)
    return LossSlopes(error.square().flatten(2).mean(2) if error.dim() > 2 else error.square(),
                  error * (2 / error[0, 0].numel()))


LOSSES: dict[str, Loss] = {
    "cross_entropy": _cross_entropy,
    "binary_cross_entropy": _binary_cross_entropy,
    "mse": _mse,
}
SLOPED: dict[str, Callable[[Tensor, Tensor], LossSlopes]] = {  # of several clients
    "cross_entropy": _sloped_cross_entropy,
    "binary_cross_entropy": _sloped_binary_cross_entropy,
    "mse": _sloped_mse,
}


class Weighted:
    """A named loss of classes in which the rows of a class count as often as its weight says; with the mean
    over the rows, not over the weights, as torch has it with `reduction="none"`."""

    def __init__(self, name: LossName, weights: Sequence[float]) -> None:
        self._name, self._weights = name, torch.tensor(weights, dtype=torch.float64)

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        losses = LOSSES[self._name](outputs, y)
        return losses * self._of(y, losses)

    def sloped(self, outputs: Tensor, y: Tensor) -> LossSlopes:
        losses, slopes = SLOPED[self._name](outputs, y)
        weights = self._of(y, losses)
        of_outputs = weights.reshape(*y.shape, *[1] * (slopes.dim() - y.dim()))
        return LossSlopes(losses * weights, slopes * of_outputs)

    def _of(self, y: Tensor, losses: Tensor) -> Tensor:
        return self._weights.to(losses)[y.long()]


def default_loss(classes: int | None) -> LossName:
    """The usual loss for class numbers, or for real targets."""
    return "mse" if classes is None else "cross_entropy"

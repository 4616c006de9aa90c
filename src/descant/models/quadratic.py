"""The model of the `quadratics` federation: a vector, and a quadratic bowl for each sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from descant.core.federation import Federation
from descant.core.task import Batch, FunctionTask, Gradient, Task
from descant.core.vector import Model
from descant.errors import UsageError
from descant.models.base import TaskSpec


def quadratic_losses(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """(theta - a)' H (theta - a) / 2 for each sample x = H [n, d, d], y = a [n, d]."""
    gap = theta - y
    return torch.einsum("ni,nij,nj->n", gap, x, gap) / 2


class QuadraticTask(FunctionTask):
    """Its gradient is (H + H') (theta - a) / 2 for each sample: autograd would take most of a run's time."""

    def __init__(self, theta0: Tensor) -> None:
        super().__init__(quadratic_losses, theta0)

    def _gradient(self, model: Model, batch: Batch) -> Gradient:
        gap = model.theta - batch.y
        slopes = ((batch.x + batch.x.mT) / 2 @ gap.unsqueeze(-1)).squeeze(-1)
        rows = torch.cat([(gap * slopes).sum(-1, keepdim=True) / 2, slopes], -1)
        if batch.weight is None:
            mean = rows.mean(0)
        else:
            mean = rows.where(batch.weight.unsqueeze(-1), 0.0).sum(0) / batch.weight.sum()
        return Gradient(mean[0], mean[1:], model.stats)


@dataclass(frozen=True)
class Quadratic(TaskSpec):
    """A vector theta with the loss (theta - a)' H (theta - a) / 2; for the `quadratics` dataset."""

    name: ClassVar[str] = "quadratic"

    def task(self, federation: Federation, dtype: torch.dtype) -> Task:
        shape = tuple(federation.x.shape[1:])
        if len(shape) != 2 or shape[0] != shape[1] or tuple(federation.y.shape[1:]) != shape[:1]:
            raise UsageError('model "quadratic" is for samples that are a matrix and a vector, such as '
                             f'dataset "quadratics"; these have shape {shape}')
        return QuadraticTask(torch.zeros(shape[0], dtype=dtype))

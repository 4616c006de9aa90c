"""The model of the `quadratics` federation: a vector, and a quadratic bowl for each sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from descant.core.federation import Federation
from descant.core.task import FunctionTask, Task
from descant.errors import UsageError
from descant.models.base import TaskSpec


def quadratic_losses(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """(theta - a)' H (theta - a) / 2 for each sample x = H [n, d, d], y = a [n, d]."""
    gap = theta - y
    return torch.einsum("ni,nij,nj->n", gap, x, gap) / 2


@dataclass(frozen=True)
class Quadratic(TaskSpec):
    """A vector theta with the loss (theta - a)' H (theta - a) / 2; for the `quadratics` dataset."""

    name: ClassVar[str] = "quadratic"

    def task(self, federation: Federation, dtype: torch.dtype) -> Task:
        shape = tuple(federation.x.shape[1:])
        if len(shape) != 2 or shape[0] != shape[1] or tuple(federation.y.shape[1:]) != shape[:1]:
            raise UsageError('model "quadratic" is for samples that are a matrix and a vector, such as '
                             f'dataset "quadratics"; these have shape {shape}')
        return FunctionTask(quadratic_losses, torch.zeros(shape[0], dtype=dtype))

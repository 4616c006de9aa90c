"""Statistical, optimisation and total error of models whose truth is known.

The true model w*_i of a client minimises its expected loss; the true global model is w*_g = sum_i p_i w*_i
(one-stage FedProx, Assumption 1). All errors are squared distances, as in that paper.
"""

from __future__ import annotations

import torch
from torch import Tensor

from descant.core.federation import Federation
from descant.core.task import Task
from descant.models.module import ModuleTask

NAMES = ("models", "optima")  # under which a synthetic federation keeps its clients' true models


def true_models(task: Task, federation: Federation) -> Tensor | None:
    """The clients' true models [clients, d] (the unseen come last), where they are known for this model."""
    for name in NAMES:
        known = federation.truth.get(name)
        if known is not None and tuple(known.shape) == (federation.everyone, task.dim):
            return identified(task, known.to(task.dtype))
    return None


def identified(task: Task, theta: Tensor) -> Tensor:
    """The part of the parameters [..., d] that the task can tell. Softmax regression cannot tell weights from
    weights with one vector added to those of every class: they are taken less their mean over the classes, or
    errors would never vanish, however much data there is."""
    if not (isinstance(task, ModuleTask) and task.is_linear and task.loss_name == "cross_entropy"):
        return theta
    parts = theta.split([s.stop - s.start for s in task.layout.parameters], -1)
    centred = []
    for part, s in zip(parts, task.layout.parameters, strict=True):
        rows = part.unflatten(-1, (s.shape[0], -1))  # [..., classes, features]
        centred.append((rows - rows.mean(-2, keepdim=True)).flatten(-2))
    return torch.cat(centred, -1)


def total_error(models: Tensor, truth: Tensor) -> Tensor:
    """||w_i - w*_i||^2 of models. Of exact solutions it is the statistical error, which is left however long
    a problem is solved; from exact solutions, the optimisation error, left however much data there is."""
    return (models - truth).square().sum(-1)

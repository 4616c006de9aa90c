"""The models: networks by name, and how any model becomes a task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from descant import fields
from descant.errors import UsageError, unknown
from descant.fields import hyper
from descant.models.base import NetworkSpec, TaskSpec
from descant.models.linear import DNN, MCLR
from descant.models.quadratic import Quadratic
from descant.pool import Federation
from descant.random import key
from descant.task import LOSSES, Loss, LossName, ModuleTask, Task, default_loss

MODELS: dict[str, type[NetworkSpec] | type[TaskSpec]] = {cls.name: cls for cls in (MCLR, DNN, Quadratic)}

__all__ = ["DNN", "MCLR", "MODELS", "ModelSpec", "NetworkSpec", "Quadratic", "TaskSpec", "make_task"]


@dataclass(frozen=True)
class ModelSpec(fields.Checked):
    """The [model] section: a name with its own fields, and the loss."""

    name: ClassVar[str] = "model"

    model: NetworkSpec | TaskSpec = hyper(MCLR(), "which model")
    loss: LossName | None = hyper(None, "absent: cross_entropy for classes, mse for real targets")

    @classmethod
    def parse(cls, table: dict[str, Any], where: str = "model") -> ModelSpec:
        """The spec that a flat table describes: `name`, `loss`, and the model's own fields."""
        name = table.get("name", MCLR.name)
        if not isinstance(name, str) or name not in MODELS:
            raise unknown(f"{where}.name", name, MODELS)
        own = {k: v for k, v in table.items() if k not in ("name", "loss")}
        return cls(fields.parse(MODELS[name], own, where), loss=table.get("loss"))

    def dump(self) -> dict[str, Any]:
        table: dict[str, Any] = fields.dump(self.model)
        return table if self.loss is None else table | {"loss": self.loss}

    def task(self, federation: Federation, dtype: torch.dtype, seed: int) -> Task:
        return make_task(self.model, federation, loss=self.loss, dtype=dtype, seed=seed)


def make_task(
    model: str | NetworkSpec | TaskSpec | nn.Module | Task,
    federation: Federation,
    *,
    loss: LossName | Loss | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Task:
    """The task of a model on a federation. A network by name is initialised from the seed; an
    `nn.Module` is taken as it is."""
    if isinstance(model, Task):
        return model
    if isinstance(model, str):
        if model not in MODELS:
            raise unknown("model", model, MODELS)
        model = MODELS[model]()
    if isinstance(model, TaskSpec):
        return model.task(federation, dtype)
    if isinstance(loss, str) and loss not in LOSSES:
        raise unknown("loss", loss, LOSSES)
    if isinstance(model, NetworkSpec):
        outputs = 1 if loss == "binary_cross_entropy" or federation.classes is None else federation.classes
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key(seed, "init"))
            model = model.network(tuple(federation.x.shape[1:]), outputs)
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model must be a name, an nn.Module or a Task, not {type(model).__name__}")
    loss = loss or default_loss(federation.classes)
    task = ModuleTask(model, loss, classes=federation.classes, dtype=dtype)
    task.check(federation)
    return task

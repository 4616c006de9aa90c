"""The models: networks by name, and how any model becomes a task.

A new network is a module with a `NetworkSpec`, and one line in `MODELS`. Imports core.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from descant.core import fields, random
from descant.core.federation import Federation
from descant.core.fields import hyper
from descant.core.import_object import marked
from descant.core.losses import LOSSES, Loss, LossName, default_loss
from descant.core.permit import Allowed, opened
from descant.core.sample import SampleFormat
from descant.core.task import Task
from descant.errors import DescantError, UsageError, one, unknown
from descant.models.alexnet import FedBNAlexNet
from descant.models.base import NetworkSpec, TaskSpec
from descant.models.cnn import CGPFLCNN, CNN2, CNN3, CNN5, FEMNISTCNN, HARCNN, CifarNet, FedMAPCNN
from descant.models.linear import DNN, MCLR, MLP128, FedMAPMLP
from descant.models.lstm import LSTM
from descant.models.module import ModuleTask, Precision
from descant.models.own import OwnModel
from descant.models.quadratic import Quadratic
from descant.models.resnet import ResNet18

MODELS: dict[str, type[NetworkSpec] | type[TaskSpec]] = {
    cls.name: cls
    for cls in (MCLR, DNN, MLP128, FedMAPMLP, CNN2, CNN3, CNN5, CifarNet, CGPFLCNN, HARCNN, FEMNISTCNN,
                FedMAPCNN, FedBNAlexNet, ResNet18, LSTM, Quadratic)
}

__all__ = [
    "CGPFLCNN", "CNN2", "CNN3", "CNN5", "DNN", "FEMNISTCNN", "HARCNN", "LSTM", "MCLR", "MLP128", "MODELS",
    "CifarNet", "FedBNAlexNet", "FedMAPCNN", "FedMAPMLP", "ModelSpec", "NetworkSpec", "OwnModel",
    "Quadratic", "ResNet18", "TaskSpec", "make_task", "named",
]


OF_ANY_MODEL = ("name", "loss", "class_weights", "autocast")  # the fields of [model] that are no model's own


def named(name: object, own: Mapping[str, Any] | None = None, where: str = "model") -> NetworkSpec | TaskSpec:
    """The model of this name with its own fields: an entry of `MODELS`, or "package.module:function"."""
    if isinstance(name, str) and name in MODELS:
        known = [field.name for field in fields.describe(MODELS[name])]
        for key in own or {}:
            if key not in known:
                raise unknown(f"{where} field", key, [*OF_ANY_MODEL, *known])
        spec: NetworkSpec | TaskSpec = fields.parse(MODELS[name], own or {}, where)
        return spec
    if isinstance(name, str) and (":" in name or "." in name):
        return OwnModel(name, own or {})
    raise unknown(f"{where}.name", name, MODELS)


@dataclass(frozen=True)
class ModelSpec(fields.Checked):
    """The [model] section: a name with its own fields, and the loss."""

    name: ClassVar[str] = "model"

    model: NetworkSpec | TaskSpec = hyper(MCLR(), "which model")
    loss: LossName | None = hyper(None, "absent: cross_entropy for classes, mse for real targets")
    class_weights: tuple[float, ...] | None = hyper(
        None, "what the rows of each class count in training; absent: all alike", gt=0)
    autocast: Precision | None = hyper(
        None, "precision in which networks compute where torch.autocast does; their parameters stay in "
              "float32; absent: all in train.dtype")

    @classmethod
    def parse(cls, table: Mapping[str, Any], where: str = "model", allow: Allowed = ()) -> ModelSpec:
        """The spec of a flat table: `name`, `loss`, and the model's own fields. Code that the table names
        must be in `allow`."""
        own = {k: v for k, v in table.items() if k not in OF_ANY_MODEL}
        name = marked(table.get("name", MCLR.name), opened(allow))
        return cls(named(name, own, where), table.get("loss"), table.get("class_weights"),
                   table.get("autocast"))

    def dump(self) -> dict[str, Any]:
        """The table that `parse` makes this spec of."""
        model = self.model
        table: dict[str, Any] = model.dump() if isinstance(model, OwnModel) else fields.dump(model)
        given = {"loss": self.loss, "class_weights": fields.dump(self.class_weights),
                 "autocast": self.autocast}
        return table | {key: value for key, value in given.items() if value is not None}

    def task(self, federation: Federation, dtype: torch.dtype, seed: int) -> Task:
        return make_task(self.model, federation, loss=self.loss, dtype=dtype, seed=seed,
                         class_weights=self.class_weights, autocast=self.autocast)


def make_task(
    model: str | NetworkSpec | TaskSpec | nn.Module | Task,
    federation: Federation,
    *,
    loss: LossName | Loss | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    initial: Mapping[str, Tensor] | None = None,
    class_weights: Sequence[float] | None = None,
    autocast: Precision | None = None,
) -> Task:
    """The task of a model on a federation. A named network is initialised from the seed; `initial` is a
    `state_dict` to start with instead. `class_weights` and `autocast` as in `ModuleTask`."""
    if isinstance(model, str):
        model = named(model)
    if isinstance(model, Task | TaskSpec):
        if loss is not None:
            raise UsageError("this model has a loss of its own: leave `loss` out")
        if class_weights is not None:
            raise UsageError("class_weights is for networks: this model has a loss of its own")
        if autocast is not None:
            raise UsageError("autocast is for networks: a Task computes as it is written")
        if initial is not None:
            raise UsageError("`initial` is for networks: a Task says by its `init` what training starts with")
        if isinstance(model, ModuleTask):
            return model.fitted(federation)
        return model if isinstance(model, Task) else model.task(federation, dtype)
    if isinstance(loss, str) and loss not in LOSSES:
        raise unknown("loss", loss, LOSSES)
    ours = isinstance(model, NetworkSpec) and not isinstance(model, OwnModel)
    if isinstance(model, NetworkSpec):
        sample = SampleFormat.of_federation(federation).for_loss(loss)
        with random.torch_seeded(random.key(seed, "init")):
            try:
                model = model.network(sample)
            except (MemoryError, RuntimeError) as error:
                raise DescantError(f"the model {model.name} cannot be made for samples of shape "
                                   f"{sample.shape}: {str(error).splitlines()[0]}") from None
    if not isinstance(model, nn.Module):
        remedy = f": call it, as in {model.__name__}(...)" if isinstance(model, type | FunctionType) else ""
        raise UsageError(f"the model must be a name, an nn.Module or a Task, not {one(model)}{remedy}")
    if initial is not None:
        model = _started(model, initial)
    _require_trainable(model)
    if isinstance(loss, type) or not (loss is None or callable(loss) or isinstance(loss, str)):
        raise UsageError(f"the loss must be a name ({', '.join(LOSSES)}) or a function of outputs and "
                         f'targets, such as nn.CrossEntropyLoss(reduction="none"), not {loss!r}')
    loss = loss or default_loss(federation.classes)
    return ModuleTask(model, loss, classes=federation.classes, dtype=dtype, class_weights=class_weights,
                      autocast=autocast).fitted(federation, ours=ours)


def _require_trainable(module: nn.Module) -> None:
    """Refuse what cannot be a function of a vector of parameters."""
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        raise UsageError("the model is compiled by TorchScript, whose parameters cannot be exchanged: give "
                         "the module that torch.jit.script or torch.jit.trace was given")
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise UsageError(f"the model is wrapped in a {type(module).__name__}: give the module in it, .module")
    for name, parameter in module.named_parameters():
        if parameter.is_meta or not (is_lazy(parameter) or bool(torch.isfinite(parameter).all())):
            kind = "is on torch's meta device and has no values" if parameter.is_meta else "is not finite"
            raise UsageError(f"the parameter {name!r} of the model {kind}: give it numbers to start with")
        if parameter.is_complex():
            continue  # refused with another remedy, where the vector is made
        if parameter.dtype not in (torch.float16, torch.float32, torch.float64):
            kind = str(parameter.dtype).removeprefix("torch.")
            raise UsageError(f"the parameter {name!r} of the model is {kind}: models are trained in float32 "
                             "or float64 (train.dtype): call .float() on the module first, and give "
                             'autocast="bfloat16" for passes in that precision')


def _started(module: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """A copy of a module with these parameters and buffers."""
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UsageError("`initial` must be a state_dict, from names to tensors: module.state_dict(), or "
                         "what safetensors.torch.load_file reads")
    started = copy.deepcopy(module)
    try:
        started.load_state_dict(state)
    except RuntimeError as error:
        words = " ".join(str(error).split())
        raise UsageError(f"`initial` does not fit the model: {words}") from None
    return started

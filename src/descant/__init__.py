"""descant: personalized federated learning. Many clients learn together, and each gets its own model."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from descant import algorithms, data, models
    from descant.api import compare, load, report, reproduce, resume, run, tune
    from descant.core.algorithm import Algorithm, Message, Round
    from descant.core.federation import Federation
    from descant.core.task import Batch, FunctionTask, Task
    from descant.core.vector import Model
    from descant.data import federation
    from descant.deploy import export
    from descant.errors import DescantError, UsageError
    from descant.experiment.config import Experiment
    from descant.experiment.run import Run
    from descant.experiment.trackers import MLflow, TensorBoard, WandB
    from descant.models.module import ModuleTask
    from descant.priors.quadratic import Flat, Gaussian
    from descant.priors.solve import SGD, Adam, AdamW, Proximal
    from descant.view.objects import Comparison, Search
    from descant.view.reproduce import Reproduction

    __version__: str

# Without this, the last bit of MKL's products may depend on how their operands are aligned, and so a client's
# result on its place in a chunk: on AMD processors it does. MKL reads it at its first product.
os.environ.setdefault("MKL_CBWR", "AUTO")

# Names are imported when they are first used: `descant --help` must not wait for torch.
_HOME = {
    "Algorithm": "descant.core.algorithm", "Message": "descant.core.algorithm",
    "Round": "descant.core.algorithm",
    "compare": "descant.api", "load": "descant.api", "report": "descant.api",
    "reproduce": "descant.api", "resume": "descant.api", "run": "descant.api", "tune": "descant.api",
    "Comparison": "descant.view.objects", "Reproduction": "descant.view.reproduce",
    "Search": "descant.view.objects",
    "federation": "descant.data",
    "DescantError": "descant.errors", "UsageError": "descant.errors",
    "Experiment": "descant.experiment.config", "Run": "descant.experiment.run",
    "MLflow": "descant.experiment.trackers", "TensorBoard": "descant.experiment.trackers",
    "WandB": "descant.experiment.trackers",
    "Federation": "descant.core.federation",
    "Flat": "descant.priors.quadratic", "Gaussian": "descant.priors.quadratic",
    "SGD": "descant.priors.solve", "Adam": "descant.priors.solve", "AdamW": "descant.priors.solve",
    "Proximal": "descant.priors.solve",
    "Batch": "descant.core.task", "FunctionTask": "descant.core.task", "ModuleTask": "descant.models.module",
    "Task": "descant.core.task",
    "Model": "descant.core.vector",
}
_MODULES = {"algorithms": "descant.algorithms", "data": "descant.data", "export": "descant.deploy.export",
            "models": "descant.models"}

__all__ = [
    "SGD", "Adam", "AdamW", "Algorithm", "Batch", "Comparison", "DescantError", "Experiment", "Federation",
    "Flat", "FunctionTask", "Gaussian", "MLflow", "Message", "Model", "ModuleTask", "Proximal",
    "Reproduction", "Round", "Run", "Search", "Task", "TensorBoard", "UsageError", "WandB", "__version__",
    "algorithms", "compare", "data", "export", "federation", "load", "models", "report", "reproduce",
    "resume", "run", "tune",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":  # pyproject.toml has it
        return importlib.metadata.version("descant")
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'descant' has no attribute {name!r}")

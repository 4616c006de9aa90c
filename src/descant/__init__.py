"""descant: personalized federated learning. Many clients learn together, and each gets its own model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from descant._version import __version__

if TYPE_CHECKING:
    from descant import algorithms, data, handover, models
    from descant.algorithm import Algorithm, Message, Round
    from descant.api import load, resume, run
    from descant.data import federation
    from descant.errors import DescantError, UsageError
    from descant.experiment.config import Experiment
    from descant.experiment.run import Run
    from descant.pool import Federation
    from descant.prior import Flat, Gaussian
    from descant.solve import SGD, Adam, Proximal
    from descant.task import Batch, FunctionTask, ModuleTask, Task
    from descant.vector import Model

# Names are imported when they are first used: `descant --help` must not wait for torch.
_HOME = {
    "Algorithm": "descant.algorithm", "Message": "descant.algorithm", "Round": "descant.algorithm",
    "load": "descant.api", "resume": "descant.api", "run": "descant.api",
    "federation": "descant.data",
    "DescantError": "descant.errors", "UsageError": "descant.errors",
    "Experiment": "descant.experiment.config", "Run": "descant.experiment.run",
    "Federation": "descant.pool",
    "Flat": "descant.prior", "Gaussian": "descant.prior",
    "SGD": "descant.solve", "Adam": "descant.solve", "Proximal": "descant.solve",
    "Batch": "descant.task", "FunctionTask": "descant.task", "ModuleTask": "descant.task",
    "Task": "descant.task",
    "Model": "descant.vector",
}
_MODULES = ("algorithms", "data", "handover", "models")

__all__ = [
    "SGD", "Adam", "Algorithm", "Batch", "DescantError", "Experiment", "Federation", "Flat", "FunctionTask",
    "Gaussian", "Message", "Model", "ModuleTask", "Proximal", "Round", "Run", "Task", "UsageError",
    "__version__", "algorithms", "data", "federation", "handover", "load", "models", "resume", "run",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"descant.{name}")
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'descant' has no attribute {name!r}")

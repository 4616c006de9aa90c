"""descant from Python."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from descant.core import fields
from descant.core.algorithm import Algorithm
from descant.core.federation import Federation
from descant.core.losses import Loss, LossName
from descant.core.task import Task
from descant.engine.settings import Eval, Train
from descant.errors import UsageError
from descant.experiment import run as runs
from descant.experiment.config import parse_algorithm
from descant.experiment.run import Observer, Run, Setup
from descant.models import ModelSpec, NetworkSpec, TaskSpec, make_task, named


def run(
    algorithm: Algorithm | str,
    *,
    federation: Federation,
    model: str | NetworkSpec | TaskSpec | nn.Module | Task = "mclr",
    loss: LossName | Loss | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    eval: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
    **train: Any,
) -> Run:
    """Train a federation; returns the run, with its figures and every client's model.

    `train` are the fields of the [train] section: `rounds`, `cohort`, `batch`, `local={"steps": 20}`, `seed`,
    `backend`, `dtype` and so on; `eval` those of [eval]. With `out` the run is kept in a directory: the same
    call with `resume=True` continues it after a kill, or loads it if it is finished. Without, it is in
    memory.
    """
    if not isinstance(federation, Federation):
        raise UsageError(f"federation must be a Federation, not {type(federation).__name__}: "
                         "make one with descant.federation(...) or Federation.from_arrays(...)")
    method = parse_algorithm({"name": algorithm}) if isinstance(algorithm, str) else algorithm
    if not isinstance(method, Algorithm):
        raise UsageError("algorithm must be a name or a method such as FedAvg() (with brackets), "
                         f"not {algorithm!r}")
    if eval is not None and not isinstance(eval, Mapping):
        raise UsageError(f'eval must hold the fields of [eval], such as {{"every": 5}}, not {eval!r}')
    settings = fields.parse(Train, train, "train")
    federation = federation.to(settings.torch_dtype)
    task = make_task(model, federation, loss=loss, dtype=settings.torch_dtype, seed=settings.seed)
    if task.dtype != settings.torch_dtype:
        raise UsageError(f"the task is in {task.dtype}, but train.dtype is {settings.dtype}: "
                         "make them the same")
    setup = Setup(method, task, federation, settings, fields.parse(Eval, eval or {}, "eval"),
                  _origin(federation, model, loss), _section(model, loss))
    if not resume:
        return runs.start(setup, None if out is None else Path(out), observer)
    if out is None:
        raise UsageError("resume=True needs the directory of the run as out")
    if not (Path(out) / "config.toml").exists():
        return runs.start(setup, Path(out), observer)
    return runs.resume(Path(out), setup, observer=observer)


def _origin(federation: Federation, model: Any, loss: Any) -> dict[str, Any] | None:
    """The [data] and [model] sections, if everything came from the registries."""
    section = _section(model, loss)
    if federation.origin is None or section is None or callable(loss):
        return None
    return {"data": dict(federation.origin), "model": section}


def _section(model: Any, loss: Any) -> dict[str, Any] | None:
    """The [model] section, if the network has a name; without a user's own loss."""
    spec = named(model) if isinstance(model, str) else model
    if not isinstance(spec, NetworkSpec | TaskSpec):
        return None
    return ModelSpec(spec, None if callable(loss) else loss).dump()


def resume(out: str | Path, *, rounds: int | None = None, observer: Observer | None = None,
           allow: Collection[str] = ()) -> Run:
    """Continue the run in a directory, bit for bit; `rounds` extends it. Code that the directory names is
    imported only if its package is in `allow`, or in the user's settings."""
    return runs.resume(Path(out), None, rounds, observer, allow)


def load(out: str | Path, *, allow: Collection[str] = ()) -> Run:
    """The figures and models of a run from its directory; `allow` as for `resume`."""
    return runs.load(Path(out), allow=allow)

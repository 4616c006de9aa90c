"""A model for a newcomer, by the method's own rule, beside the global model and training alone."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from descant.algorithms import LocalTrain
from descant.core.algorithm import Algorithm
from descant.core.federation import Federation
from descant.core.labels import as_known
from descant.core.sample import SampleFormat
from descant.core.splits import SPLITS, Table
from descant.core.task import Task
from descant.core.threads import one_thread
from descant.core.vector import Model
from descant.data import tables
from descant.data.spec import DataSpec
from descant.deploy.export.client_data import ClientData, read_client_data
from descant.deploy.export.export import Made, notes_on, samples_of
from descant.deploy.export.manifest import Manifest, data_spec
from descant.engine.backends.shard import Shard
from descant.engine.personal import personal_model
from descant.engine.work import ClientScores
from descant.errors import DescantError, UsageError
from descant.experiment import run as runs
from descant.experiment.run import Run, Setup, Which
from descant.models.module import ModuleTask
from descant.priors.solve import SGD, Adam, Proximal


class Newcomer(NamedTuple):
    """A newcomer's model and its scores on its own test rows."""

    name: str
    sizes: dict[str, int]  # rows of each split
    figures: dict[str, dict[str, float | None]]  # of "personal", "alone" and, if any, "shared"
    made: Made

    @property
    def module(self) -> nn.Module:
        """The model as an ordinary module."""
        return self.made.module


def personalized(run: Run, data: str | Path, name: str | None = None, which: Which = "best") -> Newcomer:
    """The model that a run's method gives to a client with these rows; the default name is the file's."""
    path = Path(data)
    name = path.stem if name is None else name
    setup, client = _with_newcomer(run, path, name)
    snapshot, algorithm, work = run.snapshot(which), setup.algorithm, setup.work()
    number = snapshot.number
    sizes = {str(split): int(setup.federation.split(split).sizes[client]) for split in SPLITS}
    try:
        with one_thread():
            personal = personal_model(work, snapshot, client)
            scored = personal_model(work, snapshot, client, score=True)
    except DescantError as error:
        raise DescantError(f"{name} cannot be personalized: {error}") from None
    if not isinstance(setup.task, ModuleTask) or not isinstance(personal, Model) or (
            type(algorithm).predict is not Algorithm.predict):
        raise UsageError("the clients of this run do not predict with one nn.Module: there is no model to "
                         "export")
    figures = {who: {metric: value if math.isfinite(value) else None for metric, value in own.items()}
               for who, own in figures_of(setup.task, scored).items()}
    figures["alone"] = learned_alone(setup, client, name, max(1, number))
    about = Manifest.of(setup, client, name=name, newcomer=True, number=number, which=which,
                        notes=notes_on(run, which), fitted=run.setup.federation)
    made = Made(setup.task.module(personal), about, samples_of(setup, client))
    return Newcomer(name, sizes, figures, made)


def _with_newcomer(run: Run, path: Path, name: str) -> tuple[Setup, int]:
    """The run's setup with only the newcomer's rows, and its number: after all others."""
    setup, federation = run.setup, run.setup.federation
    if name in federation.names:
        raise UsageError(f"{name!r} is a client of this run, whose model `descant export` writes: a newcomer "
                         "needs another --name")
    if not name or not name.isprintable():
        raise UsageError(f"--name {name!r}: use printable characters")
    spec = data_spec(setup)
    if spec is None:
        raise UsageError("this run's data are Python objects: how rows are split and scaled is not known")
    client = federation.everyone
    nobody = Table.packed(np.zeros(0, np.int64), np.zeros(client + 1, np.int64))
    whole = Shard(federation.x[:0], federation.y[:0], nobody, nobody, nobody, federation.classes,
                  (*federation.names, name), unseen=federation.unseen + 1)
    own = _read(path, spec, setup).within(whole, client, spec, setup.train.torch_dtype)
    return dataclasses.replace(setup, federation=own), client


def _read(path: Path, spec: DataSpec, setup: Setup) -> ClientData:
    """The newcomer's rows, checked against the run's."""
    if path.suffix.lower() not in tables.ENDINGS:
        raise UsageError(f"--data {path} must end in one of {', '.join(tables.ENDINGS)}")
    if spec.schema is None and path.suffix.lower() != ".npz":
        raise UsageError(f"--data {path} is a table, and the data of this run have no schema for its "
                         f"columns: give an NPZ file with x of shape (rows, "
                         f"{', '.join(map(str, setup.federation.x.shape[1:]))}) and y")
    data, federation = read_client_data(str(path), spec), setup.federation
    if spec.schema is None and data.classes is not None:
        y = torch.from_numpy(as_known(data.y.numpy(), federation.class_names, f"--data {path}: "))
        data = data._replace(y=y, classes=int(y.max()) + 1)
    known = SampleFormat.of_federation(federation)
    if wrong := known.differs(data.kind):
        raise UsageError(f"--data {path} does not fit the run: {wrong}")
    for what, own, most in (("class", data.kind.classes, known.classes),
                            ("token", data.kind.tokens, known.tokens)):
        if own is not None and most is not None and own > most:
            raise UsageError(f"--data {path} has the {what} {own - 1}, but the run knows 0 to {most - 1}")
    return data


def figures_of(task: Task, scored: ClientScores) -> dict[str, dict[str, float]]:
    """The test figures of the personal and, if there is one, of the shared model."""
    named = {"personal": scored.personal} | ({} if scored.shared == () else {"shared": scored.shared})
    return {who: dict(zip(task.metric_names, task.figures(scores.test).tolist(), strict=True))
            for who, scores in named.items()}


def learned_alone(setup: Setup, client: int, name: str, rounds: int) -> dict[str, Any]:
    """The test figures of local training for as many rounds, in the round that is best on validation data."""
    own, train = setup.federation, setup.train
    rows, validation, test = (own.split(split).pick(np.array([client])) for split in SPLITS)
    federation = Federation(own.x, own.y, rows, validation, test, own.classes, (name,))
    solver = getattr(setup.algorithm, "solver", None)
    method = LocalTrain(solver) if isinstance(solver, SGD | Adam | Proximal) else LocalTrain()
    settings = dataclasses.replace(train, rounds=rounds, cohort="all", participation="cohort", drop=0.0,
                                   backend="loop", device="cpu", chunk=None, workers=None, ray_address=None)
    run = runs.start(Setup(method, setup.task, federation, settings, setup.eval))
    at = (run.best_round or run.rounds) - 1
    row = next(row for row in run.history[at:] if "personal" in row)
    return {name: figures["mean"] for name, figures in row["personal"]["test"].items()}


def wilson(share: float, rows: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's 95 % confidence interval of a share that was observed in so many rows."""
    middle = (share + z * z / (2 * rows)) / (1 + z * z / rows)
    half = z / (1 + z * z / rows) * math.sqrt(share * (1 - share) / rows + z * z / (4 * rows * rows))
    return max(0.0, middle - half), min(1.0, middle + half)

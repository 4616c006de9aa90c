"""What a curious server observes, and the two datasets on which it is tried."""

from __future__ import annotations

import tempfile
import tomllib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

import descant
from descant import SGD, Federation
from descant.algorithms import FedAvg
from descant.core.algorithm import ClientData, Message, Round
from descant.core.task import Task, inputs
from descant.core.vector import Model
from descant.data.cache import data_dir
from descant.data.hospitals import write_example


@dataclass(frozen=True)
class Watched(FedAvg):
    """FedAvg, whose server writes down what it was sent."""

    name: ClassVar[str] = "watched"
    seen: ClassVar[list[tuple[Tensor, Tensor]]] = []  # per round: the model that was sent, and the uploads

    def aggregate(self, server: Model, uploads: Model, round: Round) -> tuple[Model, dict[str, Any]]:
        self.seen.append((server.theta.clone(), uploads.theta.clone()))
        return super().aggregate(server, uploads, round)


@dataclass(frozen=True)
class Noised(FedAvg):
    """FedAvg, whose server adds noise to a sum that hides clients. It is sent the uploads, which are written
    down where they are made; others are sent what the noised sum gives."""

    name: ClassVar[str] = "noised"
    uploads: ClassVar[list[Tensor]] = []  # of all clients in turn, round by round
    means: ClassVar[list[tuple[Tensor, Tensor]]] = []  # per round: the model that was sent; the mean

    def local(self, task: Task, message: Message, state: tuple[()], data: ClientData
              ) -> tuple[Model, tuple[()]]:
        upload, state = super().local(task, message, state, data)
        self.uploads.append(upload.theta.clone())
        return upload, state

    def absorb(self, server: Model, mean: Model, round: Round) -> tuple[Model, dict[str, Any]]:
        self.means.append((server.theta.clone(), mean.theta.clone()))
        return super().absorb(server, mean, round)


class Rows(NamedTuple):
    """Samples of one dataset, in comparable units."""

    name: str
    x: Tensor  # [n, d]: pixels in [0, 1], or standardised columns
    y: Tensor  # [n]
    columns: tuple[str, ...] | None  # None: pixels of a square picture

    @property
    def spread(self) -> float:
        """How far a row is from the mean row, in the root of the mean square: what a guess is off by."""
        return float((self.x - self.x.mean(0)).square().mean().sqrt())


def digits() -> Rows:
    found = descant.federation("digits", partition="iid", clients=2)
    return Rows("digits", inputs(found.x, torch.float64).double().flatten(1), found.y, None)


def patients() -> Rows:
    """Heart disease where it was prepared (`descant data`); otherwise the patients of `descant example`."""
    if (data_dir() / "heart_disease.npz").exists():
        found = descant.federation("heart_disease", scale="client", impute="client")
        return Rows("heart disease", found.x.double(), found.y, found.column_names)
    with tempfile.TemporaryDirectory() as place:
        home = Path(place) / "hospitals"
        write_example(home)
        schema = tomllib.loads((home / "experiment.toml").read_text(encoding="utf-8"))["schema"]
        found = descant.federation(str(home / "data"), schema=schema, scale="client")
    return Rows("made-up hospitals", found.x.double(), found.y, found.column_names)


class Clients(NamedTuple):
    """A federation in which client k has the training rows `train[k]` of a dataset, and others to test."""

    federation: Federation
    train: list[np.ndarray]
    test: list[np.ndarray]


def clients(rows: Rows, count: int, size: int, seed: int = 0, test: int = 2) -> Clients:
    """So many clients with so many rows each, drawn without replacement."""
    order = np.random.default_rng(seed).permutation(len(rows.x))[: count * (size + test)]
    parts = order.reshape(count, size + test)
    split = np.tile(["train"] * size + ["test"] * test, count)
    owner = np.repeat(np.arange(count), size + test)
    made = Federation.from_arrays(rows.x[order], rows.y[order], owner, split=split,
                                  classes=int(rows.y.max()) + 1)
    return Clients(made, [part[:size] for part in parts], [part[size:] for part in parts])


class Observed(NamedTuple):
    """What is known of a round: the model that was sent, and what came back."""

    task: Task
    sent: Tensor  # [d]
    uploads: Tensor  # [clients, d] what the server was sent
    noised: Tensor | None  # [d] their mean, as it is told where noise on the sum hides clients
    run: descant.Run

    def summed(self, clients: int) -> Tensor:
        """Rows [..., d] whose mean is all that is told of so many clients."""
        return self.uploads[:clients] if self.noised is None else self.noised[None]


def observe(federation: Federation, *, model: Any = "dnn", lr: float = 0.1, rounds: int = 1,
            privacy: dict[str, Any] | None = None, **settings: Any) -> Observed:
    """The last round of a federation that is watched."""
    method = Noised if privacy is not None and privacy["unit"] == "client" else Watched
    for kept in (Watched.seen, Noised.uploads, Noised.means):
        kept.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tiny clients: their scores are of no interest
        run = descant.run(method(solver=SGD(lr=lr), weights="uniform"), federation=federation, model=model,
                          rounds=rounds, dtype="float64", backend="loop", progress=False,
                          eval={"every": rounds}, privacy=privacy, **settings)
    if method is Noised:
        sent, noised = Noised.means[-1]
        uploads = torch.stack(Noised.uploads[-federation.population:])
        return Observed(run.setup.task, sent, uploads, noised, run)
    sent, uploads = Watched.seen[-1]
    return Observed(run.setup.task, sent, uploads, None, run)

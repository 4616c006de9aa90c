"""The [train] and [eval] sections of an experiment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from descant.core import fields
from descant.core.fields import Checked, hyper
from descant.core.import_object import is_place
from descant.engine.availability import trace_fingerprint
from descant.engine.batches import LocalWork
from descant.errors import UsageError


@dataclass(frozen=True)
class Train(Checked):
    rounds: int = hyper(50, "rounds of training", ge=1)
    cohort: int | Literal["all"] = hyper("all", "clients sampled in each round", ge=1)
    batch: int | Literal["full"] = hyper(20, "samples in a batch", ge=1)
    local: LocalWork = hyper(LocalWork(steps=20), "a client's work: { steps = n } or { epochs = n }")
    sampling: Literal["uniform", "samples"] = hyper(
        "uniform", "who is sampled: all clients alike, or by their numbers of training rows")
    availability: str | None = hyper(
        None, "a CSV file of who can be reached in which rounds (client, first, last, and the pace of a "
              "step); absent: everyone, always")
    deadline: float | None = hyper(
        None, "seconds that a round waits for a client, by the pace of its steps in `availability`; absent: "
              "for ever", gt=0)
    participation: Literal["cohort", "all"] = hyper(
        "cohort", "who trains: the cohort, or everyone with only the cohort aggregated")
    patience: int | None = hyper(
        None, "stop when the validation figures have not improved for so many evaluations; rounds is then "
              "the most there are; absent: all rounds are played", ge=1)
    average: int | None = hyper(
        None, "the last so many rounds over which the models that clients predict with are averaged; absent: "
              "they are those of a round", ge=1)
    drop: float = hyper(0.0, "share of each round's clients that drop out at random before they start",
                        ge=0, lt=1)
    seed: int = hyper(0, "seed of sampling, batches and initial model", ge=0)
    dtype: Literal["float32", "float64"] = hyper("float32", "precision of the models")
    backend: Literal["auto", "loop", "vectorised", "processes", "ray"] = hyper(
        "auto", "how clients are run; auto measures once, and never takes ray")
    device: str = hyper("cpu", 'where clients are trained: "cpu", or "cuda" (in one process, vectorised)')
    chunk: int | None = hyper(
        None, "clients run together (vectorised, processes, ray); absent: fitted to the model", ge=1)
    workers: int | None = hyper(None, "worker processes (processes, ray); absent: one per core", ge=1)
    ray_address: str | None = hyper(
        None, 'Ray cluster to join: "auto" or host:port; absent: one is started here for the run')

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 in (self.local.steps, self.local.epochs):
            raise UsageError("train.local must be at least one step or epoch")
        try:
            torch.device(self.device)
        except RuntimeError:
            raise UsageError(f'train.device must be "cpu" or "cuda", not {self.device!r}') from None
        if self.average is not None and self.average > self.rounds:
            raise UsageError(f"train.average = {self.average} is more than train.rounds = {self.rounds}")
        if self.average is not None and self.patience is not None:
            raise UsageError("train.average is over the last rounds, and train.patience may end a run before "
                             "these: leave one of them out")
        if self.availability is not None:
            object.__setattr__(self, "availability", str(Path(self.availability).expanduser().absolute()))
        elif self.deadline is not None:
            raise UsageError("train.deadline needs the pace of the clients' steps: a column `pace` in a "
                             "file of train.availability")
        if self.ray_address is not None and self.backend != "ray":
            raise UsageError(f'train.ray_address is {self.ray_address!r}, but train.backend is '
                             f'{self.backend!r}: set it to "ray", or leave the address out')

    def identity(self) -> dict[str, Any]:
        """What must not change between the parts of a run."""
        table: dict[str, Any] = fields.dump(self)
        if self.availability is not None:  # what the file says, wherever it lies
            table["availability"] = trace_fingerprint(self.availability)
        if self.sampling == "uniform":  # older runs do not name it
            table.pop("sampling")
        for name in ("rounds", "patience", "ray_address", "backend", "chunk", "workers"):
            table.pop(name, None)
        return table

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == "float64" else torch.float32

    def cohort_size(self, population: int) -> int:
        if self.cohort == "all":
            return population
        if self.cohort > population:
            raise UsageError(f"train.cohort is {self.cohort}, but the federation has only {population} "
                             f'clients: take at most {population}, or "all"')
        return self.cohort


@dataclass(frozen=True)
class Eval(Checked):
    every: int = hyper(5, "rounds between evaluations; the last round is always evaluated", ge=1)
    clients: int | None = hyper(None, "size of a fixed sample of clients to evaluate; absent: all", ge=1)
    metric: str | None = hyper(
        None, "what decides: accuracy, balanced_accuracy, auroc, loss, mse or r2; it selects the best "
              "round, and tuning and comparing go by it; absent: accuracy, or balanced_accuracy where "
              "classes are unbalanced, or loss")
    metrics: tuple[str, ...] | None = hyper(
        None, 'your own figures of a finished run: "package.module:function", of (outputs, y)')
    rows: Literal["own", "all"] = hyper(
        "own", "the test rows that clients' own models are scored on: their own; or besides those of all "
               "clients (`everywhere` in the metrics)")
    diagnostics: tuple[str, ...] | None = hyper(
        None, 'figures of each round by name: coherence, drift, spread; or "package.module:function", of '
              "what the server sees (descant.engine.diagnostics)")

    def __post_init__(self) -> None:
        super().__post_init__()
        own = [place.partition(":")[2] for place in self.metrics or ()]
        if self.metric is not None and (is_place(self.metric) or self.metric in own):
            raise UsageError(f"eval.metric = {self.metric!r} is a function of your own, which is measured of "
                             "finished runs only: rounds are selected by one of descant's metrics, and yours "
                             "is reported beside it")
        for place in self.metrics or ():  # imported where runs are measured, never where they are read
            if not is_place(place):
                raise UsageError('eval.metrics must read "package.module:function", such as '
                                 f'"my_package.scores:f1", not {place!r}')

    def due(self, number: int, rounds: int) -> bool:
        return number % self.every == 0 or number == rounds

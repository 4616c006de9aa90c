"""What server and clients agree on before the first round, and what either makes of it by itself.

Both sides make the method, the model and its initial parameters from the experiment and the seed, so that
these need not travel; and both learn by a rehearsal what form each message and each answer must have.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from descant.data import DATASETS
from descant.data.folder import OnNodes
from descant.engine.choose import templates
from descant.engine.processes import Templates
from descant.engine.rounds import Training
from descant.engine.settings import Train
from descant.engine.shard import Shard
from descant.engine.work import Job, Work
from descant.errors import UsageError
from descant.experiment.config import Experiment
from descant.experiment.run import Setup
from descant.flower.frame import Frame, Kind, Member
from descant.models import OwnModel
from descant.pool import Federation
from descant.task import Task
from descant.tree import Tree

PROTOCOL = 1


def tables_of(experiment: Experiment) -> dict[str, Any]:
    """The sections of an experiment as they travel: nothing that is a path of somebody's machine."""
    tables = experiment.dump()
    tables["train"] |= {"backend": "loop", "device": "cpu"}
    for name in ("chunk", "workers", "ray_address"):
        tables["train"].pop(name, None)
    return tables


def read_experiment(tables: Mapping[str, Any], own_model: str | None) -> Experiment:
    """The experiment that a server sends. It names a method, a model and a schema, all of which are known
    here; code of somebody's own is run only if who started this client named it too."""
    data = tables.get("data")
    if not isinstance(data, Mapping) or data.get("dataset") not in (OnNodes.name, *DATASETS):
        raise UsageError("the experiment's data are neither with the clients nor a known dataset")
    if data.get("partition_file") is not None:
        raise UsageError("the experiment names a file of a partition, which is on another machine")
    experiment = Experiment.parse(tables)
    model = experiment.model.model
    if isinstance(model, OwnModel) and model.place != own_model:
        raise UsageError(f"the experiment's model is {model.place!r}, which is code of its own: if it is "
                         f"what you expect, start the client with --model {model.place}")
    return experiment


class Forms(NamedTuple):
    """One row of everything that travels, and of a client's state."""

    messages: dict[Job, Any]
    answers: dict[Job, Tree]
    state: Tree


@dataclasses.dataclass(frozen=True)
class Plan:
    """An experiment on a federation whose data are elsewhere."""

    experiment: Experiment
    kind: Kind
    names: tuple[str, ...]
    unseen: int = 0  # the last of these never train: newcomers

    @property
    def session(self) -> str:
        """Names this federation: the same experiment on the same kind of data with the same clients. The
        number of rounds may grow."""
        tables = tables_of(self.experiment)
        tables["train"].pop("rounds")
        facts = [PROTOCOL, tables, self.kind.dump(), self.names, self.unseen]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def train(self) -> Train:
        return self.experiment.train

    def frame(self, members: Sequence[Member] | None = None) -> Frame:
        """The federation as the server knows it; without members, one to try things on."""
        members = members or [Member(name, 1, 1, 1) for name in self.names]
        return Frame.of(self.kind, members, self.train.torch_dtype, self.unseen)

    def task(self) -> Task:
        return self.experiment.model.task(self.frame(), self.train.torch_dtype, self.train.seed)

    def work(self, task: Task, federation: Federation) -> Work:
        return Work(self.experiment.algorithm, task, federation, self.train.seed, self.train.batch,
                    self.train.local)

    def setup(self, task: Task, members: Sequence[Member]) -> Setup:
        """The server's side of a run."""
        sections = tables_of(self.experiment)
        return Setup(self.experiment.algorithm, task, self.frame(members), self.train, self.experiment.eval,
                     {name: sections[name] for name in ("data", "model")})

    def forms(self, task: Task) -> Forms:
        """By letting clients with one row of zeros each do a round's work without batches."""
        frame = self.frame()
        here = Shard(**{field.name: getattr(frame, field.name) for field in dataclasses.fields(frame)})
        work = self.work(task, here)
        found: Templates = templates(Training(work, self.train))
        return Forms(found.messages, work.templates, found.state)

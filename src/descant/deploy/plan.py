"""What server and clients agree on before the first round, and what either makes of it by itself.

Both sides make the method, the model and its initial parameters from the experiment and the seed, so that
these need not travel; and both learn by a rehearsal what form each message and each answer must have.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from descant.core.federation import Federation
from descant.core.import_object import require_permitted
from descant.core.metrics import AUROC
from descant.core.permit import Allowed, opened
from descant.core.sample import SampleFormat
from descant.core.task import Task
from descant.core.tree import Tree
from descant.data import DATASETS
from descant.data.folder import OnNodes
from descant.deploy.frame import Frame, Member
from descant.engine.backends.choose import templates
from descant.engine.backends.processes import Templates
from descant.engine.backends.shard import Shard
from descant.engine.rounds import Training
from descant.engine.settings import Train
from descant.engine.work import Job, Work
from descant.errors import UsageError
from descant.experiment.config import Experiment, differences
from descant.experiment.run import Setup

PROTOCOL = 1


def tables_of(experiment: Experiment) -> dict[str, Any]:
    """The sections of an experiment as they travel: nothing that is a path of somebody's machine."""
    tables = experiment.dump()
    tables["train"] |= {"backend": "loop", "device": "cpu"}
    for name in ("chunk", "workers", "ray_address"):
        tables["train"].pop(name, None)
    tables["eval"].pop("metrics", None)  # for comparisons, which are made elsewhere
    return tables


def read_experiment(tables: Mapping[str, Any], allow: Allowed = (),
                    expected: Mapping[str, Any] | None = None) -> Experiment:
    """The experiment that a server sends. It names a method, a model and a schema, all of which are known
    here. Code of somebody's own, wherever it is named, is imported only if who started this client allowed
    it; and where they said which experiment they expect, it must be that one."""
    if expected is not None and (changed := differences(_comparable(expected), _comparable(tables))):
        raise UsageError(f"the server's experiment is not the one that was expected here: {changed[0]}")
    data = tables.get("data")
    if not isinstance(data, Mapping) or data.get("dataset") not in (OnNodes.name, *DATASETS):
        raise UsageError("the experiment's data are neither with the clients nor a known dataset")
    if data.get("partition_file") is not None:
        raise UsageError("the experiment names a file of a partition, which is on another machine")
    permit = opened(allow)
    require_permitted(tables, permit, "the server's experiment: ")
    return Experiment.parse(tables, permit)


def _comparable(tables: Mapping[str, Any]) -> Any:
    """As it travels, but for the number of rounds, which may grow."""
    plain = json.loads(json.dumps(tables))
    plain.get("train", {}).pop("rounds", None)
    return plain


def hashed(names: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps([*names]).encode()).hexdigest()[:16]


class Forms(NamedTuple):
    """One row of everything that travels, and of a client's state."""

    messages: dict[Job, Any]
    answers: dict[Job, Tree]
    state: Tree


@dataclasses.dataclass(frozen=True)
class Plan:
    """An experiment on a federation whose data are elsewhere."""

    experiment: Experiment
    kind: SampleFormat
    clients: int
    names: str  # a hash of them: clients are not told what the others are called
    unseen: int = 0  # the last of the clients never train: newcomers

    @cached_property
    def session(self) -> str:
        """Names this federation: the same experiment on the same kind of data with the same clients. The
        number of rounds may grow."""
        tables = tables_of(self.experiment)
        tables["train"].pop("rounds")
        facts = [PROTOCOL, tables, self.kind.dump(), self.clients, self.names, self.unseen]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def train(self) -> Train:
        return self.experiment.train

    def frame(self, members: Sequence[Member] | None = None) -> Frame:
        """The federation as the server knows it; without members, one to try things on."""
        members = members or [Member(str(number), 1, 1, 1) for number in range(self.clients)]
        return Frame.of(self.kind, members, self.train.torch_dtype, self.unseen)

    def task(self) -> Task:
        return self.experiment.model.task(self.frame(), self.train.torch_dtype, self.train.seed)

    def work(self, task: Task, federation: Federation) -> Work:
        return Work(self.experiment.algorithm, task, federation, self.train.seed, self.train.batch,
                    self.train.local, ranks=self.experiment.eval.metric == AUROC)

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

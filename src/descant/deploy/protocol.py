"""What server and clients agree on before the first round.

Both sides make the method, the model and its initial parameters from the experiment and the seed, so that
these need not travel. Both find the shapes of every message by a dry run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from descant.algorithms import ALGORITHMS
from descant.core.federation import Federation
from descant.core.files import write_atomic
from descant.core.import_object import require_permitted
from descant.core.metric import AUROC
from descant.core.permit import Allowed, opened, ran
from descant.core.sample import SampleFormat
from descant.core.sealed import sealed_table, unsealed_table
from descant.core.task import Task
from descant.core.tree import Tree
from descant.data import DATASETS
from descant.data.folder import OnNodes
from descant.data.spec import anchored
from descant.deploy.privacy import require_agreed
from descant.deploy.secure.agreement import Agreement
from descant.engine.backends.choose import templates
from descant.engine.backends.processes import Templates
from descant.engine.backends.shard import Shard, table_of_zeros
from descant.engine.protect import protected
from descant.engine.rounds import Training
from descant.engine.settings import Train
from descant.engine.work import Job, Work
from descant.errors import DescantError, UsageError
from descant.experiment import directory as layout
from descant.experiment import run as runs
from descant.experiment.config import Experiment, differences, override, read_toml
from descant.experiment.run import Run, Setup

PROTOCOL = 1
TRAINING: tuple[Job, ...] = ("local", "opening")  # jobs with an upload
MAX_CLIENTS = 10**5  # of a federation
MAX_ROWS = 10**8  # of a client
BLOCK = 2**20  # bytes that are hashed at once


def load_experiment(file: Path, settings: Sequence[str], allow: Sequence[str] = ()) -> Experiment:
    """The experiment in a file; a data folder in it need not exist, because the clients have the data."""
    tables = override(read_toml(file), settings)
    data = tables.get("data")
    if isinstance(data, dict):
        name = anchored(data, Path.cwd()).get("dataset")
        if isinstance(name, str) and name not in DATASETS and "/" in name:
            tables["data"] = data | {"dataset": OnNodes.name}
    experiment = Experiment.parse(tables, ran(allow))
    require_agreed(experiment)
    spec = experiment.data
    if isinstance(spec.dataset, OnNodes) and spec.partition.name != "natural":
        raise UsageError(f"data.partition = {spec.partition.name!r} assigns rows to clients, but in a remote "
                         "federation every client has its own: leave it out")
    if spec.partition_file is not None:
        raise UsageError("data.partition_file assigns rows to clients, but in a remote federation every "
                         "client has its own: leave it out")
    if experiment.train.average is not None:
        raise UsageError("train.average is for simulations: in a remote federation, clients predict with the "
                         "models of the best round; leave it out")
    if experiment.train.availability is not None:
        raise UsageError("train.availability is for simulations; here clients come and go by themselves: "
                         "leave it out, and see --deadline")
    if spec.unseen:
        raise UsageError("data.unseen is for simulations; here every client that joins after the training is "
                         "a newcomer: leave it out, and see --stay")
    return experiment


def tables_of(experiment: Experiment) -> dict[str, Any]:
    """The sections of an experiment as the server sends them, without paths on its machine."""
    tables = experiment.dump()
    tables["train"] |= {"backend": "loop", "device": "cpu"}
    for name in ("chunk", "workers", "ray_address"):
        tables["train"].pop(name, None)
    tables["eval"].pop("metrics", None)  # for comparisons only
    return tables


def received_experiment(tables: Mapping[str, Any], allow: Allowed = (),
                        expected: Mapping[str, Any] | None = None) -> Experiment:
    """The experiment that a server sent. Code that it names is imported only if it is in `allow`. With
    `expected`, it must be that one; it may have fewer rounds."""
    if expected is not None:
        if changed := differences(_comparable(expected), _comparable(tables)):
            raise UsageError(f"the server's experiment is not the expected one: {changed[0]}")
        asked, agreed = (each.get("train", {}).get("rounds") for each in (tables, expected))
        if not isinstance(asked, int) or asked > agreed:
            raise UsageError(f"the server's experiment has {asked!r:.20} rounds, and {agreed} were agreed")
    data = tables.get("data")
    if not isinstance(data, Mapping) or data.get("dataset") not in (OnNodes.name, *DATASETS):
        raise UsageError("the experiment's data are neither with the clients nor a known dataset")
    if data.get("partition_file") is not None:
        raise UsageError("the experiment names a partition file, which is on another machine")
    permit = opened(allow)
    require_permitted(tables, permit, "the server's experiment: ")
    try:
        experiment = Experiment.parse(tables, permit)
        require_agreed(experiment)
        return experiment
    except UsageError as error:
        name = tables.get("algorithm", {}).get("name")
        both = "" if name in ALGORITHMS else f"; the method {name} must be installed here as on the server"
        raise UsageError(f"the server's experiment: {error}{both}") from None


def _comparable(tables: Mapping[str, Any]) -> Any:
    plain = json.loads(json.dumps(tables))
    plain.get("train", {}).pop("rounds", None)
    return plain


def hash_names(names: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps([*names]).encode()).hexdigest()[:16]


class ClientInfo(NamedTuple):
    """A client as the server knows it."""

    name: str
    train: int  # rows
    validation: int
    test: int


class RemoteFederation(Shard):
    """A federation of which only the sizes are known: every row of every client is the first of two samples
    of zeros. That is enough to make the model, to weight clients, and to know the shape of an upload."""

    is_remote: ClassVar[bool] = True
    has_rows: ClassVar[bool] = False

    @classmethod
    def of(cls, sample: SampleFormat, clients: Sequence[ClientInfo], dtype: torch.dtype, unseen: int = 0
           ) -> RemoteFederation:
        x, y = sample.zeros(dtype)
        names, *sizes = zip(*clients, strict=True)
        train, validation, test = map(table_of_zeros, sizes)
        return cls(x, y, train, validation, test, sample.classes, names, unseen=unseen)

    def fingerprint(self) -> str:
        """As of any federation. The indices are all zero, and are not in memory: rows are only claimed."""
        digest = hashlib.sha256(repr((self.classes, self.names, self.unseen)).encode())
        for tensor in (self.x, self.y):
            digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().data)
        for table in (self.train, self.validation, self.test):
            digest.update(table.offsets.data)
            for start in range(0, table.indices.nbytes, BLOCK):
                digest.update(bytes(min(BLOCK, table.indices.nbytes - start)))
        return digest.hexdigest()[:16]


class Shapes(NamedTuple):
    """One row of everything that travels, and of a client's state."""

    messages: dict[Job, Any]
    results: dict[Job, Tree]
    state: Tree


@dataclasses.dataclass(frozen=True)
class RemoteExperiment:
    """An experiment on a remote federation."""

    experiment: Experiment
    kind: SampleFormat
    clients: int
    names: str  # a hash: clients do not learn each other's names
    unseen: int = 0  # the last of the clients never train: newcomers
    secure: Agreement | None = None  # on secure aggregation

    @cached_property
    def session(self) -> str:
        """Identifies the experiment, the kind of data and the clients. The number of rounds may grow."""
        tables = tables_of(self.experiment)
        tables["train"].pop("rounds")
        facts = [PROTOCOL, tables, self.kind.dump(), self.clients, self.names, self.unseen]
        if self.secure is not None:
            facts.append(self.secure)
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def agreed(self) -> str:
        """Identifies the experiment alone, which is what a client can expect; not the number of rounds."""
        tables = _comparable(tables_of(self.experiment))
        return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def train(self) -> Train:
        return self.experiment.train

    def __str__(self) -> str:
        return f"{self.experiment.algorithm.name}, {self.experiment.model.dump().get('name')}"

    def federation(self, clients: Sequence[ClientInfo] | None = None) -> RemoteFederation:
        """The federation as the server knows it; without clients, one row in each split of everyone."""
        clients = clients or [ClientInfo(str(number), 1, 1, 1) for number in range(self.clients)]
        return RemoteFederation.of(self.kind, clients, self.train.torch_dtype, self.unseen)

    def task(self) -> Task:
        return self.experiment.model.task(self.federation(), self.train.torch_dtype, self.train.seed)

    def work(self, task: Task, federation: Federation) -> Work:
        work = Work(self.experiment.algorithm, task, federation, self.train.seed, self.train.batch,
                    self.train.local, ranks=self.experiment.eval.metric == AUROC)
        privacy = self.experiment.privacy
        return work if privacy is None else protected(work, self.train, privacy, secret=True)

    def local_work(self, task: Task) -> Work:
        """Work on rows of zeros in this process."""
        remote = self.federation()
        local = Shard(**{field.name: getattr(remote, field.name) for field in dataclasses.fields(remote)})
        return self.work(task, local)

    def setup(self, task: Task, federation: Federation) -> Setup:
        """One side of the experiment as a run."""
        sections = self.experiment.dump()
        return Setup(self.experiment.algorithm, task, federation, self.train, self.experiment.eval,
                     {name: sections[name] for name in ("data", "model")}, privacy=self.experiment.privacy,
                     robust=self.experiment.robust)

    def shapes(self, task: Task) -> Shapes:
        """By a dry run: clients with one row of zeros do a round without batches."""
        work = self.local_work(task)
        found: Templates = templates(Training(work, self.train))
        return Shapes(found.messages, work.templates, found.state)


# -- the server's file -----------------------------------------------------------------------------


def write_clients(path: Path, remote: RemoteExperiment, clients: Sequence[ClientInfo]) -> None:
    table = {"session": remote.session, "kind": remote.kind.dump(),
             "members": [client._asdict() for client in clients]}
    write_atomic(path, json.dumps(sealed_table(table), indent=1).encode())


def read_clients(path: Path) -> tuple[str, SampleFormat, list[ClientInfo]]:
    """What `write_clients` wrote: the session, the kind of the data, the clients."""
    try:
        found = unsealed_table(json.loads(path.read_text(encoding="utf-8")))
        clients = [ClientInfo(**client) for client in found["members"]]
        if not clients or not all(isinstance(client.name, str) and all(
                type(rows) is int and 0 <= rows < 2**31 for rows in client[1:]) for client in clients):
            raise ValueError("its members are not clients")
        return found["session"], SampleFormat.parse(found["kind"]), clients
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DescantError(f"{path} is damaged ({error}): restore it from a backup, or start the federation "
                           "again in another directory") from None


def federation_run(place: Path) -> Path | None:
    """The run of `descant server` in this directory, or this directory if it is one; else None."""
    if (place / "federation.json").exists() and not (place / "config.toml").exists():
        place = place / "run"
    return place if place.name == "run" and (place.parent / "federation.json").exists() else None


def load_federation_run(place: Path, allow: Allowed = ()) -> Run:
    """What `federation_run` found, to be read only. Code that it names must be in `allow`."""
    _, kind, clients = read_clients(place.parent / "federation.json")
    names = hash_names([client.name for client in clients])
    remote = RemoteExperiment(layout.experiment(place, allow), kind, len(clients), names)
    return runs.load(place, remote.setup(remote.task(), remote.federation(clients)))

"""The server: wait for the clients, run the rounds, send the personal models' broadcasts.

The rounds are an ordinary run (`experiment/run.py`) with a remote backend, so that metrics, checkpoints and
the choice of the best round are the same as in simulation. The server keeps the method's state, the clients'
names and their numbers of rows; it has no row and no client state.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from descant.core.algorithm import Message, Round, at_most
from descant.core.files import locked, write_atomic
from descant.core.sample import SampleFormat
from descant.core.tree import nbytes, take
from descant.deploy import backend
from descant.deploy.backend import RemoteBackend, Rules
from descant.deploy.client_manager import NO_KIND, ClientManager, ConnectedClient, raise_failure
from descant.deploy.messages import WireMessage
from descant.deploy.noised import require_alike
from descant.deploy.privacy import require_agreed
from descant.deploy.protocol import (
    TRAINING,
    ClientInfo,
    RemoteExperiment,
    Shapes,
    hash_names,
    read_clients,
    tables_of,
    write_clients,
)
from descant.deploy.secure_rounds import agreed, notes
from descant.deploy.summand import Summand
from descant.deploy.transport import NoReply, Rejected, ServerTransport
from descant.engine.personal import message_for
from descant.engine.rounds import Training
from descant.engine.work import ClientScores, LocalResult
from descant.errors import DescantError, UsageError
from descant.experiment import directory as layout
from descant.experiment import observe
from descant.experiment import run as runs
from descant.experiment.config import Experiment
from descant.experiment.run import Run
from descant.models import ModelSpec

MANY = 1000  # clients
PAUSE = 0.5  # seconds between looks for clients
SHARES = 1024  # bytes of what a client deals to another in secure aggregation


class Observer(backend.Observer, observe.Observer, Protocol):
    """Told about the whole federation."""

    def refused(self, name: str, reason: str) -> None:
        """A client that cannot take part."""

    def gathered(self, names: Sequence[str], what: str, parameters: int, rounds: int) -> None: ...

    def noted(self, text: str) -> None: ...

    def differing(self, some: Sequence[str], others: Sequence[str], how: str) -> None:
        """The samples of connected clients do not fit together, and nobody can tell who is right."""

    def served(self, name: str, figures: dict[str, Any]) -> None:
        """A client has its model."""


def run_server(experiment: Experiment, transport: ServerTransport, out: Path, clients: int, rules: Rules,
               observer: Observer, *, alone: bool = True, stay: bool = False, authority: bytes | None = None,
               trackers: Sequence[observe.Observer] = ()) -> Run:
    """Run a federation of so many clients, or continue the one in `out`. `alone`: the clients also learn what
    local training alone gives. `stay`: newcomers are served until this is stopped. `authority`: the
    certificate by which clients know each other's keys, for secure aggregation (PEM). `trackers` are told of
    the rounds."""
    if rules.at_least > clients:
        raise UsageError(f"at least {rules.at_least} clients must reply in every round, but there are "
                         f"{clients}: lower it")
    if experiment.attack is not None:
        raise UsageError("[attack] simulates attackers with `descant run`; a real federation has none of its "
                         "own: take the section out")
    require_agreed(experiment)
    agreement = agreed(experiment, clients, rules) if rules.secure else None
    _require_enough(experiment, clients)
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        manager = ClientManager(transport, tables_of(experiment), observer.refused)
        remote = _gather(RemoteExperiment(experiment, NO_KIND, clients, "", secure=agreement), manager,
                         out / "federation.json", observer)
        task = remote.task()
        _, _, infos = read_clients(out / "federation.json")
        shapes = remote.shapes(task)
        if agreement is not None and experiment.privacy is not None and experiment.privacy.unit == "client":
            require_alike(shapes)
        observer.gathered(manager.names, str(remote), task.dim, remote.train.rounds)
        if (out / "run" / "config.toml").exists() and layout.rounds(out / "run") < remote.train.rounds:
            (out / "clients.json").unlink(missing_ok=True)  # more rounds, other models
        setup = dataclasses.replace(remote.setup(task, remote.federation(infos)), most=rules.max_share)
        transport.expect(_largest_reply(remote, shapes))
        _tell_bounded(infos, rules.max_share, observer)
        for note in () if agreement is None else notes(agreement):
            observer.noted(note)
        run = runs.lead(setup, out / "run",
                        lambda run: RemoteBackend(run, remote, shapes, manager, rules, observer, authority),
                        observe.Together([observer, *trackers]))
        delivery = ModelDelivery(run, remote, manager, rules, observer, out / "clients.json", alone)
        delivery.deliver()
        while stay:
            time.sleep(PAUSE)
            delivery.deliver()
    return run


def _require_enough(experiment: Experiment, clients: int) -> None:
    """Raise what the method says about so few clients, before any is waited for. Their data are not known:
    other data and another model stand in, and what is wrong with these is wrong with many clients, too."""
    stand_in = dataclasses.replace(experiment, model=ModelSpec.parse({"name": "mclr"}))

    def begin(count: int) -> None:
        remote = RemoteExperiment(stand_in, SampleFormat((2,), target_dtype="int64", classes=2), count, "")
        Training(remote.local_work(remote.task()), remote.train).screen(experiment.robust, None)

    try:
        begin(clients)
    except Exception:
        try:
            begin(MANY)
        except Exception:
            return
        raise


def _largest_reply(remote: RemoteExperiment, shapes: Shapes) -> int:
    """In bytes of tensors, with the scores that ride; words of masked vectors have eight, and shares are for
    every client."""
    plain = max(nbytes(result._replace(state=()) if isinstance(result, LocalResult) else result)
                for result in shapes.results.values()) + max(
        nbytes(result) for result in shapes.results.values() if isinstance(result, ClientScores))
    if remote.secure is None:
        return plain
    method = remote.experiment.algorithm
    words = max(Summand(method, shapes, job).length for job in TRAINING if job in shapes.results)
    return max(plain, 8 * words, SHARES * remote.clients)


def _gather(wanted: RemoteExperiment, manager: ClientManager, path: Path, observer: Observer
            ) -> RemoteExperiment:
    """Wait for the clients and let them join, or read who they are."""
    clients = wanted.clients
    if path.exists():
        session, kind, infos = read_clients(path)
        names = tuple(info.name for info in infos)
        remote = dataclasses.replace(wanted, kind=kind, clients=len(names), names=hash_names(names))
        if len(infos) != clients:
            raise UsageError(f"{path.parent} holds a federation of {len(infos)} clients, not {clients}: "
                             f"start it with --clients {len(infos)}, or choose another --out")
        if remote.session != session:
            raise UsageError(f"{path.parent} holds a federation of another experiment: restore that one, or "
                             "choose another --out; secure aggregation and its threshold are a part of it")
        manager.begin(remote, names, infos)
        return remote
    while True:
        remote = _formed(wanted, manager, observer)
        remote.shapes(remote.task())  # whatever the server can know does not fit is said before anybody joins
        if (joined := manager.join_all()) is not None:
            remote.federation(joined)  # before it is written down
            write_clients(path, remote, joined)
            return remote


def _formed(wanted: RemoteExperiment, manager: ClientManager, observer: Observer) -> RemoteExperiment:
    """Wait until so many clients are connected whose samples fit together. Those that do not fit most of the
    others are refused: whoever comes first need not be right."""
    manager.reset()
    clients = wanted.clients
    while len(group := _largest_group(found := manager.connected())) < clients:
        others = {name for name in found if name not in group}
        if len(group) > len(others) > 0 and len(group) > 1:
            manager.refuse(others, found[group[0]].kind)
        elif others:
            how = found[group[0]].kind.differs(found[min(others)].kind)
            observer.differing(group, sorted(others), str(how))
        observer.waiting(len(found), clients, sorted(found))
        time.sleep(PAUSE)
    names = tuple(group[:clients])
    schema = wanted.experiment.data.schema
    classes = None if schema is None or schema.classes is None else len(schema.classes)
    kind = SampleFormat.common([found[name].kind for name in names], classes)
    remote = dataclasses.replace(wanted, kind=kind, names=hash_names(names))
    manager.begin(remote, names, [])
    return remote


def _largest_group(found: Mapping[str, ConnectedClient]) -> list[str]:
    """The names of most clients whose samples fit together; of equal groups that with the first name."""
    groups: list[list[str]] = []
    for name in sorted(found):
        for group in groups:
            if found[group[0]].kind.differs(found[name].kind) is None:
                group.append(name)
                break
        else:
            groups.append([name])
    return max(groups, key=len, default=[])


def _tell_bounded(infos: Sequence[ClientInfo], share: float, observer: Observer) -> None:
    rows = torch.tensor([info.train for info in infos]).double()
    counted = at_most(rows, share)
    for info, own, counts in zip(infos, rows / rows.sum(), counted / counted.sum(), strict=True):
        if counts < own:
            observer.noted(f"{info.name} has {100 * own:.3g} % of the training rows; by rows it counts for "
                           f"{100 * counts:.3g} % (--max-share)")


class ModelDelivery:
    """After the training, lets clients and newcomers make their personal models."""

    def __init__(self, run: Run, remote: RemoteExperiment, manager: ClientManager, rules: Rules,
                 observer: Observer, path: Path, alone: bool) -> None:
        self._run, self._remote, self._manager, self._rules = run, remote, manager, rules
        self._observer, self._path, self._alone = observer, path, alone
        self._served = read_served(path)
        self._failed: dict[str, str] = {}  # name -> connected since: not asked again until it reconnects

    def deliver(self) -> None:
        """To all connected clients that have no model yet."""
        there = self._manager.connected()
        due = [client for client, name in enumerate(self._manager.names)
               if name in there and not self._is_done(there[name])]
        for client, reply in self._manager.request(self._requests(np.array(due, np.int64)),
                                                   self._rules.deadline):
            self._record(there[self._manager.names[client]], reply)
        for address, newcomer in self._manager.newcomers().items():
            if not self._is_done(newcomer):
                self._serve_newcomer(address, newcomer)

    def _is_done(self, client: ConnectedClient) -> bool:
        return client.name in self._served or self._failed.get(client.name) == client.since

    def _requests(self, clients: np.ndarray) -> dict[int, WireMessage]:
        number, server, store = self._run.snapshot("best")
        took_part = store.took_part(clients)
        found: dict[int, WireMessage] = {}
        for is_new in (False, True):
            if not len(some := clients[took_part != is_new]):
                continue
            message = message_for(self._run.setup.algorithm, server, self._run.work.round_of(some, number),
                                  is_new, score=True)
            counted = np.zeros_like(some) if is_new else store.last_round[some]
            found |= self._finish(self._remote.session, number, some, counted, message)
        return found

    def _finish(self, session: str, number: int, clients: np.ndarray, counted: np.ndarray, message: Message
                ) -> dict[int, WireMessage]:
        """By client; what all are sent is packed once."""
        shared = WireMessage.of({}, shared=message.shared).tensors
        found = {}
        for k, client in enumerate(clients.tolist()):
            facts = {"what": "finish", "session": session, "number": number, "counted": int(counted[k]),
                     "alone": self._alone}
            each = WireMessage.of({}, each=take(message.each, k)).tensors
            found[client] = WireMessage(facts, {**shared, **each})
        return found

    def _serve_newcomer(self, address: int, newcomer: ConnectedClient) -> None:
        """A newcomer's number comes after all others."""
        names, population = (*self._manager.names, newcomer.name), self._remote.clients
        remote = dataclasses.replace(self._remote, clients=len(names), names=hash_names(names), unseen=1)
        found = self._manager.join(address, remote, population, newcomer.name)
        if isinstance(found, NoReply):
            self._record(newcomer, found)
            return
        number, server, _ = self._run.snapshot("best")
        work = self._run.work
        facts = Round(work.seed, number, torch.tensor([population]),
                      torch.tensor([found.train], dtype=work.task.dtype), population)
        message = message_for(work.algorithm, server, facts, True, score=True)
        finish = self._finish(remote.session, number, np.array([population]), np.zeros(1, np.int64), message)
        self._record(newcomer, self._manager.send(address, finish[population], self._rules.deadline))

    def _record(self, client: ConnectedClient, reply: WireMessage | NoReply) -> None:
        try:
            if isinstance(reply, NoReply):
                raise Rejected(reply.reason)
            raise_failure(reply)
            figures = _figures(reply.fact("figures", dict))
        except Rejected as error:
            self._failed[client.name] = client.since
            self._observer.lost(client.name, "finish", str(error))
            return
        self._served[client.name] = figures
        write_atomic(self._path, json.dumps(self._served, indent=1).encode())
        self._observer.served(client.name, figures)


def read_served(path: Path) -> dict[str, Any]:
    """The figures of the clients that have their models, by name."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        numbers = [value for client in found.values() for who in client.values() for value in who.values()]
        if not all(value is None or type(value) in (int, float) for value in numbers):
            raise ValueError("its figures are not numbers")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise DescantError(f"{path} is damaged ({error}): remove it, and the clients make their models again"
                           ) from None
    return dict(found)


def _figures(table: dict[str, Any]) -> dict[str, Any]:
    """{"personal": {"accuracy": 0.9, ...}, ...}, as a client reports it."""
    try:
        found = {str(who)[:20]: {str(name)[:40]: float(value) for name, value in figures.items()}
                 for who, figures in table.items()}
    except (AttributeError, TypeError, ValueError):
        raise Rejected("its figures are not numbers") from None
    return {who: {name: value if math.isfinite(value) else None for name, value in figures.items()}
            for who, figures in found.items()}

"""The server's side from the first client to the last: gather, play the rounds, hand out the models.

The rounds themselves are an ordinary run (`experiment/run.py`) with nodes for a backend, so that metrics,
checkpoints and the choice of the best round are what they are in simulation. The server keeps the method's
state, the clients' names and how many rows they have; no row, and no client's state.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from descant.core.algorithm import Message, Round
from descant.core.files import locked, write_atomic
from descant.core.sample import SampleFormat
from descant.core.task import Task
from descant.core.tree import take
from descant.data.spec import DataSpec
from descant.deploy import nodes
from descant.deploy.exchange import Exchange, Lost
from descant.deploy.letters import Letter, Refused
from descant.deploy.nodes import Nodes, Rules
from descant.deploy.plan import Forms, Plan, hashed, tables_of
from descant.deploy.roster import Guest, Roster, read_members, refuse_failure
from descant.engine.personal import message_for
from descant.errors import UsageError
from descant.experiment import directory as layout
from descant.experiment import run as runs
from descant.experiment.config import Experiment
from descant.experiment.run import Observer, Run

PAUSE = 0.5  # seconds between looks for clients


class Watcher(nodes.Watcher, Observer, Protocol):
    """Whoever watches the whole of it."""

    def refused(self, name: str, reason: str) -> None:
        """A node that cannot take part."""

    def gathered(self, plan: Plan, task: Task) -> None: ...

    def served(self, name: str, figures: dict[str, Any]) -> None:
        """A client has its model."""


def lead(experiment: Experiment, exchange: Exchange, out: Path, clients: int, rules: Rules,
         watcher: Watcher, *, alone: bool = True, stay: bool = False) -> Run:
    """Lead a federation of so many clients to its end, from wherever `out` says that it stands. `alone`: the
    clients also see what they learn alone. `stay`: newcomers are served until somebody stops this."""
    if rules.at_least > clients:
        raise UsageError(f"at least {rules.at_least} clients are to answer in every round, but there are "
                         f"{clients}: ask for fewer")
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        roster = Roster(exchange, tables_of(experiment), watcher.refused)
        plan = _gather(experiment, roster, out / "federation.json", clients, watcher)
        task = plan.task()
        _, _, members = read_members(out / "federation.json")
        forms = plan.forms(task)
        watcher.gathered(plan, task)
        if (out / "run" / "config.toml").exists() and layout.rounds(out / "run") < plan.train.rounds:
            (out / "clients.json").unlink(missing_ok=True)  # more rounds, other models
        run = runs.lead(plan.setup(task, members), out / "run",
                        lambda run: Nodes(run, plan, forms, roster, rules, watcher), watcher)
        host = Host(run, plan, forms, roster, rules, watcher, out / "clients.json", alone)
        host.hand_out()
        while stay:
            time.sleep(PAUSE)
            host.hand_out()
    return run


def _gather(experiment: Experiment, roster: Roster, path: Path, clients: int, watcher: Watcher) -> Plan:
    """Wait for the clients and let them join; or remember who they were."""
    if path.exists():
        session, kind, members = read_members(path)
        names = tuple(member.name for member in members)
        plan = Plan(experiment, kind, len(names), hashed(names))
        if len(members) != clients:
            raise UsageError(f"{path.parent} holds a federation of {len(members)} clients, not {clients}: "
                             f"start it with --clients {len(members)}, or choose another --out")
        if plan.session != session:
            raise UsageError(f"{path.parent} holds a federation of another experiment: put that back, or "
                             "choose another --out")
        roster.begin(plan, names, members)
        return plan
    while len(guests := roster.greet()) < clients:
        watcher.waiting(len(guests), clients, sorted(guests))
        time.sleep(PAUSE)
    names = tuple(sorted(guests)[:clients])
    kind = SampleFormat.common([guests[name].kind for name in names], _classes(experiment.data))
    plan = Plan(experiment, kind, clients, hashed(names))
    roster.begin(plan, names, [])
    roster.join_all()
    roster.write(path)
    return plan


def _classes(spec: DataSpec) -> int | None:
    """How many the experiment says there are; else as many as the clients have seen."""
    schema = spec.schema
    return None if schema is None or schema.classes is None else len(schema.classes)


class Host:
    """Hands out the models when the training is over, to clients and newcomers alike."""

    def __init__(self, run: Run, plan: Plan, forms: Forms, roster: Roster, rules: Rules, watcher: Watcher,
                 path: Path, alone: bool) -> None:
        self._run, self._plan, self._roster, self._rules = run, plan, roster, rules
        self._watcher, self._path, self._alone = watcher, path, alone
        self._served: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self._failed: dict[str, str] = {}  # when they had come that could not be served

    def hand_out(self) -> None:
        """To everybody who is there and has none yet."""
        there = self._roster.greet()
        orders = {client: self._order(client) for client, name in enumerate(self._roster.names)
                  if name in there and not self._is_done(there[name])}
        for client, answer in self._roster.ask(orders, self._rules.deadline):
            self._note(there[self._roster.names[client]], answer)
        for node, guest in self._roster.newcomers().items():
            if not self._is_done(guest):
                self._welcome(node, guest)

    @property
    def missing(self) -> list[str]:
        """The clients that were not there for their model."""
        return [name for name in self._roster.names if name not in self._served]

    def _is_done(self, guest: Guest) -> bool:
        return guest.name in self._served or self._failed.get(guest.name) == guest.since

    def _order(self, client: int) -> Letter:
        number, server, store = self._run.snapshot("best")
        clients = np.array([client])
        took_part = bool(store.took_part(clients)[0])
        message = message_for(self._run.setup.algorithm, server, self._run.work.round_of(clients, number),
                              not took_part, score=True)
        counted = int(store.last_round[client]) if took_part else 0
        return self._letter(self._plan.session, number, counted, message)

    def _letter(self, session: str, number: int, counted: int, message: Message) -> Letter:
        return Letter.of({"what": "finish", "session": session, "number": number, "counted": counted,
                          "alone": self._alone}, shared=message.shared, each=take(message.each, 0))

    def _welcome(self, node: int, guest: Guest) -> None:
        """A newcomer gets what newcomers get, and a number after all others."""
        names, population = (*self._roster.names, guest.name), self._plan.clients
        plan = Plan(self._plan.experiment, self._plan.kind, len(names), hashed(names), unseen=1)
        found = self._plan.kind.differs(guest.kind) or self._roster.join(node, plan, population, guest.name)
        if isinstance(found, str):
            self._note(guest, Lost(found, True))
            return
        number, server, _ = self._run.snapshot("best")
        work = self._run.work
        facts = Round(work.seed, number, torch.tensor([population]),
                      torch.tensor([found.train], dtype=work.task.dtype), population)
        message = message_for(work.algorithm, server, facts, True, score=True)
        letter = self._letter(plan.session, number, 0, message)
        self._note(guest, self._roster.send(node, letter, self._rules.deadline))

    def _note(self, guest: Guest, answer: Letter | Lost) -> None:
        try:
            if isinstance(answer, Lost):
                raise Refused(answer.reason)
            refuse_failure(answer)
            figures = _figures(answer.fact("figures", dict))
        except Refused as error:
            self._failed[guest.name] = guest.since
            self._watcher.lost(guest.name, "finish", str(error))
            return
        self._served[guest.name] = figures
        write_atomic(self._path, json.dumps(self._served, indent=1).encode())
        self._watcher.served(guest.name, figures)


def _figures(table: dict[str, Any]) -> dict[str, Any]:
    """{"personal": {"accuracy": 0.9, ...}, ...}, as a client says."""
    try:
        found = {str(who)[:20]: {str(name)[:40]: float(value) for name, value in figures.items()}
                 for who, figures in table.items()}
    except (AttributeError, TypeError, ValueError):
        raise Refused("its figures are no figures") from None
    return {who: {name: value if math.isfinite(value) else None for name, value in figures.items()}
            for who, figures in found.items()}



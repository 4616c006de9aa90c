"""The backend whose clients are nodes: chunks of one, each on a machine of its own.

To the rest of the engine this is one more way to run clients. What comes back is read against what it must
be, and whoever sends anything else is refused by name: the round goes on with the others.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from descant.core.algorithm import Message
from descant.core.fields import Checked, hyper
from descant.core.tree import Tree, leaves, map_tree, stack, take
from descant.deploy.exchange import Lost
from descant.deploy.letters import Letter, Packed, Refused
from descant.deploy.plan import Forms, Plan
from descant.deploy.roster import Roster, refuse_failure
from descant.engine.backends.base import Backend
from descant.engine.backends.shard import Shard
from descant.engine.batches import LocalWork
from descant.engine.store import ClientStore
from descant.engine.work import Job, LocalResult, Outcome
from descant.errors import DescantError
from descant.experiment.run import Run

PAUSE = 0.5  # seconds between looks for clients that are missing
MOST_STEPS = 10**9  # gradient steps that a client can claim


@dataclass(frozen=True)
class Rules(Checked):
    """What the server insists on."""

    deadline: float = hyper(600.0, "seconds that a client has for the work of a round", gt=0)
    at_least: int = hyper(2, "clients without whose answers a round does not count; an average of one is its "
                             "model", ge=1)
    max_norm: float | None = hyper(
        None, "the largest distance of an upload from that of a client that learns nothing", gt=0)


class Watcher(Protocol):
    """Whoever wants to know how the clients are doing, such as a display or a log."""

    def waiting(self, there: int, wanted: int, missing: Sequence[str]) -> None: ...

    def asked(self, job: str, number: int, names: Sequence[str]) -> None: ...

    def answered(self, name: str, job: str, seconds: float, received: int) -> None: ...

    def lost(self, name: str, job: str, reason: str) -> None:
        """No answer; or one that was refused."""


class Nodes(Backend):
    def __init__(self, run: Run, plan: Plan, forms: Forms, roster: Roster, rules: Rules, watcher: Watcher
                 ) -> None:
        super().__init__(run.work, 1)
        run.work.templates.update(forms.answers)
        self._run = run
        self._plan = plan
        self._forms = forms
        self._roster = roster
        self._rules = rules
        self._watcher = watcher
        self._began = False

    def run(self, job: Job, clients: np.ndarray, number: int, message: Message, states: Tree) -> Outcome:
        store = self._run.snapshot("last").store
        shared = Letter.of({}, shared=message.shared).tensors
        orders = {int(client): self._order(job, int(client), number, store, shared, take(message.each, k))
                  for k, client in enumerate(clients)}
        place = {int(client): k for k, client in enumerate(clients)}
        found: dict[int, tuple[Tree, int]] = {}
        failed: dict[int, str] = {}
        least = min(self._rules.at_least, len(orders)) if job in ("local", "opening") else 0
        self._wait(list(orders))
        while True:
            missing = {client: order for client, order in orders.items()
                       if client not in found and client not in failed}
            absent = self._ask(job, number, missing, message, place, found, failed)
            # those who were not there may come back; those who were refused may not try again
            if len(found) >= least:
                break
            if len(found) + len(absent) < least:
                name, reason = next((self._roster.names[client], why) for client, why in failed.items())
                raise DescantError(f"{len(failed)} of {len(orders)} clients were refused in round {number}, "
                                   f"and without at least {least} it does not count; {name}: {reason}")
            self._wait(list(absent), least - len(found))
        failed |= absent
        done = sorted(place[client] for client in found)
        values = [found[int(clients[k])] for k in done]
        return Outcome(np.array(done, np.int64), stack([value for value, _ in values]) if values else (),
                       {place[client]: reason for client, reason in failed.items()},
                       sum(steps for _, steps in values))

    def close(self) -> None:
        """The nodes are not ours to end."""

    def _order(self, job: Job, client: int, number: int, store: ClientStore, shared: Mapping[str, Packed],
               each: Tree) -> Letter:
        best = self._run.snapshot("best").store
        facts = {"what": "work", "job": job, "number": number, "session": self._plan.session,
                 "counted": int(store.last_round[client]), "kept": [int(best.last_round[client])]}
        return Letter(facts, {**shared, **Letter.of({}, each=each).tensors})

    def _ask(self, job: Job, number: int, orders: dict[int, Letter], message: Message, place: dict[int, int],
             found: dict[int, tuple[Tree, int]], failed: dict[int, str]) -> dict[int, str]:
        """Let the clients work; adds to `found` and to `failed`, and returns who was not there, and why."""
        absent: dict[int, str] = {}
        names = [self._roster.names[client] for client in orders]
        self._watcher.asked(job, number, names)
        began = time.monotonic()
        for client, answer in self._roster.ask(orders, self._rules.deadline):
            name = self._roster.names[client]
            if isinstance(answer, Lost):
                (failed if answer.final else absent)[client] = answer.reason
                self._watcher.lost(name, job, answer.reason)
                continue
            try:
                value, steps = self._read(job, number, answer)
                own = Message(message.shared, take(message.each, place[client]))
                self._check_norm(job, client, number, own, value)
            except Refused as error:
                failed[client] = str(error)
                self._watcher.lost(name, job, str(error))
                continue
            found[client] = value, steps
            self._watcher.answered(name, job, time.monotonic() - began, answer.nbytes())
        return absent

    def _read(self, job: Job, number: int, answer: Letter) -> tuple[Tree, int]:
        refuse_failure(answer)
        if (answer.facts.get("job"), answer.facts.get("number")) != (job, number):
            raise Refused("it answers another order")
        steps = answer.fact("steps", int)
        if not 0 <= steps <= MOST_STEPS:
            raise Refused(f"it claims {steps} gradient steps")
        form = self._forms.answers[job]
        if isinstance(form, LocalResult):
            form = form._replace(state=())
        if extra := [name for name in answer.tensors if name.split(".")[0] != "value"]:
            raise Refused(f"{extra[0]:.80} is not expected")
        return answer.tree("value", form), steps

    def _check_norm(self, job: Job, client: int, number: int, message: Message, value: Tree) -> None:
        """Refuse what is further than the rules allow from what a client that learns nothing would send."""
        if self._rules.max_norm is None or not isinstance(value, LocalResult):
            return
        frame = self._plan.frame()
        here = Shard(**{field.name: getattr(frame, field.name) for field in dataclasses.fields(frame)})
        idle = dataclasses.replace(self._plan.work(self.work.task, here), local=LocalWork(steps=0))
        rows = map_tree(lambda leaf: leaf[None], message.each)
        outcome = idle.execute(job, np.array([client]), number, Message(message.shared, rows),
                               map_tree(lambda leaf: leaf[None], self._forms.state))
        total = 0.0
        still = dict(leaves(take(outcome.values, 0).upload)) if len(outcome.done) else {}
        for name, leaf in leaves(value.upload):
            origin = still.get(name, torch.zeros_like(leaf)).nan_to_num(0.0, 0.0, 0.0)
            total += float((leaf.double() - origin.double()).square().sum())
        # what is not finite is told as such by those who look for it
        if math.isfinite(total) and math.sqrt(total) > self._rules.max_norm:
            raise Refused(f"its update has norm {math.sqrt(total):.4g}, and {self._rules.max_norm:g} is "
                          "allowed")

    def _wait(self, clients: list[int], least: int | None = None) -> None:
        """Until enough of these clients are connected. The first time, everybody is waited for, as long as a
        client may take for a round: after a restart of the server they come back one by one."""
        patient = not self._began and least is None
        least = len(clients) if patient else min(least or self._rules.at_least, len(clients))
        until = time.monotonic() + self._rules.deadline if patient else math.inf
        self._began = True
        while True:
            missing = [self._roster.names[client] for client in clients if not self._roster.is_there(client)]
            there = len(clients) - len(missing)
            if there >= least:
                return
            if time.monotonic() > until:
                least, until = min(self._rules.at_least, len(clients)), math.inf
                continue
            self._watcher.waiting(there, least, missing)
            time.sleep(PAUSE)


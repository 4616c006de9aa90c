"""The backend of a remote federation: chunks of one client, each on its own machine.

What comes back is checked against the expected shapes. A client that sends anything else is rejected by name,
and the round goes on with the others.
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
from descant.deploy.client_manager import ClientManager, raise_failure
from descant.deploy.messages import PackedTensor, WireMessage
from descant.deploy.protocol import RemoteExperiment, Shapes
from descant.deploy.transport import NoReply, Rejected
from descant.engine.backends.base import Backend
from descant.engine.batches import LocalWork
from descant.engine.store import ClientStore
from descant.engine.work import Job, LocalResult, Outcome
from descant.errors import DescantError
from descant.experiment.run import Run

PAUSE = 0.5  # seconds between looks for missing clients
MAX_STEPS = 10**9  # gradient steps that a client can claim


@dataclass(frozen=True)
class Rules(Checked):
    """What the server requires of a round."""

    deadline: float = hyper(600.0, "seconds that a client has for the work of a round", gt=0)
    at_least: int = hyper(2, "the fewest replies for a round to count; the average of one upload is that "
                             "client's model", ge=1)
    max_norm: float | None = hyper(
        None, "the largest distance of an upload from that of a client that learns nothing", gt=0)


class Observer(Protocol):
    """Told how the clients are doing, such as a display."""

    def waiting(self, there: int, wanted: int, missing: Sequence[str]) -> None: ...

    def asked(self, job: str, number: int, names: Sequence[str]) -> None: ...

    def answered(self, name: str, job: str, seconds: float, received: int) -> None: ...

    def lost(self, name: str, job: str, reason: str) -> None:
        """No reply, or a rejected one."""


class RemoteBackend(Backend):
    def __init__(self, run: Run, remote: RemoteExperiment, shapes: Shapes, clients: ClientManager,
                 rules: Rules, observer: Observer) -> None:
        super().__init__(run.work, 1)
        run.work.templates.update(shapes.results)
        self._run = run
        self._remote = remote
        self._shapes = shapes
        self._clients = clients
        self._rules = rules
        self._observer = observer
        self._began = False

    def run(self, job: Job, clients: np.ndarray, number: int, message: Message, states: Tree) -> Outcome:
        store = self._run.snapshot("last").store
        shared = WireMessage.of({}, shared=message.shared).tensors
        requests = {int(client): self._request(job, int(client), number, store, shared, take(message.each, k))
                    for k, client in enumerate(clients)}
        position = {int(client): k for k, client in enumerate(clients)}
        found: dict[int, tuple[Tree, int]] = {}
        failed: dict[int, str] = {}
        least = min(self._rules.at_least, len(requests)) if job in ("local", "opening") else 0
        self._wait(list(requests))
        while True:
            missing = {client: request for client, request in requests.items()
                       if client not in found and client not in failed}
            absent = self._collect(job, number, missing, message, position, found, failed)
            # absent clients may come back; rejected ones may not try again
            if len(found) >= least:
                break
            if len(found) + len(absent) < least:
                name, reason = next((self._clients.names[client], why) for client, why in failed.items())
                raise DescantError(f"{len(failed)} of {len(requests)} clients were rejected in round "
                                   f"{number}, which needs at least {least} replies; {name}: {reason}")
            self._wait(list(absent), least - len(found))
        failed |= absent
        done = sorted(position[client] for client in found)
        values = [found[int(clients[k])] for k in done]
        return Outcome(np.array(done, np.int64), stack([value for value, _ in values]) if values else (),
                       {position[client]: reason for client, reason in failed.items()},
                       sum(steps for _, steps in values))

    def close(self) -> None:
        """The clients run on."""

    def _request(self, job: Job, client: int, number: int, store: ClientStore,
                 shared: Mapping[str, PackedTensor], each: Tree) -> WireMessage:
        best = self._run.snapshot("best").store
        facts = {"what": "work", "job": job, "number": number, "session": self._remote.session,
                 "counted": int(store.last_round[client]), "kept": [int(best.last_round[client])]}
        return WireMessage(facts, {**shared, **WireMessage.of({}, each=each).tensors})

    def _collect(self, job: Job, number: int, requests: dict[int, WireMessage], message: Message,
                 position: dict[int, int], found: dict[int, tuple[Tree, int]], failed: dict[int, str]
                 ) -> dict[int, str]:
        """Request the work; adds to `found` and `failed`, and returns the absent clients with the reason."""
        absent: dict[int, str] = {}
        self._observer.asked(job, number, [self._clients.names[client] for client in requests])
        began = time.monotonic()
        for client, reply in self._clients.request(requests, self._rules.deadline):
            name = self._clients.names[client]
            if isinstance(reply, NoReply):
                (failed if reply.final else absent)[client] = reply.reason
                self._observer.lost(name, job, reply.reason)
                continue
            try:
                value, steps = self._read(job, number, reply)
                own = Message(message.shared, take(message.each, position[client]))
                self._check_norm(job, client, number, own, value)
            except Rejected as error:
                failed[client] = str(error)
                self._observer.lost(name, job, str(error))
                continue
            found[client] = value, steps
            self._observer.answered(name, job, time.monotonic() - began, reply.nbytes())
        return absent

    def _read(self, job: Job, number: int, reply: WireMessage) -> tuple[Tree, int]:
        raise_failure(reply)
        if (reply.facts.get("job"), reply.facts.get("number")) != (job, number):
            raise Rejected("it replies to another request")
        steps = reply.fact("steps", int)
        if not 0 <= steps <= MAX_STEPS:
            raise Rejected(f"it claims {steps} gradient steps")
        template = self._shapes.results[job]
        if isinstance(template, LocalResult):
            template = template._replace(state=())
        if extra := [name for name in reply.tensors if name.split(".")[0] != "value"]:
            raise Rejected(f"{extra[0]:.80} is not expected")
        return reply.tree("value", template), steps

    def _check_norm(self, job: Job, client: int, number: int, message: Message, value: Tree) -> None:
        """Reject an upload too far from that of a client that learns nothing."""
        if self._rules.max_norm is None or not isinstance(value, LocalResult):
            return
        idle = dataclasses.replace(self._remote.local_work(self.work.task), local=LocalWork(steps=0))
        rows = map_tree(lambda leaf: leaf[None], message.each)
        outcome = idle.execute(job, np.array([client]), number, Message(message.shared, rows),
                               map_tree(lambda leaf: leaf[None], self._shapes.state))
        total = 0.0
        still = dict(leaves(take(outcome.values, 0).upload)) if len(outcome.done) else {}
        for name, leaf in leaves(value.upload):
            origin = still.get(name, torch.zeros_like(leaf)).nan_to_num(0.0, 0.0, 0.0)
            total += float((leaf.double() - origin.double()).square().sum())
        # the engine rejects what is not finite
        if math.isfinite(total) and math.sqrt(total) > self._rules.max_norm:
            raise Rejected(f"its update has norm {math.sqrt(total):.4g}; the limit is "
                           f"{self._rules.max_norm:g}")

    def _wait(self, clients: list[int], least: int | None = None) -> None:
        """Wait until enough of these clients are connected. The first time, wait for all of them up to the
        deadline: after a restart of the server they reconnect one by one."""
        is_first = not self._began and least is None
        least = len(clients) if is_first else min(least or self._rules.at_least, len(clients))
        until = time.monotonic() + self._rules.deadline if is_first else math.inf
        self._began = True
        while True:
            missing = [self._clients.names[k] for k in clients if not self._clients.is_connected(k)]
            there = len(clients) - len(missing)
            if there >= least:
                return
            if time.monotonic() > until:
                least, until = min(self._rules.at_least, len(clients)), math.inf
                continue
            self._observer.waiting(there, least, missing)
            time.sleep(PAUSE)

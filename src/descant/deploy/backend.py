"""The backend of a remote federation: chunks of one client, each on its own machine.

What comes back is checked against the expected shapes. A client that sends anything else is rejected by name,
and the round goes on with the others.

Scores ride with the request for the next round's training (`announce`), so that an evaluation costs no
exchange of its own. The replies for that round are kept until the run comes to it. To the run nothing is
different: a round is committed with its figures before the next one is aggregated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch

from descant.core.algorithm import Message
from descant.core.fields import Checked, hyper
from descant.core.splits import SplitName
from descant.core.tree import Tree, not_finite, stack
from descant.deploy.arriving import Arriving
from descant.deploy.client_manager import ClientManager, raise_failure
from descant.deploy.messages import WireMessage
from descant.deploy.noised import NoisedSummand
from descant.deploy.protocol import TRAINING, RemoteExperiment, Shapes
from descant.deploy.replies import Replies
from descant.deploy.riders import apart, together
from descant.deploy.secure_rounds import LostRound, SecureRounds
from descant.deploy.summand import Summand
from descant.deploy.transport import NoReply, Rejected
from descant.engine.adding import Adding, added_up
from descant.engine.backends.base import Backend, Planned
from descant.engine.outcome import Outcome
from descant.engine.remedy import remedy
from descant.engine.uploads import WIDER, Origins, lengths, medians, shortened
from descant.engine.work import ClientScores, Job, LocalResult, Scores
from descant.errors import DescantError
from descant.experiment.run import Run

PAUSE = 0.5  # seconds between looks for missing clients
MAX_STEPS = 10**9  # gradient steps that a client can claim
HELD_OUT: tuple[SplitName, ...] = ("validation", "test")
NOT_FINITE = "is not finite"


@dataclass(frozen=True)
class Rules(Checked):
    """What the server requires of a round."""

    deadline: float = hyper(600.0, "seconds that a client has for the work of a round", gt=0)
    at_least: int = hyper(2, "the fewest uploads that a round aggregates; the average of one is that "
                             "client's model", ge=1)
    max_norm: float | None = hyper(
        None, "the largest distance of an upload from that of a client that learns nothing", gt=0)
    clip: float | None = hyper(3.0, "updates are shortened to so many times the median of the round", ge=1)
    max_share: float = hyper(0.5, "the largest share of one client in an average, whatever it claims", gt=0,
                             le=1)
    secure: bool = hyper(False, "secure aggregation: the server learns sums of uploads only")
    threshold: int | None = hyper(None, "the fewest uploads in such a sum; default: two thirds and one", ge=1)


class Observer(Protocol):
    """Told how the clients are doing, such as a display."""

    def waiting(self, there: int, wanted: int, missing: Sequence[str]) -> None: ...

    def asked(self, job: str, number: int, names: Sequence[str]) -> None: ...

    def answered(self, name: str, job: str, seconds: float, received: int) -> None: ...

    def lost(self, name: str, job: str, reason: str) -> None:
        """No reply, or a rejected one."""


class RemoteBackend(Backend):
    asks: ClassVar[bool] = True

    def __init__(self, run: Run, remote: RemoteExperiment, shapes: Shapes, clients: ClientManager,
                 rules: Rules, observer: Observer, authority: bytes | None = None) -> None:
        super().__init__(run.work, 1)
        run.work.templates.update(shapes.results)
        self._run = run
        self._remote = remote
        self._shapes = shapes
        self._clients = clients
        self._rules = rules
        hides = run.work.privacy is not None and run.work.privacy.unit == "client"
        # by a median one client would change how much all others add, and noise hides what ONE adds
        self._clip = None if hides else rules.clip
        self._observer = observer
        self._origins = Origins(run.work, shapes.state)
        self._secure = SecureRounds(remote, clients, authority, rules.deadline, observer)
        self._began = False
        self._early: dict[tuple[Job, int], Replies] = {}  # of what was asked for before it was run

    def run(self, job: Job, clients: np.ndarray, number: int, message: Message, states: Tree,
            adding: Adding | None = None) -> Outcome:
        planned = Planned(job, clients, number, message, adding)
        if self._is_secret(job):
            return self._run_secure(Replies(planned), adding)
        with closing(self._asked(planned)) as found:
            return self._gathered(found, clients)

    def _asked(self, planned: Planned) -> Replies:
        """What clients reply. They are asked for all that was announced, too, if this was not among it."""
        if planned.key not in self._early:
            others = [each for each in self.announced if each.key != planned.key]
            self.announced.clear()
            self._early = {each.key: self._open(each) for each in (planned, *others)
                           if not self._is_secret(each.job)}
            self._wait([*self._early[planned.key].position])
            self._collect([*self._early.values()])
        return self._early.pop(planned.key)

    def _is_secret(self, job: Job) -> bool:
        return job in TRAINING and self._remote.secure is not None

    def _open(self, planned: Planned) -> Replies:
        job, clients, number, message, adding = planned
        if adding is None:
            return Replies(planned)

        def add(some: Outcome) -> Outcome:
            return added_up(self.work, some, clients, number, message, adding)

        template, at_once = self._shapes.results[job], self._clip is None
        return Replies(planned, Arriving(template, self._run.directory, add, at_once=at_once))

    def _gathered(self, found: Replies, clients: np.ndarray) -> Outcome:
        """The replies of enough clients."""
        # clients beyond the cohort train too where all participate; their uploads are not aggregated
        counted = {*map(int, self._run.cohort)} if found.job in TRAINING else set()
        least = min(self._rules.at_least, len(counted))
        while (there := len(counted & found.values.keys())) < least:
            # absent clients may come back; rejected ones may not try again
            if there + len(counted & found.absent.keys()) < least:
                raise self._too_few(found, len(clients), least)
            self._wait([*counted & found.absent.keys()], least - there)
            self._collect([found])
        failed = {found.position[client]: reason
                  for client, reason in (found.failed | found.absent).items()}
        return self._ended(found, clients)._replace(failed=failed, note=self._note(found))

    def _ended(self, found: Replies, clients: np.ndarray) -> Outcome:
        """What the replies come to. How much uploads are shortened follows from the lengths of all."""
        limits = {} if self.work.algorithm.tracking else self._limits(found)
        steps = sum(steps for _, steps in found.values.values())
        if found.arriving is not None:
            return found.arriving.outcome(lambda k, upload: self._shortened(
                int(clients[k]), upload, limits, found))._replace(grad_steps=steps)
        done = sorted(found.position[client] for client in found.values)
        values = []
        for client in map(int, clients[done]):
            value, _ = found.values[client]
            if isinstance(value, LocalResult):
                value = value._replace(upload=self._shortened(client, value.upload, limits, found))
            values.append(value)
        return Outcome(np.array(done, np.int64), stack(values) if values else (), {}, steps)

    def _run_secure(self, asked: Replies, adding: Adding | None) -> Outcome:
        """As `run`, where the server learns the sum of the uploads alone."""
        job, number, position = asked.job, asked.number, asked.position
        requests = self._requests(asked, list(position))
        method, mechanism = self.work.at(number).algorithm, self.work.privacy
        bound = None if adding is None else adding.bound
        summand = Summand(method, self._shapes, job)
        hiding = None if bound is None or mechanism is None else NoisedSummand(
            method, self._shapes, job, mechanism)
        sizes = self.work.round_of(np.arange(self.work.federation.population), number).sizes.double()
        self._wait(list(requests))
        try:
            terms = {"cap": float(sizes.max())} | ({} if bound is None else {"clip": bound.norm})
            found, failed = self._secure.summed(job, number, requests, terms, (hiding or summand).length,
                                                lambda clients, least: self._wait(clients, least))
        except LostRound as error:
            return Outcome(np.zeros(0, np.int64), (), {}, 0, str(error), lost=True)
        there = np.array([position[client] for client in found.clients], np.int64)
        gone = {position[client]: why for client, why in failed.items()}
        if hiding is not None and bound is not None:
            none = torch.full((len(there),), math.nan, dtype=self.work.task.dtype)
            return Outcome(there, LocalResult((), (), none), gone, found.steps,
                           total=hiding.total(found.vector, bound, len(there)), noised=True,
                           votes=hiding.votes(found.vector), uploaded=found.vector.nbytes)
        counts = method.counts(torch.cat([sizes[found.clients], sizes.max()[None]]))
        loss = torch.full((len(found.clients),), summand.loss(found.vector), dtype=self.work.task.dtype)
        return Outcome(there, LocalResult((), (), loss), gone, found.steps,
                       total=summand.total(found.vector, counts[:-1] / counts[-1]),
                       uploaded=found.vector.nbytes)

    def _too_few(self, found: Replies, asked: int, least: int) -> DescantError:
        name, reason = next((self._clients.names[client], why) for client, why in found.failed.items())
        diverges = f"; if the training diverges, {remedy(self.work)}" if reason.endswith(NOT_FINITE) else ""
        return DescantError(f"{len(found.failed)} of {asked} clients were rejected in round {found.number}, "
                            f"which needs at least {least} uploads; {name}: {reason}{diverges}")

    def _note(self, found: Replies) -> str | None:
        if not found.shortened:
            return None
        names = ", ".join(self._clients.names[client] for client in sorted(found.shortened))
        return f"shortened to {self._clip:g} times the median of the round: the updates of {names}"

    def close(self) -> None:
        """The clients run on. What they have replied for a round that is not played is dropped."""
        for early in self._early.values():
            early.close()
        self._early.clear()

    def _requests(self, asked: Replies, clients: Sequence[int]) -> dict[int, WireMessage]:
        """For each of these clients. It may be asked to go on from a round that is not yet committed: the
        state from which a killed server would go on is kept, too."""
        store, best = self._run.snapshot("last").store, self._run.snapshot("best").store
        written, found = store.written, {}
        for client in clients:
            facts = {"what": "work", "job": asked.job, "number": asked.number,
                     "session": self._remote.session, "counted": int(store.last_round[client]),
                     "kept": [int(best.last_round[client]), int(written[client])]}
            each = WireMessage.of({}, each=asked.message(client).each).tensors
            found[client] = WireMessage(facts, {**asked.shared, **each})
        return found

    def _collect(self, jobs: Sequence[Replies]) -> None:
        """Ask every client for all of these jobs that it is still to do, in one request."""
        due: dict[int, list[Replies]] = {}
        parts: dict[int, list[WireMessage]] = {}
        for found in sorted(jobs, key=lambda found: found.job in TRAINING):  # scores ride with training
            for client, request in self._requests(found, found.missing()).items():
                due.setdefault(client, []).append(found)
                parts.setdefault(client, []).append(request)
        requests = {client: together(own) for client, own in parts.items()}
        label, number = jobs[0].job, jobs[0].number
        self._observer.asked(label, number, [self._clients.names[client] for client in requests])
        began, seconds = time.monotonic(), self._rules.deadline * max(map(len, due.values()), default=1)
        for client, reply in self._clients.request(requests, seconds):
            for found in due[client]:
                found.absent.pop(client, None)
            if isinstance(reply, NoReply):
                for found in due[client]:
                    (found.failed if reply.final else found.absent)[client] = reply.reason
                self._observer.lost(self._clients.names[client], label, reply.reason)
                continue
            taken = [self._take(client, part, found)
                     for part, found in zip(apart(reply, len(due[client])), due[client], strict=True)]
            if any(taken):
                self._observer.answered(self._clients.names[client], label, time.monotonic() - began,
                                        reply.nbytes())
        if self.work.algorithm.tracking:
            for found in jobs:
                self._refuse_long(found)

    def _take(self, client: int, reply: WireMessage, found: Replies) -> bool:
        """Whether a reply is what was asked for."""
        try:
            found.values[client] = self._read(found.job, found.number, client, reply)
            self._measure(client, found)
            self._hand_over(client, found)
        except Rejected as error:
            self._refuse(client, str(error), found)
            return False
        return True

    def _hand_over(self, client: int, found: Replies) -> None:
        """An upload that is to be added up is kept here no longer."""
        value, steps = found.values[client]
        if found.arriving is not None:
            found.arriving.put(found.position[client], value)
            found.values[client] = value._replace(upload=()), steps

    def _refuse(self, client: int, reason: str, found: Replies) -> None:
        found.values.pop(client, None)
        found.failed[client] = reason
        self._observer.lost(self._clients.names[client], found.job, reason)

    def _read(self, job: Job, number: int, client: int, reply: WireMessage) -> tuple[Tree, int]:
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
        value = reply.tree("value", template)
        if isinstance(value, ClientScores):
            self._check_scores(client, value)
        elif (name := not_finite(value.upload, "upload")) is not None:
            raise Rejected(f"{name} {NOT_FINITE}")
        return value, steps

    def _check_scores(self, client: int, value: ClientScores) -> None:
        """Tallies choose the best round for all: they must be of the rows with which a client joined."""
        federation = self.work.federation
        for scores in (value.personal, value.shared):
            if not isinstance(scores, Scores):
                continue
            for split in HELD_OUT:
                rows = int(federation.split(split).sizes[client])
                if flaw := self.work.task.flaw(getattr(scores, split), rows):
                    raise Rejected(f"{flaw} ({split})")
            if bool(((scores.auroc < 0) | (scores.auroc > 1)).any()):
                raise Rejected("it claims an AUROC outside [0, 1]")

    # -- how far an upload can move the server -----------------------------------------------------

    def _measure(self, client: int, found: Replies) -> None:
        """Note the lengths of an upload. One that is longer than the operator allows is rejected."""
        value, _ = found.values[client]
        if not isinstance(value, LocalResult) or (self._clip is None and self._rules.max_norm is None):
            return
        origin = self._origins.of(found.job, client, found.number, found.message(client))
        found.lengths[client] = lengths(value.upload, origin)
        norm = math.hypot(*found.lengths[client].values())
        if self._rules.max_norm is not None and norm > self._rules.max_norm:
            del found.lengths[client]
            raise Rejected(f"its update has norm {norm:.4g}; the limit is {self._rules.max_norm:g}")

    def _limits(self, found: Replies, wider: float = 1.0) -> dict[str, float]:
        if self._clip is None:
            return {}
        typical = medians([own for client, own in found.lengths.items() if client in found.values])
        return {name: wider * self._clip * median for name, median in typical.items()}

    def _refuse_long(self, found: Replies) -> None:
        limits = self._limits(found, WIDER)
        for client in [*found.values.keys() & found.lengths.keys()]:
            for name, limit in limits.items():
                if found.lengths[client].get(name, 0.0) > limit:
                    self._refuse(client, f"its {name} has length {found.lengths[client][name]:.3g}, and no "
                                         f"more than {limit:.3g} is usual in this round", found)
                    if found.arriving is not None:
                        found.arriving.drop(found.position[client])
                    break

    def _shortened(self, client: int, upload: Tree, limits: Mapping[str, float], found: Replies) -> Tree:
        """An upload no longer than the limits."""
        own = found.lengths.get(client, {})
        if all(own.get(name, 0.0) <= limit for name, limit in limits.items()):
            return upload
        found.shortened.add(client)
        origin = self._origins.of(found.job, client, found.number, found.message(client))
        return shortened(upload, origin, limits)

    def _wait(self, clients: list[int], least: int | None = None) -> None:
        """Wait until enough of these clients are connected. The first time, wait for all of them up to the
        deadline: after a restart of the server they reconnect one by one."""
        is_first = not self._began and least is None
        least = len(clients) if is_first else min(least or self._rules.at_least, len(clients))
        until = time.monotonic() + self._rules.deadline if is_first else math.inf
        self._began = True
        while True:
            names, connected = (self._clients.names[k] for k in clients), self._clients.connected()
            missing = [name for name in names if name not in connected]
            there = len(clients) - len(missing)
            if there >= least:
                return
            if time.monotonic() > until:
                least, until = min(self._rules.at_least, len(clients)), math.inf
                continue
            self._observer.waiting(there, least, missing)
            time.sleep(PAUSE)

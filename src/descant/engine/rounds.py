"""Rounds: sample a cohort, train it, check the uploads, aggregate."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core.algorithm import Message, Round
from descant.core.random import stream
from descant.core.stopwatch import Stopwatch
from descant.core.sums import Total
from descant.core.tree import Tree, leaves, map_tree, nbytes, not_finite, take
from descant.engine.account import Account
from descant.engine.adding import Adding, Bound, form_of, noised_mean, origin_of, wrong_rows
from descant.engine.attack import Attack
from descant.engine.attendance import Sampled, attending, may_overlook
from descant.engine.availability import Trace, read_trace
from descant.engine.backends.base import Backend, Planned
from descant.engine.diagnostics import Observed, diagnosed, named
from descant.engine.divergence import Diverged, Levels
from descant.engine.outcome import Outcome
from descant.engine.personal import Snapshot
from descant.engine.protect import account_of
from descant.engine.quantile import first_bound, followed, noised_votes, share_within
from descant.engine.remedy import remedy
from descant.engine.robust import Robust
from descant.engine.screen import Aggregated, Attackers, Guard
from descant.engine.settings import Train
from descant.engine.store import ASKED, ClientStore
from descant.engine.uploads import Origins
from descant.engine.work import Job, LocalResult, Work
from descant.errors import DescantError, UsageError


class RoundReport(NamedTuple):
    """The result of a round."""

    number: int
    participants: int  # clients that trained
    rejected: dict[int, str]  # client -> reason
    grad_steps: int
    bytes_down: int
    bytes_up: int
    loss: float  # mean training loss of the clients whose uploads count
    info: dict[str, Any]  # the method's report
    note: str | None  # about lost workers, or clients that were run one by one
    clipped: float | None = None  # share of the rows, or clients, that privacy shortened
    clip: float | None = None  # the bound on what a client adds, where clients are protected
    diagnostics: Mapping[str, Any] = MappingProxyType({})  # the figures that [eval] asks for
    away: int | None = None  # clients that could not be reached; None: everyone always can
    late: int | None = None  # sampled clients that would have missed the deadline; None: there is none


class NobodyLeft(DescantError):
    """Every upload of a round was rejected."""


class NobodyFinite(NobodyLeft, Diverged):
    """None of them is finite."""


class ServerWeights(NamedTuple):
    """Whose uploads the server averaged, with which weights."""

    clients: np.ndarray
    weights: Tensor


class Training:
    """The state of a run, and how a round changes it."""

    def __init__(self, work: Work, train: Train, diagnostics: Sequence[str] | None = None) -> None:
        self.work = work
        self.train = train
        self._is_scored: Callable[[int], bool] | None = None
        self._diagnostics = named(diagnostics)
        self.number = 0
        self.averaged: ServerWeights | None = None  # in the last round, where weights depend on the uploads
        self.watch = Stopwatch()
        federation = work.federation
        self.trace: Trace | None = None
        if train.availability is not None:
            self.trace = read_trace(train.availability, federation.names[: federation.population])
            self.trace.require_somebody(train.rounds, train.availability)
        self._cohort_size = train.cohort_size(federation.population)
        if (work.algorithm.tracking and train.participation == "all"
                and self._cohort_size < federation.population):
            raise UsageError(f'train.participation = "all" does not fit {work.algorithm.name}: its clients\' '
                             "states may move only when their uploads are aggregated; "
                             'use "cohort", or cohort = "all"')
        if work.algorithm.needs_validation and not federation.validation.sizes.any():
            raise UsageError(f"{work.algorithm.name} works with validation rows, and no client has any: "
                             "set data.validation above 0, such as 0.2")
        self.account: Account | None = None  # of the privacy that the rounds spend
        if work.privacy is not None:
            self.account = account_of(work, train, work.privacy.privacy)
        self.initial = work.task.init()
        everyone = np.arange(federation.population)
        self.server: Tree = work.algorithm.init_server(work.task, self.initial, self.round_of(everyone))
        self.levels = Levels(work)
        # on remote machines clients keep their states themselves
        template = () if federation.is_remote else work.algorithm.init_client(work.task, self.initial)
        self.store = ClientStore(template, federation.population)
        self._attackers: Attackers | None = None
        self._guard: Guard | None = None
        self.clip = first_bound(work.privacy)  # of what a client adds in the next round, if it is protected

    def screen(self, robust: Robust | None, attack: Attack | None) -> Training:
        """With what stands between the clients' uploads and the method."""
        work = self.work
        if work.privacy is not None and work.privacy.unit == "client" and (robust or attack):
            name = "robust" if robust is not None else "attack"
            raise UsageError(f'[{name}] does not go together with privacy.unit = "client": it needs the '
                             "uploads one by one, and that one hides them in their sum; leave one out")
        if attack is not None:
            who = attack.attackers(work.federation.population, self.train.seed)
            self._attackers = Attackers(attack, who, self._idle)
        if robust is not None:
            robust.require_fit(work.algorithm, self._cohort_size)
            self._guard = Guard(robust, self._idle)
        return self

    def scored_in(self, is_scored: Callable[[int], bool]) -> Training:
        """With the rounds after which somebody looks at the clients; otherwise, that is after all."""
        self._is_scored = is_scored
        return self

    def remedy(self) -> str:
        """What to do when the training diverges."""
        if self._attackers is not None and self._guard is None:
            return "clients attack, and nothing guards the server: [robust] does"
        return remedy(self.work)

    def keep_in(self, directory: Path, *, read_only: bool = False) -> None:
        """Keep the clients' states in files, before the first of them changes."""
        self.store = ClientStore(self.store.template, self.store.population, directory, read_only=read_only)

    def round_of(self, clients: np.ndarray) -> Round:
        """The facts of the present round for a group of clients."""
        return self.work.round_of(clients, self.number)

    @property
    def snapshot(self) -> Snapshot:
        return Snapshot(self.number, self.server, self.store)

    def sample(self) -> tuple[np.ndarray, np.ndarray]:
        """This round's cohort, and who trains, without those who dropped out or are late."""
        return self._sampled()[:2]

    def _sampled(self) -> Sampled:
        if self.is_opening:
            there = np.arange(self.work.federation.population)
            return Sampled(there, there, there, 0)
        who = attending(self.work, self.train, self.number, self.trace)
        return who.apart(alone=self.overlooks_others(self.number)) if self.may_overlook else who

    @property
    def _is_stateless(self) -> bool:
        return not any(leaves(self.store.template))

    @property
    def may_overlook(self) -> bool:
        """Whether a simulation need not train clients outside the cohort in every round. Attackers look at
        everyone."""
        return self._is_scored is not None and self._attackers is None and may_overlook(
            self.work, self.train, is_stateless=self._is_stateless)

    def overlooks_others(self, number: int) -> bool:
        """Whether this is a round in which it does not. That after which a budget of privacy is spent is the
        last, and is looked at."""
        if not self.may_overlook or self._is_stateless:
            return self.may_overlook
        assert self._is_scored is not None
        return not self._is_scored(number) and (self.account is None or self.account.allows(number + 1))

    def most_trained(self) -> int:
        """How many clients train together at most."""
        population = self.work.federation.population
        return population if self.train.participation == "all" and not self.may_overlook else (
            self.train.cohort_size(population))

    @property
    def is_opening(self) -> bool:
        """Whether the present round asks everyone once, and trains nobody."""
        return self.number == 1 and self.work.algorithm.opens()

    def upcoming(self) -> Planned:
        """What clients will be asked in the round after the present one."""
        self.number += 1
        try:
            cohort, trained, *_ = self._sampled()
            message = self.work.algorithm.broadcast(self.server, self.round_of(trained))
            return Planned(self._job, trained, self.number, message, self.adding(cohort, trained))
        finally:
            self.number -= 1

    def play(self, backend: Backend) -> RoundReport:
        """One round. The new client states are staged in the store, not yet written."""
        self.number += 1
        with _undone_on_failure(self):
            return self._play(backend)

    def _play(self, backend: Backend) -> RoundReport:
        with self.watch("sampling"):
            who = self._sampled()
            cohort, trained = who.cohort, who.trained
        with self.watch("broadcast"):
            message = self.work.algorithm.broadcast(self.server, self.round_of(trained))
            states = self.store.read(trained)
        start = time.perf_counter()
        adding = self.adding(cohort, trained)
        if len(trained) or adding is None:
            planned = Planned(self._job, trained, self.number, message, adding)
            outcome = who.in_groups(backend.run, planned, states)
        else:  # of a cohort that coins make, there may be nobody
            nothing = map_tree(lambda t: t.new_zeros(0, *t.shape), self.work.templates[self._job])
            outcome = Outcome(np.zeros(0, np.int64), nothing._replace(upload=()), {}, 0, total=Total())
        self.watch.divide(time.perf_counter() - start, outcome.gathering / max(outcome.seconds, 1e-9))
        with self.watch("aggregate"):
            bound = None if adding is None else adding.bound
            report = self._of_all(self._close(who, message, outcome, bound), who)
        if self.trace is None or self.is_opening:
            return report
        away = int((~self.trace.reachable(self.number)).sum())
        return report._replace(away=away, late=None if self.train.deadline is None else who.late)

    def _of_all(self, report: RoundReport, who: Sampled) -> RoundReport:
        """The report of a round in which all who are asked train: what a method costs is the same, whoever is
        left out here."""
        if len(who.asked) == len(who.trained):
            return report
        steps, wanted = (int(self.work.steps_of(clients).sum()) for clients in (who.trained, who.asked))
        return report._replace(participants=len(who.asked),
                               grad_steps=round(report.grad_steps * wanted / steps),
                               bytes_down=round(report.bytes_down * len(who.asked) / len(who.trained)))

    @property
    def _job(self) -> Job:
        return "opening" if self.is_opening else "local"

    def adding(self, cohort: np.ndarray, trained: np.ndarray) -> Adding | None:
        """How this round's uploads are added up where they are made; None: they are needed one by one."""
        looked_at = self._diagnostics or self._guard is not None or self._attackers is not None
        if self.work.algorithm.needs_rows or looked_at or self._job not in self.work.templates:
            return None
        return Adding(np.isin(trained, cohort), self._bound())

    def _bound(self) -> Bound | None:
        """How much a client may add, where clients are protected."""
        if self.clip is None:
            return None
        template = self.work.templates[self._job].upload
        return Bound(origin_of(self.work, self._idle, self._job, self.number, self._first(), template),
                     self.clip)

    @cached_property
    def _idle(self) -> Origins:
        return Origins(self.work, self.work.algorithm.init_client(self.work.task, self.initial))

    def _first(self) -> Message:
        """What a client is sent in this round."""
        return self.work.algorithm.broadcast(self.server, self.round_of(np.zeros(1, np.int64)))

    def _mean(self, outcome: Outcome, bound: Bound | None) -> Tree:
        """The mean of what the clients of this round contributed."""
        total = outcome.total
        assert total is not None
        form = form_of(self.work, self._job, self.number, self._first())
        if (mechanism := self.work.privacy) is None or bound is None:
            return total.mean(form)
        generator = None if mechanism.secret else stream(self.work.seed, "server.privacy", self.number)
        return noised_mean(total, form, bound, mechanism, generator, is_noised=outcome.noised)

    def _followed(self, outcome: Outcome, bound: Bound) -> float | None:
        """Let the bound follow the clients, if it is to. The share of those who were shortened, as far as it
        may be told: a real server knows it, and what it tells has noise."""
        mechanism = self.work.privacy
        assert mechanism is not None
        if mechanism.count_noise is not None:
            votes = outcome.votes if outcome.votes is not None else noised_votes(
                mechanism, outcome.rows, outcome.shortened, self.work.seed, self.number)
            self.clip = followed(bound.norm, votes, mechanism)
            if mechanism.secret:
                return 1 - share_within(votes, mechanism)
        return None if mechanism.secret else _shortened(outcome)

    def _close(self, who: Sampled, message: Message, outcome: Outcome, bound: Bound | None) -> RoundReport:
        """Check what came back, aggregate, and stage the clients' new states."""
        cohort, trained = who.cohort, who.trained
        if outcome.lost:
            down = _bytes_down(message, len(trained))
            return RoundReport(self.number, len(trained), {}, 0, down, 0, math.nan, {}, outcome.note)
        done, result, failed = outcome.done, outcome.values, outcome.failed
        if self._attackers is not None and len(done):
            result = result._replace(upload=self._attackers.sent(
                self._job, trained[done], self.number, _of_rows(message, done), result.upload))
        wrong = dict(outcome.wrong)
        if outcome.total is None and len(done):
            wrong = {int(done[k]): why for k, why in wrong_rows(result).items()}
        rejected = {int(trained[k]): why for k, why in (*failed.items(), *wrong.items())}
        kept = np.flatnonzero(~np.isin(done, list(wrong)))
        accepted = trained[done[kept]]
        counted = np.isin(accepted, cohort)
        if not counted.any() and bound is None:  # noise alone would be a round too
            client, why = next(iter(rejected.items()))
            error = NobodyFinite if any(trained[k] in cohort for k in wrong) else NobodyLeft
            raise error(f"every upload in round {self.number} was rejected; client "
                        f"{self.work.federation.names[client]!r}: {why}; if the training diverges, "
                        f"{self.remedy()}")

        taken: LocalResult = _chosen(result, kept, len(done))
        uploads = _chosen(taken.upload, np.flatnonzero(counted), len(counted))
        method, facts = self.work.at(self.number).algorithm, self.round_of(accepted[counted])
        if outcome.total is None:
            server, info, chosen = self._aggregated(message, done[kept][counted], uploads, facts)
        else:
            server, info = method.absorb(self.server, self._mean(outcome, bound), facts)
            chosen = np.arange(len(facts.cohort))
        weights = info.get("client_weights")
        self.averaged = None if weights is None else ServerWeights(accepted[counted][chosen], weights)
        info = {key: value for key, value in info.items() if key != "client_weights"}
        if (overflow := not_finite(server)) is not None:
            raise Diverged(f"the server's {overflow} is not finite after round {self.number}, though all "
                           f"uploads were: the training diverges; {self.remedy()}")
        figures = diagnosed(self._diagnostics, Observed(method, self.server, message, uploads, server, facts))
        self.server = server
        clipped = _shortened(outcome) if bound is None else self._followed(outcome, bound)
        moved = chosen if self.work.algorithm.tracking else np.arange(len(accepted))
        part, states = accepted[moved], _chosen(taken.state, moved, len(accepted))
        if len(who.groups) > 1:
            order = np.argsort(part)
            part, states = part[order], take(states, torch.from_numpy(order))
        if self._is_stateless:  # others have taken part, too
            part = np.union1d(part, np.setdiff1d(who.asked, trained))
        self.store.stage(part, states, ASKED if self.is_opening else self.number)
        sent = int(np.isin(trained[done], cohort).sum())
        return RoundReport(
            self.number, len(trained), rejected, outcome.grad_steps,
            _bytes_down(message, len(trained)),
            sent * (nbytes(take(taken.upload, 0)) if outcome.total is None else outcome.uploaded),
            float(taken.loss[torch.from_numpy(counted)].nanmean()), info, outcome.note, clipped,
            None if bound is None else bound.norm, figures,
        )

    def _aggregated(self, message: Message, at: np.ndarray, uploads: Tree, round: Round) -> Aggregated:
        """The server after the uploads of those to whom row `at` of the message was sent."""
        method = self.work.at(self.number).algorithm
        if self._guard is not None:
            sent = _of_rows(message, at)
            return self._guard.aggregate(method, self._job, sent, self.server, uploads, round)
        return Aggregated(*method.aggregate(self.server, uploads, round), np.arange(len(round.cohort)))


def _shortened(outcome: Outcome) -> float | None:
    return outcome.shortened / outcome.rows if outcome.rows else None


def _of_rows(message: Message, at: np.ndarray) -> Message:
    """The message of some of the clients that it is for."""
    return Message(message.shared, take(message.each, torch.from_numpy(at)))


def _chosen(rows: Tree, at: np.ndarray, count: int) -> Tree:
    """Those of `count` rows; without a copy if they are all of them."""
    return rows if len(at) == count else take(rows, torch.from_numpy(at))


@contextmanager
def _undone_on_failure(training: Training) -> Iterator[None]:
    """Undo a round that fails or is interrupted."""
    server, clip, staged = training.server, training.clip, training.store.staged
    try:
        yield
    except BaseException:
        training.number -= 1
        training.server, training.clip = server, clip
        if training.store.staged is not staged:
            training.store.unstage()
        raise


def _bytes_down(message: Message, clients: int) -> int:
    return clients * nbytes(message.shared) + nbytes(message.each)

"""Secure aggregation on the server: one attempt at the sum of a round, phase by phase."""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from descant.algorithms import ALGORITHMS
from descant.core.privacy.settings import Mechanism
from descant.deploy.client_manager import ClientManager, raise_failure
from descant.deploy.messages import WireMessage
from descant.deploy.noised import require_grid
from descant.deploy.protocol import RemoteExperiment
from descant.deploy.secure import wire
from descant.deploy.secure.agreement import Agreement
from descant.deploy.secure.encoding import FixedPoint, Numbers, OutOfRange
from descant.deploy.secure.parts import Attempt, TooFew, needed
from descant.deploy.secure.summation import Liar, Summation
from descant.deploy.summand import digest_of
from descant.deploy.transport import NoReply, Rejected
from descant.engine.work import Job
from descant.errors import DescantError, UsageError
from descant.experiment.config import Experiment

if TYPE_CHECKING:
    from descant.deploy.backend import Observer, Rules

PAUSE = 0.5  # seconds between attempts: who is connected is known after that
PHASE = 60.0  # seconds for a phase without work, at most
MAX_STEPS = 10**9  # gradient steps that a client can claim


class LostRound(DescantError):
    """There will be no sum of this round: clients have revealed their shares, and do so once."""


class SecureSum(NamedTuple):
    """What a server learns of a round."""

    clients: list[int]  # in the sum
    vector: Numbers
    steps: int


class SecureAttempt:
    """`failed` has who cannot take part again in this round, `absent` who may, and why."""

    def __init__(self, attempt: Attempt, remote: RemoteExperiment, clients: ClientManager, length: int,
                 authority: bytes | None, deadline: float, observer: Observer) -> None:
        assert remote.secure is not None
        self._attempt = attempt
        self._agreement = remote.secure
        self._clients = clients
        self._deadline = deadline
        self._observer = observer
        self._length = length
        self._server = Summation(attempt, remote.secure.threshold, length, authority)
        self._signed = authority is not None
        self.failed: dict[int, str] = {}
        self.absent: dict[int, str] = {}
        self._spent: set[int] = set()
        self._accused: Counter[int] = Counter()
        self._steps: dict[int, int] = {}

    def run(self, work: Mapping[int, WireMessage]) -> SecureSum:
        """The sum over those who stay. `work`: the requests of the round. Raises `TooFew`, `LostRound` or
        `Liar`."""
        self._ask("advertise", work, {}, lambda client, reply: self._server.advertised(
            client, wire.advert(reply.facts.get("advert"))))
        try:
            roster = self._server.roster()
        except DescantError:
            if self._spent:
                raise LostRound(f"{len(self._spent)} clients have unmasked a sum of this round before, and "
                                "do so once") from None
            raise
        adverts = {str(client): wire.advert_facts(advert) for client, advert in roster.items()}
        self._ask("share", roster, {"roster": adverts},
                  lambda client, reply: self._server.dealt(client, wire.dealing(reply.facts)))
        dealt = [client for client in roster if client not in self.failed | self.absent]
        self._request({client: self._with_boxes(client, work[client]) for client in dealt}, self._deadline,
                      self._attempt.job, self._masked)
        survivors = self._server.survivors()
        if self._signed:
            self._ask("confirm", survivors, {"survivors": survivors}, lambda client, reply:
                      self._server.confirmed(client, wire.data(reply.facts.get("signature"))))
        signatures = wire.texts(self._server.signatures()) if self._signed else {}
        self._ask("unmask", survivors, {"survivors": survivors, "signatures": signatures},
                  lambda client, reply: self._server.revealed(client, wire.revealed(reply.facts)))
        vector = self._server.total(FixedPoint(self._agreement.bound, len(roster)))
        return SecureSum(survivors, vector, sum(self._steps[client] for client in survivors))

    def liar(self) -> int | None:
        """A client whose shares most others could not read."""
        client, times = next(iter(self._accused.most_common(1)), (-1, 0))
        return client if times >= self._agreement.threshold // 2 + 1 else None

    def _with_boxes(self, client: int, request: WireMessage) -> WireMessage:
        boxes = wire.texts(self._server.boxes(client))
        return request._replace(facts=request.facts | {"attempt": list(self._attempt), "boxes": boxes})

    def _masked(self, client: int, reply: WireMessage) -> None:
        steps = reply.fact("steps", int)
        if not 0 <= steps <= MAX_STEPS:
            raise Rejected(f"it claims {steps} gradient steps")
        template = torch.zeros(self._length, dtype=torch.int64)
        if extra := [name for name in reply.tensors if name.split(".")[0] != "masked"]:
            raise Rejected(f"{extra[0]:.80} is not expected")
        self._server.masked(client, wire.words(reply.tree("masked", template)))
        self._steps[client] = steps

    # -- requests ----------------------------------------------------------------------------------

    def _ask(self, phase: str, clients: Iterable[int], facts: Mapping[str, Any],
             read: Callable[[int, WireMessage], None]) -> None:
        common = {"what": "secure", "phase": phase, "session": self._attempt.session,
                  "number": self._attempt.number, "attempt": list(self._attempt)}
        requests = {client: WireMessage({**common, **facts}) for client in clients}
        self._request(requests, min(PHASE, self._deadline), phase, read)

    def _request(self, requests: Mapping[int, WireMessage], seconds: float, what: str,
                 read: Callable[[int, WireMessage], None]) -> None:
        names, began = self._clients.names, time.monotonic()
        self._observer.asked(what, self._attempt.number, [names[client] for client in requests])
        for client, reply in self._clients.request(requests, seconds):
            try:
                if isinstance(reply, NoReply):
                    raise Rejected(reply.reason)
                self._note_facts(client, reply.facts)
                raise_failure(reply)
                read(client, reply)
            except Rejected as error:
                may_return = not reply.final if isinstance(reply, NoReply) else "accused" in reply.facts
                (self.absent if may_return else self.failed)[client] = str(error)
                self._observer.lost(names[client], what, str(error))
                continue
            self._observer.answered(names[client], what, time.monotonic() - began, reply.nbytes())

    def _note_facts(self, client: int, facts: Mapping[str, Any]) -> None:
        if facts.get("spent") is True:
            self._spent.add(client)
        if type(accused := facts.get("accused")) is int:
            self._accused[accused] += 1


class SecureRounds:
    """The attempts of a federation. A client that was found out to lie is left out from then on."""

    def __init__(self, remote: RemoteExperiment, clients: ClientManager, authority: bytes | None,
                 deadline: float, observer: Observer) -> None:
        self._remote, self._clients, self._authority = remote, clients, authority
        self._deadline, self._observer = deadline, observer
        self._liars: dict[int, str] = {}

    def summed(self, job: Job, number: int, work: Mapping[int, WireMessage], terms: Mapping[str, float],
               length: int, wait: Callable[[list[int], int], None]) -> tuple[SecureSum, dict[int, str]]:
        """The sum of a round, and who is not in it. Tried again while there may be enough clients; `wait`
        returns when so many of some clients are connected. `terms` are what all are told alike beside the
        model."""
        assert self._remote.secure is not None
        failed = {client: why for client, why in self._liars.items() if client in work}
        told = json.dumps({"shared": digest_of(next(iter(work.values())))} | dict(terms))
        while True:
            asked = {client: request for client, request in work.items() if client not in failed}
            least = needed(self._remote.secure.threshold, len(asked))
            if len(asked) < least:
                raise self._too_few(number, failed, least)
            wait(list(asked), least)
            attempt = SecureAttempt(
                Attempt(self._remote.session, job, number, secrets.token_hex(8), told), self._remote,
                self._clients, length, self._authority, self._deadline, self._observer)
            try:
                found = attempt.run(asked)
                gone = failed | attempt.failed | attempt.absent
                return found, {client: why for client, why in gone.items() if client not in found.clients}
            except TooFew as error:
                liar = self._found_out(attempt.liar(), "the others cannot read its shares")
                failed |= attempt.failed | liar
                self._observer.lost("the sum", job, str(error))
                time.sleep(PAUSE)
            except Liar as error:
                self._found_out(error.client, str(error))
                raise LostRound(f"{self._clients.names[error.client]} has spoiled the sum: {error}") from None
            except OutOfRange as error:
                raise LostRound(str(error)) from None

    def _found_out(self, client: int | None, why: str) -> dict[int, str]:
        found = {} if client is None else {client: why}
        self._liars |= found
        return found

    def _too_few(self, number: int, failed: Mapping[int, str], least: int) -> DescantError:
        client, reason = next(iter(failed.items()))
        return DescantError(f"{len(failed)} clients cannot take part in round {number}, and secure "
                            f"aggregation needs {least}; {self._clients.names[client]}: {reason}")


def agreed(experiment: Experiment, clients: int, rules: Rules) -> Agreement:
    """What clients of this experiment are to agree to. Raises if it cannot be summed securely."""
    method, train = experiment.algorithm, experiment.train
    if method.needs_rows:
        fitting = sorted(name for name, kind in ALGORITHMS.items() if not kind().needs_rows)
        raise UsageError(f"secure aggregation does not fit {method.name} as it is set here: its server needs "
                         "every upload by itself, and not only their sum; what fits: fedmap with weights = "
                         f'"samples", {", ".join(fitting)}')
    if experiment.robust is not None:
        raise UsageError("[robust] needs the uploads one by one, and secure aggregation hides them in their "
                         "sum: leave one out; clients shorten their own updates with --max-norm")
    if experiment.eval.diagnostics:
        raise UsageError("eval.diagnostics are figures of the uploads, which secure aggregation hides: leave "
                         "them out")
    cohort = train.cohort_size(clients)
    if (privacy := experiment.privacy) is not None and privacy.unit == "client":
        assert privacy.noise is not None  # `require_agreed`
        require_grid(Mechanism(privacy, privacy.noise, float(cohort), secret=True))
        if privacy.sampling == "poisson" and train.drop:
            raise UsageError('train.drop lets clients drop out by coins where privacy.sampling = "poisson", '
                             "so that rounds may have too few for a secure sum: set privacy.sampling = "
                             '"known", which promises the same here, or leave train.drop out')
    if train.participation == "all" and cohort < clients:
        raise UsageError('train.participation = "all" does not fit secure aggregation: uploads of clients '
                         'outside the cohort would be sent and not summed; use "cohort", or cohort = "all"')
    return Agreement.of(rules.threshold, cohort - round(train.drop * cohort), rules.max_norm)


def notes(agreement: Agreement) -> list[str]:
    """What the operator should know."""
    own = "" if agreement.max_norm is None else f", and shorten updates to a norm of {agreement.max_norm:g}"
    return [f"secure aggregation: the server learns sums of at least {agreement.threshold} uploads. What it "
            "cannot see it cannot check: nothing is clipped to the median of a round. Clients keep to "
            f"entries of at most {agreement.bound:g}{own}. Scores are sent as before"]

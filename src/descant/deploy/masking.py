"""Secure aggregation on a client: it takes part in attempts at a sum, and masks what it uploads.

A client reveals its shares for one sum of a round. A second sum of the same round, without one of the
clients, would give the server that client's part as the difference. A round that is repeated after clients
have revealed theirs is therefore lost.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from descant.core.algorithm import Message
from descant.core.tree import Tree, map_tree
from descant.deploy.messages import WireMessage
from descant.deploy.noised import NoisedSummand
from descant.deploy.refusals import Mismatch
from descant.deploy.secure import wire
from descant.deploy.secure.agreement import Agreement
from descant.deploy.secure.encoding import FixedPoint, OutOfRange, Words
from descant.deploy.secure.participant import Accusation, Participant
from descant.deploy.secure.parts import Attempt, Identity, TooFew
from descant.deploy.summand import Summand, digest_of, share_of
from descant.deploy.transport import Rejected
from descant.engine.adding import Bound, origin_of
from descant.engine.uploads import Origins, lengths, shortened
from descant.engine.work import Job, LocalResult
from descant.errors import DescantError

if TYPE_CHECKING:
    from descant.deploy.client import Membership

UNMASKED = "unmasked"  # in the ledger
PHASES = ("advertise", "share", "confirm", "unmask")  # without the work
MAX_TERMS = 1000  # characters


class Masking:
    """`identity` is the client's, if it has keys. `required`: the least threshold with which this client
    takes part; None if it also takes part without secure aggregation."""

    def __init__(self, identity: Identity | None, required: int | None) -> None:
        self._identity = identity
        self._required = required
        self._participant: Participant | None = None
        self._revealed: Attempt | None = None

    def agreed(self, found: Any) -> Agreement | None:
        """What a server says when this client joins; raises if this client does not agree."""
        agreement = None if found is None else Agreement.parse(found)
        if self._required is not None and agreement is None:
            raise Mismatch("this client takes part with secure aggregation only, and the server has none")
        if self._required is not None and agreement is not None and agreement.threshold < self._required:
            raise Mismatch(f"this client wants {self._required} clients in a sum at least, and the server's "
                           f"threshold is {agreement.threshold}")
        return agreement

    # -- the phases without work -------------------------------------------------------------------

    def reply(self, joined: Membership, request: WireMessage) -> WireMessage:
        """The reply to a request of the protocol."""
        phases = {"advertise": self._advertise, "share": self._share, "confirm": self._confirm,
                  "unmask": self._unmask}
        try:
            return phases[request.fact("phase", str)](joined, request)
        except Accusation as error:
            raise Mismatch(str(error), accused=error.client) from None
        except (Rejected, TooFew) as error:  # their texts quote nothing of this client's
            raise Mismatch(str(error)) from None

    def _advertise(self, joined: Membership, request: WireMessage) -> WireMessage:
        attempt = _attempt(joined, request)
        if joined.ledger.times(UNMASKED, attempt.number):
            raise Mismatch(f"it has unmasked a sum of round {attempt.number} before", spent=True)
        if self._participant is None or self._participant.attempt != attempt:
            assert joined.remote.secure is not None
            threshold = joined.remote.secure.threshold
            self._participant = Participant(attempt, joined.client, threshold, self._identity)
        return WireMessage({"advert": wire.advert_facts(self._participant.advertise())})

    def _current(self, joined: Membership, request: WireMessage) -> Participant:
        if self._participant is None or self._participant.attempt != _attempt(joined, request):
            raise Mismatch("it has no keys of this attempt: it was restarted, or has begun another")
        return self._participant

    def _share(self, joined: Membership, request: WireMessage) -> WireMessage:
        roster = wire.by_client(request.fact("roster", dict), wire.advert)
        if any(client >= joined.remote.clients for client in roster):
            raise Rejected("there is no such client")
        return WireMessage(wire.dealing_facts(self._current(joined, request).share(roster)))

    def _confirm(self, joined: Membership, request: WireMessage) -> WireMessage:
        survivors = wire.clients(request.fact("survivors", list))
        return WireMessage({"signature": wire.text(self._current(joined, request).confirm(survivors))})

    def _unmask(self, joined: Membership, request: WireMessage) -> WireMessage:
        one = self._current(joined, request)
        revealed = one.unmask(wire.clients(request.fact("survivors", list)),
                              wire.by_client(request.fact("signatures", dict), wire.data))
        if self._revealed != one.attempt:  # the same may be asked for again
            if joined.ledger.enter(UNMASKED, one.attempt.number) > 1:
                raise Mismatch(f"it has unmasked a sum of round {one.attempt.number} before", spent=True)
            self._revealed = one.attempt
        return WireMessage(wire.revealed_facts(revealed))

    # -- the work ----------------------------------------------------------------------------------

    def prepare(self, joined: Membership, request: WireMessage) -> Participant:
        """Before this client works for a sum: read the others' shares, and check what all are told alike."""
        one = self._current(joined, request)
        if json.loads(one.attempt.terms)["shared"] != digest_of(request):
            raise Mismatch("it was sent another model than the others in this sum")
        try:
            one.open(wire.by_client(request.fact("boxes", dict), wire.data))
        except Accusation as error:
            raise Mismatch(str(error), accused=error.client) from None
        except (Rejected, TooFew) as error:
            raise Mismatch(str(error)) from None
        return one

    def masked(self, joined: Membership, one: Participant, message: Message, value: LocalResult
               ) -> WireMessage:
        """What the server may see of a result."""
        attempt, agreement = one.attempt, joined.remote.secure
        assert agreement is not None
        job: Job = attempt.job  # type: ignore[assignment]  # checked with the request
        method = joined.work.at(attempt.number).algorithm
        value = _within(joined, agreement, job, attempt.number, message, value)
        encoding, mechanism = FixedPoint(agreement.bound, len(one.clients)), joined.work.privacy
        if mechanism is not None and mechanism.unit == "client":
            return WireMessage.of({}, masked=wire.tensor(one.mask(_noised(
                joined, one, method.contribution(message, value.upload), message, encoding))))
        rows = int(joined.work.federation.train.sizes[joined.client])
        share = share_of(method, rows, json.loads(attempt.terms)["cap"])
        vector = Summand(method, joined.shapes, job).vector(method, message, value, share)
        try:
            words = encoding.encode(vector)
        except OutOfRange as error:
            raise DescantError(f"{error}: nothing is sent in this round") from None
        return WireMessage.of({}, masked=wire.tensor(one.mask(words)))


def _noised(joined: Membership, one: Participant, contribution: Tree, message: Message, encoding: FixedPoint
            ) -> Words:
    """What a client adds that is hidden in the sum, with its share of the noise."""
    work, number = joined.work, one.attempt.number
    job: Job = one.attempt.job  # type: ignore[assignment]
    assert work.privacy is not None
    state = work.algorithm.init_client(work.task, work.task.init())
    sent = Message(message.shared, map_tree(lambda leaf: leaf[None], message.each))
    origin = origin_of(work, Origins(work, state), job, number, sent, joined.shapes.results[job].upload)
    bound = Bound(origin, json.loads(one.attempt.terms)["clip"])
    try:
        return NoisedSummand(work.at(number).algorithm, joined.shapes, job, work.privacy).words(
            contribution, bound, encoding, one.needed)
    except OutOfRange as error:
        raise DescantError(f"{error}: nothing is sent in this round") from None


def _attempt(joined: Membership, request: WireMessage) -> Attempt:
    found = request.fact("attempt", list)
    if [type(each) for each in found] != [str, str, int, str, str] or len(found[-1]) > MAX_TERMS or not (
            0 <= found[2] <= joined.remote.train.rounds):
        raise Rejected("an attempt at a sum that is none")
    attempt = Attempt(*found)
    try:
        terms = json.loads(attempt.terms)
        named = [terms["cap"]]
        if (mechanism := joined.work.privacy) is not None and mechanism.unit == "client":
            named.append(terms["clip"])
        if attempt.session != joined.remote.session or any(
                not isinstance(each, float) or not 0 < each < math.inf for each in named):
            raise ValueError
    except (ValueError, TypeError, LookupError, RecursionError):
        raise Rejected("an attempt at a sum that is none of this federation") from None
    return attempt


def _within(joined: Membership, agreement: Agreement, job: Job, number: int, message: Message,
            value: LocalResult) -> LocalResult:
    """The result with its update shortened to the agreed norm."""
    if agreement.max_norm is None:
        return value
    origin = Origins(joined.work, joined.shapes.state).of(job, joined.client, number, message)
    own = lengths(value.upload, origin)
    if (norm := math.hypot(*own.values())) <= agreement.max_norm:
        return value
    if joined.work.algorithm.tracking:
        raise DescantError(f"its update has norm {norm:.4g}, the agreed limit is {agreement.max_norm:g}, and "
                           "a change that is tracked cannot be shortened: nothing is sent in this round")
    limits = {name: length * agreement.max_norm / norm for name, length in own.items()}
    return value._replace(upload=shortened(value.upload, origin, limits))

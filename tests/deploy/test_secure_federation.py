"""Secure aggregation in a federation: what the server learns, drop-outs, lies, restarts, consent."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from secure_helpers import Authority

import flower_helpers as flower
from descant.deploy.backend import Rules
from descant.deploy.messages import PackedTensor, WireMessage
from descant.deploy.secure.agreement import BOUND
from descant.deploy.secure.encoding import FixedPoint
from descant.deploy.transport import NoReply, Payload
from descant.errors import DescantError, UsageError
from descant.experiment import run as runs
from descant.experiment.config import Experiment
from descant.experiment.run import Run, Setup
from flower_helpers import CLIENTS, DATA, Answer, MemoryServer, Quiet, experiment
from helpers import assert_same

TOLERANCE = 1e-10  # of three rounds; the error of one sum is stated, and tested below
SECURE = Rules(deadline=5, secure=True, threshold=3)
PHASES = ("advertise", "share", "local", "confirm", "unmask")


def secure(wanted: Experiment, answers: dict[str, Answer], out: Path, observer: Any = None,
           rules: Rules = SECURE, **options: Any) -> Run:
    return flower.federate(wanted, MemoryServer(answers), out / "server", observer=observer, rules=rules,
                           alone=False, **options)


@cache
def plain(method: str, rounds: int, *gone: int) -> Run:
    """The same federation without secure aggregation, in which the replies of client 2 in some rounds are
    lost."""
    with TemporaryDirectory() as place:
        answers = flower.make_clients(DATA, Path(place))
        for number in gone:
            answers["2"] = changed(answers["2"], "local", number, lambda _: NoReply("gone"))
        return flower.federate(experiment(method, train={"rounds": rounds}), MemoryServer(answers),
                               Path(place) / "server", alone=False, rules=Rules(deadline=5, clip=None))


def phase_of(facts: dict[str, Any]) -> str:
    return str(facts.get("phase") or facts.get("job"))


def changed(answer: Answer, phase: str, number: int, change: Callable[[WireMessage], WireMessage | NoReply]
            ) -> Answer:
    """A client that replies to one request with something else."""

    def reply(payload: Payload) -> Payload | NoReply | None:
        found, facts = answer(payload), WireMessage.decode(payload).facts
        if isinstance(found, Payload) and (phase_of(facts), facts.get("number")) == (phase, number):
            other = change(WireMessage.decode(found))
            return other if isinstance(other, NoReply) else other.encode()
        return found

    return reply


def assert_same_servers(found: Run, expected: Run) -> None:
    assert_same(found.snapshot("last").server, expected.snapshot("last").server, TOLERANCE)


METHODS = ("fedavg", "pfedgt", "scaffold", "fedprox", "pfedme", "ditto", "pfedbred", "one_stage_fedprox",
           "perfedavg", "apfl", "l2gd", "fedem", "globaltrain", "dichotomous", "localtrain", "fedper",
           "fedrep", "fedbabu")


@pytest.mark.parametrize("method", [*METHODS[:2], *(pytest.param(name, marks=pytest.mark.slow)
                                                    for name in METHODS[2:])])
@pytest.mark.thorough
def test_nodes_come_to_what_the_simulator_comes_to(method: str, tmp_path: Path) -> None:
    wanted = experiment(method)
    expected = runs.start(Setup.of(wanted))
    found = secure(wanted, flower.make_clients(DATA, tmp_path), tmp_path)
    assert_same_servers(found, expected)
    for mine, theirs in zip(found.history, expected.history, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=TOLERANCE, nan_ok=True)
        assert mine["participants"] == theirs["participants"]


@pytest.mark.thorough
def test_the_error_of_a_sum_is_the_stated_one(tmp_path: Path) -> None:
    """After one round, of which nothing grows: at most the error of one number for each client, over the sum
    of the shares, which is at least one."""
    wanted = experiment("fedavg", train={"rounds": 1})
    found = secure(wanted, flower.make_clients(DATA, tmp_path), tmp_path).snapshot("last").server
    expected = runs.start(Setup.of(wanted)).snapshot("last").server
    error = (found.theta - expected.theta).abs().max()
    assert 0 < float(error) <= CLIENTS * FixedPoint(BOUND, CLIENTS).error + 1e-15


@pytest.mark.thorough
def test_nothing_but_masked_words_is_uploaded(tmp_path: Path) -> None:
    replies: list[WireMessage] = []

    def watched(answer: Answer) -> Answer:
        def reply(payload: Payload) -> Any:
            found = answer(payload)
            assert isinstance(found, Payload)
            replies.append(WireMessage.decode(found))
            return found
        return reply

    answers = {name: watched(answer) for name, answer in flower.make_clients(DATA, tmp_path).items()}
    secure(experiment("fedavg"), answers, tmp_path)
    uploads = [reply for reply in replies if reply.facts.get("job") == "local"]
    assert len(uploads) == 3 * CLIENTS
    for reply in uploads:
        assert {*reply.tensors} == {"masked"}
        assert {*reply.facts} <= {"what", "nonce", "name", "job", "number", "steps"}
        words = reply.tensors["masked"].tensor("masked", None).numpy()
        assert np.abs(words.astype(float)).mean() > 2**61  # numbers of this size would be small
    sent = [reply.tensors["masked"].data for reply in uploads]
    assert len({*sent}) == len(sent)


# -- who drops out -----------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.thorough
def test_a_client_that_drops_out_in_a_phase(phase: str, tmp_path: Path) -> None:
    """Before its vector has come, it is not in the sum; afterwards it is. Its state of a round that did not
    count is not used."""
    wanted = experiment("scaffold", train={"rounds": 2})
    answers, authority = _signed_clients(tmp_path)
    answers["2"] = changed(answers["2"], phase, 2, lambda _: NoReply("gone"))
    found = secure(wanted, answers, tmp_path, authority=authority.pem)
    is_gone = phase in PHASES[:3]
    assert_same_servers(found, plain("scaffold", 2, 2 if is_gone else None))
    assert ("rejections" in found.history[1]) == is_gone


def _signed_clients(place: Path) -> tuple[dict[str, Answer], Authority]:
    authority = Authority()
    return {name: flower.make_clients({name: what}, place, identity=authority.identity())[name]
            for name, what in DATA.items()}, authority


@pytest.mark.thorough
def test_a_threshold_that_is_not_met_is_waited_for(tmp_path: Path) -> None:
    answers = flower.make_clients(DATA, tmp_path)
    server = MemoryServer(answers)

    class Away(Quiet):
        def played(self, row: dict[str, Any]) -> None:
            if row["round"] == 1:
                server.offline.update("12")

        def waiting(self, there: int, wanted: int, missing: Any) -> None:
            self.told.append(("waiting", there, wanted, missing))
            server.offline.discard("1")

    observer = Away()
    found = flower.federate(experiment("fedavg"), server, tmp_path / "server", alone=False, rules=SECURE,
                            observer=observer)
    assert (2, 3, ["1", "2"]) in observer.of("waiting")
    assert {*found.history[1]["rejections"]} == {"2"}


@pytest.mark.thorough
def test_a_threshold_that_cannot_be_met(tmp_path: Path) -> None:
    answers = flower.make_clients(DATA, tmp_path)
    for name in "12":
        answers[name] = changed(answers[name], "share", 2, lambda reply: WireMessage(
            {**reply.facts, "failed": "no"}))
    with pytest.raises(DescantError, match=r"2 clients cannot take part in round 2.* needs 3; 1: .*: no"):
        secure(experiment("fedavg"), answers, tmp_path)


# -- who lies ----------------------------------------------------------------------------------------


def _facts(**facts: Any) -> Callable[[WireMessage], WireMessage]:
    return lambda reply: reply._replace(facts=reply.facts | facts)


def _spoilt(table: str) -> Callable[[WireMessage], WireMessage]:
    """Other shares, digests or boxes than the client's own."""

    def spoil(reply: WireMessage) -> WireMessage:
        found = {key: value[:40] + value[40:80][::-1] + value[80:]
                 for key, value in reply.facts[table].items()}
        return reply._replace(facts=reply.facts | {table: found})

    return spoil


LIES = {
    "no keys": ("advertise", _facts(advert=None)),
    "keys that are no points": ("advertise", _facts(advert=["AAAA"] * 4)),
    "shares for nobody": ("share", _facts(boxes={})),
    "shares that are no text": ("share", _facts(boxes={"0": 1})),
    "no commitment": ("share", _facts(commitment="")),
    "another form": ("local", lambda reply: reply._replace(
        tensors={"masked": PackedTensor.of(torch.zeros(3).long())})),
    "an upload in the clear": ("local", lambda reply: reply._replace(
        tensors={**reply.tensors, "value": PackedTensor.of(torch.zeros(3))})),
    "steps": ("local", _facts(steps=-1)),
}


@pytest.mark.slow
def test_a_client_that_lies_in_form_is_left_out(tmp_path: Path) -> None:
    """In every round with another lie: all of them end as if its reply were lost."""
    rounds = range(1, len(LIES) + 1)
    wanted = experiment("fedavg", train={"rounds": len(LIES)})
    answers = flower.make_clients(DATA, tmp_path)
    for number, (phase, change) in zip(rounds, LIES.values(), strict=True):
        answers["2"] = changed(answers["2"], phase, number, change)
    found = secure(wanted, answers, tmp_path)
    left_out = {lie: {*row["rejections"]} for lie, row in zip(LIES, found.history, strict=True)}
    assert left_out == {lie: {"2"} for lie in LIES}
    assert_same_servers(found, plain("fedavg", len(LIES), *rounds))


@pytest.mark.parametrize("table", ["seeds", "keys"])
@pytest.mark.thorough
def test_wrong_shares_of_one_client_are_not_used(table: str, tmp_path: Path) -> None:
    wanted = experiment("fedavg", train={"rounds": 1}, data={"clients": 5})
    data = {str(k): f"digits:{k}" for k in range(5)}
    answers = flower.make_clients(data, tmp_path)
    answers["4"] = changed(answers["4"], "local", 1, lambda _: NoReply("gone"))  # so that its key is needed
    answers["2"] = changed(answers["2"], "unmask", 1, _spoilt(table))
    found = secure(wanted, answers, tmp_path)
    assert {*found.history[0]["rejections"]} == {"4"}


@pytest.mark.thorough
def test_who_spoils_the_boxes_of_all_is_found_out(tmp_path: Path) -> None:
    """The others cannot read its shares; they say so, and the round goes on without it."""
    wanted = experiment("fedavg", train={"rounds": 2})
    answers = flower.make_clients(DATA, tmp_path)
    answers["2"] = changed(answers["2"], "share", 1, _spoilt("boxes"))
    found = secure(wanted, answers, tmp_path)
    assert [row["rejections"] for row in found.history] == [{"2": "the others cannot read its shares"}] * 2


@pytest.mark.thorough
def test_who_deals_shares_of_another_secret_is_found_out(tmp_path: Path) -> None:
    """The sum is lost, and with it the round; from then on that client is left out."""
    other = "A" * 43 + "="
    answers = flower.make_clients(DATA, tmp_path)
    answers["2"] = changed(answers["2"], "share", 1, _facts(commitment=other))
    found = secure(experiment("fedavg"), answers, tmp_path)
    assert "2 has spoiled the sum: the shares that it dealt are not of its seed" in found.history[0]["note"]
    assert [row.get("rejections", {}).get("2") for row in found.history] == [
        None, *["the shares that it dealt are not of its seed"] * 2]


# -- a server that is killed -------------------------------------------------------------------------


class Killed(KeyboardInterrupt):
    pass


@pytest.mark.parametrize(("event", "phase", "lost"), [
    ("answered", "advertise", False), ("answered", "local", False), ("asked", "unmask", False),
    ("asked", "score", True)])
@pytest.mark.thorough
def test_a_server_that_is_killed_loses_a_round_at_most(event: str, phase: str, lost: bool, tmp_path: Path
                                                        ) -> None:
    """In the second round. What was not unmasked is summed again, with other keys; what was is lost, since
    clients reveal their shares for one sum of a round."""
    wanted = experiment("scaffold", train={"rounds": 3}, eval={"every": 1})

    class Killing(Quiet):
        def __getattr__(self, name: str) -> Any:
            tell = super().__getattr__(name)

            def maybe(*given: Any) -> None:
                tell(*given)
                second = ("asked", phase, 2) in [told[:3] for told in self.told]
                if name == event and phase in given and second:
                    raise Killed

            return maybe

    answers = flower.make_clients(DATA, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        secure(wanted, answers, tmp_path, observer=Killing())
    found = secure(wanted, answers, tmp_path)
    assert found.rounds == 3
    notes = [row.get("note", "") for row in found.history]
    assert ["unmasked a sum of this round before" in note for note in notes] == [False, lost, False]
    if not lost:
        assert_same_servers(found, runs.start(Setup.of(wanted)))


# -- what is agreed, and what is refused --------------------------------------------------------------


@pytest.mark.parametrize(("method", "changes", "rules", "says"), [
    ("fedamp", {}, {}, r"does not fit fedamp .* needs every upload by itself.*what fits: .*fedavg.*scaffold"),
    ("fedmap", {}, {}, r"does not fit fedmap as it is set here.*fedmap with weights = .samples"),
    ("fedavg", {"train": {"cohort": 2}}, {}, "needs a cohort of 3 clients at least, not 2"),
    ("fedavg", {"train": {"cohort": 3, "participation": "all"}}, {}, "participation = .all. does not fit"),
    ("fedavg", {}, {"threshold": 2}, "--threshold must be more than half of the 4 .* at least 3"),
    ("fedavg", {}, {"threshold": 5}, "at most 4, not 5"),
])
def test_what_cannot_be_summed_is_refused_before_anybody_is_waited_for(
        method: str, changes: dict[str, Any], rules: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        flower.federate(experiment(method, **changes), MemoryServer({}), tmp_path, clients=CLIENTS,
                        rules=Rules(secure=True, **rules))


def _refusals(rules: Rules, place: Path, **wants: Any) -> list[str]:
    """What a federation says of a client that wants something, until it would wait for ever."""
    class Refused(Quiet):
        def refused(self, name: str, reason: str) -> None:
            self.told.append((name, reason))
            raise KeyboardInterrupt

    observer = Refused()
    answers = flower.make_clients({"0": DATA["0"]}, place, **wants)
    answers |= flower.make_clients({name: DATA[name] for name in "123"}, place)
    with pytest.raises(KeyboardInterrupt):
        flower.federate(experiment("fedavg"), MemoryServer(answers), place / "server", rules=rules,
                        observer=observer)
    return [reason for _, reason in observer.told if isinstance(reason, str)]


def test_a_client_can_insist_on_secure_aggregation(tmp_path: Path) -> None:
    """The server cannot turn it off in silence, nor lower the threshold."""
    assert "takes part with secure aggregation only" in _refusals(
        Rules(deadline=5), tmp_path / "off", secure=3)[-1]
    assert "wants 4 clients in a sum at least, and the server's threshold is 3" in _refusals(
        SECURE, tmp_path / "low", secure=4)[-1]


@pytest.mark.thorough
def test_a_federation_with_secure_aggregation_is_not_continued_without(tmp_path: Path) -> None:
    answers = flower.make_clients(DATA, tmp_path)
    wanted = experiment("fedavg", train={"rounds": 1})
    secure(wanted, answers, tmp_path)
    for rules in (Rules(deadline=5), Rules(deadline=5, secure=True, threshold=4)):
        with pytest.raises(UsageError, match="secure aggregation and its threshold are a part of it"):
            secure(wanted, answers, tmp_path, rules=rules)


@pytest.mark.thorough
def test_no_client_that_has_joined_uploads_in_the_clear(tmp_path: Path) -> None:
    """Nor does it work for a sum in which others were sent another model."""
    requests: list[Payload] = []
    answers = flower.make_clients(DATA, tmp_path)
    asked = answers["0"]

    def recorded(payload: Payload) -> Any:
        requests.append(payload)
        return asked(payload)

    def other_model(payload: Payload) -> Any:
        message = WireMessage.decode(payload)
        if message.facts.get("job") == "local":
            theta = message.tensors["shared.theta"]
            bits = bytes([theta.data[0] ^ 1]) + theta.data[1:]
            message = message._replace(tensors={**message.tensors, "shared.theta": theta._replace(data=bits)})
        return answers["1"](message.encode())

    wanted = experiment("fedavg", train={"rounds": 1})
    found = secure(wanted, answers | {"0": recorded, "1": other_model}, tmp_path)
    assert "was sent another model than the others" in found.history[0]["rejections"]["1"]
    sent = map(WireMessage.decode, requests)
    work = next(message for message in sent if message.facts.get("job") == "local")
    plain = {name: value for name, value in work.facts.items() if name not in ("attempt", "boxes")}
    reply = asked(work._replace(facts=plain).encode())
    assert isinstance(reply, Payload)
    assert WireMessage.decode(reply).facts["failed"] == "Rejected"


@pytest.mark.thorough
def test_clients_shorten_their_own_updates(tmp_path: Path) -> None:
    wanted = experiment("fedavg", train={"rounds": 1})
    rules = Rules(deadline=5, secure=True, threshold=3, max_norm=1e-3)
    found = secure(wanted, flower.make_clients(DATA, tmp_path), tmp_path, rules=rules)
    first = found.work.task.init().theta
    assert 0 < float((found.snapshot("last").server.theta - first).norm()) <= 1e-3 * (1 + 1e-9)

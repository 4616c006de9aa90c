"""Messages in both directions: a client answers whatever it is asked, a server takes no reply that is none.

The federation is a real one, on a transport without a network.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import torch
from hypothesis import strategies as st

from benchmarks.fuzz.case import Kind
from benchmarks.fuzz.draw import CHANGES, INTEGERS, VALUES, Change, changed_tables
from descant.core.task import Task
from descant.core.tree import leaves
from descant.deploy.backend import Rules
from descant.deploy.client import Client
from descant.deploy.messages import WireMessage
from descant.deploy.protocol import RemoteExperiment, Shapes
from descant.deploy.riders import RIDER
from descant.deploy.server import run_server
from descant.deploy.transport import Connection, NoReply, Payload
from descant.experiment.config import Experiment
from descant.experiment.run import Run

NAMES = ("north", "south")
ROUNDS = 2
EXPERIMENT = {"data": {"dataset": "logistic", "clients": 2, "dim": 3, "rows": 12}, "model": {"name": "mclr"},
              "algorithm": {"name": "ditto"}, "train": {"rounds": ROUNDS, "batch": 4, "local": {"steps": 1}},
              "eval": {"every": 1}}  # the scores of the first round ride with the work of the second


class Quiet:
    """An observer that is told and says nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *given: None


class Line:
    """A transport without a network, which keeps every request and reply; `spoil` may change a reply."""

    def __init__(self, answers: Mapping[str, Callable[[Payload], Payload]],
                 spoil: Callable[[str, Payload], Payload] | None = None) -> None:
        self.answers, self._spoil = answers, spoil
        self.requests: list[Payload] = []
        self.replies: list[Payload] = []
        self.record: Record = {}
        self._waiting: dict[str, Payload] = {}
        self._refused = dict.fromkeys(range(len(answers)), 0)

    def connected(self) -> dict[int, Connection]:
        """Whoever is refused connects anew."""
        return {k: Connection(name, f"refused {self._refused[k]} times")
                for k, name in enumerate(self.answers)}

    def send(self, payloads: Mapping[int, Payload], seconds: float) -> dict[int, str]:
        for address, payload in payloads.items():
            name, facts = NAMES[address], json.loads(payload.facts)
            reply = self.answers[name](payload)
            self._refused[address] += facts.get("what") == "refuse"
            self.requests.append(payload)
            self.replies.append(reply)
            self.record[name, *about(facts)] = reply
            self._waiting[str(address)] = reply if self._spoil is None else self._spoil(name, reply)
        return {address: str(address) for address in payloads}

    def receive(self, requests: Collection[str]) -> Iterator[tuple[str, Payload | NoReply]]:
        return iter([(name, self._waiting.pop(name)) for name in requests if name in self._waiting])

    def wait(self, seconds: float) -> None: ...

    def forget(self, requests: Collection[str]) -> None: ...

    def expect(self, count: int) -> None: ...

    def close(self) -> None: ...


Record: TypeAlias = dict[tuple[Any, ...], Payload]  # replies, by name and what was asked for


def about(facts: dict[str, Any]) -> tuple[Any, ...]:
    """What a request asks for."""
    return facts["what"], facts.get("job"), facts.get("number"), RIDER in facts


def as_before(name: str, line: Line) -> Callable[[Payload], Payload]:
    """A client that answers as it did the first time, whatever model it is sent: training would take most of
    a case, and a server cannot tell."""
    def reply(payload: Payload) -> Payload:
        facts = json.loads(payload.facts)
        key = name, *about(facts)
        if key not in line.record:
            line.record[key] = line.answers[name](payload)
        known = line.record[key]
        return known._replace(facts=json.dumps(json.loads(known.facts) | {"nonce": facts["nonce"]}))

    return reply


def federation(home: Path) -> Line:
    """A small federation that has run, and all that was said in it."""
    shutil.rmtree(home, ignore_errors=True)
    clients = {name: Client(name, f"logistic:{k}", home / name, Quiet()) for k, name in enumerate(NAMES)}
    line = Line({name: client.reply for name, client in clients.items()})
    serve(line, home / "server")
    return line


def serve(line: Line, out: Path) -> Run:
    with mock.patch("descant.experiment.run.draw_curve"):  # takes longer than all the rest
        return run_server(Experiment.parse(EXPERIMENT), line, out, len(NAMES),
                          Rules(deadline=1.0, at_least=1), Quiet(), alone=False)  # type: ignore[arg-type]


@contextlib.contextmanager
def prepared(known: dict[str, Shapes]) -> Iterator[None]:
    """What a server works out from the experiment alone is known, and nobody waits for a client that is
    already there."""
    shapes = RemoteExperiment.shapes

    def remembered(remote: RemoteExperiment, task: Task) -> Shapes:
        if remote.session not in known:
            known[remote.session] = shapes(remote, task)
        return known[remote.session]

    with (mock.patch.object(RemoteExperiment, "shapes", remembered),
          mock.patch("descant.deploy.server._require_enough"), mock.patch("descant.deploy.server.PAUSE", 0.0),
          mock.patch("descant.deploy.client_manager.FRESH", 0.0),
          # which also writes down where it was called, for devices that are not there
          mock.patch("torch.manual_seed", torch.default_generator.manual_seed)):
        yield


def spoiled(payloads: list[Payload]) -> st.SearchStrategy[Payload]:
    """One of the messages with other facts, other tensors or other bytes."""
    tables = [{"facts": json.loads(payload.facts), "tensors": json.loads(payload.tensors), "which": k}
              for k, payload in enumerate(payloads)]

    def made(given: tuple[dict[str, Any], list[Change], list[Change]]) -> Payload:
        table, in_text, in_blobs = given
        which = table.get("which")
        blobs = dict(payloads[which % len(payloads)].blobs if type(which) is int else {})
        facts, tensors = (json.dumps(table.get(name)) for name in ("facts", "tensors"))
        for change in in_text:
            facts = change.of(facts.encode()).decode("utf-8", "replace")
        for change in in_blobs:
            blobs = {name: change.of(data) for name, data in blobs.items()}
        return Payload(facts, tensors, blobs)

    few = st.one_of(st.just([]), st.lists(CHANGES, max_size=1))
    return st.tuples(changed_tables(tables, st.one_of(INTEGERS, VALUES)), few, few).map(made)


def request_kind(home: Path) -> Kind:
    """What a server, or somebody in its place, asks of a client."""
    line = federation(home / "federation")
    client = Client(NAMES[0], "logistic:0", home / "client", Quiet())

    def use(payload: Payload) -> None:
        reply = WireMessage.decode(client.reply(payload))
        assert "failed" in reply.facts or reply.facts.get("what") in ("hello", "join", "work", "finish")

    return Kind("requests to a client", spoiled(line.requests), use)


def reply_kind(home: Path) -> Kind:
    """What a client, or somebody in its place, replies to a server: the federation goes on without it, or it
    ends with an error of descant's. In the end the model is finite, and no score is better than all right."""
    line = federation(home / "federation")
    answers = {name: as_before(name, line) for name in NAMES}
    known: dict[str, Shapes] = {}

    def use(given: tuple[str, Payload]) -> None:
        what, payload = given
        joins = 0

        def spoil(name: str, reply: Payload) -> Payload:
            nonlocal joins
            facts = json.loads(reply.facts)
            if name != NAMES[1] or facts.get("what") != what:
                return reply
            joins += what == "join"
            if joins > 1:  # it is asked for until it comes
                return reply
            echo = {key: facts[key] for key in ("what", "nonce", "job", "number") if key in facts}
            try:
                return payload._replace(facts=json.dumps(json.loads(payload.facts) | echo))
            except (ValueError, TypeError):
                return payload

        shutil.rmtree(home / "server", ignore_errors=True)
        with prepared(known):
            run = serve(Line(answers, spoil), home / "server")
        assert run.rounds == ROUNDS
        assert all(bool(leaf.isfinite().all()) for _, leaf in leaves(run.snapshot("last").server))
        scores = [row["personal"]["val"]["accuracy"]["mean"] for row in run.history]
        assert all(0 <= score <= 1 for score in scores)

    kinds = st.sampled_from(["join", "work", "work", "finish"])  # a hello is asked for until it comes
    return Kind("replies to a server", st.tuples(kinds, spoiled(line.replies)), use)

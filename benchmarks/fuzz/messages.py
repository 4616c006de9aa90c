"""Messages in both directions: a client answers whatever it is asked, a server takes no reply that is none.

The federation is a real one, on a transport without a network.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import strategies as st

from benchmarks.fuzz.case import Kind
from benchmarks.fuzz.draw import CHANGES, INTEGERS, VALUES, Change, changed_tables
from descant.deploy.backend import Rules
from descant.deploy.client import Client
from descant.deploy.messages import WireMessage
from descant.deploy.server import run_server
from descant.deploy.transport import Connection, NoReply, Payload
from descant.experiment.config import Experiment

NAMES = ("north", "south")
EXPERIMENT = {"data": {"dataset": "logistic", "clients": 2, "dim": 3, "rows": 12}, "model": {"name": "mclr"},
              "algorithm": {"name": "ditto"}, "train": {"rounds": 2, "batch": 4, "local": {"steps": 1}},
              "eval": {"every": 1}}  # the scores of the first round ride with the work of the second


class Quiet:
    """An observer that is told and says nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *given: None


class Line:
    """A transport without a network, which keeps every request and reply; `spoil` may change a reply."""

    def __init__(self, clients: dict[str, Client], spoil: Callable[[str, Payload], Payload] | None = None
                 ) -> None:
        self._clients, self._spoil = clients, spoil
        self.requests: list[Payload] = []
        self.replies: list[Payload] = []
        self._waiting: dict[str, Payload] = {}
        self._refused = dict.fromkeys(range(len(clients)), 0)

    def connected(self) -> dict[int, Connection]:
        """Whoever is refused connects anew."""
        return {k: Connection(name, f"refused {self._refused[k]} times")
                for k, name in enumerate(self._clients)}

    def send(self, payloads: Mapping[int, Payload], seconds: float) -> dict[int, str]:
        for address, payload in payloads.items():
            reply = self._clients[NAMES[address]].reply(payload)
            self._refused[address] += json.loads(payload.facts).get("what") == "refuse"
            self.requests.append(payload)
            self.replies.append(reply)
            self._waiting[str(address)] = reply if self._spoil is None else self._spoil(NAMES[address], reply)
        return {address: str(address) for address in payloads}

    def receive(self, requests: Collection[str]) -> Iterator[tuple[str, Payload | NoReply]]:
        return iter([(name, self._waiting.pop(name)) for name in requests if name in self._waiting])

    def forget(self, requests: Collection[str]) -> None: ...

    def expect(self, count: int) -> None: ...

    def close(self) -> None: ...


def federation(home: Path, spoil: Callable[[str, Payload], Payload] | None = None) -> Line:
    """A small federation that has run, and all that was said in it."""
    shutil.rmtree(home, ignore_errors=True)
    clients = {name: Client(name, f"logistic:{k}", home / name, Quiet()) for k, name in enumerate(NAMES)}
    line = Line(clients, spoil)
    with mock.patch("descant.experiment.run.draw_curve"):  # takes longer than all the rest
        run_server(Experiment.parse(EXPERIMENT), line, home / "server", len(NAMES),
                   Rules(deadline=1.0, at_least=1), Quiet(), alone=False)  # type: ignore[arg-type]
    return line


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
    ends with an error of descant's."""
    line = federation(home / "federation")

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

        federation(home / "federation", spoil)

    kinds = st.sampled_from(["join", "work", "work", "finish"])  # a hello is asked for until it comes
    return Kind("replies to a server", st.tuples(kinds, spoiled(line.replies)), use)

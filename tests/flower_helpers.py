"""A federation in one process: clients behind a transport that delivers at once."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from descant.core.permit import ran
from descant.deploy.backend import Rules
from descant.deploy.client import Client
from descant.deploy.server import run_server
from descant.deploy.transport import Connection, Events, NoReply, Payload, Reply
from descant.experiment.config import Experiment
from descant.experiment.run import Run
from helpers import on_any_model

CLIENTS = 4
DATA = {str(k): f"digits:{k}" for k in range(CLIENTS)}
Answer = Callable[[Payload], Payload | NoReply | None]  # None: no reply comes


class Quiet:
    """Observes both sides, and remembers."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            raise AttributeError(name)

        def tell(*given: Any) -> None:
            self.told.append((name, *given))

        return tell

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [told[1:] for told in self.told if told[0] == kind]


class MemoryServer:
    """A `ServerTransport` without a network: what is sent is replied to at once."""

    port = 8443

    def __init__(self, answers: Mapping[str, Answer], named: bool = True) -> None:
        self.answers: dict[str, Answer] = dict(answers)
        self.ids = {100 + k: name for k, name in enumerate(answers)}
        self.since = dict.fromkeys(self.ids, 0)
        self.offline: set[str] = set()
        self.is_open = True
        self.largest = 0
        self._named = named
        self._replies: dict[str, Payload | NoReply] = {}
        self._count = 0

    def connected(self) -> dict[int, Connection]:
        return {node: Connection(name if self._named else "", str(self.since[node]))
                for node, name in self.ids.items() if name in self.answers and name not in self.offline}

    def expect(self, count: int) -> None:
        self.largest = count

    def send(self, payloads: Mapping[int, Payload], seconds: float) -> dict[int, str]:
        made = {}
        for address, payload in payloads.items():
            self._count += 1
            made[address] = f"request {self._count}"
            if (reply := self.answers[self.ids[address]](payload)) is not None:
                self._replies[made[address]] = reply
        return made

    def receive(self, requests: Collection[str]) -> Iterator[tuple[str, Payload | NoReply]]:
        return iter([(id, self._replies.pop(id)) for id in requests if id in self._replies])

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def forget(self, requests: Collection[str]) -> None:
        for id in requests:
            self._replies.pop(id, None)

    def close(self) -> None:
        self.is_open = False

    def __enter__(self) -> MemoryServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MemoryClient:
    """A `ClientTransport` to a `MemoryServer` in the same process."""

    def __init__(self, server: MemoryServer, name: str) -> None:
        self._server, self._name = server, name

    def serve(self, reply: Reply, events: Events, stop: threading.Event) -> None:
        def counted(payload: Payload) -> Payload:
            events.received(sum(map(len, payload.blobs.values())))
            found = reply(payload)
            events.sent(sum(map(len, found.blobs.values())))
            return found

        address = 100 + len(self._server.ids)
        self._server.since[address] = 0
        self._server.answers[self._name] = counted
        self._server.ids[address] = self._name
        events.connected()
        stop.wait()
        self._server.offline.add(self._name)


def experiment(method: str, **changes: Any) -> Experiment:
    """The digits, two classes a client."""
    tables: dict[str, Any] = {
        "data": {"dataset": "digits", "partition": "classes", "clients": CLIENTS, "classes_per_client": 2},
        "model": {"name": "mclr"}, "algorithm": {"name": method} | on_any_model(method),
        "train": {"rounds": 3, "batch": 20, "local": {"steps": 3}, "dtype": "float64",
                  "backend": "vectorised"},
        "eval": {"every": 2},
    }
    for name, fields in changes.items():
        tables[name] = tables[name] | fields
    return Experiment.parse(tables, ran())


def make_clients(data: dict[str, str], directory: Path, observer: Any = None, **options: Any
                 ) -> dict[str, Answer]:
    """The replies of clients by name, each with its data."""
    return {name: Client(name, what, directory / name, observer or Quiet(), **options).reply
            for name, what in data.items()}


def batchnorm(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """A network of one's own, with running statistics."""
    hidden = nn.Linear(math.prod(shape), 6)
    return nn.Sequential(nn.Flatten(), hidden, nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, outputs))


class Counted(nn.Linear):
    """Knows how many rows it was given, in whichever copy."""

    rows = 0

    def forward(self, x: Tensor) -> Tensor:
        Counted.rows += len(x)
        return super().forward(x)


def frozen(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """A frozen feature extractor before a head that is trained."""
    body = nn.Sequential(nn.Flatten(), Counted(math.prod(shape), 6), nn.Tanh()).requires_grad_(False)
    return nn.Sequential(body, nn.Linear(6, outputs))


def federate(experiment: Experiment, transport: MemoryServer, out: Path, *, observer: Any = None,
             rules: Rules | None = None, clients: int | None = None, **options: Any) -> Run:
    count = len(transport.ids) if clients is None else clients
    return run_server(experiment, transport, out, count, rules or Rules(deadline=5), observer or Quiet(),
                      **options)

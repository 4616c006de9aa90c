"""The clients of a federation by name and number, and at which address each is connected.

A client is known by the name under which its key is registered. Its number is the rank of its name among all
names, and stays. Its address may change with every restart.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from descant import __version__
from descant.core.sample import SampleFormat
from descant.deploy.federation import ClientInfo
from descant.deploy.messages import WireMessage
from descant.deploy.protocol import PROTOCOL, RemoteExperiment
from descant.deploy.requests import request
from descant.deploy.transport import Connection, NoReply, Rejected, ServerTransport
from descant.errors import DescantError, UsageError

TIMEOUT = 60.0  # seconds to read the data, or to join; and until a silent client is asked again
TRIES = 3  # to join, in one round
FRESH = 0.4  # seconds for which the list of connected clients is reused


class ConnectedClient(NamedTuple):
    """A client that has replied to `hello`."""

    name: str
    kind: SampleFormat
    since: str


class ClientManager:
    """`refused` is called for clients that cannot take part."""

    def __init__(self, transport: ServerTransport, tables: dict[str, Any],
                 refused: Callable[[str, str], None]) -> None:
        self._transport = transport
        self._tables = tables
        self._refused = refused
        self._connected: dict[int, ConnectedClient] = {}  # by address
        self._ignored: dict[int, tuple[str, float]] = {}  # address -> connected since, ignored until
        self._greeted = -FRESH
        self.remote: RemoteExperiment | None = None
        self.names: tuple[str, ...] = ()  # of the clients, by number
        self._clients: dict[str, ClientInfo] = {}

    # -- who is connected ------------------------------------------------------------------------

    def connected(self) -> dict[str, ConnectedClient]:
        """The clients that are connected and can take part; says hello to new and restarted ones."""
        if time.monotonic() - self._greeted >= FRESH:
            self._greet()
            self._greeted = time.monotonic()
        return {client.name: client for client in self._connected.values()}

    def _greet(self) -> None:
        online = self._transport.connected()
        self._connected = {address: client for address, client in self._connected.items()
                           if address in online and online[address].since == client.since}
        new = {address: found for address, found in online.items()
               if address not in self._connected and not self._is_ignored(address, found)}
        hello = {"what": "hello", "protocol": PROTOCOL, "version": __version__, "experiment": self._tables}
        for address, reply in self._request({address: WireMessage(dict(hello)) for address in new}, TIMEOUT):
            if isinstance(reply, NoReply):  # asked again later: it must not delay the others
                self._ignored[address] = new[address].since, time.monotonic() + TIMEOUT
                continue
            try:
                self._connected[address] = self._accept(new[address], reply)
            except Rejected as error:
                self._ignored[address] = new[address].since, math.inf
                self._refused(new[address].name or str(reply.facts.get("name"))[:80], str(error))

    def _is_ignored(self, address: int, found: Connection) -> bool:
        since, until = self._ignored.get(address, ("", 0.0))
        return since == found.since and time.monotonic() < until

    def _accept(self, found: Connection, reply: WireMessage) -> ConnectedClient:
        raise_failure(reply)
        name = reply.fact("name", str)
        if not name.isprintable() or not 0 < len(name) <= 100:
            raise Rejected(f"{name!r:.80} is not a valid name")
        if found.name and name != found.name:
            raise Rejected(f"it calls itself {name!r}, but its key is that of {found.name!r}")
        if any(client.name == name for client in self._connected.values()):
            raise Rejected(f"a client called {name!r} is already connected")
        rows, known = reply.fact("rows", int), self._clients.get(name)
        if known is not None and rows != sum(known[1:]):
            raise Rejected(f"it joined with {sum(known[1:])} rows and has {rows} now: give it the same data")
        try:
            kind = SampleFormat.parse(reply.facts.get("kind"))
        except UsageError as error:
            raise Rejected(str(error)) from None
        for client in self._connected.values():
            if differs := client.kind.differs(kind):
                raise Rejected(f"its samples differ from those of {client.name}: {differs}")
        return ConnectedClient(name, kind, found.since)

    def is_connected(self, client: int) -> bool:
        return self.names[client] in self.connected()

    # -- joining ---------------------------------------------------------------------------------

    def begin(self, remote: RemoteExperiment, names: tuple[str, ...], clients: list[ClientInfo]) -> None:
        """Fix the federation; without `clients`, joining tells how many rows they have."""
        self.remote = remote
        self.names = names
        self._clients = {client.name: client for client in clients}

    def join_all(self) -> list[ClientInfo]:
        """Let all clients join, in the order of their numbers."""
        assert self.remote is not None
        for client, name in enumerate(self.names):
            address = self._address(name)
            if address is None:
                raise DescantError(f"{name} disconnected before it joined: start again when it is back")
            if isinstance(found := self.join(address, self.remote, client, name), str):
                raise DescantError(f"{name} cannot join: {found}")
        return [self._clients[name] for name in self.names]

    def join(self, address: int, remote: RemoteExperiment, client: int, name: str) -> ClientInfo | str:
        """Let a client join under this number; returns its sizes, or why it does not join."""
        join = WireMessage({"what": "join", "session": remote.session, "experiment": self._tables,
                            "kind": remote.kind.dump(), "clients": remote.clients, "names": remote.names,
                            "client": client, "unseen": remote.unseen})
        reply = self.send(address, join, TIMEOUT)
        if isinstance(reply, NoReply):
            return reply.reason
        try:
            raise_failure(reply)
            sizes = WireMessage(reply.fact("sizes", dict))
            info = ClientInfo(name, *(sizes.fact(split, int) for split in ClientInfo._fields[1:]))
            if info.train < 1 or min(info[1:]) < 0:
                raise Rejected(f"it reports {info.train} training rows")
            if (known := self._clients.setdefault(name, info)) != info:
                raise Rejected(f"it joined with {known[1:]} rows for training, validation and test and has "
                               f"{info[1:]} now: give it the same data")
        except Rejected as error:
            return str(error)
        return info

    # -- requests --------------------------------------------------------------------------------

    def request(self, requests: Mapping[int, WireMessage], seconds: float
                ) -> Iterator[tuple[int, WireMessage | NoReply]]:
        """Send requests to clients by number; a client that is not joined any more joins again."""
        assert self.remote is not None
        left, until = dict(requests), time.monotonic() + seconds
        for _ in range(TRIES):
            addresses = {client: self._address(self.names[client]) for client in left}
            client_at = {address: client for client, address in addresses.items() if address is not None}
            messages = {address: left[client] for address, client in client_at.items()}
            again: list[int] = []
            for address, reply in self._request(messages, max(0.1, until - time.monotonic())):
                client = client_at[address]
                if isinstance(reply, WireMessage) and reply.facts.get("ready") is False:
                    again.append(client)
                    continue
                del left[client]
                yield client, reply
            for client in again:
                found = self.join(addresses[client] or 0, self.remote, client, self.names[client])
                if isinstance(found, str):
                    del left[client]
                    yield client, NoReply(f"it cannot join again: {found}", True)
            if not again:
                break
        for client in left:
            yield client, NoReply("not connected")

    def send(self, address: int, message: WireMessage, seconds: float) -> WireMessage | NoReply:
        """One request to one address."""
        return next((reply for _, reply in self._request({address: message}, seconds)),
                    NoReply("not connected"))

    def newcomers(self) -> dict[int, ConnectedClient]:
        """The connected clients that are not part of the federation, by address."""
        self._greet()  # the server may be about to end: one that has just come is served too
        return {address: client for address, client in self._connected.items()
                if client.name not in self.names}

    def _address(self, name: str) -> int | None:
        self.connected()
        return next((address for address, client in self._connected.items() if client.name == name), None)

    def _request(self, messages: Mapping[int, WireMessage], seconds: float
                 ) -> Iterator[tuple[int, WireMessage | NoReply]]:
        """Add a nonce that the reply must repeat: an old reply does not have it."""
        nonces = {address: secrets.token_hex(8) for address in messages}
        marked = {address: message._replace(facts=message.facts | {"nonce": nonces[address]})
                  for address, message in messages.items()}
        for address, reply in request(self._transport, marked, seconds):
            if isinstance(reply, WireMessage) and (
                    reply.facts.get("nonce") != nonces[address]
                    or reply.facts.get("what") != messages[address].facts["what"]):
                yield address, NoReply("it repeats the reply to another request", True)
            else:
                yield address, reply


def raise_failure(reply: WireMessage) -> None:
    """Raise the failure that a client reports, as printable text."""
    if (reason := reply.facts.get("failed")) is not None:
        text = "".join(letter if letter.isprintable() else " " for letter in str(reason))[:200]
        raise Rejected(f"it failed: {text}")

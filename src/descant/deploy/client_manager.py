"""The clients of a federation by name and number, and at which address each is connected.

A client is known by the name under which its key is registered. Its number is the rank of its name among all
names, and stays. Its address may change with every restart.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from descant import __version__
from descant.core.sample import SampleFormat
from descant.deploy.messages import WireMessage
from descant.deploy.protocol import MAX_ROWS, PROTOCOL, ClientInfo, RemoteExperiment
from descant.deploy.requests import request
from descant.deploy.transport import Connection, NoReply, Rejected, ServerTransport
from descant.errors import UsageError

TIMEOUT = 60.0  # seconds to read the data, or to join; and until a silent client is asked again
TOLD = 5.0  # seconds to tell a client that it is refused
TRIES = 3  # to join, in one round
FRESH = 0.4  # seconds for which the list of connected clients is reused


DIFFERS = "its samples differ from those of the others: "
NO_KIND = SampleFormat(())  # of a client that is refused


class ConnectedClient(NamedTuple):
    """A client that has replied to `hello`."""

    name: str
    kind: SampleFormat
    since: str
    rows: int


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
                name = new[address].name or str(reply.facts.get("name"))[:80]
                self._refuse(address, ConnectedClient(name, NO_KIND, new[address].since, 0), str(error))

    def _refuse(self, address: int, client: ConnectedClient, reason: str, until: float = math.inf) -> None:
        """A client that cannot take part is told so, and is not asked again until it reconnects."""
        self._connected.pop(address, None)
        self._ignored[address] = client.since, until
        self._refused(client.name, reason)
        if until == math.inf:
            for _ in self._request({address: WireMessage({"what": "refuse", "reason": reason})}, TOLD):
                pass

    def refuse(self, names: Collection[str], kind: SampleFormat) -> None:
        """Refuse connected clients whose samples are not of this kind, before the federation has begun."""
        for address, client in list(self._connected.items()):
            if client.name in names:
                self._refuse(address, client, DIFFERS + str(kind.differs(client.kind)))

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
        if not 1 <= rows <= MAX_ROWS:
            raise Rejected(f"it claims {rows} rows, and {MAX_ROWS} are the most")
        if known is not None and rows != sum(known[1:]):
            raise Rejected(f"it joined with {sum(known[1:])} rows and has {rows} now: give it the same data")
        try:
            kind = SampleFormat.parse(reply.facts.get("kind"))
        except UsageError as error:
            raise Rejected(str(error)) from None
        if self.remote is not None and (differs := self.remote.kind.differs(kind)):
            raise Rejected(DIFFERS + differs)
        return ConnectedClient(name, kind, found.since, rows)

    # -- joining ---------------------------------------------------------------------------------

    def begin(self, remote: RemoteExperiment, names: tuple[str, ...], clients: list[ClientInfo]) -> None:
        """Fix the federation; without `clients`, joining tells how many rows they have."""
        self.remote = remote
        self.names = names
        self._clients = {client.name: client for client in clients}

    def reset(self) -> None:
        """There is no federation yet, or not any more: somebody did not join."""
        self.remote, self.names, self._clients = None, (), {}

    def join_all(self) -> list[ClientInfo] | None:
        """Let all clients join, in the order of their numbers. None: somebody did not, which is told."""
        assert self.remote is not None
        found = self._join({client: (self._address(name), self.remote, name)
                            for client, name in enumerate(self.names)}, TIMEOUT)
        failed = {self.names[client]: reply for client, reply in found.items() if isinstance(reply, NoReply)}
        for address, client in list(self._connected.items()):
            if (reply := failed.get(client.name)) is not None:
                until = math.inf if reply.final else time.monotonic() + TIMEOUT
                self._refuse(address, client, f"it cannot join: {reply.reason}", until)
        return None if failed else [self._clients[name] for name in self.names]

    def join(self, address: int, remote: RemoteExperiment, client: int, name: str) -> ClientInfo | NoReply:
        """Let a client join under this number; returns its sizes, or why it does not join."""
        return self._join({client: (address, remote, name)}, TIMEOUT)[client]

    def _join(self, who: Mapping[int, tuple[int | None, RemoteExperiment, str]], seconds: float
              ) -> dict[int, ClientInfo | NoReply]:
        """All at once: they do not wait for each other."""
        found: dict[int, ClientInfo | NoReply] = dict.fromkeys(who, NoReply("not connected"))
        client_at = {address: client for client, (address, _, _) in who.items() if address is not None}
        requests = {address: self._joining(who[client][1], client) for address, client in client_at.items()}
        for address, reply in self._request(requests, seconds):
            client = client_at[address]
            found[client] = reply if isinstance(reply, NoReply) else self._joined(who[client][2], reply)
        return found

    def _joining(self, remote: RemoteExperiment, client: int) -> WireMessage:
        return WireMessage({"what": "join", "session": remote.session, "experiment": self._tables,
                            "kind": remote.kind.dump(), "clients": remote.clients, "names": remote.names,
                            "client": client, "unseen": remote.unseen,
                            "secure": None if remote.secure is None else list(remote.secure)})

    def _joined(self, name: str, reply: WireMessage) -> ClientInfo | NoReply:
        """What a client says about its rows when it joins."""
        try:
            raise_failure(reply)
            sizes = WireMessage(reply.fact("sizes", dict))
            info = ClientInfo(name, *(sizes.fact(split, int) for split in ClientInfo._fields[1:]))
            if info.train < 1 or min(info[1:]) < 0:
                raise Rejected(f"it reports {info.train} training rows")
            said = next((client.rows for client in self._connected.values() if client.name == name), None)
            if said is not None and sum(info[1:]) != said:
                raise Rejected(f"it said that it has {said} rows, and joins with {sum(info[1:])}")
            if (known := self._clients.setdefault(name, info)) != info:
                raise Rejected(f"it joined with {known[1:]} rows for training, validation and test and has "
                               f"{info[1:]} now: give it the same data")
        except Rejected as error:
            return NoReply(str(error), True)
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
            for address, reply in self._request(messages, seconds, max(0.1, until - time.monotonic())):
                client = client_at[address]
                if isinstance(reply, WireMessage) and reply.facts.get("ready") is False:
                    again.append(client)
                    continue
                del left[client]
                yield client, reply
            joining = {client: (addresses[client], self.remote, self.names[client]) for client in again}
            rest = max(0.1, min(TIMEOUT, until - time.monotonic()))
            for client, found in self._join(joining, rest).items():
                if isinstance(found, NoReply):
                    del left[client]
                    yield client, NoReply(f"it cannot join again: {found.reason}", found.final)
            if not again:
                break
        for client in left:
            yield client, NoReply("not connected")

    def send(self, address: int, message: WireMessage, seconds: float) -> WireMessage | NoReply:
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

    def _request(self, messages: Mapping[int, WireMessage], seconds: float, left: float | None = None
                 ) -> Iterator[tuple[int, WireMessage | NoReply]]:
        """Add a nonce that the reply must repeat: an old reply does not have it."""
        nonces = {address: secrets.token_hex(8) for address in messages}
        marked = {address: message._replace(facts=message.facts | {"nonce": nonces[address]})
                  for address, message in messages.items()}
        for address, reply in request(self._transport, marked, seconds, left):
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

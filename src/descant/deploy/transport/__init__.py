"""How messages travel between a server and its clients. The rest of the package knows only this interface.

There are two: gRPC with a stream for each client (`grpc_server.py`, `grpc_client.py`), and Flower's link
(`flower_server.py`, `flower_client.py`, `superlink.py`). `choose.py` opens one of them. Only modules in this
folder import gRPC and Flower's private parts. Another transport is another pair of these classes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

from descant.errors import DescantError


class Seal(NamedTuple):
    """Shows that a request is the server's."""

    signature: bytes
    certificate: bytes  # of the key that signed (PEM)


class Payload(NamedTuple):
    """A message as it travels, not yet checked: `WireMessage.decode` does that."""

    facts: Any  # JSON text
    tensors: Any  # JSON text: name, type and shape of each tensor in each blob
    blobs: Mapping[str, bytes] = {}
    seal: Seal | None = None


class Connection(NamedTuple):
    """A client that is connected."""

    name: str  # under which its key is registered; empty without keys
    since: str  # when it connected: another time means that it was restarted


class NoReply(NamedTuple):
    """Why there is no usable reply."""

    reason: str
    final: bool = False  # whether asking again is useless


class Rejected(DescantError):
    """What the other side sent is invalid."""


class ServerTransport(Protocol):
    """The server's side. Opened by whatever makes it, used by one thread."""

    def connected(self) -> dict[int, Connection]:
        """The connected clients, by address. Raises if the transport itself has failed."""

    def expect(self, count: int) -> None:
        """From now on, replies have at most so many bytes of tensors."""

    def send(self, payloads: Mapping[int, Payload], seconds: float) -> dict[int, str]:
        """Send each address its request, which is kept for so long. Returns the requests' ids; an address
        that is no longer known has none."""

    def receive(self, requests: Collection[str]) -> Iterator[tuple[str, Payload | NoReply]]:
        """The replies that have arrived, each once. Does not wait."""

    def wait(self, seconds: float) -> None:
        """Until a reply may have come, at most so long."""

    def forget(self, requests: Collection[str]) -> None:
        """Drop requests whose replies nobody waits for."""

    def close(self) -> None: ...


Reply: TypeAlias = Callable[[Payload], Payload]


class Events(Protocol):
    """What a client's connection reports."""

    def connected(self) -> None: ...

    def lost(self, reason: str) -> None:
        """Once; attempts go on until `connected`."""

    def received(self, count: int) -> None:
        """Bytes of a request."""

    def sent(self, count: int) -> None:
        """Bytes of a reply."""

    def ignored(self, reason: str) -> None:
        """Something came that is no request of the server's."""


class ClientTransport(Protocol):
    """A client's side."""

    def serve(self, reply: Reply, events: Events, stop: threading.Event) -> None:
        """Connect, fetch requests and send the replies until `stop` is set."""

"""Requests to clients, and their replies.

A client may be absent, may restart in the middle of its work, or may never reply. A request is sent again to
a client that was restarted; a client that is absent when all others have replied is not waited for; a client
that has not replied by the deadline is late. A late reply is never read: its request is forgotten.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from descant.deploy.messages import WireMessage
from descant.deploy.transport import Connection, NoReply, Rejected, ServerTransport

PAUSE, LONGEST_PAUSE = 0.05, 0.25  # seconds between looks for replies; longer the longer none came
REFRESH = 1.0  # seconds between looks at who is connected


def request(transport: ServerTransport, requests: Mapping[int, WireMessage], seconds: float,
            left: float | None = None) -> Iterator[tuple[int, WireMessage | NoReply]]:
    """Send each client its request; yields its reply, or why there is none, as they come. Of the seconds that
    a client has, and that are told, fewer may be left."""
    deadline = time.monotonic() + (seconds if left is None else left)
    unanswered = dict(requests)
    sent: dict[str, tuple[int, str]] = {}  # request -> client, and since when that was connected
    online, looked, pause = transport.connected(), time.monotonic(), PAUSE
    try:
        while unanswered:
            ready = unanswered.keys() & online.keys() - {client for client, _ in sent.values()}
            if ready:
                rest = max(0.0, deadline - time.monotonic())
                shared: dict[tuple[int, ...], bytes] = {}  # most clients are sent the same model
                ids = transport.send({client: unanswered[client].encode(shared) for client in ready}, rest)
                sent |= {id: (client, online[client].since) for client, id in ids.items()}
            if not sent:  # the others are not connected
                break
            found = False
            for client, reply in _receive(transport, sent):
                found = True
                if isinstance(reply, NoReply) and not reply.final:  # it may come back
                    online.pop(client, None)
                    continue
                del unanswered[client]
                yield client, reply
            now = time.monotonic()
            if now > deadline:
                break
            if now - looked > REFRESH:
                online, looked = transport.connected(), now
                _forget_restarted(transport, sent, online)
            pause = PAUSE if found else min(LONGEST_PAUSE, 1.3 * pause)
            if unanswered and sent:
                transport.wait(pause)
        late = {client for client, _ in sent.values()}
        for client in unanswered:
            yield client, NoReply(f"no reply within {seconds:.3g} s" if client in late else "not connected")
    finally:
        transport.forget(list(sent))


def _receive(transport: ServerTransport, sent: dict[str, tuple[int, str]]
             ) -> Iterator[tuple[int, WireMessage | NoReply]]:
    for id, reply in transport.receive(list(sent)):
        if (known := sent.pop(id, None)) is None:
            continue
        if isinstance(reply, NoReply):
            yield known[0], reply
            continue
        try:
            yield known[0], WireMessage.decode(reply)
        except Rejected as error:
            yield known[0], NoReply(str(error), True)


def _forget_restarted(transport: ServerTransport, sent: dict[str, tuple[int, str]],
                      online: Mapping[int, Connection]) -> None:
    """A request that a client had fetched before it was restarted is lost, and is to be sent again."""
    lost = [id for id, (client, since) in sent.items() if client in online and online[client].since != since]
    for id in lost:
        del sent[id]
    if lost:
        transport.forget(lost)

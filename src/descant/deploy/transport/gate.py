"""What stands between the port and Flower's SuperLink.

Flower would serve its Control API to anybody on the same port; would read a request's body before it looks at
the signature; and would take from a client with a key any message, to any other client and in the server's
name. So a request passes only if

- it is one of the few calls that clients, or the server's own process, need;
- it is signed with a registered key, which is checked before any byte of its body is read;
- a message is the one reply of this client to what it was asked, no longer than the server expects, and a
  receipt is for a message that was sent to this client.

A connection on which no request has come within seconds is closed, the oldest first if there are many.
"""

from __future__ import annotations

import asyncio
import base64
import datetime
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, ClassVar, NamedTuple, TypeAlias

from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from uvicorn.protocols.http.h11_impl import H11Protocol

from descant.deploy.transport.superlink import FEW, UNKNOWN_KEY

LARGEST = 32 * 2**20  # bytes of one request of a client: Flower cuts tensors into pieces of 5 MB
SMALL = 2**20  # bytes of all others
OBJECTS = 2**14  # pieces of one message
AT_ONCE = 8  # requests of one client
SLOWEST = 2**14, 30.0  # a body comes with so many bytes a second, after so many seconds
OLDEST = TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE  # seconds since a request was signed, as Flower has it
FIRST_REQUEST = 15.0  # seconds from the connection to the first request
WAITING = 200  # connections without a request

CALLS = "/v1/fleet/"
PUSH_MESSAGE, PUSH_OBJECT, CONFIRM = (
    f"{CALLS}{name}" for name in ("push-messages", "push-object", "confirm-message-received"))
FLEET = frozenset((PUSH_MESSAGE, PUSH_OBJECT, CONFIRM, *(f"{CALLS}{name}" for name in (
    "activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages", "pull-object"))))
REGISTER = f"{CALLS}register-node"  # without keys, nodes register themselves
RUNTIME = frozenset(f"/v1/runtime/{name}" for name in (
    "get-nodes", "push-messages", "pull-messages", "pull-object", "push-object", "confirm-message-received"))

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


class Refused(Exception):
    """With the status of the response, and perhaps a header."""

    def __init__(self, status: int, *headers: tuple[bytes, bytes]) -> None:
        super().__init__(status)
        self.status, self.headers = status, headers


class Reply(NamedTuple):
    """What a node may still send."""

    message: str  # its id
    left: int  # bytes of its objects


class Gate:
    """An ASGI app before Flower's. `state` is the SuperLink's, `keys` are the registered ones; None: anybody
    within this machine."""

    def __init__(self, app: App, token: str, keys: frozenset[bytes] | None, state: Any) -> None:
        self._app = app
        self._bearer = f"Bearer {token}".encode()
        self._keys = keys
        self._state = state
        self._open: Counter[bytes] = Counter()  # requests by key
        self._replies: dict[int, Reply] = {}  # by node

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close"})
        try:
            if scope["path"] in RUNTIME:
                self._check_parent(scope)
                return await self._app(scope, receive, send)
            return await self._admit(scope, receive, send)
        except Refused as refusal:
            headers = [*refusal.headers, (b"content-length", b"0"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
            await send({"type": "http.response.body", "body": b""})

    def _check_parent(self, scope: Scope) -> None:
        if not secrets.compare_digest(_headers(scope).get(b"authorization", b""), self._bearer):
            raise Refused(404)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A call of a client."""
        path, headers = scope["path"], _headers(scope)
        if path not in FLEET and not (path == REGISTER and self._keys is None):
            raise Refused(404)
        key = self._signed(headers)
        length = headers.get(b"content-length", b"")
        if not length.isdigit():
            raise Refused(411)
        if int(length) > (LARGEST if path == PUSH_OBJECT else SMALL):
            raise Refused(413)
        if self._open[key] >= AT_ONCE:
            raise Refused(503)
        self._open[key] += 1
        try:
            body = await _read(receive, int(length))
            self._inspect(path, key, body)
            await self._app(scope, _replayed(body, receive), send)
        finally:
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]

    def _signed(self, headers: Mapping[bytes, bytes]) -> bytes:
        """The key that has signed a request."""
        try:
            key = base64.b64decode(headers.get(_name(FLEET_HTTP_PUBLIC_KEY_HEADER), b""), validate=True)
        except ValueError:
            raise Refused(400) from None
        if self._keys is not None and key not in self._keys:
            raise Refused(403, (UNKNOWN_KEY.encode(), b"1"))
        try:
            signature = base64.b64decode(headers[_name(FLEET_HTTP_SIGNATURE_HEADER)], validate=True)
            signed = headers[_name(TIMESTAMP_HEADER)].decode("ascii")
            age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(signed)
            is_recent = -SYSTEM_TIME_TOLERANCE < age.total_seconds() < OLDEST
            is_signed = is_recent and verify_signature(bytes_to_public_key(key), signed.encode(), signature)
        except (KeyError, ValueError, TypeError):
            is_signed = False
        if not is_signed:
            raise Refused(401)
        return key

    # -- what a client sends -----------------------------------------------------------------------

    def _inspect(self, path: str, key: bytes, body: bytes) -> None:
        """Refuse what is not this client's to send."""
        if path not in (PUSH_MESSAGE, PUSH_OBJECT, CONFIRM):
            return
        node = self._state.get_node_id_by_public_key(key)
        if path == PUSH_OBJECT:
            self._spend(node, len(body))
            return
        request = (PushMessagesRequest if path == PUSH_MESSAGE else ConfirmMessageReceivedRequest)()
        try:
            request.ParseFromString(body)
        except DecodeError:
            raise Refused(400) from None
        if request.node.node_id != node:
            raise Refused(401)
        if isinstance(request, ConfirmMessageReceivedRequest):
            self._asked(node, request.message_object_id)
        else:
            self._accept(node, request)

    def _asked(self, node: int, message: str) -> Any:
        """A message that was sent to this node."""
        found = self._state.message_ins_store.get(message)
        if found is None or found.metadata.dst_node_id != node:
            raise Refused(403)
        return found

    def _accept(self, node: int, request: PushMessagesRequest) -> None:
        """The one reply to what the node was asked. It may be announced again, with the same objects."""
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise Refused(400)
        head, (tree,) = request.messages_list[0].metadata, request.message_object_trees
        asked = self._asked(node, head.reply_to_message_id)
        known = self._state.message_ins_id_to_message_res_id.get(head.reply_to_message_id)
        if head.src_node_id != node or tree.object_id != head.message_id or known not in (
                None, head.message_id):
            raise Refused(403)
        if not _is_small(tree):
            raise Refused(413)
        if self._replies.get(node, Reply("", 0)).message != head.message_id:
            self._replies[node] = Reply(head.message_id, _allowed(asked))

    def _spend(self, node: int, count: int) -> None:
        message, left = self._replies.get(node, Reply("", 0))
        if count > left:
            raise Refused(403)
        self._replies[node] = Reply(message, left - count)


def _allowed(asked: Any) -> int:
    """The bytes that a reply may have, twice: objects may be asked for again."""
    text = asked.metadata.group_id  # in which the server writes how many it expects
    return 2 * (FEW + (int(text) if text.isdecimal() and len(text) < 20 else 0))


def _is_small(tree: ObjectTree) -> bool:
    left, count = [tree], 0
    while left:
        count += 1
        if count + len(left) > OBJECTS:
            return False
        left.extend(left.pop().children)
    return True


def _headers(scope: Scope) -> dict[bytes, bytes]:
    return dict(reversed(scope["headers"]))  # Flower reads the first of each


def _name(header: str) -> bytes:
    return header.lower().encode()


async def _read(receive: Receive, length: int) -> bytes:
    """The body, which must come fast enough."""
    parts: list[bytes] = []
    rate, grace = SLOWEST
    try:
        async with asyncio.timeout(grace + length / rate):
            while True:
                event = await receive()
                if event["type"] != "http.request":  # the client has gone
                    raise Refused(400)
                parts.append(event.get("body", b""))
                if not event.get("more_body"):
                    return b"".join(parts)
    except TimeoutError:
        raise Refused(408) from None


def _replayed(body: bytes, receive: Receive) -> Receive:
    """For the app behind: the body at once, then what else comes."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_event() -> MutableMapping[str, Any]:
        return left.pop() if left else await receive()

    return next_event


class Impatient(H11Protocol):
    """A connection that is closed if no request comes: a stranger could open as many as the process may."""

    waiting: ClassVar[dict[Impatient, asyncio.TimerHandle]] = {}  # the oldest first

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.waiting[self] = self.loop.call_later(FIRST_REQUEST, self._give_up)
        if len(self.waiting) > WAITING:
            next(iter(self.waiting))._give_up()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _stop_waiting(self) -> None:
        if (timer := self.waiting.pop(self, None)) is not None:
            timer.cancel()

    def _give_up(self) -> None:
        self._stop_waiting()
        self.transport.abort()

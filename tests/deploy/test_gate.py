"""The gate before the SuperLink; the server's signature; what a client makes of garbage."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

import uvicorn
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import RecordDict
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, Metadata, ObjectTree
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.node_pb2 import Node
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecords
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import sign_message

from descant.deploy.certificates import make_certificates
from descant.deploy.keys import ClientKeys, ServerKeys, public_pem
from descant.deploy.messages import WireMessage
from descant.deploy.transport import Rejected, flower_client, gate
from descant.deploy.transport.address import Address
from descant.deploy.transport.gate import CONFIRM, PUSH_MESSAGE, PUSH_OBJECT, Gate, Impatient
from descant.deploy.transport.records import from_records, to_records
from descant.deploy.transport.seals import Seals, check_seal

NORTH, SOUTH, SERVER = 11, 12, 1
KEYS = {node: ec.generate_private_key(ec.SECP384R1()) for node in (NORTH, SOUTH)}
PUBLIC = {node: public_pem(key.public_key()) for node, key in KEYS.items()}


class State:
    """What the gate asks the SuperLink: it has asked each node one thing."""

    def __init__(self, largest: int = 0) -> None:
        def asked(node: int) -> Any:
            return SimpleNamespace(metadata=SimpleNamespace(dst_node_id=node, group_id=str(largest)))

        self.message_ins_store = {f"to {node}": asked(node) for node in KEYS}
        self.message_ins_id_to_message_res_id: dict[str, str] = {}

    def get_node_id_by_public_key(self, key: bytes) -> int | None:
        return next((node for node, own in PUBLIC.items() if own == key), None)


class Web:
    """A gate before an app that remembers what reached it."""

    def __init__(self, state: State | None = None, keys: frozenset[bytes] | None = frozenset(PUBLIC.values())
                 ) -> None:
        self.reached: list[bytes] = []
        self.read = 0  # how often a body was asked for
        self._gate = Gate(self._app, "token", keys, state or State())

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200})

    def post(self, path: str, body: bytes = b"", node: int = NORTH, *, hangs: bool = False,
             **changes: Any) -> int:
        """The status of the response."""
        statuses: list[int] = []

        async def receive() -> dict[str, Any]:
            self.read += 1
            if hangs:
                await asyncio.sleep(3600)
            return {"type": "http.request", "body": body}

        async def send(event: Any) -> None:
            statuses.extend([event["status"]] if "status" in event else [])

        headers = signed(node) | {b"content-length": str(len(body)).encode()} | changes.get("headers", {})
        scope = {"type": "http", "path": path, "headers": [*headers.items()]}
        asyncio.run(self._gate(scope, receive, send))
        return statuses[0]


def signed(node: int, at: datetime.datetime | None = None) -> dict[bytes, bytes]:
    stamp = (at or datetime.datetime.now(datetime.UTC)).isoformat()
    found = {FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(PUBLIC[node]), TIMESTAMP_HEADER: stamp.encode(),
             FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(KEYS[node], stamp.encode()))}
    return {name.lower().encode(): value for name, value in found.items()}


def pushed(node: int = NORTH, *, src: int | None = None, to: str | None = None, id: str = "reply",
           root: str = "reply", pieces: int = 1, count: int = 1) -> bytes:
    head = Metadata(message_id=id, src_node_id=src or node, dst_node_id=SERVER,
                    reply_to_message_id=f"to {node}" if to is None else to)
    tree = ObjectTree(object_id=root, children=[ObjectTree(object_id=str(k)) for k in range(pieces)])
    return PushMessagesRequest(node=Node(node_id=node), messages_list=[ProtoMessage(metadata=head)] * count,
                               message_object_trees=[tree] * count).SerializeToString()


# -- orders -----------------------------------------------------------------------------------------------


def test_a_reply_to_what_was_asked_passes() -> None:
    web = Web()
    assert web.post(PUSH_MESSAGE, pushed()) == 200
    assert web.reached == [pushed()]


@pytest.mark.parametrize(("body", "status"), [
    (pushed(src=SERVER, to=""), 403),  # an order in the server's name
    (pushed(to=""), 403),  # a message that nobody asked for
    (pushed(src=SOUTH), 403),  # in another's name
    (pushed(to=f"to {SOUTH}"), 403),  # to what another was asked
    (pushed(SOUTH), 401),  # as another node
    (pushed(root="other"), 403),
    (pushed(pieces=gate.OBJECTS), 413),
    (pushed(count=2), 400), (pushed(count=0), 400), (b"\xff", 400),
], ids=["order", "unasked", "source", "target", "node", "tree", "pieces", "two", "none", "garbage"])
def test_a_client_gives_no_orders(body: bytes, status: int) -> None:
    web = Web()
    assert web.post(PUSH_MESSAGE, body) == status
    assert not web.reached


def test_one_reply_to_each_request() -> None:
    """It may be announced again, where objects were lost."""
    state = State()
    web = Web(state)
    state.message_ins_id_to_message_res_id[f"to {NORTH}"] = "reply"
    assert web.post(PUSH_MESSAGE, pushed()) == 200
    assert web.post(PUSH_MESSAGE, pushed(id="more", root="more")) == 403


def test_a_receipt_is_for_ones_own_message() -> None:
    web = Web()

    def confirm(message: str) -> int:
        request = ConfirmMessageReceivedRequest(node=Node(node_id=NORTH), message_object_id=message)
        return web.post(CONFIRM, request.SerializeToString())

    assert [confirm(message) for message in (f"to {NORTH}", f"to {SOUTH}", "reply")] == [200, 403, 403]


# -- room -------------------------------------------------------------------------------------------------


def test_a_client_sends_no_more_than_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "FEW", 100)
    web = Web(State(largest=1000))
    assert web.post(PUSH_OBJECT, bytes(10)) == 403  # before anything was announced
    assert web.post(PUSH_MESSAGE, pushed()) == 200
    assert [web.post(PUSH_OBJECT, bytes(700)) for _ in range(4)] == [200, 200, 200, 403]
    assert web.post(PUSH_MESSAGE, pushed()) == 200  # announcing it again gives no more
    assert web.post(PUSH_OBJECT, bytes(700)) == 403


@pytest.mark.parametrize(("headers", "status"), [
    ({b"content-length": b"99999999"}, 413), ({b"content-length": b""}, 411),
    ({next(name for name in signed(NORTH) if b"signature" in name): b64encode(b"none")}, 401),
    (signed(NORTH, datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)), 401),
    (signed(NORTH, datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)), 401),
    ({FLEET_HTTP_PUBLIC_KEY_HEADER.lower().encode(): b64encode(b"other")}, 403),
], ids=["long", "chunked", "signature", "old", "ahead", "key"])
def test_no_byte_of_a_body_is_read_before_the_signature(headers: dict[bytes, bytes], status: int) -> None:
    web = Web()
    assert web.post(PUSH_OBJECT, b"x", headers=headers) == status
    assert (web.read, web.reached) == (0, [])


def test_a_body_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "SLOWEST", (1e9, 0.01))
    assert Web().post(PUSH_OBJECT, b"x", hangs=True) == 408


def test_few_requests_of_a_client_at_once() -> None:
    web = Web()
    web._gate._open[PUBLIC[NORTH]] = gate.AT_ONCE
    assert web.post(PUSH_MESSAGE, pushed()) == 503
    assert web.post(PUSH_MESSAGE, pushed(SOUTH), SOUTH) == 200


@contextlib.contextmanager
def serving() -> Iterator[int]:
    """The gate's connections, on a port of their own."""
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    server = uvicorn.Server(uvicorn.Config(app, http=Impatient, ws="none", log_config=None, lifespan="off",
                                           timeout_graceful_shutdown=1))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


@pytest.mark.thorough
def test_idle_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those on which no request comes, be it with half of its headers; and the oldest, if there are many."""
    monkeypatch.setattr(gate, "WAITING", 3)
    with serving() as port, contextlib.ExitStack() as stack:
        def connect() -> socket.socket:
            return stack.enter_context(socket.create_connection(("127.0.0.1", port), 30))

        first, *others = [connect() for _ in range(4)]
        assert first.recv(1) == b""  # at once: there are too many
        others[0].sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert others[0].recv(1) == b"H"
        monkeypatch.setattr(gate, "FIRST_REQUEST", 0.2)
        slow = connect()
        slow.sendall(b"GET / HTTP/1.1\r\n")
        assert slow.recv(1) == b""
    assert not Impatient.waiting


# -- the server's signature -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place: Path = tmp_path_factory.mktemp("pki")
    for name in ("ours", "others"):
        make_certificates(place / name, "localhost", ["north"])
    return place


def seals(place: Path) -> Seals:
    keys = ServerKeys.load(place / "server")
    return Seals(keys.key, keys.certificate)


def test_only_the_servers_requests_are_taken(pki: Path) -> None:
    authority = (pki / "ours" / "ca.crt").read_bytes()
    payload = WireMessage.of({"what": "work"}, shared=torch.ones(3)).encode()
    made = seals(pki / "ours").sealed({NORTH: payload, SOUTH: payload})
    for node, each in made.items():
        check_seal(from_records(to_records(each)), node, authority)  # as it arrives
        assert from_records(to_records(each)).blobs == payload.blobs
    other = seals(pki / "others").sealed({NORTH: payload})[NORTH]
    wrong = {
        "without": payload, "for another": made[SOUTH], "of another authority": other,
        "facts": made[NORTH]._replace(facts='{"what": "finish"}'),
        "tensors": made[NORTH]._replace(tensors="{}"),
        "blobs": made[NORTH]._replace(blobs={"shared": bytes(12)}),
        "names": made[NORTH]._replace(blobs={"each": payload.blobs["shared"]}),
        "garbage": made[NORTH]._replace(seal=made[NORTH].seal._replace(certificate=b"x")),  # type: ignore[union-attr]
    }
    for each in wrong.values():
        with pytest.raises(Rejected, match=r"signature is not the server's|without the server's signature"):
            check_seal(each, NORTH, authority)


# -- what a client makes of it ----------------------------------------------------------------------------


class Events:
    def __init__(self) -> None:
        self.told: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.told.append(f"{name} {given}")


def session(pki: Path, tmp_path: Path, events: Events) -> Any:
    keys = ClientKeys.load(pki / "ours" / "north", "north")
    return flower_client._Session(Address("127.0.0.1", 1), keys, tmp_path / "node_id", events,
                                  threading.Event())


def test_a_message_that_cannot_be_read_never_ends_a_client(
        pki: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one that is not the server's: it is told here, and the sender gets an error."""
    events, replied = Events(), []
    client = session(pki, tmp_path, events)
    monkeypatch.setattr(client, "_call", lambda *given: None)
    monkeypatch.setattr(client, "_push", lambda node, run, reply, seconds: replied.append(reply))

    def refuse(payload: Any) -> Any:
        raise AssertionError("this is not to be answered")

    head = Metadata(run_id=1, message_id="a", src_node_id=SERVER, dst_node_id=NORTH, ttl=60,
                    created_at=time.time(), message_type="train")
    tree, empty = ObjectTree(object_id="a"), ProtoMessage(metadata=head, content=ProtoRecords())
    for contents in ({"a": b"garbage"}, None, {}):
        monkeypatch.setattr(client, "_pull", lambda *given, contents=contents: contents)
        found = PullMessagesResponse(messages_list=[empty], message_object_trees=[tree])
        client._try(Node(node_id=NORTH), found, refuse)
    bare = ProtoMessage(metadata=head)
    for half in (PullMessagesResponse(messages_list=[bare], message_object_trees=[tree]),
                 PullMessagesResponse(messages_list=[empty]), PullMessagesResponse()):
        client._try(Node(node_id=NORTH), half, refuse)
    assert [message.error.reason for message in replied] == ["unreadable"] * 2
    assert [told for told in events.told if told.startswith("ignored")] == [
        *["ignored ('a message that cannot be read',)"] * 2,
        "ignored ('a message that cannot be read (MessageInitializationError)',)",
        *["ignored ('a message that cannot be read (IndexError)',)"] * 2]

    unsigned = to_records(WireMessage({"what": "finish"}).encode())
    monkeypatch.setattr(flower_client, "inflate_object_from_contents", lambda *given: message_of(unsigned))
    monkeypatch.setattr(client, "_pull", lambda *given: {"a": b"garbage"})
    client._try(Node(node_id=NORTH), found, refuse)
    assert events.told[-1] == "ignored (\"a request without the server's signature\",)"


def message_of(content: RecordDict) -> Any:
    from flwr.app import Metadata as Head
    from flwr.app.message import make_message

    head = Head(run_id=1, message_id="a", src_node_id=SERVER, dst_node_id=NORTH, reply_to_message_id="",
                group_id="", created_at=time.time(), ttl=60, message_type="train")
    return make_message(metadata=head, content=content)

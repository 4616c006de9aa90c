"""What a client with a key and a certificate can do to the others over gRPC: nothing but reply."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

import grpc

from descant.deploy.certificates import make_certificates
from descant.deploy.keys import ClientKeys, ServerKeys
from descant.deploy.transport import NoReply, Payload, Rejected, Seal, grpc_client, grpc_server
from descant.deploy.transport.address import Address
from descant.deploy.transport.frames import FRAME, HEAD, Arriving, Packed, unpack
from descant.deploy.transport.grpc_server import GrpcServer, address_of, open_server
from descant.deploy.transport.loop import event_loop, submit
from descant.deploy.transport.seals import Seals
from descant.errors import DescantError

NAMES = ("north", "south")


@pytest.fixture(scope="module")
def pki(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("pki")
    make_certificates(directory, "localhost", NAMES)
    return directory


@pytest.fixture
def link(pki) -> Iterator[GrpcServer]:
    with open_server("127.0.0.1", 0, ServerKeys.load(pki / "server")) as found:
        yield found


class Liar:
    """A client that sends what it likes."""

    def __init__(self, link: GrpcServer, pki: Path, name: str, token: str = "") -> None:
        keys = ClientKeys.load(pki / name, name)
        self.address = address_of(keys.public_pem)
        self._credentials = grpc.ssl_channel_credentials(keys.ca, keys.private_pem, keys.certificate)
        self._target, self._token = f"localhost:{link.port}", token
        submit(self._open()).result(30)

    async def _open(self) -> None:
        self.channel = grpc.aio.secure_channel(self._target, self._credentials,
                                               [("grpc.use_local_subchannel_pool", 1)])
        self.call = self.channel.stream_stream("/descant.Link/Connect")(
            metadata=((grpc_server.TOKEN, self._token),))
        await self.call.initial_metadata()

    def send(self, *frames: bytes) -> None:
        async def send() -> None:
            for frame in frames:
                await self.call.write(frame)
        submit(send()).result(30)

    def read(self) -> bytes:
        found: bytes = submit(self._read()).result(30)
        return found

    async def _read(self) -> bytes:
        found: bytes = await self.call.read()
        return found

    def refusal(self) -> tuple[Any, str]:
        """How the server ends the stream."""
        async def ended() -> tuple[Any, str]:
            return await self.call.code(), await self.call.details()
        return submit(ended()).result(30)

    def close(self) -> None:
        submit(self.channel.close()).result(30)


def until(what: Callable[[], Any], seconds: float = 30.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)
    return found


def asked(link: GrpcServer, client: Liar, payload: Payload | None = None) -> str:
    """The number of a request that has reached the client."""
    until(lambda: client.address in link.connected())
    (number,) = link.send({client.address: payload or Payload("{}", "{}")}, 60).values()
    assert Arriving(client.read(), 2**20).number == int(number)
    return number


def replies(link: GrpcServer, number: str) -> Payload | NoReply:
    def look() -> list[Any]:
        return [reply for _, reply in link.receive([number])]
    (found,) = until(look)
    return found


def frames(number: str | int, payload: Payload) -> list[bytes]:
    return [*Packed.of(int(number), payload).frames()]


def test_a_reply_to_what_was_asked(link, pki):
    client = Liar(link, pki, "north")
    payload = Payload('{"a": 1}', "{}", {"x": bytes(range(256)) * 4000, "y": b""}, Seal(b"s", b"c"))
    link.expect(2 * 10**6)
    number = asked(link, client)
    client.send(*frames(number, payload))
    assert replies(link, number) == payload
    client.close()


def test_nothing_but_replies_is_taken(link, pki):
    """Neither a message of its own, nor a second reply, nor a reply to what another client was asked."""
    link.expect(1000)
    for attempt in ("unasked", "again", "another's"):
        north, south = Liar(link, pki, "north"), Liar(link, pki, "south")
        theirs, own = asked(link, south), asked(link, north)
        forged = Payload('{"forged": true}', "{}")
        if attempt == "again":
            north.send(*frames(own, Payload("{}", "{}")))
            assert isinstance(replies(link, own), Payload)
        number = {"unasked": 10**6, "again": own, "another's": theirs}[attempt]
        north.send(*frames(number, forged))
        assert north.refusal() == (grpc.StatusCode.INVALID_ARGUMENT, "a message that is not a reply")
        # the other client is asked and heard as if nothing had happened
        south.send(*frames(theirs, Payload('{"honest": true}', "{}")))
        assert replies(link, theirs) == Payload('{"honest": true}', "{}")
        until(lambda: len(link.connected()) == 1)
        south.close()
        until(lambda: not link.connected())


def test_a_reply_is_no_longer_than_is_expected(link, pki):
    link.expect(1000)
    client = Liar(link, pki, "north")
    number = asked(link, client)
    client.send(HEAD.pack(int(number), grpc_server.FEW + 1001) + bytes(FRAME - HEAD.size))
    assert "and 4195304 are the most" in client.refusal()[1]
    found = replies(link, number)
    assert isinstance(found, NoReply)
    assert found.final


@pytest.mark.parametrize("frame", [b"", b"short", bytes(100)], ids=["empty", "short", "long"])
def test_frames_are_as_long_as_was_announced(link, pki, frame):
    """Empty ones without an end would keep a server busy."""
    link.expect(10**6)
    client = Liar(link, pki, "north")
    number = asked(link, client)
    client.send(HEAD.pack(int(number), FRAME) + bytes(FRAME - HEAD.size))
    client.send(frame)
    assert client.refusal()[1] == "a frame of another length than was announced"
    assert isinstance(replies(link, number), NoReply)


@pytest.mark.thorough
def test_a_frame_larger_than_any_is_not_read(link, pki):
    client = Liar(link, pki, "north")
    number = asked(link, client)
    client.send(HEAD.pack(int(number), 2 * FRAME) + bytes(2 * FRAME))
    assert client.refusal()[0] == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert replies(link, number) == NoReply("the connection was lost")


def test_a_reply_that_comes_too_slowly(link, pki, monkeypatch):
    monkeypatch.setattr(grpc_server, "SLOWEST", (10**9, 0.2))
    link.expect(10**6)
    client = Liar(link, pki, "north")
    number = asked(link, client)
    client.send(HEAD.pack(int(number), FRAME) + bytes(FRAME - HEAD.size))
    assert client.refusal()[1] == "its reply comes too slowly"
    assert isinstance(replies(link, number), NoReply)


def test_a_reply_that_nobody_waits_for_is_not_kept(link, pki):
    """It is read to its end, since the client means well, and the next one is taken."""
    link.expect(10**6)
    client = Liar(link, pki, "north")
    late = asked(link, client)
    link.forget([late])
    number = asked(link, client)
    client.send(*frames(late, Payload("{}", "{}", {"x": bytes(3 * FRAME)})))
    client.send(*frames(number, Payload("{}", "{}")))
    assert replies(link, number) == Payload("{}", "{}")
    assert not link._done
    assert not link._waiting
    client.close()


def test_one_stream_for_each_client(link, pki):
    """A second process with the same key waits; one of the same client directory takes the place."""
    first = Liar(link, pki, "north", token="a" * 32)
    since = until(link.connected)[first.address].since
    second = Liar(link, pki, "north", token="b" * 32)
    assert second.refusal() == (grpc.StatusCode.ALREADY_EXISTS, grpc_server.TWICE)
    assert link.connected()[first.address].since == since
    third = Liar(link, pki, "north", token="a" * 32)
    assert first.refusal()[0] == grpc.StatusCode.PERMISSION_DENIED
    until(lambda: link.connected().get(first.address, (None, since))[1] != since)
    third.close()


def test_a_client_that_goes_is_gone_at_once(link, pki):
    client = Liar(link, pki, "north")
    number = asked(link, client)
    client.close()
    assert replies(link, number) == NoReply("the connection was lost")
    until(lambda: not link.connected())


@pytest.mark.slow
def test_a_key_that_is_revoked_while_the_server_runs(link, tmp_path):
    """No restart, no new authority; the others stay, and a new key is taken."""
    make_certificates(tmp_path, "localhost", NAMES)
    with open_server("127.0.0.1", 0, ServerKeys.load(tmp_path / "server")) as own:
        north, south = Liar(own, tmp_path, "north"), Liar(own, tmp_path, "south")
        until(lambda: len(own.connected()) == 2)
        make_certificates(tmp_path, "localhost", [], revoke=["north"])
        assert north.refusal() == (grpc.StatusCode.PERMISSION_DENIED, grpc_server.UNKNOWN_KEY)
        assert Liar(own, tmp_path, "north").refusal()[1] == grpc_server.UNKNOWN_KEY
        make_certificates(tmp_path, "localhost", [], rotate=["north"])
        until(lambda: north.address not in own.connected())

        def is_back() -> bool:
            again = Liar(own, tmp_path, "north")
            time.sleep(0.2)
            return again.address in own.connected()

        until(is_back)
        assert south.address in own.connected()


def test_without_a_certificate_nobody_shakes_hands(link, pki):
    """A stranger gets no byte but TLS's refusal."""
    context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
    context.set_alpn_protocols(["h2"])
    found = b""
    with (socket.create_connection(("127.0.0.1", link.port), 30) as plain,
          context.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
          contextlib.suppress(ssl.SSLError, ConnectionResetError)):
        found = secure.recv(1000)  # a server that had shaken hands would send its settings
    assert found == b""


@pytest.mark.thorough
def test_connections_that_shake_no_hands_are_closed(pki, monkeypatch):
    monkeypatch.setattr(grpc_server, "OPTIONS", [
        (name, 500 if "handshake" in name else value) for name, value in grpc_server.OPTIONS])
    with open_server("127.0.0.1", 0, ServerKeys.load(pki / "server")) as link:
        idle = [socket.create_connection(("127.0.0.1", link.port), 30) for _ in range(50)]
        for each in idle:
            with each:
                assert each.recv(1) == b""
        client = Liar(link, pki, "north")
        until(link.connected)
        client.close()


class Stream:
    """Keeps what a client writes."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    async def write(self, frame: bytes) -> None:
        self.written.append(frame)


@pytest.mark.parametrize("wrong", ["unsigned", "for another", "changed", "garbage"])
def test_a_request_that_is_not_the_servers_is_not_answered(pki, wrong):
    """It is told at home, the sender learns nothing, and the client goes on."""
    told, asked_for = [], []

    class Events:
        def __getattr__(self, name: str) -> Any:
            return lambda *given: told.append((name, *given))

    def reply(payload: Payload) -> Payload:
        asked_for.append(payload.facts)
        return Payload('{"n": 1}', "{}")

    server, north = ServerKeys.load(pki / "server"), ClientKeys.load(pki / "north", "north")
    ours, theirs = (address_of(ClientKeys.load(pki / name, name).public_pem) for name in NAMES)
    plain = Payload('{"what": "work"}', "{}")
    sealed = Seals(server.key, server.certificate).sealed({ours: plain, theirs: plain})
    payload = {"unsigned": plain, "for another": sealed[theirs],
               "changed": sealed[ours]._replace(facts='{"what": "finish"}')}.get(wrong, sealed[ours])
    data = b"".join(frames(7, payload))
    event_loop()
    session = grpc_client._Session(Address("127.0.0.1", 1), north, "", Events())
    session._stream = stream = Stream()
    session.answer(grpc_client._Request(stream, data[:-9] + b"x" * 9 if wrong == "garbage" else data), reply)
    assert asked_for == []
    assert [name for name, *_ in told] == ["received", "ignored", "sent"]
    assert unpack(b"".join(stream.written)) == Payload('{"failed": "unreadable"}', "{}")
    session.answer(grpc_client._Request(stream, b"".join(frames(8, sealed[ours]))), reply)
    assert asked_for == ['{"what": "work"}']


@pytest.mark.parametrize("damage", [
    lambda data: data[: HEAD.size + 2], lambda data: data[:-1], lambda data: data + b"x",
    lambda data: data[: HEAD.size] + b"\xff\xff\xff\xff" + data[HEAD.size + 4:],
    lambda data: data.replace(b'"x": 3', b'"x":-3'), lambda data: data.replace(b'"x": 3', b'"x":1e'),
    lambda data: data.replace(b'"blobs"', b'"bl0bs"'),
    lambda data: data.replace(b'"seal": null', b'"seal": [1] ')])
def test_damaged_messages_are_refused(damage):
    whole = b"".join(frames(1, Payload("{}", "{}", {"x": b"abc"})))
    assert unpack(whole) == Payload("{}", "{}", {"x": b"abc"})
    with pytest.raises(Rejected, match="not a message of descant"):
        unpack(damage(whole))


@pytest.mark.parametrize("fault", ["asked at once", "cannot be written to"])
def test_no_client_is_left_with_a_stream_that_nobody_reads(link, pki, fault, monkeypatch):
    """A request that waits when a client is admitted reaches it; a stream that takes no message ends."""
    class Links(dict[int, Any]):
        def __setitem__(self, address: int, own: Any) -> None:
            super().__setitem__(address, own)
            link._waiting[7] = own
            own.ask(Packed.of(7, Payload("{}", "{}")), 1000)

    async def fail(*_: Any) -> None:
        raise grpc.aio.InternalError("no")

    monkeypatch.setattr(link, "_links", Links())
    if fault == "cannot be written to":
        monkeypatch.setattr(link, "_write", fail)
    client = Liar(link, pki, "north")
    if fault == "asked at once":
        assert Arriving(client.read(), 2**20).number == 7
    else:
        assert client.refusal()[0] == grpc.StatusCode.UNAVAILABLE
    client.close()


async def listening(answer: Any) -> tuple[Any, int]:
    """A server that answers every stream so, and its port."""
    server = grpc.aio.server()
    handlers = {grpc_server.METHOD: grpc.stream_stream_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(grpc_server.SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, port


def test_a_server_that_says_nothing_when_it_lets_a_client_in(tmp_path, monkeypatch):
    """As servers did before they said so: it is waited for, and then the client is connected."""
    monkeypatch.setattr(grpc_client, "REFUSAL", 0.3)

    async def let_in(_: object, context: Any) -> None:
        await context.send_initial_metadata(())
        await asyncio.sleep(60)

    stop = threading.Event()
    too_late = threading.Timer(20, stop.set)
    too_late.start()
    told: list[str] = []

    def connected() -> None:
        told.append("connected")
        stop.set()

    server, port = submit(listening(let_in)).result(30)
    try:
        grpc_client.GrpcClient(Address("127.0.0.1", port), None, tmp_path).serve(
            lambda payload: payload, SimpleNamespace(connected=connected, lost=told.append), stop)
    finally:
        too_late.cancel()
        submit(server.stop(None)).result(30)
    assert told == ["connected"]


def test_a_refusal_whose_status_is_late_is_no_connection(tmp_path):
    """A client that has never been connected is told what to do, and does not try for ever."""
    async def refuse(_: object, context: Any) -> None:
        await context.send_initial_metadata(())
        await asyncio.sleep(0.2)
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, grpc_server.UNKNOWN_KEY)

    told: list[str] = []
    stop = threading.Event()
    too_late = threading.Timer(20, stop.set)
    too_late.start()
    server, port = submit(listening(refuse)).result(30)
    client = grpc_client.GrpcClient(Address("127.0.0.1", port), None, tmp_path)
    try:
        with pytest.raises(DescantError, match="the server does not know the key of this client"):
            client.serve(lambda payload: payload, SimpleNamespace(
                connected=lambda: told.append("connected"), lost=told.append), stop)
    finally:
        too_late.cancel()
        submit(server.stop(None)).result(30)
    assert not told


def test_a_key_that_comes_and_goes_while_keys_are_read_is_noticed(tmp_path):
    (tmp_path / "north.pub").write_text("a key")
    before = grpc_server._stamp(tmp_path)
    time.sleep(0.05)  # longer than the clock of the file system takes for a step
    (tmp_path / "east.pub").write_text("another")
    (tmp_path / "east.pub").unlink()
    assert grpc_server._stamp(tmp_path) != before

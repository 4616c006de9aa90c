"""The server's transport over gRPC: every client holds one long-lived stream for requests and replies.

Nobody polls, so that hundreds of clients cost little while they wait. The gate's rules hold here too:

- TLS asks for a certificate of the federation's authority before anything else is read, and the key in it
  must be a registered one; a key that is removed from the folder is refused within seconds;
- a client has one stream, and may send nothing but one reply to each request that it was sent, no longer than
  the server expects, and not too slowly;
- a connection that shakes no hands, or opens no stream, is closed.

The streams are served in a thread of this process, so that a server that aggregates keeps its clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import resource
import secrets
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from descant.deploy.keys import ServerKeys, public_pem, registered
from descant.deploy.transport import Connection, NoReply, Payload, Rejected
from descant.deploy.transport.address import Address, listen
from descant.deploy.transport.frames import FRAME, Arriving, Packed, announced, unpack
from descant.deploy.transport.loop import event_loop, submit
from descant.deploy.transport.seals import Seals
from descant.errors import DescantError, UsageError

METHOD, SERVICE = "Connect", "descant.Link"
TOKEN = "descant-token"  # of a client directory, in the metadata
ADMITTED = "descant-admitted"  # in the metadata that a client gets once it is let in
UNKNOWN_KEY, TWICE = "unknown key", "connected already"
FEW = 4 * 2**20  # bytes of a reply beside its tensors
SLOWEST = 2**14, 30.0  # a reply comes with so many bytes a second, after so many seconds
OUTSTANDING = 64  # requests of one client that may still be replied to
LOOK = 1.0  # seconds between looks at the registered keys
FIRST_STREAM = 15_000  # milliseconds for a handshake, and for a stream
PING, PONG = 10_000, 20_000  # milliseconds between pings, and for the reply
FILES = 2**16  # open connections, if the system allows it
STOP = 1.0  # seconds

OPTIONS = [
    ("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", FRAME),
    ("grpc.max_concurrent_streams", 1), ("grpc.max_metadata_size", 8192),
    ("grpc.absolute_max_metadata_size", 16384), ("grpc.server_handshake_timeout_ms", FIRST_STREAM),
    ("grpc.max_connection_idle_ms", FIRST_STREAM), ("grpc.keepalive_time_ms", PING),
    ("grpc.keepalive_timeout_ms", PONG), ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", PING // 2),
]


class _Link:
    """A client's stream. Used by the event loop alone."""

    def __init__(self, address: int, name: str, key: bytes, token: str) -> None:
        self.address, self.name, self.key, self.token = address, name, key, token
        self.since = secrets.token_hex(8)
        self.outbox: asyncio.Queue[Packed] = asyncio.Queue()
        self.asked: dict[int, int] = {}  # request -> bytes that its reply may have
        self.ended: asyncio.Future[str] = event_loop().create_future()  # why the server ends it

    def ask(self, request: Packed, most: int) -> None:
        self.asked[request.number] = most
        if len(self.asked) > OUTSTANDING:
            del self.asked[next(iter(self.asked))]
        self.outbox.put_nowait(request)

    def end(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)


class GrpcServer(contextlib.AbstractContextManager["GrpcServer"]):
    """A `ServerTransport`."""

    def __init__(self, keys: ServerKeys | None) -> None:
        self._seals = None if keys is None else Seals(keys.key, keys.certificate)
        self._clients = None if keys is None else keys.directory / "clients"
        self._names = {} if keys is None else {key: name for name, key in keys.clients.items()}
        self._links: dict[int, _Link] = {}
        self._waiting: dict[int, _Link] = {}  # by request
        self._done: dict[int, bytes | NoReply] = {}
        self._news = threading.Event()  # a reply has come
        self._numbers = itertools.count(1)
        self._largest = 0
        self._is_open = True
        self.port = 0

    # -- the server's side: called by one thread -------------------------------------------------

    def connected(self) -> dict[int, Connection]:
        return {address: Connection(link.name, link.since) for address, link in dict(self._links).items()}

    def expect(self, count: int) -> None:
        self._largest = count

    def send(self, payloads: Mapping[int, Payload], seconds: float) -> dict[int, str]:
        sealed = payloads if self._seals is None else self._seals.sealed(payloads)
        requests = {address: Packed.of(next(self._numbers), payload) for address, payload in sealed.items()}
        sent = submit(self._send(requests, FEW + self._largest)).result()
        return {address: str(requests[address].number) for address in sent}

    def receive(self, requests: Collection[str]) -> Iterator[tuple[str, Payload | NoReply]]:
        self._news.clear()
        for request in list(requests):
            found = self._done.pop(int(request), None)
            if found is None:
                continue
            try:
                yield request, unpack(found) if isinstance(found, bytes) else found
            except Rejected as error:
                yield request, NoReply(str(error), True)

    def wait(self, seconds: float) -> None:
        self._news.wait(seconds)

    def forget(self, requests: Collection[str]) -> None:
        for request in requests:
            self._waiting.pop(int(request), None)
            self._done.pop(int(request), None)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            submit(self._close()).result()

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- in the event loop -----------------------------------------------------------------------

    async def open(self, address: str, credentials: Any) -> None:
        self._server = grpc.aio.server(options=OPTIONS)
        handlers = {METHOD: grpc.stream_stream_rpc_method_handler(self._connect)}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        if credentials is None:
            self.port = self._server.add_insecure_port(address)
        else:
            self.port = self._server.add_secure_port(address, credentials)
        await self._server.start()
        self._watching = asyncio.create_task(self._watch())

    async def _close(self) -> None:
        self._watching.cancel()
        await self._server.stop(STOP if self._links else None)

    async def _send(self, requests: Mapping[int, Packed], most: int) -> list[int]:
        there = [address for address in requests if address in self._links]
        for address in there:
            self._waiting[requests[address].number] = self._links[address]
            self._links[address].ask(requests[address], most)
        return there

    def _finish(self, link: _Link, number: int, reply: bytes | NoReply) -> None:
        """A reply is kept if somebody still waits for it, from this client."""
        if self._waiting.get(number) is link:
            self._done[number] = reply
            self._waiting.pop(number, None)
            self._news.set()

    async def _connect(self, _: object, context: Any) -> None:
        """The life of one stream."""
        link = await self._admit(context)
        # the client is connected. Before there is a link: a request would send metadata, too, and fail
        await context.send_initial_metadata(((ADMITTED, "1"),))
        if (other := self._links.get(link.address)) is not None:
            other.end(TWICE)
        self._links[link.address] = link
        tasks = [asyncio.create_task(each(link, context)) for each in (self._read, self._write)]
        try:
            waited: list[asyncio.Future[Any]] = [*tasks, link.ended]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if link.ended.done():
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, link.ended.result())
            for task in tasks:
                if task.done():
                    task.result()
        except grpc.aio.InternalError as error:  # gRPC would leave the client with a stream that nobody reads
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        finally:
            for task in tasks:
                task.cancel()
            if self._links.get(link.address) is link:
                del self._links[link.address]
            for number in [number for number, asked in list(self._waiting.items()) if asked is link]:
                self._finish(link, number, NoReply("the connection was lost"))

    async def _admit(self, context: Any) -> _Link:
        token = str(dict(context.invocation_metadata()).get(TOKEN, ""))[:64]
        if self._clients is None:
            address, name, key = int.from_bytes(secrets.token_bytes(7)), "", b""
        else:
            key = _key_of(context)
            if (found := self._names.get(key)) is None:
                await context.abort(grpc.StatusCode.PERMISSION_DENIED, UNKNOWN_KEY)
            assert found is not None
            address, name = address_of(key), found
        if (other := self._links.get(address)) is not None and not (token and other.token == token):
            # of one client directory only one process is alive: the other's connection is a dead one
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, TWICE)
        return _Link(address, name, key, token)

    async def _write(self, link: _Link, context: Any) -> None:
        while True:
            request = await link.outbox.get()
            if request.number in self._waiting:
                for frame in request.frames():
                    await context.write(frame)

    async def _read(self, link: _Link, context: Any) -> None:
        while (frame := await context.read()) is not grpc.aio.EOF:
            try:
                await self._reply(link, context, frame)
            except (Rejected, TimeoutError) as error:
                reason = str(error) or "its reply comes too slowly"
                with contextlib.suppress(Rejected):
                    self._finish(link, announced(frame)[0], NoReply(reason, True))
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, reason)

    async def _reply(self, link: _Link, context: Any, frame: bytes) -> None:
        """One reply to what was asked. Of a late one, nothing is kept."""
        number, length = announced(frame)
        if (most := link.asked.pop(number, None)) is None:
            raise Rejected("a message that is not a reply")
        reply = Arriving(frame, most)
        rate, grace = SLOWEST
        async with asyncio.timeout(grace + length / rate):
            while not reply.is_complete:
                frame = await context.read()
                if frame is grpc.aio.EOF:
                    return  # lost
                reply.add(frame)
                if number not in self._waiting:
                    reply.discard()
        self._finish(link, number, reply.data())

    async def _watch(self) -> None:
        """Clients that are added to the folder of keys are admitted, and those that are removed are not."""
        stamp = None
        while self._clients is not None:
            await asyncio.sleep(LOOK)
            with contextlib.suppress(OSError):
                if (now := _stamp(self._clients)) == stamp:
                    continue
                stamp, self._names = now, await asyncio.to_thread(registered, self._clients)
                for link in list(self._links.values()):
                    if self._names.get(link.key) != link.name:
                        link.end(UNKNOWN_KEY)


def _stamp(directory: Path) -> list[tuple[str, int, int]]:
    """What changes with the keys; also where one is added and removed again while they are being read."""
    found = [(path.name, path.stat()) for path in (directory, *sorted(directory.glob("*.pub")))]
    return [(name, stat.st_mtime_ns, stat.st_ino) for name, stat in found]


def address_of(key: bytes) -> int:
    """The address of a client with this public key (PEM): both sides know it."""
    return int.from_bytes(hashlib.sha256(key).digest()[:7])


def _key_of(context: Any) -> bytes:
    """The public key in the certificate with which a client shook hands."""
    (certificate,) = context.auth_context()["x509_pem_cert"]
    key = x509.load_pem_x509_certificate(certificate).public_key()
    return public_pem(key) if isinstance(key, ec.EllipticCurvePublicKey) else b""


def open_server(host: str, port: int, keys: ServerKeys | None) -> GrpcServer:
    """Listen at this address, for these clients; port 0 takes a free one. Without keys nothing is encrypted
    and anybody may join: only within this machine."""
    if keys is None and not Address(host, port).is_loopback:
        raise UsageError(f"without certificates a server is only for its own machine, and {host} is not its "
                         "loopback: use 127.0.0.1, or make certificates with: descant certificates DIR "
                         "--host HOST")
    with listen(host, port) as free:  # which says what is wrong with an address
        bound = Address(*free.getsockname()[:2])
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE,
                       (FILES if most == resource.RLIM_INFINITY else min(FILES, most), most))
    credentials = None
    if keys is not None:
        credentials = grpc.ssl_server_credentials([(keys.key.read_bytes(), keys.certificate.read_bytes())],
                                                  root_certificates=keys.ca, require_client_auth=True)
    server = GrpcServer(keys)
    event_loop()
    try:
        submit(server.open(str(bound), credentials)).result()
    except RuntimeError as error:
        raise DescantError(f"cannot listen on {bound}: {error}") from None
    return server

"""A client's transport over gRPC: one stream to the server, opened again after every loss.

All connections go from the client to the server, so that a client needs no open port. Before the first
connection, an error that only a person can fix (a certificate, a key, an address) is raised. After it, and
whenever the server is merely absent, attempts go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import secrets
import threading
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from descant.core.files import write_atomic
from descant.deploy.client_directory import open_directory
from descant.deploy.keys import ClientKeys
from descant.deploy.transport import Events, Payload, Rejected, Reply
from descant.deploy.transport.address import Address, Failure, probe
from descant.deploy.transport.connection import CONNECTED_ALREADY, STRANGER, Connection, require_keys
from descant.deploy.transport.frames import FRAME, Arriving, Packed, unpack
from descant.deploy.transport.grpc_server import (
    ADMITTED,
    METHOD,
    PING,
    PONG,
    SERVICE,
    TOKEN,
    TWICE,
    UNKNOWN_KEY,
    address_of,
)
from descant.deploy.transport.loop import event_loop, submit
from descant.deploy.transport.seals import check_seal

PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds between attempts to reach the server
LOOK = 0.2  # seconds between looks whether to stop
REFUSAL = 5.0  # seconds between its metadata and its status, at most
LARGEST = 2**34  # bytes of a request
OPTIONS = [
    ("grpc.max_receive_message_length", FRAME), ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", PING), ("grpc.keepalive_timeout_ms", PONG),
    ("grpc.http2.max_pings_without_data", 0), ("grpc.enable_retries", 0),
]


class GrpcClient:
    """A `ClientTransport`. `directory` is the client directory: a token is stored there, by which the server
    knows that a connection replaces that of a process that was killed."""

    def __init__(self, address: Address, keys: ClientKeys | None, directory: Path) -> None:
        require_keys(address, keys)
        self._address, self._keys, self._directory = address, keys, directory

    def serve(self, reply: Reply, events: Events, stop: threading.Event) -> None:
        open_directory(self._directory)
        session = _Session(self._address, self._keys, _token(self._directory / "node_id"), events)
        event_loop()
        connecting = submit(session.run())
        try:
            while not stop.is_set():
                if connecting.done():
                    connecting.result()  # raises what a person has to mend
                with contextlib.suppress(queue.Empty):
                    session.answer(session.requests.get(timeout=LOOK), reply)
        finally:
            connecting.cancel()
            with contextlib.suppress(Exception):
                submit(session.closed.wait()).result(2)


def _token(path: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        if len(found := path.read_text(encoding="ascii").strip()) == 32:
            return found
    made = secrets.token_hex(16)
    write_atomic(path, made.encode(), private=True)
    return made


class _Request(NamedTuple):
    stream: Any  # on which the reply goes, and no other
    data: bytes


class _Session:
    def __init__(self, address: Address, keys: ClientKeys | None, token: str, events: Events) -> None:
        self._address, self._keys, self._token, self._events = address, keys, token, events
        self._name = "this client" if keys is None else keys.name
        self._node = 0 if keys is None else address_of(keys.public_pem)
        self._stream: Any = None
        self._link = Connection(events)
        self.requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self.closed = asyncio.Event()

    # -- the client's own thread -----------------------------------------------------------------

    def answer(self, request: _Request, reply: Reply) -> None:
        """Whatever comes, this client goes on."""
        if request.stream is not self._stream:
            return  # lost meanwhile: the server asks again
        self._events.received(len(request.data))
        number = Arriving(request.data[:FRAME], LARGEST).number
        try:
            payload = unpack(request.data)
            if self._keys is not None:
                check_seal(payload, self._node, self._keys.ca)
        except Rejected as error:
            self._events.ignored(str(error))
            payload = Payload('{"failed": "unreadable"}', "{}")
        else:
            payload = reply(payload)
        packed = Packed.of(number, payload)
        if submit(self._send(request.stream, packed)).result():
            self._events.sent(len(packed))

    # -- in the event loop -----------------------------------------------------------------------

    async def _send(self, stream: Any, packed: Packed) -> bool:
        """Whether it has gone out."""
        try:
            for frame in packed.frames():
                await stream.write(frame)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            return False  # the loop below sees why
        return True

    async def run(self) -> None:
        """Hold a stream, for ever."""
        pause = PAUSE
        try:
            while True:
                was_up = await self._hold()
                pause = PAUSE if was_up else min(LONGEST_PAUSE, 2 * pause)
                await asyncio.sleep(pause)
        finally:
            self.closed.set()

    async def _hold(self) -> bool:
        """One stream, until it breaks; whether there was one."""
        target = str(self._address)
        options = [*OPTIONS, ("grpc.enable_http_proxy", int(not self._address.is_loopback))]
        if self._keys is None:
            channel = grpc.aio.insecure_channel(target, options)
        else:
            channel = grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(
                self._keys.ca, self._keys.private_pem, self._keys.certificate), options)
        was_up = False
        async with channel:
            call = channel.stream_stream(f"/{SERVICE}/{METHOD}")(metadata=((TOKEN, self._token),))
            try:
                if ADMITTED in (await call.initial_metadata()) or not await _is_refused(call):
                    was_up, self._stream = True, call
                    self._link.gain()
                    await self._read(call)
                raise grpc.aio.AioRpcError(await call.code(), grpc.aio.Metadata(), grpc.aio.Metadata(),
                                           await call.details())
            except grpc.aio.AioRpcError as error:
                await self._failed(error)
            except Rejected as error:
                self._events.ignored(str(error))
            finally:
                self._stream = None
                call.cancel()
        return was_up

    async def _read(self, call: Any) -> None:
        while (frame := await call.read()) is not grpc.aio.EOF:
            message = Arriving(frame, LARGEST)
            while not message.is_complete:
                if (frame := await call.read()) is grpc.aio.EOF:
                    return
                message.add(frame)
            self.requests.put(_Request(call, message.data()))

    async def _failed(self, error: Any) -> None:
        match error.code(), error.details():
            case grpc.StatusCode.PERMISSION_DENIED, details if details == UNKNOWN_KEY:
                self._link.fail(STRANGER.format(self._name))
            case grpc.StatusCode.ALREADY_EXISTS, details if details == TWICE:
                self._link.lose(CONNECTED_ALREADY.format(self._name))
            case grpc.StatusCode.UNIMPLEMENTED, _:
                self._link.fail(f"{self._address} is not a descant server")
            case grpc.StatusCode.INVALID_ARGUMENT, details:
                self._link.lose(f"the server refuses a reply: {details!s:.200}")
            case _:
                failure: Failure = await asyncio.to_thread(probe, self._address, self._keys)
                (self._link.fail if failure.is_final else self._link.lose)(failure.reason)


async def _is_refused(call: Any) -> bool:
    """Whether a status comes: that of a refusal does a moment after its metadata. An older server, which does
    not know ADMITTED, lets clients in without a word."""
    try:
        await asyncio.wait_for(asyncio.shield(call.code()), REFUSAL)
    except TimeoutError:
        return False
    return True

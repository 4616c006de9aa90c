"""Frames of the gRPC link in both directions: whatever comes, a server takes replies to what it asked alone,
and a client goes on.

The code is that of the link; the stream is a list. Frames are short here, so that messages have many.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
from hypothesis import strategies as st

from benchmarks.fuzz.case import Kind
from benchmarks.fuzz.draw import CHANGES, Change
from benchmarks.fuzz.messages import NAMES, Quiet, federation, spoiled
from descant.deploy.client import Client
from descant.deploy.messages import WireMessage
from descant.deploy.transport import Payload, Rejected
from descant.deploy.transport import frames as link
from descant.deploy.transport.address import Address
from descant.deploy.transport.grpc_client import _Session
from descant.deploy.transport.grpc_server import GrpcServer, _Link
from descant.deploy.transport.loop import event_loop, submit

SHORT = 200  # bytes of a frame
ASKED = 7  # the number of the request
MOST = 4096  # bytes of its reply


class Aborted(Exception):
    """The server ends a stream."""


class Stream:
    """What a client or a server reads frames from, and writes them to."""

    def __init__(self, frames: list[bytes]) -> None:
        self._left = list(frames)
        self.written: list[bytes] = []

    async def read(self) -> Any:
        return self._left.pop(0) if self._left else grpc.aio.EOF

    async def write(self, frame: bytes) -> None:
        self.written.append(frame)

    async def abort(self, code: grpc.StatusCode, reason: str) -> None:
        raise Aborted(reason)


@contextlib.contextmanager
def short_frames() -> Iterator[None]:
    with mock.patch.object(link, "FRAME", SHORT), mock.patch(
            "descant.deploy.transport.grpc_client.FRAME", SHORT):
        yield


def streams(payloads: list[Payload]) -> st.SearchStrategy[list[bytes]]:
    """The frames of some messages, of which some are changed, left out, repeated or in another order."""
    def cut(given: tuple[Payload, int]) -> list[bytes]:
        with short_frames():
            return list(link.Packed.of(given[1], given[0]).frames())

    whole = st.tuples(st.one_of(st.sampled_from(payloads), spoiled(payloads)),
                      st.sampled_from([ASKED] * 6 + [0, 8, 2**64 - 1])).map(cut)
    edits = st.lists(st.tuples(st.sampled_from(["change", "change", "drop", "repeat", "swap", "more"]),
                               st.floats(0, 1, exclude_max=True), CHANGES), max_size=2)

    def edited(given: tuple[list[list[bytes]], list[tuple[str, float, Change]]]) -> list[bytes]:
        frames = [frame for message in given[0] for frame in message]
        for kind, place, change in given[1]:
            at = int(place * len(frames))
            if kind == "more" or not frames:
                frames.insert(at, change.data)
            elif kind == "change":
                frames[at] = change.of(frames[at])
            elif kind == "swap":
                frames[at], frames[-1] = frames[-1], frames[at]
            else:
                frames[at : at + 1] = [] if kind == "drop" else [frames[at]] * 2
        return frames

    return st.tuples(st.lists(whole, min_size=1, max_size=2), edits).map(edited)


def frame_kind(home: Path) -> Kind:
    line = federation(home / "federation")
    client = Client(NAMES[0], "logistic:0", home / "client", Quiet())
    event_loop()

    def to_server(frames: list[bytes]) -> None:
        server, own = GrpcServer(None), _Link(1, "", b"", "")
        server._waiting[ASKED], own.asked[ASKED] = own, MOST
        with contextlib.suppress(Aborted):
            submit(server._read(own, Stream(frames))).result()
        assert {*server._done} <= {ASKED}
        assert all(len(reply) <= link.HEAD.size + MOST for reply in server._done.values())
        assert len(list(server.receive([str(ASKED)]))) <= 1
        assert not server._done

    def to_client(frames: list[bytes]) -> None:
        session = _Session(Address("127.0.0.1", 1), None, "", Quiet())
        session._stream = stream = Stream(frames)
        with contextlib.suppress(Rejected):  # the stream is ended, and opened anew
            submit(session._read(stream)).result()
        while not session.requests.empty():
            session.answer(session.requests.get(), client.reply)
            reply = link.Arriving(stream.written[0], MOST)
            for frame in stream.written[1:]:
                reply.add(frame)
            WireMessage.decode(link.unpack(reply.data()))
            stream.written.clear()

    def use(given: tuple[bool, list[bytes]]) -> None:
        with short_frames():
            (to_server if given[0] else to_client)(given[1])

    return Kind("frames", st.one_of(st.tuples(st.just(True), streams(line.replies)),
                                    st.tuples(st.just(False), streams(line.requests))), use)

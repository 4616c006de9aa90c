"""Payloads as bytes, and bytes as the frames of a stream.

A message begins with the number of the request that it is, or replies to, and its length; then come an index
in JSON and the blobs, end to end. It is cut into frames, of which all but the last are full: whoever receives
can count, and nobody can send frames without an end.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from descant.deploy.transport import Payload, Rejected, Seal

FRAME = 2**16  # bytes
HEAD = struct.Struct("!QQ")  # number, bytes of the message
INDEX = struct.Struct("!I")  # bytes of the index
UNREADABLE = "not a message of descant"


class Packed(NamedTuple):
    """A message whose blobs are not copied: most clients are sent the same ones."""

    number: int
    parts: list[bytes]

    @classmethod
    def of(cls, number: int, payload: Payload) -> Packed:
        seal = None if payload.seal is None else [base64.b64encode(part).decode() for part in payload.seal]
        index = json.dumps({"facts": payload.facts, "tensors": payload.tensors, "seal": seal,
                            "blobs": {name: len(blob) for name, blob in payload.blobs.items()}}).encode()
        return cls(number, [INDEX.pack(len(index)) + index, *payload.blobs.values()])

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def frames(self) -> Iterator[bytes]:
        """Made one by one, when there is room for them in the connection."""
        ready = bytearray(HEAD.pack(self.number, len(self)))
        for part in self.parts:
            view = memoryview(part)
            while len(view):
                taken = view[: FRAME - len(ready)]
                ready += taken
                view = view[len(taken):]
                if len(ready) == FRAME:
                    yield bytes(ready)
                    ready = bytearray()
        if ready:
            yield bytes(ready)


class Arriving:
    """A message of which some frames have come."""

    def __init__(self, frame: bytes, most: int) -> None:
        self.number, self.length = announced(frame)
        if self.length > most:
            raise Rejected(f"a message of {self.length} bytes, and {most} are the most")
        self._left = HEAD.size + self.length
        self._parts: list[bytes] = []
        self.add(frame)

    @property
    def is_complete(self) -> bool:
        return self._left == 0

    def add(self, frame: bytes) -> None:
        if len(frame) != min(FRAME, self._left):
            raise Rejected("a frame of another length than was announced")
        self._left -= len(frame)
        self._parts.append(frame)

    def discard(self) -> None:
        """Nobody waits for it: count on, and keep nothing."""
        self._parts.clear()

    def data(self) -> bytes:
        return b"".join(self._parts)


def announced(frame: bytes) -> tuple[int, int]:
    """The number and the length of a message, from its first frame."""
    if len(frame) < HEAD.size:
        raise Rejected(UNREADABLE)
    number, length = HEAD.unpack_from(frame)
    return number, length


def unpack(data: bytes) -> Payload:
    """The payload in a whole message."""
    try:
        (count,) = INDEX.unpack_from(data, HEAD.size)
        start = HEAD.size + INDEX.size
        index = json.loads(data[start : start + count])
        start += count
        blobs: dict[str, bytes] = {}
        for name, length in index["blobs"].items():
            if type(length) is not int or not 0 <= length <= len(data) - start:
                raise ValueError("a blob of another length")
            blobs[name] = data[start : start + length]
            start += length
        if start != len(data):
            raise ValueError("bytes are left over")
        return Payload(index["facts"], index["tensors"], blobs, _seal(index.get("seal")))
    except (struct.error, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise Rejected(UNREADABLE) from None


def _seal(parts: Any) -> Seal | None:
    if parts is None:
        return None
    signature, certificate = (base64.b64decode(part, validate=True) for part in parts)
    return Seal(signature, certificate)

"""A client that lies: `python -m benchmarks.chaos.liar SERVER KEYS DIR SEED TRANSPORT`. The seed 0 is always
by NaN."""

from __future__ import annotations

import json
import random
import sys
import threading
from pathlib import Path
from typing import Any

from descant.deploy.client import Client
from descant.deploy.keys import ClientKeys
from descant.deploy.transport import Payload
from descant.deploy.transport.address import Address
from descant.deploy.transport.choose import Name, make_client

NAME = "liar"


class Silent:
    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_: None


def nan(payload: Payload) -> Payload:
    """All bits set, which is NaN in every float type."""
    return payload._replace(blobs={name: b"\xff" * len(blob) for name, blob in payload.blobs.items()})


def shorter(payload: Payload) -> Payload:
    return payload._replace(blobs={name: blob[:-8] for name, blob in payload.blobs.items()})


def much_longer(payload: Payload) -> Payload:
    return payload._replace(blobs={name: blob * 2**14 for name, blob in payload.blobs.items()})


def unlisted(payload: Payload) -> Payload:
    return payload._replace(blobs={**payload.blobs, "more": b"bytes"})


def fact(name: str, value: Any) -> Any:
    return lambda payload: payload._replace(facts=json.dumps(json.loads(payload.facts) | {name: value}))


def nonsense(payload: Payload) -> Payload:
    return Payload("{" * 1000, "[]")


LIES = (nan, shorter, much_longer, unlisted, nonsense, fact("steps", 10**12), fact("steps", "many"),
        fact("number", 10**6), fact("job", "score"), fact("nonce", "0"), fact("what", "join"))


def main(server: str, keys: str, directory: str, seed: str, transport: str) -> None:
    honest = Client(NAME, "digits:0", Path(directory), Silent())
    generator = random.Random(int(seed))

    def reply(payload: Payload) -> Payload:
        found = honest.reply(payload)
        if json.loads(payload.facts).get("what") != "work":
            return found
        return (generator.choice(LIES) if int(seed) else nan)(found)

    link = make_client(Name(transport), Address.parse(server), ClientKeys.load(Path(keys), NAME),
                       Path(directory))
    link.serve(reply, Silent(), threading.Event())


if __name__ == "__main__":
    main(*sys.argv[1:])

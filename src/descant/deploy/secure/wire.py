"""The protocol's parts as facts of messages: JSON, with bytes in base64. What cannot be read is rejected."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from descant.deploy.secure.encoding import Words
from descant.deploy.secure.parts import Advert, Dealing, Revealed
from descant.deploy.transport import Rejected

T = TypeVar("T")
LONGEST = 8192  # characters of a key, share, signature or certificate


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data(found: Any) -> bytes:
    if not isinstance(found, str) or len(found) > LONGEST:
        raise Rejected("a part of secure aggregation that is not text")
    try:
        return base64.b64decode(found, validate=True)
    except (binascii.Error, ValueError):
        raise Rejected("a part of secure aggregation that is not base64") from None


def by_client(found: Any, read: Callable[[Any], T]) -> dict[int, T]:
    """A table by the numbers of clients, which JSON has as texts."""
    if not isinstance(found, dict) or not all(key.isdecimal() and len(key) < 10 for key in found):
        raise Rejected("a part of secure aggregation that is not a table by client")
    return {int(key): read(value) for key, value in found.items()}


def texts(table: Mapping[int, bytes]) -> dict[str, str]:
    return {str(client): text(part) for client, part in table.items()}


def clients(found: Any) -> list[int]:
    if not isinstance(found, list) or not all(type(client) is int for client in found):
        raise Rejected("a part of secure aggregation that is not a list of clients")
    return found


def _parts(found: Any, count: int) -> list[bytes]:
    if not isinstance(found, list) or len(found) != count:
        raise Rejected(f"a part of secure aggregation that is not a list of {count}")
    return [data(each) for each in found]


def advert_facts(advert: Advert) -> list[str]:
    return [text(part) for part in advert]


def advert(found: Any) -> Advert:
    return Advert(*_parts(found, len(Advert._fields)))


def dealing_facts(dealing: Dealing) -> dict[str, Any]:
    return {"commitment": text(dealing.commitment), "boxes": texts(dealing.boxes),
            "digests": {str(client): [*map(text, pair)] for client, pair in dealing.digests.items()}}


def dealing(facts: Mapping[str, Any]) -> Dealing:
    def pair(found: Any) -> tuple[bytes, bytes]:
        first, second = _parts(found, 2)
        return first, second

    return Dealing(data(facts.get("commitment")), by_client(facts.get("boxes"), data),
                   by_client(facts.get("digests"), pair))


def revealed_facts(revealed: Revealed) -> dict[str, Any]:
    return {"seeds": texts(revealed.seeds), "keys": texts(revealed.keys)}


def revealed(facts: Mapping[str, Any]) -> Revealed:
    return Revealed(by_client(facts.get("seeds"), data), by_client(facts.get("keys"), data))


def tensor(words: Words) -> Tensor:
    return torch.from_numpy(words.view(np.int64))


def words(tensor: Tensor) -> Words:
    return tensor.numpy().view(np.uint64)

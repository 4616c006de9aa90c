"""Messages between server and client: facts as JSON, tensors as raw bytes with their names, types and shapes.

Nothing is ever unpickled. A tensor that is missing, unexpected, or of another type, shape or length is
rejected before anything is made of its bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from descant.core.tree import Tree, leaves, rebuild
from descant.deploy.transport import Payload, Rejected

TYPES = {str(dtype).removeprefix("torch."): dtype
         for dtype in (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)}
MAX_TEXT = 2**20  # characters of facts: experiments and counts are short
MAX_SIDE = 2**40  # elements along one dimension
MAX_SIDES = 16  # dimensions: the product of a million sides takes a minute


class PackedTensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, tensor: Tensor) -> PackedTensor:
        data = tensor.detach().contiguous().numpy().tobytes()
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)

    def tensor(self, name: str, template: Tensor | None) -> Tensor:
        dtype = TYPES[self.dtype]
        if template is not None and (dtype != template.dtype or self.shape != tuple(template.shape)):
            raise Rejected(f"{name} has shape {self.shape} of {self.dtype}, expected {tuple(template.shape)} "
                           f"of {str(template.dtype).removeprefix('torch.')}")
        if not self.data:
            return torch.zeros(self.shape, dtype=dtype)
        return torch.frombuffer(bytearray(self.data), dtype=dtype).view(self.shape)


class WireMessage(NamedTuple):
    """A request or a reply."""

    facts: dict[str, Any]  # numbers, strings, lists of them
    tensors: Mapping[str, PackedTensor] = {}  # by names such as "value.upload.theta"

    @classmethod
    def of(cls, facts: Mapping[str, Any], **trees: Tree) -> WireMessage:
        """A message with the tensors of some trees, each under its own name."""
        return cls(dict(facts), {name: PackedTensor.of(leaf) for prefix, tree in trees.items()
                                 for name, leaf in leaves(tree, prefix)})

    @classmethod
    def decode(cls, payload: Payload) -> WireMessage:
        facts, listed = _json(payload.facts, "facts"), _json(payload.tensors, "tensors")
        blobs = dict(payload.blobs)
        tensors: dict[str, PackedTensor] = {}
        for prefix, entries in listed.items():
            tensors |= _split(prefix, entries, blobs.pop(prefix, b""))
        if blobs:
            raise Rejected(f"unlisted bytes: {next(iter(blobs))!r:.40}")
        return cls(facts, tensors)

    def encode(self, known: dict[tuple[int, ...], bytes] | None = None) -> Payload:
        """The tensors of a tree become one blob. Messages that are encoded with the same `known`, and have
        the same tensors in a tree, share it."""
        known = {} if known is None else known
        listed: dict[str, list[Any]] = {}
        parts: dict[str, list[bytes]] = {}
        for name, (dtype, shape, data) in self.tensors.items():
            prefix = name.split(".")[0]
            listed.setdefault(prefix, []).append([name, dtype, shape])
            parts.setdefault(prefix, []).append(data)
        blobs: dict[str, bytes] = {}
        for prefix, own in parts.items():
            which = tuple(map(id, own))
            if which not in known:
                known[which] = b"".join(own)
            blobs[prefix] = known[which]
        return Payload(json.dumps(self.facts), json.dumps(listed), blobs)

    def tree(self, prefix: str, template: Tree) -> Tree:
        """The tree under a name; it must have the template's names, types and shapes."""
        named = {name: packed for name, packed in self.tensors.items() if name.split(".")[0] == prefix}
        expected = dict(leaves(template, prefix))
        if wrong := sorted(expected.keys() ^ named.keys()):
            raise Rejected(f"{wrong[0]:.80} is {'missing' if wrong[0] in expected else 'not expected'}")
        found = {name: packed.tensor(name, expected[name]) for name, packed in named.items()}
        return rebuild(template, found, prefix)

    def fact(self, name: str, kind: type) -> Any:
        """A fact of this type; a bool is not a number."""
        value = self.facts.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise Rejected(f"field {name!r}: expected {kind.__name__}, got {value!r:.80}")
        return value

    def nbytes(self) -> int:
        """The bytes of the tensors."""
        return sum(len(packed.data) for packed in self.tensors.values())


def _json(text: Any, name: str) -> dict[str, Any]:
    if not isinstance(text, str) or len(text) > MAX_TEXT:
        raise Rejected(f"its {name} are not text of at most {MAX_TEXT} characters")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise Rejected(f"its {name} are not JSON") from None
    if not isinstance(found, dict):
        raise Rejected(f"its {name} are not a JSON object")
    return found


def _split(prefix: str, entries: Any, blob: bytes) -> dict[str, PackedTensor]:
    """The tensors that lie end to end in a blob."""
    if not isinstance(entries, list):
        raise Rejected(f"{entries!r:.80} does not describe tensors")
    found, start = {}, 0
    for entry in entries:
        try:
            name, dtype, shape = entry
            itemsize = TYPES[dtype].itemsize
        except (TypeError, ValueError, KeyError):
            raise Rejected(f"{entry!r:.80} does not describe a tensor") from None
        if not isinstance(name, str) or name.split(".")[0] != prefix or name in found or not (
                isinstance(shape, list) and len(shape) <= MAX_SIDES and all(
                    isinstance(side, int) and 0 <= side <= MAX_SIDE for side in shape)):
            raise Rejected(f"{entry!r:.80} does not describe a tensor")
        size = itemsize * math.prod(shape)
        found[name] = PackedTensor(dtype, tuple(shape), blob[start : start + size])
        start += size
    if start != len(blob):
        raise Rejected(f"its {prefix} has {len(blob)} bytes, expected {start}")
    return found

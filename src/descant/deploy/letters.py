"""What travels: facts as JSON, tensors as raw bytes beside a list of their names, types and shapes.

A letter is the content of one Flower message, in either direction. Nothing is ever unpickled. What comes
from the other side is read against what it must be: a tensor that is missing, unexpected, of another type,
shape or length is refused before anything is made of its bytes.

Flower carries each record and each array of a message by a request of its own, some ten milliseconds each. So
the tensors of a tree are one piece; and pieces that are small ride with the facts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from descant.core.tree import Tree, leaves, rebuild
from descant.errors import DescantError

RECORD, PIECES = "descant", "pieces"
STYPE = "descant.raw"  # tensors end to end, little-endian, row after row
TYPES = {str(dtype).removeprefix("torch."): dtype
         for dtype in (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)}
LONGEST = 2**20  # characters of facts: experiments and counts are short
SMALL = 2**19  # bytes of tensors that ride with the facts
MOST = 2**40  # elements of a tensor


class Refused(DescantError):
    """What the other side sent is not what it must be."""


class Packed(NamedTuple):
    """A tensor as it travels."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, tensor: Tensor) -> Packed:
        data = tensor.detach().contiguous().numpy().tobytes()
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)

    def tensor(self, name: str, template: Tensor | None) -> Tensor:
        dtype = TYPES[self.dtype]
        if template is not None and (dtype != template.dtype or self.shape != tuple(template.shape)):
            raise Refused(f"{name} has shape {self.shape} of {self.dtype}, expected {tuple(template.shape)} "
                          f"of {str(template.dtype).removeprefix('torch.')}")
        if not self.data:
            return torch.zeros(self.shape, dtype=dtype)
        return torch.frombuffer(bytearray(self.data), dtype=dtype).view(self.shape)


class Letter(NamedTuple):
    facts: dict[str, Any]  # numbers, words, lists of them
    tensors: Mapping[str, Packed] = {}  # by names such as "value.upload.theta"

    @classmethod
    def of(cls, facts: Mapping[str, Any], **trees: Tree) -> Letter:
        """A letter with the tensors of some trees, each under its own name."""
        return cls(dict(facts), {name: Packed.of(leaf) for prefix, tree in trees.items()
                                 for name, leaf in leaves(tree, prefix)})

    @classmethod
    def read(cls, content: RecordDict) -> Letter:
        """The letter in the content of a message."""
        config, arrays = content.get(RECORD), content.get(PIECES, ArrayRecord())
        if not {*content} <= {RECORD, PIECES} or not isinstance(config, ConfigRecord) \
                or not isinstance(arrays, ArrayRecord):
            raise Refused("it is not a message of descant")
        facts, listed = (_json(config.get(name), name) for name in ("facts", "tensors"))
        pieces = {name: array.data for name, array in arrays.items() if array.stype == STYPE}
        pieces |= {name: value for name, value in config.items() if isinstance(value, bytes)}
        tensors: dict[str, Packed] = {}
        for prefix, entries in listed.items():
            tensors |= _cut(prefix, entries, pieces.pop(prefix, b""))
        if pieces:
            raise Refused(f"it has bytes that it does not list: {next(iter(pieces))!r:.40}")
        return cls(facts, tensors)

    def content(self) -> RecordDict:
        """The content of a message with this letter in it."""
        listed: dict[str, list[Any]] = {}
        pieces: dict[str, list[bytes]] = {}
        for name, (dtype, shape, data) in self.tensors.items():
            prefix = name.split(".")[0]
            listed.setdefault(prefix, []).append([name, dtype, shape])
            pieces.setdefault(prefix, []).append(data)
        config: dict[str, Any] = {"facts": json.dumps(self.facts), "tensors": json.dumps(listed)}
        whole = {prefix: b"".join(parts) for prefix, parts in pieces.items()}
        if self.nbytes() <= SMALL:
            return RecordDict({RECORD: ConfigRecord(config | whole)})
        # what is the same for several clients is stored by Flower once
        arrays = {prefix: Array("uint8", (len(data),), STYPE, data) for prefix, data in whole.items()}
        return RecordDict({RECORD: ConfigRecord(config), PIECES: ArrayRecord(arrays)})

    def tree(self, prefix: str, template: Tree) -> Tree:
        """The tree under a name, which must have the form of the template: names, types, shapes."""
        named = {name: packed for name, packed in self.tensors.items() if name.split(".")[0] == prefix}
        expected = dict(leaves(template, prefix))
        if wrong := sorted(expected.keys() ^ named.keys()):
            raise Refused(f"{wrong[0]:.80} is {'missing' if wrong[0] in expected else 'not expected'}")
        found = {name: packed.tensor(name, expected[name]) for name, packed in named.items()}
        return rebuild(template, found, prefix)

    def fact(self, name: str, kind: type) -> Any:
        """A fact of this type: bool is no number."""
        value = self.facts.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise Refused(f"its {name} is {value!r:.80}, which is no {kind.__name__}")
        return value

    def nbytes(self) -> int:
        """The bytes of the tensors."""
        return sum(len(packed.data) for packed in self.tensors.values())


def _json(text: Any, name: str) -> dict[str, Any]:
    if not isinstance(text, str) or len(text) > LONGEST:
        raise Refused(f"its {name} are not one text of a sensible length")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise Refused(f"its {name} are not JSON") from None
    if not isinstance(found, dict):
        raise Refused(f"its {name} are not a JSON object")
    return found


def _cut(prefix: str, entries: Any, piece: bytes) -> dict[str, Packed]:
    """The tensors that lie end to end in a piece, as it is listed."""
    if not isinstance(entries, list):
        raise Refused(f"{entries!r:.80} does not describe tensors")
    found, start = {}, 0
    for entry in entries:
        try:
            name, dtype, shape = entry
            size = TYPES[dtype].itemsize * math.prod(shape)
        except (TypeError, ValueError, KeyError):
            raise Refused(f"{entry!r:.80} does not describe a tensor") from None
        if not isinstance(name, str) or name.split(".")[0] != prefix or name in found or not all(
                isinstance(side, int) and 0 <= side <= MOST for side in shape):
            raise Refused(f"{entry!r:.80} does not describe a tensor")
        found[name] = Packed(dtype, tuple(shape), piece[start : start + size])
        start += size
    if start != len(piece):
        raise Refused(f"its {prefix} has {len(piece)} bytes, expected {start}")
    return found

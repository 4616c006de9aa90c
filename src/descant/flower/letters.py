"""What travels: facts as one line of JSON, tensors as raw bytes with their names. Nothing is ever unpickled.

A letter is the content of one Flower message, in either direction. What comes from the other side is read
against what it must be: a tensor that is missing, unexpected, of another type, shape or length is refused
before anything is made of its bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from descant.errors import DescantError
from descant.tree import Tree, leaves, rebuild

FACTS, TENSORS = "descant", "tensors"
STYPE = "descant.little-endian"  # the bytes of a tensor, row after row
TYPES = {str(dtype).removeprefix("torch."): dtype
         for dtype in (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)}
LONGEST_FACTS = 2**20  # characters: experiments and counts are short


class Refused(DescantError):
    """What the other side sent is not what it must be."""


class Letter(NamedTuple):
    facts: dict[str, Any]  # numbers, words, lists of them
    tensors: dict[str, Array] = {}  # noqa: RUF012 (never changed)

    @classmethod
    def of(cls, facts: Mapping[str, Any], **trees: Tree) -> Letter:
        """A letter with the tensors of some trees, each under its own name."""
        return cls(dict(facts), {name: _array(leaf) for prefix, tree in trees.items()
                                 for name, leaf in leaves(tree, prefix)})

    @classmethod
    def read(cls, content: RecordDict) -> Letter:
        """The letter in the content of a message."""
        config, arrays = content.get(FACTS), content.get(TENSORS)
        if not {*content} <= {FACTS, TENSORS} or not isinstance(config, ConfigRecord):
            raise Refused("it is not a message of descant")
        text = config.get("facts")
        if not isinstance(text, str) or len(text) > LONGEST_FACTS or {*config} != {"facts"}:
            raise Refused("its facts are not one text of a sensible length")
        try:
            facts = json.loads(text)
        except (ValueError, RecursionError):
            raise Refused("its facts are not JSON") from None
        if not isinstance(facts, dict):
            raise Refused("its facts are not a JSON object")
        return cls(facts, dict(arrays) if isinstance(arrays, ArrayRecord) else {})

    def content(self) -> RecordDict:
        """The content of a message with this letter in it."""
        records: dict[str, Any] = {FACTS: ConfigRecord({"facts": json.dumps(self.facts)})}
        if self.tensors:
            records[TENSORS] = ArrayRecord(self.tensors)
        return RecordDict(records)

    def tree(self, prefix: str, template: Tree) -> Tree:
        """The tree under a name, which must have the form of the template: names, types, shapes."""
        named = {name: array for name, array in self.tensors.items() if name.split(".")[0] == prefix}
        expected = dict(leaves(template, prefix))
        if wrong := sorted(expected.keys() ^ named.keys()):
            raise Refused(f"{wrong[0]} is {'missing' if wrong[0] in expected else 'not expected'}")
        found = {name: _tensor(name, array, expected[name]) for name, array in named.items()}
        return rebuild(template, found, prefix)

    def whole(self, prefix: str) -> dict[str, Tensor]:
        """The tensors under a name as they are said to be, for who has no template yet."""
        named = {name: array for name, array in self.tensors.items() if name.split(".")[0] == prefix}
        return {name: _tensor(name, array, None) for name, array in named.items()}

    def fact(self, name: str, kind: type) -> Any:
        """A fact of this type: bool is no number, and a whole number is a real one."""
        value = self.facts.get(name)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise Refused(f"its {name} is {value!r:.80}, which is no {kind.__name__}")
        return value

    def nbytes(self) -> int:
        """The bytes of the tensors."""
        return sum(len(array.data) for array in self.tensors.values())


def _array(tensor: Tensor) -> Array:
    data = tensor.detach().contiguous().numpy()
    return Array(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), STYPE, data.tobytes())


def _tensor(name: str, array: Array, template: Tensor | None) -> Tensor:
    shape, dtype = tuple(array.shape), TYPES.get(array.dtype)
    if array.stype != STYPE or dtype is None:
        raise Refused(f"{name} is of type {array.dtype!r:.40}, stored as {array.stype!r:.40}")
    if template is not None and (dtype != template.dtype or shape != tuple(template.shape)):
        raise Refused(f"{name} has shape {shape} of {array.dtype}, expected {tuple(template.shape)} of "
                      f"{str(template.dtype).removeprefix('torch.')}")
    count = 1
    for side in shape:
        count *= side
    if min(shape, default=0) < 0 or len(array.data) != count * dtype.itemsize:
        raise Refused(f"{name} has {len(array.data)} bytes, expected {count * dtype.itemsize}")
    if not count:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(bytearray(array.data), dtype=dtype).view(shape)

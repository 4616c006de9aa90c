"""Checksums: what was damaged on disk is told, not believed.

They are no signatures: whoever can write a file can write its checksum. Files of versions that wrote none
are read without.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

CHECK = "check"  # the entry of a table with the checksum of the others
_ENTRY = "descant"  # of the metadata of tensors


class Damaged(ValueError):
    """A checksum does not match."""


def text_check(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def sealed_table(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table of JSON with its checksum, as the last entry."""
    return {**table, CHECK: text_check(json.dumps(table, sort_keys=True))}


def unsealed_table(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table without its checksum, which must fit if it is there."""
    rest = {name: value for name, value in table.items() if name != CHECK}
    if CHECK in table and table[CHECK] != text_check(json.dumps(rest, sort_keys=True)):
        raise Damaged("its checksum does not match")
    return rest


def sealed_tensors(tensors: Mapping[str, Tensor], text: str) -> bytes:
    """A file of tensors with a text, and a checksum over both."""
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    # one entry: safetensors writes several in random order
    return save(whole, metadata={_ENTRY: f"{_crc(whole, text):08x} {text}"})


def unsealed_tensors(path: Path) -> tuple[dict[str, Tensor], str]:
    """The tensors and the text of a file, which is empty if the file has no checksum."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (no mapping)
        crc, _, text = (file.metadata() or {}).get(_ENTRY, "").partition(" ")
    if text and crc != f"{_crc(tensors, text):08x}":
        raise Damaged("its checksum does not match")
    return tensors, text


def _crc(tensors: Mapping[str, Tensor], text: str) -> int:
    crc = zlib.crc32(text.encode())
    for name in sorted(tensors):
        crc = zlib.crc32(tensors[name].numpy().tobytes(), zlib.crc32(name.encode(), crc))
    return crc

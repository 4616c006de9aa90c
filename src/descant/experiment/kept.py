"""What a run directory keeps of a federation that was read from the user's own files: all but the rows.

With that, models are loaded and exported after the files were moved, changed or removed.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from torch import Tensor

from descant.core.federation import Federation
from descant.core.files import write_atomic
from descant.core.preprocess import Treatment
from descant.core.sample import SampleFormat
from descant.core.sealed import sealed_tensors, unsealed_tensors
from descant.core.splits import SPLITS
from descant.data.folder import Folder
from descant.data.spec import DataSpec
from descant.engine.backends.shard import Shard, table_of_zeros
from descant.errors import DescantError

FILE = "federation.safetensors"
NUMBERS = ("fill", "mean", "std")  # of the treatment


@dataclasses.dataclass(frozen=True, repr=False)
class KeptFederation(Shard):
    """A federation without its rows: each is a sample of zeros."""

    known: str = ""  # the fingerprint of the federation with its rows

    has_rows: ClassVar[bool] = False

    def fingerprint(self) -> str:
        return self.known


def keep(directory: Path, federation: Federation) -> None:
    """Write down a federation of the user's own files; any other can be made again."""
    if (directory / FILE).exists() or federation.origin is None or federation.is_remote or (
            not federation.has_rows or not isinstance(DataSpec.parse(federation.origin).dataset, Folder)):
        return
    facts: dict[str, Any] = {
        "sample": SampleFormat.of_federation(federation).dump(), "fingerprint": federation.fingerprint(),
        "source": federation.source_fingerprint(), "unseen": federation.unseen, "names": federation.names,
        "class_names": federation.class_names, "column_names": federation.column_names,
        "origin": federation.origin}
    tensors: dict[str, Tensor] = {split: torch.from_numpy(federation.split(split).sizes.copy())
                                  for split in SPLITS}
    if (treatment := federation.treatment) is not None:
        facts["raw"] = str(treatment.dtype).removeprefix("torch.")
        tensors |= {name: part for name in NUMBERS if (part := getattr(treatment, name)) is not None}
    write_atomic(directory / FILE, sealed_tensors(tensors, json.dumps(facts, sort_keys=True)))


def kept(directory: Path, dtype: torch.dtype) -> KeptFederation | None:
    """The federation that `keep` wrote; None if there is none."""
    path = directory / FILE
    if not path.exists():
        return None
    try:
        tensors, text = unsealed_tensors(path)
        return _rebuilt(tensors, json.loads(text), dtype)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DescantError(f"{path} is damaged ({error}): restore it from a copy") from None


def _rebuilt(tensors: dict[str, Tensor], facts: dict[str, Any], dtype: torch.dtype) -> KeptFederation:
    sample = SampleFormat.parse(facts["sample"])
    x, y = sample.zeros(dtype)
    train, validation, test = (table_of_zeros(tensors[split].tolist()) for split in SPLITS)
    treatment = None if "raw" not in facts else Treatment(
        getattr(torch, facts["raw"]), tensors.get("fill"), tensors.get("mean"), tensors.get("std"))
    class_names, column_names = (None if facts[name] is None else tuple(facts[name])
                                 for name in ("class_names", "column_names"))
    return KeptFederation(
        x, y, train, validation, test, sample.classes, tuple(facts["names"]), origin=facts["origin"],
        unseen=facts["unseen"], source=facts["source"], treatment=treatment, class_names=class_names,
        column_names=column_names, known=facts["fingerprint"])

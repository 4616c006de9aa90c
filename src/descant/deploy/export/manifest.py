"""The manifest of a model: `model.json`, which describes the tensors in `model.safetensors` and the
preprocessing of rows. The same for models exported from a run and for those of remote clients.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from descant import __version__
from descant.core import fields
from descant.core.federation import Federation
from descant.core.files import write_atomic
from descant.core.sample import SampleFormat, is_dtype
from descant.core.sealed import sealed_table, unsealed_table
from descant.core.splits import Table
from descant.core.units import times
from descant.data.schema import Schema
from descant.data.spec import DataSpec
from descant.errors import DescantError, UsageError
from descant.experiment.run import Setup, Which
from descant.models.module import ModuleTask

FORMAT = 1
_BREAK = r"\n\s*"
TENSORS, ABOUT = "model.safetensors", "model.json"
Tensors: TypeAlias = Literal["state_dict", "parts"]  # of one module; or what a method predicts with instead


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of model.json."""

    client: str | None  # None: the global model
    newcomer: bool  # made by the method's rule for newcomers
    round: int  # of the run
    which: Which  # as requested; `notes` say if there was no best one
    algorithm: dict[str, Any]
    tensors: Tensors
    model: dict[str, Any] | None  # the [model] section; None for a module that Python made
    loss: str | None
    dtype: str  # of the parameters
    seed: int  # of the initial parameters, for what a state_dict does not hold
    input: SampleFormat  # of the rows as they are in the data
    outputs: int  # numbers for each row
    classes: tuple[str, ...] | None  # their names; None where the target is a real number
    preprocess: dict[str, list[float]] | None  # by column; None: every client has its own
    schema: Schema | None
    notes: tuple[str, ...] = ()
    files: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    layers: dict[str, Any] | None = None  # the network's description (`layers`); None: it cannot be described
    descant: str = __version__
    format: int = FORMAT

    @classmethod
    def of(cls, setup: Setup, client: int | None, *, name: str | None, newcomer: bool, number: int,
           which: Which, notes: tuple[str, ...] = (), tensors: Tensors = "state_dict",
           fitted: Federation | None = None) -> Manifest:
        """The manifest of a client's model (None: of the global model). `fitted` is the federation that the
        network was made for, if it is not that of the setup."""
        federation, task = setup.federation, setup.task
        section = _data_section(setup)
        schema = None if section is None or "schema" not in section else Schema.parse(section["schema"])
        loss = task.loss_name if isinstance(task, ModuleTask) else None
        sample = SampleFormat.of_federation(fitted or federation).for_loss(loss)
        constants, raw = _treatment(setup, client)
        count = task.classes if isinstance(task, ModuleTask) else federation.classes
        names = None if count is None else tuple(str(k) for k in range(count))
        known = (fitted or federation).class_names if schema is None else schema.classes
        if names is not None and known is not None and len(known) == len(names):
            names = known
        return cls(
            client=name, newcomer=newcomer, round=number, which=which, notes=notes, tensors=tensors,
            algorithm=fields.dump(setup.algorithm),
            model=setup.model if setup.origin is None else dict(setup.origin["model"]), loss=loss,
            dtype=_name(task.dtype), seed=setup.train.seed,
            input=_input(sample.shape, _name(raw), sample.tokens, sample.outputs), outputs=sample.outputs,
            classes=names, preprocess=constants, schema=schema)

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def dump(self) -> dict[str, Any]:
        table = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        table |= {"input": {name: getattr(self.input, name) for name in ("shape", "dtype", "tokens")},
                  "schema": None if self.schema is None else json.loads(self.schema.to_json())}
        return {"descant": self.descant, "format": self.format} | table

    @classmethod
    def parse(cls, table: Any) -> Manifest:
        """The manifest that `dump` wrote; ValueError, KeyError or TypeError if it is none."""
        if not isinstance(table, dict):
            raise TypeError("it is not a table")
        if table.get("format") != FORMAT:
            raise ValueError(f"its format is {table.get('format')!r}, and this version of descant reads "
                             f"{FORMAT}")
        table = {"layers": None} | table  # older versions wrote none
        own = {field.name: table[field.name] for field in dataclasses.fields(cls)}
        for name, kind in _KINDS.items():
            if not isinstance(own[name], kind) or (kind is int and isinstance(own[name], bool)):
                raise TypeError(f"{name} is {own[name]!r:.60}")
        given = own["input"]
        sides = [*given["shape"], own["outputs"], *([] if given["tokens"] is None else [given["tokens"]])]
        if not all(type(side) is int and 0 <= side < 2**31 for side in sides):
            raise ValueError(f"input is {given!r:.60}")
        own["input"] = _input(tuple(given["shape"]), given["dtype"], given["tokens"], own["outputs"])
        for name in (own["dtype"], own["input"].dtype):
            if not is_dtype(name) or name == "real":
                raise ValueError(f"{name!r:.40} is not a type of numbers")
        if not getattr(torch, own["dtype"]).is_floating_point:
            raise ValueError(f"a model cannot be of {own['dtype']}")
        own["classes"] = None if own["classes"] is None else tuple(map(str, own["classes"]))
        own["notes"] = tuple(map(str, own["notes"]))
        own["schema"] = None if own["schema"] is None else Schema.from_json(json.dumps(own["schema"]))
        for name, values in (own["preprocess"] or {}).items():
            if name not in ("fill", "mean", "std") or not all(isinstance(v, int | float) for v in values):
                raise ValueError(f"preprocess.{name} is {values!r:.60}")
        return cls(**own)


_KINDS: dict[str, Any] = {
    "client": str | None, "newcomer": bool, "round": int, "which": str, "algorithm": dict, "tensors": str,
    "model": dict | None, "loss": str | None, "dtype": str, "seed": int, "input": dict, "outputs": int,
    "classes": list | None, "preprocess": dict | None, "notes": list, "files": dict, "descant": str,
    "layers": dict | None,
}


def save_model(directory: Path, tensors: Mapping[str, Tensor], manifest: Manifest, *, private: bool = False
               ) -> None:
    """Write both files, the manifest last: its hashes do not fit an older model."""
    plain = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    data = save(plain, {"format": "pt"})  # without it, libraries of Hugging Face refuse a file
    files = {TENSORS: {"sha256": hashlib.sha256(data).hexdigest()}, **manifest.files}
    write_atomic(directory / TENSORS, data, private=private)
    text = json.dumps(sealed_table(dataclasses.replace(manifest, files=files).dump()), indent=1)
    # lists of numbers or names on one line; JSON strings have no line breaks
    text = re.sub(r"\[\n\s*([^][{}]*?)\n\s*\]", lambda found: f"[{re.sub(_BREAK, ' ', found[1])}]", text)
    write_atomic(directory / ABOUT, (text + "\n").encode(), private=private)


def find_model(place: Path) -> Path:
    """The directory of a model, named by itself or by one of its two files."""
    directory = place.parent if place.name in (TENSORS, ABOUT) else place
    if (directory / ABOUT).is_file():
        return directory
    if not place.exists():
        raise UsageError(f"there is no {place}: name a directory with {ABOUT} and {TENSORS}")
    inner = sorted(path.parent for path in directory.glob(f"*/{ABOUT}")) if directory.is_dir() else []
    if inner:
        raise UsageError(f"{place} holds {times(len(inner), 'model')}: name one, such as {inner[0]}")
    raise UsageError(f"{place} holds no model: {directory / ABOUT} is missing")


def read_manifest(place: Path) -> Manifest:
    path = find_model(place) / ABOUT
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        return Manifest.parse(unsealed_table(table) if isinstance(table, dict) else table)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise DescantError(f"{path} is damaged or not a model's manifest ({reason}): export the model again"
                           ) from None


def read_tensors(place: Path, manifest: Manifest) -> dict[str, Tensor]:
    """The tensors of a model, checked against its manifest."""
    path = find_model(place) / TENSORS
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise DescantError(f"{path} is missing: export the model again, or restore a backup") from None
    except OSError as error:
        raise DescantError(f"cannot read {path}: {error.strerror or error}") from None
    about = manifest.files.get(TENSORS)
    known = about.get("sha256") if isinstance(about, Mapping) else None
    if hashlib.sha256(data).hexdigest() != known:
        raise DescantError(f"{path} is not the file that {path.with_name(ABOUT)} describes (another hash): "
                           "it is damaged, or of another model; export the model again")
    try:
        return load(data)
    except SafetensorError as error:
        raise DescantError(f"{path} is damaged ({error}): export the model again") from None


def _data_section(setup: Setup) -> Mapping[str, Any] | None:
    """The [data] section of a run's federation, if it is known."""
    return setup.origin["data"] if setup.origin is not None else setup.federation.origin


def data_spec(setup: Setup) -> DataSpec | None:
    section = _data_section(setup)
    return None if section is None else DataSpec.parse(section)


def _treatment(setup: Setup, client: int | None) -> tuple[dict[str, list[float]] | None, torch.dtype]:
    """The preprocessing constants of a client (None: of everyone), and the type of raw rows."""
    federation = setup.federation
    treatment, raw = federation.treatment, federation.x.dtype
    spec = data_spec(setup) if federation.is_remote and client is None else None
    if spec is not None and spec.preprocess.changes:  # there are no rows here, but the constants may be known
        if spec.preprocess.learns:
            return None, raw
        first, nothing = Table.of([np.zeros(1)]), Table.of([np.zeros(0)])
        _, treatment = spec.preprocess.apply(federation.x, first, nothing, nothing)
    if treatment is None:
        return {}, raw
    parts = [part for part in (treatment.fill, treatment.mean, treatment.std) if part is not None]
    if client is None and not all(bool((part == part[0]).all()) for part in parts):
        return None, raw
    return treatment.constants(client or 0), treatment.dtype


def _input(shape: tuple[int, ...], dtype: str, tokens: int | None, outputs: int) -> SampleFormat:
    """What a network with so many outputs takes."""
    return SampleFormat(shape, dtype, (outputs,), tokens=tokens)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""What there is to choose from: every registry entry, described from its class."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Mapping
from typing import Any

import tomli_w

from descant.core import fields
from descant.core.algorithm import Algorithm
from descant.core.import_object import is_place
from descant.errors import UsageError, unknown
from descant.experiment import methods
from descant.experiment.config import CHOICES

# the fields of an experiment that choose an entry
CHOSEN_BY = {"algorithm": "algorithm.name", "dataset": "data.dataset", "model": "model.name",
             "partition": "data.partition"}
REGISTRIES: dict[str, Mapping[str, type]] = {kind: CHOICES[field] for kind, field in CHOSEN_BY.items()}


def entries(kind: str) -> list[dict[str, str]]:
    """Name and one line about every entry of a registry."""
    listed: list[tuple[Any, dict[str, str]]] = [(cls, {}) for cls in REGISTRIES[kind].values()]
    if kind == "algorithm":
        listed += [(cls, {"package": offer.package}) for offer, cls in methods.offered()
                   if not isinstance(cls, UsageError)]
    return [{"name": cls.name, "description": _documentation(cls)[0]} | _citation(cls) | of
            for cls, of in listed]


def faults(kind: str) -> list[str]:
    """Why what packages offer is not among the entries."""
    return [str(found) for _, found in methods.offered() if isinstance(found, UsageError)
            ] if kind == "algorithm" else []


def find(name: str) -> list[dict[str, Any]]:
    """Everything about the entries of this name: one, or one from each registry that has it. Or of the
    user's own method at this place."""
    found = [_entry(kind, registry[name]) for kind, registry in REGISTRIES.items() if name in registry]
    if not found and (is_place(name) or name in methods.names()):
        found = [_entry("algorithm", methods.find(name, "algorithm")) | {"choice": name}]
    if not found:
        raise unknown("name", name, [*methods.names(), *(known for registry in REGISTRIES.values()
                                                         for known in registry)])
    return found


def _entry(kind: str, cls: Any) -> dict[str, Any]:
    summary, description = _documentation(cls)
    presets = {name: {key: fields.dump(value) for key, value in values.items()}
               for name, values in getattr(cls, "presets", {}).items()}
    return {"kind": kind, "name": cls.name, "summary": summary, "description": description,
            "fields": _fields(cls)} | ({"presets": presets} if presets else {}) | (
                _server(cls) | _citation(cls))


def _fields(cls: type) -> list[dict[str, Any]]:
    hints = typing.get_type_hints(cls)
    return [
        {"name": field.name, "type": field.type, "default": fields.dump(field.default), "meaning": field.doc,
         "search": None if field.search is None else str(field.search),
         "options": [_option(option) for option in typing.get_args(hints[field.name]) or (hints[field.name],)
                     if dataclasses.is_dataclass(option)]}
        for field in fields.describe(cls)
    ]


def _option(cls: Any) -> dict[str, Any]:
    """An alternative of a field's type that is a table with fields of its own."""
    return {"name": getattr(cls, "name", None), "summary": _documentation(cls)[0], "fields": _fields(cls)}


def _documentation(cls: type) -> tuple[str, str]:
    """The first line of a docstring, and the rest."""
    first, _, rest = (inspect.getdoc(cls) or "").partition("\n")
    return first, rest.strip("\n")


def _server(cls: Any) -> dict[str, str]:
    """What the server of a method needs to see, with its usual settings."""
    if not issubclass(cls, Algorithm):
        return {}
    needs = "sees the uploads one by one" if cls().needs_rows else "needs a mean of the uploads alone"
    return {"server": needs}


def _citation(cls: Any) -> dict[str, str]:
    return {"citation": cls.citation} if hasattr(cls, "citation") else {}


def as_toml(value: Any) -> str:
    """As in TOML, a table in one line."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {as_toml(item)}' for key, item in value.items())} }}"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").strip()

"""What there is to choose from: every registry entry, described from its class."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import tomli_w
from rich.console import Console
from rich.table import Table

from descant.algorithms import ALGORITHMS
from descant.core import fields
from descant.data import DATASETS, PARTITIONS
from descant.errors import unknown
from descant.models import MODELS

REGISTRIES: dict[str, Mapping[str, type]] = {
    "algorithm": ALGORITHMS, "dataset": DATASETS, "model": MODELS, "partition": PARTITIONS,
}
# the fields of an experiment that choose an entry
CHOSEN_BY = {"algorithm": "algorithm.name", "dataset": "data.dataset", "model": "model.name",
             "partition": "data.partition"}


def entries(kind: str) -> list[dict[str, str]]:
    """Name and one line about every entry of a registry."""
    return [
        {"name": name, "description": _documentation(cls)[0]} | _citation(cls)
        for name, cls in REGISTRIES[kind].items()
    ]


def find(name: str) -> list[dict[str, Any]]:
    """Everything about the entries of this name: one, or one from each registry that has it."""
    found = [_entry(kind, registry[name]) for kind, registry in REGISTRIES.items() if name in registry]
    if not found:
        raise unknown("name", name, [known for registry in REGISTRIES.values() for known in registry])
    return found


def show(console: Console, entry: dict[str, Any]) -> None:
    """Print an entry for people."""
    console.print(f"{entry['name']} ({entry['kind']})")
    console.print(entry["summary"])
    if entry["description"]:
        console.print(f"\n{entry['description']}")
    console.print(f"\nchoose it with  --set {CHOSEN_BY[entry['kind']]}={entry['name']}")
    section = CHOSEN_BY[entry["kind"]].partition(".")[0]
    if entry["fields"]:
        console.print(f"\nfields of [{section}]")
        _print_fields(console, entry["fields"])
    if entry.get("presets"):
        console.print(f"\npresets, as in {section}.preset = \"{next(iter(entry['presets']))}\"")
        for name, values in entry["presets"].items():
            words = ", ".join(f"{key} = {_written(item)}" for key, item in values.items())
            console.print(f"  {name}: {words}")
    for field in entry["fields"]:
        for option in field["options"]:
            choice = "" if option["name"] is None else f' = {{ name = "{option["name"]}" }}'
            console.print(f"\n{section}.{field['name']}{choice}: {option['summary']}")
            _print_fields(console, option["fields"])
    if "citation" in entry:
        console.print(f"\n{entry['citation']}")


def _entry(kind: str, cls: Any) -> dict[str, Any]:
    summary, description = _documentation(cls)
    return {"kind": kind, "name": cls.name, "summary": summary, "description": description,
            "fields": _fields(cls)} | _presets(cls) | _citation(cls)


def _presets(cls: Any) -> dict[str, Any]:
    found = {name: {key: fields.dump(value) for key, value in values.items()}
             for name, values in getattr(cls, "presets", {}).items()}
    return {"presets": found} if found else {}


def _fields(cls: type) -> list[dict[str, Any]]:
    hints = typing.get_type_hints(cls)
    return [
        {"name": field.name, "type": field.type, "default": fields.dump(field.default), "meaning": field.doc,
         "search": None if field.search is None else str(field.search),
         "options": [_option(option) for option in _tables(hints[field.name])]}
        for field in fields.describe(cls)
    ]


def _option(cls: type) -> dict[str, Any]:
    return {"name": getattr(cls, "name", None), "summary": _documentation(cls)[0], "fields": _fields(cls)}


def _tables(hint: Any) -> Iterator[Any]:
    """The alternatives of a type that are tables with fields of their own."""
    for option in typing.get_args(hint) or (hint,):
        if dataclasses.is_dataclass(option):
            yield option


def _documentation(cls: type) -> tuple[str, str]:
    """The first line of a docstring, and the rest."""
    first, _, rest = (inspect.getdoc(cls) or "").partition("\n")
    return first, rest.strip("\n")


def _citation(cls: Any) -> dict[str, str]:
    return {"citation": cls.citation} if hasattr(cls, "citation") else {}


def _print_fields(console: Console, rows: list[dict[str, Any]]) -> None:
    console.print(_table(rows))
    if tuned := [f"{row['name']} {row['search']}" for row in rows if row["search"] is not None]:
        console.print(f"  tuned (descant compare --tune): {', '.join(tuned)}")


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("  field", "default", "meaning", "type"):
        table.add_column(heading, no_wrap=heading == "  field")
    for row in rows:
        table.add_row(f"  {row['name']}", _default(row), row["meaning"], row["type"])
    return table


def _default(row: dict[str, Any]) -> str:
    """A field's default as it would be written in the file: of a table, only what differs from its own
    defaults."""
    value = row["default"]
    if isinstance(value, dict):
        [option] = [option for option in row["options"] if option["name"] == value.get("name")]
        usual = {field["name"]: field["default"] for field in option["fields"]}
        value = {key: item for key, item in value.items() if key not in usual or item != usual[key]}
    return "absent" if value is None else _written(value)


def _written(value: Any) -> str:
    """As in TOML, a table in one line."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_written(item)}' for key, item in value.items())} }}"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").strip()

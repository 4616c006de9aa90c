"""A first experiment for data that nobody has described yet: the schema of a folder's tables, and a file with
comments, to be read and corrected."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from descant.data import tables
from descant.data.datasets import DATASETS
from descant.data.folder import Folder
from descant.data.schema import Column, Kind, Schema
from descant.errors import UsageError, unknown

FEW = 20  # so many different values are categories or classes
WORDS = ("NA", "N/A", "nan", "NaN", "?", "null", "NULL", "None")  # that stand for a missing value in files


class Described(NamedTuple):
    """What the tables of a folder hold."""

    schema: Schema
    clients: int
    has_gaps: bool  # whether values are missing
    ignored: tuple[str, ...]  # columns of which most texts differ


def describe(folder: Path, target: str | None, group: str | None = None) -> Described:
    """The schema of a folder of tables: a column is a number, or a category if it has few texts."""
    files = Folder(str(folder), None).files()
    paths = [path for path in files.values() if path.suffix.lower() in tables.TABLES]
    if len(paths) < len(files):
        raise UsageError(f"{folder} holds NPZ files, which need no schema: set dataset to the folder, as "
                         "docs/own-data.md shows")
    cells: dict[str, list[str]] = {}
    for path in paths:
        with tables.opened(path, ()) as table:
            header = list(table.columns)
        for name in header:
            cells.setdefault(name, []).extend(tables.read_texts(path, name))
    for word, column in (("--target", target), ("--group", group)):
        if column is not None and column not in cells:
            raise unknown(f"column for {word}", column, cells)
    if target is None:
        raise UsageError(f"--target is missing: name the column to predict, one of {', '.join(cells)}")
    found = sorted({text for column in cells.values() for text in column} & {*WORDS})
    gaps = {"", *found}
    kinds = {name: _kind([text for text in texts if text not in gaps])
             for name, texts in cells.items() if name not in (target, group)}
    of_target = _kind([text for text in cells[target] if text not in gaps], classes=True)
    if of_target == "ignore":
        raise UsageError(f"the target {target!r} has many different texts: it must hold numbers, or at most "
                         f"{FEW} classes")
    classes = of_target if isinstance(of_target, tuple) else None
    schema = Schema(tuple(Column(name, kind) for name, kind in kinds.items()), target, classes, group,
                    tuple(found))
    if not schema.features:
        raise UsageError(f"{folder}: no column but the target holds numbers or a few texts")
    has_gaps = any(text in gaps for name, kind in kinds.items() if kind != "ignore" for text in cells[name])
    return Described(schema, len(files), has_gaps,
                     tuple(name for name, kind in kinds.items() if kind == "ignore"))


def _kind(texts: list[str], *, classes: bool = False) -> Kind:
    """What a column is by its texts. A target of few whole numbers is a class."""
    values = sorted(set(texts))
    are_numbers = all(re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text) for text in values)
    if are_numbers and not (classes and len(values) <= FEW and all(text.isdecimal() for text in values)):
        return "number"
    if len(values) > FEW or not values:
        return "ignore"
    return tuple(sorted(values, key=int)) if are_numbers else tuple(values)


def experiment_for(data: str, target: str | None, group: str | None = None, *, beside: Path) -> str:
    """The text of an experiment for a folder or a dataset; the file is to be in the directory `beside`."""
    if data in DATASETS:
        if target is not None or group is not None:
            raise UsageError(f"{data} is a dataset, whose target is known: leave --target and --group out")
        chosen = DATASETS[data]
        partition = "natural" if chosen.natural else "iid"
        return _text(f'dataset = "{data}"', [f'partition = "{partition}"'.ljust(24)
                     + "# who has which rows: `descant list partitions`"], "")
    folder = Path(data)
    if not folder.is_dir():
        raise UsageError(f"{data} is neither a folder nor a dataset; the datasets are {', '.join(DATASETS)}")
    found = describe(folder, target, group)
    place, here = folder.resolve(), beside.resolve()
    near = f"./{place.relative_to(here)}" if place.is_relative_to(here) else str(place)
    more = ['scale = "client"        # each client scales its columns by its own means and deviations']
    if found.has_gaps:
        more.append('impute = "client"       # a missing value becomes the mean of the client\'s column')
    dataset = tomli_w.dumps({"dataset": near}).strip()
    return _text(f"{dataset}  # one file for each of the {found.clients} clients", more, _schema(found))


def _schema(found: Described) -> str:
    table: dict[str, Any] = found.schema.dump()
    columns = table.pop("columns")
    lines = ["", "[schema]                # what the files hold: correct what was guessed wrongly",
             *(f"{name} = {_inline(value)}" for name, value in table.items()), "", "[schema.columns]"]
    for name, kind in columns.items():
        why = "  # many different texts: make a number or a few categories of it to use it" if (
            name in found.ignored) else ""
        lines.append(f"{_key(name)} = {_inline(kind)}{why}")
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _inline(name)


def _inline(value: Any) -> str:
    """A text or a list of texts on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(_inline, value))}]"
    return tomli_w.dumps({"v": value}).strip().removeprefix("v = ")


def _text(dataset: str, more: list[str], schema: str) -> str:
    lines = "\n".join([dataset, *more])
    return f"""\
# A first experiment, written by `descant init`. Run it, and compare methods:
#   descant run experiment.toml
#   descant compare experiment.toml --algorithms ditto,fedavg,pfedme --out results/first

[data]
{lines}
test = 0.25             # share of each client's rows that is kept for testing
validation = 0.2        # share of the rest, by which the best round is selected

[model]
name = "mclr"           # a linear model; `descant list models`, or "my_package.nets:make_model"

[algorithm]
name = "ditto"          # `descant list algorithms`, `descant show ditto`
lam = 0.3               # how strongly a personal model leans on the shared one; `descant advise` measures it

[train]
rounds = 30
cohort = "all"          # clients in a round, or a number
batch = 20
local = {{ steps = 20 }}  # a client's work in a round
seed = 0

[eval]
every = 2               # rounds between evaluations
{schema}"""

"""An experiment: the sections of a TOML file, every field typed."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from descant.algorithms import ALGORITHMS
from descant.core import fields
from descant.core.algorithm import Algorithm
from descant.core.import_object import marked
from descant.core.permit import Allowed, opened, ran
from descant.data import DATASETS, PARTITIONS, DataSpec, Schema
from descant.data.spec import anchored
from descant.engine.settings import Eval, Train
from descant.errors import UsageError, unknown
from descant.models import MODELS, ModelSpec
from descant.priors.solve import SOLVERS

SECTIONS = ("data", "model", "algorithm", "train", "eval")
CHOICES: dict[str, Mapping[str, Any]] = {  # the fields that name an entry of a registry
    "algorithm.name": ALGORITHMS, "model.name": MODELS,
    "data.dataset": DATASETS, "data.partition": PARTITIONS, "algorithm.solver.name": SOLVERS,
}


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Everything that determines a run."""

    data: DataSpec
    model: ModelSpec
    algorithm: Algorithm
    train: Train
    eval: Eval

    @classmethod
    def parse(cls, tables: Mapping[str, Any], allow: Allowed = ()) -> Experiment:
        """The experiment of the sections of a TOML file, without the [[algorithms]] of a comparison. Code
        that it names is imported only if its package is in `allow`, or in the user's settings."""
        permit = opened(allow)
        tables = {name: table for name, table in tables.items() if name != "algorithms"}
        for section, table in tables.items():
            if section not in (*SECTIONS, "schema"):
                raise unknown("section", section, (*SECTIONS, "schema"))
            if not isinstance(table, Mapping):
                raise UsageError(f"[{section}] must be a section, not {table!r}")
        part = {section: dict(_joined(tables).get(section, {})) for section in SECTIONS}
        return cls(
            DataSpec.parse(anchored(part["data"], Path.cwd())),
            ModelSpec.parse(part["model"], allow=permit),
            parse_algorithm(part["algorithm"], allow=permit),
            fields.parse(Train, part["train"], "train"),
            fields.parse(Eval, marked(part["eval"], permit), "eval"),
        )

    @classmethod
    def load(cls, path: Path, overrides: Iterable[str] = (), allow: Collection[str] = ()) -> Experiment:
        """The experiment of a file that the user runs, with `section.field=value` overrides. It may name code
        of the user's project, and of the packages in `allow`."""
        return cls.parse(override(read_toml(path), overrides), ran(allow))

    @property
    def schema(self) -> Schema | None:
        """What the files of the user's own data must hold."""
        return self.data.schema

    def dump(self) -> dict[str, Any]:
        """The sections with every field written out."""
        return {
            "data": self.data.dump(),
            "model": self.model.dump(),
            "algorithm": fields.dump(self.algorithm),
            "train": fields.dump(self.train),
            "eval": fields.dump(self.eval),
        }


def parse_algorithm(table: Mapping[str, Any], where: str = "algorithm", allow: Allowed = ()) -> Algorithm:
    """The method of a table with `name` and the method's fields. A `preset` fills in missing fields; a
    `label` is its name in a comparison. Code that the table names must be in `allow`."""
    if "name" not in table:
        raise UsageError(f"{where}.name is missing: known are {', '.join(sorted(ALGORITHMS))}")
    name = table["name"]
    if not isinstance(name, str) or name not in ALGORITHMS:
        raise unknown(f"{where}.name", name, ALGORITHMS)
    own = {key: value for key, value in table.items() if key not in ("name", "label", "preset")}
    if "groups" in own and "groups" not in _fields(ALGORITHMS[name]):
        able = ", ".join(sorted(key for key, method in ALGORITHMS.items() if "groups" in _fields(method)))
        raise UsageError(f"{where}.groups: {name} has no server mean of which every cluster of clients could "
                         f"have its own: {able} take groups, and cgpfl has its own K")
    if "preset" in table:
        own = _completed(own, ALGORITHMS[name], table["preset"], where)
    return fields.parse(ALGORITHMS[name], marked(own, opened(allow)), where)


def _fields(method: type[Algorithm]) -> set[str]:
    return {field.name for field in dataclasses.fields(method)}


def _completed(own: dict[str, Any], method: type[Algorithm], preset: Any, where: str) -> dict[str, Any]:
    """A method's fields, completed by a preset. A table without a name changes fields of the preset's
    value."""
    if not isinstance(preset, str) or preset not in method.presets:
        raise unknown(f"{where}.preset", preset, method.presets)
    plain = {key: fields.dump(value) for key, value in method.presets[preset].items()}
    inner = {key: {**plain[key], **value} for key, value in own.items()
             if isinstance(value, Mapping) and "name" not in value and isinstance(plain.get(key), Mapping)}
    return plain | own | inner


#: What `descant run` does without a file: pFedMe on the digits, 20 clients of 2 classes.
DEMO: dict[str, dict[str, Any]] = {
    "data": {"dataset": "digits", "partition": "classes", "clients": 20, "classes_per_client": 2},
    "model": {"name": "mclr"},
    "algorithm": {"name": "pfedme", "lam": 15.0},
    "train": {"rounds": 100, "cohort": 10, "batch": 20, "local": {"steps": 20}},
    "eval": {"every": 5},
}


def read_toml(path: Path) -> dict[str, Any]:
    """The sections of a file; the paths in it are relative to its own directory."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise UsageError(f"cannot read {path}: {reason}") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    data = tables.get("data")
    return tables | {"data": anchored(data, path.parent)} if isinstance(data, Mapping) else tables


def _joined(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The sections with [schema] as what it is short for, [data.schema]."""
    rest = {name: table for name, table in tables.items() if name != "schema"}
    data = tables.get("data", {})
    if "schema" not in tables or not isinstance(data, Mapping):
        return rest
    if "schema" in data:
        raise UsageError("[schema] and [data.schema] are the same: leave one of them out")
    return rest | {"data": {**data, "schema": tables["schema"]}}


def override(tables: Mapping[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """The sections with `section.field=value` settings; a value is TOML, or else text. Another method, model,
    dataset or partition drops the fields of the one that it replaces."""
    changed: dict[str, Any] = {name: dict(t) if isinstance(t, Mapping) else t
                               for name, t in _joined(tables).items()}
    for setting in sorted(settings, key=lambda setting: setting.partition("=")[0].strip() not in CHOICES):
        path, equals, text = setting.partition("=")
        path = path.strip()
        if not equals or "." not in path or not all(path.split(".")):
            raise UsageError(f"--set {setting!r} must read section.field=value, such as algorithm.lam=30")
        if path.startswith("schema."):
            path = f"data.{path}"
        try:
            table, last = fields.table_of(changed, path), path.rpartition(".")[2]
        except UsageError as error:
            raise UsageError(f"--set {setting!r}: {error}") from None
        value, before = fields.written(text), table.get(last)
        if path == "model.name" and value != before:
            table = changed["model"] = {k: v for k, v in table.items() if k == "loss"}  # of any model
        elif (old := CHOICES.get(path, {}).get(str(before))) is not None and value != before:
            for field in (*(described.name for described in fields.describe(old)), "preset"):
                table.pop(field, None)
        elif path == "data.dataset" and str(value) in DATASETS:
            table.pop("schema", None)  # of the folder that it replaces
        table[last] = value
    return changed


def completed(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The identity of a run with the defaults of fields that its method did not have when it was written."""
    config = identity.get("config", {})
    try:
        algorithm = fields.dump(parse_algorithm(config["algorithm"]))
    except (KeyError, UsageError):  # an object of a user's class, or a value that is not allowed any more
        return dict(identity)
    return {**identity, "config": {**config, "algorithm": json.loads(json.dumps(algorithm))}}


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Where two tables differ, as "algorithm.lam: 15.0 became 30.0"."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = sorted(old.keys() | new.keys())
        return [line for key in keys
                for line in differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)]
    return [] if old == new else [f"{path}: {old!r} became {new!r}"]

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
from descant.core.import_object import Named, marked
from descant.core.permit import Allowed, opened, ran
from descant.core.privacy.settings import Privacy
from descant.data import DATASETS, PARTITIONS, DataSpec
from descant.data.spec import anchored
from descant.engine.attack import Attack
from descant.engine.robust import Robust
from descant.engine.settings import Eval, Train
from descant.errors import UsageError, unknown
from descant.experiment import methods
from descant.models import MODELS, OF_ANY_MODEL, ModelSpec
from descant.priors.solve import SOLVERS

SECTIONS = ("data", "model", "algorithm", "train", "eval", "privacy", "robust", "attack")
OPTIONAL: dict[str, type[Any]] = {  # absent: nothing of it is done
    "privacy": Privacy, "robust": Robust, "attack": Attack}
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
    privacy: Privacy | None = None  # absent: nothing is protected
    robust: Robust | None = None
    attack: Attack | None = None

    @classmethod
    def parse(cls, tables: Mapping[str, Any], allow: Allowed = ()) -> Experiment:
        """The experiment of the sections of a TOML file, without the [[algorithms]] and the [paper] of a
        comparison. Code that it names is imported only if its package is in `allow`, or in the user's
        settings."""
        permit = opened(allow)
        tables = {name: table for name, table in tables.items() if name not in ("algorithms", "paper")}
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
            **{name: fields.parse(kind, part[name], name) for name, kind in OPTIONAL.items()
               if name in tables},
        )

    @classmethod
    def load(cls, path: Path, overrides: Iterable[str] = (), allow: Collection[str] = ()) -> Experiment:
        """The experiment of a file that the user runs, with `section.field=value` overrides. It may name code
        of the user's project, and of the packages in `allow`."""
        return cls.parse(override(read_toml(path), overrides), ran(allow))

    def dump(self) -> dict[str, Any]:
        """The sections with every field written out."""
        return {"data": self.data.dump(), "model": self.model.dump()} | dumped(self)


def dumped(settings: Any) -> dict[str, Any]:
    """The sections besides [data] and [model] of an experiment or a setup, without those that are absent."""
    there = {name: getattr(settings, name) for name in SECTIONS[2:]}
    return {name: fields.dump(value) for name, value in there.items() if value is not None}


def parse_algorithm(table: Mapping[str, Any], where: str = "algorithm", allow: Allowed = ()) -> Algorithm:
    """The method of a table with `name` and the method's fields. A `preset` fills in missing fields; a
    `label` is its name in a comparison. Code that the table names must be in `allow`."""
    if "name" not in table:
        raise UsageError(f"{where}.name is missing: known are {', '.join(sorted(methods.names()))}")
    permit, given = opened(allow), table["name"]
    is_run = permit.project or (isinstance(given, Named) and given.permit.project)
    name = marked(given, permit)
    if isinstance(name, Named) and not name.permit.covers(name) and not is_run:  # merely opened
        return methods.NotImported({key: value for key, value in table.items() if key != "label"},
                                   table.get("label"))
    method = methods.find(name, f"{where}.name")
    own = {key: value for key, value in table.items() if key not in ("name", "label", "preset")}
    if "groups" in own and "groups" not in _fields(method):
        able = ", ".join(sorted(key for key, other in ALGORITHMS.items() if "groups" in _fields(other)))
        raise UsageError(f"{where}.groups: {method.name} has no server mean of which every cluster of "
                         f"clients could have its own: {able} take groups, and cgpfl has its own K")
    if "preset" in table:
        own = _completed(own, method, table["preset"], where)
    return fields.parse(method, marked(own, permit), where)


def _fields(method: type[Algorithm]) -> set[str]:
    return {field.name for field in dataclasses.fields(method)}


def _completed(own: dict[str, Any], method: type[Algorithm], preset: Any, where: str) -> dict[str, Any]:
    """A method's fields over those of a preset; a table without a name changes fields of the preset's."""
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
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits, tables in tables
        raise UsageError(f"{path} is not valid TOML: {error}") from None
    try:
        fields.require_int64(tables, "")
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    data, train = tables.get("data"), tables.get("train")
    if isinstance(train, Mapping) and isinstance(train.get("availability"), str):
        tables["train"] = {**train, "availability": str(path.parent.absolute() / train["availability"])}
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


def override(tables: Mapping[str, Any], settings: Iterable[str] | Mapping[str, Any]) -> dict[str, Any]:
    """The sections with `section.field=value` settings; a value is TOML, or else text; or, in Python, with
    those of a mapping from section.field to value. Another method, model, dataset or partition drops the
    fields of the one that it replaces."""
    if isinstance(settings, str) or not isinstance(settings, Iterable):
        raise UsageError('set must be a mapping such as {"train.rounds": 20}, or a list of texts such as '
                         f'["train.rounds=20"], not {settings!r}')
    changed: dict[str, Any] = {name: dict(t) if isinstance(t, Mapping) else t
                               for name, t in _joined(tables).items()}
    given = [*settings.items()] if isinstance(settings, Mapping) else [_setting(text) for text in settings]
    for path, value in sorted(given, key=lambda pair: pair[0] not in CHOICES):
        setting = f"{path}={value}"
        if "." not in path or not all(path.split(".")):
            raise UsageError(f"--set {setting!r} must read section.field=value, such as algorithm.lam=30")
        if path.startswith("schema."):
            path = f"data.{path}"
        try:
            table, last = fields.table_of(changed, path), path.rpartition(".")[2]
        except UsageError as error:
            raise UsageError(f"--set {setting!r}: {error}") from None
        before = table.get(last)
        if path == "model.name" and value != before:
            table = changed["model"] = {k: v for k, v in table.items() if k in OF_ANY_MODEL}
        elif path == "algorithm.name" and str(before) not in (*ALGORITHMS, str(None)) and value != before:
            table = changed["algorithm"] = {k: v for k, v in table.items() if k == "label"}
        elif (old := CHOICES.get(path, {}).get(str(before))) is not None and value != before:
            for field in (*(described.name for described in fields.describe(old)), "preset"):
                table.pop(field, None)
        elif path == "data.dataset" and str(value) in DATASETS:
            table.pop("schema", None)  # of the folder that it replaces
        table[last] = value
    return changed


def _setting(text: str) -> tuple[str, Any]:
    path, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--set {text!r} must read section.field=value, such as algorithm.lam=30")
    return path.strip(), fields.written(value)


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

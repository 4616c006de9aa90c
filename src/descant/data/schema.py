"""The schema of a table: described once, shared by all clients, kept with the model."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from descant.data.tables import ENDINGS, Arrays, Block, opened, read_npz, read_npz_rows, single
from descant.errors import UsageError, unknown

NAMED = 10  # columns that do not fit and are named; the others are counted
COMPARED = 1000  # names among which a near one is looked for

Kind: TypeAlias = Literal["number", "ignore"] | tuple[str, ...]  # the last one: the categories


class Column(NamedTuple):
    name: str
    kind: Kind

    @property
    def features(self) -> tuple[str, ...]:
        """Its features in x: a number stays one, categories are one-hot encoded."""
        if isinstance(self.kind, tuple):
            return tuple(f"{self.name}={category}" for category in self.kind)
        return (self.name,) if self.kind == "number" else ()


@dataclass(frozen=True)
class Schema:
    """The columns of a table in the order that a model sees them, and the column to predict.

    Files may have the columns in any order, and may lack those to ignore. `classes` are the values of the
    target in the order of their numbers; None: the target is a real number.
    """

    columns: tuple[Column, ...]
    target: str
    classes: tuple[str, ...] | None = None
    group: str | None = None  # a column of ids, such as a patient's: rows with the same id stay in one split
    missing: tuple[str, ...] = ()  # what stands in a cell whose value is missing, besides nothing

    @classmethod
    def parse(cls, table: Any, where: str = "schema") -> Schema:
        """The schema that a section of a TOML file describes; `where` names it in errors."""
        if not isinstance(table, Mapping):
            raise UsageError(f"[{where}] must be a section, not {table!r}")
        known = [field.name for field in fields(cls)]
        for key in table:
            if key not in known:
                raise unknown(f"{where} field", key, known)
        columns = table.get("columns")
        if not isinstance(columns, Mapping) or not columns:
            raise UsageError(f'{where}.columns must be a section that gives each column a type, such as '
                             f'age = "number", not {columns!r}')
        if "target" not in table:
            raise UsageError(f"{where}.target is missing: name the column to predict")
        [target] = _words([table["target"]], f"{where}.target")
        if target in columns:
            raise UsageError(f"{where}.columns.{target} is also the target: leave it out of the columns")
        group = _words([table["group"]], f"{where}.group")[0] if "group" in table else None
        if group is not None and (group in columns or group == target):
            raise UsageError(f"{where}.group = {group!r} is an id, and neither a feature nor the target: "
                             "leave it out of the columns, or name another column")
        names = _words(list(columns), f"{where}.columns")
        kinds = [_kind(columns[name], f"{where}.columns.{name}") for name in names]
        schema = cls(tuple(map(Column, names, kinds)), target,
                     _list(table["classes"], f"{where}.classes", 2) if "classes" in table else None,
                     group, _list(table["missing"], f"{where}.missing", 1) if "missing" in table else ())
        if not schema.features:
            raise UsageError(f"{where}.columns are all ignored: at least one must be a number or a category")
        return schema

    def dump(self) -> dict[str, Any]:
        """The section that `parse` makes this schema of."""
        columns = {name: list(kind) if isinstance(kind, tuple) else kind for name, kind in self.columns}
        given = {"classes": self.classes and list(self.classes), "group": self.group,
                 "missing": list(self.missing) or None}
        return {"target": self.target, **{name: value for name, value in given.items() if value is not None},
                "columns": columns}

    def to_json(self) -> str:
        """One line of JSON. The columns are a list there: the order of a JSON object means nothing."""
        return json.dumps(self.dump() | {"columns": [list(column) for column in self.columns]})

    @classmethod
    def from_json(cls, text: str) -> Schema:
        try:
            table = json.loads(text)
            table["columns"] = dict(table["columns"])
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"this is not a schema in JSON: {error!r}") from None
        return cls.parse(table)

    def fingerprint(self) -> str:
        """A hash of everything in the schema, the order of the columns included."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the columns of x."""
        return tuple(feature for column in self.columns for feature in column.features)

    def read(self, path: str | Path) -> tuple[np.ndarray, np.ndarray]:
        """The samples of a CSV, Parquet or NPZ file: x, float32 [rows, features], and y, class numbers
        (int64) or real targets (float32). An empty cell is NaN in x, and refused in y."""
        return self.read_arrays(path)[:2]

    def read_arrays(self, path: str | Path) -> Arrays:
        """As `read`, with the groups, if there are any; a row without an id is a group of its own."""
        path = Path(path)
        if path.suffix.lower() == ".npz":
            return self.check(read_npz(path), f"{path}: ")
        x, y, group = self._table(path, [self.target, *([] if self.group is None else [self.group])])
        assert y is not None
        return Arrays(x, y, group)

    def read_rows(self, path: str | Path, besides: Sequence[str] = ()
                  ) -> tuple[np.ndarray, np.ndarray | None]:
        """As `read`, for rows without a known target: y is None if the file has none. The columns `besides`
        may be there, and are not read."""
        path = Path(path)
        if path.suffix.lower() == ".npz":
            x, y = read_npz_rows(path)
            known = np.zeros(len(x), np.int64) if y is None else y
            arrays = self.check(Arrays(x, known), f"{path}: ")
            return arrays.x, None if y is None else arrays.y
        return self._table(path, [], besides)[:2]

    def _table(self, path: Path, needed: list[str], besides: Sequence[str] = ()
               ) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """The samples of a table, and the targets and groups if it has them; `needed`: required columns
        besides the features."""
        if path.suffix.lower() not in ENDINGS:
            raise UsageError(f"{path} must end in one of {', '.join(ENDINGS)}")
        features = [column.name for column in self.columns if column.features]
        ids = [] if self.group is None else [self.group]
        with opened(path, [*features, self.target, *ids], self.missing) as table:
            extra = set(besides).difference(features)
            self._check_header([name for name in table.columns if name not in extra], [*features, *needed],
                               path)
            has_target, has_ids = self.target in table.columns, self.group in table.columns
            blocks = [(self._samples(block), self._targets(block) if has_target else None,
                       block.texts(self.group) if self.group is not None and has_ids else [])
                      for block in table.blocks]
        if not blocks:
            raise UsageError(f"{path} has a header but no rows: add some, or remove the file")
        x = np.concatenate([x for x, _, _ in blocks])
        y = np.concatenate([y for _, y, _ in blocks if y is not None]) if has_target else None
        return x, y, _ids([text for _, _, texts in blocks for text in texts]) if has_ids else None

    def check(self, arrays: Arrays, where: str) -> Arrays:
        """Arrays that are already encoded, if they fit; `where` begins the messages."""
        x, y = arrays.x, arrays.y
        if x.shape[1:] != (len(self.features),):
            raise UsageError(f"{where}x has the shape {x.shape}, but the schema has {len(self.features)} "
                             f"features: {', '.join(self.features)}")
        if y.ndim != 1:
            raise UsageError(f"{where}y has the shape {y.shape}: the schema's target {self.target!r} is one "
                             "number for each row")
        if self.classes is None:
            return arrays._replace(x=single(x, f"{where}x"), y=single(y, f"{where}y"))
        if y.dtype != np.int64 or y.max() >= len(self.classes):
            raise UsageError(f"{where}y must hold the class numbers 0 to {len(self.classes) - 1} (of the "
                             f"schema's classes {', '.join(self.classes)}), not {y.max()} of type {y.dtype}")
        return arrays._replace(x=single(x, f"{where}x"))

    def _check_header(self, found: list[str], needed: list[str], path: Path) -> None:
        for name, count in Counter(found).items():
            if count > 1:
                raise UsageError(f"{path} has the column {name!r} {count} times: keep one")
        known = dict.fromkeys([*(column.name for column in self.columns), self.target, *(
            [] if self.group is None else [self.group])])
        there = set(found)
        needs_target = self.target in needed  # else a model is used, and its schema is fixed
        extra = [name for name in found if name not in known]
        absent = [name for name in needed if name not in there]
        # the first ones are named, with the nearest name of the other side: looking for it takes long
        problems = [f"it has no column {name!r}{_hint(name, extra)}" for name in absent[:NAMED]]
        problems += [f"its column {name!r} is not in the schema{_hint(name, list(known))}" if name else
                     f"its column {found.index(name) + 1} has no name (if it is an index that pandas wrote, "
                     "write the file with index=False)" for name in extra[:NAMED]]
        if problems:
            if more := len(absent) + len(extra) - len(problems):
                problems.append(f"and {more:,} more")
            where = ('the file or in [schema.columns], where a column to leave out is "ignore"'
                     if needs_target else "the file, and leave other columns out")
            raise UsageError(f"{path} does not fit the schema: {'; '.join(problems)}. Correct the names in "
                             f"{where}")

    def _samples(self, block: Block) -> np.ndarray:
        parts = [_one_hot(block, column.name, column.kind) if isinstance(column.kind, tuple)
                 else _numbers(block, column.name)[:, None]
                 for column in self.columns if column.features]
        return np.concatenate(parts, axis=1)

    def _targets(self, block: Block) -> np.ndarray:
        if self.classes is None:
            values = _numbers(block, self.target)
            missing = np.isnan(values)
        else:
            values = _codes(block, self.target, self.classes, "class")
            missing = values == _MISSING
        for row in np.flatnonzero(missing):
            raise UsageError(f"{block.cell(int(row), self.target)}: the target is missing: fill it in, or "
                             "leave the row out")
        return values


def _ids(texts: list[str | None]) -> np.ndarray:
    """Texts as ids; a row without one is alone."""
    number = {text: k for k, text in enumerate(dict.fromkeys(texts))}
    return np.array([len(number) + k if text is None else number[text] for k, text in enumerate(texts)])


_MISSING = -1  # in place of the number of a category or class


def _numbers(block: Block, column: str) -> np.ndarray:
    exact = block.numbers(column)
    with np.errstate(over="ignore"):  # refused below
        values: np.ndarray = exact.astype(np.float32)
    for row in np.flatnonzero(np.isinf(values)):
        raise UsageError(f"{block.cell(int(row), column)}: {exact[row]:g} is too large: correct it, or leave "
                         "the cell empty if the value is missing")
    return values


def _one_hot(block: Block, column: str, categories: tuple[str, ...]) -> np.ndarray:
    codes = _codes(block, column, categories, "category")
    rows = np.zeros((len(codes), len(categories)), np.float32)
    rows[np.arange(len(codes)), codes] = 1
    rows[codes == _MISSING] = np.nan
    return rows


def _codes(block: Block, column: str, names: tuple[str, ...], noun: str) -> np.ndarray:
    """For each row the number of the name in its cell, or `_MISSING`."""
    number: dict[str | None, int] = {name: k for k, name in enumerate(names)}
    number[None] = _MISSING
    texts = block.texts(column)
    try:
        return np.array([number[text] for text in texts], np.int64)
    except KeyError:
        row = next(row for row, text in enumerate(texts) if text not in number)
        raise UsageError(f"{block.cell(row, column)}: {unknown(noun, texts[row], names)}") from None


def _kind(value: Any, where: str) -> Kind:
    if isinstance(value, list | tuple):
        return _list(value, where, 1)
    if value in ("number", "ignore"):
        kind: Kind = value
        return kind
    raise UsageError(f'{where} must be "number", "ignore" or the list of its categories, not {value!r}'
                     f"{_hint(str(value), ['number', 'ignore'])}")


def _list(values: Any, where: str, least: int) -> tuple[str, ...]:
    if not isinstance(values, list | tuple) or len(values) < least:
        raise UsageError(f"{where} must be a list of at least {least} names, not {values!r}")
    return _words(values, where)


def _words(values: Sequence[Any], where: str) -> tuple[str, ...]:
    """Names as they can occur in a file, which ignores space around them."""
    for value in values:
        if not isinstance(value, str):
            raise UsageError(f"{where} must be text, not {value!r}: put it in quotes")
        if not value or value != value.strip():
            raise UsageError(f"{where}: the name {value!r} must not be empty, nor begin or end with space")
    for value, count in Counter(values).items():
        if count > 1:
            raise UsageError(f"{where} has {value!r} twice: keep one")
    return tuple(values)


def _hint(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known[:COMPARED], n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""

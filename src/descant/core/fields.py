"""Hyper-parameters as dataclass fields with a meaning and a range.

Everything that a user can set is a frozen dataclass whose fields are made by `hyper`: values are checked when
the object is made, TOML tables become objects (`parse`) and back (`dump`), and `descant show` prints the
fields (`describe`).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import numbers
import operator
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Self, TypeVar, Union, get_args, get_origin

from descant.core.ranges import Range
from descant.errors import UsageError, one, unknown

T = TypeVar("T")
_hints: Callable[[Any], dict[str, Any]] = functools.cache(typing.get_type_hints)


def hyper(
    default: Any,
    doc: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    search: Range | None = None,
    derived: Callable[[Any], Any] | None = None,
) -> Any:
    """A field with a default, a meaning, and bounds: `ge` (value >= ge), `gt`, `le`, `lt`. `search` is
    where tuning looks for a better value; a field without it is not tuned. A field that is absent (None) may
    be `derived` from the others of the object, once these are checked; from then on it has that value."""
    bounds = {"ge": ge, "gt": gt, "le": le, "lt": lt}
    metadata = {"doc": doc, "bounds": {k: v for k, v in bounds.items() if v is not None}, "search": search,
                "derived": derived}
    return dataclasses.field(default=default, metadata=metadata)


class Checked:
    """Base of dataclasses whose fields are checked when the object is made."""

    def __new__(cls, *given: Any, **named: Any) -> Self:
        kind: type = cls
        if given or named:  # without, it may be that a copy is made
            try:
                _signature(kind).bind(None, *given, **named)
            except TypeError as error:
                raise _misused(cls, named, str(error)) from None
        return super().__new__(cls)

    def __post_init__(self) -> None:
        hints = _hints(type(self))
        absent = [field for field in dataclasses.fields(self)  # type: ignore[arg-type]
                  if field.metadata.get("derived") is not None and getattr(self, field.name) is None]
        for field in (*(f for f in dataclasses.fields(self) if f not in absent), *absent):  # type: ignore[arg-type]
            path = f"{_title(type(self))}.{field.name}"
            if field in absent:
                object.__setattr__(self, field.name, field.metadata["derived"](self))
            value = coerce(getattr(self, field.name), hints[field.name], path)
            object.__setattr__(self, field.name, value)
            _check_bounds(value, field.metadata.get("bounds", {}), path)


@functools.cache
def _signature(cls: type) -> inspect.Signature:
    return inspect.signature(cls.__init__)  # type: ignore[misc]


def _misused(cls: type, named: Mapping[str, Any], error: str) -> UsageError:
    """What is wrong with the arguments of a call, in the words of fields."""
    known = [name for name in _signature(cls).parameters if name != "self"]
    for key, value in named.items():
        if key in known:
            continue
        for owner in known:  # such as `lr`, which is the solver's
            part = getattr(cls, owner, None)
            if dataclasses.is_dataclass(part) and key in {field.name for field in dataclasses.fields(part)}:
                return UsageError(f"{cls.__name__} has no field {key!r}: it is one of its {owner}, so write "
                                  f"{cls.__name__}({owner}={type(part).__name__}({key}={value!r}))")
        return unknown(f"{cls.__name__} field", key, known)
    return UsageError(f"{cls.__name__}({', '.join(known)}): {error}; give fields by their names")


class FieldInfo(NamedTuple):
    name: str
    type: str
    default: Any
    doc: str
    search: Range | None  # where tuning looks for a better value


def describe(cls: type) -> list[FieldInfo]:
    """Name, type, default, meaning and range of every field of a dataclass, in order."""
    hints = _hints(cls)
    return [
        FieldInfo(f.name, type_name(hints[f.name]), f.default, f.metadata.get("doc", ""),
                  f.metadata.get("search"))
        for f in dataclasses.fields(cls)
    ]


def parse(cls: type[T], table: Mapping[str, Any], where: str) -> T:
    """The object of dataclass `cls` that a TOML table describes; `where` names it in errors."""
    hints = _hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in table:
        if key not in known:
            raise unknown(f"{where} field", key, known)
    missing = dataclasses.MISSING
    for name, field in known.items():
        if name not in table and field.default is missing and field.default_factory is missing:
            raise UsageError(f"{where}.{name} is missing: it has no default")
    values = {key: coerce(_completed(value, known[key].default), hints[key], f"{where}.{key}")
              for key, value in table.items()}
    for name, field in known.items():
        if name in values:  # told by the name it has in the file
            _check_bounds(values[name], field.metadata.get("bounds", {}), f"{where}.{name}")
    return cls(**values)


def _completed(value: Any, default: Any) -> Any:
    """A table without a name changes some fields of the default: `solver.lr = 0.1` does not change the
    optimizer."""
    if not isinstance(value, Mapping) or "name" in value or not dataclasses.is_dataclass(default):
        return value
    return {**dump(default), **value} if _is_named(type(default)) else value


def dump(value: Any) -> Any:
    """The plain TOML value of an object: a table for a dataclass, without its absent fields."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own: Callable[[], dict[str, Any]] | None = getattr(value, "as_table", None)
        return as_table(value) if own is None else own()
    if isinstance(value, list | tuple):
        return [dump(item) for item in value]
    return value


def as_table(value: Any) -> dict[str, Any]:
    """The table of a dataclass. One whose table is another has a function of this name."""
    name = {"name": type(value).name} if _is_named(type(value)) else {}
    items = ((f.name, dump(getattr(value, f.name))) for f in dataclasses.fields(value))
    return name | {key: item for key, item in items if item is not None}


def foreign(cls: type, table: Mapping[str, Any]) -> str | None:
    """The field whose dumped value was an object of a user's class, which no table can make: its type is an
    abstract base class, and its name not one of descant's."""
    for field, hint in _hints(cls).items():
        options = _options(hint)
        value = table.get(field)
        known = {_title(option) for option in options if dataclasses.is_dataclass(option)}
        if any(inspect.isabstract(option) for option in options) and isinstance(value, Mapping) \
                and value.get("name") not in known:
            return field
    return None


# -- a field by its dotted name: "solver.lr" -----------------------------------------------------------


def dotted(table: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a table and of the tables in it."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= {f"{key}.{name}": inner for name, inner in dotted(value).items()} if isinstance(
            value, Mapping) else {key: value}
    return found


def table_of(tables: dict[str, Any], name: str) -> dict[str, Any]:
    """The table that holds a field, made where it is missing; the tables on the way to it are copied."""
    for key in name.split(".")[:-1]:
        inner = tables.get(key, {})
        if not isinstance(inner, Mapping):
            raise UsageError(f"{name}: {key} is not a section")
        tables[key] = tables = dict(inner)
    return tables


def put(tables: dict[str, Any], name: str, value: Any) -> None:
    """Give a field its value, in the table that holds it."""
    table_of(tables, name)[name.rpartition(".")[2]] = value


def written(text: str) -> Any:
    """A value on a command line: as in TOML, and what is not TOML is text."""
    try:
        value = tomllib.loads(f"value = {text.strip()}")["value"]
    except (ValueError, RecursionError):
        return text.strip()
    require_int64(value, f"{text.strip():.40}")
    return value


def value_of(part: Any, name: str) -> Any:
    """The value of a field of an object, or of a table."""
    for key in name.split("."):
        part = part[key] if isinstance(part, Mapping) else getattr(part, key)
    return part


def replaced(part: T, values: Mapping[str, Any]) -> T:
    """The object with other values of some fields."""
    known = [field.name for field in dataclasses.fields(part)]  # type: ignore[arg-type]
    own: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        head, dot, rest = name.partition(".")
        if head not in known or (dot and not dataclasses.is_dataclass(getattr(part, head))):
            raise unknown("field", name, known)
        if dot:
            inner.setdefault(head, {})[rest] = value
        else:
            own[head] = value
    own |= {head: replaced(getattr(part, head), rest) for head, rest in inner.items()}
    return dataclasses.replace(part, **own)  # type: ignore[type-var]


# -- types -----------------------------------------------------------------------------------------------


def coerce(value: Any, hint: Any, path: str) -> Any:
    """`value` as the type `hint`, or a UsageError that names the field."""
    options = _options(hint)
    for option in options:
        found, result = _fit(value, option, path)
        if found:
            return result
    tables = [option for option in options if dataclasses.is_dataclass(option)]
    if tables and isinstance(value, Mapping):
        raise unknown(f"{path}.name", value.get("name"), [_title(option) for option in tables])
    if all(get_origin(option) is Literal for option in options):
        raise unknown(path, value, [str(a) for option in options for a in get_args(option)])
    is_name = isinstance(value, str) and value in [_title(option) for option in tables if _is_named(option)]
    remedy = f': write {{ name = "{value}" }}, in Python {{"name": "{value}"}}' if is_name else ""
    is_plain = isinstance(value, str | numbers.Number | list | tuple | Mapping | None)
    given = repr(value) if is_plain else one(value)
    raise UsageError(f"{path} must be {type_name(hint)}, not {given}{remedy}")


def _fit(value: Any, option: Any, path: str) -> tuple[bool, Any]:
    """Whether `value` fits one alternative of a type, and what it becomes."""
    if get_origin(option) is Literal:
        return value in get_args(option) and not isinstance(value, bool), value
    if get_origin(option) is tuple and isinstance(value, list | tuple):
        item = get_args(option)[0]
        return True, tuple(coerce(v, item, f"{path}[{k}]") for k, v in enumerate(value))
    if dataclasses.is_dataclass(option) and isinstance(option, type):
        if isinstance(value, option):
            return True, value
        if not isinstance(value, Mapping):
            return False, value
        if not _is_named(option):
            return True, parse(option, value, path)
        named: Any = option
        if value.get("name", named.name) == named.name:
            rest = {k: v for k, v in value.items() if k != "name"}
            return True, parse(option, rest, path)
        return False, value
    if option in (float, int):  # numpy's numbers are numbers too; True is none
        kind: Any = numbers.Real if option is float else numbers.Integral
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        return is_number, _number(value, option, path) if is_number else value
    return isinstance(option, type) and isinstance(value, option), value


def _number(value: Any, option: Any, path: str) -> Any:
    """A number as a type; one that no machine's number holds is an error."""
    try:
        number = option(value)
    except OverflowError:
        raise UsageError(f"{path} is too large for a number") from None
    if option is int:
        require_int64(number, path)
    return number


def require_int64(value: Any, path: str) -> None:
    """Refuse whole numbers beyond 64 bits, alone or in tables and lists, as TOML does not have them."""
    if isinstance(value, int):
        if not -2**63 <= value < 2**63:
            raise UsageError(f"{path} is a whole number beyond 64 bits: from -2^63 to 2^63 - 1 are allowed")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            require_int64(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for k, item in enumerate(value):
            require_int64(item, f"{path}[{k}]")


def type_name(hint: Any) -> str:
    """How a type is written for people: `an integer or "full"`."""
    words = []
    for option in _options(hint):
        if get_origin(option) is Literal:
            words += [f'"{a}"' if isinstance(a, str) else str(a) for a in get_args(option)]
        elif get_origin(option) is tuple:
            one = type_name(get_args(option)[0])
            words.append("a list of names" if one == "text" else
                         f"a list of {one.removeprefix('an ').removeprefix('a ')}s")
        elif option is type(None):
            words.append("absent")
        elif dataclasses.is_dataclass(option):
            words.append(f"{{ {_title(option)} }}" if _is_named(option) else " or ".join(
                f"{{ {field.name} = ... }}" for field in dataclasses.fields(option)))
        else:
            words.append({float: "a number", int: "an integer", str: "text", bool: "true or false"}.get(
                option, getattr(option, "__name__", str(option))))
    return " or ".join(words)


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _is_named(cls: Any) -> bool:
    """Whether the class is one of several told apart by a `name` that is not a field."""
    return isinstance(getattr(cls, "name", None), str) and "name" not in {
        f.name for f in dataclasses.fields(cls)}


def _title(cls: Any) -> str:
    title = getattr(cls, "name", None)
    return title if isinstance(title, str) else str(cls.__name__).lower()


def _check_bounds(value: Any, bounds: Mapping[str, float], path: str) -> None:
    if isinstance(value, tuple):
        for k, item in enumerate(value):
            _check_bounds(item, bounds, f"{path}[{k}]")
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    if not math.isfinite(value):
        raise UsageError(f"{path} must be a finite number, not {value}")
    for kind, bound in bounds.items():
        holds, words = _RULES[kind]
        if not holds(value, bound):
            raise UsageError(f"{path} must be {words} {bound:g}, not {value:g}")


_RULES = {
    "ge": (operator.ge, "at least"),
    "gt": (operator.gt, "greater than"),
    "le": (operator.le, "at most"),
    "lt": (operator.lt, "less than"),
}

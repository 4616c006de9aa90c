"""Which methods are compared: a list on the command line or in the file, with settings and grids.

`fedavg,ditto:lam=0.5,pfedbred:strategy=mh,lam=[15,30,60]` names three methods, the last as a grid. In a file
a grid is `grid = { lam = [15, 30, 60] }`, because some fields hold lists.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from descant.algorithms import FedAvg, LocalTrain
from descant.core import fields
from descant.core.algorithm import Algorithm
from descant.core.import_object import is_place, marked
from descant.core.permit import NOTHING, Permit
from descant.engine.settings import Train
from descant.errors import UsageError, unknown
from descant.experiment import methods
from descant.experiment.config import parse_algorithm

LOCAL, TUNED = "localtrain", "fedavg + fine-tuning"  # what is added, by label
FINE_TUNING = 20  # steps, where a client's work is given in epochs
LONGEST = 200  # bytes of a label, which names a directory


class GridPoint(NamedTuple):
    """A contender's point in a grid; `family` names the grid."""

    family: str
    values: dict[str, Any]  # by dotted field


class Contender(NamedTuple):
    """A method with its settings, under the name that tables give it."""

    label: str
    algorithm: Algorithm
    given: frozenset[str] = frozenset()  # the dotted fields that the user has set
    grid: GridPoint | None = None
    added: bool = False  # a baseline that the user did not name
    preset: str | None = None  # which of the method's presets its fields began with


# methods to compare, as a user names them
Listed: TypeAlias = str | Sequence[str | Algorithm | Mapping[str, Any]]


def contenders(tables: Mapping[str, Any], listed: Listed | None, train: Train, *, baselines: bool,
               permit: Permit = NOTHING) -> list[Contender]:
    """The methods `listed` on the command line or in Python, or else those of the file's [algorithm] and
    [[algorithms]]; and the baselines that are missing. `permit` is for code that they name."""
    written = _written(tables)
    if listed is None:
        found = [contender for where, table in written for contender in
                 _expand(marked(table, permit), where)]
    else:
        found = [contender for table in _tables(listed, written) for contender in
                 _expand(marked(table, permit), f"--algorithms {table.get('name')}")]
    if not found:
        raise UsageError("there is nothing to compare: name methods with --algorithms, or in the file's "
                         "[algorithm] and [[algorithms]]")
    found = _distinct(found)
    if baselines:
        found += [each for each in _baselines(found, train) if each.label not in {f.label for f in found}]
    return found


def labels(tables: Mapping[str, Any], train: Train, permit: Permit = NOTHING) -> set[str]:
    """What the methods of a file are called, with the baselines that would be added to them."""
    if not _written(tables):
        return set()
    return {contender.label for contender in contenders(tables, None, train, baselines=True, permit=permit)}


def reference(tables: Mapping[str, Any], first: Algorithm) -> Algorithm:
    """The method whose rounds are those of [train]: that of [algorithm], or else the first of the list."""
    if "algorithm" not in tables:
        return first
    return parse_algorithm({key: value for key, value in tables["algorithm"].items() if key != "grid"})


def _written(tables: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The tables of a file, with where they stand."""
    more = tables.get("algorithms", [])
    if not isinstance(more, list):
        raise UsageError("algorithms must be a list of sections, each headed [[algorithms]]")
    all_of_them = [("algorithm", tables["algorithm"])] if "algorithm" in tables else []
    all_of_them += [(f"algorithms[{k}]", table) for k, table in enumerate(more)]
    for where, table in all_of_them:
        if not isinstance(table, Mapping):
            raise UsageError(f"{where} must be a section, not {table!r}")
    return [(where, dict(table)) for where, table in all_of_them]


# -- the list on the command line, or in Python --------------------------------------------------------


def _tables(listed: Listed, written: list[tuple[str, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """The tables of a list: of text as on the command line, of methods, or of tables as in a file."""
    if not isinstance(listed, str | Sequence):
        raise UsageError(f"algorithms must be text or a list of methods, not {listed!r}")
    for each in [listed] if isinstance(listed, str) else listed:
        if isinstance(each, str):
            yield from _parse(each, written)
        elif isinstance(each, Algorithm):
            yield _set_by_user(each)
        elif isinstance(each, Mapping):
            yield dict(each)
        else:
            raise UsageError(f"algorithms: {each!r} is not a method: give a name, or a method such as "
                             "Ditto() (with brackets)")


def _set_by_user(method: Algorithm) -> dict[str, Any]:
    """The table of a method, with the fields that differ from its defaults: the others may be tuned."""
    table, usual = fields.dump(method), fields.dump(type(method)())
    return {key: value for key, value in table.items() if key == "name" or value != usual.get(key)}


def _parse(listed: str, written: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The tables that a list describes. A label or a method of the file stands for its table there."""
    known = {str(table.get("label", table.get("name"))): table for _, table in reversed(written)}
    tables: list[dict[str, Any]] = []
    for part in _split(listed):
        if not part:
            raise UsageError(f"--algorithms {listed!r}: a name is missing")
        head, equals, text = part.partition("=")
        name, colon, field = head.rpartition(":") if equals else _bare(head, known)
        if colon or not equals:
            if name not in known and not is_place(name) and name not in methods.names():
                raise unknown("algorithm", name, {*methods.names(), *known})
            tables.append(dict(known.get(name, {"name": name})))
        if not equals:
            if colon:
                raise UsageError(f"--algorithms {part!r} must read name:field=value, such as pfedme:lam=30")
            continue
        if not tables or not field:
            raise UsageError(f"--algorithms {part!r} must come after the name of a method and a colon, as in "
                             "pfedme:lam=30,eta=0.01")
        _set(tables[-1], field, _value(text))
    return tables


def _bare(head: str, known: Mapping[str, Any]) -> tuple[str, str, str]:
    """A part without a value: a name, or the place of a user's method; else a name with a field."""
    name, colon, field = head.partition(":")
    if not colon or head in known or (is_place(head) and name not in {*methods.names(), *known}):
        return head, "", ""
    return name, colon, field


def _split(listed: str) -> Iterator[str]:
    """The parts between commas, of which those in brackets and quotes do not count."""
    depth, quote, start = 0, "", 0
    for k, letter in enumerate(listed):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
            if letter == "," and depth == 0:
                yield listed[start:k].strip()
                start = k + 1
    if depth or quote:
        raise UsageError(f"--algorithms {listed!r}: a bracket or a quote is left open")
    yield listed[start:].strip()


def _set(table: dict[str, Any], field: str, value: Any) -> None:
    """Put a dotted field in; a list makes it a grid."""
    if isinstance(value, list):
        table["grid"] = {**table.get("grid", {}), field: value}
        return
    fields.put(table, field, value)


def _value(text: str) -> Any:
    """As TOML has it, or a list of names without quotes."""
    value = fields.written(text)
    if not isinstance(value, str) or not text.strip().startswith(("[", "{")):
        return value
    value = fields.written(re.sub(r"(?<=[\[,])\s*([A-Za-z_]\w*)\s*(?=[\],])", r'"\1"', text.strip()))
    if isinstance(value, str):
        raise UsageError(f"--algorithms: {text!r} is neither a value nor a list of values")
    return value


# -- from tables to contenders -------------------------------------------------------------------------


def _expand(table: dict[str, Any], where: str) -> Iterator[Contender]:
    """The contender of a table, or those of its grid."""
    grid, label = table.pop("grid", None), table.get("label")
    own = {key: value for key, value in table.items() if key not in ("name", "label", "preset")}
    given = frozenset(fields.dotted(own))
    method = parse_algorithm(table, where)
    if label is not None and (not isinstance(label, str) or not label.strip()):
        raise UsageError(f"{where}.label must be a name, not {label!r}")
    if grid is None:
        yield Contender(label or method.name, method, given, preset=table.get("preset"))
        return
    if not isinstance(grid, Mapping) or not all(isinstance(v, list) and v for v in grid.values()):
        raise UsageError(f"{where}.grid must give each field a list of values, such as {{ lam = [15, 30] }}")
    for values in itertools.product(*grid.values()):
        place = dict(zip(grid, values, strict=True))
        member: dict[str, Any] = {key: dict(v) if isinstance(v, Mapping) else v for key, v in table.items()}
        for field, value in place.items():
            _set(member, field, value)
        name = f"{label or method.name} {_settings(place)}"
        yield Contender(name, parse_algorithm(member, where), given | grid.keys(),
                        GridPoint(label or method.name, place), preset=member.get("preset"))


def _distinct(found: list[Contender]) -> list[Contender]:
    """Contenders with the same label get their settings into it."""
    count = {label: [c.label for c in found].count(label) for label in (c.label for c in found)}
    found = [c if count[c.label] == 1 else c._replace(label=_with_settings(c)) for c in found]
    for k, contender in enumerate(found):
        if any(contender.label == other.label for other in found[:k]):
            raise UsageError(f"two methods are called {contender.label!r}: give one of them a label")
        check_label(contender.label)
    return found


def check_label(label: str) -> None:
    """A label names a directory."""
    if "/" in label or label.startswith(".") or len(os.fsencode(label)) > LONGEST or (
            not label.isprintable()):
        raise UsageError(f"the label {label!r} cannot name a directory: give the method a short label, "
                         "as in pfedme:label=mine")


def _with_settings(contender: Contender) -> str:
    changed: dict[str, Any] = {} if contender.preset is None else {"preset": contender.preset}
    table = fields.dump(contender.algorithm)
    changed |= {field: fields.value_of(table, field) for field in sorted(contender.given - {"preset"})}
    return f"{contender.label} {_settings(changed)}" if changed else contender.label


def _settings(values: Mapping[str, Any]) -> str:
    words = (f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
             for name, value in values.items())
    return " ".join(words).replace("/", "_")


def _baselines(found: Sequence[Contender], train: Train) -> Iterator[Contender]:
    """LocalTrain and FedAvg with fine-tuning, with the local optimizer of the first method that has one."""
    solver = next((c.algorithm.solver for c in found if hasattr(c.algorithm, "solver")), FedAvg().solver)
    if not any(isinstance(c.algorithm, LocalTrain) for c in found):
        yield Contender(LOCAL, LocalTrain(solver=solver), added=True)
    if not any(isinstance(c.algorithm, FedAvg) and c.algorithm.finetune for c in found):
        steps = train.local.steps or FINE_TUNING
        yield Contender(TUNED, FedAvg(solver=solver, finetune=steps), added=True)

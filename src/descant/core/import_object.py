"""The user's own objects, named by their place: "package.module:name"."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from descant.core.permit import NOTHING, Permit, is_standard, refusal, top_of
from descant.errors import UsageError, unknown

_FORM = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
LOG = logging.getLogger(__name__)  # says what is imported; commands show it


def is_place(text: object) -> bool:
    """Whether this reads "package.module:name"."""
    return isinstance(text, str) and _FORM.fullmatch(text) is not None


class Named(str):
    """A place that a file names, with that file's permit. It survives pickling to worker processes; a plain
    str is a place that a Python program names itself."""

    permit: Permit

    def __new__(cls, place: str, permit: Permit) -> Named:
        made = super().__new__(cls, place)
        # decided here: on another machine the user's project may be installed as a library
        by_project = permit.project and top_of(place) not in permit.allow and permit.covers(place)
        made.permit = Permit((*permit.allow, top_of(place)), True) if by_project else permit
        return made

    def __getnewargs__(self) -> tuple[str, Permit]:  # type: ignore[override]
        return str(self), self.permit


def marked(value: Any, permit: Permit) -> Any:
    """The value with every place in it, however deep, marked with the permit; one that its own permit covers
    stays."""
    if isinstance(value, Named) and value.permit.covers(value):
        return value
    if isinstance(value, str):
        return Named(value, permit) if is_place(value) else value
    if isinstance(value, Mapping):
        return {key: marked(item, permit) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [marked(item, permit) for item in value]
    return value


def named_in(tables: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The places that the sections of an experiment name, each with its field: in [model] by its name, in
    [algorithm] and [[algorithms]] anywhere, in [eval] among the metrics and the diagnostics."""
    model, scores = tables.get("model"), tables.get("eval")
    if isinstance(model, Mapping):
        yield from _places(model.get("name"), "model.name")
    for section in ("algorithm", "algorithms"):
        yield from _places(tables.get(section), section)
    if isinstance(scores, Mapping):
        for name in ("metrics", "diagnostics"):
            yield from _places(scores.get(name), f"eval.{name}")


def _places(value: Any, field: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str) and is_place(value):
        yield field, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key != "label":  # any text
                yield from _places(item, f"{field}.{key}")
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _places(item, field)


def require_permitted(tables: Mapping[str, Any], permit: Permit, where: str = "") -> None:
    """Refuse sections that name code without a permit, before anything is made of them."""
    for field, place in named_in(tables):
        if not permit.covers(place):
            raise refusal(place, f"{where}{field}")


def permit_of(tables: Mapping[str, Any], permit: Permit = NOTHING) -> Permit:
    """The permit with what these tables' places are permitted already: a user's own file names them, and its
    run directories name them again."""
    granted = (str(place) for _, place in named_in(tables)
               if isinstance(place, Named) and place.permit.covers(place))
    return Permit((*permit.allow, *granted), permit.project)


def imported(place: str, where: str) -> Any:
    """The object at a place; `where` names the field in errors. Also looks in the current directory."""
    path, _, attribute = place.partition(":")
    _look_here()
    require(place, where)
    _tell(path, where)
    try:
        with torch.random.fork_rng(devices=[]):  # random draws at import must not matter
            module = importlib.import_module(path)
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and f"{path}.".startswith(f"{error.name}.")
        reason = (f"there is no module {error.name!r} in this Python or in the current directory"
                  if missing and isinstance(error, ModuleNotFoundError)
                  else f"its import fails with {type(error).__name__}: {error}")
        raise UsageError(f"{where} {place}: {reason}") from error
    if not hasattr(module, attribute):
        names = [name for name, value in vars(module).items() if callable(value) and name[0] != "_"]
        raise unknown(f"{where} {place}: name in module {path}", attribute, names)
    found = getattr(module, attribute)
    _require_home(found, place, where)
    return found


def require(place: str, where: str) -> None:
    """Refuse a place that must not be imported."""
    if is_standard(top_of(place)) or (isinstance(place, Named) and not place.permit.covers(place)):
        raise refusal(place, where)


def _require_home(found: Any, place: str, where: str) -> None:
    """A module also has the names that it imports (`from shutil import rmtree`). What a file names must be
    defined where it may be imported from."""
    if not isinstance(found, type | FunctionType | BuiltinFunctionType):
        return  # an object, which the caller checks
    home = str(found.__module__)
    if is_standard(top_of(home)):
        raise UsageError(f"{where} {place} is {found.__qualname__} of {home}, a module of Python itself: it "
                         "is refused")
    if isinstance(place, Named) and not place.permit.project and top_of(home) != top_of(place) and (
            not place.permit.covers(f"{home}:{found.__name__}")):
        raise refusal(f"{home}:{found.__name__}", f"{where} {place}:")


def _look_here() -> None:
    here = str(Path.cwd())
    if not {"", here} & set(sys.path):
        sys.path.append(here)  # stays: worker processes import it again


@cache
def _tell(path: str, where: str) -> None:
    """Log once what is about to be imported, and from which file."""
    file = _file_of(path)
    LOG.info("imports %s%s for %s", path, "" if file is None else f" ({file})", where)


def _file_of(path: str) -> str | None:
    """The file of a module, without importing anything."""
    top, *rest = path.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        within = spec.submodule_search_locations
        spec = importlib.machinery.PathFinder.find_spec(f"{spec.name}.{part}", within)
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin)
    return f"./{file.relative_to(Path.cwd())}" if file.is_relative_to(Path.cwd()) else str(file)

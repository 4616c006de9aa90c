"""Which methods there are: descant's, those that installed packages offer, and the user's own by their place,
"package.module:Class"."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NoReturn

from descant.algorithms import ALGORITHMS
from descant.core import fields
from descant.core.algorithm import Algorithm
from descant.core.import_object import imported, is_place
from descant.core.permit import refusal
from descant.core.plugins import Offer, offers
from descant.errors import UsageError, first_line, unknown

_NAME = re.compile(r"[\w+.-]+")


def names() -> list[str]:
    """Every method that has a name: descant's, then those of packages. Nothing is imported."""
    return [*ALGORITHMS, *sorted({offer.name for offer in offers()} - ALGORITHMS.keys())]


def find(name: Any, where: str) -> type[Algorithm]:
    """The method of this name, or at this place; `where` names the field in errors about names."""
    if isinstance(name, str) and name in ALGORITHMS:
        return ALGORITHMS[name]
    if is_place(name):
        return required(imported(name, "algorithm.name"), f"algorithm.name {name}")
    for offer in offers():
        if offer.name == name:
            return load(offer)
    raise unknown(where, name, names())


def load(offer: Offer) -> type[Algorithm]:
    """The method that a package offers, or a UsageError that names the package."""
    who = f"the package {offer.package} offers the algorithm {offer.name}"
    others = [other.package for other in offers() if other.name == offer.name and other != offer]
    if offer.name in ALGORITHMS or others:
        taken = "descant itself has" if offer.name in ALGORITHMS else f"{' and '.join(others)} offers, too"
        raise UsageError(f"{who}, a name that {taken}: it is left out; use it by its place, "
                         f"{offer.point.value}")
    try:
        found = offer.point.load()
    except Exception as error:
        raise UsageError(f"{who}, but its import fails with {type(error).__name__}: {first_line(error)}; "
                         "update the package, or uninstall it") from error
    method = required(found, f"{who}, but {offer.point.value}")
    if method.name != offer.name:
        raise UsageError(f"{who}, but the class calls itself {method.name}: its entry point must have that "
                         "name")
    return method


def offered() -> Iterator[tuple[Offer, type[Algorithm] | UsageError]]:
    """What packages offer; with the reason where it cannot be used."""
    for offer in offers():
        try:
            yield offer, load(offer)
        except UsageError as error:
            yield offer, error


def required(found: Any, who: str) -> type[Algorithm]:
    """A class that can be used as a method; else an error that says what it lacks. `who` names it."""
    if isinstance(found, Algorithm):
        raise UsageError(f"{who}: it must be the class of a method, not an object of it: name "
                         f"{type(found).__name__}")
    if not isinstance(found, type) or not issubclass(found, Algorithm):
        kind = (f"the class {found.__name__}" if isinstance(found, type)
                else f"an object of type {type(found).__name__}")
        raise UsageError(f"{who}: it must be a class derived from descant.Algorithm, not {kind}")
    if wrong := lacks(found):
        raise UsageError(f"{who}: {wrong}")
    return found


def lacks(method: type[Algorithm]) -> str | None:
    """What a class needs to be a method, with the remedy; None if it has all."""
    if inspect.isabstract(method):
        return f"it lacks the functions {', '.join(sorted(method.__abstractmethods__))}: write them"
    if method.absorb is Algorithm.absorb and method.aggregate is Algorithm.aggregate:
        return ("it lacks the function absorb, which takes the mean of the uploads (or aggregate, which "
                "takes all of them): write it")
    for word, example in (("name", "mymethod"), ("citation", "Who (year), Title")):
        text = getattr(method, word, None)
        if not isinstance(text, str) or not text.strip():
            return f'it lacks a {word}: write {word}: ClassVar[str] = "{example}" in the class'
    if not _NAME.fullmatch(method.name):
        return (f"its name {method.name!r} must be one word of letters, digits, _, +, - and dots, "
                "as in tables and directories")
    if method.name in ALGORITHMS and ALGORITHMS[method.name] is not method:
        return f"its name {method.name!r} is that of one of descant's methods: give it another"
    if "__dataclass_fields__" not in vars(method) and any(
            isinstance(value, dataclasses.Field) for value in vars(method).values()):
        return "it is not a dataclass, so its fields are not read: write @dataclass(frozen=True) above it"
    try:
        typing.get_type_hints(method)
    except Exception as error:
        return f"the type of one of its fields cannot be read: {first_line(error)}"
    return None


@dataclasses.dataclass(frozen=True)
class NotImported(Algorithm):
    """A method that a file names by its place without a permit: its settings can be shown and compared, and
    it is refused where it is to run."""

    name: ClassVar[str] = "own"
    citation: ClassVar[str] = "not imported"

    table: Mapping[str, Any]
    called: str | None = None  # the name of the class, where the file tells it

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.called or self.table["name"].rpartition(":")[2])

    def as_table(self) -> dict[str, Any]:
        return dict(self.table)

    def changed(self, values: Mapping[str, Any]) -> NotImported:
        """With other values of some dotted fields."""
        table: dict[str, Any] = {key: dict(value) if isinstance(value, Mapping) else value
                                 for key, value in self.table.items()}
        for field, value in values.items():
            fields.put(table, field, value)
        return NotImported(table, self.called)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise refusal(self.table["name"], "algorithm.name")

    init_server = init_client = broadcast = local = aggregate = personalize = adapt = _refuse

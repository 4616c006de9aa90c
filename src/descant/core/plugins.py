"""Methods that installed packages offer: their entry points of the group `descant.algorithms`.

Whoever installs a package wants its methods, so that a file may name them as it names descant's. Where one
merely stands is no installation: packages in the current directory offer nothing.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from typing import NamedTuple

GROUP = "descant.algorithms"


class Offer(NamedTuple):
    """A method that a package offers."""

    name: str
    package: str  # as pip calls it
    point: EntryPoint

    def is_of(self, cls: type) -> bool:
        """Whether this is the offer of a class, which is imported already."""
        home, _, name = self.point.value.partition(":")
        return getattr(sys.modules.get(home.strip()), name.strip(), None) is cls


def offers() -> tuple[Offer, ...]:
    """What the installed packages offer, by package. Nothing is imported."""
    here = Path.cwd().resolve()
    return _offers(tuple(place for place in sys.path if place and Path(place).resolve() != here))


@cache
def _offers(path: tuple[str, ...]) -> tuple[Offer, ...]:
    found: dict[str, list[Offer]] = {}
    for package in distributions(path=list(path)):
        if package.name and package.name not in found:  # the first on the path is what Python imports
            found[package.name] = [Offer(point.name, package.name, point) for point in package.entry_points
                                   if point.group == GROUP]
    return tuple(offer for name in sorted(found) for offer in found[name])

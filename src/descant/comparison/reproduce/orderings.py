"""Which orderings of a paper are reversed in ours, and which are open, from the kept orderings.csv."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from descant.comparison.agreement import Appearance

FILE = "orderings.csv"
MOST = 8  # that are named; of more it is said how many there are
HEADS: dict[Appearance, str] = {"reversed": "Pairs that are reversed", "open": "Pairs that are open"}


class Kept(NamedTuple):
    """A method that the paper has ahead of another."""

    better: str
    worse: str
    appearance: str


def read(place: Path) -> list[Kept]:
    """What was kept; nothing of a study."""
    try:
        with (place / FILE).open(newline="", encoding="utf-8") as file:
            return [Kept(*(row[name] for name in Kept._fields)) for row in csv.DictReader(file)]
    except FileNotFoundError:
        return []


def sentences(rows: Sequence[Kept], where: str) -> list[str]:
    """Which pairs do not appear; of many, `where` they are."""
    said = []
    for kind, head in HEADS.items():
        if some := [row for row in rows if row.appearance == kind]:
            named = ", ".join(f"{row.better} above {row.worse}" for row in some)
            said.append(f"{head}: {named if len(some) <= MOST else f'{len(some)} ({where})'}.")
    return said

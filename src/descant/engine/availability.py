"""Who can be reached in which round, and how fast clients are: a trace of a population.

A CSV file with the columns `client`, `first` and `last`: the client can be reached from round `first` to
round `last`, both included; without a `last`, from then on. A client may have several lines; one that has
none can always be reached. The optional column `pace` has the seconds that a local step of the client takes
in these rounds: with a deadline, who would need longer for its steps is a straggler, and is not waited for.
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from descant.errors import UsageError, unknown

COLUMNS = ("client", "first", "last")
FOREVER = 2**62


class Trace(NamedTuple):
    """The lines of a trace: [lines] each."""

    client: np.ndarray  # numbers
    first: np.ndarray
    last: np.ndarray
    pace: np.ndarray  # NaN where the file says nothing
    population: int

    def reachable(self, number: int) -> np.ndarray:
        """Who can be reached in a round: [population]."""
        found = np.ones(self.population, bool)
        found[self.client] = False
        found[self.client[self._at(number)]] = True
        return found

    def seconds(self, number: int, steps: np.ndarray) -> np.ndarray:
        """How long each client needs for its steps: [population]; 0 where the pace is not known."""
        at = self._at(number)
        pace = np.zeros(self.population)
        pace[self.client[at]] = np.nan_to_num(self.pace[at])
        return np.asarray(pace * steps)

    def _at(self, number: int) -> np.ndarray:
        number = max(1, number)  # before the first round
        return np.flatnonzero((self.first <= number) & (number <= self.last))

    def require_somebody(self, rounds: int, path: str) -> None:
        """Refuse a trace with a round in which nobody can be reached."""
        if len(np.unique(self.client)) < self.population:
            return
        change = np.zeros(rounds + 2, np.int64)
        kept = self.first <= rounds
        np.add.at(change, self.first[kept], 1)
        np.add.at(change, np.minimum(self.last[kept], rounds) + 1, -1)
        if (empty := np.flatnonzero(np.cumsum(change)[1 : rounds + 1] == 0)).size:
            raise UsageError(f"{path}: nobody can be reached in round {empty[0] + 1}: add a line for a "
                             "client, or play fewer rounds")


def read_trace(path: str, names: tuple[str, ...]) -> Trace:
    """The trace of a file, for the clients of these names."""
    numbers = {name: k for k, name in enumerate(names)}
    lines: list[tuple[int, int, int, float]] = []
    rows = csv.DictReader(io.StringIO(_text(path)), restkey="", restval="")
    if missing := [name for name in COLUMNS if name not in (rows.fieldnames or ())]:
        raise UsageError(f"{path} has no column {missing[0]!r}: the first line must name client, first, last "
                         "and, if it is known, pace")
    for row in rows:
        where = f"{path}, line {rows.line_num}"
        if (name := row["client"].strip()) not in numbers:
            raise UsageError(f"{where}: {unknown('client', name, names)}")
        first = _whole(row["first"], f"{where}, first")
        last = _whole(row["last"], f"{where}, last") if row["last"].strip() else FOREVER
        if last < first:
            raise UsageError(f"{where}: last = {last} is before first = {first}")
        lines.append((numbers[name], first, last, _pace(row.get("pace") or "", where)))
    columns = [np.array([line[k] for line in lines], np.int64) for k in range(3)]
    return Trace(columns[0], columns[1], columns[2], np.array([line[3] for line in lines]), len(names))


def trace_fingerprint(path: str) -> str:
    """A hash of a trace, by which a resumed run knows it."""
    return hashlib.sha256(_text(path).encode()).hexdigest()[:16]


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise UsageError(f"train.availability: cannot read {path}: {why}") from None


def _whole(text: str, where: str) -> int:
    if not text.strip().isdecimal() or not 1 <= (number := int(text)) < FOREVER:
        raise UsageError(f"{where} must be the number of a round, from 1, not {text!r}")
    return number


def _pace(text: str, where: str) -> float:
    if not text.strip():
        return math.nan
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UsageError(f"{where}, pace must be seconds for a step, from 0, not {text!r}")
    return value

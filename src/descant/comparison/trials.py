"""The record of a search for hyper-parameters: `trials.csv`, `best.json`, beside Optuna's journal."""

from __future__ import annotations

import contextlib
import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from descant.core.files import write_atomic, write_csv
from descant.core.ranges import Range
from descant.errors import DescantError

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

LOST = 1e6  # the weight of a client without a finite figure: more than any figure of the others
FIXED_COLUMNS = ("number", "state", "validation", "grad_steps", "rounds")  # of trials.csv; then the fields


def state(trial: FrozenTrial) -> str:
    return "failed" if "failure" in trial.user_attrs else trial.state.name.lower()


def figure(key: Sequence[float] | None) -> float | None:
    """One number for a key of `selection_key`, in the same order; None where no client has a figure."""
    if key is None or len(key) < 2 or not math.isfinite(key[1]):
        return None
    return key[1] + LOST * key[0]


@contextlib.contextmanager
def writing(record: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DescantError(f"cannot write the search in {record}: {error.strerror or error}; its finished "
                           "trials are saved: fix this, and start it again") from None


def write_trials(record: Path, trials: Sequence[FrozenTrial], ranges: Mapping[str, Range]) -> None:
    rows: list[list[Any]] = [[*FIXED_COLUMNS, *ranges]]
    for number, trial in enumerate(trials):
        key = trial.user_attrs["key"]
        validation = "" if figure(key) is None or state(trial) == "failed" else repr(key[1])
        rows.append([number, state(trial), validation, trial.user_attrs["grad_steps"],
                     trial.user_attrs["rounds"], *(repr(trial.params[name]) for name in ranges)])
    write_csv(record / "trials.csv", rows)


def write_best(record: Path, found: Mapping[str, Any]) -> None:
    write_atomic(record / "best.json", (json.dumps(found, indent=2) + "\n").encode())


def read(record: Path) -> dict[str, Any] | None:
    """The trials of a record as a table, and the number of the best one once the search is finished."""
    try:
        with (record / "trials.csv").open(encoding="utf-8", newline="") as file:
            columns, *rows = csv.reader(file)
    except FileNotFoundError:
        return None
    try:
        best = json.loads((record / "best.json").read_text(encoding="utf-8"))["best"]
    except FileNotFoundError:
        best = None
    return {"columns": columns, "rows": [[_cell(text) for text in row] for row in rows], "best": best}


def _cell(text: str) -> int | float | str | None:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text or None

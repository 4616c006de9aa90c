"""The finished runs of a comparison, as their files tell: `figures.csv` and `rows.npz` beside the summary."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from descant.core import npz
from descant.core.files import write_atomic, write_csv
from descant.core.metric import METRICS
from descant.engine import divergence
from descant.errors import DescantError

FILE, ROWS = "figures.csv", "rows.npz"
POOLED = -1  # in place of a client: the rows of all of them together
FACTS = ("which", "round", "model", "client", "name", "unseen", "n_test")  # the columns before the figures

Columns: TypeAlias = dict[str, np.ndarray]  # `FACTS`, then one column of float64 for each figure


class RowInfluences(NamedTuple):
    """What is known of the clients' own models of the best round beyond their figures."""

    rows: Columns  # "row" (its number in the federation), "client", and the influence on each figure
    diverged: np.ndarray  # clients whose models have diverged, by their test rows


class FinishedRun(NamedTuple):
    """A finished run."""

    label: str
    seed: int
    rounds: int
    place: Path
    summary: dict[str, Any]
    columns: Columns
    single: RowInfluences | None  # of each test row; None where an older version measured

    @property
    def ended_diverged(self) -> bool:
        """Whether training could not go on. What it has last is of the way there, and no result."""
        return self.summary.get("stopped") == "diverged"

    def values(self, metric: str, which: str = "best", model: str = "personal", *, unseen: bool = False
               ) -> dict[int, float]:
        """The figure of each client that has one."""
        if metric not in self.columns:  # it was asked for after this run was measured
            return {}
        if which == "last" and self.ended_diverged:
            return {}
        of = self.columns
        known = self._rows(which, model, unseen) & np.isfinite(of[metric])
        if metric in METRICS and not METRICS[metric].is_share:  # one diverged model would decide for all
            known &= ~self._is_lost
        return dict(zip(of["client"][known].tolist(), of[metric][known].tolist(), strict=True))

    @property
    def sizes(self) -> np.ndarray:
        """How many test rows each client has, by its number."""
        rows = self._rows("best", "personal", False)
        found = np.zeros(1 + int(self.columns["client"].max()), int)
        found[self.columns["client"][rows]] = self.columns["n_test"][rows]
        return found

    @property
    def lost(self) -> int:
        """How many clients have a diverged model, by their test rows."""
        rows = self._rows("best", "personal", False)
        return int((rows & (self.columns["n_test"] > 0) & self._is_lost).sum())

    @property
    def has_diverged(self) -> bool:
        """Whether at least half of the clients have such a model, by their test or validation rows, or
        nobody has one for the last round, which is that of training where no other is chosen."""
        rows = self._rows("best", "personal", False) & (self.columns["n_test"] > 0)
        judged = divergence.has_diverged((self.summary["best"] or self.summary["last"] or {}).get("personal"))
        return (judged or bool(self.summary.get("diverged"))
                or (bool(rows.any()) and 2 * self.lost >= int(rows.sum())))

    @property
    def _is_lost(self) -> np.ndarray:
        """Of the models of the best round, those that have diverged; of others, those without a loss."""
        of = self.columns
        found = ~np.isfinite(of["loss"])
        if self.single is not None:
            found |= np.isin(of["client"], self.single.diverged) & self._rows("best", "personal", False)
        return np.asarray(found)

    def _rows(self, which: str, model: str, unseen: bool) -> np.ndarray:
        of = self.columns
        rows: np.ndarray = ((of["which"] == which) & (of["model"] == model) & (of["unseen"] == unseen)
                            & (of["client"] != POOLED))
        return rows

    def pooled(self, metric: str, model: str) -> float:
        """The figure over the rows of all clients together."""
        of = self.columns
        rows = (of["which"] == "best") & (of["model"] == model) & (of["client"] == POOLED)
        return float(of[metric][rows][0]) if rows.any() else float("nan")


# -- the files -------------------------------------------------------------------------------------------


def write(directory: Path, columns: Columns, single: RowInfluences) -> None:
    """Write the figures of a run, whose best round comes first."""
    facts = [(columns[name].astype(int) if name == "unseen" else columns[name]).tolist() for name in FACTS]
    figures = [["" if value != value else repr(value) for value in column.tolist()]
               for name, column in columns.items() if name not in FACTS]
    packed = io.BytesIO()
    np.savez_compressed(packed, format=np.array(1), round=np.array(columns["round"][0]),
                        diverged=single.diverged, **single.rows)  # type: ignore[arg-type]
    try:
        write_atomic(directory / ROWS, packed.getvalue())
        write_csv(directory / FILE, [list(columns), *zip(*facts, *figures, strict=True)])
    except OSError as error:
        raise DescantError(f"cannot write {directory / FILE}: {error.strerror or error}") from None


def read_rows(path: Path, best: int) -> RowInfluences | None:
    """The influences of the rows in the best round; None where the file is missing, as in directories of
    older versions, or is of another round."""
    try:
        with npz.opened(path) as archive:
            found = {name: archive.array(name) for name in archive.names}
    except FileNotFoundError:
        return None
    except (OSError, npz.BadArchive) as error:
        raise _damaged(path, error) from None
    if found.pop("format", None) != 1 or found.pop("round", None) != best or "diverged" not in found:
        return None
    diverged = found.pop("diverged")
    return RowInfluences(found, diverged)


def read_figures(path: Path) -> Columns:
    """The figures that `write` wrote."""
    try:
        text = path.read_text(encoding="utf-8")
        if not text.endswith("\n"):
            raise ValueError("its last line is incomplete")
        header, *rows = csv.reader(io.StringIO(text), strict=True)
        if tuple(header[: len(FACTS)]) != FACTS or len({*header}) < len(header):
            raise ValueError("its columns are not those of figures")
        if not rows or any(len(row) != len(header) for row in rows):
            raise ValueError("some rows are incomplete")
        columns = {name: _parsed(name, cells) for name, cells in
                   zip(header, zip(*rows, strict=True), strict=True)}
        _check(columns)
    except OSError as error:
        raise DescantError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, csv.Error) as error:
        raise _damaged(path, error) from None
    return columns


def _damaged(path: Path, error: Exception) -> DescantError:
    return DescantError(f"{path} is damaged ({error}): remove it, and it is measured again from the run's "
                        "checkpoint")


def _parsed(name: str, cells: Sequence[str]) -> np.ndarray:
    if name in ("which", "model", "name"):
        return np.array(cells)
    if name == "unseen":
        return np.array([int(cell) for cell in cells]) > 0
    if name in FACTS:
        return np.array([int(cell) for cell in cells])
    return np.array([float(cell or "nan") for cell in cells])


def _check(columns: Columns) -> None:
    """The rows of the best round are followed by the same of the last."""
    which, half = columns["which"], len(columns["which"]) // 2
    is_whole = (which[:half] == "best").all() and (which[half:] == "last").all() and len(which) == 2 * half
    if not is_whole or any((columns[name][:half] != columns[name][half:]).any()
                           for name in ("model", "client", "name", "unseen")):
        raise ValueError("some rows are missing")


def is_current(directory: Path, rounds: int, metrics: Sequence[str] | None, *, rows: bool = False) -> bool:
    """Whether the figures of so many rounds are there, with the user's own metrics, and those of each row."""
    try:
        columns = read_figures(directory / FILE)
        if rows and read_rows(directory / ROWS, int(columns["round"][0])) is None:
            return False
    except DescantError:
        return False  # they can be measured again
    wanted = {place.partition(":")[2] for place in metrics or ()}
    return bool(columns["round"][-1] == rounds) and wanted <= columns.keys()

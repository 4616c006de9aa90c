"""The runs of a comparison that are done, as their files tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from descant.comparison import measure as figures
from descant.comparison.plan import Planned
from descant.engine import divergence
from descant.errors import DescantError, UsageError

UNBOUNDED = ("loss", "mse", "r2")  # figures that one diverged model would decide for all


class Finished(NamedTuple):
    """One run that is done."""

    label: str
    seed: int
    rounds: int
    place: Path
    summary: dict[str, Any]
    columns: figures.Columns
    single: figures.Single | None  # of each test row; None where an older version measured

    def values(self, metric: str, which: str = "best", model: str = "personal", *, unseen: bool = False
               ) -> dict[int, float]:
        """The figure of each client that has one."""
        if metric not in self.columns:  # which was asked for after this run was measured
            return {}
        of = self.columns
        known = self._rows(which, model, unseen) & np.isfinite(of[metric])
        if metric in UNBOUNDED:
            known &= ~self._is_lost
        return dict(zip(of["client"][known].tolist(), of[metric][known].tolist(), strict=True))

    @property
    def lost(self) -> int:
        """How many clients have a model that is of no use: it has diverged, by its test rows."""
        rows = self._rows("best", "personal", False)
        return int((rows & (self.columns["n_test"] > 0) & self._is_lost).sum())

    @property
    def has_diverged(self) -> bool:
        """Whether at least half of the clients have such a model, by their test or validation rows."""
        rows = self._rows("best", "personal", False) & (self.columns["n_test"] > 0)
        told = divergence.has_diverged((self.summary["best"] or self.summary["last"] or {}).get("personal"))
        return told or (bool(rows.any()) and 2 * self.lost >= int(rows.sum()))

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
                            & (of["client"] != figures.POOLED))
        return rows

    def pooled(self, metric: str, model: str) -> float:
        """The figure over the rows of all clients together."""
        of = self.columns
        rows = (of["which"] == "best") & (of["model"] == model) & (of["client"] == figures.POOLED)
        return float(of[metric][rows][0]) if rows.any() else float("nan")


def read(run: Planned) -> Finished | None:
    """The files of a run, if it is done."""
    try:
        if not run.is_finished:
            return None
        run.require_own()
        summary = json.loads((run.place / "summary.json").read_text(encoding="utf-8"))
    except (ValueError, UsageError) as error:
        raise DescantError(f"the run in {run.place} is damaged ({error}): remove that directory, and compare "
                           "again") from None
    path = run.place / figures.FILE
    columns = figures.read(path)
    return Finished(run.label, run.seed, summary["rounds"], run.place, summary, columns,
                    figures.read_rows(path, int(columns["round"][0])))

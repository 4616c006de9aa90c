"""What experiments/when.py keeps: who is ahead of whom in a cell, and which measure predicts it."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats
from when import ABOUT, KEPT

FAMILIES = {"logistic": "Synthetic, one centre", "clusters": "Synthetic, four centres",
            "fashion": "Fashion-MNIST", "har": "Human activities"}
ALONE, FINE_TUNED = "LocalTrain", "FedAvg + fine-tuning"
LEVEL = 0.05


class Gap(NamedTuple):
    """By how much one method is better than another, in points, with the simultaneous interval."""

    mean: float
    low: float
    high: float
    p: float
    withheld: bool = False  # the one that is behind was still improving

    @property
    def significant(self) -> bool:
        return self.p < LEVEL and not self.withheld


class Seen(NamedTuple):
    """A cell of the study."""

    family: str
    rows: int  # for training, as planned
    level: str
    number: int  # of the level, from alike to different
    n: float  # training rows, as they are
    about: dict[str, Any]  # all that is in about.json
    methods: list[dict[str, str]]  # best first
    pairs: dict[tuple[str, str], Gap]

    @property
    def unseen(self) -> tuple[float, float]:
        """The shares of validation and of test rows whose label the client has no training row of."""
        return self.about["unseen_validation"], self.about["unseen_test"]

    def gap(self, better: str, worse: str) -> Gap:
        if better == worse:
            return Gap(0.0, 0.0, 0.0, 1.0)
        found = self.pairs.get((better, worse))
        if found is None:
            mean, low, high, p, _ = self.pairs[worse, better]
            found = Gap(-mean, -high, -low, p)
        behind = worse if found.mean > 0 else better
        improving = [row["method"] for row in self.methods if int(row["still_improving"])]
        return found._replace(withheld=behind in improving)

    @property
    def compared(self) -> list[str]:
        """The methods that did not diverge, best first."""
        return [row["method"] for row in self.methods if not int(row["diverged"])]

    @property
    def best(self) -> str:
        return self.compared[0]

    @property
    def simple(self) -> str:
        """The better of training alone and fine-tuned FedAvg."""
        return next(name for name in self.compared if name in (ALONE, FINE_TUNED))

    @property
    def lead(self) -> Gap:
        """Of the best method over the better of the two."""
        return self.gap(self.best, self.simple)

    @property
    def together(self) -> Gap:
        """Of the best method that learns together over training alone."""
        return self.gap(next(name for name in self.compared if name != ALONE), ALONE)

    @property
    def behind(self) -> Gap:
        """Of the best method over fine-tuned FedAvg."""
        return self.gap(self.best, FINE_TUNED)


def read() -> list[Seen]:
    """All cells that are kept, by family, rows and level."""
    found = []
    for path in KEPT.glob(f"*/{ABOUT}"):
        about = json.loads(path.read_text(encoding="utf-8"))
        gaps = {(row["method"], row["against"]): Gap(
                    *(100 * float(row[name]) for name in ("mean", "low", "high")), float(row["p"]))
                for row in _table(path.with_name("differences.csv"))}
        found.append(Seen(methods=_table(path.with_name("methods.csv")), pairs=gaps, about=about,
                          **{name: about[name] for name in ("family", "rows", "level", "number", "n")}))
    return sorted(found, key=lambda cell: (list(FAMILIES).index(cell.family), cell.rows, cell.number))


def _table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


# -- how to measure heterogeneity --------------------------------------------------------------------------


def own(cell: Seen) -> float:
    """The share of the clients' models, by squared length, in which they differ: R^2 / (R^2 + |mean|^2)."""
    return _share(cell.about["R"] ** 2, cell.about["length"] ** 2)


def told(cell: Seen) -> float:
    """How much of what is seen of these differences is no noise: R^2 / (R^2 + noise)."""
    return _share(cell.about["R"] ** 2, cell.about["noise"])


def transfer(cell: Seen) -> float:
    """By how much models of other clients predict better than a client's own."""
    return cell.about["transfer"]


def labels(cell: Seen) -> float:
    return cell.about["label_distance"]


def _share(some: float, rest: float) -> float:
    return some / (some + rest) if some else 0.0


MEASURES: dict[str, Callable[[Seen], float]] = {
    "transfer: the accuracy of others' models less that of the client's own": transfer,
    "the share of the clients' models that is their own, R² / (R² + mean²)": own,
    "the share of the differences that is no noise, R² / (R² + noise)": told,
    "the label distance of training rows (total variation)": labels,
}


USED = transfer  # by `descant advise`


class Judged(NamedTuple):
    """How well a measure predicts what is gained over training alone."""

    correlation: str  # Spearman's, with the gain, of cells with about as many rows; mean over these
    error: float  # points by which a prediction from the other families is wrong, on average
    predicted: int  # cells that have more than three others to be predicted by


def judged(cells: Sequence[Seen], measure: Callable[[Seen], float] | None) -> Judged:
    """Predict each cell by the three nearest ones of other families with about as many rows (a factor of
    two); without a measure by all of these."""
    errors = []
    for cell in cells:
        others = [other for other in cells if other.family != cell.family and _as_many(cell, other)]
        if len(others) <= 3:  # a measure could not choose
            continue
        if measure is not None:
            others = sorted(others, key=lambda other: abs(measure(other) - measure(cell)))[:3]
        errors.append(abs(cell.together.mean - float(np.mean([other.together.mean for other in others]))))
    correlations = []
    for rows in sorted({cell.rows for cell in cells}) if measure is not None else ():
        some = [cell for cell in cells if _as_many(cell, cell._replace(n=rows))]
        values = [measure(cell) for cell in some]
        if len(some) > 5 and len(set(values)) > 1:
            correlations.append(stats.spearmanr(values, [cell.together.mean for cell in some]).statistic)
    return Judged(f"{np.mean(correlations):+.2f}" if correlations else "-",
                  float(np.mean(errors)) if errors else math.nan, len(errors))


def _as_many(cell: Seen, other: Seen) -> bool:
    return abs(math.log2(cell.n / other.n)) <= 1

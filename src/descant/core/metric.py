"""A metric: its name, which way is better, how it is written, and when it is known.

`scoring` computes them. This module imports neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, NamedTuple

BINS = 15  # of the top probability, for the calibration error


class Metric(NamedTuple):
    """What is known of a metric."""

    lower_is_better: bool
    meaning: str
    is_share: bool = False  # it lies between 0 and 1
    of_sums: bool = False  # it is made of sums over samples, so that it is known of every evaluated round
    task: Literal["any", "classes", "two classes", "regression"] = "any"


METRICS: dict[str, Metric] = {
    "loss": Metric(True, "mean loss", of_sums=True),
    "accuracy": Metric(False, "share of the rows that are right", True, True, "classes"),
    "balanced_accuracy": Metric(False, "mean of the recalls of the classes that occur", True, True,
                                "classes"),
    "auroc": Metric(False, "area under the ROC curve: how often a row of a class gets a higher probability "
                           "of it than a row of another class; mean over the classes that occur", True,
                    task="classes"),
    "sensitivity": Metric(False, "share of the rows of class 1 that are found", True, task="two classes"),
    "specificity": Metric(False, "share of the rows of class 0 that are found", True, task="two classes"),
    "calibration_error": Metric(True, "how far the probability of what is predicted is from how often it is "
                                      f"right: expected calibration error with {BINS} equal bins", True,
                                task="classes"),
    "mse": Metric(True, "mean squared error", of_sums=True, task="regression"),
    "r2": Metric(False, "share of the variance that is explained", of_sums=True, task="regression"),
}
AUROC = "auroc"  # the only metric that selects rounds without being made of sums
CLASSIFICATION = tuple(name for name, known in METRICS.items() if known.of_sums and known.task == "classes")
REGRESSION = tuple(name for name, known in METRICS.items() if known.of_sums and known.task == "regression")
LOWER = frozenset(name for name, known in METRICS.items() if known.lower_is_better)
_SHARES = tuple(name for name, known in METRICS.items() if known.is_share)


def usual(names: Collection[str]) -> str:
    """The metric that decides unless there is a reason for another: accuracy, or what is minimised."""
    return "accuracy" if "accuracy" in names else "loss"


def of_classifier(classes: int) -> tuple[str, ...]:
    """The metrics of a finished run's classifier."""
    kinds = ("classes", "two classes") if classes == 2 else ("classes",)
    return tuple(name for name, known in METRICS.items() if known.task in kinds)


def is_share(name: str) -> bool:
    """Whether a metric lies between 0 and 1; `name` may have a prefix, as in `personal_accuracy`."""
    return name.endswith(_SHARES)


def title(name: str) -> str:
    """The name for people."""
    return name.replace("_", " ")


def figure(name: str, value: float | None) -> str:
    """A value: shares with four places, others with four digits, a dash for none."""
    if value is None:
        return "-"
    return f"{value:.4f}" if is_share(name) else f"{value:.4g}"

"""The deciding metric: it selects rounds, ranks trials and compares methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from descant.core.federation import Federation
from descant.core.metric import AUROC, LOWER
from descant.core.metric import usual as usual_of
from descant.core.task import Task
from descant.errors import UsageError
from descant.models.module import ModuleTask

MOSTLY_ONE = 2 / 3  # of all training rows: more than that in one class is unbalanced
ONE_SIDED = 0.8  # of a client's training rows, where there are two classes ...
ENOUGH = 10  # ... and the client has so many
IMPROVED = {"of a loss": 0.01, "of a share": 0.001}  # relative, and absolute


class DecidingMetric(NamedTuple):
    """The metric that decides, and why if it is neither the usual one nor asked for."""

    name: str
    why: str | None


def selecting(task: Task) -> tuple[str, ...]:
    """The metrics that can select rounds: those that every evaluation has."""
    has_classes = isinstance(task, ModuleTask) and task.classes is not None
    return (*task.metric_names, AUROC) if has_classes else task.metric_names


def usual(task: Task) -> str:
    """What decides where nothing speaks against it: accuracy, or what is minimised."""
    return usual_of(task.metric_names)


def deciding(wanted: str | None, task: Task, federation: Federation) -> DecidingMetric:
    """The metric of `eval.metric`; else balanced accuracy for unbalanced classes, accuracy for others, and
    the loss for regression."""
    if wanted is not None:
        _require_known(wanted, task, federation)
        return DecidingMetric(wanted, None)
    if "balanced_accuracy" in task.metric_names and (why := _unbalanced(federation)):
        return DecidingMetric("balanced_accuracy", why)
    return DecidingMetric(usual(task), None)


def _require_known(wanted: str, task: Task, federation: Federation) -> None:
    names = selecting(task)
    if wanted not in names:
        raise UsageError(f"eval.metric = {wanted!r} cannot select rounds, since it is not known of every "
                         f"evaluated round of this task: choose one of {', '.join(names)}; what else is "
                         "measured of finished runs, such as functions of your own, is reported beside it")
    held_out = federation.validation
    if wanted != AUROC or federation.is_remote or not len(held_out.indices):
        return
    y = federation.y.numpy()
    if not any(len(np.unique(y[held_out[client]])) > 1 for client in range(federation.population)):
        raise UsageError("eval.metric = 'auroc' is defined for no client: none has validation rows of two "
                         "classes; choose another metric, or raise data.validation")


def _unbalanced(federation: Federation) -> str | None:
    """What is unbalanced, in words; None if nothing is, or if the labels are remote."""
    if federation.is_remote or federation.classes is None:
        return None
    train, y = federation.train.pick(np.arange(federation.population)), federation.y.numpy()
    rows = y[train.indices].astype(np.int64)
    share = np.bincount(rows.ravel()).max() / rows.size
    if share > MOSTLY_ONE:
        return f"{share:.0%} of the training rows are of one class".replace("%", " %")
    if federation.classes != 2 or rows.ndim != 1:
        return None
    ones = np.bincount(np.repeat(np.arange(len(train)), train.sizes), rows, len(train)) / train.sizes
    largest = np.where(train.sizes >= ENOUGH, np.maximum(ones, 1 - ones), 0.0)
    client = int(largest.argmax())
    if largest[client] <= ONE_SIDED:
        return None
    return (f"{largest[client]:.0%} of the training rows of client {federation.names[client]!r} are of one "
            "class").replace("%", " %")


def idle(history: Sequence[Mapping[str, Any]], metric: str) -> int:
    """For how many evaluations the validation figures have not improved: neither the mean of the deciding
    metric nor the mean loss, since an accuracy can stay the same while a model learns. Changes below
    `IMPROVED` count only when they add up."""
    best: dict[str, float] = {}  # the figures that the last improvement came to
    count = 0
    for row in history:
        if "personal" not in row:
            continue
        means = {name: row["personal"]["val"][name]["mean"] for name in (metric, "loss")}
        better = {name: value for name, value in means.items()
                  if value is not None and (name not in best or _improves(name, value, best[name]))}
        best |= better
        count = 0 if better else count + 1
    return count


def _improves(name: str, value: float, before: float) -> bool:
    if name in LOWER:
        return value < before * (1 - IMPROVED["of a loss"])
    return value > before + IMPROVED["of a share"]

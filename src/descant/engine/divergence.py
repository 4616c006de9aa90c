"""When a client's model counts as diverged, so that nobody takes its figures for a result.

A client's level is the larger of two losses: of the best constant prediction, and of the initial model. A
model has diverged if its loss is

    not finite; or
    more than FAR times the level, and the model is not clearly more accurate than a constant (a sure and
    mostly right classifier is overconfident, not diverged); or
    more than LOST times the level: in float32, steps of any sensible size are then lost in rounding.

The constant of a classifier is the uniform prediction, with loss log C: a client with a single class has
entropy 0. That of a regression is the mean of all training targets, or 0 if that is worse for a client. With
a user's own loss only the initial model sets the level.

Training reports no accuracy, and a client may start a round from a model that others pulled far away. So its
mean loss counts as diverged beyond SOARING times the level. A server without data uses the loss of the first
round as the level, except for classifiers.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from descant.core.splits import SplitName
from descant.core.task import Batch, inputs
from descant.errors import DescantError
from descant.models.module import ModuleTask

if TYPE_CHECKING:
    from descant.engine.work import Work

FAR = 10.0
SOARING = 1000.0
LOST = 1e6
CLEARLY = 0.25  # of a constant prediction's errors, the share that a clearly better model avoids
ASKED, ROWS = 25, 8  # clients, and rows of each, that show the loss of the initial model

CLASSIFIERS = ("cross_entropy", "binary_cross_entropy")


class Diverged(DescantError):
    """What the clients sent, or the server made of it, is not finite: the round has not happened, and no
    other can follow."""


class Levels:
    """The levels of a run's clients, computed when they are first needed."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._task, self._federation = work.task, work.federation
        self._loss = work.task.loss_name if isinstance(work.task, ModuleTask) else None
        self._known: dict[SplitName, tuple[np.ndarray, np.ndarray]] = {}

    def diverged(self, figures: torch.Tensor, split: SplitName, clients: np.ndarray) -> np.ndarray:
        """Which clients' models have diverged, by their figures [n, metrics] on a split."""
        metrics = self._task.metric_names
        has_rows = self._federation.split(split).sizes[clients] > 0
        values = dict(zip(metrics, figures[:, : len(metrics)].double().numpy().T, strict=True))
        loss, finite = values["loss"], np.isfinite(values["loss"])
        constant, accuracy = (each[clients] for each in self._constant(split))
        suspect = finite & ~(loss <= FAR * constant)  # also where the constant's loss is not known
        if not (suspect & has_rows).any():
            return np.asarray(has_rows & ~finite)
        level = np.fmax(constant, self.initial)
        far = finite & (loss > FAR * level)
        if "accuracy" in values:
            avoided = values["accuracy"] - accuracy
            far &= ~(avoided > CLEARLY * (1 - accuracy)) | (loss > LOST * level)
        return np.asarray(has_rows & (~finite | far))

    def soars(self, loss: float, first: float) -> bool:
        """Whether the mean training loss of a round has; `first` is that of the first round."""
        if math.isnan(loss):  # nothing was measured
            return False
        loss, first = loss / self._task.heaviest, first / self._task.heaviest
        constant = float(self._constant("train")[0][: self._federation.population].mean())
        if loss <= SOARING * constant:
            return False
        level = float(np.fmax(constant, self.initial))
        return loss > SOARING * (first if math.isnan(level) else level)

    @cached_property
    def initial(self) -> float:
        """The largest mean loss of the initial model among some clients; NaN if their rows are remote."""
        if self._federation.is_remote:
            return math.nan
        asked = np.unique(np.linspace(0, self._federation.population - 1, ASKED).astype(int))
        model, device = self._task.init(), self._work.device
        found = []
        with torch.no_grad():
            for client in asked:
                rows = self._federation.train[client][:ROWS]
                batch = Batch(inputs(self._federation.x[rows], self._task.dtype).to(device),
                              self._federation.y[rows].to(device))
                moved = type(model)(*(part.to(device) for part in model))
                found.append(float(self._task.loss(moved, batch)))
        return max((loss for loss in found if math.isfinite(loss)), default=math.nan)

    def _constant(self, split: SplitName) -> tuple[np.ndarray, np.ndarray]:
        """The loss and the accuracy of constant predictions for each client; NaN if unknown."""
        if split not in self._known:
            self._known[split] = self._losses_of_constants(split), self._shares_of_largest(split)
        return self._known[split]

    def _losses_of_constants(self, split: SplitName) -> np.ndarray:
        everyone = self._federation.everyone
        if self._loss in CLASSIFIERS:
            classes = getattr(self._task, "classes", None) or 2
            return np.full(everyone, math.log(max(classes, 2)))
        if self._loss != "mse" or self._federation.is_remote:
            return np.full(everyone, np.nan)
        y = self._federation.y.double().flatten(1) if self._federation.y.dim() > 1 else (
            self._federation.y.double()[:, None])
        own = self._federation.split(split)
        squares = _sums(y.square().mean(1).numpy()[own.indices], own.sizes) / np.maximum(own.sizes, 1)
        seen = y[torch.from_numpy(self._federation.train.indices)]
        return np.asarray(np.fmax(squares, float(seen.var(0, correction=0).mean())))

    def _shares_of_largest(self, split: SplitName) -> np.ndarray:
        """The share of each client's most frequent class; 1 / C if its rows are remote."""
        classes = getattr(self._task, "classes", None) or 1
        share = np.full(self._federation.everyone, 1 / classes)
        if self._federation.is_remote or "accuracy" not in self._task.metric_names:
            return share
        table = self._federation.split(split)
        for client in np.flatnonzero(table.sizes).tolist():
            labels = self._federation.y[table[client]].long().flatten()
            share[client] = int(torch.bincount(labels).max()) / len(labels)
        return share


def _sums(values: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    owner = np.repeat(np.arange(len(sizes)), sizes)
    return np.bincount(owner, values, minlength=len(sizes))


def symptom(loss: float, scored: dict[str, Any] | None, levels: Levels, first: float) -> str | None:
    """The sign that the models of a round have diverged, or None. `loss` is that of training, `first` that of
    the first round, `scored` the figures of the personal models."""
    if scored is not None and scored["diverged"]:
        return f"{whose(scored)} diverged{_height(scored)}"
    return f"the training diverges: its mean loss is {loss:.3g}" if levels.soars(loss, first) else None


def whose(scored: dict[str, Any]) -> str:
    """The subject of a sentence about diverged models."""
    count, clients = scored["diverged"], scored["clients"]
    return f"the models of {'all' if count == clients else f'{count} of'} {clients} clients have"


def _height(scored: dict[str, Any]) -> str:
    mean = scored["test"]["loss"]["mean"]
    return "" if mean is None else f" (mean test loss {mean:.3g})"


def has_diverged(scored: dict[str, Any] | None) -> bool:
    """Whether the models of half of the clients or more have diverged: then the round is no result."""
    return scored is not None and 2 * scored["diverged"] >= max(1, scored["clients"] - scored["failed"])

"""When a client's model is called diverged, so that nobody takes its figures for a result.

A loss is measured by two that everybody can have: that of the best constant prediction, and that of the
initial model. The larger of them is the client's level. A model has diverged where

    its loss is not finite; or
    it is more than FAR times the level, and the model is not clearly more accurate than a constant; or
    it is more than LOST times the level, whatever its accuracy.

Why so. The constant of a classifier is the uniform prediction, with the loss log C for everyone. The entropy
of the classes would be less, but 10 times the entropy of very unbalanced classes is below the log C at which
an untrained model begins; and that of one client is 0 where it has a single class. The constant of a
regression is the mean of all training targets, or 0 for a client whose own targets lie elsewhere: a model
that has only begun to learn targets around 1000 has not diverged. Where the loss is the user's own, the
initial model alone tells its level.

FAR: a mean cross-entropy of 10 log C means that the classes that were right had a probability of C^-10 in the
(geometric) mean. A classifier can be that sure and mostly right, and is then overconfident, not diverged;
hence the look at its accuracy. Beyond LOST that does not help: outputs of a million, in float32, are held to
a tenth, and steps of any sensible size are lost in rounding.

Training tells no accuracy, and what a client meets in a round may be a model that others have pulled far
away: the mean loss on the way is called diverged beyond SOARING times the level. As divergence grows by a
factor with every step, that comes only a few rounds later. On a server without data the level of what is not
a classification is not known; the loss of the first round stands in for it.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from descant.core.splits import SplitName
from descant.core.task import Batch, inputs
from descant.models.module import ModuleTask

if TYPE_CHECKING:
    from descant.engine.work import Work

FAR = 10.0
SOARING = 1000.0
LOST = 1e6
CLEARLY = 0.25  # share of the errors of a constant prediction that a clearly better model avoids
ASKED, ROWS = 25, 8  # clients, and rows of each, that show the loss of the initial model

CLASSIFIERS = ("cross_entropy", "binary_cross_entropy")


class Levels:
    """What the losses of a run's clients are measured by. Nothing is calculated before it is needed."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._task, self._federation = work.task, work.federation
        self._loss = work.task.loss_name if isinstance(work.task, ModuleTask) else None
        self._known: dict[SplitName, tuple[np.ndarray, np.ndarray]] = {}

    def diverged(self, figures: torch.Tensor, split: SplitName, clients: np.ndarray) -> np.ndarray:
        """Which clients' models have, by their figures [n, metrics] on a split, those of the task first;
        without rows, none."""
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
        """Whether the mean training loss of a round says so; `first` is that of the first round."""
        if math.isnan(loss):  # nothing was measured: models that are not finite are rejected elsewhere
            return False
        constant = float(self._constant("train")[0][: self._federation.population].mean())
        if loss <= SOARING * constant:
            return False
        level = float(np.fmax(constant, self.initial))
        return loss > SOARING * (first if math.isnan(level) else level)

    @cached_property
    def initial(self) -> float:
        """The mean loss of the initial model: the largest of some clients' own. NaN where rows are elsewhere.
        """
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
        """The loss and the accuracy of constant predictions for each client; NaN where they are not known."""
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
        """The share of each client's most frequent class among its rows: at least 1 / C, which alone is known
        of rows that are elsewhere."""
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
    """What says that the models of a round have diverged, in a few words; None if nothing does. `loss` is
    that of training, `first` that of the first round, `scored` the figures of the personal models."""
    if scored is not None and scored["diverged"]:
        return f"{whose(scored)} diverged{_height(scored)}"
    return f"the training diverges: its mean loss is {loss:.3g}" if levels.soars(loss, first) else None


def whose(scored: dict[str, Any]) -> str:
    """Of how many clients the models have."""
    count, clients = scored["diverged"], scored["clients"]
    return f"the models of {'all' if count == clients else f'{count} of'} {clients} clients have"


def _height(scored: dict[str, Any]) -> str:
    mean = scored["test"]["loss"]["mean"]
    return "" if mean is None else f" (mean test loss {mean:.3g})"


def has_diverged(scored: dict[str, Any] | None) -> bool:
    """Whether the models of a round, by its figures of personal models, are no result: those of half of the
    clients or more. Fewer are told, and left to the reader."""
    return scored is not None and 2 * scored["diverged"] >= max(1, scored["clients"] - scored["failed"])

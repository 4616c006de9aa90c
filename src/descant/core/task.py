"""A task: the loss of a model, its gradient, predictions and figures."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad

from descant.core import meter, random
from descant.core.kernels.chunk import ChunkGradients
from descant.core.kernels.lift import is_transformed
from descant.core.metric import LOWER
from descant.core.scoring import (
    loss_figure,
    tally_losses,
)
from descant.core.vector import Layout, Model
from descant.errors import UsageError

BLOCK = 512  # rows per pass where a whole split is read


class Batch(NamedTuple):
    """Some samples of one client. `weight` ([B] bool) marks the real rows of a short batch; None: all.
    `key` (int64) starts the random numbers of this batch. `counts` ([B]; [B, M] for several models) is how
    much the loss of each row counts in the mean over the real rows; None: once."""

    x: Tensor
    y: Tensor
    weight: Tensor | None = None
    key: Tensor | None = None
    counts: Tensor | None = None

    def redrawn(self, k: int) -> Batch:
        """The same samples with other random numbers, for the k-th pass over one batch."""
        return self if self.key is None else self._replace(key=random.fold(self.key, k))

    def of_model(self, m: int) -> Batch:
        """What the m-th of several models takes, with its column of the counts."""
        assert self.counts is not None
        return self._replace(counts=self.counts[..., m])


class Gradient(NamedTuple):
    """The gradient of the mean loss over a batch, with loss and statistics of the same pass."""

    loss: Tensor
    theta: Tensor  # [d]
    stats: Tensor  # [s] the running statistics after this batch


class Pull(NamedTuple):
    """A term of the training loss: the mean over a batch of strength_y ||feature - centre_y||^2."""

    centres: Tensor  # [classes, k]
    strength: Tensor  # [classes]

    def rows(self, features: Tensor, y: Tensor) -> Tensor:
        """The term of each row [B]."""
        y = y.long()
        return self.strength[y] * (features - self.centres[y]).square().sum(-1)


class Task(ABC):
    """Loss, gradient, prediction and metrics of models, each for ONE client."""

    layout: Layout | None
    metric_names: tuple[str, ...]  # "loss" first
    lower_is_better: frozenset[str] = LOWER  # of the metrics; the others: higher
    classes: int | None = None  # of the targets
    draws: bool = False  # whether training needs random numbers (Dropout)
    heaviest: float = 1.0  # the largest weight of a row's loss in training
    rows_at_once: int = 128  # of a split that is predicted: small enough for the cache
    scores_need_x: bool = False  # whether `tally` looks at the samples, not only at outputs and targets
    dim: int
    dtype: torch.dtype
    chunk_gradients: ChunkGradients | None = None  # of many clients at once, where they are written by hand

    @abstractmethod
    def init(self) -> Model:
        """The initial model that all clients share."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A hash of the initial model, constants and loss."""

    @abstractmethod
    def losses(self, model: Model, batch: Batch, *, train: bool = False) -> tuple[Tensor, Tensor]:
        """The loss of each sample [B], and the statistics after the batch (changed in training only)."""

    @abstractmethod
    def predict(self, model: Model, x: Tensor) -> Tensor:
        """The outputs (logits, values) for samples x [n, ...]."""

    @abstractmethod
    def row_losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The loss of each row [B], of what was predicted."""

    @abstractmethod
    def tally(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Sums over the rows that count (float64), from which the figures follow."""

    def flaw(self, tally: Tensor, rows: int) -> str | None:
        """Why this cannot be the tally of so many rows, which a client on another machine claims; else None.
        Losses and errors may be infinite or NaN: models diverge."""
        return None if tally[0] == rows else f"its tally is of {tally[0]:g} rows, and it has {rows}"

    @abstractmethod
    def figures(self, tally: Tensor) -> Tensor:
        """The figures `metric_names` of a tally, or of a sum of tallies; NaN where no row counted."""

    def auroc(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The AUROC of outputs on a whole split []; NaN if undefined."""
        return torch.full((), torch.nan, dtype=torch.float64)

    def metrics(self, outputs: Tensor, batch: Batch) -> Tensor:
        """The figures of outputs on a whole split."""
        return self.figures(self.tally(outputs, batch))

    def mixture(self, outputs: Tensor, shares: Tensor) -> Tensor:
        """The outputs [n, ...] that say what a mixture of models predicts, from those of each [M, n, ...]:
        here their mean. `shares` [M] sum to one."""
        return (shares.view(-1, *[1] * (outputs.dim() - 1)) * outputs).sum(0)

    @property
    def alone(self) -> str | None:
        """Why clients cannot run together; None if they can."""
        return None

    def move_to(self, device: torch.device) -> None:  # noqa: B027 - most tasks have nothing to move
        """Move constants, such as frozen parameters."""

    def loss(self, model: Model, batch: Batch, *, train: bool = False) -> Tensor:
        """The mean loss over a batch."""
        return _mean(self.losses(model, batch, train=train)[0], batch)

    @property
    def feature_width(self) -> int:
        """How many features the last layer with parameters is given."""
        raise _without_features()

    def features(self, model: Model, x: Tensor) -> Tensor:
        """What the last layer with parameters is given for samples x [n, ...]: [n, k]."""
        raise _without_features()

    def grad(self, model: Model, batch: Batch, pull: Pull | None = None) -> Gradient:
        """The gradient of the mean training loss over a batch, with a pull on its features if asked for."""

        found = self._gradient(model, batch) if pull is None else self._pulled_gradient(model, batch, pull)
        if (opened := meter.current()) is not None:
            opened.count(found.loss)
        return found

    def _gradient(self, model: Model, batch: Batch) -> Gradient:
        """The gradient by autograd."""
        return self._differentiated(model, batch, lambda at: (*self.losses(at, batch, train=True), None))

    def _pulled_gradient(self, model: Model, batch: Batch, pull: Pull) -> Gradient:
        """The same with a pull, which does not count in the loss that is told."""
        raise _without_features()

    def _differentiated(self, model: Model, batch: Batch,
                        rows: Callable[[Model], tuple[Tensor, Tensor, Tensor | None]]) -> Gradient:
        """The gradient of the mean of `rows`: losses, statistics, and what else each row adds."""

        def objective(theta: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            losses, stats, more = rows(Model(theta, model.stats))
            loss = _mean(losses, batch)
            total = loss if more is None else loss + _mean(more, batch)
            return total, (loss.detach(), stats.detach())

        if is_transformed(*model, *batch):
            gradient, (loss, stats) = grad(objective, has_aux=True)(model.theta)
            return Gradient(loss, gradient, stats)
        with torch.enable_grad():  # the same for ONE client alone, at half the cost
            theta = model.theta.detach().requires_grad_()
            value, (loss, stats) = objective(theta)
            (gradient,) = torch.autograd.grad(value, theta)
        return Gradient(loss, gradient, stats)

    def hessian(self, model: Model, batch: Batch, v: Tensor) -> Tensor:
        """The Hessian of the mean training loss over a batch, times v [d]; it counts as two gradients."""

        def slope(theta: Tensor) -> Tensor:
            def objective(theta: Tensor) -> Tensor:
                return _mean(self.losses(Model(theta, model.stats), batch, train=True)[0], batch)

            along: Tensor = grad(objective)(theta) @ v
            return along

        product: Tensor = grad(slope)(model.theta)
        if (opened := meter.current()) is not None:
            opened.grad_steps += 2 * opened.clients
        return product


class FunctionTask(Task):
    """The task of any differentiable function of a vector: `losses(theta, x, y) -> losses [B]`.

    For problems that are not networks, above all those whose solutions are known in closed form.
    """

    layout = None
    metric_names = ("loss",)
    scores_need_x = True

    def __init__(self, losses: Callable[[Tensor, Tensor, Tensor], Tensor], theta0: Tensor) -> None:
        self._losses = losses
        self._theta0 = theta0
        self.dim = theta0.numel()
        self.dtype = theta0.dtype

    def init(self) -> Model:
        return Model(self._theta0.clone(), torch.zeros(0, dtype=self.dtype))

    def fingerprint(self) -> str:
        return hashlib.sha256(self._theta0.contiguous().numpy().data).hexdigest()[:16]

    def losses(self, model: Model, batch: Batch, *, train: bool = False) -> tuple[Tensor, Tensor]:
        return self._losses(model.theta, batch.x, batch.y), model.stats

    def predict(self, model: Model, x: Tensor) -> Tensor:
        """The model itself for every sample."""
        return model.theta.expand(len(x), -1)

    def row_losses(self, outputs: Tensor, batch: Batch) -> Tensor:
        return self._losses(outputs[0], batch.x, batch.y)

    def tally(self, outputs: Tensor, batch: Batch) -> Tensor:
        weight = None if batch.weight is None else batch.weight[None]
        return tally_losses(self.row_losses(outputs, batch)[None], weight)[0]

    def figures(self, tally: Tensor) -> Tensor:
        return loss_figure(tally)[None].to(self.dtype)


def inputs(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Samples as a model takes them: bytes become numbers in [0, 1], tokens stay."""
    if x.dtype == torch.uint8:
        return x.to(dtype).mul_(1 / 255)
    return x


def _without_features() -> UsageError:
    return UsageError("the model has no features: it is a function of a vector, not a network with layers")


def _mean(values: Tensor, batch: Batch) -> Tensor:
    """The mean over the rows that are real, as often as they count."""
    if batch.counts is not None:
        values = values * batch.counts
    if batch.weight is None:
        return values.mean()
    return values.where(batch.weight, 0.0).sum() / batch.weight.sum()

"""A task whose rows can be asked for nothing but private gradients: what `local` is given where every row is
protected."""

from __future__ import annotations

from collections import defaultdict
from typing import NoReturn

import torch
from torch import Tensor
from torch.func import grad, vmap

from descant.core import meter
from descant.core.kernels.lift import over_clients
from descant.core.privacy.gradients import PrivateGradients, clipped, forms_no_rows, noise_of, shares
from descant.core.privacy.settings import Mechanism
from descant.core.task import Batch, Gradient, Pull, Task
from descant.core.vector import Model
from descant.errors import UsageError

ROWS = 64  # whose gradients are formed at once, where they must be


class NotPrivate(UsageError):
    """A method asks for something of its rows that is not protected."""

    def __init__(self, what: str) -> None:
        super().__init__(f'it uses {what}, which privacy.unit = "record" does not protect')


class PrivateTask(Task):
    """The gradients of another task, of clipped rows and with noise. Statistics of the rows, which only
    BatchNorm has, are refused."""

    draws = True  # batches have a key: noise follows from it

    def __init__(self, plain: Task, mechanism: Mechanism, sample_axes: int) -> None:
        self._plain, self._mechanism = plain, mechanism
        self.layout, self.metric_names, self.classes = plain.layout, plain.metric_names, plain.classes
        self.dim, self.dtype = plain.dim, plain.dtype
        if plain.init().stats.numel():
            raise UsageError('privacy.unit = "record": the model keeps statistics of its batches, as '
                             "BatchNorm does, and these would tell of single rows: use GroupNorm or "
                             "LayerNorm in its place")
        found = plain.chunk_gradients
        if found is not None and forms_no_rows(found.chain, sample_axes):
            self.chunk_gradients = PrivateGradients(found, mechanism)

    def init(self) -> Model:
        return self._plain.init()

    def fingerprint(self) -> str:
        return self._plain.fingerprint()

    @property
    def alone(self) -> str | None:
        return self._plain.alone

    def _gradient(self, model: Model, batch: Batch) -> Gradient:
        if self.chunk_gradients is not None:
            found = over_clients(self.chunk_gradients.gradient, model.theta, None, *batch)
        else:
            found = over_clients(self._by_rows, model.theta, *batch)
        if found is None:  # under a transform of the method's own
            raise NotPrivate("gradients under a transform of torch.func")
        loss, theta = found
        return Gradient(loss, theta, model.stats)

    def _by_rows(self, theta: Tensor, x: Tensor, y: Tensor, weight: Tensor | None, key: Tensor | None,
                 counts: Tensor | None) -> tuple[Tensor, ...]:
        """The losses and gradients of clients, from gradients of single rows."""
        share = shares(x, weight, counts, theta.dtype)
        losses, sums = [], []
        for k in range(len(theta)):
            real = slice(None) if weight is None else weight[k]  # what only fills up costs nothing
            loss, total = self._summed(theta[k], x[k][real], y[k][real], None if key is None else key[k])
            losses.append(share[k] * loss)
            sums.append(share[k] * total)
        found = torch.stack(sums)
        noise_of(self._mechanism, share, theta.shape[1:], key).add(found, 0, 1.0)
        return torch.stack(losses), found

    def _summed(self, theta: Tensor, x: Tensor, y: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sums over ONE client's batch of the losses, and of the clipped gradients."""
        loss, total = theta.new_zeros(()), torch.zeros_like(theta)
        for start in range(0, len(x), ROWS):
            some = slice(start, start + ROWS)
            losses, rows = self._of_rows(theta, x[some], y[some], key)
            factor = clipped(torch.linalg.vector_norm(rows, dim=1)[None], None, self._mechanism)[0]
            loss, total = loss + losses.sum(), total + factor @ rows
        return loss, total

    def _of_rows(self, theta: Tensor, x: Tensor, y: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor]:
        """Losses [B] and gradients [B, d] of single rows. All see the same Dropout: it is no secret."""
        stats = theta.new_zeros(0)

        def loss_of(theta: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            batch = Batch(x[None], y[None], None, key)
            loss = self._plain.losses(Model(theta, stats), batch, train=True)[0][0]
            return loss, loss.detach()

        if self._plain.alone is None:
            gradients, losses = vmap(grad(loss_of, has_aux=True), (None, 0, 0))(theta, x, y)
            return losses, gradients
        found = [self._plain.grad(Model(theta, stats), Batch(x[k : k + 1], y[k : k + 1], None, key))
                 for k in range(len(x))]
        return torch.stack([each.loss for each in found]), torch.stack([each.theta for each in found])

    # -- what is not protected ---------------------------------------------------------------------

    def _pulled_gradient(self, model: Model, batch: Batch, pull: Pull) -> NoReturn:
        raise NotPrivate("a pull on the features of its rows")

    def losses(self, model: Model, batch: Batch, *, train: bool = False) -> NoReturn:
        raise NotPrivate("the losses of its rows")

    def loss(self, model: Model, batch: Batch, *, train: bool = False) -> NoReturn:
        raise NotPrivate("the losses of its rows")

    def hessian(self, model: Model, batch: Batch, v: Tensor) -> NoReturn:
        raise NotPrivate("second derivatives of the losses of its rows")

    def predict(self, model: Model, x: Tensor) -> NoReturn:
        raise NotPrivate("predictions for its rows")

    def features(self, model: Model, x: Tensor) -> NoReturn:
        raise NotPrivate("the features of its rows")

    def row_losses(self, outputs: Tensor, batch: Batch) -> NoReturn:
        raise NotPrivate("the losses of its rows")

    def tally(self, outputs: Tensor, batch: Batch) -> NoReturn:
        raise NotPrivate("figures of its rows")

    def figures(self, tally: Tensor) -> NoReturn:
        raise NotPrivate("figures of its rows")


class CountingTask(PrivateTask):
    """For a dry run: it counts how many gradients a step asks for on each of its batches, and gives zeros."""

    def __init__(self, plain: Task, mechanism: Mechanism, sample_axes: int, batches: int) -> None:
        super().__init__(plain, mechanism, sample_axes)
        self.chunk_gradients = None  # every gradient is asked for by itself
        self._steps: defaultdict[int, list[int]] = defaultdict(lambda: [0] * batches)

    @property
    def counts(self) -> tuple[int, ...]:
        """Of the step that asks for most."""
        return tuple([max(asked) for asked in zip(*self._steps.values(), strict=True)]) or (0,)

    def _gradient(self, model: Model, batch: Batch) -> Gradient:
        opened = meter.current()
        assert opened is not None
        at = [k for k, y in enumerate(opened.offered) if y is batch.y]
        if opened.at_step is None or not at:
            raise NotPrivate("the gradient of a batch outside its step")
        self._steps[opened.at_step[0]][at[0]] += 1
        return Gradient(model.theta.new_zeros(()), torch.zeros_like(model.theta), model.stats)

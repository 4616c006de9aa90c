"""Local solvers: a few descent steps on `loss(theta) + prior.energy(theta)`, for ONE client.

A solver is a small value with the optimizer's settings; its state is a tree of tensors, so that it
can ride in the carry of `data.scan` and be vectorised like everything else. Those that a user can name have
their step a second time, in place, for all clients of a chunk at once (`fused.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from descant.core.algorithm import ClientData
from descant.core.fields import Checked, hyper
from descant.core.parts import Part
from descant.core.ranges import Step
from descant.core.task import Batch, Task
from descant.core.tree import Tree, stack, take
from descant.core.vector import Model
from descant.errors import UsageError
from descant.priors import fused
from descant.priors.fused import Add
from descant.priors.prior import Prior
from descant.priors.quadratic import Flat, Gaussian, add_pull_, descend_, descended
from descant.priors.schedule import Schedule, factor_now, is_by_step


class Optimizer(Protocol):
    """How a step is made: `Solver` has those that a user can name."""

    def init(self, theta: Tensor) -> Tree:
        """The state before the first step."""

    def step(self, theta: Tensor, gradient: Tensor, prior: Prior, state: Tree) -> tuple[Tensor, Tree]:
        """theta and the state after a step, for the gradient of the loss."""


def decayed(gradient: Tensor, theta: Tensor, weight_decay: float) -> Tensor:
    """The gradient of f(theta) + weight_decay/2 ||theta||^2, from that of f."""
    return torch.add(gradient, theta, alpha=weight_decay) if weight_decay else gradient


@dataclass(frozen=True, kw_only=True)
class Trained(Checked):
    """What every solver has besides its own step."""

    clip: float | None = hyper(
        None, "largest norm of the gradient of a step's loss, over all parameters that are trained; a longer "
              "one is shortened; absent: any", gt=0)
    schedule: Schedule | None = hyper(
        None, "how lr changes from round to round, or from step to step; absent: not at all")

    @property
    def rate(self) -> Any:
        """The step size of the present step: a number, or a tensor [] where it changes from step to step."""
        lr: float = self.lr  # type: ignore[attr-defined]
        return lr * factor_now(self.schedule) if is_by_step(self.schedule) else lr  # type: ignore[arg-type]

    def clipped(self, gradient: Tensor) -> Tensor:
        """As torch.nn.utils.clip_grad_norm_ does it, of ONE client's step."""
        if self.clip is None:
            return gradient
        return gradient * torch.clamp(self.clip / (torch.linalg.vector_norm(gradient) + 1e-6), max=1.0)


def less(theta: Tensor, direction: Tensor, lr: Any) -> Tensor:
    """theta - lr * direction in one pass: the same to the last bit, whether lr is a number or a tensor."""
    if isinstance(lr, Tensor):
        return torch.addcmul(theta, direction, lr, value=-1)
    return torch.sub(theta, direction, alpha=lr)


@dataclass(frozen=True)
class SGD(Trained):
    """theta <- theta - lr v, with v <- momentum v + gradient + weight_decay theta."""

    name: ClassVar[str] = "sgd"
    is_linear: ClassVar[bool] = True  # in parameters, gradient and prior, and alike for every parameter
    lr: float = hyper(0.05, "step size", gt=0, search=Step(0.001, 1.0))
    momentum: float = hyper(0.0, "share of the last direction that is kept", ge=0, lt=1)
    weight_decay: float = hyper(0.0, "strength of the pull to zero", ge=0)

    def init(self, theta: Tensor) -> Tree:
        return torch.zeros_like(theta) if self.momentum else ()

    def step(self, theta: Tensor, gradient: Tensor, prior: Prior, state: Tree) -> tuple[Tensor, Tree]:
        direction, lr = decayed(self.clipped(gradient), theta, self.weight_decay), self.rate
        if not self.momentum:
            return less(descended(prior, theta, lr), direction, lr), state
        direction = torch.add(direction, state, alpha=self.momentum)
        direction = state = direction if type(prior) is Flat else direction + prior.grad(theta)
        return less(theta, direction, lr), state

    def remembered(self) -> int:
        return 1 if self.momentum else 0

    def step_(self, theta: Tensor, add: Add, prior: Prior, memory: list[Tensor], number: int) -> None:
        if isinstance(prior, Gaussian) and isinstance(prior.precision, float) and not self.momentum:
            # what is kept of theta is a part of the gradient's product
            add(theta, 1 - self.lr * (prior.precision + self.weight_decay), -self.lr)
            theta.add_(prior.mean, alpha=self.lr * prior.precision)
            return
        if not self.momentum:
            descend_(prior, theta, self.lr, self.weight_decay)
            add(theta, 1.0, -self.lr)
            return
        [direction] = memory
        add(direction, self.momentum, 1.0)
        add_pull_(direction, prior, theta, self.weight_decay)
        theta.sub_(direction, alpha=self.lr)


_FUSED = getattr(torch, "_fused_adam_", None)  # what torch.optim has: a step of Adam in one pass


@lru_cache(1024)
def _counted(number: int) -> Tensor:
    return torch.tensor(float(number), device="cpu")


class AdamState(NamedTuple):
    first: Tensor  # [d] mean of the gradients
    second: Tensor  # [d] mean of their squares
    steps: Tensor  # [] made so far


@dataclass(frozen=True)
class Adam(Trained):
    """Adam (Kingma and Ba 2015), its moments starting anew with every call of `solve`."""

    name: ClassVar[str] = "adam"
    lr: float = hyper(0.001, "step size", gt=0, search=Step(0.0001, 0.1))
    beta1: float = hyper(0.9, "decay of the mean of the gradients", ge=0, lt=1)
    beta2: float = hyper(0.999, "decay of the mean of their squares", ge=0, lt=1)
    eps: float = hyper(1e-8, "added to the denominator", gt=0)
    weight_decay: float = hyper(0.0, "strength of the pull to zero, as part of the gradient", ge=0)

    def init(self, theta: Tensor) -> AdamState:
        return AdamState(torch.zeros_like(theta), torch.zeros_like(theta),
                         torch.zeros((), dtype=theta.dtype))

    def step(self, theta: Tensor, gradient: Tensor, prior: Prior, state: AdamState
             ) -> tuple[Tensor, AdamState]:
        g = self.clipped(gradient) + prior.grad(theta) + self._ridge * theta
        steps = state.steps + 1
        first = torch.lerp(g, state.first, self.beta1)
        second = torch.lerp(g.square(), state.second, self.beta2)
        denominator = (second / (1 - self.beta2**steps)).sqrt() + self.eps
        kept = theta if not self._decay else (1 - self.rate * self._decay) * theta
        theta = kept - self.rate * (first / (1 - self.beta1**steps)) / denominator
        return theta, AdamState(first, second, steps)

    @property
    def _ridge(self) -> float:
        """The weight decay that is a part of the gradient."""
        return self.weight_decay

    @property
    def _decay(self) -> float:
        """The weight decay that is beside it."""
        return 0.0

    def remembered(self) -> int:
        return 3

    def step_(self, theta: Tensor, add: Add, prior: Prior, memory: list[Tensor], number: int) -> None:
        g, first, second = memory
        add(g, 0.0, 1.0)
        fused = _FUSED if theta.is_cpu and all(each.is_contiguous() for each in (theta, *memory)) else None
        to_zero = 0.0
        if (fused is not None and not self._decay and isinstance(prior, Gaussian)
                and isinstance(prior.precision, float)):  # what draws to zero is a part of torch's one pass
            g.sub_(prior.mean, alpha=prior.precision)
            to_zero = prior.precision + self._ridge
        else:
            add_pull_(g, prior, theta, self._ridge)
        if self._decay:
            theta.mul_(1 - self.lr * self._decay)
        if fused is not None:
            fused([theta], [g], [first], [second], [], [_counted(number)], lr=self.lr,
                  beta1=self.beta1, beta2=self.beta2, weight_decay=to_zero, eps=self.eps, amsgrad=False,
                  maximize=False)
            return
        first.lerp_(g, 1 - self.beta1)
        second.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
        denominator = (second / (1 - self.beta2**number)).sqrt_().add_(self.eps)
        theta.addcdiv_(first, denominator, value=-self.lr / (1 - self.beta1**number))


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019): theta <- (1 - lr weight_decay) theta
    minus the step of Adam, whose moments know nothing of the decay."""

    name: ClassVar[str] = "adamw"
    weight_decay: float = hyper(0.01, "strength of the pull to zero, beside the gradient", ge=0)

    @property
    def _ridge(self) -> float:
        return 0.0

    @property
    def _decay(self) -> float:
        return self.weight_decay


@dataclass(frozen=True)
class Proximal(Trained):
    """theta <- prox(theta - lr (gradient + weight_decay theta)): the prior in closed form.

    Stable for any strength of the prior, where SGD needs lr (L + lam) < 2.
    """

    name: ClassVar[str] = "proximal"
    is_linear: ClassVar[bool] = True  # in parameters, gradient and prior, and alike for every parameter
    lr: float = hyper(0.05, "step size", gt=0, search=Step(0.001, 1.0))
    weight_decay: float = hyper(0.0, "strength of the pull to zero", ge=0)

    def init(self, theta: Tensor) -> Tree:
        return ()

    def step(self, theta: Tensor, gradient: Tensor, prior: Prior, state: Tree) -> tuple[Tensor, Tree]:
        direction = decayed(self.clipped(gradient), theta, self.weight_decay)
        return prior.prox(theta - self.rate * direction, self.rate), state

    def remembered(self) -> int:
        return 0

    def step_(self, theta: Tensor, add: Add, prior: Prior, memory: list[Tensor], number: int) -> None:
        add(theta, 1 - self.lr * self.weight_decay, -self.lr)
        if not isinstance(prior, Flat):
            theta.copy_(prior.prox(theta, self.lr))


Solver: TypeAlias = SGD | Adam | AdamW | Proximal
SOLVERS: dict[str, type[SGD] | type[Adam] | type[Proximal]] = {
    cls.name: cls for cls in (SGD, Adam, AdamW, Proximal)}


def require_ridge(solver: Solver, method: str) -> None:
    """Refuse decoupled weight decay in a method that makes a ridge of it, on another vector than theta."""
    if isinstance(solver, AdamW):
        raise UsageError(f"{method}.solver: the weight decay of {method} is a ridge in its loss, which AdamW "
                         "has not: use adam")


def step_size(solver: Solver) -> float | None:
    """The step on loss and prior together; None where the solver adapts it or treats the prior exactly."""
    return solver.lr if isinstance(solver, SGD) else None


def descend(task: Task, model: Model, batch: Batch, solver: Optimizer, prior: Prior = Flat(),
            state: Tree = None, scale: Tensor | float = 1.0, only: Part | None = None) -> tuple[Model, Tree]:
    """One step on one batch, on scale * loss + prior; with `only`, what is not trained does not count in the
    norm that is clipped."""
    gradient = task.grad(model, batch)
    if state is None:
        state = solver.init(model.theta)
    slope = gradient.theta if isinstance(scale, float) and scale == 1 else scale * gradient.theta
    if only is not None and getattr(solver, "clip", None) is not None:
        slope = only.moved(torch.zeros_like(slope), slope)
    theta, state = solver.step(model.theta, slope, prior, state)
    return Model(theta, gradient.stats), state


def inner_solve(task: Task, model: Model, batch: Batch, solver: Optimizer, prior: Prior, steps: int) -> Model:
    """Some steps on one batch: the inner problem of methods with a proximal term."""
    if (solved := fused.inner_solve(task, model, batch, solver, prior, steps)) is not None:
        return solved
    state = solver.init(model.theta)
    for k in range(steps):
        model, state = descend(task, model, batch.redrawn(k), solver, prior, state)
    return model


def finetuned(task: Task, model: Model, data: ClientData, solver: Optimizer, steps: int) -> Model:
    """Some steps on the mean loss of all the client's rows: the FT of pFedBreD's tables, which takes one."""
    state = solver.init(model.theta)

    def gradient(model: Model) -> Tensor:
        found: Tensor = data.mean(lambda batch: task.grad(model, batch).theta)
        return found

    for _ in range(steps):
        theta, state = solver.step(model.theta, gradient(model), Flat(), state)
        model = Model(theta, model.stats)
    return model


def solve(task: Task, model: Model, data: ClientData, solver: Optimizer, prior: Prior = Flat(),
          scale: Tensor | float = 1.0, which: int = 0, only: Part | None = None) -> Model:
    """A step on one batch of each of the client's steps, on scale * loss + prior, starting from `model`.
    `which` batch, where a step has several. With `only`, the rest of the parameters stays as it is; running
    statistics follow the batches all the same."""
    if (fast := fused.solve(task, [model], data, solver, prior, scale, which, only)) is not None:
        return fast[0]

    def step(carry: tuple[Model, Tree], *batches: Batch) -> tuple[Model, Tree]:
        (theta, stats), state = descend(task, carry[0], batches[which], solver, prior, carry[1], scale,
                                        only)
        return Model(theta if only is None else only.moved(model.theta, theta), stats), state

    solved, _ = data.scan(step, (model, solver.init(model.theta)))
    return solved  # type: ignore[no-any-return]


def solve_each(task: Task, models: Model, data: ClientData, solver: Optimizer, counts: Tensor) -> Model:
    """Several models [M, ...] on the same batches, a step of each on each of the client's steps. For model m
    the training rows count `counts[:, m]` [n, M]: a step is on the mean of counts * loss over the batch."""
    each, data = [take(models, m) for m in range(len(models.theta))], data.counted(counts)
    if (fast := fused.solve(task, each, data, solver, counted=True)) is not None:
        return stack(fast)  # type: ignore[no-any-return]

    def step(carry: tuple[tuple[Model, Tree], ...], batch: Batch) -> tuple[tuple[Model, Tree], ...]:
        return tuple(descend(task, model, batch.of_model(m), solver, state=state)
                     for m, (model, state) in enumerate(carry))

    solved = data.scan(step, tuple((model, solver.init(model.theta)) for model in each))
    return stack([model for model, _ in solved])  # type: ignore[no-any-return]

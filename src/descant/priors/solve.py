"""Local solvers: a few descent steps on `loss(theta) + prior.energy(theta)`, for ONE client.

A solver is a small value with the optimizer's settings; its state is a tree of tensors, so that it
can ride in the carry of `data.scan` and be vectorised like everything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from descant.core.algorithm import ClientData
from descant.core.fields import Checked, hyper
from descant.core.ranges import Step
from descant.core.task import Batch, Task
from descant.core.tree import Tree
from descant.core.vector import Model
from descant.priors.prior import Prior
from descant.priors.quadratic import Flat, descended


class Optimizer(Protocol):
    """How a step is made: `Solver` has those that a user can name."""

    def init(self, theta: Tensor) -> Tree:
        """The state before the first step."""

    def step(self, theta: Tensor, gradient: Tensor, prior: Prior, state: Tree) -> tuple[Tensor, Tree]:
        """theta and the state after a step, for the gradient of the loss."""


def decayed(gradient: Tensor, theta: Tensor, weight_decay: float) -> Tensor:
    """The gradient of f(theta) + weight_decay/2 ||theta||^2, from that of f."""
    return torch.add(gradient, theta, alpha=weight_decay) if weight_decay else gradient


@dataclass(frozen=True)
class SGD(Checked):
    """theta <- theta - lr v, with v <- momentum v + gradient + weight_decay theta."""

    name: ClassVar[str] = "sgd"
    lr: float = hyper(0.05, "step size", gt=0, search=Step(0.001, 1.0))
    momentum: float = hyper(0.0, "share of the last direction that is kept", ge=0, lt=1)
    weight_decay: float = hyper(0.0, "strength of the pull to zero", ge=0)

    def init(self, theta: Tensor) -> Tree:
        return torch.zeros_like(theta) if self.momentum else ()

    def step(self, theta: Tensor, gradient: Tensor, prior: Prior, state: Tree) -> tuple[Tensor, Tree]:
        direction = decayed(gradient, theta, self.weight_decay)
        if not self.momentum:
            return torch.sub(descended(prior, theta, self.lr), direction, alpha=self.lr), state
        direction = state = self.momentum * state + direction + prior.grad(theta)
        return torch.sub(theta, direction, alpha=self.lr), state


class AdamState(NamedTuple):
    first: Tensor  # [d] mean of the gradients
    second: Tensor  # [d] mean of their squares
    steps: Tensor  # [] made so far


@dataclass(frozen=True)
class Adam(Checked):
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
        g = gradient + prior.grad(theta) + self.weight_decay * theta
        steps = state.steps + 1
        first = torch.lerp(g, state.first, self.beta1)
        second = torch.lerp(g.square(), state.second, self.beta2)
        denominator = (second / (1 - self.beta2**steps)).sqrt() + self.eps
        theta = theta - self.lr * (first / (1 - self.beta1**steps)) / denominator
        return theta, AdamState(first, second, steps)


@dataclass(frozen=True)
class Proximal(Checked):
    """theta <- prox(theta - lr (gradient + weight_decay theta)): the prior in closed form.

    Stable for any strength of the prior, where SGD needs lr (L + lam) < 2.
    """

    name: ClassVar[str] = "proximal"
    lr: float = hyper(0.05, "step size", gt=0, search=Step(0.001, 1.0))
    weight_decay: float = hyper(0.0, "strength of the pull to zero", ge=0)

    def init(self, theta: Tensor) -> Tree:
        return ()

    def step(self, theta: Tensor, gradient: Tensor, prior: Prior, state: Tree) -> tuple[Tensor, Tree]:
        return prior.prox(theta - self.lr * decayed(gradient, theta, self.weight_decay), self.lr), state


Solver: TypeAlias = SGD | Adam | Proximal
SOLVERS: dict[str, type[SGD] | type[Adam] | type[Proximal]] = {cls.name: cls for cls in (SGD, Adam, Proximal)}


def step_size(solver: Solver) -> float | None:
    """The step on loss and prior together; None where the solver adapts it or treats the prior exactly."""
    return solver.lr if isinstance(solver, SGD) else None


def descend(task: Task, model: Model, batch: Batch, solver: Optimizer, prior: Prior = Flat(),
            state: Tree = None, scale: Tensor | float = 1.0) -> tuple[Model, Tree]:
    """One step on one batch, on scale * loss + prior."""
    gradient = task.grad(model, batch)
    if state is None:
        state = solver.init(model.theta)
    slope = gradient.theta if isinstance(scale, float) and scale == 1 else scale * gradient.theta
    theta, state = solver.step(model.theta, slope, prior, state)
    return Model(theta, gradient.stats), state


def inner_solve(task: Task, model: Model, batch: Batch, solver: Optimizer, prior: Prior, steps: int) -> Model:
    """Some steps on one batch: the inner problem of methods with a proximal term."""
    state = solver.init(model.theta)
    for k in range(steps):
        model, state = descend(task, model, batch.redrawn(k), solver, prior, state)
    return model


def solve(task: Task, model: Model, data: ClientData, solver: Optimizer, prior: Prior = Flat(),
          scale: Tensor | float = 1.0) -> Model:
    """One step on each batch of the client, on scale * loss + prior, starting from `model`."""

    def step(carry: tuple[Model, Tree], batch: Batch) -> tuple[Model, Tree]:
        return descend(task, carry[0], batch, solver, prior, carry[1], scale)

    solved, _ = data.scan(step, (model, solver.init(model.theta)))
    return solved  # type: ignore[no-any-return]

"""What FedMAP's server minimises: M(gamma) = sum_k w_k min_theta { L_k(theta) + R(theta, gamma) }.

For losses that are convex and models that are small: the inner problems are solved to rounding by Newton's
method, so that M and its gradient are exact. docs/methods/fedmap.md says when M has one minimum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.func import grad, jacrev

from descant.core.federation import Federation
from descant.core.task import Batch, Task, inputs
from descant.core.tree import Tree
from descant.core.vector import Model
from descant.errors import DescantError
from descant.priors.energy import Energy, server_gradient
from descant.priors.precision import DiagonalVariance, FixedVariance, LearnedVariance

Loss: TypeAlias = Callable[[Tensor], Tensor]  # theta [d] -> L_k(theta)
Gaussian: TypeAlias = FixedVariance | DiagonalVariance | LearnedVariance


class Envelope(NamedTuple):
    """M at a gamma, and what it is made of."""

    value: Tensor  # []
    grad: Tree  # sum_k w_k grad_gamma R(theta_k, gamma), by Danskin's theorem
    thetas: Tensor  # [clients, d] the minimisers theta_k


def envelope(losses: Sequence[Loss], prior: Gaussian | Energy, gamma: Tree, weights: Tensor) -> Envelope:
    """M(gamma), for weights that sum to one. gamma is the mean of a Gaussian with fixed variance, the pair
    (mean, s) of one with learned variance (`MeanAndVariance`), or what the energy knows it to be."""
    family = as_energy(prior)

    def objective(loss: Loss) -> Loss:
        return lambda theta: loss(theta) + family.energy(theta, gamma)

    problems = [objective(loss) for loss in losses]
    thetas = torch.stack([_least(problem, family.centre(gamma)) for problem in problems])
    least = torch.stack([problem(theta) for problem, theta in zip(problems, thetas, strict=True)])
    return Envelope(weights @ least + family.penalty(gamma),
                    server_gradient(family, gamma, thetas, weights), thetas)


def client_losses(task: Task, federation: Federation, likelihood: Literal["mean", "sum"] = "mean"
                  ) -> list[Loss]:
    """L_k of every client: the mean (Eq. 7) or the sum (Eq. 2) of the losses of its training samples."""

    def loss_of(client: int) -> Loss:
        rows = federation.train[client]
        batch = Batch(inputs(federation.x[rows], task.dtype), federation.y[rows])
        stats, scale = task.init().stats, len(rows) if likelihood == "sum" else 1
        return lambda theta: scale * task.loss(Model(theta, stats), batch)

    return [loss_of(client) for client in range(federation.population)]


class MeanAndVariance(NamedTuple):
    """gamma of a Gaussian prior with learned variance."""

    mean: Tensor  # [d]
    s: Tensor  # [d] the variance is s + c


@dataclass(frozen=True)
class _FixedVariance(Energy):
    name: ClassVar[str] = "fixed"
    sigma2: float

    def energy(self, theta: Tensor, gamma: Tensor) -> Tensor:
        return (theta - gamma).square().sum() / (2 * self.sigma2)


@dataclass(frozen=True)
class _DiagonalVariance(Energy):
    name: ClassVar[str] = "diagonal"
    sigma2: tuple[float, ...]

    def energy(self, theta: Tensor, gamma: Tensor) -> Tensor:
        return ((theta - gamma).square() / theta.new_tensor(self.sigma2)).sum() / 2


@dataclass(frozen=True)
class _LearnedVariance(Energy):
    """R of Lemma 1."""

    name: ClassVar[str] = "learned"
    c: float
    epsilon: float

    def energy(self, theta: Tensor, gamma: MeanAndVariance) -> Tensor:
        return ((theta - gamma.mean).square() / (gamma.s + self.c)).sum() / 2

    def penalty(self, gamma: MeanAndVariance) -> Tensor:
        return self.epsilon * (gamma.mean.square().sum() + gamma.s.square().sum())

    def centre(self, gamma: MeanAndVariance) -> Tensor:
        return gamma.mean


def as_energy(prior: Gaussian | Energy) -> Energy:
    """A prior as the function R(theta, gamma) that it stands for."""
    if isinstance(prior, FixedVariance):
        return _FixedVariance(prior.sigma2)
    if isinstance(prior, DiagonalVariance):
        return _DiagonalVariance(prior.sigma2)
    return _LearnedVariance(prior.c, prior.epsilon) if isinstance(prior, LearnedVariance) else prior


def _least(f: Loss, start: Tensor, steps: int = 100) -> Tensor:
    """The minimiser of a strongly convex function: Newton's method, with halved steps where it overshoots."""
    theta = start
    for _ in range(steps):
        gradient, value = grad(f)(theta), f(theta)
        direction = torch.linalg.solve(jacrev(grad(f))(theta), gradient)
        decrement = gradient @ direction  # twice what a quadratic could still fall
        if decrement <= 1e-24 * (1 + value.abs()):
            return theta
        size = 1.0
        if decrement > 1e-10 * (1 + value.abs()):  # else rounding decides whether it falls
            while f(theta - size * direction) > value - size / 4 * decrement and size > 1e-4:
                size /= 2
        theta = theta - size * direction
    raise DescantError("a client's problem min L_k + R was not solved by Newton's method: is it convex?")

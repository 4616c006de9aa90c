"""Priors with a quadratic energy: none at all, a Gaussian, and a linear-quadratic one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from descant.priors.prior import Prior


class Flat(NamedTuple):
    """No belief at all: energy 0."""

    def energy(self, theta: Tensor) -> Tensor:
        return torch.zeros((), dtype=theta.dtype)

    def grad(self, theta: Tensor) -> Tensor:
        return torch.zeros_like(theta)

    def prox(self, theta: Tensor, step: float) -> Tensor:
        return theta

    def scaled(self, factor: Tensor | float) -> Flat:
        return self


class Gaussian(NamedTuple):
    """A Gaussian around `mean`: energy sum_j precision_j (theta_j - mean_j)^2 / 2.

    `precision` is one number for all coordinates (the lambda of proximal methods), or one for each.
    """

    mean: Tensor  # [d]
    precision: Tensor | float  # scalar or [d]

    def energy(self, theta: Tensor) -> Tensor:
        return (self.precision * (theta - self.mean).square()).sum() / 2

    def grad(self, theta: Tensor) -> Tensor:
        return self.precision * (theta - self.mean)

    def prox(self, theta: Tensor, step: float) -> Tensor:
        pull = step * self.precision
        return (theta + pull * self.mean) / (1 + pull)

    def scaled(self, factor: Tensor | float) -> Gaussian:
        return Gaussian(self.mean, factor * self.precision)


class Quadratic(NamedTuple):
    """Energy pull/2 ||theta||^2 + slope'theta. A Gaussian around -slope / pull, which is not formed: the pull
    may be small, or zero (a control variate)."""

    slope: Tensor  # [d]
    pull: Tensor | float = 0.0

    def energy(self, theta: Tensor) -> Tensor:
        return self.pull * theta.square().sum() / 2 + self.slope @ theta

    def grad(self, theta: Tensor) -> Tensor:
        return self.pull * theta + self.slope

    def prox(self, theta: Tensor, step: float) -> Tensor:
        return (theta - step * self.slope) / (1 + step * self.pull)

    def scaled(self, factor: Tensor | float) -> Quadratic:
        return Quadratic(factor * self.slope, factor * self.pull)


def descended(prior: Prior, theta: Tensor, step: float) -> Tensor:
    """A gradient step on the energy alone: theta - step * prior.grad(theta)."""
    if type(prior) is Flat:
        return theta
    if type(prior) is Gaussian:  # in one pass over the vector; a subclass may pull otherwise
        return torch.lerp(theta, prior.mean, step * prior.precision)
    return theta - step * prior.grad(theta)


def descend_(prior: Prior, theta: Tensor, step: float, weight_decay: float) -> None:
    """In place, for one client or many: theta <- theta - step (prior.grad(theta) + weight_decay theta)."""
    if isinstance(prior, Gaussian) and not weight_decay:
        theta.lerp_(prior.mean, step * prior.precision)
    elif isinstance(prior, Gaussian):
        theta.mul_(1 - step * (prior.precision + weight_decay)).add_(step * prior.precision * prior.mean)
    elif isinstance(prior, Quadratic):
        shrunk = 1 - step * (prior.pull + weight_decay)
        if isinstance(shrunk, Tensor) or shrunk != 1:
            theta.mul_(shrunk)
        theta.sub_(prior.slope, alpha=step)
    elif weight_decay:
        theta.mul_(1 - step * weight_decay)


def add_pull_(gradient: Tensor, prior: Prior, theta: Tensor, weight_decay: float) -> None:
    """In place: gradient <- gradient + prior.grad(theta) + weight_decay theta."""
    if isinstance(prior, Gaussian) and isinstance(prior.precision, float):
        gradient.add_(theta - prior.mean, alpha=prior.precision)
    elif not isinstance(prior, Flat):
        gradient.add_(prior.grad(theta))
    if weight_decay:
        gradient.add_(theta, alpha=weight_decay)

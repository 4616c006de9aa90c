"""Priors: what a client believes about its model before it sees its data.

Local training minimises `loss(theta) + prior.energy(theta)`. A prior is a small value with the
energy, its gradient, and, where there is a closed form, the proximal map.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Prior(Protocol):
    def energy(self, theta: Tensor) -> Tensor:
        """-log p(theta), up to a constant."""

    def grad(self, theta: Tensor) -> Tensor:
        """The gradient of the energy."""

    def prox(self, theta: Tensor, step: float) -> Tensor:
        """argmin_u  ||u - theta||^2 / 2 + step * energy(u)."""


class Flat(NamedTuple):
    """No belief at all: energy 0."""

    def energy(self, theta: Tensor) -> Tensor:
        return torch.zeros((), dtype=theta.dtype)

    def grad(self, theta: Tensor) -> Tensor:
        return torch.zeros_like(theta)

    def prox(self, theta: Tensor, step: float) -> Tensor:
        return theta


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


def descended(prior: Prior, theta: Tensor, step: float) -> Tensor:
    """A gradient step on the energy alone: theta - step * prior.grad(theta)."""
    if isinstance(prior, Flat):
        return theta
    if isinstance(prior, Gaussian):  # in one pass over the vector
        return torch.lerp(theta, prior.mean, step * prior.precision)
    return theta - step * prior.grad(theta)

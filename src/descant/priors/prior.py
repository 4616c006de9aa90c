"""Priors: what a client believes about its model before it sees its data.

Local training minimises `loss(theta) + prior.energy(theta)`. A prior is a small value with the energy, its
gradient, and, where there is a closed form, the proximal map.
"""

from __future__ import annotations

from typing import Protocol, Self

from torch import Tensor


class Prior(Protocol):
    def energy(self, theta: Tensor) -> Tensor:
        """-log p(theta), up to a constant."""

    def grad(self, theta: Tensor) -> Tensor:
        """The gradient of the energy."""

    def prox(self, theta: Tensor, step: float) -> Tensor:
        """argmin_u  ||u - theta||^2 / 2 + step * energy(u)."""

    def scaled(self, factor: Tensor | float) -> Self:
        """The prior with `factor` times the energy."""

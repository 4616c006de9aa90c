"""How strongly to personalize: lambda from the heterogeneity R (one-stage FedProx, Theorem 1)."""

from __future__ import annotations

import math
from typing import NamedTuple


class Choice(NamedTuple):
    """A lambda, and whether the bound that asks for it lies above the cap."""

    lam: float
    wanted: float  # without the cap
    capped: bool


def practical_lambda(R: float, n: float, *, c: float = 5.0, cap: float = math.inf) -> Choice:
    """lam = c / (n R^2) where R >= 1/sqrt(n), else c / (sqrt(n) R): continuous, and falling in R.

    The rule of the authors' experiments. R: how far the clients' models lie from the global one;
    n: training samples of a client; c stands for rho^2 / mu.
    """
    x = math.sqrt(n) * R
    wanted = math.inf if x == 0 else c / x**2 if x >= 1 else c / x
    return Choice(min(wanted, cap), wanted, wanted > cap)


def theorem_lambda(R: float, n: float, N: float, *, L: float, mu: float, rho: float, cap: float = math.inf
                   ) -> Choice:
    """Theorem 1: the largest allowed lam where R > 1/sqrt(n), the smallest allowed one elsewhere.

    The second regime asks for at least 64 kappa^2 L, which no gradient method would thank us for, and
    the two do not meet at R = 1/sqrt(n): hence the cap, which is reported. N: samples of all clients.
    """
    if math.sqrt(n) * R > 1:
        wanted = rho**2 / (n * mu * R**2)
    else:
        kappa = L / mu
        spread = (2 * (L * R) ** 2 + rho**2 / n) / ((L * R) ** 2 + rho**2 / N) if R or rho else 2.0
        wanted = max(64 * kappa**2 * L, max(2 * kappa, 5.0) * mu * spread) - mu
    return Choice(min(wanted, cap), wanted, wanted > cap)

"""What the paper of CGPFL proves, as functions of the constants of a problem.

G_k is the objective of cluster k, L_G-smooth; Omega the K models of the server together. Theorem 1 is printed
inside O(.): its value is that of the argument, and says how errors scale, not how large they are.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from descant.errors import UsageError
from descant.priors.clustering import complexity


class Convergence(NamedTuple):
    """Theorem 1: the terms that bound (1/K) E||grad G(Omega)||^2 at the best round, inside O(.)."""

    start: float  # falls with 1 / T
    noise: float  # falls with 1 / sqrt(N K R T)
    floor: float  # stays

    @property
    def value(self) -> float:
        return self.start + self.noise + self.floor


def largest_beta(R: int, L_G: float) -> float:
    """The step size of w up to which Theorem 1 holds: 1 / (2 sqrt(R (R + 1)) L_G)."""
    return 1 / (2 * math.sqrt(R * (R + 1)) * L_G)


def alpha_0(alpha: float, K: int, *, rho: float, rho_g: float, L_G: float, descent: float) -> float:
    """alpha_0 of Theorem 1. `rho` bounds ||Omega||, `rho_g` ||grad G(Omega)||; `descent` is Delta_G, by how
    much the mean of the G_k falls."""
    if not 0 < alpha <= 1:
        raise UsageError(f"alpha = {alpha:g}: Theorem 1 needs 0 < alpha <= 1")
    return min(8 * alpha**2 * rho**2 / (K * descent), math.sqrt(4 / 3) * alpha * rho / rho_g,
               alpha / math.sqrt(416 * L_G**2))


def theorem1_bound(T: int, R: int, N: int, K: int, *, alpha: float, rho: float, rho_g: float, L_G: float,
                   descent: float, delta: float) -> Convergence:
    """Theorem 1, of T rounds of R local rounds by N clients in K clusters; `delta`^2 bounds the error of a
    client's gradient."""
    step = alpha_0(alpha, K, rho=rho, rho_g=rho_g, L_G=L_G, descent=descent)
    noise = 80 * math.sqrt(26 * rho**2 / K * L_G**2 * delta**2) / math.sqrt(N * K * R * T)
    return Convergence(48 * alpha**2 * rho**2 / K / (step**2 * T), noise, 52 * delta**2 / (K * N))


def personal_bound(generalized: float, lam: float, *, delta_G: float, delta: float) -> float:
    """Theorem 1's second half: how far personal models lie from their cluster's, squared, mean over the
    clients, inside O(.). `delta_G`^2 bounds the diversity within a cluster."""
    return generalized + delta_G**2 / lam**2 + delta**2


class Generalization(NamedTuple):
    """Theorem 2: the terms that bound sum_i (m_i / m) (L_i(h_i) - min L_i) with probability 1 - delta."""

    confidence: float  # 2 sqrt(ln(N / delta) / m)
    complexity: float  # sqrt(d K / m ln(e m / d)), which grows with K
    data: float  # sum_i (m_i / m) (2 B lambda_H(D_i) + disc(D_i, ^D_i))
    cost: float  # (lam + L / 2) cost(K), which falls with K

    @property
    def value(self) -> float:
        return sum(self)


def cluster_cost(thetas: Tensor, centres: Tensor, sizes: Tensor) -> float:
    """cost(Theta, Omega; K) = sum_i (m_i / m) min_k ||theta_i - omega_k||^2."""
    squares = (thetas[:, None] - centres[None]).square().sum(2).min(1).values
    return float(sizes.to(squares.dtype) @ squares / sizes.sum())


def theorem2_bound(m: float, d: int, N: int, K: int, *, delta: float, lam: float, L: float, cost: float,
                   disagreement: float = 0.0, B: float = 1.0, discrepancy: float = 0.0) -> Generalization:
    """Theorem 2, whole. m: rows of all clients, d: dimension of the hypotheses; `disagreement` and
    `discrepancy` are the clients' means of lambda_H(D_i) and of disc. As in e(K), a logarithm below zero
    counts as zero."""
    if not 0 < delta < 1:
        raise UsageError(f"delta = {delta:g} must lie between 0 and 1: the bound holds with probability "
                         "1 - delta")
    return Generalization(2 * math.sqrt(math.log(N / delta) / m), complexity(K, d, m),
                          2 * B * disagreement + discrepancy, (lam + L / 2) * cost)

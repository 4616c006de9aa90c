"""What the paper of pFedBreD proves, as functions of the constants of a problem.

Both theorems are printed inside O(.): a value is that of the argument, term by term, and says how errors
scale, not how large they are. F is mu_F-strongly convex, and its gradients lie within sigma of zero at w*.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from descant.errors import UsageError


class Problem(NamedTuple):
    """The constants of the assumptions in Section D."""

    mu_F: float  # strong convexity of F
    L_F: float  # smoothness of F
    L_E: float  # of the envelopes
    L_g: float  # of g*
    sigma_F: float  # bound of ||grad F_i(w*)||
    gamma_f: float  # of a sample's gradient noise
    rows: int  # of a batch
    error: float  # epsilon, of the local solution
    gamma_Phi: float  # bound of the Hessian of Phi: mu(w) = w - eta grad Phi(w)
    G_Phi: float  # bound of its gradient
    sigma_Phi: float = 0.0  # how much Dmu varies beside the envelope's gradient
    u: float = 1.0  # norm of the identity

    def slope(self, eta: float) -> float:
        """The bound of ||Dmu(w)|| = ||I - eta Hess Phi(w)||."""
        return self.u + eta * self.gamma_Phi

    @property
    def local_error(self) -> float:
        return self.gamma_f**2 / self.rows + self.error**2


class Convergence(NamedTuple):
    """Theorem 1: the terms that bound D_F(w, w*) after T rounds, inside O(.)."""

    start: float  # falls geometrically
    ball: float  # stays: local errors and the choice of the mean
    sampling: float  # of S of N clients, falls with 1 / (N T)
    drift: float  # of R local rounds, falls with 1 / T^2

    @property
    def value(self) -> float:
        return sum(self)


def largest_step(of: Problem, eta: float, R: int, beta: float) -> float:
    """^alpha_m, up to which alpha_m beta R may go, beside beta / sqrt(2 c) and 2 / mu_F."""
    drift = math.e * (1 + of.sigma_Phi) * of.L_E * of.slope(eta) * 2 ** (R + 6.5) * (1 / R + 2)
    return of.mu_F * beta * R / (drift + 15 * of.mu_F * beta * R * of.L_F)


def theorem1_bound(of: Problem, *, lam: float, eta: float, T: int, R: int, N: int, S: int, beta: float,
                   step: float, start: float) -> Convergence:
    """Theorem 1, for S of N clients, R local rounds, a server step beta and alpha_m beta R = `step`; `start`
    is ||w - w*||^2 before."""
    if not 0 < S <= N:
        raise UsageError(f"S = {S} clients of N = {N}: it must be from 1 to N")
    slope = of.slope(eta)
    A = (of.L_g / of.mu_F * slope) ** 2 * of.local_error
    B = (of.L_E * of.gamma_Phi * (1 + of.sigma_Phi) * slope) ** 2
    C = of.sigma_Phi**2 * of.L_E**2 * slope**2 / of.mu_F**3
    return Convergence(
        of.mu_F * math.exp(-step * of.mu_F * T / 2) * start,
        (A * lam**2 + B) / of.mu_F,
        (N / S - 1) * of.sigma_F**2 / (N * T * of.mu_F),
        2**R * C / (T * beta * R) ** 2 * (R * of.sigma_F**2 + A * lam**2 + B))


def theorem2_bound(of: Problem, *, lam: float, eta: float, divergence: float, first_order: float = 0.0
                   ) -> float:
    """Theorem 2: how far a personal model of a spherical Gaussian prior lies from w*, squared, inside O(.):
    delta_p + c_p D_F(w, w*). `first_order` bounds the error of the gradient that leaves Dmu out."""
    delta = (2 / of.mu_F**2 * of.local_error + 2 / lam**2 * first_order**2 + 4 / lam**2 * of.sigma_F**2
             + eta**2 * of.G_Phi**2 / 2)
    return delta + (32 / lam**2 * of.L_F + 8 / of.mu_F) * divergence

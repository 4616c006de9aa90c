"""What the paper of one-stage FedProx proves, as functions of the constants of a problem.

Every L_i is mu-strongly convex and L-smooth; kappa = L / mu. F is the average of the Moreau envelopes
F_i(w_g) = min_w L_i(w) + lam/2 ||w - w_g||^2. Where the printed paper errs
(docs/methods/one_stage_fedprox.md), the functions say what holds.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from descant.errors import UsageError


class Constants(NamedTuple):
    """Lemma 2. F_i is mu_g-strongly convex and L_g-smooth, the client's problem mu_l and L_l, and its
    solution as a function of w_g, the proximal map, is L_w-Lipschitz."""

    mu_g: float
    L_g: float
    mu_l: float
    L_l: float
    L_w: float


def constants(lam: float, L: float, mu: float) -> Constants:
    """The constants of Lemma 2. Quadratics whose curvatures reach from mu to L attain them all."""
    if not (0 < mu <= L < math.inf and 0 < lam < math.inf):
        raise UsageError(f"lam = {lam:g}, L = {L:g}, mu = {mu:g}: the theory needs lam > 0 and 0 < mu <= L")
    return Constants(lam * mu / (lam + mu), lam * L / (lam + L), mu + lam, L + lam, lam / (lam + mu))


class Steps(NamedTuple):
    """Step sizes of the clients and of the server, and the clients' gradient steps in a round."""

    eta: float
    gamma: float
    K: int


def corollary_steps(lam: float, L: float, mu: float) -> Steps:
    """Corollary 1: eta = 1 / (lam + L), gamma = 1 / (2 L_g), and the least K of (118), which implies (12):
    K >= 2 + (lam + L) / (lam + mu) ln(1056 kappa^2)."""
    c = constants(lam, L, mu)
    K = 2 + c.L_l / c.mu_l * math.log(1056 * (L / mu) ** 2)
    return Steps(1 / c.L_l, 1 / (2 * c.L_g), math.ceil(K))


def sides_of_12(lam: float, L: float, mu: float, eta: float, gamma: float, K: int) -> tuple[float, float]:
    """Left and right of (12): (2 + 64 (L_w lam / mu_g)^2) (1 - eta mu_l)^K and (1 - gamma L_g)^4."""
    c = constants(lam, L, mu)
    return (2 + 64 * (c.L_w * lam / c.mu_g) ** 2) * (1 - eta * c.mu_l) ** K, (1 - gamma * c.L_g) ** 4


def condition_12(lam: float, L: float, mu: float, eta: float, gamma: float, K: int) -> bool:
    """Whether Theorem 2 promises its rate: gamma < 1 / L_g, eta <= 1 / L_l, and (12)."""
    c = constants(lam, L, mu)
    left, right = sides_of_12(lam, L, mu, eta, gamma, K)
    return gamma * c.L_g < 1 and eta * c.L_l <= 1 and left <= right


def rate(gamma: float, mu_g: float) -> float:
    """Theorem 2: the factor by which the squared error shrinks in a round; `lag_weight` says which error."""
    g = gamma * mu_g
    return 1 - g / 2 - g**2 / 2


def lag_weight(lam: float, L: float, mu: float, eta: float, gamma: float, K: int) -> float:
    """The c_1 of (103). What shrinks by `rate` in every round is ||w_g - solution||^2 + c_1 e, where e is the
    mean over clients of ||w_i - prox_i(w_g)||^2: how far they lag behind the w_g that they were sent."""
    c = constants(lam, L, mu)
    x = (1 - eta * c.mu_l) ** K
    q = (2 + 4 * (c.L_w * gamma * lam) ** 2) * x
    eps_g = c.mu_g / 2 * (1 - gamma * c.mu_g)
    zeta = 1 - gamma * c.L_g
    return 2 * (gamma / eps_g + gamma**2 * (2 + 1 / zeta)) * lam**2 / (rate(gamma, c.mu_g) - q)


def predicted_rounds(lam: float, L: float, mu: float, eps: float, start: float = 1.0) -> int:
    """Rounds with Corollary 1's steps after which ||w_g - solution||^2 <= eps: O(kappa (lam + mu) / (lam + L)
    ln(1 / eps)). `start` bounds the squared error before, and `lag_weight` times the clients' lag with it."""
    if not (eps > 0 and start > 0):
        raise UsageError(f"eps = {eps:g}, start = {start:g}: squared errors must be greater than 0")
    factor = rate(corollary_steps(lam, L, mu).gamma, constants(lam, L, mu).mu_g)
    return max(0, math.ceil(math.log(eps / start) / math.log(factor)))


def predicted_gradients(lam: float, L: float, mu: float, eps: float, start: float = 1.0) -> int:
    """Full gradients that each client takes in these rounds: about kappa ln(1 / eps), whatever lam is."""
    return corollary_steps(lam, L, mu).K * predicted_rounds(lam, L, mu, eps, start)


class Lemma1(NamedTuple):
    """Upper bounds of ||w_g - w_GT||^2, where w_GT is GlobalTrain's model (4), and of
    sum_i p_i (mu ||w_i - w*_i||^2 + <grad L_i(w*_i), w_i - w*_i>), where w*_i is the true model (5)."""

    distance: float
    excess: float


def lemma1_bounds(lam: float, L: float, mu: float, R: float, square_gradient: float) -> Lemma1:
    """Lemma 1, for the exact solution w_g, w_i. `square_gradient` is sum_i p_i ||grad L_i(w_g)||^2."""
    return Lemma1(4 * (1 + L / mu) / (mu * (mu + lam)) * square_gradient, lam / 2 * R**2)


class Theorem1(NamedTuple):
    """Upper bounds of E||w_g - w*_g||^2 (6) and of E||w_i - w*_i||^2 for every client (7)."""

    w_g: float
    w_i: float


def theorem1_constants(L: float, mu: float, rho: float) -> tuple[float, float, float, float]:
    """C_1 to C_4."""
    C1, C3 = 32 * (rho / mu) ** 2, 192 * (rho / mu) ** 2
    C2 = max(((1 + math.sqrt(3)) * rho / mu) ** 2, 32 * (L / mu) ** 2)
    C4 = max((rho * (1 + math.sqrt(4 * C2 + 5)) / mu) ** 2, 198 * (L / mu) ** 2)
    return C1, C2, C3, C4


def theorem1_bounds(n: float, N: float, R: float, L: float, mu: float, rho: float) -> Theorem1:
    """Theorem 1, for the exact solution with uniform weights and a lam that the theorem allows
    (`descant.priors.adaptive.theorem_lambda`). n: samples of a client, N: of all."""
    C1, C2, C3, C4 = theorem1_constants(L, mu, rho)
    heterogeneity = min(1 / n, R**2)
    return Theorem1(C1 / N + C2 * heterogeneity, C3 / N + C4 * heterogeneity)

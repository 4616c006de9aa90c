"""pFedGT's game: how far its players are from a Nash equilibrium, and where and how fast they get there.

There are m clients; client i has the loss f_i, plays w_i, and tells c_i = grad f_i(w_i) - mu w_i. With
gt_i = ((m - 1) gamma_i + 1) / m its cost G_i has the gradient (Eq. 4 of the paper)

    grad G_i(w_i; w_-i) = gt_i grad f_i(w_i) + ((1 - gt_i) mu + rho) w_i + (1 - gamma_i)/m sum_{j != i} c_j.

Rows of tensors are clients; gamma is one number, or a tensor with one for each client.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from descant.errors import UsageError


def own_share(gamma: Any, m: Any) -> Any:  # numbers or tensors
    """gt = ((m - 1) gamma + 1) / m: what f_i counts for client i itself, in its own term and in the mean."""
    return ((m - 1) * gamma + 1) / m


# -- any losses ---------------------------------------------------------------------------------------------


def game_gradients(w: Tensor, c: Tensor, told: Tensor, *, gamma: Tensor | float, mu: float, rho: float = 0.0
                   ) -> Tensor:
    """grad G_i(w_i; w_-i) for every client: [m, d]. w: [m, d] what the clients play; c: [m, d] their
    messages at w; told: [m, d] the messages by which they know each other."""
    m = len(w)
    each = _column(gamma, w)
    share = own_share(each, m)
    others = (told.sum(0) - told) * (1 - each) / m
    gradients: Tensor = share * (c + mu * w) + ((1 - share) * mu + rho) * w + others
    return gradients


def nash_residual(w: Tensor, c: Tensor, *, gamma: Tensor | float, mu: float, rho: float = 0.0) -> Tensor:
    """||grad G_i(w_i; w_-i)|| for every client: [m]. Zero for all just at a stationary point of the game; a
    client whose G_i is s-strongly convex is at most the residual / s away from its best response. Without
    full messages in a run's states, `oracle.messages` makes the c_i."""
    return game_gradients(w, c, c, gamma=gamma, mu=mu, rho=rho).square().sum(1).sqrt()


def achieved_accuracy(w: Tensor, c: Tensor, told: Tensor, *, gamma: Tensor | float, mu: float,
                      rho: float = 0.0) -> Tensor:
    """eps_i = ||grad G_i(w_i; w_-i)||^2 of the local solves (Assumption 2): [m]. w, c: after the round; told:
    the messages before it, which the solves answered."""
    return game_gradients(w, c, told, gamma=gamma, mu=mu, rho=rho).square().sum(1)


# -- Theorems 1 and 2 --------------------------------------------------------------------------------------


def lipschitz_F(gamma: float, m: int, L: float, mu: float) -> float:
    """L_F = gt L + (1 - gt) mu: how smooth the cost of a client is without the ridge (Lemma 2)."""
    share = own_share(gamma, m)
    return float(share * L + (1 - share) * mu)


def least_rho(gamma: float | Tensor, m: int, L: float, mu: float) -> float:
    """max(L, max_i L_F): above this rho the game has exactly one Nash equilibrium, whatever L-smooth losses
    (Theorem 1). That is a ridge stronger than the losses' own curvature: sufficient, far from necessary."""
    return max(L, *(lipschitz_F(g, m, L, mu) for g in _values(gamma, m)))


class Rate(NamedTuple):
    """Theorem 2: E||w^t - w*||^2 <= a^t / p ||w^0 - w*||^2 + (1 - a^t)/(1 - a) sum_i (1 + xi) eps_i / s_i^2,
    with a = 1 - p (1 - (1 + 1/xi) a1^2) and s_i = rho - L_F,i."""

    a1: float  # best responses contract by this much
    a: float  # the factor of the expected squared error in a round
    xi: float
    p: float  # the least probability with which a client takes part
    convexity: tuple[float, ...]  # s_i

    def bound(self, t: int, square: float, eps: float | Tensor = 0.0) -> float:
        """The bound on the expected squared error after t rounds, from `square` at the start, where local
        solves are accurate to eps (of all clients, or of each)."""
        noise = sum((1 + self.xi) * e / s**2
                    for e, s in zip(_values(eps, len(self.convexity)), self.convexity, strict=True))
        return self.a**t / self.p * square + (1 - self.a**t) / (1 - self.a) * noise


def theorem2(gamma: float | Tensor, m: int, L: float, mu: float, rho: float, *, p: float = 1.0) -> Rate:
    """The rate of Theorem 2, with the least xi that it allows, a1 / (1 - a1): then a = 1 - p (1 - a1)."""
    least = least_rho(gamma, m, L, mu)
    if rho <= least:
        raise UsageError(f"rho = {rho:g} is too small for Theorem 2: it needs rho > max(L, L_F) = {least:g}")
    if not 0 < p <= 1:
        raise UsageError(f"p must be a probability greater than 0, not {p:g}")
    values = _values(gamma, m)
    shares = [float(own_share(g, m)) for g in values]
    a1 = max((1 - s) * (mu + L) / ((1 - s) * mu - s * L + rho) for s in shares)
    convexity = tuple(rho - lipschitz_F(g, m, L, mu) for g in values)
    return Rate(a1, 1 - p * (1 - a1), a1 / (1 - a1), p, convexity)


# -- quadratics: f_i(w) = (w - a_i)' H_i (w - a_i) / 2 ----------------------------------------------------


def stable_curvature(share: float, mu: float, rho: float = 0.0) -> float:
    """The h below which simultaneous best responses converge where all H_i = h I, of the share gt:
    (2 (1 - gt) mu + rho) / (1 - 2 gt), and any h where gt >= 1/2 (at 1/2 with mu = rho = 0 they just do not
    converge). The differences to the equilibrium answer by -(1 - gt)(h - mu) / (gt h + (1 - gt) mu + rho)
    times the mean of the others', which has the eigenvalues 1 and -1 / (m - 1)."""
    room = 2 * (1 - share) * mu + rho
    if share > 0.5 or (share == 0.5 and room > 0):
        return math.inf
    return room / (1 - 2 * share) if share < 0.5 else 0.0


def diverging(gamma: float, mu: float, rho: float) -> list[str]:
    """A caution where best responses may diverge. gt exceeds gamma, and tends to it with many clients."""
    if gamma >= 0.5:
        return []
    bound = stable_curvature(gamma, mu, rho)
    return [f"gamma = {gamma:g}: with many clients whose losses curve alike, best responses diverge where "
            f"the curvature is above (2 (1 - gamma) mu + rho) / (1 - 2 gamma) = {bound:g}; take gamma "
            ">= 0.5, or a larger mu or rho"]


def best_responses(H: Tensor, a: Tensor, w: Tensor, *, gamma: Tensor | float, mu: float, rho: float = 0.0
                   ) -> Tensor:
    """What every client would play if the others stayed at w: [m, d]. H: [m, d, d], a: [m, d]."""
    told = _times(H, w - a) - mu * w
    others = (told.sum(0) - told) * (1 - _column(gamma, w)) / len(w)
    pulled = own_share(_column(gamma, w), len(w)) * _times(H, a)
    answers: Tensor = torch.linalg.solve(_curvature(H, gamma, mu, rho), pulled - others)
    return answers


def response_matrix(H: Tensor, *, gamma: Tensor | float, mu: float, rho: float = 0.0) -> Tensor:
    """J [m d, m d] of best responses R(w) = R(0) + J w; its spectral radius is their rate."""
    m, d = H.shape[:2]
    told = (H - mu * torch.eye(d, dtype=H.dtype)) / m  # what client j's move does to the mean message
    by = torch.linalg.solve(_curvature(H, gamma, mu, rho)[:, None], told[None])  # [i, j, d, d]
    alone = torch.eye(m, dtype=torch.bool)[:, :, None, None]
    blocks = torch.where(alone, 0.0, -by * (1 - _column(gamma, H[0, 0]).expand(m, 1))[:, :, None, None])
    return blocks.permute(0, 2, 1, 3).reshape(m * d, m * d)


def equilibrium(H: Tensor, a: Tensor, *, gamma: Tensor | float, mu: float, rho: float = 0.0) -> Tensor:
    """The Nash equilibrium w = R(w), by one linear solve: [m, d]. There may be many (gamma = mu = rho = 0
    only asks for gradients that sum to zero), which is refused."""
    alone = best_responses(H, a, torch.zeros_like(a), gamma=gamma, mu=mu, rho=rho)
    J = response_matrix(H, gamma=gamma, mu=mu, rho=rho)
    system = torch.eye(len(J), dtype=J.dtype) - J
    if torch.linalg.matrix_rank(system, rtol=1e-12) < len(J):
        raise UsageError("the game has no single equilibrium: take gamma, mu or rho greater than 0")
    w: Tensor = torch.linalg.solve(system, alone.reshape(-1))
    return w.reshape(a.shape)


def _curvature(H: Tensor, gamma: Tensor | float, mu: float, rho: float) -> Tensor:
    """The Hessian of every G_i: [m, d, d]."""
    share = own_share(_column(gamma, H), len(H))[..., None]
    curvature: Tensor = share * H + ((1 - share) * mu + rho) * torch.eye(H.shape[1], dtype=H.dtype)
    return curvature


def _times(H: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("ijk,ik->ij", H, w)


def _column(gamma: Tensor | float, like: Tensor) -> Tensor:
    """One gamma for each client, or for all: [m, 1] or [1, 1]."""
    return torch.as_tensor(gamma, dtype=like.dtype).reshape(-1, 1)


def _values(numbers: Tensor | float, count: int) -> list[float]:
    """One number for each of so many clients."""
    values: list[float] = torch.as_tensor(numbers, dtype=torch.float64).expand(count).tolist()
    return values

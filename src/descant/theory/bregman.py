"""The Bregman-Moreau envelope and its proximal map (pFedBreD, Eq. 2, 12 and 13), as functions of a vector.

    prox(mu) = argmin_theta f(theta) + lam D_{g*}(theta, mu),    env(mu) = the least value,
    grad env(mu) = lam Hess g*(mu) (mu - prox(mu)),
    F(w) = env(mu(w)),    grad F(w) = Dmu(w)' grad env(mu(w)).

`f` is any differentiable function of a vector, such as a client's loss; `family` says which g.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.func import grad_and_value, vjp

from descant.errors import DescantError, UsageError
from descant.priors.bregman import Family

Function: TypeAlias = Callable[[Tensor], Tensor]  # [d] -> []


def proximal_map(f: Function, mu: Tensor, lam: float, family: Family, *, tolerance: float = 1e-12,
                 steps: int = 10_000) -> Tensor:
    """argmin_theta f(theta) + lam D_{g*}(theta, mu), for a convex f.

    By Bregman proximal gradient steps from mu. With y = grad g*(theta), the next point is the least of
    f(theta) + <grad f(theta), .> + D_{g*}(., theta) / a + lam D_{g*}(., mu):

        y <- (y + a lam grad g*(mu) - a grad f(theta)) / (1 + a lam),

    stable for any lam. a is halved until f lies below its model and y in the domain of g. The error shrinks
    by 1 / (1 + a lam) or better; the steps end when y moves by less than `tolerance`, relative to its size.
    """
    _require(mu, lam, family)
    y = center = family.grad_g_star(mu)
    theta, a = mu, 1.0
    for _ in range(steps):
        gradient, value = grad_and_value(f)(theta)
        while True:
            new_y = (y + a * (lam * center - gradient)) / (1 + a * lam)
            new = family.grad_g(new_y)
            moved = (new_y - y).norm() / (1 + y.norm())
            # D_{g*}(new, theta), by its dual, which needs no inverse of grad g
            divergence = family.g(y) - family.g(new_y) - new @ (y - new_y)
            change = f(new) - value
            # the values of very small steps tell nothing any more but their rounding
            is_below = (change <= gradient @ (new - theta) + divergence / a) | (moved < 1e-7)
            if bool(is_below & torch.isfinite(divergence) & torch.isfinite(change)):
                break
            a /= 2
            if a < 1e-30:
                raise DescantError("the proximal map cannot be found: f has no finite value near "
                                   f"{theta.tolist()[:3]}, or is not differentiable there")
        theta, y = new, new_y
        if moved <= tolerance:
            return theta
        a = a if moved < 1e-7 else 2 * a
    raise DescantError(f"the proximal map did not converge in {steps} steps: the last moved the dual "
                       f"variable by {float(moved):.1e}; allow more steps, or a larger tolerance than "
                       f"{tolerance:g}")


def envelope(f: Function, mu: Tensor, lam: float, family: Family, *, tolerance: float = 1e-12) -> Tensor:
    """min_theta f(theta) + lam D_{g*}(theta, mu); theta to within `tolerance`, the value to its square."""
    theta = proximal_map(f, mu, lam, family, tolerance=tolerance)
    return f(theta) + lam * family.divergence(theta, mu)


def envelope_gradient(f: Function, mu: Tensor, lam: float, family: Family) -> Tensor:
    """The gradient of the envelope: lam Hess g*(mu) (mu - prox(mu))."""
    return lam * family.hessian_g_star(mu, mu - proximal_map(f, mu, lam, family))


def objective_gradient(f: Function, mean: Callable[[Tensor], Tensor], w: Tensor, lam: float, family: Family
                       ) -> Tensor:
    """Eq. 13: the gradient of F(w) = env(mean(w)), where `mean` makes the prior's mean from w."""
    mu, pull_back, *_ = vjp(mean, w)
    gradient: Tensor = pull_back(envelope_gradient(f, mu.detach(), lam, family))[0]
    return gradient


def _require(mu: Tensor, lam: float, family: Family) -> None:
    if not lam > 0:
        raise UsageError(f"lam = {lam:g}: an envelope needs lam > 0")
    outside = int((~family.inside(mu)).sum())
    if outside:
        raise UsageError(f"{outside} of the {mu.numel()} coordinates of mu lie outside the domain of the "
                         f"family {family.name} ({family.domain})")

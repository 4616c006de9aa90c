"""Means of priors that a client makes itself: from the server's model, its loss and its memory (pFedBreD).

A strategy is a value with the mean mu(w) and its vector-Jacobian product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from descant.core.task import Batch, Task
from descant.core.tree import Tree
from descant.core.vector import Model
from descant.priors.belief import Average
from descant.priors.bregman import Family
from descant.priors.precision import Pooled
from descant.priors.solve import decayed


class Loss(NamedTuple):
    """f_i + weight_decay/2 ||.||^2 on the batches of ONE local round."""

    task: Task
    stats: Tensor
    batches: tuple[Batch, ...]
    drawn: int  # how often the steps on theta draw random numbers from a batch: these here are others
    weight_decay: float

    def grad(self, x: Tensor, k: int) -> Tensor:
        """The k-th gradient: on the first batch, then on the last."""
        batch = self.batches[0 if k == 0 else -1].redrawn(self.drawn + k)
        return decayed(self.task.grad(Model(x, self.stats), batch).theta, x, self.weight_decay)

    def hessian(self, x: Tensor, k: int, v: Tensor) -> Tensor:
        """The Hessian that belongs to the k-th gradient, times v."""
        batch = self.batches[0 if k == 0 else -1].redrawn(self.drawn + k)
        return decayed(self.task.hessian(Model(x, self.stats), batch, v), v, self.weight_decay)


class Mean(NamedTuple):
    """The mean of a prior, and what its derivative needs."""

    w: Tensor  # [d] the client's w, which some strategies move
    mu: Tensor  # [d]
    kept: Tensor  # bool [d] the coordinates that were in the family's domain
    inner: Tensor  # [d] where the loss gradient was taken, and ...
    inner_kept: Tensor  # bool [d] ... the coordinates of that which were in the domain


class Strategy(NamedTuple):
    """mu(w) = w - eta_a grad f(x) - eta (memory - theta), projected to the family's domain."""

    family: Family
    eta: float
    eta_a: float
    eta_inner: float
    gradient: Literal["none", "plain", "nested"] = "none"  # x = w, or x = w - eta_inner grad f(w)
    remembers: bool = False  # whether it has the term of the memory
    moves: bool = False  # w itself makes the step on the loss, and mu has the derivative I in the new w

    def mean(self, f: Loss, w: Tensor, theta: Tensor, memory: Tree) -> Mean:
        inner, inner_kept, mu = w, torch.ones_like(w, dtype=torch.bool), w
        if self.gradient == "nested":
            descended = w - self.eta_inner * f.grad(w, 0)
            inner = self.family.project(descended)
            inner_kept = inner == descended
        if self.gradient != "none":
            mu = mu - self.eta_a * f.grad(inner, int(self.gradient == "nested"))
        if self.moves:
            w = mu = self.family.project(mu)
        if self.remembers:
            mu = mu - self.eta * (memory - theta)
        mean = self.family.project(mu)
        return Mean(w, mean, mean == mu, inner, inner_kept)

    def pulled_back(self, f: Loss, mean: Mean, v: Tensor) -> Tensor:
        """Dmu(w)' v. The memory is a constant."""
        v = torch.where(mean.kept, v, 0.0)
        if self.gradient == "none" or self.moves:
            return v
        if self.gradient == "plain":
            return v - self.eta_a * f.hessian(mean.w, 0, v)
        u = torch.where(mean.inner_kept, f.hessian(mean.inner, 1, v), 0.0)
        return v - self.eta_a * (u - self.eta_inner * f.hessian(mean.w, 0, u))


def strategy(name: str, family: Family, eta: float, eta_a: float, eta_inner: float) -> Strategy:
    """The strategy of a name."""
    make = Strategy(family, eta, eta_a, eta_inner)
    return {"identity": make, "lg": make._replace(gradient="plain"), "meg": make._replace(remembers=True),
            "mh": make._replace(gradient="plain", remembers=True),
            "mh_nested": make._replace(gradient="nested", remembers=True),
            "mh_code": make._replace(gradient="nested", remembers=True, moves=True)}[name]


@dataclass(frozen=True)
class Projected:
    """An average that is put back into the family's domain, which beta > 1 may overshoot."""

    family: Family
    beta: float

    def __call__(self, old: Model, uploads: Model, weights: Tensor, pulls: Pooled) -> Model:
        theta, stats = Average(self.beta)(old, uploads, weights, pulls)
        return Model(self.family.project(theta), stats)

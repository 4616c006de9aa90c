"""Means of priors that a client makes itself: from the server's model, its loss and its memory (pFedBreD).

A strategy is a value with the mean mu(w) and its vector-Jacobian product. A Phi of one's own (Eq. 11) is a
function, of which autograd makes both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.func import grad

from descant.core import meter
from descant.core.import_object import imported, is_place, require
from descant.core.task import Batch, Task
from descant.core.tree import Tree
from descant.core.vector import Model
from descant.errors import UsageError
from descant.priors.bregman import Family
from descant.priors.gaussian import Average
from descant.priors.solve import decayed, less


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

    def value(self, x: Tensor) -> Tensor:
        """f_i(x) on the first batch."""
        batch = self.batches[0].redrawn(self.drawn)
        decay = 0.5 * self.weight_decay * x.square().sum()
        return self.task.loss(Model(x, self.stats), batch, train=True) + decay

    def hessian(self, x: Tensor, k: int, v: Tensor) -> Tensor:
        """The Hessian that belongs to the k-th gradient, times v."""
        batch = self.batches[0 if k == 0 else -1].redrawn(self.drawn + k)
        return decayed(self.task.hessian(Model(x, self.stats), batch, v), v, self.weight_decay)


class Mean(NamedTuple):
    """The mean of a prior, and what its derivative needs."""

    w: Tensor  # [d] the client's w, which some strategies move
    mu: Tensor  # [d] in the family's domain
    inner: Tensor  # [d] where the loss gradient was taken
    free_mu: Tensor  # [d] mu before it was projected to the domain
    free_inner: Tensor  # [d] and so inner


# Phi(f, w, theta, memory): f is the loss on the batch of the local round, a function of a vector like w
Potential: TypeAlias = Callable[[Callable[[Tensor], Tensor], Tensor, Tensor, Tensor], Tensor]


class Strategy(NamedTuple):
    """mu(w) = w - eta_a grad f(x) - eta (memory - theta), or w - eta grad Phi(w), projected to the family's
    domain."""

    family: Family
    eta: float
    eta_a: float
    eta_inner: float
    gradient: Literal["none", "plain", "nested"] = "none"  # x = w, or x = w - eta_inner grad f(w)
    remembers: bool = False  # whether it has the term of the memory
    moves: bool = False  # w itself makes the step on the loss, and mu has the derivative I in the new w
    phi: Potential | None = None  # in place of the other terms

    def mean(self, f: Loss, w: Tensor, theta: Tensor, memory: Tree) -> Mean:
        mu = inner = free_inner = w
        if self.gradient == "nested":
            free_inner = less(w, f.grad(w, 0), self.eta_inner)
            inner = self.family.project(free_inner)
        if self.gradient != "none":
            mu = less(mu, f.grad(inner, int(self.gradient == "nested")), self.eta_a)
        if self.moves:
            w = mu = self.family.project(mu)
        if self.phi is not None:
            mu = less(mu, self._slope(f, w, theta, memory), self.eta)
        elif self.remembers:
            mu = less(mu, memory - theta, self.eta)
        return Mean(w, self.family.project(mu), inner, mu, free_inner)

    def _slope(self, f: Loss, w: Tensor, theta: Tensor, memory: Tree) -> Tensor:
        """grad Phi(w); it counts as one gradient."""
        assert self.phi is not None
        phi = self.phi
        if (opened := meter.current()) is not None:
            opened.grad_steps += opened.clients
        slope: Tensor = grad(lambda at: phi(f.value, at, theta, memory))(w)
        return slope

    def pulled_back(self, f: Loss, mean: Mean, v: Tensor, theta: Tensor, memory: Tree) -> Tensor:
        """Dmu(w)' v. theta and the memory are constants."""
        v = torch.where(mean.mu == mean.free_mu, v, 0.0)  # the others were put to the edge of the domain
        if self.phi is not None:
            bent: Tensor = grad(lambda at: self._slope(f, at, theta, memory) @ v)(mean.w)
            return v - self.eta * bent
        if self.gradient == "none" or self.moves:
            return v
        if self.gradient == "plain":
            return v - self.eta_a * f.hessian(mean.w, 0, v)
        u = torch.where(mean.inner == mean.free_inner, f.hessian(mean.inner, 1, v), 0.0)
        return v - self.eta_a * (u - self.eta_inner * f.hessian(mean.w, 0, u))


def strategy(name: str, family: Family, eta: float, eta_a: float, eta_inner: float) -> Strategy:
    """The strategy of a name."""
    make = Strategy(family, eta, eta_a, eta_inner)
    return {"identity": make, "lg": make._replace(gradient="plain"), "meg": make._replace(remembers=True),
            "mh": make._replace(gradient="plain", remembers=True),
            "mh_nested": make._replace(gradient="nested", remembers=True),
            "mh_code": make._replace(gradient="nested", remembers=True, moves=True),
            "own": make._replace(remembers=True)}[name]


def place_of(function: Any, is_used: bool) -> Any:
    """The field `phi`: a function of a module by its place, given where it is used and nowhere else."""
    if (function is not None) != is_used:
        raise UsageError('pfedbred.phi and strategy = "own" go together: give both, or neither')
    if isinstance(function, str) and not is_place(function):
        raise UsageError(f'pfedbred.phi must be a function or read "package.module:function", not '
                         f"{function!r}")
    if not callable(function):
        return function  # as it is written, or of a type that is refused with those of the other fields
    name = getattr(function, "__qualname__", type(function).__name__)
    place = f"{getattr(function, '__module__', None)}:{name}"
    if not is_place(place):
        raise UsageError(f"phi must be a function of a module (def phi(f, w, theta, memory): ...), not "
                         f"{name!r}: worker processes and a resumed run look it up by its name")
    return place


def potential(place: str) -> Potential:
    """The function of a place."""
    require(place, "phi")  # each time: two files may name it, and only one may have been trusted
    return _imported(place)


@functools.cache
def _imported(place: str) -> Potential:
    function: Potential = imported(place, "phi")
    if not isinstance(function, FunctionType):
        raise UsageError(f"phi {place}: it must be a function (f, w, theta, memory) -> number, not an object "
                         f"of type {type(function).__name__}")
    return function


@dataclass(frozen=True)
class Projected:
    """An average that is put back into the family's domain, which beta > 1 may overshoot."""

    by_pull: ClassVar[bool] = False

    family: Family
    beta: float

    def __call__(self, old: Model, mean: Model, precision: Tensor | float) -> Model:
        theta, stats = Average(self.beta)(old, mean, precision)
        return Model(self.family.project(theta), stats)

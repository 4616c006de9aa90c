"""Bregman generators: a convex g and what follows from it; your own family from its g alone, by autograd."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, jacrev

from descant.core.fields import Checked, hyper
from descant.core.import_object import imported, is_place, require
from descant.errors import UsageError


class Generator(Checked, ABC):
    """A convex g and what follows from it. Vectors [d] in, numbers or vectors [d] out; works under vmap."""

    name: ClassVar[str]
    domain: ClassVar[str] = "all numbers"  # of the mean parameters, in words
    #: g* is quadratic: its Hessian is the constant Sigma^-1, and lam is a precision
    is_gaussian: ClassVar[bool] = False

    @abstractmethod
    def g(self, y: Tensor) -> Tensor:
        """The log-normaliser []."""

    @abstractmethod
    def grad_g(self, y: Tensor) -> Tensor:
        """The mean parameter of a natural parameter."""

    @abstractmethod
    def g_star(self, x: Tensor) -> Tensor:
        """The conjugate sup_y <x, y> - g(y) []."""

    @abstractmethod
    def grad_g_star(self, x: Tensor) -> Tensor:
        """The natural parameter of a mean parameter: the inverse of `grad_g`."""

    @abstractmethod
    def hessian_g_star(self, x: Tensor, v: Tensor) -> Tensor:
        """The Hessian of g* at x, times v."""

    def divergence(self, x: Tensor, mu: Tensor) -> Tensor:
        """D_{g*}(x, mu) of mean parameters []."""
        return self.g_star(x) - self.g_star(mu) - (self.grad_g_star(mu) * (x - mu)).sum()

    def inside(self, x: Tensor) -> Tensor:
        """Which coordinates lie in the domain: bool [d]."""
        return torch.isfinite(x)

    def project(self, x: Tensor) -> Tensor:
        """The nearest point that is at least `eps` away from the edge of the domain."""
        return x

    def move(self, y: Tensor, step: Tensor) -> Tensor:
        """y - step, kept where grad g(y) lies in the domain."""
        return y - step

    def sharpest(self) -> float:
        """The largest eigenvalue of the Hessian of g*, where that is constant: of Sigma^-1."""
        return 1.0

    def require(self, theta: Tensor) -> None:
        """A UsageError for a model that this family cannot be the prior of."""
        outside = int((~self.inside(theta)).sum())
        if outside:
            raise UsageError(
                f"family {self.name}: {outside} of the {theta.numel()} parameters of the initial model lie "
                f'outside its domain ({self.domain}): use family = {{ name = "gaussian" }}, or a model whose '
                f"parameters all start as {self.domain}")


@dataclass(frozen=True)
class FromGenerator(Generator):
    """Your own family from its g alone; everything else by autograd.

    `generator` is a function of a module, or its place "package.module:function", so that a resumed run and
    worker processes find it. It is written in torch, is given y [d], and returns the terms of g, one per
    coordinate; or, for a g that is no such sum, g itself, one number (its Hessian is then a d x d matrix:
    for small models). g must be twice differentiable and strictly convex, and not finite outside its domain.

    grad g* is the inverse of grad g, by damped Newton steps from `start`; g*(x) = <x, y> - g(y) and
    Hess g*(x) = Hess g(y)^-1 at y = grad g*(x). A step in y goes at most half way to the edge of the domain
    of g. `low` and `high` are the ends of the range of grad g, where it has some.
    """

    name: ClassVar[str] = "generator"
    domain: ClassVar[str] = "values of grad g"

    generator: str | Callable[[Tensor], Tensor] = hyper("", "g: a function, or \"package.module:function\"")
    start: float = hyper(0.0, "a point inside the domain of g, where Newton's method begins")
    steps: int = hyper(30, "Newton steps to invert grad g", ge=1)
    low: float | None = hyper(None, "lower end of the means")
    high: float | None = hyper(None, "upper end of the means")
    eps: float = hyper(1e-6, "least distance of a parameter from low and high", gt=0)

    def __post_init__(self) -> None:
        if callable(self.generator):
            object.__setattr__(self, "generator", _place(self.generator))
        super().__post_init__()
        if not is_place(self.generator):
            raise UsageError(f'{self.name}.generator must be a function or read "package.module:function", '
                             f"not {self.generator!r}")

    @property
    def _terms(self) -> Callable[[Tensor], Tensor]:
        assert isinstance(self.generator, str)
        return _found(self.generator)

    def g(self, y: Tensor) -> Tensor:
        return self._terms(y).sum()

    def grad_g(self, y: Tensor) -> Tensor:
        slope: Tensor = grad(self.g)(y)
        return slope

    def g_star(self, x: Tensor) -> Tensor:
        y = self.grad_g_star(x)
        return (x * y).sum() - self.g(y)

    def grad_g_star(self, x: Tensor) -> Tensor:
        y = torch.full_like(x, self.start)
        here = self._expanded(y)
        share = torch.ones_like(x)  # of the Newton step: smaller where a whole one makes things worse
        for _ in range(self.steps):  # all of them: a loop under vmap cannot end early
            tried = y - share * here.solve(here.slope - x)
            there = self._expanded(tried)
            old, new = here.slope - x, there.slope - x
            is_closer = new.abs() < old.abs() if there.terms.dim() else new.norm() < old.norm()
            better = torch.isfinite(there.terms) & is_closer
            y = torch.where(better, tried, y)
            here = Expansion(*(torch.where(better, n, o) for n, o in zip(there, here, strict=True)))
            share = torch.where(better, (4 * share).clamp(max=1), share / 4)
        return y

    def hessian_g_star(self, x: Tensor, v: Tensor) -> Tensor:
        return self._expanded(self.grad_g_star(x)).solve(v)

    def divergence(self, x: Tensor, mu: Tensor) -> Tensor:
        s = self.grad_g_star(mu)
        return self.g_star(x) + self.g(s) - (x * s).sum()

    def require(self, theta: Tensor) -> None:
        self._require_convex(torch.full_like(theta, self.start))
        super().require(theta)

    def _require_convex(self, y: Tensor) -> None:
        """Try the user's function where Newton's method begins, before anything is trained."""
        where = f"family.generator {self.generator}"
        try:
            terms, slope, curvature = self._expanded(y)
        except UsageError:
            raise
        except Exception as error:
            reason = (str(error).strip().splitlines() or [""])[0]
            raise UsageError(f"{where} cannot be differentiated twice in torch: {type(error).__name__}: "
                             f"{reason}") from error
        if terms.shape not in (y.shape, ()):
            raise UsageError(f"{where} gives shape {tuple(terms.shape)} for y of shape {tuple(y.shape)}: it "
                             "must give one term per coordinate, or one number")
        if not all(bool(torch.isfinite(t).all()) for t in (terms, slope, curvature)):
            raise UsageError(f"{where} is not finite at start = {self.start:g}: name a point of its domain")
        least = curvature.min() if terms.dim() else torch.linalg.eigvalsh(curvature)[0]
        if not bool(least > 0):
            raise UsageError(f"{where} is not strictly convex at start = {self.start:g}: its second "
                             f"derivative is {float(least):g}")

    def inside(self, x: Tensor) -> Tensor:
        """Where grad g reaches x."""
        reached = (self.grad_g(self.grad_g_star(x)) - x).abs() <= 1e-3 * (1 + x.abs())
        above = reached if self.low is None else reached & (x > self.low)
        return above if self.high is None else above & (x < self.high)

    def project(self, x: Tensor) -> Tensor:
        if self.low is not None:
            x = x.clamp(min=self.low + self.eps)
        return x if self.high is None else x.clamp(max=self.high - self.eps)

    def move(self, y: Tensor, step: Tensor) -> Tensor:
        for _ in range(60):
            step = torch.where(torch.isfinite(self._terms(y - 2 * step)), step, step / 2)
        return y - step

    def _expanded(self, y: Tensor) -> Expansion:
        derivative = grad if self._terms(y).dim() else jacrev

        def value(y: Tensor) -> tuple[Tensor, Tensor]:
            terms = self._terms(y)
            return terms.sum(), terms

        def slope(y: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            gradient, terms = grad(value, has_aux=True)(y)
            return gradient.sum() if terms.dim() else gradient, (terms, gradient)

        curvature, (terms, gradient) = derivative(slope, has_aux=True)(y)
        return Expansion(terms, gradient, curvature)


class Expansion(NamedTuple):
    """g at a point, to the second order."""

    terms: Tensor  # [d], or [] for a g that is no sum over coordinates
    slope: Tensor  # [d]
    curvature: Tensor  # [d] the diagonal of the Hessian, or [d, d] the Hessian

    def solve(self, v: Tensor) -> Tensor:
        """The Hessian's inverse, times v."""
        solution: Tensor = (v / self.curvature if self.terms.dim()
                            else torch.linalg.solve(self.curvature, v))
        return solution


def _place(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", type(function).__name__)
    place = f"{getattr(function, '__module__', None)}:{name}"
    if not is_place(place):
        raise UsageError(f"generator.generator must be a function of a module (def g(y): ...), not {name!r}: "
                         "worker processes and a resumed run look it up by its name")
    return place


def _found(place: str) -> Callable[[Tensor], Tensor]:
    require(place, "family.generator")  # each time: two files may name it, and only one may have been trusted
    return _made(place)


@functools.cache
def _made(place: str) -> Callable[[Tensor], Tensor]:
    function: Callable[[Tensor], Tensor] = imported(place, "family.generator")
    if not isinstance(function, FunctionType):
        raise UsageError(f"family.generator {place}: it must be a function of y, not an object of type "
                         f"{type(function).__name__}")
    return function

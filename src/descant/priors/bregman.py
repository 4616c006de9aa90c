"""Families of priors as Bregman generators (pFedBreD, Section 3 and Table 7).

A regular exponential family has a convex log-normaliser g of its natural parameter y. Its conjugate g* is a
function of the mean parameter x = grad g(y), and the density of x around a mean mu falls with

    D_{g*}(x, mu) = g*(x) - g*(mu) - <grad g*(mu), x - mu>,

which is the energy of the prior. With the mean parameter on both sides (the printed Table 7 has the natural
parameter on one side for Bernoulli and Poisson):

    family       domain    g(y)            g*(x)                       D_{g*}(x, mu)
    gaussian     R         |y|^2 / 2       |x|^2 / 2                   |x - mu|^2 / 2
    with Sigma   R         y' Sigma y / 2  x' Sigma^-1 x / 2           (x - mu)' Sigma^-1 (x - mu) / 2
    bernoulli    (0, 1)    log(1 + e^y)    x ln x + (1-x) ln(1-x)      x ln(x/mu) + (1-x) ln((1-x)/(1-mu))
    poisson      x > 0     e^y             x ln x - x                  x ln(x/mu) - x + mu
    exponential  x > 0     -ln(-y)         -ln x - 1                   x/mu - ln(x/mu) - 1

summed over coordinates. The parameters of a model are the x. How they are kept in the domain: steps on a
model are made in y = grad g*(x) (`move`), so that x = grad g(y) cannot leave it; what is moved in x itself
is put back to a distance `eps` from the edge (`project`); a model that starts outside is refused
(`require`).
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, ClassVar, NamedTuple, TypeAlias

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

    def require(self, theta: Tensor) -> None:
        """A UsageError for a model that this family cannot be the prior of."""
        outside = int((~self.inside(theta)).sum())
        if outside:
            raise UsageError(
                f"family {self.name}: {outside} of the {theta.numel()} parameters of the initial model lie "
                f'outside its domain ({self.domain}): use family = {{ name = "gaussian" }}, or a model whose '
                f"parameters all start as {self.domain}")


# -- Gaussians ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SphericalGaussian(Generator):
    """The Gaussian with covariance I (lam is its precision): g = g* = |.|^2 / 2."""

    name: ClassVar[str] = "gaussian"
    is_gaussian: ClassVar[bool] = True

    def g(self, y: Tensor) -> Tensor:
        return y.square().sum() / 2

    def grad_g(self, y: Tensor) -> Tensor:
        return y

    def g_star(self, x: Tensor) -> Tensor:
        return x.square().sum() / 2

    def grad_g_star(self, x: Tensor) -> Tensor:
        return x

    def hessian_g_star(self, x: Tensor, v: Tensor) -> Tensor:
        return v

    def divergence(self, x: Tensor, mu: Tensor) -> Tensor:
        return (x - mu).square().sum() / 2


@dataclass(frozen=True)
class DiagonalGaussian(Generator):
    """The Gaussian with a diagonal covariance: `variance` has a number for each parameter of the model.

    Steps on theta are made in Sigma^-1 theta, which is gradient descent preconditioned by Sigma.
    """

    name: ClassVar[str] = "diagonal_gaussian"
    is_gaussian: ClassVar[bool] = True

    variance: tuple[float, ...] = hyper((), "the diagonal of Sigma, one number per parameter", gt=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "variance", _plain(self.variance))
        super().__post_init__()
        if not self.variance:
            raise UsageError(f"{self.name}.variance is missing: give a number for each parameter")

    @functools.cached_property
    def _diagonal(self) -> Tensor:
        return torch.tensor(self.variance, dtype=torch.float64)

    def g(self, y: Tensor) -> Tensor:
        return (self._diagonal.to(y.dtype) * y.square()).sum() / 2

    def grad_g(self, y: Tensor) -> Tensor:
        return self._diagonal.to(y.dtype) * y

    def g_star(self, x: Tensor) -> Tensor:
        return (x.square() / self._diagonal.to(x.dtype)).sum() / 2

    def grad_g_star(self, x: Tensor) -> Tensor:
        return x / self._diagonal.to(x.dtype)

    def hessian_g_star(self, x: Tensor, v: Tensor) -> Tensor:
        return v / self._diagonal.to(v.dtype)

    def divergence(self, x: Tensor, mu: Tensor) -> Tensor:
        return self.g_star(x - mu)

    def require(self, theta: Tensor) -> None:
        _require_length("variance", "numbers", len(self.variance), theta)


@dataclass(frozen=True)
class FullGaussian(Generator):
    """The Gaussian with any covariance `sigma`, a matrix with a row for each parameter of the model.

    Steps on theta are made in Sigma^-1 theta, which is gradient descent preconditioned by Sigma.
    """

    name: ClassVar[str] = "full_gaussian"
    is_gaussian: ClassVar[bool] = True

    sigma: tuple[tuple[float, ...], ...] = hyper((), "the covariance, a list of rows")

    def __post_init__(self) -> None:
        object.__setattr__(self, "sigma", _plain(self.sigma))
        super().__post_init__()
        d = len(self.sigma)
        if not d:
            raise UsageError(f"{self.name}.sigma is missing: give a list of rows, one for each parameter")
        if any(len(row) != d for row in self.sigma):
            raise UsageError(f"{self.name}.sigma must be a square matrix: it has {d} rows, "
                             f"of lengths {sorted({len(row) for row in self.sigma})}")
        if not torch.allclose(self._matrix, self._matrix.mT, rtol=1e-9, atol=0):
            raise UsageError(f"{self.name}.sigma must be symmetric")
        if int(torch.linalg.cholesky_ex(self._matrix).info):
            raise UsageError(f"{self.name}.sigma must be positive definite: a covariance has eigenvalues > 0")

    @functools.cached_property
    def _matrix(self) -> Tensor:
        return torch.tensor(self.sigma, dtype=torch.float64)

    @functools.cached_property
    def _inverse(self) -> Tensor:
        return torch.cholesky_inverse(torch.linalg.cholesky(self._matrix))

    def g(self, y: Tensor) -> Tensor:
        return (y * self.grad_g(y)).sum() / 2

    def grad_g(self, y: Tensor) -> Tensor:
        return self._matrix.to(y.dtype) @ y

    def g_star(self, x: Tensor) -> Tensor:
        return (x * self.grad_g_star(x)).sum() / 2

    def grad_g_star(self, x: Tensor) -> Tensor:
        return self._inverse.to(x.dtype) @ x

    def hessian_g_star(self, x: Tensor, v: Tensor) -> Tensor:
        return self.grad_g_star(v)

    def divergence(self, x: Tensor, mu: Tensor) -> Tensor:
        return self.g_star(x - mu)

    def require(self, theta: Tensor) -> None:
        _require_length("sigma", "rows", len(self.sigma), theta)


def _plain(value: Any) -> Any:
    """Arrays and tensors as the lists that TOML knows."""
    return value.tolist() if hasattr(value, "tolist") else value


def _require_length(field: str, what: str, found: int, theta: Tensor) -> None:
    if found != theta.numel():
        raise UsageError(f"family.{field} has {found} {what} for a model of {theta.numel()} parameters: "
                         "it must have one for each")


# -- families with a domain ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Bernoulli(Generator):
    """Parameters in (0, 1), pulled by the relative entropy of coins. The dual variable is the logit."""

    name: ClassVar[str] = "bernoulli"
    domain: ClassVar[str] = "numbers in (0, 1)"

    eps: float = hyper(1e-6, "least distance of a parameter from 0 and 1", gt=0, lt=0.5)

    def g(self, y: Tensor) -> Tensor:
        return torch.logaddexp(y, torch.zeros_like(y)).sum()  # torch's softplus is rounded above 20

    def grad_g(self, y: Tensor) -> Tensor:
        return torch.sigmoid(y)

    def g_star(self, x: Tensor) -> Tensor:
        return (torch.xlogy(x, x) + torch.xlogy(1 - x, 1 - x)).sum()

    def grad_g_star(self, x: Tensor) -> Tensor:
        return torch.logit(x)

    def hessian_g_star(self, x: Tensor, v: Tensor) -> Tensor:
        return v / (x * (1 - x))

    def divergence(self, x: Tensor, mu: Tensor) -> Tensor:
        return (torch.xlogy(x, x / mu) + torch.xlogy(1 - x, (1 - x) / (1 - mu))).sum()

    def inside(self, x: Tensor) -> Tensor:
        return (x > 0) & (x < 1)

    def project(self, x: Tensor) -> Tensor:
        return x.clamp(self.eps, 1 - self.eps)

    def move(self, y: Tensor, step: Tensor) -> Tensor:
        edge = math.log1p(-self.eps) - math.log(self.eps)  # the logit of 1 - eps
        return (y - step).clamp(-edge, edge)


@dataclass(frozen=True)
class Poisson(Generator):
    """Positive parameters, pulled by the generalised I-divergence. The dual variable is the logarithm."""

    name: ClassVar[str] = "poisson"
    domain: ClassVar[str] = "numbers > 0"

    eps: float = hyper(1e-6, "least value of a parameter", gt=0)

    def g(self, y: Tensor) -> Tensor:
        return y.exp().sum()

    def grad_g(self, y: Tensor) -> Tensor:
        return y.exp()

    def g_star(self, x: Tensor) -> Tensor:
        return (torch.xlogy(x, x) - x).sum()

    def grad_g_star(self, x: Tensor) -> Tensor:
        return x.log()

    def hessian_g_star(self, x: Tensor, v: Tensor) -> Tensor:
        return v / x

    def divergence(self, x: Tensor, mu: Tensor) -> Tensor:
        return (torch.xlogy(x, x / mu) - x + mu).sum()

    def inside(self, x: Tensor) -> Tensor:
        return (x > 0) & torch.isfinite(x)

    def project(self, x: Tensor) -> Tensor:
        return x.clamp(min=self.eps)

    def move(self, y: Tensor, step: Tensor) -> Tensor:
        return (y - step).clamp(min=math.log(self.eps))


@dataclass(frozen=True)
class Exponential(Generator):
    """Positive parameters, pulled by the Itakura-Saito divergence. The dual variable is -1 / x.

    It must stay negative: one step goes at most half way to 0, so that a parameter at most doubles.
    """

    name: ClassVar[str] = "exponential"
    domain: ClassVar[str] = "numbers > 0"

    eps: float = hyper(1e-6, "least value of a parameter", gt=0)

    def g(self, y: Tensor) -> Tensor:
        return -(-y).log().sum()

    def grad_g(self, y: Tensor) -> Tensor:
        return -1 / y

    def g_star(self, x: Tensor) -> Tensor:
        return (-x.log() - 1).sum()

    def grad_g_star(self, x: Tensor) -> Tensor:
        return -1 / x

    def hessian_g_star(self, x: Tensor, v: Tensor) -> Tensor:
        return v / x.square()

    def divergence(self, x: Tensor, mu: Tensor) -> Tensor:
        return (x / mu - (x / mu).log() - 1).sum()

    def inside(self, x: Tensor) -> Tensor:
        return (x > 0) & torch.isfinite(x)

    def project(self, x: Tensor) -> Tensor:
        return x.clamp(min=self.eps)

    def move(self, y: Tensor, step: Tensor) -> Tensor:
        return torch.minimum(y - step, y / 2).clamp(min=-1 / self.eps)


# -- a family from g alone ------------------------------------------------------------------------------

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


Family: TypeAlias = (SphericalGaussian | DiagonalGaussian | FullGaussian | Bernoulli | Poisson | Exponential
                     | FromGenerator)

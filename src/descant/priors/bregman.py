"""Families of priors as Bregman generators (pFedBreD, Section 3 and Table 7).

A regular exponential family has a convex log-normaliser g of its natural parameter y. Its conjugate g* is a
function of the mean parameter x = grad g(y), and the density of x around a mean mu falls with

    D_{g*}(x, mu) = g*(x) - g*(mu) - <grad g*(mu), x - mu>,

which is the energy of the prior, summed over coordinates, with the mean parameter on both sides. The
parameters of a model are the x. How they are kept in the domain: steps on a model are made in y = grad g*(x)
(`move`), so that x = grad g(y) cannot leave it; what is moved in x itself is put back to a distance `eps`
from the edge (`project`); a model that starts outside is refused (`require`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from descant.core.fields import hyper
from descant.core.tree import Tree
from descant.errors import UsageError
from descant.priors.generators import FromGenerator, Generator
from descant.priors.precision import Adaptive, Lam, LearnedVariance
from descant.priors.prior import Prior
from descant.priors.solve import decayed

# -- Gaussians ------------------------------------------------------------------------------------------


class _Covariance(Generator):
    """A Gaussian with covariance Sigma: g(y) = y' Sigma y / 2, g*(x) = x' Sigma^-1 x / 2.

    Steps on theta are made in Sigma^-1 theta, which is gradient descent preconditioned by Sigma.
    """

    is_gaussian: ClassVar[bool] = True

    def g(self, y: Tensor) -> Tensor:
        return (y * self.grad_g(y)).sum() / 2

    def g_star(self, x: Tensor) -> Tensor:
        return (x * self.grad_g_star(x)).sum() / 2

    def hessian_g_star(self, x: Tensor, v: Tensor) -> Tensor:
        return self.grad_g_star(v)

    def divergence(self, x: Tensor, mu: Tensor) -> Tensor:
        return self.g_star(x - mu)


@dataclass(frozen=True)
class SphericalGaussian(_Covariance):
    """The Gaussian with covariance I (lam is its precision): g = g* = |.|^2 / 2."""

    name: ClassVar[str] = "gaussian"

    def grad_g(self, y: Tensor) -> Tensor:
        return y

    def grad_g_star(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class DiagonalGaussian(_Covariance):
    """The Gaussian with a diagonal covariance: `variance` has a number for each parameter of the model."""

    name: ClassVar[str] = "diagonal_gaussian"

    variance: tuple[float, ...] = hyper((), "the diagonal of Sigma, one number per parameter", gt=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "variance", _plain(self.variance))
        super().__post_init__()
        if not self.variance:
            raise UsageError(f"{self.name}.variance is missing: give a number for each parameter")

    @functools.cached_property
    def _diagonal(self) -> Tensor:
        return torch.tensor(self.variance, dtype=torch.float64)

    def grad_g(self, y: Tensor) -> Tensor:
        return self._diagonal.to(y.dtype) * y

    def grad_g_star(self, x: Tensor) -> Tensor:
        return x / self._diagonal.to(x.dtype)

    def sharpest(self) -> float:
        return 1 / min(self.variance)

    def require(self, theta: Tensor) -> None:
        _require_length("variance", "numbers", len(self.variance), theta)


@dataclass(frozen=True)
class FullGaussian(_Covariance):
    """The Gaussian with any covariance `sigma`, a matrix with a row for each parameter of the model."""

    name: ClassVar[str] = "full_gaussian"

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

    def grad_g(self, y: Tensor) -> Tensor:
        return self._matrix.to(y.dtype) @ y

    def grad_g_star(self, x: Tensor) -> Tensor:
        return self._inverse.to(x.dtype) @ x

    def sharpest(self) -> float:
        return 1 / float(torch.linalg.eigvalsh(self._matrix)[0])

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
class _Positive(Generator):
    domain: ClassVar[str] = "numbers > 0"

    eps: float = hyper(1e-6, "least value of a parameter", gt=0)

    def inside(self, x: Tensor) -> Tensor:
        return (x > 0) & torch.isfinite(x)

    def project(self, x: Tensor) -> Tensor:
        return x.clamp(min=self.eps)


@dataclass(frozen=True)
class Poisson(_Positive):
    """Positive parameters, pulled by the generalised I-divergence. The dual variable is the logarithm."""

    name: ClassVar[str] = "poisson"

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

    def move(self, y: Tensor, step: Tensor) -> Tensor:
        return (y - step).clamp(min=math.log(self.eps))


@dataclass(frozen=True)
class Exponential(_Positive):
    """Positive parameters, pulled by the Itakura-Saito divergence. The dual variable is -1 / x.

    It must stay negative: one step goes at most half way to 0, so that a parameter at most doubles.
    """

    name: ClassVar[str] = "exponential"

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

    def move(self, y: Tensor, step: Tensor) -> Tensor:
        return torch.minimum(y - step, y / 2).clamp(min=-1 / self.eps)


Family: TypeAlias = (SphericalGaussian | DiagonalGaussian | FullGaussian | Bernoulli | Poisson | Exponential
                     | FromGenerator)


class Mirror(NamedTuple):
    """Mirror descent: y <- y - lr (gradient + weight_decay theta + grad prior(y)),   theta = grad g(y).

    The steps are made in y = grad g*(theta), in which the prior lam D_{g*}(., mu) has the gradient
    lam (y - grad g*(mu)): it is given as the Gaussian of y around grad g*(mu). theta cannot leave the domain.
    """

    family: Family
    lr: float
    weight_decay: float = 0.0

    def init(self, theta: Tensor) -> Tensor:
        return self.family.grad_g_star(theta)

    def step(self, theta: Tensor, gradient: Tensor, prior: Prior, state: Tree) -> tuple[Tensor, Tree]:
        slope = decayed(gradient, theta, self.weight_decay)
        y = self.family.move(state, self.lr * (slope + prior.grad(state)))
        return self.family.grad_g(y), y


def require_fit(family: Family, lam: Lam, method: str) -> None:
    """Refuse a rule for lam that is derived for Gaussians where the family is another."""
    if isinstance(lam, LearnedVariance) and not isinstance(family, SphericalGaussian):
        raise UsageError(f"{method}.lam = {{ name = \"learned\" }} learns the variance of a Gaussian and "
                         f"does not fit the family {family.name}: use family = "
                         '{ name = "gaussian" }, or a number for lam')
    if isinstance(lam, Adaptive) and not family.is_gaussian:
        raise UsageError(f"{method}.lam = {{ name = \"adaptive\" }} is derived for Gaussian priors and "
                         f"does not fit the family {family.name}: use a number for lam")

"""Families as Bregman generators keep to the identities of duality, and their envelopes to Eq. 2 and 13.

x and mu are mean parameters, y natural ones; x = grad g(y). Everything is in float64.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributions
from torch.func import vmap

from descant.algorithms import pFedBreD
from descant.core import fields
from descant.errors import DescantError, UsageError
from descant.experiment.config import parse_algorithm
from descant.priors.bregman import (
    Bernoulli,
    DiagonalGaussian,
    Exponential,
    Family,
    FullGaussian,
    Mirror,
    Poisson,
    SphericalGaussian,
)
from descant.priors.generators import FromGenerator
from descant.priors.quadratic import Gaussian
from descant.theory.bregman import envelope, envelope_gradient, objective_gradient, proximal_map
from helpers import finite_differences


def vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def hyperbolic(y: Tensor) -> Tensor:
    """On all numbers: grad g = sinh, g*(x) = x asinh x - sqrt(1 + x^2)."""
    return torch.cosh(y)


def coin(y: Tensor) -> Tensor:
    return torch.logaddexp(y, torch.zeros_like(y))


def reciprocal(y: Tensor) -> Tensor:
    return -torch.log(-y)


def multinomial(y: Tensor) -> Tensor:
    """g(y) = ln(1 + sum_j e^{y_j}), which is no sum over coordinates; x_j are probabilities, 1 - sum_j x_j is
    that of the last outcome."""
    return torch.log1p(y.exp().sum())


VARIANCE = (0.5, 2.0, 1.3)
SIGMA = ((2.0, 0.6, 0.1), (0.6, 1.0, -0.3), (0.1, -0.3, 0.5))
SIGNED = (vector(0.3, -1.2, 2.0), vector(-0.7, 0.4, 1.1))
SHARES = (vector(0.2, 0.9, 0.55), vector(0.35, 0.6, 0.01))
POSITIVE = (vector(0.2, 3.0, 1.1), vector(0.7, 0.4, 2.5))
SIMPLEX = (vector(0.2, 0.5, 0.1), vector(0.4, 0.1, 0.3))
CASES: dict[str, tuple[Family, Tensor, Tensor]] = {  # with two points of the domain
    "gaussian": (SphericalGaussian(), *SIGNED),
    "diagonal": (DiagonalGaussian(VARIANCE), *SIGNED),
    "full": (FullGaussian(SIGMA), *SIGNED),
    "bernoulli": (Bernoulli(), *SHARES),
    "poisson": (Poisson(), *POSITIVE),
    "exponential": (Exponential(), *POSITIVE),
    # points near the start: ten steps are enough, and every call makes them all
    "own cosh": (FromGenerator(hyperbolic, steps=10), *SIGNED),
    "own coin": (FromGenerator(coin, low=0.0, high=1.0, steps=12), *SHARES),
    "own reciprocal": (FromGenerator(reciprocal, start=-1.0, low=0.0, steps=12), *POSITIVE),
    "own multinomial": (FromGenerator(multinomial, steps=10), *SIMPLEX),
}
every_family = pytest.mark.parametrize("case", CASES)
# where a point is searched for, of the families that are inverted by steps one is quick
searched_family = pytest.mark.parametrize("case", [
    pytest.param(case, marks=pytest.mark.slow if case.startswith("own ") and case != "own cosh" else ())
    for case in CASES])


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# -- duality --------------------------------------------------------------------------------------------


@every_family
def test_the_gradients_of_g_and_its_conjugate_are_inverse(case: str) -> None:
    family, x, mu = CASES[case]
    for point in (x, mu):
        y = family.grad_g_star(point)
        close(family.grad_g(y), point)
        close(family.grad_g_star(family.grad_g(y)), y)


@every_family
def test_the_gradients_are_those_of_the_values(case: str) -> None:
    family, x, _ = CASES[case]
    y = family.grad_g_star(x)
    close(family.grad_g(y), finite_differences(family.g, y), 1e-7)
    close(y, finite_differences(family.g_star, x), 1e-7)


@every_family
def test_fenchel(case: str) -> None:
    """g(y) + g*(x) >= <x, y>, with equality where x = grad g(y) only."""
    family, x, mu = CASES[case]
    y, other = family.grad_g_star(x), family.grad_g_star(mu)
    close(family.g(y) + family.g_star(x), x @ y)
    assert family.g(other) + family.g_star(x) > x @ other + 1e-3


@every_family
def test_the_hessian_of_the_conjugate(case: str) -> None:
    """Its products with unit vectors are the derivatives of grad g*, and it is the inverse of the Hessian of
    g at the dual point: grad g*(grad g(y)) = y, differentiated."""
    family, x, _ = CASES[case]
    y, units = family.grad_g_star(x), torch.eye(3, dtype=torch.float64)
    hessian = torch.stack([family.hessian_g_star(x, v) for v in units], 1)
    for j in range(3):
        close(hessian[j], finite_differences(lambda p, j=j: family.grad_g_star(p)[j], x), 1e-6)
    of_g = torch.stack([finite_differences(lambda q, j=j: family.grad_g(q)[j], y) for j in range(3)])
    close(hessian @ of_g, units, 1e-6)
    close(hessian, hessian.mT)
    assert torch.linalg.eigvalsh(hessian).min() > 0  # strictly convex


@every_family
def test_the_divergence(case: str) -> None:
    """By its definition, and by the dual one (Eq. 18): D_{g*}(x, mu) = g*(x) + g(s) - <x, s>, where s = grad
    g*(mu); positive, and zero for equal points only."""
    family, x, mu = CASES[case]
    s = family.grad_g_star(mu)
    close(family.divergence(x, mu), family.g_star(x) - family.g_star(mu) - s @ (x - mu))
    close(family.divergence(x, mu), family.g_star(x) + family.g(s) - x @ s)
    assert family.divergence(x, mu) > 1e-2
    assert family.divergence(mu, x) > 1e-2
    close(family.divergence(mu, mu), torch.zeros((), dtype=torch.float64))
    close(finite_differences(lambda p: family.divergence(p, mu), x), family.grad_g_star(x) - s, 1e-7)


def test_divergences_by_hand() -> None:
    """One coordinate each, from the formulas with the mean parameter on both sides."""
    half, most = vector(0.5), vector(0.9)
    close(Bernoulli().divergence(half, most), torch.tensor(-math.log(2) - math.log(0.09) / 2).double(), 1e-7)
    close(Poisson().divergence(vector(2.0), vector(1.0)), vector(2 * math.log(2) - 1)[0])
    close(Exponential().divergence(vector(2.0), vector(1.0)), vector(1 - math.log(2))[0])
    close(DiagonalGaussian((4.0,)).divergence(vector(3.0), vector(1.0)), vector(0.5)[0])


def test_divergences_are_relative_entropies() -> None:
    """KL between members of a regular exponential family is D_{g*} of their means, in this order."""
    def kl(p: Any, q: Any) -> Tensor:
        return distributions.kl_divergence(p, q).sum()

    x, mu = SHARES
    close(Bernoulli().divergence(x, mu), kl(distributions.Bernoulli(x), distributions.Bernoulli(mu)), 1e-7)
    x, mu = POSITIVE
    close(Poisson().divergence(x, mu), kl(distributions.Poisson(x), distributions.Poisson(mu)))
    close(Exponential().divergence(x, mu), kl(distributions.Exponential(1 / x),
                                              distributions.Exponential(1 / mu)))
    x, mu = SIGNED
    sigma, lam = torch.tensor(SIGMA, dtype=torch.float64), 3.0  # lam divides the covariance
    normal = distributions.MultivariateNormal
    close(lam * FullGaussian(SIGMA).divergence(x, mu), kl(normal(x, sigma / lam), normal(mu, sigma / lam)))
    diagonal = torch.diag(vector(*VARIANCE))
    close(DiagonalGaussian(VARIANCE).divergence(x, mu), kl(normal(x, diagonal), normal(mu, diagonal)))
    close(SphericalGaussian().divergence(x, mu),
          kl(distributions.Normal(x, 1.0), distributions.Normal(mu, 1.0)))
    p, q = (torch.cat([each, 1 - each.sum(0, keepdim=True)]) for each in SIMPLEX)
    close(FromGenerator(multinomial).divergence(*SIMPLEX),
          kl(distributions.Categorical(p), distributions.Categorical(q)))


# -- from g alone -----------------------------------------------------------------------------------------


def test_a_family_from_its_generator_alone_is_the_one_that_was_written_out() -> None:
    for own, written, (x, mu) in ((CASES["own coin"][0], Bernoulli(), SHARES),
                                  (CASES["own reciprocal"][0], Exponential(), POSITIVE)):
        y = written.grad_g_star(x)
        close(own.g(y), written.g(y))
        close(own.grad_g(y), written.grad_g(y))
        close(own.g_star(x), written.g_star(x))
        close(own.grad_g_star(x), y)
        close(own.hessian_g_star(x, mu), written.hessian_g_star(x, mu))
        close(own.divergence(x, mu), written.divergence(x, mu))
        assert torch.equal(own.project(10 * x - 3), written.project(10 * x - 3))
    own = FromGenerator(hyperbolic)
    x = SIGNED[0]
    close(own.grad_g_star(x), torch.asinh(x))
    close(own.g_star(x), (x * torch.asinh(x) - (1 + x.square()).sqrt()).sum())
    x = SIMPLEX[0]
    close(FromGenerator(multinomial).grad_g_star(x), torch.log(x / (1 - x.sum())))


def test_newton_s_method_reaches_far() -> None:
    """From y = -1, where a whole step for x = 1e4 would leave the domain y < 0 by 1e4; and where the
    curvature of g is almost zero."""
    x = vector(1e-4, 1.0, 1e4)
    close(FromGenerator(reciprocal, start=-1.0, steps=60).grad_g_star(x), -1 / x, 1e-10)
    x = vector(1e-9, 0.5, 1 - 1e-9)
    close(FromGenerator(coin, steps=60).grad_g_star(x), torch.logit(x), 1e-6)
    x = vector(-1e8, 0.0, 1e8)
    close(FromGenerator(hyperbolic, steps=60).grad_g_star(x), torch.asinh(x), 1e-10)


@every_family
def test_families_can_be_vectorised(case: str) -> None:
    family, x, mu = CASES[case]
    points = torch.stack([x, mu])
    for f in (family.g, family.grad_g):
        at = torch.stack([family.grad_g_star(p) for p in points])
        close(vmap(f)(at), torch.stack([f(p) for p in at]))
    for f in (family.g_star, family.grad_g_star, family.project):
        close(vmap(f)(points), torch.stack([f(p) for p in points]))
    for g in (family.hessian_g_star, family.divergence, family.move):
        there = points if g != family.move else torch.stack([family.grad_g_star(p) for p in points])
        close(vmap(g)(there, points.flip(0)), torch.stack([g(there[0], mu), g(there[1], x)]))


# -- domains ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", ["bernoulli", "poisson", "exponential", "own coin", "own reciprocal"])
def test_steps_in_the_dual_never_leave_the_domain(case: str, dtype: torch.dtype) -> None:
    """Whatever the step; and what they reach can be the start of the next. Upwards, Poisson's parameters may
    grow as they like."""
    family, x, _ = CASES[case]
    up = 10.0 if case == "poisson" else 1e6
    for scale in (1e-3, 1.0, up):
        for sign in (1.0, -1.0):
            y = family.grad_g_star(x.to(dtype))
            for _ in range(4):
                y = family.move(y, torch.full_like(y, sign * scale))
                reached = family.grad_g(y)
                assert torch.isfinite(reached).all()
                if not case.startswith("own"):
                    assert family.inside(reached).all()
                    assert torch.isfinite(family.grad_g_star(reached)).all()
                assert (family.project(reached) - reached).abs().max() <= 2e-6  # so far from the edge, or eps


def test_a_step_that_stays_inside_is_not_changed() -> None:
    for case in CASES:
        family, x, _ = CASES[case]
        y = family.grad_g_star(x)
        assert torch.equal(family.move(y, 0.01 * y.abs()), y - 0.01 * y.abs()), case


def test_exponential_parameters_at_most_double_in_a_step() -> None:
    """y - step would be positive: it goes half way to 0, so that x = -1/y doubles. So does the family that
    knows nothing but g, to the halving of its step."""
    y = -1 / POSITIVE[0]
    close(Exponential().grad_g(Exponential().move(y, -torch.ones_like(y) * 100)), 2 * POSITIVE[0])
    own = FromGenerator(reciprocal, start=-1.0)
    grown = own.grad_g(own.move(y, -torch.ones_like(y) * 100)) / POSITIVE[0]
    assert (grown > 1.3).all()
    assert (grown <= 2).all()


def test_projections_keep_a_margin() -> None:
    wild = vector(-3.0, 0.5, 1e9)
    close(Bernoulli(eps=0.01).project(wild), vector(0.01, 0.5, 0.99))
    close(Poisson(eps=0.2).project(wild), vector(0.2, 0.5, 1e9))
    close(Exponential(eps=0.2).project(wild), vector(0.2, 0.5, 1e9))
    close(FromGenerator(coin, low=-1.0, high=2.0, eps=0.1).project(wild), vector(-0.9, 0.5, 1.9))
    for family in (SphericalGaussian(), DiagonalGaussian(VARIANCE), FullGaussian(SIGMA), FromGenerator(coin)):
        assert family.project(wild) is wild


@pytest.mark.parametrize(("family", "outside"), [
    (Bernoulli(), 3), (Poisson(), 2), (Exponential(), 2), (FromGenerator(coin), 2),
    (FromGenerator(reciprocal, start=-1.0, low=0.0), 2), (FromGenerator(hyperbolic), 0),
    (SphericalGaussian(), 0),
])
def test_models_outside_the_domain_are_refused(family: Family, outside: int) -> None:
    """-0.2, 0 and 1.5 of these; a family that knows nothing but g takes the edge 0 of its range for reached,
    unless it is told (`low`)."""
    theta = vector(-0.2, 0.0, 0.4, 1.5)
    if not outside:
        family.require(theta)
        return
    reason = rf"{family.name}: {outside} of the 4 parameters .*name = \"gaussian\""
    with pytest.raises(UsageError, match=reason):
        family.require(theta)


# -- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "reason"), [
    (lambda: DiagonalGaussian((1.0, 0.0)), r"diagonal_gaussian.variance\[1\] must be greater than 0"),
    (lambda: DiagonalGaussian((1.0, math.nan)), r"variance\[1\] must be a finite number"),
    (lambda: FullGaussian(((1.0, 0.0),)), "square matrix"),
    (lambda: FullGaussian(((1.0, 0.5), (0.4, 1.0))), "symmetric"),
    (lambda: FullGaussian(((1.0, 2.0), (2.0, 1.0))), "positive definite"),
    (lambda: Bernoulli(eps=0.5), "bernoulli.eps must be less than 0.5"),
    (lambda: Poisson(eps=0.0), "poisson.eps must be greater than 0"),
    (lambda: FullGaussian(), "sigma is missing"),
    (lambda: DiagonalGaussian(), "variance is missing"),
    (lambda: FromGenerator(lambda y: y), "function of a module"),
    (lambda: FromGenerator("nonsense"), "package.module:function"),
    (lambda: FromGenerator("no_such_module:g").g(vector(1.0)), "no module 'no_such_module'"),
    (lambda: FromGenerator("torch:no_such").g(vector(1.0)), "no_such"),
    (lambda: FromGenerator("torch:pi").g(vector(1.0)), "must be a function"),
    (lambda: FromGenerator("math:cosh").g(vector(1.0)), "math is a module of Python itself"),
])
def test_families_refuse_nonsense(make: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        make()


def outside_torch(y: Tensor) -> Tensor:
    return math.cosh(y)  # type: ignore[arg-type, return-value]


def log_of(y: Tensor) -> Tensor:
    return -y.log()


def concave(y: Tensor) -> Tensor:
    return -y.square()


def doubled(y: Tensor) -> Tensor:
    return torch.cat([y, y]).square()


def constant(y: Tensor) -> Tensor:
    return torch.ones_like(y)


@pytest.mark.parametrize(("g", "start", "reason"), [
    (outside_torch, 0.0, "cannot be differentiated twice in torch"),
    (log_of, 0.0, "is not finite at start = 0"),
    (concave, 0.0, "is not strictly convex at start = 0: its second derivative is -2"),
    (constant, 0.0, "is not strictly convex|cannot be differentiated"),
    (doubled, 0.0, r"gives shape \(4,\) for y of shape \(2,\)"),
])
def test_a_user_s_generator_is_tried_before_training(g: Any, start: float, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        FromGenerator(g, start=start).require(vector(0.1, 0.2))
    FromGenerator(log_of, start=1.0).require(vector(-0.1, -0.2))


@pytest.mark.parametrize("family", [DiagonalGaussian(VARIANCE), FullGaussian(SIGMA)])
def test_covariances_of_the_wrong_size_are_refused(family: Family) -> None:
    family.require(vector(1.0, 2.0, 3.0))
    with pytest.raises(UsageError, match=r"3 .* for a model of 2 parameters"):
        family.require(vector(1.0, 2.0))


@every_family
def test_families_survive_their_table(case: str) -> None:
    algorithm = pFedBreD(family=CASES[case][0])
    assert parse_algorithm(fields.dump(algorithm)) == algorithm
    assert fields.dump(algorithm)["family"]["name"] == CASES[case][0].name


def test_covariances_may_be_arrays() -> None:
    assert DiagonalGaussian(vector(*VARIANCE)) == DiagonalGaussian(VARIANCE)  # type: ignore[arg-type]
    assert FullGaussian(np.array(SIGMA)) == FullGaussian(SIGMA)  # type: ignore[arg-type]


# -- envelopes ----------------------------------------------------------------------------------------------

LAM = 1.7
H = torch.tensor([[1.5, 0.2, -0.1], [0.2, 0.8, 0.3], [-0.1, 0.3, 2.0]], dtype=torch.float64)
A = vector(0.4, 0.7, 0.2)


def bowl(theta: Tensor) -> Tensor:
    return (theta - A) @ H @ (theta - A) / 2


@pytest.mark.parametrize("case", ["gaussian", "diagonal", "full"])
@pytest.mark.parametrize("lam", [0.05, 1.7, 300.0])
@pytest.mark.thorough
def test_the_proximal_map_of_a_quadratic(case: str, lam: float) -> None:
    """Stationarity H (theta - a) + lam P (theta - mu) = 0 with P = Sigma^-1 gives theta = (H + lam P)^-1
    (H a + lam P mu). The envelope is the value there."""
    sigma = {"gaussian": np.eye(3), "diagonal": np.diag(VARIANCE), "full": np.array(SIGMA)}
    P = torch.linalg.inv(torch.from_numpy(sigma[case]))
    family, _, mu = CASES[case]
    expected = torch.linalg.solve(H + lam * P, H @ A + lam * P @ mu)
    close(proximal_map(bowl, mu, lam, family), expected, 1e-9)
    gap = expected - mu
    close(envelope(bowl, mu, lam, family), bowl(expected) + lam * gap @ P @ gap / 2, 1e-12)


@searched_family
def test_the_limits_of_the_proximal_map(case: str) -> None:
    """lam -> inf: mu (theta - mu is of order 1/lam); lam -> 0: the least of f, here inside every domain."""
    family, _, mu = CASES[case]
    close(proximal_map(bowl, mu, 1e9, family), mu, 1e-8)
    center = vector(0.3, 0.2, 0.4)

    def least(theta: Tensor) -> Tensor:
        return (theta - center) @ H @ (theta - center) / 2

    close(proximal_map(least, mu, 1e-7, family), center, 1e-5)


@every_family
def test_the_proximal_map_is_stationary(case: str) -> None:
    """grad f(theta) + lam (grad g*(theta) - grad g*(mu)) = 0, for an f that is not quadratic."""
    family, _, mu = CASES[case]

    def f(theta: Tensor) -> Tensor:
        return bowl(theta) + torch.logsumexp(2 * theta, 0)

    theta = proximal_map(f, mu, LAM, family)
    gradient = torch.func.grad(f)(theta)
    assert gradient.norm() > 0.1
    close(gradient, -LAM * (family.grad_g_star(theta) - family.grad_g_star(mu)), 1e-9)


@searched_family
def test_the_gradient_of_the_envelope(case: str) -> None:
    """Eq. 2: lam Hess g*(mu) (mu - prox(mu)), against differences of the envelope itself."""
    family, _, mu = CASES[case]
    found = envelope_gradient(bowl, mu, LAM, family)
    close(found, finite_differences(lambda p: envelope(bowl, p, LAM, family, tolerance=1e-8), mu, 1e-5),
          1e-7)
    assert found.norm() > 0.1


@searched_family
@pytest.mark.thorough
def test_the_gradient_of_the_clients_objective(case: str) -> None:
    """Eq. 13 with the mean mu(w) = w - eta grad f(w) of lg: here for f with a Hessian that changes."""
    family, _, w = CASES[case]

    def f(theta: Tensor) -> Tensor:
        return bowl(theta) + torch.logsumexp(2 * theta, 0)

    def mean(w: Tensor) -> Tensor:
        return w - 0.01 * torch.func.grad(f)(w)

    found = objective_gradient(f, mean, w, LAM, family)
    differences = finite_differences(lambda w: envelope(f, mean(w), LAM, family, tolerance=1e-8), w, 1e-5)
    close(found, differences, 1e-6)
    without = envelope_gradient(f, mean(w), LAM, family)
    assert (found - without).norm() > 1e-3  # the Jacobian of the mean is not I


def test_the_proximal_map_refuses_what_it_cannot_do() -> None:
    with pytest.raises(UsageError, match="lam > 0"):
        proximal_map(bowl, A, 0.0, SphericalGaussian())
    with pytest.raises(UsageError, match="1 of the 3 coordinates of mu lie outside"):
        envelope(bowl, vector(0.1, -0.2, 0.3), 1.0, Poisson())
    with pytest.raises(DescantError, match="did not converge in 3 steps"):
        proximal_map(bowl, vector(5.0, -4.0, 3.0), 1e-3, SphericalGaussian(), steps=3)
    with pytest.raises(DescantError, match="no finite value"):
        proximal_map(lambda theta: (theta - 2).log().sum(), vector(0.5), 1.0, SphericalGaussian())


@pytest.mark.parametrize("weight_decay", [0.3, pytest.param(0.0, marks=pytest.mark.slow)])
@searched_family
def test_mirror_descent_comes_to_the_proximal_map(case: str, weight_decay: float) -> None:
    """Of f + weight_decay/2 ||.||^2. In y = grad g*(theta), lam D(theta, mu) has the gradient of the Gaussian
    lam/2 ||y - grad g*(mu)||^2."""
    family, x, mu = CASES[case]
    lam, f = 2.0, lambda theta: (theta - x).square().sum() / 2
    solver = Mirror(family, 0.02, weight_decay)
    dual = Gaussian(family.grad_g_star(mu), lam)
    theta, state = mu, solver.init(mu)
    for _ in range(400):  # each shrinks the error by 1 - 0.02 lam or more: 0.96^400 = 8e-8
        theta, state = solver.step(theta, theta - x, dual, state)
    expected = proximal_map(lambda t: f(t) + weight_decay / 2 * t.square().sum(), mu, lam, family)
    close(theta, expected, 1e-6)
    assert (theta - mu).abs().max() > 1e-3

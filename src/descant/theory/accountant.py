"""How much privacy noise buys: epsilon for a given delta.

Two mechanisms. Without secret sampling, a unit that takes part m times in sums with noise multiplier sigma is
hidden by one Gaussian of mu = sqrt(m) / sigma, whose epsilon is known exactly (Balle and Wang 2018; Dong,
Roth and Su 2022). Where a secret coin with probability q decides each time, the privacy loss has no closed
form: it is composed numerically (PRV, Gopi et al. 2021), by opacus. Units are neighbours by presence: one
contributes, or contributes zero.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from descant.errors import UsageError

ERROR = 0.001  # of an epsilon that is composed numerically, relative; the upper end is told
LEAST_ERROR = 0.01  # the same, absolute
HOPELESS = 100.0  # above, a looser bound does: it says as little
LEAST_DELTA = 1e-9  # below, rounding shows in the numerical composition, and the looser bound is taken
INSTALL = "pip install 'descant[privacy]'"


class Event(NamedTuple):
    """So many noised sums, each over units that a coin chose."""

    noise: float  # multiplier
    rate: float  # of the coin; 1: everybody, no secret
    times: int


def epsilon(event: Event, delta: float) -> float:
    """The least epsilon known to hold with this delta; infinite without noise."""
    if event.times == 0 or event.rate == 0:
        return 0.0
    if event.noise == 0:
        return math.inf
    if event.rate >= 1:
        return gaussian_epsilon(math.sqrt(event.times) / event.noise, delta)
    return _sampled(event, delta)


@lru_cache(4096)
def gaussian_epsilon(mu: float, delta: float) -> float:
    """Of one Gaussian mechanism whose sums differ by mu deviations: the root of
    delta = Phi(mu/2 - eps/mu) - exp(eps) Phi(-mu/2 - eps/mu)."""
    from scipy import optimize, special  # slow to import, and most runs need no account

    if mu == 0:
        return 0.0

    def excess(eps: float) -> float:
        first, second = special.log_ndtr(mu / 2 - eps / mu), eps + special.log_ndtr(-mu / 2 - eps / mu)
        if second >= first:  # both vanish
            return -delta
        return float(np.exp(first) * -np.expm1(second - first)) - delta

    if excess(0.0) <= 0:
        return 0.0
    above = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta)) + 1e-9  # from Renyi divergence
    return float(optimize.brentq(excess, 0.0, above, xtol=1e-9))


@lru_cache(4096)
def _sampled(event: Event, delta: float) -> float:
    loose = renyi_epsilon(event, delta)
    exact = gaussian_epsilon(math.sqrt(event.times) / event.noise, delta)  # as if there were no coin
    bound = min(loose, exact)
    if bound > HOPELESS or delta < LEAST_DELTA:
        return bound
    return min(bound, _composed(event._replace(times=_doubled(event.times)), delta)(event.times))


def _doubled(times: int) -> int:
    """The next power of two: what is prepared for it serves for all fewer times."""
    return 1 << max(times - 1, 0).bit_length()


@lru_cache(64)
def _composed(most: Event, delta: float) -> Callable[[int], float]:
    """Epsilon after so many times, up to those of `most`. What does not depend on the number is computed
    once."""
    prv = _opacus("opacus.accountants.analysis.prv")
    apart, error = max(LEAST_ERROR, ERROR * renyi_epsilon(most, delta)), delta / 1000
    with _quietly():
        one = prv.PoissonSubsampledGaussianPRV(most.rate, most.noise)
        reach = prv.compute_safe_domain_size([one], [most.times], apart, error)
        mesh = apart / math.sqrt(most.times * math.log(12 / error) / 2)
        domain = prv.Domain.create_aligned(-reach, reach, mesh)
        spread = prv.discretize(prv.TruncatedPrivacyRandomVariable(one, domain.t_min, domain.t_max), domain)

    @cache
    def after(times: int) -> float:
        with _quietly():
            whole = prv.compose_heterogeneous([spread], [times])
            return float(whole.compute_epsilon(delta, error, apart)[2])

    return after


def renyi_epsilon(event: Event, delta: float) -> float:
    """A looser bound (Renyi), which takes no time and holds for any numbers."""
    orders, divergences = _divergences(event.noise, event.rate)
    with _quietly():
        found, _ = _opacus("opacus.accountants.analysis.rdp").get_privacy_spent(
            orders=orders, rdp=event.times * divergences, delta=delta)
    return max(0.0, float(found))


@lru_cache(256)
def _divergences(noise: float, rate: float) -> tuple[list[float], np.ndarray]:
    """The Renyi divergences of one sum, and their orders."""
    orders = _opacus("opacus.accountants").RDPAccountant.DEFAULT_ALPHAS
    with _quietly():
        return orders, np.array(_opacus("opacus.accountants.analysis.rdp").compute_rdp(
            q=rate, noise_multiplier=noise, steps=1, orders=orders))


def least_noise(spent: Callable[[float], float], budget: float) -> float:
    """The least noise multiplier with which what is spent, which falls with the noise, keeps to a budget; to
    a thousandth, rounded up."""
    low, high = 0.05, 1.0
    while spent(high) > budget:
        low, high = high, 2 * high
        if high > 1e6:
            raise UsageError(f"no noise keeps to privacy.epsilon = {budget:g}: take fewer rounds, or a "
                             "larger epsilon or delta")
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if spent(middle) <= budget else (middle, high)
    return math.ceil(high * 1000) / 1000


@contextmanager
def _quietly() -> Iterator[None]:
    """opacus warns where its looser bound is at the end of its table; the bound holds there too."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


def _opacus(module: str) -> Any:
    try:
        with _quietly():
            return importlib.import_module(module)
    except ImportError:
        raise UsageError(f"epsilon of sampled rows or clients is computed by opacus: {INSTALL}; "
                         'privacy.sampling = "known" needs none') from None

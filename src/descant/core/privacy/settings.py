"""The [privacy] section of an experiment, and what it comes to in a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from descant.core.fields import Checked, hyper
from descant.errors import UsageError

Unit: TypeAlias = Literal["client", "record"]
Sampling: TypeAlias = Literal["poisson", "known"]
SELDOM = 0.01  # share of rows or clients for which a clip binds, or does not


@dataclass(frozen=True)
class Quantile(Checked):
    """A bound that follows a quantile of the norms of the clients' contributions (Andrew et al. 2021):
    C <- C exp(-lr (b - quantile)), b being the noised share of the clients whose norm is at most C."""

    quantile: float = hyper(0.5, "share of the clients whose contribution is not shortened", gt=0, lt=1)
    start: float = hyper(1.0, "the bound in the first round", gt=0)
    lr: float = hyper(0.2, "how fast the bound follows", gt=0, le=10)
    count_noise: float | None = hyper(
        None, "deviation of the noise on the number of clients within the bound; absent: a twentieth of the "
              "expected cohort", gt=0)


@dataclass(frozen=True)
class Privacy(Checked):
    """Whose presence is hidden, and how well."""

    unit: Unit = hyper("record", "what is protected: every row of a client (record), or a client with all "
                                 "its rows (client)")
    clip: float | Quantile = hyper(
        1.0, "largest norm of what one unit adds: of a row's gradient, or of a client's contribution; "
             "{ quantile = 0.5 } follows the clients' norms (unit client only)", gt=0)
    noise: float | None = hyper(
        None, "noise multiplier: the sum of what the units add gets Gaussian noise of this times clip; "
              "absent: the least with which the whole run keeps to epsilon", gt=0)
    epsilon: float | None = hyper(
        None, "the budget: training stops before any unit's epsilon exceeds it; absent: there is none, and "
              "epsilon is only reported", gt=0)
    delta: float = hyper(1e-5, "the probability with which epsilon may not hold: well below one over the "
                               "number of units", gt=0, lt=1)
    sampling: Sampling = hyper(
        "poisson", "who is in a batch (record) or cohort (client). poisson: everybody by a coin of their own "
                   "that nobody else knows, which hides them better. known: as the seed says, which all "
                   "know; no amplification is claimed")
    figures: Literal["off", "told"] = hyper(
        "off", "whether clients of a real federation tell their losses and the figures of their held-out "
               "rows, which no noise protects")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise is None and self.epsilon is None:
            raise UsageError("[privacy] needs noise, or epsilon with delta, such as noise = 1.0 or "
                             "epsilon = 8.0")
        if isinstance(self.clip, Quantile) and self.unit != "client":
            raise UsageError('privacy.clip: only the contributions of clients have quantiles that follow '
                             'them: give a number, or unit = "client"')


@dataclass(frozen=True)
class Mechanism:
    """What [privacy] comes to in a run: the noise is settled."""

    privacy: Privacy
    noise: float  # the multiplier that is accounted for
    cohort: float = 1.0  # unit client: the size of a cohort that is expected, by which sums are divided
    secret: bool = False  # random numbers of the operating system, which nobody can repeat

    @property
    def unit(self) -> Unit:
        return self.privacy.unit

    @property
    def clip(self) -> float | Quantile:
        return self.privacy.clip

    @property
    def is_poisson(self) -> bool:
        return self.privacy.sampling == "poisson"

    @property
    def count_noise(self) -> float | None:
        """The deviation of the noise on the number of clients within the bound, where it is asked for."""
        if not isinstance(self.clip, Quantile):
            return None
        return self.cohort / 20 if self.clip.count_noise is None else self.clip.count_noise

    @property
    def sum_noise(self) -> float:
        """The multiplier of the noise on the sum. Where the number of clients within the bound is told as
        well, it is larger, so that both together are as private as `noise` (Andrew et al. 2021, Theorem 1:
        the bits count as +-1/2)."""
        return self.noise if self.count_noise is None else split_noise(self.noise, self.count_noise)


def idle_clip(share: float, unit: str) -> str | None:
    """What is to be said of a clip that shortens this share of the units, if it is hardly any or all."""
    units = "rows" if unit == "record" else "clients"
    if share < SELDOM:
        return (f"privacy.clip never binds ({share:.1%} of the {units}): a smaller one has less noise for "
                "the same epsilon")
    if share > 1 - SELDOM:
        return f"privacy.clip always binds ({share:.1%} of the {units}): all count alike, whatever they say"
    return None


def split_noise(noise: float, count_noise: float) -> float:
    """The multiplier of a sum's noise that, beside a count's, is as private as `noise` alone."""
    left = noise**-2 - (2 * count_noise) ** -2
    if left <= 0:
        raise UsageError(f"privacy.clip.count_noise = {count_noise:g} is too little beside privacy.noise = "
                         f"{noise:g}: the number of clients within the bound alone would tell more; take "
                         f"more than {noise / 2:.3g}")
    return 1 / math.sqrt(left)

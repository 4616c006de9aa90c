"""Robust aggregation: the [robust] section of an experiment.

The rules are in `core/robust.py`. They see uploads one by one, before the method's `aggregate` does, so that
methods do not know of them. There are three kinds:

- `norm` shortens uploads that are longer than the median of the round. The rest is the method's.
- `krum` and `multi_krum` leave uploads out, as if these clients had not been in the round.
- `median`, `trimmed` and `geometric` take the place of the mean that a method absorbs.

Each tensor of an upload is measured by itself, as its change from what an idle client uploads
(`uploads.Origins`), since a model and a variance have no common scale. Krum chooses whole uploads: there a
tensor counts in units of its median length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

from descant.core import robust
from descant.core.algorithm import Algorithm, Round
from descant.core.fields import Checked, hyper
from descant.core.units import times
from descant.errors import UsageError

Rule: TypeAlias = Literal["norm", "median", "trimmed", "geometric", "krum", "multi_krum"]
CHOOSE: tuple[Rule, ...] = ("krum", "multi_krum")
REPLACE: tuple[Rule, ...] = ("median", "trimmed", "geometric")


@dataclass(frozen=True)
class Robust(Checked):
    """How the server guards its mean against wrong uploads."""

    rule: Rule = hyper("norm", "what is done to the uploads of a round")
    share: float = hyper(0.2, "share of the clients of a round that may be wrong, for trimmed, krum and "
                              "multi_krum", gt=0, lt=0.5)
    clip: float = hyper(1.0, "norm: the longest change, in medians of the round", gt=0)
    count: float = hyper(3.0, "the most that one client counts: in medians of the round's sample counts, "
                              "or, where weights follow from uploads, in equal shares", ge=1)

    def wrong(self, clients: int) -> int:
        """How many of so many clients may be wrong."""
        return math.ceil(self.share * clients - 1e-9)

    def require_fit(self, method: Algorithm, cohort: int) -> None:
        """An error if the rule cannot serve a method, or so few clients."""
        where = f'robust.rule = "{self.rule}" does not fit {method.name}'
        if self.rule not in CHOOSE and method.tracking:
            raise UsageError(f"{where}: its server must stay the mean of what its clients keep, and would "
                             'not where uploads are changed; use "krum" or "multi_krum", which leave whole '
                             "clients out")
        if self.rule in REPLACE and method.needs_rows:
            raise UsageError(f"{where} as it is set: its server needs the uploads one by one, not their "
                             'mean; use "norm", "krum" or "multi_krum"')
        if self.rule in CHOOSE and cohort < 2 * (wrong := self.wrong(cohort)) + 3:
            raise UsageError(f'robust.rule = "{self.rule}" needs at least {2 * wrong + 3} clients in a round '
                             f"where {wrong} may be wrong (robust.share = {self.share:g}), and there are "
                             f"{cohort}: take more clients, a smaller share, or another rule")

    def mean(self, rows: Tensor, counts: Tensor) -> Tensor:
        """The value [...] that takes the place of the mean of rows [n, ...] that count so much."""
        flat = rows.reshape(len(rows), -1)
        if self.rule == "trimmed":
            found = robust.trimmed_mean(flat, counts, self.share)
        else:
            found = (robust.median if self.rule == "median" else robust.geometric_median)(flat, counts)
        return found.to(rows.dtype).reshape(rows.shape[1:])

    def described(self, cohort: int) -> str:
        """What is told of it at the start of a run."""
        words = {"norm": f"changes longer than {self.clip:g} times the median of the round are shortened",
                 "median": "the coordinate-wise median takes the place of the mean",
                 "trimmed": f"the mean leaves out {self.share:.0%} at either end of every coordinate",
                 "geometric": "the geometric median takes the place of the mean",
                 "krum": "the upload that Krum chooses takes the place of the mean",
                 "multi_krum": f"of the {times(cohort, 'upload')} of a round, Krum leaves "
                               f"{self.wrong(cohort)} out"}
        return f"robust aggregation: {words[self.rule]}"


def capped(round: Round, count: float) -> Round:
    """The facts of a round in which nobody counts for much more than the others."""
    limit = count * float(round.sizes.median())
    return round._replace(sizes=round.sizes.clamp(max=limit), most=min(round.most, count / len(round.sizes)))

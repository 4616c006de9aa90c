"""What the clients of a federation with secure aggregation agree to when they join. It is a part of the
session, so that a server that changes it has another federation."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Self

from descant.deploy.secure.parts import LEAST
from descant.deploy.transport import Rejected
from descant.errors import UsageError

BOUND = 2.0**20  # of what a client adds to a sum: parameters, and running statistics of raw features


class Agreement(NamedTuple):
    threshold: int  # the fewest clients in a sum
    bound: float = BOUND  # the largest entry that a client adds to a sum
    max_norm: float | None = None  # to which a client shortens its own update

    @classmethod
    def of(cls, threshold: int | None, cohort: int, max_norm: float | None) -> Self:
        """For cohorts of so many. By default two thirds and one more: a server that has up to a third of the
        clients on its side learns nothing but a sum."""
        if cohort < LEAST:
            raise UsageError(f"secure aggregation needs a cohort of {LEAST} clients at least, not {cohort}: "
                             "of a sum of two, each knows the other's part")
        if threshold is None:
            threshold = max(LEAST, 2 * cohort // 3 + 1)
        if not LEAST <= threshold <= cohort or 2 * threshold <= cohort:
            raise UsageError(f"--threshold must be more than half of the {cohort} clients of a round, at "
                             f"least {LEAST}, and at most {cohort}, not {threshold}")
        return cls(threshold, max_norm=max_norm)

    @classmethod
    def parse(cls, found: Any) -> Self:
        """What a server sent."""
        if not isinstance(found, list) or len(found) != len(cls._fields) or type(found[0]) is not int or any(
                each is not None and (type(each) not in (int, float) or not 0 < each < math.inf)
                for each in found):
            raise Rejected(f"{found!r:.80} does not describe secure aggregation")
        if None in found[:2] or found[0] < LEAST:
            raise Rejected(f"secure aggregation with a threshold of {found[0]}")
        return cls(*found)

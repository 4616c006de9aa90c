"""Real numbers as whole ones, modulo 2^64, where sums of masked numbers are exact."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from descant.errors import DescantError

Numbers = NDArray[np.float64]
Words = NDArray[np.uint64]
BITS = 61  # of the largest sum that is allowed: one for the sign, and room to see that a sum is too large


class OutOfRange(DescantError):
    """A number cannot be encoded, or a sum cannot be one of encoded numbers."""


@dataclass(frozen=True)
class FixedPoint:
    """Numbers of at most `bound`, of which at most `terms` are added up."""

    bound: float
    terms: int

    @property
    def fraction(self) -> int:
        """The binary digits after the point: as many as leave room for the largest sum."""
        return BITS - math.ceil(math.log2(self.bound * self.terms))

    @property
    def error(self) -> float:
        """The largest error of ONE encoded number: half of the last digit. That of a sum is at most that of
        its terms together, and the rounding of the sum to a float64."""
        return math.ldexp(0.5, -self.fraction)

    def encode(self, values: Numbers) -> Words:
        if not bool(np.isfinite(values).all()):
            raise OutOfRange("what is to be summed is not finite")
        largest = float(np.abs(values).max(initial=0.0))
        if largest > self.bound:
            raise OutOfRange(f"what is to be summed has an entry of size {largest:.4g}, and the agreed bound "
                             f"is {self.bound:g}")
        return np.rint(np.ldexp(values, self.fraction)).astype(np.int64).view(np.uint64)

    def decode(self, words: Words, terms: int) -> Numbers:
        """The sum of so many numbers."""
        values = np.ldexp(words.view(np.int64).astype(np.float64), -self.fraction)
        largest = float(np.abs(values).max(initial=0.0))
        if largest > terms * (self.bound + self.error):
            raise OutOfRange(f"the sum has an entry of size {largest:.4g}, more than {terms} clients within "
                             f"the bound of {self.bound:g} can come to: a client has not kept to it")
        return values

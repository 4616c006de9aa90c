"""Where a hyper-parameter's good values are looked for: what `hyper(..., search=...)` declares.

The bounds of a field say what is allowed, its range what is worth trying: as a rule what the method's paper
tried. Only fields that do not change the cost of a round have one, since all trials have the same budget.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included."""

    low: float
    high: float

    scale: ClassVar[str]

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"a range must go up: not from {self.low:g} to {self.high:g}")

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g} ({self.scale})"

    def holding(self, value: float) -> Range:
        """This range, stretched to hold a value."""
        return replace(self, low=min(self.low, value), high=max(self.high, value))

    def rounded(self, value: float) -> float:
        """The value with the digits that a person would write: more tell nothing."""
        return min(max(float(f"{value:.3g}"), self.low), self.high)


class Log(Range):
    """Every order of magnitude alike: step sizes and strengths."""

    scale = "log scale"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low <= 0:
            raise ValueError(f"a range on a log scale must lie above 0: not from {self.low:g}")


class Step(Log):
    """Step sizes: what diverges with the smallest of them is tried with smaller ones."""

    def lowered(self, times: int) -> Step:
        """This range, with a low end that is divided by ten so many times."""
        return replace(self, low=self.low / 10**times)


class Linear(Range):
    """Every number alike: shares."""

    scale = "linear"


class Whole(Range):
    """Whole numbers: counts."""

    scale = "whole numbers"

    def rounded(self, value: float) -> int:
        return round(value)

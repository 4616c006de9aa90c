"""Step sizes that change from round to round.

A schedule is a factor of a solver's `lr` that depends on the number of the round alone: so it is the same on
every backend, after a resume, and on a remote client.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, TypeVar

from descant.core.fields import Checked, hyper
from descant.errors import UsageError

M = TypeVar("M")


@dataclass(frozen=True)
class Cosine(Checked):
    """From 1 down to `final` along half a cosine, after `warmup` rounds in which it rises evenly."""

    name: ClassVar[str] = "cosine"
    rounds: int = hyper(50, "the round from which on the factor is final", ge=1)
    final: float = hyper(0.01, "the factor in the end", gt=0, le=1)
    warmup: int = hyper(0, "rounds in which the factor rises to 1", ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup >= self.rounds:
            raise UsageError(f"schedule.warmup = {self.warmup} must be less than rounds = {self.rounds}")

    def factor(self, number: int) -> float:
        if number <= self.warmup:
            return number / self.warmup
        share = min(1.0, (number - 1 - self.warmup) / (self.rounds - self.warmup))
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * share)) / 2


@dataclass(frozen=True)
class Exponential(Checked):
    """gamma to the number of rounds before this one."""

    name: ClassVar[str] = "exponential"
    gamma: float = hyper(0.99, "factor from one round to the next", gt=0, le=1)

    def factor(self, number: int) -> float:
        return self.gamma ** (number - 1)


@dataclass(frozen=True)
class Stepwise(Checked):
    """gamma for every so many rounds that lie before this one."""

    name: ClassVar[str] = "stepwise"
    every: int = hyper(30, "rounds between steps", ge=1)
    gamma: float = hyper(0.1, "factor of a step", gt=0, le=1)

    def factor(self, number: int) -> float:
        return self.gamma ** ((number - 1) // self.every)


Schedule: TypeAlias = Cosine | Exponential | Stepwise


def at_round(method: M, number: int) -> M:
    """A method, or any dataclass, with the solvers of this round; itself where no solver has a schedule. What
    comes before round 1 has the steps of round 1."""
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(method):  # type: ignore[arg-type]
        solver = getattr(method, field.name)
        schedule = getattr(solver, "schedule", None)
        if isinstance(schedule, Schedule):
            lr = solver.lr * schedule.factor(max(1, number))
            changed[field.name] = dataclasses.replace(solver, lr=lr, schedule=None)
    return dataclasses.replace(method, **changed) if changed else method  # type: ignore[type-var]

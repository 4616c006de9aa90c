"""Step sizes that change from round to round, or from step to step.

A schedule is a factor of a solver's `lr` that depends on the number of the round alone, or with `by = "step"`
also on which step of the round it is, of how many: so it is the same on every backend, after a resume, and on
a remote client. By steps it runs on within a round as it does from round to round, whatever number of steps
a client takes.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from descant.core import meter
from descant.core.fields import Checked, hyper
from descant.errors import UsageError

M = TypeVar("M")
By: TypeAlias = Literal["round", "step"]


@dataclass(frozen=True)
class Cosine(Checked):
    """From 1 down to `final` along half a cosine, after `warmup` rounds in which it rises evenly."""

    name: ClassVar[str] = "cosine"
    rounds: int = hyper(50, "the round from which on the factor is final", ge=1)
    final: float = hyper(0.01, "the factor in the end", gt=0, le=1)
    warmup: int = hyper(0, "rounds in which the factor rises to 1", ge=0)
    by: By = hyper("round", "when the factor changes")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup >= self.rounds:
            raise UsageError(f"schedule.warmup = {self.warmup} must be less than rounds = {self.rounds}")

    def factor(self, number: int) -> float:
        if number <= self.warmup:
            return number / self.warmup
        share = min(1.0, (number - 1 - self.warmup) / (self.rounds - self.warmup))
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * share)) / 2

    def within(self, passed: Tensor, length: Tensor) -> Tensor:
        share = ((passed - self.warmup) / (self.rounds - self.warmup)).clamp(0, 1)
        falling = self.final + (1 - self.final) * (1 + torch.cos(math.pi * share)) / 2
        if not self.warmup:
            return falling
        return torch.where(passed < self.warmup, (passed + length) / self.warmup, falling)


@dataclass(frozen=True)
class Exponential(Checked):
    """gamma to the number of rounds before this one."""

    name: ClassVar[str] = "exponential"
    gamma: float = hyper(0.99, "factor from one round to the next", gt=0, le=1)
    by: By = hyper("round", "when the factor changes")

    def factor(self, number: int) -> float:
        return self.gamma ** (number - 1)

    def within(self, passed: Tensor, length: Tensor) -> Tensor:
        return self.gamma**passed


@dataclass(frozen=True)
class Stepwise(Checked):
    """gamma for every so many rounds that lie before this one."""

    name: ClassVar[str] = "stepwise"
    every: int = hyper(30, "rounds between steps", ge=1)
    gamma: float = hyper(0.1, "factor of a step", gt=0, le=1)

    def factor(self, number: int) -> float:
        return self.gamma ** ((number - 1) // self.every)


Schedule: TypeAlias = Cosine | Exponential | Stepwise


def is_by_step(schedule: Schedule | None) -> bool:
    return getattr(schedule, "by", "round") == "step"


def factor_now(schedule: Cosine | Exponential) -> Tensor | float:
    """The factor of the present step of ONE client, in a round that `at_round` has set; outside the steps of
    a round, that of its beginning."""
    number, opened = getattr(schedule, "number", 1), meter.current()
    if opened is None or opened.at_step is None:
        return schedule.factor(number)
    step, steps = opened.at_step
    return schedule.within(number - 1 + step / steps, 1 / steps)


def at_round(method: M, number: int) -> M:
    """A method, or any dataclass, with the solvers of this round; itself where no solver has a schedule. What
    comes before round 1 has the steps of round 1."""
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(method):  # type: ignore[arg-type]
        solver = getattr(method, field.name)
        schedule = getattr(solver, "schedule", None)
        if isinstance(schedule, Schedule) and is_by_step(schedule):
            begun = copy.copy(schedule)
            object.__setattr__(begun, "number", max(1, number))  # no field: it is no setting
            changed[field.name] = dataclasses.replace(solver, schedule=begun)
        elif isinstance(schedule, Schedule):
            lr = solver.lr * schedule.factor(max(1, number))
            changed[field.name] = dataclasses.replace(solver, lr=lr, schedule=None)
    return dataclasses.replace(method, **changed) if changed else method  # type: ignore[type-var]

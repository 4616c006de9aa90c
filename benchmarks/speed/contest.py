"""One case: the sides take turns, repetition by repetition, so that noise hits all of them alike."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.speed.apart import Apart, StartMethod
from benchmarks.speed.case import COHORT, EPOCH, Case
from benchmarks.speed.engine import Engine
from benchmarks.speed.floor import Tried
from benchmarks.speed.lean import Lean
from benchmarks.speed.products import Shapes
from benchmarks.speed.side import Played, Scored
from descant.errors import DescantError

LEAN, FLOOR = "lean loop", "floor"
CLOSE = 1e-3  # how far two sides' models may be apart, as a share of how far they have moved (float32)
# Batches after which they are compared. In the flat parts of images, max-pooling has ties that rounding
# breaks, so that models of float32 come apart however they are trained: cnn2 by 8e-4 after 5 batches.
CHECKED = 4
ALIKE = 0.01  # how far their mean accuracies may be apart: a tie may be broken in another way


@dataclass
class Figures:
    """What one side came to."""

    note: str = ""
    step: list[float] = field(default_factory=list)  # seconds per gradient step, in each repetition
    evaluation: list[float] = field(default_factory=list)  # seconds for all clients of the federation
    memory: int | None = None  # bytes at the peak

    @property
    def per_step(self) -> float:
        return statistics.median(self.step)

    @property
    def per_evaluation(self) -> float | None:
        return statistics.median(self.evaluation) if self.evaluation else None


@dataclass
class Outcome:
    """The figures of all sides of a case."""

    case: Case
    sides: dict[str, Figures]
    tried: list[Tried]  # arrangements of the floor

    def speed(self, side: str) -> float:
        """How many times as fast as the lean loop."""
        return self.sides[LEAN].per_step / self.sides[side].per_step

    def above_floor(self, side: str) -> float | None:
        """How many times the floor."""
        return self.sides[side].per_step / self.sides[FLOOR].per_step if FLOOR in self.sides else None

    def evaluation_share(self, side: str) -> float | None:
        """The evaluation of all clients, as a share of a whole round of training."""
        seconds = self.sides[side].per_evaluation
        steps = COHORT * EPOCH * self.case.grads_per_batch
        return None if seconds is None else seconds / (steps * self.sides[side].per_step)


class First(NamedTuple):
    """A side's first round, which is not timed: it shows that the sides do the same."""

    played: Played
    models: Tensor
    scored: Scored | None


def compete(case: Case, backends: tuple[str, ...], repetitions: int, floor: Apart | None = None,
            told: Callable[[str], None] = lambda text: None) -> Outcome:
    """Let the lean loop, the backends and the floor do the work of a case in turn; after a first round
    that makes sure it is the same work."""
    _check(replace(case, batches=min(case.batches, CHECKED)), backends, told)
    tried = []
    with ExitStack() as stack:
        sides = _sides(case, backends, stack, told)
        for name, side in sides.items():
            told(f"{name}: first round")
            side.ask("round")
        if floor is not None:
            told("floor: trying arrangements")
            tried = floor.ask("fit", Shapes.of(case))
            sides[FLOOR] = floor
        figures = {name: Figures() for name in sides}
        names = list(sides)
        for k in range(repetitions):
            for name in names[k % len(names) :] + names[: k % len(names)]:  # nobody is always the first
                told(f"{name}: repetition {k + 1} of {repetitions}")
                _repeat(case, sides[name], figures[name])
        for name, side in sides.items():
            figures[name].note = side.ask("note")
            figures[name].memory = side.ask("peak_memory") if name != FLOOR else None
    return Outcome(case, figures, tried)


def _sides(case: Case, backends: tuple[str, ...], stack: ExitStack, told: Callable[[str], None]
           ) -> dict[str, Apart]:
    start: StartMethod = "fork" if sys.platform == "linux" else "spawn"
    sides: dict[str, Apart] = {}
    for name in (LEAN, *backends):
        told(f"{name}: getting ready")
        side = Apart(start, Lean, case) if name == LEAN else Apart(start, Engine, case, name)
        sides[name] = stack.enter_context(closing(side))
    return sides


def _check(case: Case, backends: tuple[str, ...], told: Callable[[str], None]) -> None:
    """Let all sides do a little of the work, and see that it is the same."""
    with ExitStack() as stack:
        sides = _sides(case, backends, stack, told)
        first = {}
        for name, side in sides.items():
            told(f"{name}: is it the same work?")
            first[name] = First(side.ask("round"), side.ask("models"),
                                side.ask("evaluate") if case.evaluated else None)
        require_equal_work(case, first)


def _repeat(case: Case, side: Apart, figures: Figures) -> None:
    played: Played = side.ask("round")
    if played.grad_steps != case.grad_steps:
        raise DescantError(f"a round took {played.grad_steps} gradient steps in place of {case.grad_steps}")
    figures.step.append(played.seconds / played.grad_steps)
    if case.evaluated:
        scored: Scored = side.ask("evaluate")
        figures.evaluation.append(scored.seconds * case.federation.population / case.evaluated)


def require_equal_work(case: Case, first: Mapping[str, First], close: float = CLOSE) -> None:
    """After one round, every side has made as many gradient steps as the lean loop and has the same models
    up to rounding, or the comparison means nothing."""
    start, lean = case.task.init().theta, first[LEAN]
    moved = float(torch.linalg.vector_norm(lean.models - start))
    for name, (played, models, scored) in first.items():
        if played.grad_steps != case.grad_steps:
            raise _unequal(case, name, f"{played.grad_steps} gradient steps in place of {case.grad_steps}")
        apart = float(torch.linalg.vector_norm(models - lean.models)) / moved
        if not apart <= close:
            raise _unequal(case, name, f"models that are {apart:.1e} of their way from the lean loop's")
        if scored is None or lean.scored is None:
            continue
        if not abs(scored.accuracy - lean.scored.accuracy) <= ALIKE:
            raise _unequal(case, name, f"the accuracy {scored.accuracy:.4f} in place of "
                                       f"{lean.scored.accuracy:.4f}")


def _unequal(case: Case, name: str, what: str) -> DescantError:
    return DescantError(f"the sides do not do the same work: on {case.method}, after one round, {name} has "
                        f"{what}")

"""A value that every client chooses for itself, by its validation rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from descant.core.algorithm import ClientData, Round, least_loss
from descant.core.fields import Checked, hyper
from descant.core.task import Task
from descant.core.tree import pick, stack
from descant.core.vector import Model
from descant.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True)
class ByValidation(Checked):
    """gamma_i chosen by the client in every round: the candidate whose solution, from the same start and on
    the same batches, has the least loss on its validation rows. A round costs the work of each candidate."""

    name: ClassVar[str] = "by_validation"

    candidates: tuple[float, ...] = hyper((0.6, 0.8, 1.0), "values of gamma to try", ge=0, le=1)
    fallback: float = hyper(0.8, "gamma of a client without validation rows; one of the candidates",
                            ge=0, le=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fallback not in self.candidates:
            raise UsageError(f"by_validation.fallback = {self.fallback:g} must be one of the candidates "
                             f"{list(self.candidates)}")

    def best(self, task: Task, data: ClientData, solve: Callable[[float], T], model: Callable[[T], Model]
             ) -> T:
        """The solution of ONE client for the best candidate; `model` is what it would predict with."""
        others = [value for value in self.candidates if value != self.fallback]
        found = stack([solve(value) for value in (self.fallback, *others)])
        chosen: T = pick(found, least_loss(task, model(found), data, "validation"))
        return chosen

    def marks(self, chosen: Tensor) -> Tensor:
        """Which of the candidates ONE client chose: 1, and 0 for the others."""
        gap = chosen - torch.tensor(self.candidates, dtype=chosen.dtype)
        return (gap.abs() < 1e-6).to(gap.dtype)

    def told(self, marks: Tensor, round: Round) -> dict[str, Any]:
        """How many clients chose each candidate, from the mean of their marks."""
        chosen = (marks.double() * len(round.cohort)).round().int().tolist()
        return {"gamma": {f"{value:g}": n for value, n in zip(self.candidates, chosen, strict=True)}}

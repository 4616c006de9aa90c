"""Figures of a round that only the server could compute, by name: [eval] diagnostics.

A diagnostic is a function of what the server sees of a round. It changes nothing; what it returns is written
to the round's line of metrics.jsonl.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from descant.core.algorithm import Algorithm, Message, Round
from descant.core.import_object import imported, is_place
from descant.core.tree import Tree, leaves
from descant.core.vector import Model
from descant.errors import DescantError, UsageError, unknown
from descant.theory.coherence import generalized_coherence


class Observed(NamedTuple):
    """What the server sees of a round."""

    algorithm: Algorithm
    before: Tree  # the server's state
    message: Message  # what it sent
    uploads: Tree  # [cohort, ...] what came back and was accepted
    after: Tree  # the server's new state
    round: Round

    @property
    def uploaded(self) -> Tensor:
        """[cohort, d] the parameters that came back, of the first model in an upload."""
        found = _first_model(self.uploads)
        if found is None:
            named = ", ".join(name for name, _ in leaves(self.uploads))
            raise UsageError(f"clients of {self.algorithm.name} upload no model, but {named}")
        return found.theta

    @property
    def moved(self) -> Tensor:
        """[cohort, d] from the server's model to what came back."""
        model = self.algorithm.global_model(self.before)
        if model is None or model.theta.shape != self.uploaded.shape[1:]:
            raise UsageError(f"{self.algorithm.name} has no one model for all that clients start from")
        return self.uploaded - model.theta


Diagnostic: TypeAlias = Callable[[Observed], float | Mapping[str, float]]


def coherence(seen: Observed) -> dict[str, float]:
    """How much the directions in which clients move the model agree: GCE, and the logarithm of 1 - GCE."""
    moved = seen.moved
    moved = moved[moved.norm(dim=1) > 0]
    if len(moved) < 2:
        return {"gce": math.nan, "log_det": math.nan}
    return generalized_coherence(moved)._asdict()


def drift(seen: Observed) -> float:
    """How far clients move the model: the mean Euclidean distance."""
    return float(seen.moved.norm(dim=1).mean())


def spread(seen: Observed) -> float:
    """How far what came back lies apart: the mean Euclidean distance from its mean."""
    return float((seen.uploaded - seen.uploaded.mean(0)).norm(dim=1).mean())


DIAGNOSTICS: dict[str, Diagnostic] = {"coherence": coherence, "drift": drift, "spread": spread}


def named(names: Sequence[str] | None) -> dict[str, Diagnostic]:
    """The functions of these names; those of the user are imported."""
    found: dict[str, Diagnostic] = {}
    for name in names or ():
        short = name.partition(":")[2] or name
        if short in found:
            raise UsageError(f"eval.diagnostics has {short!r} twice: give one of them another name")
        if not is_place(name):
            if name not in DIAGNOSTICS:
                raise unknown("eval.diagnostics", name, DIAGNOSTICS)
            found[short] = DIAGNOSTICS[name]
            continue
        function = imported(name, "eval.diagnostics")
        if not isinstance(function, FunctionType):
            raise UsageError(f"eval.diagnostics {name}: it must be a function of what the server sees, not "
                             f"an object of type {type(function).__name__}")
        found[short] = function
    return found


def diagnosed(functions: Mapping[str, Diagnostic], seen: Observed) -> dict[str, Any]:
    """The figures of a round, by the names of the functions."""
    found: dict[str, Any] = {}
    for name, function in functions.items():
        try:
            with torch.no_grad():
                value = function(seen)
            found[name] = ({key: float(each) for key, each in value.items()} if isinstance(value, Mapping)
                           else float(value))
        except Exception as error:
            raise DescantError(f"eval.diagnostics {name} failed in round {seen.round.number}: "
                               f"{error or type(error).__name__}") from error
    return found


def _first_model(tree: Tree) -> Model | None:
    if isinstance(tree, Model):
        return tree
    if isinstance(tree, tuple):
        return next((found for part in tree if (found := _first_model(part)) is not None), None)
    return None

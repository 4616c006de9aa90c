"""Training on features: where a network begins with frozen layers, these run once for each row.

What they return takes the place of the samples, for the network without them, if there is room for it as for
the pool's own copies (`pool.py`). Numbers are those of the whole network up to rounding.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from descant.core.federation import Federation
from descant.core.kernels.trial import samples
from descant.core.task import Task, inputs
from descant.engine import pool
from descant.models.front import Front, front_of
from descant.models.module import PRECISIONS, ModuleTask

ROWS = 256  # that pass the front at once


class Worked(NamedTuple):
    """What training works on."""

    task: Task
    federation: Federation


def on_features(task: Task, federation: Federation) -> Worked:
    """Task and federation behind the frozen layers of the network; as they are, where there are none."""
    given = Worked(task, federation)
    if type(task) is not ModuleTask or not federation.has_rows or federation.truth or not task.frozen:
        return given
    front = front_of(task.template, task.dtype, inputs(samples(federation.x), task.dtype))
    if front is None:
        return given
    cast = None if task.autocast is None else PRECISIONS[task.autocast]
    first = front.features(inputs(federation.x[:1], task.dtype), cast)
    if len(federation.x) * first.nbytes > pool.budget():
        return given
    features = _extracted(front, federation.x, first, task.dtype, cast)
    made = dataclasses.replace(federation, x=features, column_names=None)
    rest = task.of(front.rest).fitted(made)
    # a server, and whoever loads the models, knows the vectors of the whole network
    return Worked(rest, made) if rest.layout == task.layout else given


def _extracted(front: Front, x: Tensor, first: Tensor, dtype: torch.dtype, cast: torch.dtype | None
               ) -> Tensor:
    found = first.new_empty(len(x), *first.shape[1:])
    for start in range(0, len(x), ROWS):
        found[start : start + ROWS] = front.features(inputs(x[start : start + ROWS], dtype), cast)
    return found

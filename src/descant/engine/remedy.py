"""What to do when training diverges: the likely cause, the field to change, and its bound."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import torch

from descant.core.notes import about_scale, unscaled
from descant.core.task import Batch, inputs
from descant.priors.solve import Adam
from descant.theory.estimate import smoothness

if TYPE_CHECKING:
    from descant.engine.work import Work

ASKED, ROWS = 5, 200  # clients, and rows of each, whose losses' curvature is looked at


def remedy(work: Work) -> str:
    """One sentence: a step that is too large, unscaled features, or how small steps must be."""
    if cautions := work.algorithm.cautions():
        return cautions[0]
    federation = work.federation
    if not federation.is_remote and (
            found := unscaled(federation.x, federation.train.indices, federation.column_names)):
        return about_scale(found)
    step = work.algorithm.local_step()
    if step is None:
        return "try smaller steps"
    adapted = isinstance(getattr(work.algorithm, "solver", None), Adam)  # has no such bound
    if adapted or (L := curvature(work)) is None:
        return f"try smaller steps: a smaller algorithm.{step.field}"
    pull = f" + {step.pull:.3g}" if step.pull else ""
    return (f"try smaller steps: the clients' losses curve by about L = {L:.3g}, for which gradient steps "
            f"need algorithm.{step.field} < 2 / (L{pull}) = {2 / (L + step.pull):.2g}")


def curvature(work: Work) -> float | None:
    """The largest curvature of some clients' losses at the initial model; None if unknown."""
    task, federation = work.task, work.federation
    if federation.is_remote or work.device.type != "cpu":
        return None
    found = []
    for client in np.unique(np.linspace(0, federation.population - 1, ASKED).astype(int)):
        rows = torch.from_numpy(federation.train[client][:ROWS])
        batch = Batch(inputs(federation.x[rows], task.dtype), federation.y[rows])
        with suppress(RuntimeError):  # a network without second derivatives
            found.append(smoothness(task, task.init(), batch))
    finite = [value for value in found if 0 < value < float("inf")]
    return max(finite, default=None)

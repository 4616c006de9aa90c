"""Local training in two phases, first of the head and then of the body, for a chunk of clients in place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from descant.core import meter
from descant.core.algorithm import ClientData
from descant.core.kernels.chunk import pull_of
from descant.core.kernels.products import room
from descant.core.task import Batch, Pull, Task
from descant.core.vector import Model
from descant.priors.quadratic import Flat

if TYPE_CHECKING:
    from descant.priors.solve import SGD


def solve_in_phases(task: Task, model: Model, data: ClientData, head: SGD, body: SGD, first: Tensor,
                    pull: Pull) -> Model | None:
    """A step on each batch: in the `first` [] steps of ONE client on its head, in the others on its body,
    with a pull on the features. Both solvers are without momentum, and `first` grows with the number of
    steps. None: not possible here."""
    gradients, layout = task.chunk_gradients, task.layout
    if gradients is None or layout is None:
        return None
    in_head = [bool(layout.head()[each.start]) for each in layout.parameters]
    taken = 0

    def work(steps: Iterable[tuple[int, Batch]], theta: Tensor, stats: Tensor | None, first: Tensor,
             centres: Tensor, strength: Tensor) -> tuple[Tensor, ...]:
        nonlocal taken
        parameters = [room(each, each.shape).copy_(each) for each in gradients.parameters(theta)]
        stats, losses = None if stats is None else stats.clone(), theta.new_zeros(len(theta))
        for number, (n, batch) in enumerate(steps):
            taken += n
            # who has the most steps comes first
            heads = int((first[:n] > number).sum())
            for rows, solver, is_head in ((slice(heads), head, True), (slice(heads, n), body, False)):
                if rows == slice(0) or rows == slice(n, n):
                    continue
                some: list[Any] = [None if each is None else each[rows] for each in batch]
                x, y, weight, key, counts = some
                theirs = [each[rows] for each in parameters]
                pulls = None if is_head or all(in_head) else pull_of(
                    y, weight, counts, centres[rows], strength[rows])
                found = gradients.slopes(theirs, None if stats is None else stats[rows], x, y, weight, key,
                                         counts, pull=pulls)
                for mine, term, moves in zip(theirs, found.terms, in_head, strict=True):
                    if moves == is_head:
                        solver.step_(mine, term.add, Flat(), [], number + 1)
                losses[rows] += found.means
                if stats is not None and found.stats is not None:
                    stats[rows] = found.stats
        vectors = torch.cat([each.flatten(1) for each in parameters], 1)
        return (losses, vectors) if stats is None else (losses, vectors, stats)

    own = model.stats if model.stats.numel() else None
    found = data.together(work, model.theta, own, first, *pull)
    if found is None:
        return None
    loss, theta, *stats = found
    if (opened := meter.current()) is not None:
        opened.count_scan(loss, data.steps, taken)
    return Model(theta, *stats or [model.stats])

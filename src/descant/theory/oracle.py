"""What only a simulated federation can tell, because it takes everyone's data.

The oracle of pFedGT's Eq. 1: one client's model, trained with everyone's data. It shows what target
interpolation could reach at best, and which gamma suits a client (the paper's Figure 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core.federation import Federation
from descant.core.random import stream
from descant.core.splits import SplitName
from descant.core.task import BLOCK, Batch, Task, inputs
from descant.core.tree import map_tree, take
from descant.core.vector import Model
from descant.errors import UsageError
from descant.priors.quadratic import Flat
from descant.priors.solve import SGD, Solver, descend

USUAL = SGD(lr=0.01)


class Oracle(NamedTuple):
    """A client's model under Eq. 1, and its figures on the client's own held-out rows (NaN on none)."""

    client: int
    gamma: float
    model: Model
    validation: dict[str, float]
    test: dict[str, float]


def oracle(task: Task, federation: Federation, client: int, gamma: float, *, steps: int,
           batch: int | Literal["full"] = 20, solver: Solver = USUAL, seed: int = 0) -> Oracle:
    """Train client i on gamma f_i(w) + (1 - gamma) mean_j f_j(w), from the common initial model. That is the
    mean loss under a mixture: a row of the client's own with probability gamma, else a row of any client,
    each alike. Each step takes a batch of such rows; `batch = "full"` takes the exact gradient."""
    if not 0 <= client < federation.population:
        raise UsageError(f"client {client} does not exist: there are clients 0 to "
                         f"{federation.population - 1}")
    if not 0 <= gamma <= 1:
        raise UsageError(f"gamma must be from 0 to 1, not {gamma}")
    if steps < 1 or (batch != "full" and batch < 1):
        raise UsageError(f'steps and batch must be at least 1 (batch may be "full"), not {steps} and {batch}')
    model = task.init()
    memory = solver.init(model.theta)
    with torch.no_grad():
        if batch == "full":
            shares = np.full(federation.population, (1 - gamma) / federation.population)
            shares[client] += gamma
            for _ in range(steps):
                gradient = _mixed_gradient(task, federation, model, shares)
                theta, memory = solver.step(model.theta, gradient.theta, Flat(), memory)
                model = Model(theta, gradient.stats)
        else:
            for rows in _mixtures(federation, task, client, gamma, steps, batch, seed):
                model, memory = descend(task, model, rows, solver, state=memory)
        validation, test = (_figures(task, federation, client, model, split)
                            for split in ("validation", "test"))
    return Oracle(client, gamma, model, validation, test)


def local_gradient(task: Task, federation: Federation, client: int, model: Model) -> Model:
    """grad f_i over all training rows of a client, in place of the parameters; with the statistics after."""
    rows = federation.train[client]
    total: Model = map_tree(torch.zeros_like, model)
    for start in range(0, len(rows), BLOCK):
        block = rows[start : start + BLOCK]
        batch = Batch(inputs(federation.x[block], task.dtype), federation.y[block])
        _, gradient, stats = task.grad(model, batch)
        share = len(block) / len(rows)
        total = Model(total.theta + share * gradient, total.stats + share * stats)
    return total


def messages(task: Task, federation: Federation, models: Model, mu: float) -> Tensor:
    """c_i = grad f_i(w_i) - mu w_i over all training rows of each client: [m, d]. models: [m, ...]."""
    with torch.no_grad():
        return torch.stack([local_gradient(task, federation, k, take(models, k)).theta
                            for k in range(federation.population)]) - mu * models.theta


def _mixtures(federation: Federation, task: Task, client: int, gamma: float, steps: int, batch: int,
              seed: int) -> Iterator[Batch]:
    """Batches of the mixture. The draws are the same for every gamma: it only decides which one is used."""
    generator = stream(seed, "oracle", client)
    train = federation.train
    for _ in range(steps):
        own, whose = generator.random(batch) < gamma, generator.integers(federation.population, size=batch)
        whose = np.where(own, client, whose)
        place = (generator.random(batch) * train.sizes[whose]).astype(np.int64)
        rows = train.indices[train.offsets[whose] + place]
        key = torch.tensor(generator.integers(2**63)) if task.draws else None
        yield Batch(inputs(federation.x[rows], task.dtype), federation.y[rows], None, key)


def _mixed_gradient(task: Task, federation: Federation, model: Model, shares: np.ndarray) -> Model:
    """The exact gradient of sum_j share_j f_j, and the statistics after it."""
    total = map_tree(torch.zeros_like, model)
    for client in np.flatnonzero(shares):
        part = local_gradient(task, federation, int(client), model)
        total = map_tree(lambda whole, new, s=shares[client]: whole + float(s) * new, total, part)
    return total  # type: ignore[no-any-return]


def _figures(task: Task, federation: Federation, client: int, model: Model, split: SplitName
             ) -> dict[str, float]:
    rows = federation.split(split)[client]
    if not len(rows):
        return dict.fromkeys(task.metric_names, math.nan)
    x = inputs(federation.x[rows], task.dtype)
    outputs = torch.cat([task.predict(model, x[k : k + BLOCK]) for k in range(0, len(x), BLOCK)])
    values = task.metrics(outputs, Batch(x, federation.y[rows]))
    return dict(zip(task.metric_names, values.tolist(), strict=True))

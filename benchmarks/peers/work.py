"""The work that all sides do, in a file: whose rows, in which batches, from which parameters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from benchmarks.speed.case import BATCH, SEED, Case
from descant.algorithms.fedavg import FedAvg
from descant.engine.batches import LocalWork, plan_chunk
from descant.engine.pool import Pool
from descant.engine.rounds import Training


def write_work(case: Case, rounds: int, path: Path) -> None:
    """The samples of each client, and which of them are descant's batches in each of its first rounds.
    `sides/session.py` reads it."""
    federation, algorithm = case.federation, case.algorithm
    assert isinstance(algorithm, FedAvg)
    own = np.stack([federation.train[client] for client in range(federation.population)])
    cohorts, orders = zip(*_rounds(case, rounds), strict=True)
    places = np.zeros(len(federation.x), np.int64)
    places[own] = np.arange(own.shape[1])  # where a row stands among its client's
    np.savez(path, model=str(case.model), lr=algorithm.solver.lr, batch=BATCH,
             x=federation.x.numpy()[own].reshape(*own.shape, -1), y=federation.y.numpy()[own],
             cohorts=np.stack(cohorts), orders=places[np.stack(orders)],
             initial=case.task.init().theta.numpy())


def _rounds(case: Case, rounds: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Who takes part in each round, and the rows of their batches, end to end."""
    sampling = Training(case.work, case.train("loop"))
    pool, found = Pool.as_it_lies(case.federation), []
    for number in range(1, rounds + 1):
        sampling.number = number
        cohort, _ = sampling.sample()
        _, tensors = plan_chunk(pool, cohort, seed=SEED, purpose="local", number=number, batch=BATCH,
                                work=LocalWork(steps=case.batches), per_step=1, dtype=torch.float32,
                                draws=False, splits=())
        found.append((cohort, tensors.rows.numpy()))
    return found

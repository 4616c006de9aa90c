"""pFedGT's setting on HAR: 30 people, 7 of them a round, the network with two convolutional layers."""

from __future__ import annotations

from typing import Any

import descant
from descant.core.algorithm import Algorithm
from descant.core.task import inputs
from descant.experiment.run import Run


def train(method: Algorithm, seed: int, *, epochs: int = 5, rounds: int = 100, **eval: Any) -> Run:
    federation = descant.federation("har", seed=0, split=seed, test=0.25, validation=0.0)
    return descant.run(method, federation=federation, model="har_cnn", rounds=rounds, cohort=7, batch=128,
                       local={"epochs": epochs}, backend="vectorised", seed=seed,
                       eval={"every": rounds} | eval)


def accuracy(run: Run, client: int) -> float:
    """Of a client's own model on its own test rows."""
    task, federation = run.setup.task, run.setup.federation
    rows = federation.test[client]
    batch = descant.Batch(inputs(federation.x[rows], task.dtype), federation.y[rows])
    found = task.metrics(task.predict(run.personal(client, "last"), batch.x), batch)
    return float(found[task.metric_names.index("accuracy")])

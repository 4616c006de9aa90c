"""What a client learns alone: the baseline of its personal model."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from descant.algorithms import LocalTrain
from descant.core.federation import Federation
from descant.core.splits import SPLITS
from descant.experiment import run as runs
from descant.experiment.run import Setup
from descant.priors.solve import SGD, Adam, Proximal


def learned_alone(setup: Setup, client: int, name: str, rounds: int) -> dict[str, Any]:
    """The test figures of local training for as many rounds, in the round that is best on validation data."""
    own, train = setup.federation, setup.train
    rows, validation, test = (own.split(split).pick(np.array([client])) for split in SPLITS)
    federation = Federation(own.x, own.y, rows, validation, test, own.classes, (name,))
    solver = getattr(setup.algorithm, "solver", None)
    method = LocalTrain(solver) if isinstance(solver, SGD | Adam | Proximal) else LocalTrain()
    settings = dataclasses.replace(train, rounds=rounds, cohort="all", participation="cohort", drop=0.0,
                                   backend="loop", device="cpu", chunk=None, workers=None, ray_address=None)
    run = runs.start(Setup(method, setup.task, federation, settings, setup.eval))
    at = (run.best_round or run.rounds) - 1
    row = next(row for row in run.history[at:] if "personal" in row)
    return {name: figures["mean"] for name, figures in row["personal"]["test"].items()}

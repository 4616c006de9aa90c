"""Why pFedBayes on nodes with secure aggregation leaves its simulation in the second round, by its step size.

Sums are encoded with an error of 1e-12 or so. Adam's first step is lr g / (|g| + 1e-8): where the gradient of
a coordinate is zero, such as that of a pixel that is dark in all rows of a client, it is made of that error.
So the cause is the optimizer, not the protocol: a simulation with such an error does the same, and
steps in proportion to the gradient leave nothing of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flower_helpers as flower
from descant.core.random import stream
from descant.deploy.backend import Rules
from descant.engine.backends.choose import make_backend
from descant.experiment import run as runs
from descant.experiment.run import Setup
from flower_helpers import CLIENTS, DATA, MemoryServer, experiment
from helpers import assert_same

SGD = {"solver": {"name": "sgd", "lr": 0.001}}
ERROR = 1e-12  # of a mean of four clients


@pytest.mark.thorough
def test_with_steps_in_proportion_nodes_come_to_what_the_simulator_comes_to(tmp_path: Path) -> None:
    wanted = experiment("pfedbayes", algorithm=SGD)
    found = flower.federate(wanted, MemoryServer(flower.make_clients(DATA, tmp_path)), tmp_path / "server",
                            rules=Rules(deadline=30, secure=True, threshold=3), alone=False)
    assert_same(found.snapshot("last").server, runs.start(Setup.of(wanted)).snapshot("last").server, 1e-10)


def steps(error: float, **algorithm: Any) -> Tensor:
    """How far each client of a simulation moves the server's mean in the second round, in one step on one
    batch [clients, d]; the server's Gaussian has an error before."""
    wanted = experiment("pfedbayes", train={"local": {"steps": 1}}, algorithm={"K": 1, **algorithm})
    training = Setup.of(wanted).training()
    backend, _, _ = make_backend(training)
    training.play(backend)
    training.store.write()
    draws = stream(0, "error", 1).standard_normal((2, len(training.server.mu)))
    mu, rho = (error * torch.from_numpy(draw) for draw in draws)
    server = training.server._replace(mu=training.server.mu + mu, rho=training.server.rho + rho)
    clients, work = np.arange(CLIENTS), training.work
    message = work.algorithm.broadcast(server, training.round_of(clients))
    found = work.execute("local", clients, 2, message, training.store.read(clients))
    moved: Tensor = found.values.upload.mu - server.mu
    return moved


def test_a_simulation_with_the_error_of_a_sum_does_the_same() -> None:
    """With Adam the error becomes a step of up to lr = 0.01, where a client makes no step without it:
    there its gradient is zero, or as good as that. With steps in proportion it stays what it was."""
    plain, disturbed = steps(0.0), steps(ERROR)
    far = (plain - disturbed).abs() > 1e-9
    assert 0 < int(far.sum()) < far.numel() / 2
    assert float(plain[far].abs().max()) < 1e-6
    assert 1e-4 < float(disturbed[far].abs().max()) <= 0.01
    torch.testing.assert_close(steps(0.0, **SGD), steps(ERROR, **SGD), rtol=0, atol=10 * ERROR)

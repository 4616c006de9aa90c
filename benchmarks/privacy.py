"""What protecting every row costs: a private step beside a plain one.

python -m benchmarks.privacy
"""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import nn

from descant.algorithms import FedAvg
from descant.core.federation import Federation
from descant.core.privacy.settings import Privacy
from descant.core.threads import one_thread
from descant.engine.batches import LocalWork
from descant.engine.protect import protected
from descant.engine.rounds import Training
from descant.engine.settings import Train
from descant.engine.work import Work
from descant.models.module import ModuleTask

CLIENTS, ROWS, BATCH, STEPS, REPEATS = 20, 300, 20, 20, 7
MODELS = {
    "softmax regression, 784-10": lambda: nn.Linear(784, 10),
    "network, 784-100-10": lambda: nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10)),
}


def seconds(work: Work, train: Train) -> float:
    """Of a step of one client, the least of some repetitions."""
    training = Training(work, train)
    everyone = np.arange(CLIENTS)
    message = work.algorithm.broadcast(training.server, training.round_of(everyone))
    taken = []
    for number in range(REPEATS):
        start = time.perf_counter()
        outcome = work.execute("local", everyone, number + 1, message, ())
        assert not outcome.failed
        taken.append((time.perf_counter() - start) / (CLIENTS * STEPS))
    return min(taken)


def main() -> None:
    rng = np.random.default_rng(0)
    count = CLIENTS * ROWS
    federation = Federation.from_arrays(
        rng.standard_normal((count, 784)).astype(np.float32), rng.integers(10, size=count),
        np.arange(CLIENTS).repeat(ROWS), test=0.0, validation=0.0)
    train = Train(rounds=1, batch=BATCH, local=LocalWork(steps=STEPS))
    print(f"a step of one of {CLIENTS} clients that run together, batches of {BATCH}, one thread")
    with one_thread():
        for name, make in MODELS.items():
            torch.manual_seed(0)
            task = ModuleTask(make(), loss="cross_entropy", classes=10).fitted(federation)
            plain = Work(FedAvg(), task, federation, 0, BATCH, train.local)
            base = seconds(plain, train)
            for sampling in ("known", "poisson"):
                own = seconds(protected(plain, train, Privacy(noise=1.0, sampling=sampling)), train)
                print(f"{name}: plain {1e6 * base:.0f} us, private ({sampling} batches) {1e6 * own:.0f} us, "
                      f"{own / base:.2f} times")


if __name__ == "__main__":
    main()

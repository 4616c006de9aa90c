"""What protecting every row costs: a private step beside a plain one, in turn.

python -m benchmarks.privacy

Batches that are drawn by coins (Poisson) differ in size from client to client, and a chunk is as wide as its
widest. The same without noise, and what as many normal numbers take by themselves, tell where the rest goes.
Processor time, medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from unittest import mock

import numpy as np
import torch
from torch import nn

from descant.algorithms import FedAvg
from descant.core import random
from descant.core.federation import Federation
from descant.core.privacy.gradients import StreamNoise
from descant.core.privacy.settings import Privacy
from descant.core.threads import one_thread
from descant.engine.backends.choose import make_backend
from descant.engine.batches import LocalWork
from descant.engine.protect import protected
from descant.engine.rounds import Training
from descant.engine.settings import Train
from descant.engine.work import Work
from descant.models.module import ModuleTask

CLIENTS, ROWS, BATCH, STEPS, REPEATS = 20, 300, 20, 20, 25
MODELS = {
    "softmax regression, 784-10": lambda: nn.Linear(784, 10),
    "network, 784-100-10": lambda: nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10)),
}


def round_of(work: Work, train: Train) -> Callable[[int], float]:
    """What plays a round of this number, and tells the seconds of a step of one client."""
    training = Training(work, train)
    backend, _, _ = make_backend(training)
    everyone = np.arange(CLIENTS)
    message = work.algorithm.broadcast(training.server, training.round_of(everyone))

    def play(number: int) -> float:
        start = time.process_time()
        outcome = backend.run("local", everyone, number, message, ())
        assert not outcome.failed
        return (time.process_time() - start) / (CLIENTS * STEPS)

    return play


def without_noise(play: Callable[[int], float]) -> Callable[[int], float]:
    def played(number: int) -> float:
        with mock.patch.object(StreamNoise, "add"):
            return play(number)

    return played


def drawing(count: int) -> dict[str, float]:
    """Seconds for so many normal numbers of a client: descant's, which follow from its key and are added, and
    torch's."""
    into, keys, generator = torch.zeros(CLIENTS, count), torch.arange(CLIENTS), torch.Generator()
    ways = {"descant": lambda: random.add_coarse_normal_(into, keys, torch.ones(CLIENTS)),
            "torch": lambda: into.normal_(generator=generator)}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, draw in ways.items():
            start = time.process_time()
            draw()
            found[name].append((time.process_time() - start) / CLIENTS)
    return {name: statistics.median(each) for name, each in found.items()}


def main() -> None:
    rng = np.random.default_rng(0)
    count = CLIENTS * ROWS
    federation = Federation.from_arrays(
        rng.standard_normal((count, 784)).astype(np.float32), rng.integers(10, size=count),
        np.arange(CLIENTS).repeat(ROWS), test=0.0, validation=0.0)
    train = Train(rounds=1, batch=BATCH, local=LocalWork(steps=STEPS), backend="vectorised")
    print(f"a step of one of {CLIENTS} clients, in chunks as in a round, batches of {BATCH}, one thread")
    with one_thread():
        for name, make in MODELS.items():
            torch.manual_seed(0)
            task = ModuleTask(make(), loss="cross_entropy", classes=10).fitted(federation)
            plain = Work(FedAvg(), task, federation, 0, BATCH, train.local)
            ways = {"plain": round_of(plain, train)} | {
                sampling: round_of(protected(plain, train, Privacy(noise=1.0, sampling=sampling)), train)
                for sampling in ("known", "poisson")}
            turns = [*ways.values(), *(without_noise(ways[sampling]) for sampling in ("known", "poisson"))]
            taken = [[play(number) for play in turns] for number in range(1, REPEATS + 1)]
            base, *private = (statistics.median(each) for each in zip(*taken, strict=True))
            for sampling, own, silent in zip(("known", "poisson"), private, private[2:], strict=False):
                print(f"{name}: plain {1e6 * base:.0f} us, private ({sampling} batches) {1e6 * own:.0f} us, "
                      f"{own / base:.2f} times; without noise {silent / base:.2f} times")
            print(f"{name}: normal numbers for a gradient, " + ", ".join(
                f"by {way} {1e6 * seconds:.0f} us" for way, seconds in drawing(task.dim).items()))


if __name__ == "__main__":
    main()

"""How long it takes to make federations, and how much memory: `python benchmarks/data.py`.

Each case runs in a process of its own, three times, and the best counts. Files are in the page cache:
they are read once before. Datasets come from the data directory ($DESCANT_DATA, or ~/.cache/descant);
random ones of the same shape stand in for those that are not there. Imports are not timed, but what they
occupy is part of the memory.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.func import vmap

from descant.core.federation import Federation
from descant.core.preprocess import Preprocess
from descant.core.task import Batch
from descant.core.threads import one_thread
from descant.core.vector import Model
from descant.data import DATASETS, DataSpec
from descant.data.cache import ENVIRONMENT, data_dir
from descant.data.partitions import Dirichlet, Partition, Shards
from descant.data.samples import Dataset, Samples
from descant.engine.batches import ClientTensors, LocalWork, Plan, View, plan_chunk
from descant.engine.pool import Pool
from descant.models import ModelSpec
from descant.priors.solve import SGD, descend

RUNS = 3
ROWS = {"fashion_mnist": (60000, 10000), "cifar10": (50000, 10000)}  # of the official parts
COHORT, BATCH, STEPS, ROUNDS = 10, 20, 20, 20
_RNG = np.random.default_rng(0)


@dataclass(frozen=True)
class Million(Dataset):
    """A million rows of 16 features, 10 classes."""

    name: ClassVar[str] = "million"

    def load(self, clients: int, seed: int) -> Samples:
        return pool()


@functools.cache
def pool() -> Samples:
    return Samples(torch.from_numpy(_RNG.standard_normal((1_000_000, 16), np.float32)),
                   torch.from_numpy(_RNG.integers(0, 10, 1_000_000)), 10)


def images(name: str) -> dict[str, float]:
    """A dataset of images to 100 clients, each with 2 classes, in the type that training uses."""
    start = time.perf_counter()
    _images(name)
    return {"seconds": time.perf_counter() - start}


def _images(name: str) -> Federation:
    spec = DataSpec.parse({"dataset": name, "partition": "classes", "clients": 100})
    return spec.federation().to(torch.float32)


def population(partition: Partition) -> dict[str, float]:
    """100,000 clients of a million rows."""
    pool()  # drawing it is not timed
    start = time.perf_counter()
    federation = DataSpec(Million(), partition, Preprocess(), clients=100_000).federation()
    seconds = time.perf_counter() - start
    assert federation.everyone > 99_000, "clients were lost"
    return {"seconds": seconds}


def gathering() -> dict[str, float]:
    """Reading a cohort's batches as the engine does, as a share of the steps of `dnn` on them."""
    federation = _images("fashion_mnist")
    task = ModelSpec.parse({"name": "dnn"}).task(federation, torch.float32, 0)

    def read(carry: torch.Tensor, batch: Batch) -> torch.Tensor:
        return carry

    def train(model: Model, batch: Batch) -> Model:
        return descend(task, model, batch, SGD())[0]

    pool = Pool.of(federation, task.dtype)
    reading, training = [], []
    with torch.no_grad(), one_thread():
        for number in range(ROUNDS):
            plan, tensors = plan_chunk(
                pool, _RNG.choice(100, COHORT, replace=False), seed=0, purpose="local", number=number,
                batch=BATCH, work=LocalWork(steps=STEPS), per_step=1, dtype=task.dtype, draws=task.draws,
                splits=())
            times = [time.perf_counter()]
            for step, start in ((read, torch.zeros(())), (train, task.init())):
                def one(own: ClientTensors, step: Any = step, start: Any = start, plan: Plan = plan) -> Any:
                    return View(plan, own).scan(step, start)

                vmap(one)(tensors)
                times.append(time.perf_counter())
            reading.append(times[1] - times[0])
            training.append(times[2] - times[1])
    # the best of each: others use this machine, too
    return {"share": min(reading) / (min(training) - min(reading)), "seconds": min(reading) / STEPS}


@dataclass(frozen=True)
class Case:
    """A measurement and what it should come to."""

    title: str
    measure: Callable[[], dict[str, float]]
    targets: dict[str, float]  # upper limits
    needs: tuple[str, ...] = ()  # datasets


CASES = {
    "fashion": Case("Fashion-MNIST to 100 clients, by classes", lambda: images("fashion_mnist"),
                    {"seconds": 2.0}, ("fashion_mnist",)),
    "cifar": Case("CIFAR-10 to 100 clients, by classes", lambda: images("cifar10"),
                  {"seconds": 4.0, "megabytes": 700.0}, ("cifar10",)),
    "dirichlet": Case("a million rows to 100,000 clients, by Dirichlet(0.5)",
                      lambda: population(Dirichlet(alpha=0.5, min_size=2)), {"seconds": 20.0}),
    "shards": Case("a million rows to 100,000 clients, by shards", lambda: population(Shards()),
                   {"seconds": 20.0}),
    "gathering": Case(f"batches of {BATCH} for {COHORT} clients, as a share of a step of dnn", gathering,
                      {"share": 0.10}, ("fashion_mnist",)),
}
UNITS: dict[str, Callable[[float], str]] = {
    "seconds": lambda value: f"{value:.2f} s", "megabytes": lambda value: f"{value:.0f} MB",
    "share": lambda value: f"{value:.1%}",
}


def stand_in(name: str, folder: Path) -> None:
    """Random arrays in the layout of a dataset of images."""
    layout: dict[str, Any] = DATASETS[name]().source.layout  # type: ignore[attr-defined]
    arrays = {}
    for (array, expected), rows in zip(layout.items(), np.repeat(ROWS[name], 2), strict=True):
        shape = (int(rows), *expected.shape[1:])
        arrays[array] = _RNG.integers(0, expected.below or 256, shape, expected.dtype)
    np.savez(folder / f"{name}.npz", **arrays)


def run(name: str, folder: Path) -> dict[str, float]:
    """The best of some runs of a case, each in a new process."""
    results = []
    for _ in range(RUNS):
        done = subprocess.run([sys.executable, __file__, name], env=os.environ | {ENVIRONMENT: str(folder)},
                              stdout=subprocess.PIPE, text=True, check=True)
        results.append(json.loads(done.stdout))
    return {key: min(result[key] for result in results) for key in results[0]}


def main() -> None:
    if len(sys.argv) > 1:
        result = CASES[sys.argv[1]].measure()
        megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6 * 1024
        print(json.dumps(result | {"megabytes": megabytes}))
        return
    table = Table("what", "data", "found", "target", "met", box=None, pad_edge=False)
    with tempfile.TemporaryDirectory() as made:
        for name, case in CASES.items():
            folder, real = data_dir(), all((data_dir() / f"{each}.npz").exists() for each in case.needs)
            if not real:
                folder = Path(made)
                for each in case.needs:
                    if not (folder / f"{each}.npz").exists():
                        stand_in(each, folder)
            for each in case.needs:
                (folder / f"{each}.npz").read_bytes()
            found = run(name, folder)
            for key, limit in case.targets.items():
                data = "synthetic" if not case.needs else "real" if real else "stand-in"
                table.add_row(case.title, data, UNITS[key](found[key]), f"under {UNITS[key](limit)}",
                              "yes" if found[key] < limit else "NO")
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    print(f"best of {RUNS}; {os.cpu_count()} cores, torch {torch.__version__}")


if __name__ == "__main__":
    main()

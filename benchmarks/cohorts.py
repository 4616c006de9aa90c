"""The memory and the time of rounds with large cohorts: `python -m benchmarks.cohorts --clients 10000`.

FedAvg on 784-100-10 (79,510 parameters), one step on two rows for each client. With --rows the uploads are
kept one by one, as for a method that needs them so; with --private clients are shortened and noised.

    python -m benchmarks.cohorts --clients 100 --steps 20 --rounds 20 --compare

plays all three in turn and tells the medians, also of the seconds of processor: these depend less on what
else the machine does.
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import time
from typing import NamedTuple

import numpy as np
import torch

from descant.algorithms import FedAvg
from descant.core.federation import Federation
from descant.core.privacy.settings import Privacy
from descant.core.splits import Table
from descant.engine.backends.base import Backend
from descant.engine.backends.choose import make_backend
from descant.engine.batches import LocalWork
from descant.engine.protect import protected
from descant.engine.rounds import Training
from descant.engine.settings import Train
from descant.engine.work import Work
from descant.models import DNN, make_task

KINDS = ("sums", "rows", "private")


class Rows(FedAvg):
    """FedAvg whose server looks at the uploads one by one."""

    @property
    def needs_rows(self) -> bool:
        return True


class Played(NamedTuple):
    seconds: float
    processor: float


def federation(clients: int, rows: int) -> Federation:
    """Clients with so many training rows, and one for validation and for the test."""
    rng = np.random.default_rng(0)
    n = clients * (rows + 2)
    x = torch.from_numpy(rng.integers(0, 256, (n, 784), np.uint8))
    own = np.arange(n).reshape(clients, rows + 2)
    tables = (Table.of(list(part)) for part in (own[:, :rows], own[:, rows : rows + 1], own[:, rows + 1 :]))
    return Federation(x, torch.from_numpy(rng.integers(0, 10, n)), *tables, 10,
                      tuple(str(k) for k in range(clients)))


def prepared(kind: str, data: Federation, train: Train) -> tuple[Training, Backend]:
    method = Rows() if kind == "rows" else FedAvg()
    work = Work(method, make_task(DNN(hidden=100), data), data, 0, train.batch, train.local)
    if kind == "private":
        work = protected(work, train, Privacy(unit="client", noise=1.0, clip=1.0, sampling="known"))
    training = Training(work, train)
    backend, training.train, _ = make_backend(training)
    return training, backend


def played(training: Training, backend: Backend) -> Played:
    start, used = time.perf_counter(), time.process_time()
    training.play(backend)
    training.store.write()
    return Played(time.perf_counter() - start, time.process_time() - used)


def peak() -> float:
    """Gigabytes of this process, at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--batch", type=int, default=2, help="as many as a client has training rows")
    parser.add_argument("--backend", default="vectorised")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--rows", action="store_true", help="keep the uploads one by one")
    parser.add_argument("--private", action="store_true", help='privacy.unit = "client"')
    parser.add_argument("--compare", action="store_true", help="all three, in turn")
    given = parser.parse_args()
    torch.set_num_threads(1)
    data = federation(given.clients, given.batch)
    train = Train(batch=given.batch, local=LocalWork(steps=given.steps), backend=given.backend,
                  workers=given.workers)
    kinds = KINDS if given.compare else ("rows" if given.rows else "private" if given.private else "sums",)
    all_of = {kind: prepared(kind, data, train) for kind in kinds}
    found: dict[str, list[Played]] = {kind: [] for kind in kinds}
    (first, _), order = all_of[kinds[0]], random.Random(0)
    print(f"{given.clients} clients, {first.work.task.dim} parameters, chunks of {first.train.chunk}, "
          f"{peak():.2f} GB before the first round")
    for number in range(1, given.rounds + 1):
        for kind in order.sample(kinds, len(kinds)):  # who comes first after another's memory pays for it
            one = played(*all_of[kind])
            found[kind].append(one)
            if not given.compare:
                print(f"round {number}: {one.seconds:.2f} s, {one.processor:.3f} s of processor, "
                      f"peak {peak():.2f} GB")
    if given.compare:
        base = [statistics.median(figure) for figure in zip(*found[kinds[0]], strict=True)]
        for kind in kinds:
            here = [statistics.median(figure) for figure in zip(*found[kind], strict=True)]
            print(f"{kind}: median {here[0]:.3f} s ({here[0] / base[0]:.2f} x), of processor {here[1]:.3f} s "
                  f"({here[1] / base[1]:.2f} x)")
    for _, backend in all_of.values():
        backend.close()


if __name__ == "__main__":
    main()

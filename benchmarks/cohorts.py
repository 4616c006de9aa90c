"""The memory and the time of rounds with large cohorts: `python -m benchmarks.cohorts --clients 10000`.

FedAvg on 784-100-10 (79,510 parameters), one step on two rows for each client. With --rows the uploads are
kept one by one, as for a method that needs them so; with --private clients are shortened and noised. Of a
round the seconds of processor are told too: they hardly depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np
import torch

from descant.algorithms import FedAvg
from descant.core.federation import Federation
from descant.core.privacy.settings import Privacy
from descant.core.splits import Table
from descant.engine.backends.choose import make_backend
from descant.engine.batches import LocalWork
from descant.engine.protect import protected
from descant.engine.rounds import Training
from descant.engine.settings import Train
from descant.engine.work import Work
from descant.models import DNN, make_task


class Rows(FedAvg):
    """FedAvg whose server looks at the uploads one by one."""

    @property
    def needs_rows(self) -> bool:
        return True


def federation(clients: int, rows: int = 4) -> Federation:
    """Clients with two training rows, and one for validation and for the test."""
    rng = np.random.default_rng(0)
    n = clients * rows
    x = torch.from_numpy(rng.integers(0, 256, (n, 784), np.uint8))
    own = np.arange(n).reshape(clients, rows)
    tables = (Table.of(list(part)) for part in (own[:, :2], own[:, 2:3], own[:, 3:]))
    return Federation(x, torch.from_numpy(rng.integers(0, 10, n)), *tables, 10,
                      tuple(str(k) for k in range(clients)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--backend", default="vectorised")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--rows", action="store_true", help="keep the uploads one by one")
    parser.add_argument("--private", action="store_true", help='privacy.unit = "client"')
    given = parser.parse_args()
    torch.set_num_threads(1)
    data = federation(given.clients)
    train = Train(batch=given.batch, local=LocalWork(steps=given.steps), backend=given.backend,
                  workers=given.workers)
    task = make_task(DNN(hidden=100), data)
    method = Rows() if given.rows else FedAvg()
    work = Work(method, task, data, 0, train.batch, train.local)
    if given.private:
        work = protected(work, train, Privacy(unit="client", noise=1.0, clip=1.0, sampling="known"))
    training = Training(work, train)
    backend, settled, _ = make_backend(training)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{given.clients} clients, {task.dim} parameters, chunks of {settled.chunk}, "
          f"{before / 2**20:.2f} GB before the first round")
    for _ in range(given.rounds):
        start, used = time.perf_counter(), time.process_time()
        training.play(backend)
        training.store.write()
        seconds = time.perf_counter() - start
        used = time.process_time() - used
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"round {training.number}: {seconds:.2f} s, {used:.3f} s of processor, "
              f"peak {peak / 2**20:.2f} GB")
    backend.close()


if __name__ == "__main__":
    main()

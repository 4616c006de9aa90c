"""A step on a small table: `python -m benchmarks.small_tables`.

139 clients with rows of 28 numbers in two classes, softmax regression, batches of 20, one epoch, all clients
of a chunk in one thread: with as many rows each, and with 50 to 450. Microseconds of processor time per
client and gradient step; the median and the least of some rounds, the methods taking turns. Last, FedAvg's
steps by code that is written out by hand for this model, in torch: what the calls alone take.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table as Shown
from torch import Tensor

from benchmarks.speed.case import BATCH, METHODS, SEED
from descant.core.federation import Federation
from descant.core.splits import Table
from descant.core.threads import one_thread
from descant.engine.backends.choose import make_backend
from descant.engine.batches import LocalWork
from descant.engine.rounds import Training
from descant.engine.settings import Train
from descant.engine.work import Work
from descant.models import make_task

CLIENTS, FEATURES, CLASSES, ROWS, REPEATED = 139, 28, 2, 500, 31


def tables(ragged: bool) -> Federation:
    """Random tables."""
    rng = np.random.default_rng(SEED)
    sizes = rng.integers(50, 451, CLIENTS) if ragged else np.full(CLIENTS, ROWS)
    total = int(sizes.sum())
    x = torch.from_numpy(rng.standard_normal((total, FEATURES), np.float32))
    y = torch.from_numpy((x[:, 0].numpy() + rng.standard_normal(total) > 0).astype(np.int64))
    own = np.split(np.arange(total), np.cumsum(sizes)[:-1])
    none = Table.of([rows[:0] for rows in own])
    return Federation(x, y, Table.of(own), none, none, CLASSES, tuple(map(str, range(CLIENTS))))


class Side:
    """A method's rounds."""

    def __init__(self, method: str, federation: Federation) -> None:
        train = Train(cohort=CLIENTS, batch=BATCH, local=LocalWork(epochs=1), seed=SEED, backend="vectorised")
        task = make_task("mclr", federation, dtype=train.torch_dtype, seed=SEED)
        self.training = Training(Work(METHODS[method], task, federation, SEED, BATCH, train.local), train)
        self.backend, self.settled, _ = make_backend(self.training)
        self.spent: list[float] = []

    def play(self) -> None:
        clients, training = np.arange(CLIENTS), self.training
        message = training.work.algorithm.broadcast(training.server, training.round_of(clients))
        states = training.store.read(clients)
        start = time.thread_time()
        steps = self.backend.run("local", clients, 1, message, states).grad_steps
        self.spent.append(1e6 * (time.thread_time() - start) / steps)


def by_hand(x: Tensor, y: Tensor, order: Tensor) -> float:
    """Seconds of an epoch of FedAvg, on rows that are looked up at once; the order is given."""
    w, b = torch.zeros(CLIENTS, CLASSES, FEATURES), torch.zeros(CLIENTS, CLASSES)
    start = time.thread_time()
    rows, targets = x[order], y[order]
    for k in range(0, ROWS, BATCH):
        batch, right = rows[:, k : k + BATCH], targets[:, None, k : k + BATCH]
        log_p = torch.log_softmax(torch.bmm(w, batch.mT).add_(b.unsqueeze(2)), 1)
        log_p.gather(1, right).neg_()
        slope = log_p.exp_().scatter_add_(1, right, torch.full_like(right, -1, dtype=log_p.dtype))
        slope.mul_(1 / BATCH)
        w.baddbmm_(slope, batch, alpha=-0.01)
        b.sub_(slope.sum(2), alpha=0.01)
    return time.thread_time() - start


def main() -> None:
    """Measure."""
    table = Shown(box=box.SIMPLE_HEAD, title="µs of processor time per client and step: median (least)",
                  title_justify="left")
    for heading in ("rows", "chunk", *METHODS, "FedAvg by hand"):
        table.add_column(heading, justify="right", no_wrap=True)
    with one_thread(), torch.no_grad():
        for ragged in (False, True):
            federation = tables(ragged)
            sides, bare = {method: Side(method, federation) for method in METHODS}, []
            order = torch.arange(CLIENTS * ROWS).view(CLIENTS, ROWS)[:, torch.randperm(ROWS)]
            for _ in range(REPEATED):
                for side in sides.values():
                    side.play()
                if not ragged:
                    bare.append(1e6 * by_hand(federation.x, federation.y, order) / (CLIENTS * ROWS // BATCH))
            spent = [*(side.spent for side in sides.values()), *([bare] if bare else [])]
            table.add_row("50 to 450" if ragged else str(ROWS), str(sides["fedavg"].settled.chunk), *(
                f"{statistics.median(each):.1f} ({min(each):.1f})" for each in spent))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()

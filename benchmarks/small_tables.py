"""A step on a small table: `python -m benchmarks.small_tables`.

139 clients with rows of 28 numbers in two classes, softmax regression, batches of 20, one epoch, all clients
of a chunk in one thread: with as many rows each, and with 50 to 450. Microseconds of processor time per
client and gradient step; the median and the least of some rounds, the methods taking turns. Last, FedAvg's
steps by code that is written out by hand for this model, in torch: what the calls alone take. Then FedAvg's
round part by part, in further rounds in which each part notes what it takes without the parts within it.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table as Shown
from torch import Tensor

from benchmarks.speed.case import BATCH, METHODS, SEED
from descant.core.federation import Federation
from descant.core.kernels import chain_layers
from descant.core.kernels.chunk import ChunkGradients
from descant.core.splits import Table
from descant.core.threads import one_thread
from descant.engine import batches, steps
from descant.engine import work as works
from descant.engine.backends.choose import make_backend
from descant.engine.batches import LocalWork
from descant.engine.rounds import Training
from descant.engine.settings import Train
from descant.engine.work import Work
from descant.models import make_task
from descant.priors.fused import Descent

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

# where a round is taken apart: what is replaced, and the part that its time counts for
PLACES: tuple[tuple[Any, str, str], ...] = (
    (batches, "draw", "plan: generators, permutations"), (Work, "_plan", "plan: all else"),
    (steps, "lookup", "look up rows"), (chain_layers.Linear, "forward", "forward: product, bias"),
    (ChunkGradients, "_mean_loss", "loss and slopes"),
    (chain_layers, "add_product_", "step: product, update of weights"),
    (chain_layers.Linear, "add_gradient", "step: sum, update of biases"),
    (Descent, "step", "Python around a step"), (Descent, "start", "models in and out, sums of losses"),
    (Descent, "end", "models in and out, sums of losses"),
)
BATCHES, VMAP, REST = "batches as slices", "vmap, in and out", "messages, results, all else"


class Parts:
    """What the parts of rounds take, each without those within it."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = defaultdict(float)
        self._within: list[float] = []

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any, **more: Any) -> Any:
            began = time.thread_time()
            self._within.append(0.0)
            try:
                return call(*given, **more)
            finally:
                whole = time.thread_time() - began
                self._spent[part] += whole - self._within.pop()
                if self._within:
                    self._within[-1] += whole

        return noted

    def round(self, play: Callable[[], None]) -> dict[str, float]:
        """The seconds of the parts of a round."""
        def batches_of(*given: Any) -> Iterator[Any]:
            following = self.timed(BATCHES, found(*given).__next__)
            while True:
                try:
                    yield following()
                except StopIteration:
                    return

        self._spent.clear()
        found, vmap = batches.step_batches, works.vmap
        with ExitStack() as stack:
            for owner, name, part in PLACES:
                stack.enter_context(patch.object(owner, name, self.timed(part, getattr(owner, name))))
            stack.enter_context(patch.object(batches, "step_batches", batches_of))
            stack.enter_context(patch.object(works, "vmap", lambda one: self.timed(VMAP, vmap(one))))
            self.timed(REST, play)()
        return dict(self._spent)


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


def show_parts(console: Console, sides: dict[str, Side]) -> None:
    """FedAvg's rounds part by part, for each kind of tables."""
    table = Shown(box=box.SIMPLE_HEAD, title_justify="left",
                  title="FedAvg part by part, µs of processor time per client and step: median")
    table.add_column("part")
    columns = []
    for rows, side in sides.items():
        table.add_column(rows, justify="right", no_wrap=True)
        parts, count = Parts(), sum(-(-int(n) // BATCH) for n in side.training.work.federation.train.sizes)
        rounds = [parts.round(side.play) for _ in range(REPEATED)]
        columns.append({part: 1e6 * statistics.median(each[part] for each in rounds) / count
                        for part in rounds[0]})
    for part in dict.fromkeys([*(part for _, _, part in PLACES), BATCHES, VMAP, REST]):
        table.add_row(part, *(f"{column[part]:.2f}" for column in columns))
    table.add_row("together", *(f"{sum(column.values()):.2f}" for column in columns))
    console.print(table)


def main() -> None:
    """Measure."""
    table = Shown(box=box.SIMPLE_HEAD, title="µs of processor time per client and step: median (least)",
                  title_justify="left")
    for heading in ("rows", "chunk", *METHODS, "FedAvg by hand"):
        table.add_column(heading, justify="right", no_wrap=True)
    console, taken_apart = Console(width=110), {}
    with one_thread(), torch.no_grad():
        for ragged in (False, True):
            rows, federation = "50 to 450" if ragged else str(ROWS), tables(ragged)
            sides, bare = {method: Side(method, federation) for method in METHODS}, []
            order = torch.arange(CLIENTS * ROWS).view(CLIENTS, ROWS)[:, torch.randperm(ROWS)]
            for _ in range(REPEATED):
                for side in sides.values():
                    side.play()
                if not ragged:
                    bare.append(1e6 * by_hand(federation.x, federation.y, order) / (CLIENTS * ROWS // BATCH))
            spent = [*(side.spent for side in sides.values()), *([bare] if bare else [])]
            table.add_row(rows, str(sides["fedavg"].settled.chunk), *(
                f"{statistics.median(each):.1f} ({min(each):.1f})" for each in spent))
            taken_apart[rows] = sides["fedavg"]
        console.print(table)
        show_parts(console, taken_apart)


if __name__ == "__main__":
    main()

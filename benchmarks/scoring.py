"""Scoring beside the products it needs: `python -m benchmarks.scoring`.

All 100 clients of Fashion-MNIST (or of random data of its shape), 17,500 test rows, one process with one
thread. FedAvg has one model for all; pFedMe tries a personal and a shared one on each row. The products are
those of the networks alone, on the rows where they lie, in the fastest of some arrangements; "by client" are
those in which no bit of a client's product depends on the rows of others, as in scoring. Then what scoring
has besides: reading the clients' states, and the tallies (loss, and what is right of each class).
Milliseconds of processor time; the least of some, taken in turn, since other work only adds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.speed.case import CLIENTS, TEST_ROWS, Case, fashion_mnist
from benchmarks.speed.engine import Engine
from benchmarks.speed.products import Shapes
from descant.core.threads import one_thread

MODELS, METHODS, REPEATED = ("mclr", "dnn"), ("fedavg", "pfedme"), 25
AT_ONCE = (1, 5, 10, 25, 100)  # clients in a product


class Side:
    """A method's evaluation, and the parts of it."""

    def __init__(self, method: str, model: str, federation: Any) -> None:
        case = Case(method, model, federation)
        self.engine = Engine(case, "vectorised")
        self.engine.round()
        training = self.engine._training
        self.task, self._store = training.work.task, training.store
        part = training.work.pool.test
        self._x = part.x.flatten(1).view(CLIENTS, TEST_ROWS, -1)
        self._y = part.y.view(CLIENTS, TEST_ROWS)
        shapes = Shapes.of(case).layers
        self._weights = [torch.randn(CLIENTS, layer.outputs, layer.inputs) for layer in shapes]
        columns = torch.randn(CLIENTS, shapes[-1].outputs, TEST_ROWS).mT
        # as the products leave them: of the shared model in rows, of personal ones in columns
        self._outputs = [columns.contiguous(), columns][: case.passes]
        self.ways = {"descant": self.engine.evaluate, "states": self._states, "tallies": self._tallies} | {
            f"shared, {n} at once{', in columns' * turned}": self._shared(n, turned)
            for n in AT_ONCE for turned in (False, True)} | {
                f"by client, {n} at once": self._by_client(n, is_shared=True) for n in AT_ONCE} | ({
                    f"personal, {n} at once": self._by_client(n) for n in AT_ONCE}
                    if case.passes == 2 else {})

    def _shared(self, at_once: int, turned: bool) -> Callable[[], None]:
        def products() -> None:
            for k in range(0, CLIENTS, at_once):
                rows: Tensor = self._x[k : k + at_once].flatten(0, 1)
                for w in self._weights:
                    rows = torch.mm(w[0], rows.T).T if turned else F.linear(rows, w[0])

        return products

    def _by_client(self, at_once: int, *, is_shared: bool = False) -> Callable[[], None]:
        def products() -> None:
            for k in range(0, CLIENTS, at_once):
                columns: Tensor = self._x[k : k + at_once].mT
                for w in self._weights:
                    own = w[:1].expand(at_once, -1, -1) if is_shared else w[k : k + at_once]
                    columns = torch.bmm(own, columns)

        return products

    def _states(self) -> None:
        self._store.read(np.arange(CLIENTS))

    def _tallies(self) -> None:
        for outputs in self._outputs:
            self.task._tallies(outputs, self._y, None, None)  # type: ignore[attr-defined]

    def costs(self) -> dict[str, float]:
        """The least milliseconds of every way, and of the products in the best arrangement."""
        spent: dict[str, list[float]] = {name: [] for name in self.ways}
        with torch.no_grad():
            for _ in range(REPEATED):
                for name, way in self.ways.items():
                    start = time.thread_time()
                    way()
                    spent[name].append(1e3 * (time.thread_time() - start))
        least = {name: min(each) for name, each in spent.items()}
        shared, by_client, personal = (
            min((cost for name, cost in least.items() if name.startswith(kind)), default=0.0)
            for kind in ("shared", "by client", "personal"))
        return {name: least[name] for name in ("descant", "states", "tallies")} | {
            "products": min(shared, by_client) + personal, "by client": by_client + personal}


def main(models: Annotated[str, typer.Option(help="Of mclr and dnn.")] = ",".join(MODELS)) -> None:
    """Hold scoring against its products."""
    table = Table(box=box.SIMPLE_HEAD, title=f"ms of processor time to score {CLIENTS} clients",
                  title_justify="left")
    for heading in ("model", "method", "descant", "products", "times the\nproducts", "by client", "tallies",
                    "states", "rest", "times by client\nand tallies"):
        table.add_column(heading, justify="right", no_wrap=True)
    with one_thread():
        federation, _ = fashion_mnist()
        for model in models.split(","):
            for method in METHODS:
                found = Side(method, model, federation).costs()
                whole, products, apart, tallies, states = (
                    found[each] for each in ("descant", "products", "by client", "tallies", "states"))
                table.add_row(model, method, f"{whole:.1f}", f"{products:.1f}", f"{whole / products:.2f}",
                              f"{apart:.1f}", f"{tallies:.1f}", f"{states:.1f}",
                              f"{whole - apart - tallies - states:.1f}", f"{whole / (apart + tallies):.2f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    typer.run(main)

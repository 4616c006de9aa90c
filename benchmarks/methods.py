"""What every method costs beside pFedMe: `python -m benchmarks.methods`.

First table: processor time per gradient step, as descant counts them, of whole rounds on the vectorised
backend in one process: the clients' part, and the server's with everything else. 20 of 100 clients, 25
batches of 20, Fashion-MNIST or random data of its shape. The methods take turns, round by round; figures are
medians. Ratios are to pFedMe's, and to those of a pFedMe that takes each gradient by itself ("plain"): of
all, and of the clients' part.
Second table: what the server of FedAMP, HeurFedAMP and FedFomo does in a round of 1000 clients with 80,000
parameters each, and FedAMP's products alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table as Shown

from benchmarks.speed.case import BATCH, CLIENTS, COHORT, SEED, fashion_mnist
from benchmarks.speed.command import chosen
from descant.algorithms import ALGORITHMS, FedAMP, FedFomo, HeurFedAMP, PerFedAvg, fedfomo, pFedMe
from descant.cli.common import reporting
from descant.cli.options import DataDir
from descant.core.algorithm import Algorithm, Message, Round
from descant.core.federation import Federation
from descant.core.kernels import span
from descant.core.kernels.products import some_rows
from descant.core.splits import Table
from descant.core.threads import on_all_cores, one_thread
from descant.core.tree import Tree
from descant.core.vector import Model
from descant.engine.adding import Adding
from descant.engine.backends.base import InProcess
from descant.engine.backends.choose import make_backend
from descant.engine.batches import LocalWork
from descant.engine.outcome import Outcome
from descant.engine.pool import Pools
from descant.engine.rounds import Training
from descant.engine.settings import Train
from descant.engine.work import Job, Work
from descant.errors import UsageError
from descant.models import make_task
from descant.priors import attention

MODELS, STEPS, HELD_OUT = ("mclr", "dnn"), 25, 25  # the last training rows of each client: FedFomo validates
METHODS: dict[str, Algorithm] = {name: method() for name, method in ALGORITHMS.items()} | {
    "perfedavg fo": PerFedAvg(variant="fo"), "pfedme plain": pFedMe()}
MEASURES = ("pfedme", "pfedme plain")
UNCOUNTED = 2  # rounds
POPULATION, PARAMETERS = 1000, 80_000
SERVERS: dict[str, Algorithm] = {"fedamp": FedAMP(), "heurfedamp": HeurFedAMP(), "fedfomo": FedFomo()}


class Timed(InProcess):
    """The vectorised backend, which keeps the processor time of the clients' work."""

    seconds = 0.0

    def run(self, job: Job, clients: np.ndarray, number: int, message: Message, states: Tree,
            adding: Adding | None = None) -> Outcome:
        start = time.process_time()
        outcome = super().run(job, clients, number, message, states, adding)
        self.seconds += time.process_time() - start
        return outcome


@dataclass
class Method:
    """A method that plays round after round, and what they cost in processor time."""

    training: Training
    backend: Timed
    is_plain: bool = False  # no steps in the span of a batch (`core/kernels/span.py`)
    clients: list[float] = field(default_factory=list)  # seconds per gradient step
    server: list[float] = field(default_factory=list)  # the same, of what is not the clients'

    @classmethod
    def on(cls, algorithm: Algorithm, model: str, federation: Federation, pools: Pools) -> Method:
        train = Train(cohort=COHORT, batch=BATCH, local=LocalWork(steps=STEPS), seed=SEED,
                      backend="vectorised")
        task = make_task(model, federation, dtype=train.torch_dtype, seed=SEED)
        training = Training(Work(algorithm, task, federation, SEED, BATCH, train.local, pools=pools), train)
        chosen, _, _ = make_backend(training)
        return cls(training, Timed(chosen.work, chosen.chunk))

    def play(self) -> None:
        start, before = time.process_time(), self.backend.seconds
        with patch.object(span, "_pays", lambda *_: False) if self.is_plain else nullcontext():
            report = self.training.play(self.backend)
        self.training.store.write()
        spent = time.process_time() - start
        if report.note is not None:
            raise RuntimeError(f"{self.training.work.algorithm.name}: {report.note}")
        clients = self.backend.seconds - before
        self.clients.append(clients / report.grad_steps)
        self.server.append((spent - clients) / report.grad_steps)

    @property
    def cost(self) -> tuple[float, float]:
        """Of the clients, and of all."""
        clients = statistics.median(self.clients)
        return clients, clients + statistics.median(self.server)


def validated(federation: Federation) -> Federation:
    """The federation with the last training rows of each client for validation."""
    own = [federation.train[client] for client in range(federation.population)]
    return replace(federation, train=Table.of([rows[:-HELD_OUT] for rows in own]),
                   validation=Table.of([rows[-HELD_OUT:] for rows in own]))


def costs(names: tuple[str, ...], model: str, federation: Federation, repetitions: int) -> dict[str, Method]:
    """Let the methods take turns, after two rounds that do not count: some import what they need in the
    second, when clients come back."""
    pools = Pools()
    methods: dict[str, Method] = {}
    for name in names:
        with suppress(UsageError):  # such as FedPer on a model that has nothing but a head
            methods[name] = Method.on(METHODS[name], model, federation, pools)
            methods[name].is_plain = name.endswith("plain")
    for k in range(UNCOUNTED + repetitions):
        first = k % len(methods)
        for method in [*methods.values()][first:] + [*methods.values()][:first]:  # nobody is always the first
            method.play()
    for method in methods.values():
        del method.clients[:UNCOUNTED], method.server[:UNCOUNTED]
    return methods


def served(algorithm: Algorithm) -> tuple[float, float]:
    """Seconds of processor and of wall time of a server: broadcast to, and aggregation of, all clients."""
    everyone = Round(SEED, 1, torch.arange(POPULATION), torch.ones(POPULATION), POPULATION)
    generator = torch.Generator().manual_seed(SEED)
    models = Model(torch.randn(POPULATION, PARAMETERS, generator=generator), torch.zeros(POPULATION, 0))
    server: Any = models
    uploads: Any = models
    if isinstance(algorithm, FedFomo):
        worth = torch.rand(POPULATION, POPULATION, generator=generator)
        server, uploads = fedfomo.Server(models, worth), fedfomo.Upload(models, worth[:, : algorithm.M])
    begun, wall = time.process_time(), time.perf_counter()
    algorithm.broadcast(server, everyone)
    algorithm.aggregate(server, uploads, everyone)
    return time.process_time() - begun, time.perf_counter() - wall


def multiplied() -> tuple[float, float]:
    """The same, of nothing but FedAMP's products: of all pairs of models, and of their weights with them."""
    models, weights = torch.randn(POPULATION, PARAMETERS), torch.randn(POPULATION, POPULATION)
    parts = models.split(attention.BLOCK)
    pairs = [(k, other) for k in range(len(parts)) for other in range(k, len(parts))]
    begun, wall = time.process_time(), time.perf_counter()
    on_all_cores(lambda pair: parts[pair[0]] @ parts[pair[1]].T, pairs)
    some_rows([(block, torch.arange(len(block))) for block in weights.split(attention.BLOCK)], models)
    return time.process_time() - begun, time.perf_counter() - wall


def show(console: Console, names: tuple[str, ...], found: dict[str, dict[str, Method]]) -> None:
    """The first table: a line for each method."""
    table = _table(f"processor time per gradient step; {COHORT} of {CLIENTS} clients, {STEPS} batches of "
                   f"{BATCH}")
    table.add_column("method", no_wrap=True)
    for model in found:
        for heading in ("clients,\nµs", "server,\nµs", "times\npFedMe", "times\nplain",
                        "clients,\ntimes plain"):
            table.add_column(f"{model}\n{heading}", justify="right", no_wrap=True)
    for name in names:
        cells = []
        for methods in found.values():
            if name not in methods:
                cells += [""] * 5
                continue
            clients, whole = methods[name].cost
            measure, plain = (methods[name].cost for name in MEASURES)
            ratios = whole / measure[1], whole / plain[1], clients / plain[0]
            cells += [f"{1e6 * clients:.0f}", f"{1e6 * (whole - clients):.0f}",
                      *(f"{ratio:.2f}" for ratio in ratios)]
        table.add_row(name, *cells)
    console.print(table)


def _table(title: str) -> Shown:
    return Shown(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, title_justify="left",
                 title=title, title_style="")


app = typer.Typer(rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False)


@app.command()
def methods(
    names: Annotated[str | None, typer.Option("--methods", metavar="NAME,...", show_default=False,
                                              help="Beside pfedme. Default: all.")] = None,
    models: Annotated[str | None, typer.Option("--models", metavar="NAME,...", show_default=False,
                                               help="Of mclr and dnn. Default: both.")] = None,
    repetitions: Annotated[int, typer.Option("--repetitions", metavar="N", min=1,
                                             help="Rounds of each method.")] = 5,
    no_servers: Annotated[bool, typer.Option("--no-servers", help="Leave out the second table.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Measure what a gradient step of every method costs here, beside one of pFedMe."""
    with reporting("stopped") as console, one_thread():
        wanted = (*MEASURES, *(name for name in chosen("method", names, tuple(METHODS), METHODS)
                               if name not in MEASURES))
        federation = validated(fashion_mnist()[0])
        show(console, wanted, {model: costs(wanted, model, federation, repetitions)
                       for model in chosen("model", models, MODELS, MODELS)})
        if no_servers:
            return
        table = _table(f"the server's seconds a round, {POPULATION} clients of {PARAMETERS:,} parameters")
        for heading in ("method", "processor", "wall"):
            table.add_column(heading, no_wrap=True)
        ways: dict[str, Callable[[], tuple[float, float]]] = {
            name: partial(served, server) for name, server in SERVERS.items()}
        for name, way in (ways | {"fedamp, products alone": multiplied}).items():
            spent = [way() for _ in range(3)]
            table.add_row(name, *(f"{statistics.median(each):.2f}" for each in zip(*spent, strict=True)))
        console.print(table)


if __name__ == "__main__":
    app()

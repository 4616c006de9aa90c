"""Whether a second worker pays for a large model, and what limits it: `python -m benchmarks.workers`.

First, what two processes get of this machine when both are at it, beside one alone: copies of memory, and the
products of a step of SGD on 784-h-10 for as many clients as descant takes at once. If two take as long as
one, together they do twice as much; if they take twice as long, nothing is gained. Then rounds of descant in
one process, in two workers, and as `auto` chooses, in turn. By the clock: other work on the machine falsifies
it.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.speed.case import BATCH, Case, random_federation
from benchmarks.speed.engine import Engine
from descant.core.threads import one_thread
from descant.models import DNN

HIDDEN = {126: "100 thousand", 1258: "1 million", 12_579: "10 million"}
CLIENTS, ROWS, BATCHES, LASTING = 10, 20, 5, 1.0
COPIED = 64 * 2**20  # bytes


def copying() -> Callable[[], float]:
    """Copies from memory to memory; gives gigabytes that are read and written."""
    a = torch.ones(COPIED // 4)
    b = torch.empty_like(a)

    def work() -> float:
        b.copy_(a)
        return 2 * COPIED / 1e9

    return work


def stepping(hidden: int) -> Callable[[], float]:
    """The products of a step for one client after another; gives steps."""
    clients = max(2, min(CLIENTS, 4 * 10**7 // (785 * hidden)))
    w, x, slope = torch.randn(clients, hidden, 784), torch.randn(BATCH, 784), torch.randn(hidden, BATCH)

    def work() -> float:
        for each in w:
            each @ x.T
            each.addmm_(slope, x, alpha=-1e-9)
        return float(clients)

    return work


def _worked(make: Callable[..., Callable[[], float]], arguments: tuple[Any, ...], barrier: Any, answers: Any
            ) -> None:
    torch.set_num_threads(1)
    work = make(*arguments)
    work()
    barrier.wait()
    done, start = 0.0, time.perf_counter()
    while (spent := time.perf_counter() - start) < LASTING:
        done += work()
    answers.put(done / spent)


def together(processes: int, make: Callable[..., Callable[[], float]], *arguments: Any) -> float:
    """What so many processes do in a second, all in all."""
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(processes), context.Queue()
    started = [context.Process(target=_worked, args=(make, arguments, barrier, answers))
               for _ in range(processes)]
    for process in started:
        process.start()
    total = sum(answers.get(timeout=120) for _ in started)
    for process in started:
        process.join()
    return total


def rounds(method: str, hidden: int, repetitions: int) -> dict[str, tuple[float, str]]:
    """Milliseconds of a gradient step by each backend, in turn."""
    federation = random_federation(CLIENTS, ROWS, 1)
    batches = BATCHES if hidden < max(HIDDEN) else 1
    case = Case(method, DNN(hidden=hidden), federation, CLIENTS, batches, evaluated=0)
    engines = {name: Engine(case, name) for name in ("vectorised", "processes", "auto")}
    spent: dict[str, list[float]] = {name: [] for name in engines}
    for k in range(1 + repetitions):
        for name, engine in engines.items():
            played = engine.round()
            if k:
                spent[name].append(1e3 * played.seconds / played.grad_steps)
    for engine in engines.values():
        engine.close()
    return {name: (statistics.median(each), engines[name].note) for name, each in spent.items()}


def main(repetitions: Annotated[int, typer.Option(help="Rounds of each backend.")] = 5,
         methods: Annotated[str, typer.Option(help="Of fedavg, pfedme and mh.")] = "fedavg,pfedme") -> None:
    """Hold two workers against one."""
    console = Console(width=110)
    bare = Table(box=box.SIMPLE_HEAD, title="what processes do in a second, together", title_justify="left")
    for heading in ("", "one", "two", "two, times one"):
        bare.add_column(heading, justify="right", no_wrap=True)
    kinds: list[tuple[str, Any]] = [("copies, GB", (copying,))]
    kinds += [(f"steps of {about} parameters", (stepping, hidden)) for hidden, about in HIDDEN.items()]
    for name, what in kinds:
        one, two = together(1, *what), together(2, *what)
        bare.add_row(name, f"{one:,.1f}", f"{two:,.1f}", f"{two / one:.2f}")
    console.print(bare)
    table = Table(box=box.SIMPLE_HEAD, title="ms per gradient step of descant's rounds", title_justify="left")
    for heading in ("method", "parameters", "one process", "two workers", "two, times\nas fast", "auto",
                    "which is"):
        table.add_column(heading, justify="right", no_wrap=True)
    with one_thread():
        for method in methods.split(","):
            for hidden, about in HIDDEN.items():
                found = rounds(method, hidden, repetitions)
                (one, _), (two, _), (auto, note) = (found[n] for n in ("vectorised", "processes", "auto"))
                table.add_row(method, about, f"{one:.2f}", f"{two:.2f}", f"{one / two:.2f}", f"{auto:.2f}",
                              note)
    console.print(table)


if __name__ == "__main__":
    typer.run(main)

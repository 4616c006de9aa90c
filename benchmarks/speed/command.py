"""`python -m benchmarks.bench`: which cases are run, and where the figures go."""

from __future__ import annotations

import json
import os
import typing
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich import progress as bars
from rich.console import Console

from benchmarks.speed import growth, results
from benchmarks.speed.apart import Apart
from benchmarks.speed.case import CLIENTS, COHORT, EPOCH, METHODS, MODELS, Case, fashion_mnist
from benchmarks.speed.contest import compete
from benchmarks.speed.floor import Floor
from benchmarks.speed.picture import draw
from benchmarks.speed.table import show_case, show_growth, show_summary
from descant.core.federation import Federation
from descant.core.files import write_atomic
from descant.core.threads import one_thread
from descant.core.units import times
from descant.engine.settings import Train
from descant.errors import UsageError, unknown

BACKENDS = ("loop", "vectorised", "processes", "auto")
QUICK_BACKENDS = BACKENDS[1:]
REPETITIONS, QUICK_REPETITIONS = 5, 3
LARGE = ("cnn2",)  # models of which a repetition does less
BUSY = 0.5  # processes beside ours that make figures doubtful


def chosen(kind: str, names: str | None, usual: tuple[str, ...], known: typing.Iterable[str]
           ) -> tuple[str, ...]:
    """The names of a list with commas, if there are such; without a list, the usual ones."""
    if names is None:
        return usual
    found = tuple(name.strip() for name in names.split(",") if name.strip())
    for name in found:
        if name not in known:
            raise unknown(kind, name, known)
    if not found:
        raise UsageError(f"--{kind}s names nothing: known are {', '.join(known)}")
    return tuple(dict.fromkeys(found))


def bench(console: Console, *, quick: bool, out: Path, methods: str | None, models: str | None,
          backends: str | None, repetitions: int | None, no_growth: bool) -> None:
    """Run the benchmark and keep its figures in `out`."""
    kept_methods = chosen("method", methods, tuple(METHODS), METHODS)
    kept_models = chosen("model", models, MODELS, MODELS)
    kept_backends = chosen("backend", backends, QUICK_BACKENDS if quick else BACKENDS,
                           typing.get_args(typing.get_type_hints(Train)["backend"]))
    grows = not (quick or no_growth)
    repetitions = repetitions or (QUICK_REPETITIONS if quick else REPETITIONS)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {out}: {error.strerror}") from None
    if not os.access(out, os.W_OK):  # told before anything is measured
        raise UsageError(f"--out {out}: cannot be written to")

    machine = results.machine()
    with one_thread(), closing(Apart("spawn", Floor, results.cores())) as floor:
        federation, is_real = fashion_mnist()
        _introduce(console, machine, is_real)
        cases = [*plan(federation, kept_methods, kept_models, quick)]
        found: dict[str, Any] = {"machine": machine, "real_data": is_real, "quick": quick,
                                 "repetitions": repetitions, "cases": [], "growth": {}}
        with _bar(console, len(cases) + (growth.COUNT if grows else 0)) as done:
            for case in cases:
                told = done(f"{case.method} on {case.model}")
                found["cases"].append(results.dump(compete(case, kept_backends, repetitions, floor, told)))
                show_case(console, found["cases"][-1], repetitions)
            for point in growth.points() if grows else ():
                told = done(f"{point.at:,} {point.curve}")
                found["growth"].setdefault(point.curve, []).append({"at": point.at, **results.dump(compete(
                    point.case, growth.BACKENDS, growth.REPETITIONS,
                    floor if point.curve == "parameters" else None, told))})
    show_growth(console, found["growth"])
    show_summary(console, found["cases"])
    write_atomic(out / "bench.json", json.dumps(found, indent=1).encode())
    write_atomic(out / "bench.png", draw(found))
    for name in ("bench.json", "bench.png"):
        console.print(f"{out / name}", soft_wrap=True)


def plan(federation: Federation, methods: tuple[str, ...], models: tuple[str, ...], quick: bool
         ) -> Iterator[Case]:
    """All methods on all models. Of a large model, a repetition does a third of an epoch's gradient steps
    and evaluates a fifth of the clients. A quick benchmark does as little of all models, even less of large
    ones, and has one method less for each further model."""
    for k, model in enumerate(models):
        for method in methods[: max(1, len(methods) - k)] if quick else methods:
            whole = Case(method, model, federation)
            epoch = EPOCH // whole.grads_per_batch  # batches with as many gradients as FedAvg's 27
            if model in LARGE and quick:
                yield replace(whole, cohort=COHORT // 2, batches=2, evaluated=0)
            elif model in LARGE:
                yield replace(whole, batches=max(2, epoch // 3), evaluated=CLIENTS // 5)
            elif quick:
                yield replace(whole, batches=epoch, evaluated=CLIENTS // 5)
            else:
                yield whole


def _introduce(console: Console, machine: dict[str, Any], is_real: bool) -> None:
    data = "Fashion-MNIST" if is_real else "random data in the shape of Fashion-MNIST"
    lines = [f"{machine['processor']}, {times(machine['cores'], 'core')}, torch {machine['torch']}; {data}",
             "lean loop: plain PyTorch, one client after another, one thread; floor: nothing but the matrix "
             "products and the SGD update, on all cores"]
    if machine["load_at_start"] is not None and machine["load_at_start"] > BUSY:
        lines.append(f"caution: other processes are at work (load {machine['load_at_start']:.1f}): "
                     "trust no figure to 30 %")
    for line in (*lines, ""):
        console.print(line, soft_wrap=True)


@contextmanager
def _bar(console: Console, total: int) -> Iterator[Callable[[str], Callable[[str], None]]]:
    """A bar over the cases; gives a function that begins the next, which gives one that says what is done.
    It is redrawn only when something is said: a thread of its own would take time from whoever is timed."""
    bar = bars.Progress(bars.TextColumn("{task.completed:.0f}/{task.total:.0f} cases", markup=False),
                        bars.BarColumn(), bars.TextColumn("{task.description}", markup=False),
                        bars.TimeElapsedColumn(), console=console, transient=True, auto_refresh=False,
                        disable=not console.is_interactive)
    with bar:
        task = bar.add_task("", total=total, completed=-1, visible=False)

        def begin(title: str) -> Callable[[str], None]:
            bar.update(task, advance=1, visible=True)

            def say(text: str) -> None:
                bar.update(task, description=f"{title}, {text}")
                bar.refresh()

            return say

        yield begin

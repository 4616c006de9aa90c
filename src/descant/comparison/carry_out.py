"""Doing what is missing of a comparison: searches first, then runs, several at a time in processes of their
own. One that fails does not stop the others."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from descant.comparison import figures, tune
from descant.comparison.plan import Plan, Planned
from descant.engine.choose import Measured
from descant.errors import DescantError
from descant.experiment import directory as layout
from descant.experiment import run as runs
from descant.experiment.config import Experiment
from descant.files import write_atomic

LOOK = 0.5  # seconds between looks at how far the runs are
J = TypeVar("J")
T = TypeVar("T")


class Search(NamedTuple):
    """The search for one method's hyper-parameters."""

    label: str
    tables: dict[str, Any]  # of its experiment
    fixed: list[str]
    trials: int
    record: Path

    @property
    def title(self) -> str:
        return f"tuning {self.label}"

    @property
    def done(self) -> bool:
        return False  # a search knows by itself what is left of it

    @property
    def size(self) -> int:
        return self.trials

    @property
    def size_done(self) -> int:
        found = tune.read(self.record)
        return 0 if found is None else min(self.trials, len(found["rows"]))


class Display(Protocol):
    """Whoever shows how far things are."""

    def progress(self, working: Sequence[Any]) -> None:
        """Called now and then with what is being done."""

    def ended(self, job: Any, failure: str | None) -> None:
        """One is done, or has failed."""

    def note(self, text: str) -> None:
        """Something that people should know."""


def carry_out(planned: Sequence[Planned], jobs: int, display: Display, failures: Path
              ) -> list[tuple[Planned, str]]:
    """Make the runs that are missing; gives what went wrong with some. `failures` is where that is kept."""
    missing = [run for run in planned if not run.done]
    known = read_failures(failures)
    failed = []
    for run, outcome in _all(_play, missing, jobs, display):
        known.pop(run.title, None)
        if isinstance(outcome, Exception):
            known[run.title] = _words(outcome)
            failed.append((run, known[run.title]))
        else:
            for note in outcome:
                display.note(f"{run.title}: {note}")
        write_atomic(failures, json.dumps(known, indent=1).encode())
    return failed


def searches(plan: Plan, labels: Sequence[str], trials: int) -> list[Search]:
    """The searches for those methods that have something to search, all on the same seed. Of a grid, what it
    is over stays as it is."""
    methods = [plan.methods[label]._replace(tuned=None) for label in labels]
    seed = Experiment.parse(plan.experiment).train.seed
    return [Search(method.label, plan.experiment_of(method, seed).dump(), method.given, trials,
                   plan.record(method.label))
            for method in methods if tune.space(method.algorithm, method.given)]


def search(searches: Sequence[Search], jobs: int, display: Display) -> dict[str, tune.Tuned]:
    """Search hyper-parameters of several methods. One that fails stops the comparison: its runs would not be
    what was asked for."""
    found: dict[str, tune.Tuned] = {}
    for wanted, outcome in _all(_search, searches, jobs, display):
        if isinstance(outcome, Exception):
            raise DescantError(f"{wanted.title} failed: {_words(outcome)}")
        found[wanted.label] = outcome
    return found


def read_failures(path: Path) -> dict[str, str]:
    """Which runs failed when they were last tried, and why."""
    try:
        found: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
        return found
    except (OSError, ValueError):
        return {}


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _all(work: Callable[[J], T], jobs: Sequence[J], count: int, display: Display
         ) -> Iterator[tuple[J, T | Exception]]:
    """Do all jobs, so many at a time; yields each with what came of it, or the error."""
    if not jobs:
        return
    context = multiprocessing.get_context("spawn")  # a progress bar's thread forbids forking
    with concurrent.futures.ProcessPoolExecutor(min(count, len(jobs)), mp_context=context, initializer=_quiet,
                                                initargs=(os.getpid(),)) as pool:
        try:
            waiting = {pool.submit(work, job): k for k, job in enumerate(jobs)}
            while waiting:
                ready, _ = concurrent.futures.wait(waiting, LOOK, concurrent.futures.FIRST_COMPLETED)
                running = [jobs[k] for future, k in waiting.items() if future.running()]
                display.progress(running[:count])  # those after these wait in the queue
                for future in sorted(ready, key=lambda future: waiting[future]):
                    k, error = waiting.pop(future), future.exception()
                    if error is not None and not isinstance(error, Exception):
                        raise error
                    display.ended(jobs[k], None if error is None else _words(error))
                    yield jobs[k], future.result() if error is None else error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in multiprocessing.active_children():
                worker.terminate()  # at most the current round of each is lost
            raise


def _quiet(parent: int) -> None:
    """Workers are stopped by their parent: a Ctrl-C is its business. If it is killed, perhaps before a worker
    has come this far, they end by themselves, lest they hold their runs' directories."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)  # as a kill would: at most the current round is lost


class _Unwatched:
    """An observer of runs whose cautions are told with the results, once for all seeds."""

    def started(self, run: runs.Run, measured: list[Measured]) -> None: ...

    def played(self, row: dict[str, Any]) -> None: ...


def _play(planned: Planned) -> list[str]:
    """Make a run; gives what could not be measured of it."""
    place = planned.place
    try:
        if (place / "config.toml").exists():
            run = runs.resume(place, rounds=max(planned.rounds, layout.rounds(place)), observer=_Unwatched())
        else:
            run = runs.start(runs.Setup.of(Experiment.parse(planned.tables)), place, _Unwatched())
        return figures.write(run, place / figures.FILE, planned.tables["eval"].get("metrics"))
    except DescantError as error:  # with nothing that cannot travel between processes
        raise RuntimeError(str(error)) from None


def _search(wanted: Search) -> tune.Tuned:
    try:
        return tune.search(Experiment.parse(wanted.tables), wanted.trials, wanted.record, fixed=wanted.fixed)
    except DescantError as error:
        raise RuntimeError(str(error)) from None

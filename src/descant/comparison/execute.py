"""Execute what is missing of a comparison: searches first, then runs, several at a time in processes of their
own. A run that fails does not stop the others."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from descant.comparison import measure, trials, tune
from descant.comparison.plan import Plan, PlannedRun
from descant.engine.backends.choose import Timing
from descant.engine.divergence import Diverged
from descant.errors import DescantError, UsageError
from descant.experiment import directory as layout
from descant.experiment import run as runs
from descant.experiment import trackers
from descant.experiment.config import Experiment
from descant.experiment.observe import Together

LOOK = 0.5  # seconds between looks at how far the runs are
J = TypeVar("J")
T = TypeVar("T")


class Search(NamedTuple):
    """The search for one method's hyper-parameters."""

    label: str
    experiment: Experiment
    fixed: list[str]
    size: int  # trials
    record: Path
    done: bool = False  # a search knows by itself what is left of it

    @property
    def title(self) -> str:
        return f"tuning {self.label}"

    @property
    def size_done(self) -> int:
        found = trials.read(self.record)
        return 0 if found is None else min(self.size, len(found["rows"]))


class Display(Protocol):
    """Shows the progress."""

    def progress(self, working: Sequence[Any]) -> None:
        """Called twice a second with the jobs that run."""

    def ended(self, job: Any, failure: str | None) -> None:
        """A job is done, or has failed."""

    def note(self, text: str) -> None:
        """A remark for the user."""


def execute(plan: Plan, planned: Sequence[PlannedRun], jobs: int, display: Display,
            track: Sequence[str] = ()) -> list[tuple[PlannedRun, str]]:
    """Make those of the planned runs that are missing; returns, and writes down, which failed and why. Tools
    named in `track` are told of each."""
    missing = [run for run in planned if not run.done]
    known = plan.failures()
    failed = []
    for run, outcome in in_processes(partial(_run, track=track), missing, jobs, display):
        known.pop(run.title, None)
        if isinstance(outcome, Exception):
            known[run.title] = _words(outcome)
            failed.append((run, known[run.title]))
        else:
            for note in outcome:
                display.note(f"{run.title}: {note}")
        plan.write_failures(known)
    return failed


def searches(plan: Plan, labels: Sequence[str], trials: int, jobs: int) -> list[Search]:
    """The searches for the methods that have something to search, without the fields of grids."""
    methods = [plan.methods[label]._replace(tuned=None) for label in labels]
    methods = [method for method in methods if tune.space(method.algorithm, method.given)]
    for method in methods:  # before hours of searching
        if plan.methods[method.label].tuned is None and plan.has_runs(method.label):
            raise UsageError(f"{plan.out} holds runs of {method.label} made without a search: "
                             "choose another --out, or give the method another label")
    return [Search(method.label, plan.trial_of(method, jobs), method.given, trials,
                   plan.record(method.label)) for method in methods]


def search(searches: Sequence[Search], jobs: int, display: Display
           ) -> dict[str, tune.Tuning | tune.Untrained]:
    """Search hyper-parameters of several methods. A search that fails stops the comparison, since its runs
    would not be what was asked for; a method that does not train with any values does not."""
    found: dict[str, tune.Tuning | tune.Untrained] = {}
    for wanted, outcome in in_processes(_search, searches, jobs, display):
        if isinstance(outcome, Exception):
            raise DescantError(f"{wanted.title} failed: {_words(outcome)}")
        found[wanted.label] = outcome
        if outcome.note is not None:
            display.note(f"{wanted.label}: {outcome.note}")
    return found


def seconds_of(plan: Plan, searches: Sequence[Search], jobs: int) -> float:
    """About how long searches take, by the time of a round when its steps were counted."""
    rounds = {wanted.label: wanted.size * wanted.experiment.train.rounds for wanted in searches}
    return sum(count * plan.methods[label].seconds for label, count in rounds.items()) / jobs


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def in_processes(work: Callable[[J], T], jobs: Sequence[J], count: int, display: Display
                 ) -> Iterator[tuple[J, T | Exception]]:
    """Do all jobs, so many at a time; yields each with its result or its error. If a process dies, the
    remaining jobs are done one at a time, so that the one that kills it is known."""
    left = dict(enumerate(jobs))
    while left:
        broken = False
        context = multiprocessing.get_context("spawn")  # a progress bar's thread forbids forking
        with concurrent.futures.ProcessPoolExecutor(min(count, len(left)), mp_context=context,
                                                    initializer=_quiet, initargs=(os.getpid(),)) as pool:
            try:
                with _without_main():
                    waiting = {pool.submit(partial(_in_process, work), job): k for k, job in left.items()}
                while waiting and not broken:
                    ready, _ = concurrent.futures.wait(waiting, LOOK, concurrent.futures.FIRST_COMPLETED)
                    running = [jobs[k] for future, k in waiting.items() if future.running()]
                    display.progress(running[:count])  # those after these wait in the queue
                    for future in sorted(ready, key=lambda future: waiting[future]):
                        k, error = waiting.pop(future), future.exception()
                        if isinstance(error, BrokenProcessPool):
                            is_culprit, broken = count == 1 and not broken, True
                            if not is_culprit:
                                continue
                            error = RuntimeError("its process died (out of memory? use fewer --jobs)")
                        if error is not None and not isinstance(error, Exception):
                            raise error
                        display.ended(left.pop(k), None if error is None else _words(error))
                        yield jobs[k], future.result() if error is None else error
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for worker in multiprocessing.active_children():
                    worker.terminate()  # at most the current round of each is lost
                raise
        count = 1 if broken else count


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Spawned processes import the main module again, and that of a script without `if __name__` would
    compare again in each of them. Jobs need nothing of it: code of the user's is named by its place."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _quiet(parent: int) -> None:
    """The parent stops its workers, also after Ctrl-C. If it is killed, they end by themselves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)  # as a kill would: at most the current round is lost


def _in_process(work: Callable[[J], T], job: J) -> T:
    try:
        return work(job)
    except Exception as error:  # as one that can be pickled
        raise RuntimeError(_words(error)) from None


class _Silent:
    """An observer of runs. Their cautions are printed with the results, once for all seeds."""

    def started(self, run: runs.Run, measured: list[Timing]) -> None: ...

    def played(self, row: dict[str, Any]) -> None: ...


def _run(planned: PlannedRun, track: Sequence[str]) -> list[str]:
    """Make a run; returns what could not be measured of it, and which tools were away."""
    place = planned.place
    notes: list[str] = []
    tools = trackers.named(track, notes.append)
    for tool in tools:
        tool.title = planned.title
    observer = Together([_Silent(), *tools])
    planned.require_own()
    # of the plan, not of the directory, which may have been changed since
    setup = runs.Setup.of(planned.experiment)
    try:
        if (place / "config.toml").exists():
            run = runs.resume(place, setup, max(planned.size, layout.rounds(place)), observer)
        else:
            run = runs.start(setup, place, observer)
    except Diverged as error:  # which is a result of the method: its figures are those of rounds before
        run = runs.load(place, setup)
        if not run.rounds:
            raise
        notes.append(f"the training has diverged: {error}")
        found = run.summary
        layout.write_summary(place, found | {
            "stopped": "diverged", "diverged": found["diverged"] or found["best"] is None})
    return [*notes, *measure.write(run, place, planned.experiment.eval.metrics)]


def _search(wanted: Search) -> tune.Tuning | tune.Untrained:
    return tune.search(wanted.experiment, wanted.size, wanted.record, fixed=wanted.fixed)

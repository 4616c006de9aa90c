"""Doing what is missing of a comparison: searches first, then runs, several at a time in processes of their
own. One that fails does not stop the others."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from descant.comparison import measure as figures
from descant.comparison import results, tune
from descant.comparison.plan import Plan, Planned
from descant.core.units import duration
from descant.engine.backends.choose import Measured
from descant.errors import DescantError, UsageError
from descant.experiment import directory as layout
from descant.experiment import run as runs
from descant.experiment.config import Experiment

MOST_SEEDS = 30  # that --until-decided takes
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


def carry_out(plan: Plan, planned: Sequence[Planned], jobs: int, display: Display
              ) -> list[tuple[Planned, str]]:
    """Make those of the planned runs that are missing; gives what went wrong with some, and writes it
    down."""
    missing = [run for run in planned if not run.done]
    known = plan.failures()
    failed = []
    for run, outcome in _all(_play, missing, jobs, display):
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
    """The searches for those methods that have something to search, all on the same seed. Of a grid, what it
    is over stays as it is."""
    methods = [plan.methods[label]._replace(tuned=None) for label in labels]
    methods = [method for method in methods if tune.space(method.algorithm, method.given)]
    for method in methods:  # told before hours of searching
        if plan.methods[method.label].tuned is None and plan.has_runs(method.label):
            raise UsageError(f"{plan.out} holds runs of {method.label} that were made without a search: "
                             "choose another --out, or give the method another label")
    return [Search(method.label, plan.trial_of(method, jobs).dump(), method.given, trials,
                   plan.record(method.label)) for method in methods]


def search(searches: Sequence[Search], jobs: int, display: Display) -> dict[str, tune.Tuned | tune.Nothing]:
    """Search hyper-parameters of several methods. One that fails stops the comparison: its runs would not be
    what was asked for. One of which nothing trains is told, and does not stop the others."""
    found: dict[str, tune.Tuned | tune.Nothing] = {}
    for wanted, outcome in _all(_search, searches, jobs, display):
        if isinstance(outcome, Exception):
            raise DescantError(f"{wanted.title} failed: {_words(outcome)}")
        found[wanted.label] = outcome
        if outcome.note is not None:
            display.note(f"{wanted.label}: {outcome.note}")
    return found


def seconds_of(plan: Plan, searches: Sequence[Search], jobs: int) -> float:
    """About how long searches take, by what a round took when its steps were counted."""
    rounds = {wanted.label: wanted.trials * int(wanted.tables["train"]["rounds"]) for wanted in searches}
    return sum(count * plan.methods[label].seconds for label, count in rounds.items()) / jobs


class More(NamedTuple):
    """What a look at the results leads to."""

    plan: Plan  # with the look, and the seeds that it adds
    seeds: list[int]  # that it adds; none: it ends here
    words: str


def extended(plan: Plan, found: results.Results) -> More:
    """Look whether the comparison is decided, and add as many repetitions as would settle it. There are as
    many looks as the plan says, since the tests are as strict as so many looks need; one at the same
    repetitions is the same look again."""
    count = len(plan.seeds)
    looked_at = [*dict.fromkeys([*plan.looked_at, count])]
    plan = plan._replace(looked_at=looked_at)
    outlook = results.outlook(found)
    if outlook.decided:
        return More(plan, [], f"decided with {count} repetitions: {outlook.why}")
    if outlook.more is None:
        return More(plan, [], f"not decided with {count} repetitions: {outlook.why}")
    adding = min(outlook.more, MOST_SEEDS - count)
    if len(looked_at) >= plan.looks or adding < 1:
        reason = f"all {plan.looks} looks are taken" if adding >= 1 else f"{MOST_SEEDS} are the most it takes"
        return More(plan, [], f"not decided with {count} repetitions, and {reason}: {outlook.why}")
    first = max(plan.seeds) + 1
    seeds = [*range(first, first + adding)]
    seconds = sum(run.summary["seconds"] for run in found.finished) / max(1, count) * adding
    plan = plan._replace(seeds=[*plan.seeds, *seeds])
    return More(plan, seeds, f"not decided with {count} repetitions: {outlook.why}; {adding} more, about "
                             f"{duration(seconds)} of work (look {len(looked_at)} of {plan.looks})")


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _all(work: Callable[[J], T], jobs: Sequence[J], count: int, display: Display
         ) -> Iterator[tuple[J, T | Exception]]:
    """Do all jobs, so many at a time; yields each with what came of it, or the error. If a process dies (out
    of memory, say), those that are left are done one at a time: then it is known which one it dies of."""
    left = dict(enumerate(jobs))
    while left:
        broken = False
        context = multiprocessing.get_context("spawn")  # a progress bar's thread forbids forking
        with concurrent.futures.ProcessPoolExecutor(min(count, len(left)), mp_context=context,
                                                    initializer=_quiet, initargs=(os.getpid(),)) as pool:
            try:
                waiting = {pool.submit(work, job): k for k, job in left.items()}
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
                            error = RuntimeError("its process died; if memory ran out, take fewer --jobs")
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
        planned.require_own()
        # of the plan, not of the directory: that one may have been changed since
        setup = runs.Setup.of(Experiment.parse(planned.tables))
        if (place / "config.toml").exists():
            rounds = max(planned.rounds, layout.rounds(place))
            run = runs.resume(place, setup, rounds, _Unwatched())
        else:
            run = runs.start(setup, place, _Unwatched())
        return figures.write(run, place / figures.FILE, planned.tables["eval"].get("metrics"))
    except Exception as error:  # as one that can travel between processes, whatever it is
        raise RuntimeError(_words(error)) from None


def _search(wanted: Search) -> tune.Tuned | tune.Nothing:
    try:
        return tune.search(Experiment.parse(wanted.tables), wanted.trials, wanted.record, fixed=wanted.fixed)
    except Exception as error:
        raise RuntimeError(_words(error)) from None

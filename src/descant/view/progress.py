"""Progress of a run or a comparison: bars on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich import progress as bars
from rich.console import Console

from descant.core.units import duration, times
from descant.engine.backends.choose import Timing
from descant.engine.settings import Train
from descant.experiment.directory import resume_command
from descant.experiment.run import Run
from descant.view.display import scores_of

COUNT = "{task.completed:.0f}/{task.total:.0f}"
NAMED = 3  # rejected clients that are named per round


class Progress:
    """Observes a run and prints it; a context, because it may show a bar."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: bars.Progress | None = None
        self._rounds = 0
        self._grad_steps = 0  # since the start of this process, as are the seconds
        self._seconds = 0.0
        self._metric = ""
        self._told: set[str] = set()  # notes that were printed; a repeated note is not

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def started(self, run: Run, measured: list[Timing]) -> None:
        setup, self._rounds, self._metric = run.setup, run.setup.train.rounds, run.setup.deciding.name
        self._say(_headline(run))
        if run.directory is not None:
            self._say(f"directory: {run.directory}")
        for note in (*setup.federation.notes, *setup.about_attacks(), *run.notes):
            self._say(f"note: {note}")
        if run.why_metric is not None:
            self._say(f"note: rounds are selected by {self._metric.replace('_', ' ')}, since "
                      f"{run.why_metric}; eval.metric sets another metric")
        for caution in setup.algorithm.cautions():
            self._say(f"caution: {caution}")
        if run.directory is not None and run.is_converged:
            self._say(f"finished: it stopped after round {run.rounds}, when the validation metric no longer "
                      "improved; to continue, raise or remove patience in config.toml")
            return
        if run.is_spent:
            self._say(f"finished: after round {run.rounds} another one would exceed privacy.epsilon = "
                      f"{setup.privacy and setup.privacy.epsilon:g}")
            return
        if run.directory is not None and run.rounds >= self._rounds:
            self._say(f"finished: all {times(self._rounds, 'round')} are done; "
                      f"for more: {resume_command(run.directory)} --rounds N")
            return
        self._say(f"backend: {_backend(setup.train, measured)}")
        if run.rounds:
            self._say(f"continuing after round {run.rounds} of {self._rounds}")
        if self._console.is_interactive:
            self._bar = _bar(self._console, _text(f"round {COUNT}"), bars.BarColumn(),
                             _text("{task.fields[score]}"), _text("{task.fields[speed]}"))
            self._bar.add_task("", completed=run.rounds, total=self._rounds, score="", speed="")
            self._bar.start()

    def played(self, row: dict[str, Any]) -> None:
        self._grad_steps += row["grad_steps"]
        self._seconds += row["seconds"]
        speed = f"{self._grad_steps / max(self._seconds, 1e-9):,.0f} steps/s"
        if "note" in row and row["note"] not in self._told:
            self._told.add(row["note"])
            self._say(f"round {row['round']}: {row['note']}")
        if "divergence" in row:
            self._say(f"round {row['round']}: {row['divergence']}")
        if row["rejected"]:
            self._say(f"round {row['round']}: rejected {_rejections(row['rejections'])}")
        scored, scores = row.get("personal"), scores_of(row, self._metric)
        if scored is not None and scored["failed"]:
            self._say(f"round {row['round']}: {times(scored['failed'], 'client')} could not be scored")
        if self._bar is not None:
            score: dict[str, Any] = {} if scored is None else {"score": scores[0]}
            self._bar.update(bars.TaskID(0), completed=row["round"], speed=speed, **score)
        elif scored is not None:
            number = f"{row['round']:>{len(str(self._rounds))}}/{self._rounds}"
            self._say(f"round {number}  {'  '.join(scores)}  {speed}")

    def _say(self, text: str) -> None:
        # never wrapped, however narrow the terminal: people copy lines
        self._console.print(text, soft_wrap=True)


class Watching:
    """Shows runs or searches that are processed in parallel: a bar for all and one for each at work."""

    def __init__(self, console: Console, jobs: Sequence[Any]) -> None:
        self._console, self._jobs = console, jobs
        self._begun = time.monotonic()
        self._ended = sum(job.done for job in jobs)
        self._bar: bars.Progress | None = None
        self._lines: dict[int, bars.TaskID] = {}  # position -> its line

    def __enter__(self) -> Watching:
        if self._ended:
            self._console.print(f"{self._ended} of {len(self._jobs)} are already done", soft_wrap=True)
        if self._console.is_interactive and self._ended < len(self._jobs):
            self._bar = _bar(self._console, _text("{task.description}"), bars.BarColumn(), _text(COUNT))
            self._whole = self._bar.add_task("all", total=sum(job.size for job in self._jobs))
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def progress(self, working: Sequence[Any]) -> None:
        if self._bar is None:
            return
        self._bar.update(self._whole, completed=sum(job.size_done for job in self._jobs))
        now = {self._jobs.index(job): job for job in working}
        for position in [position for position in self._lines if position not in now]:
            self._bar.remove_task(self._lines.pop(position))
        for position, job in now.items():
            if position not in self._lines:
                self._lines[position] = self._bar.add_task(f"  {job.title}", total=job.size)
            self._bar.update(self._lines[position], completed=job.size_done)

    def note(self, text: str) -> None:
        self._console.print(f"note: {text}", soft_wrap=True)

    def ended(self, job: Any, failure: str | None) -> None:
        self._ended += 1
        if failure is not None:
            self._console.print(f"{job.title} failed: {failure}", soft_wrap=True)
        elif self._bar is None:
            self._console.print(f"{job.title} done ({self._ended} of {len(self._jobs)}, "
                                f"{duration(time.monotonic() - self._begun)})", soft_wrap=True)


class Shown:
    """Shows a comparison on a console."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def watching(self, jobs: Sequence[Any]) -> Watching:
        return Watching(self._console, jobs)


@contextmanager
def counting(console: Console, total: int, noun: str) -> Iterator[Callable[[int], None]]:
    """A bar for work that is counted; yields the function that sets the count. Silent in a file."""
    if not console.is_interactive:
        yield lambda done: None
        return
    with _bar(console, _text(f"{noun} {COUNT}"), bars.BarColumn()) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.update(task, completed=done)


def _bar(console: Console, *columns: bars.ProgressColumn) -> bars.Progress:
    return bars.Progress(*columns, bars.TimeRemainingColumn(compact=True), _text("left"), console=console,
                         transient=True)  # results take its place


def _text(words: str) -> bars.TextColumn:
    return bars.TextColumn(words, markup=False)


def _headline(run: Run) -> str:
    setup, data = run.setup, ""
    if setup.origin is not None:
        data = f" on {setup.origin['data']['dataset']}, {setup.origin['model']['name']}"
    return (f"{setup.algorithm.name}{data}: {times(setup.federation.population, 'client')}, "
            f"{times(setup.task.dim, 'parameter')}, {times(setup.train.rounds, 'round')}")


def _backend(train: Train, measured: list[Timing]) -> str:
    words: list[str] = [train.backend]
    if train.workers is not None:
        words.append(times(train.workers, "worker"))
    if train.chunk is not None:
        words.append(f"chunk {train.chunk}")
    chosen = ", ".join(words)
    if not measured:
        return chosen
    costs = ", ".join(f"{m.backend} {duration(m.seconds)}" for m in measured)
    return f"{chosen} (measured per client and batch: {costs})"


def _rejections(reasons: dict[str, str]) -> str:
    # a client's name is the user's: repr shows whatever is in it on one line
    named = [f"{name!r} ({why})" for name, why in list(reasons.items())[:NAMED]]
    more = len(reasons) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")

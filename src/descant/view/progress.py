"""A run as it goes on: a bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich import progress as bars
from rich.console import Console

from descant.core.units import duration, figure, times
from descant.experiment.directory import resume_command

if TYPE_CHECKING:
    from descant.engine.backends.choose import Measured
    from descant.engine.settings import Train
    from descant.experiment.run import Run

NAMED = 3  # rejected clients that are named per round


class Progress:
    """An observer of a run that tells people about it; a context, because a bar must be taken down."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: bars.Progress | None = None
        self._rounds = 0
        self._grad_steps = 0  # since the start of this process, as are the seconds
        self._seconds = 0.0
        self._metric = ""
        self._told: set[str] = set()  # notes; one that holds in every round is told once

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def started(self, run: Run, measured: list[Measured]) -> None:
        setup, self._rounds, self._metric = run.setup, run.setup.train.rounds, run.setup.deciding.name
        self._say(_headline(run))
        if run.directory is not None:
            self._say(f"directory: {run.directory}")
        for note in (*setup.federation.notes, *run.notes):
            self._say(f"note: {note}")
        if run.why_metric is not None:
            self._say(f"note: rounds are selected by {self._metric.replace('_', ' ')}, since "
                      f"{run.why_metric}; eval.metric sets another metric")
        for caution in setup.algorithm.cautions():
            self._say(f"caution: {caution}")
        if run.directory is not None and run.is_converged:
            self._say(f"finished: it stopped after round {run.rounds}, when its validation figures no longer "
                      "improved; for more, raise patience in config.toml, or take it out")
            return
        if run.directory is not None and run.rounds >= self._rounds:
            self._say(f"finished: all {times(self._rounds, 'round')} are done; "
                      f"for more: {resume_command(run.directory)} --rounds N")
            return
        self._say(f"backend: {_backend(setup.train, measured)}")
        if run.rounds:
            self._say(f"continuing after round {run.rounds} of {self._rounds}")
        if self._console.is_interactive:
            self._bar = _bar(self._console)
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
        scored = row.get("personal")
        if scored is not None and scored["failed"]:
            self._say(f"round {row['round']}: {times(scored['failed'], 'client')} could not be scored")
        if self._bar is not None:
            score: dict[str, Any] = {} if scored is None else {
                "score": _score("personal", scored, self._metric)}
            self._bar.update(bars.TaskID(0), completed=row["round"], speed=speed, **score)
        elif scored is not None:
            scores = [_score(model, row[model], self._metric)
                      for model in ("personal", "global") if model in row]
            number = f"{row['round']:>{len(str(self._rounds))}}/{self._rounds}"
            self._say(f"round {number}  {'  '.join(scores)}  {speed}")

    def _say(self, text: str) -> None:
        # a line is a line, however narrow the terminal: what people copy must not be cut
        self._console.print(text, soft_wrap=True)


def _bar(console: Console) -> bars.Progress:
    return bars.Progress(
        bars.TextColumn("round {task.completed:.0f}/{task.total:.0f}", markup=False),
        bars.BarColumn(),
        bars.TextColumn("{task.fields[score]}", markup=False),
        bars.TextColumn("{task.fields[speed]}", markup=False),
        bars.TimeRemainingColumn(compact=True),
        bars.TextColumn("left", markup=False),
        console=console,
        transient=True,  # the table of results takes its place
    )


@contextmanager
def counting(console: Console, total: int, noun: str) -> Iterator[Callable[[int], None]]:
    """A bar for work that is counted; gives the function to tell how much is done. Silent in a file."""
    if not console.is_interactive:
        yield lambda done: None
        return
    with bars.Progress(bars.TextColumn(f"{noun} {{task.completed:.0f}}/{{task.total:.0f}}", markup=False),
                       bars.BarColumn(), bars.TimeRemainingColumn(compact=True),
                       bars.TextColumn("left", markup=False), console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda done: bar.update(task, completed=done)


def _headline(run: Run) -> str:
    setup, data = run.setup, ""
    if setup.origin is not None:
        data = f" on {setup.origin['data']['dataset']}, {setup.origin['model']['name']}"
    return (f"{setup.algorithm.name}{data}: {times(setup.federation.population, 'client')}, "
            f"{times(setup.task.dim, 'parameter')}, {times(setup.train.rounds, 'round')}")


def _backend(train: Train, measured: list[Measured]) -> str:
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


def _score(model: str, scores: dict[str, Any], metric: str) -> str:
    return f"{model} test {metric} {figure(metric, scores['test'][metric]['mean'])}"


def _rejections(reasons: dict[str, str]) -> str:
    # a client's name is the user's: repr shows whatever is in it on one line
    named = [f"{name!r} ({why})" for name, why in list(reasons.items())[:NAMED]]
    more = len(reasons) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")

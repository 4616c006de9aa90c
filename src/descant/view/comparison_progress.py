"""How far a comparison is: one bar for all, and a line for each run that is being made."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich import progress as bars
from rich.console import Console

from descant.core.units import duration


class Watching:
    """A display of runs or searches that go on at the same time: bars on a terminal, a line for each that
    has ended anywhere else. A context, because bars must be taken down."""

    def __init__(self, console: Console, jobs: Sequence[Any]) -> None:
        self._console, self._jobs = console, jobs
        self._begun = time.monotonic()
        self._ended = sum(job.done for job in jobs)
        self._left_out = [job for job in jobs if job.done]
        self._bar: bars.Progress | None = None
        self._lines: dict[int, bars.TaskID] = {}  # position -> its line

    def __enter__(self) -> Watching:
        if self._left_out:
            self._console.print(f"{len(self._left_out)} of {len(self._jobs)} are done already",
                                soft_wrap=True)
        if self._console.is_interactive and len(self._left_out) < len(self._jobs):
            self._bar = bars.Progress(
                bars.TextColumn("{task.description}", markup=False), bars.BarColumn(),
                bars.TextColumn("{task.completed:.0f}/{task.total:.0f}", markup=False),
                bars.TimeRemainingColumn(compact=True), bars.TextColumn("left", markup=False),
                console=self._console, transient=True)
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

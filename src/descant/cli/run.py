"""`descant run`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from descant.cli.common import read_tables, reporting, say_demo, warn
from descant.cli.options import Allow, DataDir, Profiled, Settings, Track, argument, option
from descant.errors import DescantError

if TYPE_CHECKING:
    from rich.console import Console

    from descant.experiment.run import Run


def run(
    file: Annotated[Path | None, argument(
        "FILE", "The experiment, a TOML file with the sections [data], [model], [algorithm], [train] and "
                "[eval]. Default: the demo, pFedMe on handwritten digits.")] = None,
    settings: Settings = None,
    out: Annotated[Path | None, option(
        "--out", "DIR", "The directory of the run; must be new or empty. Default: "
                        "runs/<algorithm>-<dataset>-<n>.")] = None,
    track: Track = None,
    profile: Profiled = False,
    allow: Allow = None,
    data_dir: DataDir = None,
) -> None:
    """Run an experiment, and keep its figures and models in a directory.

    The state is saved after every round: `descant resume` continues a run that was stopped.

    \b
    Examples:
      descant run
      descant run --set algorithm.name=ditto --set algorithm.lam=0.5
      descant run experiment.toml --set train.rounds=200 --out runs/long
    """
    with reporting("stopped before the first round") as console:
        from descant.core.permit import ran
        from descant.experiment import directory
        from descant.experiment import run as runs
        from descant.experiment.config import Experiment
        from descant.experiment.observe import Together
        from descant.experiment.trackers import named
        from descant.view.progress import Progress

        trackers = named(track or (), warn)
        if out is not None:
            directory.require_free(out)  # before the data is made
        experiment = Experiment.parse(read_tables(file, settings), ran(allow or ()))
        say_demo(console, file)
        setup = runs.Setup.of(experiment)
        stem = f"{experiment.algorithm.name}-{experiment.data.dataset.name}"
        with _place(out, stem) as place, Progress(console) as progress:
            done = runs.start(setup, place, Together([progress, *trackers]))
        show_run(console, done, profile)


def show_run(console: Console, done: Run, profile: bool) -> None:
    """Show a finished run; raises if its models have diverged."""
    from descant.view.tables import show_profile, show_summary

    show_summary(console, done.summary, done.directory)
    if profile:
        show_profile(console, done.stopwatch, done.work.pool.copied_bytes(done.work.federation))
    require_result(done.summary)


def require_result(summary: dict[str, Any]) -> None:
    """Raise if the models of the chosen round have diverged; warn if only those of the last round have."""
    from descant.engine.divergence import whose

    last, best, divergence = summary["last"], summary["best"], summary["divergence"]
    why = "" if divergence is None else f"; {divergence['words'].partition('; ')[2]}"
    if summary["diverged"]:
        chosen = best or last
        raise DescantError(f"{whose(chosen['personal'])} diverged (round {chosen['round']}): there is no "
                           f"result{why}")
    if last is not None and last["personal"]["diverged"]:
        chosen = "" if best is None else "; figures and models are those of the best round"
        typer.echo(f"warning: in the last round {whose(last['personal'])} diverged{chosen}{why}", err=True)


@contextmanager
def _place(out: Path | None, stem: str) -> Iterator[Path]:
    """The directory of a new run: the user's, or the first free number in runs/. That one is made at once,
    so that two runs started together differ, and removed if it stays empty."""
    if out is not None:
        yield out
        return
    base = Path("runs")
    try:
        base.mkdir(exist_ok=True)
        place = _next_number(base, stem)
    except OSError as error:
        raise DescantError(f"cannot write to {base}: {error.strerror}; choose another --out") from None
    try:
        yield place
    finally:
        with suppress(OSError):  # not empty: it holds a run
            place.rmdir()
            base.rmdir()


def _next_number(base: Path, stem: str) -> Path:
    taken = [path.name.removeprefix(f"{stem}-") for path in base.glob(f"{stem}-*")]
    number = 1 + max((int(n) for n in taken if n.isdecimal()), default=0)
    while True:
        try:
            place = base / f"{stem}-{number}"
            place.mkdir()
            return place
        except FileExistsError:  # taken in the meantime
            number += 1

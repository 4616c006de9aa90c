"""`descant resume`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from descant.cli.common import Allow, DataDir, Profiled, reporting_errors
from descant.cli.run import show_run
from descant.view.terminal import make_console


def resume(
    directory: Annotated[Path, typer.Argument(metavar="DIR", show_default=False,
                                              help="The directory of the run.")],
    rounds: Annotated[int | None, typer.Option(
        "--rounds", metavar="N", show_default=False,
        help="Extend the run to N rounds in all. Default: as planned.")] = None,
    profile: Profiled = False,
    allow: Allow = None,
    data_dir: DataDir = None,
) -> None:
    """Continue a run that was stopped, or extend one that is finished.

    The result is the same, bit for bit, as if the run had never been stopped. (An extended
    run is also evaluated after its former last round.)

    \b
    Examples:
      descant resume runs/pfedme-digits-1
      descant resume runs/pfedme-digits-1 --rounds 200
    """
    with reporting_errors("stopped before the next round"):
        from descant.experiment import run as runs
        from descant.view.progress import Progress

        console = make_console()
        with Progress(console) as progress:
            done = runs.resume(directory, rounds=rounds, observer=progress, allow=allow or ())
        show_run(console, done, profile)

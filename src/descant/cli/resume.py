"""`descant resume`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from descant.cli.common import reporting, warn
from descant.cli.options import Allow, DataDir, Profiled, Track, argument, option
from descant.cli.run import show_run


def resume(
    directory: Annotated[Path, argument("DIR", "The directory of the run.")],
    rounds: Annotated[int | None, option(
        "--rounds", "N", "Extend the run to N rounds in all. Default: as planned.")] = None,
    track: Track = None,
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
    with reporting("stopped before the next round") as console:
        from descant.experiment import run as runs
        from descant.experiment.observe import Together
        from descant.experiment.trackers import named
        from descant.view.progress import Progress

        trackers = named(track or (), warn)
        with Progress(console) as progress:
            done = runs.resume(directory, rounds=rounds, observer=Together([progress, *trackers]),
                               allow=allow or ())
        show_run(console, done, profile)

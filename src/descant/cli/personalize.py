"""`descant personalize`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from descant.cli.common import reporting
from descant.cli.export import RunDir, WhichRound, load_run
from descant.cli.options import Allow, DataDir, option
from descant.errors import DescantError

if TYPE_CHECKING:
    from rich.console import Console

    from descant.deploy.export.personalize import Newcomer


def personalize(
    run: RunDir,
    data: Annotated[Path, option(
        "--data", "FILE", "The newcomer's rows with their targets: a CSV, Parquet or NPZ file like those of "
                          "the run's clients.")],
    name: Annotated[str | None, option(
        "--name", "NAME", "The newcomer's name. Default: that of the file.")] = None,
    to: Annotated[Path | None, option(
        "--to", "DIR", "Write the model to DIR/NAME. Without it, only its scores are shown.")] = None,
    which: WhichRound = "best",
    allow: Allow = None,
    data_dir: DataDir = None,
) -> None:
    """Make a model for a client that was not part of a run, by the method's own rule for newcomers.

    The rows are split, scaled and imputed like those of the run's clients. On the test rows the model is
    compared with training alone and with the global model, if there is one. The run is not changed.

    \b
    Examples:
      descant personalize runs/hospitals --data west.csv
      descant personalize runs/hospitals --data west.csv --to models
    """
    with reporting("stopped; nothing was written") as console:
        from descant.deploy.export.export import make_directory, refuse_taken, safe_names, write_model
        from descant.deploy.export.personalize import personalized

        done = load_run(run, allow)
        called = data.stem if name is None else name
        place = None if to is None else to / safe_names([called])[called]
        refuse_taken([] if place is None else [place])
        newcomer = personalized(done, data, called, which)
        _show_newcomer(console, newcomer)
        if place is not None:
            make_directory(place.parent)
            problems = write_model(place, *newcomer.made)
            console.print(f"model: {place}", soft_wrap=True)
            if problems:
                raise DescantError(problems[0])


def _show_newcomer(console: Console, newcomer: Newcomer) -> None:
    from descant.core.units import times
    from descant.deploy.export.personalize import wilson
    from descant.view.outcome import show_own

    sizes = newcomer.sizes
    console.print(f"{newcomer.name}: {times(sizes['train'], 'training row')}, {sizes['validation']:,} for "
                  f"validation, {sizes['test']:,} for test", soft_wrap=True)
    show_own(console, newcomer.figures)
    rows, share = sizes["test"], newcomer.figures["personal"].get("accuracy")
    if rows and share is not None:
        low, high = wilson(share, rows)
        console.print(f"95 % confidence interval of accuracy {share:.4f} on {times(rows, 'test row')}: "
                      f"{low:.2f} to {high:.2f}; the other figures are as uncertain", soft_wrap=True)
    elif not rows:
        console.print("no test rows: the model is not scored", soft_wrap=True)

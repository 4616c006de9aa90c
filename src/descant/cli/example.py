"""`descant example`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from descant.cli.common import reporting


def example(
    directory: Annotated[Path, typer.Argument(
        metavar="DIR", help="A new directory.")] = Path("hospitals"),
) -> None:
    """Write an example to begin with: an experiment, and the tables of twelve hospitals.

    The patients are made up. Beside experiment.toml and data/ there are two files for later:
    new.csv, patients to predict, and west.csv, the patients of a hospital that joins later.

    \b
    Examples:
      descant example hospitals
      descant run hospitals/experiment.toml
    """
    with reporting("stopped; the example is incomplete") as console:
        from descant.data.hospitals import write_example

        write_example(directory)
        console.print(f"{directory / 'experiment.toml'}", soft_wrap=True)

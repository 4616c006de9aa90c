"""`descant data list` and `descant data show`."""

from __future__ import annotations

import itertools
import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from descant.cli.common import read_tables, reporting, say_demo
from descant.cli.options import AsJson, DataDir, Settings, argument, option
from descant.core.files import write_atomic
from descant.errors import UsageError

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def about_data() -> None:
    """List the datasets, and look at the federation of an experiment."""


@app.command(name="list")
def list_data(as_json: AsJson = False, data_dir: DataDir = None) -> None:
    """List the datasets with their clients and rows, and whether their files are there.

    Nothing is loaded or downloaded for this.

    \b
    Examples:
      descant data list
      descant data list --data-dir /srv/data --json
    """
    with reporting("stopped") as console:
        from descant.view.data import list_datasets, show_datasets

        found = list_datasets()
        if as_json:
            typer.echo(json.dumps(found, indent=2))
        else:
            show_datasets(console, found)


@app.command(name="show")
def show_data(
    file: Annotated[Path | None, argument(
        "FILE", "The experiment, a TOML file; a section [data] is enough. Default: the demo.")] = None,
    settings: Settings = None,
    out: Annotated[Path | None, option(
        "--out", "PICTURE.png", "Where to write the picture; replaces a file of that name. Default: data.png "
                                "(or data-2.png, and so on) next to FILE, and here for the demo.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Show the clients of an experiment: sizes, classes, splits, and how much they differ.

    Figures and a sketch are printed, and a picture is drawn.

    \b
    Examples:
      descant data show
      descant data show experiment.toml --set data.partition=dirichlet --set data.alpha=0.1
      descant data show experiment.toml --out clients.png
    """
    with reporting("stopped") as console:
        if out is not None and (out.suffix.lower() != ".png" or not out.parent.is_dir()):
            raise UsageError(f"--out {out}: name a file that ends in .png, in a directory that exists")
        from descant.data.heterogeneity import measure
        from descant.experiment.config import Experiment
        from descant.view.data import show_federation
        from descant.view.data_picture import draw_federation

        experiment = Experiment.parse(read_tables(file, settings, with_algorithm=True))
        say_demo(console, file)
        federation = experiment.data.federation()
        measured = measure(federation)
        show_federation(console, federation, measured)
        picture = draw_federation(federation, measured)
        place = _write_picture(picture, out, Path() if file is None else file.parent)
        console.print(f"picture: {place}", soft_wrap=True)


def _write_picture(picture: bytes, out: Path | None, base: Path) -> Path:
    """Write a picture to `out`, or to the first free of data.png, data-2.png, ..."""
    if out is not None:
        write_atomic(out, picture)
        return out
    for name in itertools.chain(["data.png"], (f"data-{n}.png" for n in itertools.count(2))):
        with suppress(FileExistsError), (base / name).open("xb") as file:
            file.write(picture)
            return base / name
    raise AssertionError  # numbers do not end

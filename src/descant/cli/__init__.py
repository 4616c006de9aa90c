"""The command line: one module a command. Each reads its options, calls the rooms below, and shows the
result.

May import everything. Commands import what needs torch inside the function: help must be instant.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer
import typer.core

from descant import __version__
from descant.cli import (
    advise,
    certificates,
    client,
    compare,
    data,
    example,
    export,
    init,
    listing,
    personalize,
    predict,
    report,
    reproduce,
    resume,
    run,
    server,
    show,
    watch,
)
from descant.cli.common import show_imports

# Typer up to 0.20, which Flower requires, would read the brackets in our help as markup.
typer.core.HAS_RICH = False
app = typer.Typer(no_args_is_help=True, rich_markup_mode=None,
                  pretty_exceptions_enable=False)


def main() -> None:
    """The entry point of the console script."""
    for stream in (sys.stdout, sys.stderr):
        # a terminal without some letter must not fail
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    app(prog_name="descant")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"descant {__version__}")
        raise typer.Exit


@app.callback()
def descant(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True,
                                          help="Print the version and exit.")] = False,
) -> None:
    """Personalized federated learning: clients learn together, and each gets its own model.

    \b
    Start with an example, twelve hospitals with made-up patients:
      descant example hospitals
      descant run hospitals/experiment.toml
    Or with your own tables, one file for each client:
      descant init my_folder --target COLUMN
    Compare methods:
      descant compare hospitals/experiment.toml --algorithms fedavg,ditto,pfedme --out results/mine
    See what is available:
      descant list algorithms
      descant show pfedme
    Inspect the data of an experiment, and choose how strongly to personalize:
      descant data show experiment.toml
      descant advise experiment.toml
    Deploy it, with each client's data on its own machine:
      descant certificates, descant server, descant client
    """
    show_imports()


for command in (
    example.example, init.init, run.run, resume.resume, compare.compare, report.report, watch.watch,
    reproduce.reproduce, export.export, predict.predict, personalize.personalize,
    certificates.certificates, server.server, client.client, advise.advise,
):
    app.command()(command)
app.command(name="list")(listing.list_entries)
app.command()(show.show)
app.add_typer(data.app, name="data")

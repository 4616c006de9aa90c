"""`descant list`."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import typer

from descant.cli.common import AsJson, reporting_errors
from descant.view.terminal import make_console


def list_entries(
    kind: Annotated[Literal["algorithms", "datasets", "models", "partitions"], typer.Argument(
        metavar="KIND", show_default=False, help="One of algorithms, datasets, models and partitions.")],
    as_json: AsJson = False,
) -> None:
    """List what an experiment can be made of, one line each.

    \b
    Examples:
      descant list algorithms
      descant list datasets --json
    """
    with reporting_errors("stopped"):
        from rich.table import Table

        from descant.experiment.catalogue import entries

        found = entries(kind.removesuffix("s"))
        if as_json:
            typer.echo(json.dumps(found, indent=2))
            return
        table = Table.grid(padding=(0, 2))
        for entry in found:
            table.add_row(entry["name"], entry["description"])
        make_console().print(table)

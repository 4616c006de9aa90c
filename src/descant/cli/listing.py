"""`descant list`."""

from __future__ import annotations

import json
from enum import StrEnum
from typing import Annotated

import typer

from descant.cli.common import AsJson, reporting_errors
from descant.view.terminal import make_console


class Kind(StrEnum):
    """The registries, as `descant list` calls them."""

    algorithms = "algorithms"
    datasets = "datasets"
    models = "models"
    partitions = "partitions"


def list_entries(
    kind: Annotated[Kind, typer.Argument(metavar="KIND", show_default=False,
                                         help="What to list: algorithms, datasets, models or partitions.")],
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

        found = entries(kind.value.removesuffix("s"))
        if as_json:
            typer.echo(json.dumps(found, indent=2))
            return
        table = Table.grid(padding=(0, 2))
        for entry in found:
            table.add_row(entry["name"], entry["description"])
        make_console().print(table)

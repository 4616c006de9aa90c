"""`descant list`."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import typer

from descant.cli.common import reporting
from descant.cli.options import AsJson, argument


def list_entries(
    kind: Annotated[Literal["algorithms", "datasets", "models", "partitions"], argument(
        "KIND", "One of algorithms, datasets, models and partitions.")],
    as_json: AsJson = False,
) -> None:
    """List what an experiment can be made of, one line each.

    \b
    Examples:
      descant list algorithms
      descant list datasets --json
    """
    with reporting("stopped") as console:
        from rich.table import Table

        from descant.experiment.catalogue import entries, faults

        found = entries(kind.removesuffix("s"))
        for fault in faults(kind.removesuffix("s")):
            typer.echo(f"note: {fault}", err=True)
        if as_json:
            typer.echo(json.dumps(found, indent=2))
            return
        table = Table.grid(padding=(0, 2))
        for entry in found:
            of = f" ({entry['package']})" if "package" in entry else ""
            table.add_row(entry["name"], f"{entry['description']}{of}")
        console.print(table)

"""`descant show`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from descant.cli.common import AsJson, reporting_errors
from descant.view.terminal import make_console


def show(
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False,
                                        help="An algorithm, dataset, model or partition.")],
    as_json: AsJson = False,
) -> None:
    """Explain an algorithm, dataset, model or partition.

    \b
    Examples:
      descant show pfedme
      descant show dirichlet --json
    """
    with reporting_errors("stopped"):
        from descant.experiment import catalogue

        found = catalogue.find(name)
        if as_json:
            typer.echo(json.dumps(found, indent=2))
            return
        console = make_console()
        for k, entry in enumerate(found):
            if k:
                console.print()
            catalogue.show(console, entry)

"""`descant show`."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from descant.cli.common import reporting
from descant.cli.options import Allow, AsJson, argument


def show(
    name: Annotated[str, argument("NAME", "An algorithm, dataset, model or partition; or your own method, as "
                                             "my_package.methods:MyMethod.")],
    as_json: AsJson = False,
    allow: Allow = None,
) -> None:
    """Explain an algorithm, dataset, model or partition.

    \b
    Examples:
      descant show pfedme
      descant show dirichlet --json
      descant show my_package.methods:MyMethod
    """
    with reporting("stopped") as console:
        from descant.core.import_object import marked
        from descant.core.permit import ran
        from descant.experiment import catalogue
        from descant.view.catalogue import show as show_entry

        found = catalogue.find(marked(name, ran(allow or ())))
        if as_json:
            typer.echo(json.dumps(found, indent=2))
            return
        for k, entry in enumerate(found):
            if k:
                console.print()
            show_entry(console, entry)

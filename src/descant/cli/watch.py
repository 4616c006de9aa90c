"""`descant watch`."""

from __future__ import annotations

from typing import Annotated

import typer

from descant.cli.common import reporting, terminable
from descant.cli.report import Compared


def watch(
    directory: Compared,
    port: Annotated[int | None, typer.Option(
        "--port", metavar="N", min=0, max=65535, show_default=False,
        help="The port to serve on; 0 takes a free one. Default: 8008, or a free one if that is taken."
        )] = None,
) -> None:
    """Show a comparison in the browser while it runs; the page updates itself.

    Only this machine can see it. Ctrl-C stops the page; the comparison goes on.

    \b
    Examples:
      descant watch runs/digits
      descant watch runs/digits --port 9000
    """
    with reporting("stopped watching; the comparison goes on") as console:
        from descant.comparison.page import page_data
        from descant.view.watch import Latest, Watch

        with Watch(Latest(lambda: page_data(directory)), port) as server, terminable():
            console.print(f"watching {directory} at {server.address} (Ctrl-C ends it)", soft_wrap=True)
            server.serve_forever()

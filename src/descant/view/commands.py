"""The commands that show a comparison as a page: `descant report` and `descant watch`.

What they need is imported inside them: help must be instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from descant.cli.terminal import failures_told, make_console, terminable
from descant.errors import UsageError

Compared = Annotated[Path, typer.Argument(metavar="DIR", show_default=False,
                                          help="The directory of the comparison.")]


def register(app: typer.Typer) -> None:
    for command in (report, watch):
        app.command()(command)


def report(
    directory: Compared,
    out: Annotated[Path | None, typer.Option(
        "--out", "-o", metavar="FILE", show_default=False,
        help="Where the page is written. Without it: DIR/report.html.")] = None,
) -> None:
    """Make a page of a comparison: the answer, the table, and charts to look into.

    It is one HTML file that needs no network and nothing beside it: open it, send it, print it.

    \b
    Examples:
      descant report runs/digits
      descant report runs/digits -o digits.html
    """
    with failures_told("stopped; no page was written"):
        place = directory / "report.html" if out is None else out
        if place.is_dir():
            raise UsageError(f"--out {place} is a directory: name a file, such as {place / 'report.html'}")
        if out is not None and not out.parent.is_dir():
            raise UsageError(f"--out {out}: there is no directory {out.parent}; make it first")
        from descant.comparison.page import page_data
        from descant.core.files import write_atomic
        from descant.core.units import size
        from descant.view.page import render

        content = render(page_data(directory))
        write_atomic(place, content)
        make_console().print(f"{place} ({size(len(content))})", soft_wrap=True)


def watch(
    directory: Compared,
    port: Annotated[int | None, typer.Option(
        "--port", metavar="N", min=0, max=65535, show_default=False,
        help="The port to serve on; 0 takes a free one. Without it: 8008, or a free one if that is taken."
        )] = None,
) -> None:
    """Show a comparison in the browser while it runs: the page brings itself up to date.

    Only this machine can see it. Ctrl-C ends the watching; the comparison goes on.

    \b
    Examples:
      descant watch runs/digits
      descant watch runs/digits --port 9000
    """
    with failures_told("stopped watching; the comparison itself is not touched"):
        from descant.comparison.page import page_data
        from descant.view.watch import Latest, Watch

        with Watch(Latest(lambda: page_data(directory)), port) as server, terminable():
            make_console().print(f"watching {directory} at {server.address} (Ctrl-C ends it)", soft_wrap=True)
            server.serve_forever()

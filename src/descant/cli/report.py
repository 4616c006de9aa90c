"""`descant report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from descant.cli.common import reporting_errors
from descant.errors import UsageError
from descant.view.terminal import make_console

Compared = Annotated[Path, typer.Argument(metavar="DIR", show_default=False,
                                          help="The directory of the comparison.")]


def report(
    directory: Compared,
    out: Annotated[Path | None, typer.Option(
        "--out", "-o", metavar="FILE", show_default=False,
        help="Where to write the page. Default: DIR/report.html.")] = None,
) -> None:
    """Make a page of a comparison: the answer, the table and charts.

    It is one HTML file that needs no network: open it, send it, print it.

    \b
    Examples:
      descant report runs/digits
      descant report runs/digits -o digits.html
    """
    with reporting_errors("stopped; no page was written"):
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

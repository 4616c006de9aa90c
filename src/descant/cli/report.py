"""`descant report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from descant.cli.common import reporting
from descant.cli.options import argument

Compared = Annotated[Path, argument("DIR", "The directory of the comparison.")]


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
    with reporting("stopped; no page was written") as console:
        from descant.core.units import size
        from descant.view.comparison import write_page

        path, count = write_page(directory, out)
        console.print(f"{path} ({size(count)})", soft_wrap=True)

"""`descant predict`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from descant.cli.common import Allow, reporting_errors
from descant.core.files import write_atomic
from descant.errors import UsageError
from descant.view.terminal import make_console

if TYPE_CHECKING:
    from rich.console import Console


def predict(
    model: Annotated[Path, typer.Argument(
        metavar="MODEL", show_default=False,
        help="The directory of a model that descant export, personalize or client has written.")],
    data: Annotated[Path, typer.Argument(
        metavar="FILE", show_default=False,
        help="The rows: a CSV, Parquet or NPZ file like those in training; the target may be missing.")],
    out: Annotated[Path | None, typer.Option(
        "--out", metavar="FILE.csv", show_default=False,
        help="Where to write the predictions, one line per row. Default: the screen.")] = None,
    probabilities: Annotated[bool, typer.Option(
        "--probabilities", help="Write the probabilities of all classes.")] = False,
    allow: Allow = None,
) -> None:
    """Predict the rows of a file with a model.

    Rows are preprocessed as the model's manifest says. If the file has the target, the predictions are
    scored.

    \b
    Examples:
      descant predict models/north patients.csv --out predictions.csv
      descant predict descant-north patients.csv --probabilities
    """
    with reporting_errors("stopped; nothing was written"):
        if out is not None and (out.is_dir() or not out.parent.is_dir()):
            raise UsageError(f"--out {out}: name a file, in a directory that exists")
        if out is not None and data.exists() and out.exists() and out.samefile(data):
            raise UsageError(f"--out {out} is the file with the rows: name another")
        from descant.deploy.export.predict import predictions

        found = predictions(model, data, allow=allow or ())
        text = found.table(probabilities)
        if out is None:
            sys.stdout.write(text)
            sys.stdout.flush()
        else:
            write_atomic(out, text.encode())
        if found.y is not None:
            console = make_console(stderr=out is None)
            _show_figures(console, f"on {len(found.y):,} rows", found.figures())
        if out is not None:
            make_console().print(f"predictions: {out}", soft_wrap=True)


def _show_figures(console: Console, heading: str, figures: Mapping[str, float]) -> None:
    from rich import box
    from rich.table import Table

    from descant.core.metric import figure

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column(heading, no_wrap=True)
    table.add_column("", no_wrap=True, justify="right")
    for metric, value in figures.items():
        table.add_row(metric, figure(metric, value))
    console.print(table)

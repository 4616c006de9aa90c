"""`descant predict`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from descant.cli.common import reporting
from descant.cli.options import Allow, argument, option
from descant.core.files import write_atomic
from descant.core.metric import figure
from descant.errors import UsageError
from descant.view.terminal import make_console


def predict(
    model: Annotated[Path, argument(
        "MODEL", "The directory of a model that descant export, personalize or client has written.")],
    data: Annotated[Path, argument(
        "FILE", "The rows: a CSV, Parquet or NPZ file like those in training; the target may be missing.")],
    out: Annotated[Path | None, option(
        "--out", "FILE.csv", "Where to write the predictions, one line per row. Default: the screen."
        )] = None,
    probabilities: Annotated[bool, typer.Option(
        "--probabilities", help="Write the probabilities of all classes.")] = False,
    id: Annotated[str | None, option(
        "--id", "COLUMN", "A column of the table that names the rows; it is written beside the predictions.")
    ] = None,
    allow: Allow = None,
) -> None:
    """Predict the rows of a file with a model.

    Rows are preprocessed as the model's manifest says. If the file has the target, the predictions are
    scored.

    \b
    Examples:
      descant predict models/north patients.csv --out predictions.csv
      descant predict descant-north patients.csv --probabilities --id patient
    """
    with reporting("stopped; nothing was written") as console:
        if out is not None and (out.is_dir() or not out.parent.is_dir()):
            raise UsageError(f"--out {out}: name a file, in a directory that exists")
        if out is not None and out.suffix.lower() != ".csv":
            raise UsageError(f"--out {out}: the predictions are a table: name a file that ends in .csv")
        if out is not None and data.exists() and out.exists() and out.samefile(data):
            raise UsageError(f"--out {out} is the file with the rows: name another")
        from descant.deploy.export.predict import predictions
        from descant.view.tables import table

        found = predictions(model, data, allow=allow or (), id=id)
        text = found.table(probabilities)
        if out is None:
            sys.stdout.write(text)
            sys.stdout.flush()
        else:
            write_atomic(out, text.encode())
        if found.y is not None:
            figures = [[metric, figure(metric, value)] for metric, value in found.figures().items()]
            shown = console if out is not None else make_console(stderr=True)  # predictions are on the screen
            shown.print(table("lr", [f"on {len(found.y):,} rows", ""], figures))
        if out is not None:
            console.print(f"predictions: {out}", soft_wrap=True)

"""`descant init`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from descant.cli.common import reporting
from descant.cli.options import argument, option


def init(
    data: Annotated[str, argument("DATA", "A folder with one CSV or Parquet file per client, or the name of "
                                          "a dataset.")],
    target: Annotated[str | None, option("--target", "COLUMN", "The column to predict.")] = None,
    group: Annotated[str | None, option(
        "--group", "COLUMN", "A column of ids, such as a patient's, whose rows stay in one split.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="A new file.")] = Path(
        "experiment.toml"),
) -> None:
    """Write a first experiment for your data, with comments.

    The schema is guessed from the files: read it, and correct what is wrong.

    \b
    Examples:
      descant init hospitals/data --target disease
      descant init digits -o digits.toml
    """
    with reporting("stopped; nothing was written") as console:
        from descant.core.files import write_atomic
        from descant.data.describe import experiment_for
        from descant.errors import UsageError

        if out.exists():
            raise UsageError(f"--out {out} already exists: choose another name, or remove it")
        if not out.parent.is_dir():
            raise UsageError(f"--out {out}: there is no directory {out.parent}; make it first")
        write_atomic(out, experiment_for(data, target, group, beside=out.parent).encode())
        console.print(f"{out}", soft_wrap=True)

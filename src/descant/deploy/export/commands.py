"""The commands that take models home: `descant export`, `descant predict`, `descant personalize`.

What they need from torch is imported inside them: help must be instant.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from descant.cli.terminal import Allow, DataDir, failures_told, make_console
from descant.core.files import write_atomic
from descant.errors import DescantError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from descant.deploy.export.formats import Format
    from descant.deploy.export.personalize import Newcomer

EVERYBODY = "all"


class Chosen(StrEnum):
    """Which of a run's two kept states."""

    best = "best"
    last = "last"


RunDir = Annotated[Path, typer.Argument(metavar="RUN", show_default=False, help="The directory of the run.")]
WhichRound = Annotated[Chosen, typer.Option(
    "--which", help="The round that is best on validation data (without any: the last), or the last.")]


def register(app: typer.Typer) -> None:
    for command in (export, predict, personalize):
        app.command()(command)


def export(
    run: RunDir,
    to: Annotated[Path, typer.Option("--to", metavar="DIR", show_default=False,
                                     help="Where the models go, each in a directory of its own.")],
    clients: Annotated[list[str] | None, typer.Option(
        "--client", metavar="NAME", show_default=False,
        help="Whose model: a client's name or number, given once for each; or: all.")] = None,
    shared: Annotated[bool, typer.Option(
        "--global", help="The model for all (to DIR/global), where the method has one.")] = False,
    which: WhichRound = Chosen.best,
    torch_export: Annotated[bool, typer.Option(
        "--torch-export", help="Also model.pt2, for PyTorch without descant.")] = False,
    onnx: Annotated[bool, typer.Option(
        "--onnx", help="Also model.onnx, for programs without PyTorch.")] = False,
    allow: Allow = None,
    data_dir: DataDir = None,
) -> None:
    """Write the models of a run as files, with all that is needed to use them.

    Each directory has model.safetensors, the state_dict of an ordinary module, and model.json, which says
    what it is and how rows are treated. Nothing is overwritten, and the run is not changed.

    \b
    Examples:
      descant export runs/pfedme-digits-1 --client 3 --to models
      descant export runs/hospitals --client all --global --to models
      descant export runs/hospitals --client north --to models --onnx
    """
    with failures_told("stopped; the models that are there are whole"):
        if not clients and not shared:
            raise UsageError("whose model? say --client NAME, --client all, or --global")
        from descant.core.units import times
        from descant.deploy.export.export import export_models, find_client, load_run, notes_on
        from descant.deploy.export.formats import require_formats
        from descant.view.progress import counting

        asked: dict[Format, bool] = {"pt2": torch_export, "onnx": onnx}
        formats = [name for name, wanted in asked.items() if wanted]
        require_formats(formats)
        done = load_run(run, allow or ())
        names = done.setup.federation.names
        everybody = EVERYBODY in (clients or ()) and EVERYBODY not in names
        numbers = (range(len(names)) if everybody else
                   dict.fromkeys(find_client(done, client) for client in clients or ()))
        console = make_console()
        with counting(console, len(numbers) + shared, "model") as told:
            made = export_models(done, [*numbers], to, which=which.value, shared=shared, formats=formats,
                                 told=told)
        if len(made.places) == 1:
            console.print(f"model: {made.places[0]}", soft_wrap=True)
        else:
            console.print(f"{times(len(made.places), 'model')} in {to}", soft_wrap=True)
        for note in notes_on(done, which.value):
            console.print(f"note: {note}", soft_wrap=True)
        if made.problems:
            for problem in made.problems[1:]:
                typer.echo(f"error: {problem}", err=True)
            raise DescantError(made.problems[0])


def predict(
    model: Annotated[Path, typer.Argument(
        metavar="MODEL", show_default=False,
        help="The directory of a model: of `descant export`, `descant personalize` or `descant client`.")],
    data: Annotated[Path, typer.Argument(
        metavar="FILE", show_default=False,
        help="The rows: a CSV, Parquet or NPZ file such as the model was trained on; the target may be "
             "missing.")],
    out: Annotated[Path | None, typer.Option(
        "--out", metavar="FILE.csv", show_default=False,
        help="Where the predictions go, a line for each row. Without it: to the screen.")] = None,
    probabilities: Annotated[bool, typer.Option(
        "--probabilities", help="The probability of every class, not only of the predicted one.")] = False,
    allow: Allow = None,
) -> None:
    """Predict the rows of a file with a model.

    Rows are treated as the model's manifest says. Where the file has the target, too, it is said how good the
    predictions are.

    \b
    Examples:
      descant predict models/north patients.csv --out predictions.csv
      descant predict descant-north patients.csv --probabilities
    """
    with failures_told("stopped; nothing was written"):
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
            console = make_console() if out is not None else _beside()
            _show_figures(console, f"on {len(found.y):,} rows", found.figures())
        if out is not None:
            make_console().print(f"predictions: {out}", soft_wrap=True)


def personalize(
    run: RunDir,
    data: Annotated[Path, typer.Option(
        "--data", metavar="FILE", show_default=False,
        help="The newcomer's rows with their targets: a CSV, Parquet or NPZ file such as the run's clients "
             "have.")],
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", show_default=False,
                                             help="Who it is. Without it: as the file is called.")] = None,
    to: Annotated[Path | None, typer.Option(
        "--to", metavar="DIR", show_default=False,
        help="Where the model goes, to DIR/NAME. Without it, only its figures are shown.")] = None,
    which: WhichRound = Chosen.best,
    allow: Allow = None,
    data_dir: DataDir = None,
) -> None:
    """Make a model for a client that was not part of a run, by the method's own rule for newcomers.

    The rows are split, scaled and completed as those of the run's clients were. The model is compared on the
    test rows with training alone, and with the model for all if there is one. The run is not changed.

    \b
    Examples:
      descant personalize runs/hospitals --data west.csv
      descant personalize runs/hospitals --data west.csv --to models
    """
    with failures_told("stopped; nothing was written"):
        from descant.deploy.export.export import (
            load_run,
            make_directory,
            refuse_taken,
            safe_names,
            write_model,
        )
        from descant.deploy.export.personalize import personalized

        done = load_run(run, allow or ())
        called = data.stem if name is None else name
        place = None if to is None else to / safe_names([called])[called]
        refuse_taken([] if place is None else [place])
        newcomer = personalized(done, data, called, which.value)
        console = make_console()
        _show_newcomer(console, newcomer)
        if place is not None:
            make_directory(place.parent)
            problems = write_model(place, *newcomer.made)
            console.print(f"model: {place}", soft_wrap=True)
            if problems:
                raise DescantError(problems[0])


def _show_newcomer(console: Console, newcomer: Newcomer) -> None:
    from descant.core.units import times
    from descant.deploy.export.personalize import wilson
    from descant.view.outcome import show_own

    sizes = newcomer.sizes
    console.print(f"{newcomer.name}: {times(sizes['train'], 'row')} to train on, {sizes['validation']:,} for "
                  f"validation, {sizes['test']:,} to test on", soft_wrap=True)
    show_own(console, newcomer.figures)
    rows, share = sizes["test"], newcomer.figures["personal"].get("accuracy")
    if rows and share is not None:
        low, high = wilson(share, rows)
        console.print(f"{times(rows, 'test row')}: an accuracy of {share:.4f} on so many means one between "
                      f"{low:.2f} and {high:.2f} (95 %); the other figures are as uncertain", soft_wrap=True)
    elif not rows:
        console.print("there are no test rows: what the model is worth is not known", soft_wrap=True)


def _show_figures(console: Console, heading: str, figures: Mapping[str, float]) -> None:
    from rich import box
    from rich.table import Table

    from descant.core.units import figure

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column(heading, no_wrap=True)
    table.add_column("", no_wrap=True, justify="right")
    for metric, value in figures.items():
        table.add_row(metric, figure(metric, value))
    console.print(table)


def _beside() -> Console:
    """Where the predictions go to the screen, everything else is for stderr."""
    from rich.console import Console

    return Console(stderr=True, markup=False, highlight=False, emoji=False)

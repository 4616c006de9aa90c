"""`descant export`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from descant.cli.common import reporting
from descant.cli.options import Allow, DataDir, argument, option
from descant.errors import DescantError, UsageError

if TYPE_CHECKING:
    from descant.deploy.export.formats import Format
    from descant.experiment.run import Run

ALL = "all"
RunDir = Annotated[Path, argument("RUN", "The directory of the run.")]
WhichRound = Annotated[Literal["best", "last"], typer.Option(
    "--which", help="The round that is best on validation data (without any: the last), or the last.")]


def load_run(place: Path, allow: Sequence[str] | None = None) -> Run:
    """The run in a directory, also of a remote federation, to be read only."""
    from descant.deploy.export.export import refuse_no_run
    from descant.deploy.protocol import federation_run, load_federation_run
    from descant.experiment import run as runs

    refuse_no_run(place)
    if (remote := federation_run(place)) is not None:
        return load_federation_run(remote, allow or ())
    return runs.load(place, allow=allow or ())


def export(
    run: RunDir,
    to: Annotated[Path, option("--to", "DIR", "Where to write the models, each in a directory of its own.")],
    clients: Annotated[list[str] | None, option(
        "--client", "NAME", "A client's name or number, once for each; or: all.")] = None,
    shared: Annotated[bool, typer.Option(
        "--global", help="The global model (to DIR/global), if the method has one.")] = False,
    which: WhichRound = "best",
    torch_export: Annotated[bool, typer.Option(
        "--torch-export", help="Also model.pt2, for PyTorch without descant.")] = False,
    onnx: Annotated[bool, typer.Option(
        "--onnx", help="Also model.onnx, for programs without PyTorch.")] = False,
    card: Annotated[bool, typer.Option(
        "--card", help="Also README.md, a model card for the Hugging Face Hub, and config.json.")] = False,
    allow: Allow = None,
    data_dir: DataDir = None,
) -> None:
    """Write the models of a run as files, with all that is needed to use them.

    Each directory has model.safetensors, the state_dict of an ordinary module, and model.json, which
    describes the model and its preprocessing. Nothing is overwritten, and the run is not changed.

    \b
    Examples:
      descant export runs/pfedme-digits-1 --client 3 --to models
      descant export runs/hospitals --client all --global --to models
      descant export runs/hospitals --client north --to models --onnx --card
    """
    with reporting("stopped; the models written so far are complete") as console:
        if not clients and not shared:
            raise UsageError("whose model? use --client NAME, --client all, or --global")
        from descant.core.units import times
        from descant.deploy.export.export import export_models, find_client, notes_on
        from descant.deploy.export.formats import require_formats
        from descant.view.progress import counting

        asked: dict[Format, bool] = {"pt2": torch_export, "onnx": onnx}
        formats = [name for name, wanted in asked.items() if wanted]
        require_formats(formats)
        done = load_run(run, allow)
        names = done.setup.federation.names
        everybody = ALL in (clients or ()) and ALL not in names
        numbers = (range(len(names)) if everybody else
                   dict.fromkeys(find_client(done, client) for client in clients or ()))
        with counting(console, len(numbers) + shared, "model") as report:
            made = export_models(done, [*numbers], to, which=which, shared=shared, formats=formats,
                                 card=card, report=report)
        if len(made.places) == 1:
            console.print(f"model: {made.places[0]}", soft_wrap=True)
        else:
            console.print(f"{times(len(made.places), 'model')} in {to}", soft_wrap=True)
        for note in notes_on(done, which):
            console.print(f"note: {note}", soft_wrap=True)
        if made.problems:
            for problem in made.problems[1:]:
                typer.echo(f"error: {problem}", err=True)
            raise DescantError(made.problems[0])

"""The command line. What it needs from torch is imported inside the commands: help must be instant."""

from __future__ import annotations

import io
import itertools
import json
import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from descant import __version__
from descant.cli.terminal import Allow, DataDir, Settings, failures_told, make_console, show_imports
from descant.comparison import commands as comparison
from descant.core.files import write_atomic
from descant.deploy import commands as federation
from descant.deploy.export import commands as handover
from descant.errors import DescantError, UsageError
from descant.view import commands as reports

# Typer up to 0.20, which Flower holds us to, else marks the brackets in its help as if it were markup
typer.core.HAS_RICH = False
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # help and messages hold brackets, such as [data], that are no markup
    pretty_exceptions_enable=False,
)
data = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data, name="data")
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Profiled = Annotated[bool, typer.Option(
    "--profile", help="Say where the time of the rounds went: sampling, batches, local work and so on.")]


class Kind(StrEnum):
    """The registries, as `descant list` calls them."""

    algorithms = "algorithms"
    datasets = "datasets"
    models = "models"
    partitions = "partitions"


def main() -> None:
    """The entry point of the console script."""
    for stream in (sys.stdout, sys.stderr):
        # a terminal that lacks a letter of an author's name is no reason to fail
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    app(prog_name="descant")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"descant {__version__}")
        raise typer.Exit


@app.callback()
def descant(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True,
                                          help="Print the version and exit.")] = False,
) -> None:
    """Personalized federated learning: clients learn together, and each gets a model of its own.

    \b
    Start with an example, twelve hospitals with made-up patients:
      descant example hospitals
      descant run hospitals/experiment.toml
    Compare methods, and look at the result:
      descant compare hospitals/experiment.toml --algorithms fedavg,ditto,pfedme --out results/mine
    See what else there is:
      descant list algorithms
      descant show pfedme
    Look at the data of an experiment, and how strongly to personalize on it:
      descant data show experiment.toml
      descant advise experiment.toml
    Run it for real, with the data of each client on its own machine:
      descant certificates, descant server, descant client
    """
    show_imports()


@app.command()
def example(
    directory: Annotated[Path, typer.Argument(
        metavar="DIR", help="A new directory.")] = Path("hospitals"),
) -> None:
    """Write an example to begin with: an experiment, and the tables of twelve hospitals.

    The patients are made up. Beside experiment.toml and data/ there are two files that no training sees:
    new.csv, patients to predict, and west.csv, the patients of a hospital that comes later.

    \b
    Examples:
      descant example hospitals
      descant run hospitals/experiment.toml
    """
    with failures_told("stopped; the example is not complete"):
        from descant.data.hospitals import write_example

        write_example(directory)
        make_console().print(f"{directory / 'experiment.toml'}", soft_wrap=True)


@app.command()
def run(
    file: Annotated[Path | None, typer.Argument(
        metavar="FILE", show_default=False,
        help="The experiment, a TOML file with the sections [data], [model], [algorithm], [train] and "
             "[eval]. Without it: the demo, pFedMe on handwritten digits.")] = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(
        "--out", metavar="DIR", show_default=False,
        help="Where the run is kept; must be new or empty. Without it: "
             "runs/<algorithm>-<dataset>-<n>.")] = None,
    profile: Profiled = False,
    allow: Allow = None,
    data_dir: DataDir = None,
) -> None:
    """Run an experiment, and keep its figures and models in a directory.

    The state is saved after every round: a run that was stopped goes on with `descant resume`.

    \b
    Examples:
      descant run
      descant run --set algorithm.name=ditto --set algorithm.lam=0.5
      descant run experiment.toml --set train.rounds=200 --out runs/long
    """
    with failures_told("stopped before the first round"):
        from descant.core.permit import ran
        from descant.experiment import config, directory
        from descant.experiment import run as runs
        from descant.view.progress import Progress
        from descant.view.tables import show_profile, show_summary

        console = make_console()
        if out is not None:
            directory.require_free(out)  # told before the data is made
        tables = config.DEMO if file is None else config.read_toml(file)
        experiment = config.Experiment.parse(config.override(tables, settings or ()), ran(allow or ()))
        if file is None:
            console.print("no FILE given: this is the demo experiment", soft_wrap=True)
        setup = runs.Setup.of(experiment)
        stem = f"{experiment.algorithm.name}-{experiment.data.dataset.name}"
        with _place(out, stem) as place, Progress(console) as progress:
            done = runs.start(setup, place, progress)
        show_summary(console, done.summary, done.directory)
        if profile:
            show_profile(console, done.stopwatch)
        _require_result(done.summary)


@app.command()
def resume(
    directory: Annotated[Path, typer.Argument(metavar="DIR", show_default=False,
                                              help="The directory of the run.")],
    rounds: Annotated[int | None, typer.Option(
        "--rounds", metavar="N", show_default=False,
        help="Extend the run to N rounds in all. Without it: as planned.")] = None,
    profile: Profiled = False,
    allow: Allow = None,
    data_dir: DataDir = None,
) -> None:
    """Continue a run that was stopped, or extend one that is finished.

    The result is the same, bit for bit, as if the run had never been stopped. (An extended run has also
    been evaluated after what was its last round before.)

    \b
    Examples:
      descant resume runs/pfedme-digits-1
      descant resume runs/pfedme-digits-1 --rounds 200
    """
    with failures_told("stopped before the next round"):
        from descant.experiment import run as runs
        from descant.view.progress import Progress
        from descant.view.tables import show_profile, show_summary

        console = make_console()
        with Progress(console) as progress:
            done = runs.resume(directory, rounds=rounds, observer=progress, allow=allow or ())
        show_summary(console, done.summary, done.directory)
        if profile:
            show_profile(console, done.stopwatch)
        _require_result(done.summary)


comparison.register(app)
reports.register(app)  # report, watch
handover.register(app)  # export, predict, personalize
federation.register(app)  # certificates, server, client


@app.command()
def advise(
    file: Annotated[Path | None, typer.Argument(
        metavar="FILE", show_default=False,
        help="The experiment, a TOML file; of its method, weight decay and cost count. Without it: the demo."
        )] = None,
    settings: Settings = None,
    clients: Annotated[int, typer.Option("--clients", metavar="N", min=2,
                                         help="How many clients to ask, at most.")] = 20,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1,
                                       help="How long each of them fits a model of its own, at most.")] = 300,
    ridge: Annotated[float | None, typer.Option(
        "--ridge", metavar="X", show_default=False,
        help="Ridge of these models. Without it: the weight decay of the experiment, or if it has none, one "
             "by the number of rows of a client.")] = None,
    cap: Annotated[float, typer.Option("--cap", metavar="X", help="The largest lambda.")] = 100.0,
    eps: Annotated[float, typer.Option(
        "--eps", metavar="X", help="Share of the squared error that may be left in the end.")] = 0.01,
    as_json: AsJson = False,
    allow: Allow = None,
    data_dir: DataDir = None,
) -> None:
    """Say how strongly to personalize, and why.

    Some clients fit a model of their own. From how far these lie apart, and how sure each of them is,
    follow the heterogeneity of the federation and, by the theory of one-stage FedProx, the strength lambda
    of the pull to the common model, step sizes, and how many rounds that takes. The settings to follow spend
    no more gradient steps than the experiment.

    \b
    Examples:
      descant advise
      descant advise experiment.toml --clients 50
      descant advise experiment.toml --set model.name=dnn --json
    """
    with failures_told("stopped"):
        for name, value, top in (("ridge", ridge, math.inf), ("cap", cap, math.inf), ("eps", eps, 1)):
            if value is not None and not 0 < value < top:  # told before the clients are asked
                raise UsageError(f"--{name} must be greater than 0 and less than {top:g}, not {value:g}")
        from descant.core.permit import ran
        from descant.experiment import config
        from descant.experiment.advise import ask, recommend, spent
        from descant.view.advice import show_advice
        from descant.view.progress import counting

        tables = config.DEMO if file is None else {
            "algorithm": config.DEMO["algorithm"], **config.read_toml(file)}
        experiment = config.Experiment.parse(config.override(tables, settings or ()), ran(allow or ()))
        console = make_console()
        if file is None and not as_json:
            console.print("no FILE given: this is the demo experiment", soft_wrap=True)
        with ExitStack() as stack:
            found = ask(experiment, clients=clients, steps=steps, ridge=ridge,
                        begin=lambda count: stack.enter_context(counting(console, count, "client")))
        advice = recommend(found, cap=cap, eps=eps, budget=spent(experiment))
        if as_json:
            typer.echo(json.dumps(advice.dump(), indent=2))
        else:
            show_advice(console, advice)


@app.command(name="list")
def list_entries(
    kind: Annotated[Kind, typer.Argument(metavar="KIND", show_default=False,
                                         help="What to list: algorithms, datasets, models or partitions.")],
    as_json: AsJson = False,
) -> None:
    """List what an experiment can be made of, one line each.

    \b
    Examples:
      descant list algorithms
      descant list datasets --json
    """
    with failures_told("stopped"):
        from rich.table import Table

        from descant.experiment.catalogue import entries

        found = entries(kind.value.removesuffix("s"))
        if as_json:
            typer.echo(json.dumps(found, indent=2))
            return
        table = Table.grid(padding=(0, 2))
        for entry in found:
            table.add_row(entry["name"], entry["description"])
        make_console().print(table)


@app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False,
                                        help="An algorithm, dataset, model or partition.")],
    as_json: AsJson = False,
) -> None:
    """Explain an algorithm, dataset, model or partition.

    \b
    Examples:
      descant show pfedme
      descant show dirichlet --json
    """
    with failures_told("stopped"):
        from descant.experiment import catalogue

        found = catalogue.find(name)
        if as_json:
            typer.echo(json.dumps(found, indent=2))
            return
        console = make_console()
        for k, entry in enumerate(found):
            if k:
                console.print()
            catalogue.show(console, entry)


@data.callback()
def about_data() -> None:
    """List the datasets, and look at the federation of an experiment."""


@data.command(name="list")
def list_data(as_json: AsJson = False, data_dir: DataDir = None) -> None:
    """List the datasets with their clients and rows, and say whether their files are there.

    Nothing is loaded or downloaded for this.

    \b
    Examples:
      descant data list
      descant data list --data-dir /srv/data --json
    """
    with failures_told("stopped"):
        from descant.view.data import list_datasets, show_datasets

        found = list_datasets()
        if as_json:
            typer.echo(json.dumps(found, indent=2))
        else:
            show_datasets(make_console(), found)


@data.command(name="show")
def show_data(
    file: Annotated[Path | None, typer.Argument(
        metavar="FILE", show_default=False,
        help="The experiment, a TOML file; a section [data] is enough. Without it: the demo.")] = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(
        "--out", metavar="PICTURE.png", show_default=False,
        help="Where the picture is kept; replaces a file of that name. Without it: data.png (or data-2.png, "
             "and so on) next to FILE, and here for the demo.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Show the clients of an experiment: sizes, classes, splits, and how much they differ.

    Figures and a sketch are printed, and a picture is drawn.

    \b
    Examples:
      descant data show
      descant data show experiment.toml --set data.partition=dirichlet --set data.alpha=0.1
      descant data show experiment.toml --out clients.png
    """
    with failures_told("stopped"):
        if out is not None and (out.suffix.lower() != ".png" or not out.parent.is_dir()):
            raise UsageError(f"--out {out}: name a file that ends in .png, in a directory that exists")
        from descant.data.heterogeneity import measure
        from descant.experiment import config
        from descant.view.data import show_federation
        from descant.view.data_picture import draw_federation

        tables = config.DEMO if file is None else {
            "algorithm": config.DEMO["algorithm"], **config.read_toml(file)}
        experiment = config.Experiment.parse(config.override(tables, settings or ()))
        console = make_console()
        if file is None:
            console.print("no FILE given: this is the demo experiment", soft_wrap=True)
        federation = experiment.data.federation()
        measured = measure(federation)
        show_federation(console, federation, measured)
        place = _keep(draw_federation(federation, measured), out, Path() if file is None else file.parent)
        console.print(f"picture: {place}", soft_wrap=True)


def _keep(picture: bytes, out: Path | None, base: Path) -> Path:
    """Write a picture where the user says, or as the first of data.png, data-2.png, ... that is free."""
    if out is not None:
        write_atomic(out, picture)
        return out
    for name in itertools.chain(["data.png"], (f"data-{n}.png" for n in itertools.count(2))):
        with suppress(FileExistsError), (base / name).open("xb") as file:
            file.write(picture)
            return base / name
    raise AssertionError  # numbers do not end


def _require_result(summary: dict[str, Any]) -> None:
    """A run whose models have diverged has failed, though its directory is whole; one that was well when its
    best round was chosen, or is for most clients, is told about."""
    from descant.engine.divergence import whose

    last, best, divergence = summary["last"], summary["best"], summary["divergence"]
    why = "" if divergence is None else f"; {divergence['words'].partition('; ')[2]}"
    if summary["diverged"]:
        chosen = best or last
        raise DescantError(f"{whose(chosen['personal'])} diverged (round {chosen['round']}): there is no "
                           f"result{why}")
    if last is not None and last["personal"]["diverged"]:
        chosen = "" if best is None else "; figures and models are those of the best round"
        typer.echo(f"warning: in the last round {whose(last['personal'])} diverged{chosen}{why}", err=True)


@contextmanager
def _place(out: Path | None, stem: str) -> Iterator[Path]:
    """Where a new run is kept: as the user says, or the first free number in runs/.

    A numbered directory is made at once, so that two runs started together do not choose the same; it
    is removed again if nothing comes of it.
    """
    if out is not None:
        yield out
        return
    base = Path("runs")
    try:
        base.mkdir(exist_ok=True)
        place = _next_number(base, stem)
    except OSError as error:
        raise DescantError(f"cannot write to {base}: {error.strerror}; choose another --out") from None
    try:
        yield place
    finally:
        with suppress(OSError):  # not empty: it holds a run
            place.rmdir()
            base.rmdir()


def _next_number(base: Path, stem: str) -> Path:
    taken = [path.name.removeprefix(f"{stem}-") for path in base.glob(f"{stem}-*")]
    number = 1 + max((int(n) for n in taken if n.isdecimal()), default=0)
    while True:
        try:
            place = base / f"{stem}-{number}"
            place.mkdir()
            return place
        except FileExistsError:  # taken in the meantime
            number += 1

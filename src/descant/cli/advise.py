"""`descant advise`."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from descant.cli.common import read_tables, reporting, say_demo
from descant.cli.options import Allow, AsJson, DataDir, Settings, argument, option
from descant.errors import UsageError


def advise(
    file: Annotated[Path | None, argument(
        "FILE", "The experiment, a TOML file; of its method, weight decay and cost count. Default: the demo."
        )] = None,
    settings: Settings = None,
    clients: Annotated[int, typer.Option("--clients", metavar="N", min=2,
                                         help="How many clients to ask, at most.")] = 20,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1,
                                       help="How long each of them fits a model of its own, at most.")] = 300,
    ridge: Annotated[float | None, option(
        "--ridge", "X", "Ridge of these models. Default: the weight decay of the experiment, or else one by "
                        "a client's number of rows.")] = None,
    cap: Annotated[float, typer.Option("--cap", metavar="X", help="The largest lambda.")] = 100.0,
    eps: Annotated[float, typer.Option(
        "--eps", metavar="X", help="Share of the squared error that may be left in the end.")] = 0.01,
    as_json: AsJson = False,
    allow: Allow = None,
    data_dir: DataDir = None,
) -> None:
    """Recommend how strongly to personalize, and explain why.

    Some clients fit a model of their own. The distances between these models and their uncertainty give the
    heterogeneity of the federation. The theory of one-stage FedProx turns it into the strength lambda of the
    pull to the common model, step sizes and a number of rounds. The recommended settings spend no more
    gradient steps than the experiment. Beside them stands what was seen in studied federations with about as
    many rows and this heterogeneity, or that it is not known. With a [privacy] section, it says what epsilon
    the sites can hope for.

    \b
    Examples:
      descant advise
      descant advise experiment.toml --clients 50
      descant advise experiment.toml --set model.name=dnn --json
    """
    with reporting("stopped") as console:
        for name, value, top in (("ridge", ridge, math.inf), ("cap", cap, math.inf), ("eps", eps, 1)):
            if value is not None and not 0 < value < top:  # before the clients are asked
                raise UsageError(f"--{name} must be greater than 0 and less than {top:g}, not {value:g}")
        from descant.core.permit import ran
        from descant.experiment.advise import ask, recommend, spent
        from descant.experiment.config import Experiment
        from descant.experiment.site_privacy import sites
        from descant.view.advice import show_advice, show_privacy
        from descant.view.progress import counting

        experiment = Experiment.parse(read_tables(file, settings, with_algorithm=True), ran(allow or ()))
        if not as_json:
            say_demo(console, file)
        with ExitStack() as stack:
            found = ask(experiment, clients=clients, steps=steps, ridge=ridge,
                        begin=lambda count: stack.enter_context(counting(console, count, "client")))
        advice = recommend(found, cap=cap, eps=eps, budget=spent(experiment))
        found_sites = [] if experiment.privacy is None else sites(experiment)
        if as_json:
            told = {"privacy": [site._asdict() for site in found_sites]} if found_sites else {}
            typer.echo(json.dumps(advice.dump() | told, indent=2))
        else:
            show_advice(console, advice)
            show_privacy(console, found_sites)

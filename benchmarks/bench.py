"""How fast descant is on this machine: `python -m benchmarks.bench [--quick]`, or `make bench`.

The same rounds (20 of 100 clients, Fashion-MNIST or random data of its shape) are trained by a lean PyTorch
loop without a framework, by descant's backends, and by nothing but the matrix products they need on all
cores: the floor. That all of them do the same work is checked first, and they take turns, so that noise hits
all alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.speed.command import bench as measure
from descant.cli.common import reporting
from descant.cli.options import DataDir

app = typer.Typer(rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False)


@app.command()
def bench(
    quick: Annotated[bool, typer.Option("--quick", help="Less of everything, in under a minute.")] = False,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where to write bench.json and bench.png; "
                                      "replaces existing ones.")] = Path("runs/bench"),
    methods: Annotated[str | None, typer.Option(
        "--methods", metavar="NAME,...", show_default=False,
        help="Of fedavg, pfedme and mh. Default: all.")] = None,
    models: Annotated[str | None, typer.Option(
        "--models", metavar="NAME,...", show_default=False,
        help="Of mclr, dnn and cnn2. Default: all.")] = None,
    backends: Annotated[str | None, typer.Option(
        "--backends", metavar="NAME,...", show_default=False,
        help="As in train.backend. Default: loop (but not with --quick), vectorised, processes and auto."
        )] = None,
    repetitions: Annotated[int | None, typer.Option(
        "--repetitions", metavar="N", min=1, show_default=False,
        help="How often each side takes its turn. Default: 5, or 3 with --quick.")] = None,
    no_growth: Annotated[bool, typer.Option(
        "--no-growth", help="Leave out how cost grows with clients, cohort and model.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Measure how fast descant is here, beside a hand-written PyTorch loop and beside the bare arithmetic.

    Without --quick this takes about twenty minutes on two cores, and also shows how cost grows with clients,
    cohort and model.
    """
    with reporting("stopped: nothing is written") as console:
        measure(console, quick=quick, out=out, methods=methods, models=models, backends=backends,
                repetitions=repetitions, no_growth=no_growth)


if __name__ == "__main__":
    app()

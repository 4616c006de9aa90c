"""How fast descant is on this machine: `python -m benchmarks.bench`, or `make bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.speed.command import bench
from descant.cli.terminal import DataDir, failures_told, make_console

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def main(
    quick: Annotated[bool, typer.Option("--quick", help="Less of everything, in under a minute.")] = False,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where bench.json and bench.png are kept; "
                                      "replaces those of before.")] = Path("runs/bench"),
    methods: Annotated[str | None, typer.Option(
        "--methods", metavar="NAME,...", show_default=False,
        help="Of fedavg, pfedme and mh. Without it: all.")] = None,
    models: Annotated[str | None, typer.Option(
        "--models", metavar="NAME,...", show_default=False,
        help="Of mclr, dnn and cnn2. Without it: all.")] = None,
    backends: Annotated[str | None, typer.Option(
        "--backends", metavar="NAME,...", show_default=False,
        help="As in train.backend. Without it: loop (but not with --quick), vectorised, processes and auto."
        )] = None,
    repetitions: Annotated[int | None, typer.Option(
        "--repetitions", metavar="N", min=1, show_default=False,
        help="How often each side takes its turn. Without it: 5, or 3 with --quick.")] = None,
    no_growth: Annotated[bool, typer.Option(
        "--no-growth", help="Leave out how cost grows with clients, cohort and model.")] = False,
    data_dir: DataDir = None,
) -> None:
    """Measure how fast descant is here, beside a hand-written PyTorch loop and beside the bare arithmetic.

    The same rounds (20 of 100 clients, Fashion-MNIST or random data of its shape) are trained by a lean loop
    without a framework, by descant's backends, and by nothing but the matrix products that they take on all
    cores: the floor. That all of them do the same work is checked first, and they take turns, so that noise
    hits all alike. Without --quick this takes about ten minutes on two cores, and shows too how cost grows
    with clients, cohort and model.

    \b
    Examples:
      python -m benchmarks.bench --quick
      python -m benchmarks.bench --models mclr,dnn --methods pfedme --repetitions 11 --out runs/bench-pfedme
    """
    with failures_told("stopped: nothing is written"):
        bench(make_console(), quick=quick, out=out, methods=methods, models=models, backends=backends,
                repetitions=repetitions, no_growth=no_growth)


if __name__ == "__main__":
    app()

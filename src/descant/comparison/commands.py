"""`descant compare`."""

from __future__ import annotations

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from descant.errors import DescantError, UsageError
from descant.terminal import Allow, DataDir, Settings, failures_told, make_console


class Matched(StrEnum):
    """What the methods of a comparison have in common."""

    steps = "steps"
    rounds = "rounds"


def register(app: typer.Typer) -> None:
    app.command()(compare)


def compare(
    file: Annotated[Path, typer.Argument(
        metavar="FILE", show_default=False,
        help="The experiment, a TOML file; its [algorithm] and [[algorithms]] are compared, unless "
             "--algorithms names others.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", show_default=False,
                                      help="Where the runs and the results are kept.")],
    algorithms: Annotated[str | None, typer.Option(
        "--algorithms", metavar="NAME,NAME:FIELD=VALUE,...", show_default=False,
        help="What to compare. A list of values, as in pfedbred:lam=[15,30,60], makes a grid.")] = None,
    seeds: Annotated[str, typer.Option("--seeds", metavar="N,N,...",
                                       help="Repeat everything with each of these seeds.")] = "0,1,2",
    jobs: Annotated[int, typer.Option("--jobs", metavar="N", min=1, help="Runs at the same time.")] = 1,
    match: Annotated[Matched, typer.Option(
        "--match", help="What all methods get the same number of: gradient steps, as the file's [algorithm] "
                        "makes in its rounds, or rounds.")] = Matched.steps,
    trials: Annotated[int, typer.Option(
        "--tune", metavar="N", min=0, show_default=False,
        help="Search each method's hyper-parameters by validation first, with so many trials.")] = 0,
    metric: Annotated[str | None, typer.Option(
        "--metric", metavar="NAME", show_default=False,
        help="What decides, such as balanced_accuracy or auroc. Without it: accuracy, or the loss.")] = None,
    baselines: Annotated[bool, typer.Option(
        "--baselines/--no-baselines", help="Add LocalTrain and FedAvg with fine-tuning, if they are "
                                           "missing.")] = True,
    settings: Settings = None,
    allow: Allow = None,
    data_dir: DataDir = None,
) -> None:
    """Compare methods on the same federation: which is best, and is the difference real?

    All methods get the same clients, initial models, cohorts and budget, and are selected by validation
    data. The table is printed and kept as results.csv, with a report to look at. The same command again
    does only what is missing; other methods and seeds can be added.

    \b
    Examples:
      descant compare experiment.toml --algorithms fedavg,ditto,pfedbred:strategy=mh,lam=15 --out results/mine
      descant compare experiment.toml --algorithms "pfedme:lam=[5,15,30]" --seeds 0,1,2,3,4 --out results/lam
      descant compare experiments/pfedbred.toml --out results/pfedbred --jobs 2 --tune 20
    """
    with failures_told("stopped; the same command again does what is missing"):
        from descant.comparison import carry_out as doing
        from descant.comparison import plan as planning
        from descant.comparison import results as outcome
        from descant.comparison.page import page_data
        from descant.experiment import config
        from descant.files import write_atomic
        from descant.permit import ran
        from descant.report.comparison import draw_comparison, show_comparison
        from descant.report.comparison_progress import Watching
        from descant.report.page import render

        tables = config.override(config.read_toml(file), settings or ())
        console, numbers = make_console(), _numbers(seeds)
        with planning.held(out):
            plan, labels = planning.make(
                tables, out, numbers, algorithms=algorithms, match=match.value, metric=metric,
                baselines=baselines, command=shlex.join(["descant", *sys.argv[1:]]),
                permit=ran(allow or ()))
            if trials:
                searches = doing.searches(plan, labels, trials, jobs)
                with Watching(console, searches) as display:
                    for label, found in doing.search(searches, jobs, display).items():
                        plan = plan.tuned(label, found.values)
                        plan.write()
            planned = plan.runs(labels, numbers, jobs=jobs)
            with Watching(console, planned) as display:
                failed = doing.carry_out(plan, planned, jobs, display)
            results = outcome.read(plan)
            if results.rows:
                outcome.write_csv(results, out / "results.csv")
                data = page_data(out)
                draw_comparison(data, out / "comparison.png")
                write_atomic(out / "report.html", render(data))
                show_comparison(console, results)
                for name in ("results.csv", "comparison.png", "report.html"):
                    console.print(f"{out / name}", soft_wrap=True)
        if failed:
            raise DescantError("; ".join(f"{run.label} with seed {run.seed} failed: {why}"
                                         for run, why in failed))


def _numbers(seeds: str) -> list[int]:
    try:
        return [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise UsageError(f"--seeds {seeds!r} must be whole numbers with commas, such as 0,1,2") from None

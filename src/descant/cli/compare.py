"""`descant compare`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from descant.cli.common import reporting
from descant.cli.options import Allow, DataDir, Settings, Track, argument, option
from descant.errors import UsageError


def compare(
    file: Annotated[Path, argument(
        "FILE", "The experiment, a TOML file; its [algorithm] and [[algorithms]] are compared, unless "
                "--algorithms names others.")],
    out: Annotated[Path, option("--out", "DIR", "Where the runs and the results are kept.")],
    algorithms: Annotated[str | None, option(
        "--algorithms", "NAME,NAME:FIELD=VALUE,...",
        "What to compare. A list of values, as in pfedbred:lam=[15,30,60], makes a grid.")] = None,
    seeds: Annotated[str, typer.Option("--seeds", metavar="N,N,...",
                                       help="Repeat everything with each of these seeds.")] = "0,1,2,3,4",
    until_decided: Annotated[bool, typer.Option(
        "--until-decided", help="Add repetitions until every difference from the best method is settled, or "
                                "no number of them would settle it; at most 30.")] = False,
    splits: Annotated[Literal["repeated", "folds", "fixed"] | None, option(
        "--splits", None, "Which rows a repetition tests: those of its own split, those of a fold of a "
                          "cross-validation, or the same in all. Default: repeated.")] = None,
    jobs: Annotated[int, typer.Option("--jobs", metavar="N", min=1, help="Runs at the same time.")] = 1,
    budget: Annotated[Literal["steps", "rounds", "converge"], typer.Option(
        "--budget", help="The budget of every method: the gradient steps that the file's [algorithm] takes "
                         "in its rounds; the same number of rounds; or training until the validation figures "
                         "no longer improve.")] = "steps",
    trials: Annotated[int, option(
        "--tune", "N", "Search each method's hyper-parameters by validation first, with N trials.",
        min=0)] = 0,
    metric: Annotated[str | None, option(
        "--metric", "NAME",
        "The metric that decides and selects rounds: accuracy, balanced_accuracy, auroc, loss, mse or "
        "r2. Default: accuracy, balanced_accuracy where classes are unbalanced, or loss.")] = None,
    population: Annotated[Literal["rows", "clients", "new-clients"] | None, option(
        "--population", None, "What the answer is about: these test rows, new rows of these clients, or new "
                              "clients like these. Default: clients.")] = None,
    baselines: Annotated[bool, typer.Option(
        "--baselines/--no-baselines", help="Add LocalTrain and FedAvg with fine-tuning, if they are "
                                           "missing.")] = True,
    track: Track = None,
    settings: Settings = None,
    allow: Allow = None,
    data_dir: DataDir = None,
) -> None:
    """Compare methods on the same federation: which is best, and is the difference real?

    All methods get the same clients, splits, initial models, cohorts and budget, and are selected by
    validation data. The table is printed and kept as results.csv, with a report to look at. Rerun the same
    command to finish what is missing; other methods and seeds can be added.

    \b
    Examples:
      descant compare experiment.toml --algorithms fedavg,ditto,pfedbred:strategy=mh,lam=15 --out results/mine
      descant compare experiment.toml --algorithms "pfedme:lam=[5,15,30]" --until-decided --out results/lam
      descant compare experiments/pfedbred.toml --out results/pfedbred --jobs 2 --tune 20
    """
    with reporting("stopped; rerun the same command to finish") as console:
        from descant.comparison.conduct import CompareOptions, conduct, require_no_failures
        from descant.comparison.results import read
        from descant.core.permit import ran
        from descant.experiment import config
        from descant.view.comparison import draw, show_comparison
        from descant.view.progress import Shown

        tables = config.override(config.read_toml(file), settings or ())
        asked = CompareOptions(
            algorithms, _numbers(seeds), until_decided, splits, jobs, budget, trials, metric,
            "new clients" if population == "new-clients" else population, baselines,
            shlex.join(["descant", *sys.argv[1:]]), track or ())
        plan, failed = conduct(tables, out, asked, ran(allow or ()), Shown(console), draw)
        results = read(plan)
        if results.rows:
            show_comparison(console, results)
            for name in ("results.csv", "comparison.png", "report.html"):
                console.print(f"{out / name}", soft_wrap=True)
        require_no_failures(failed)


def _numbers(seeds: str) -> list[int]:
    try:
        return [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise UsageError(f"--seeds {seeds!r} must be whole numbers with commas, such as 0,1,2") from None

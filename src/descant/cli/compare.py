"""`descant compare`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from descant.cli.common import Allow, DataDir, Settings, reporting_errors
from descant.errors import DescantError, UsageError
from descant.view.terminal import make_console


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
                                       help="Repeat everything with each of these seeds.")] = "0,1,2,3,4",
    until_decided: Annotated[bool, typer.Option(
        "--until-decided", help="Add repetitions until every difference from the best method is settled, or "
                                "no number of them would settle it; at most 30.")] = False,
    splits: Annotated[Literal["repeated", "folds", "fixed"] | None, typer.Option(
        "--splits", show_default=False,
        help="Which rows a repetition tests: those of its own split, those of a fold of a cross-validation, "
             "or the same in all. Default: repeated.")] = None,
    jobs: Annotated[int, typer.Option("--jobs", metavar="N", min=1, help="Runs at the same time.")] = 1,
    budget: Annotated[Literal["steps", "rounds", "converge"], typer.Option(
        "--budget", help="The budget of every method: the gradient steps that the file's [algorithm] takes "
                         "in its rounds; the same number of rounds; or training until the validation figures "
                         "no longer improve.")] = "steps",
    trials: Annotated[int, typer.Option(
        "--tune", metavar="N", min=0, show_default=False,
        help="Search each method's hyper-parameters by validation first, with N trials.")] = 0,
    metric: Annotated[str | None, typer.Option(
        "--metric", metavar="NAME", show_default=False,
        help="The metric that decides and selects rounds: accuracy, balanced_accuracy, auroc, loss, mse or "
             "r2. Default: accuracy, balanced_accuracy where classes are unbalanced, or loss.")] = None,
    population: Annotated[Literal["rows", "clients", "new-clients"] | None, typer.Option(
        "--population", show_default=False,
        help="What the answer is about: these test rows, new rows of these clients, or new clients like "
             "these. Default: clients.")] = None,
    baselines: Annotated[bool, typer.Option(
        "--baselines/--no-baselines", help="Add LocalTrain and FedAvg with fine-tuning, if they are "
                                           "missing.")] = True,
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
    with reporting_errors("stopped; rerun the same command to finish"):
        from descant.comparison import execute, outlook
        from descant.comparison.make import make
        from descant.comparison.page import page_data
        from descant.comparison.plan import held
        from descant.comparison.results import read, write
        from descant.core.files import write_atomic
        from descant.core.metric import title
        from descant.core.permit import ran
        from descant.core.units import duration, times
        from descant.experiment import config
        from descant.view.comparison import draw_comparison, show_comparison
        from descant.view.page import render
        from descant.view.progress import Watching

        tables = config.override(config.read_toml(file), settings or ())
        console, numbers = make_console(), _numbers(seeds)
        with held(out):
            plan, labels = make(
                tables, out, numbers, algorithms=algorithms, budget=budget, metric=metric, splits=splits,
                population="new clients" if population == "new-clients" else population,
                looks=outlook.LOOKS if until_decided else 1, baselines=baselines,
                command=shlex.join(["descant", *sys.argv[1:]]), permit=ran(allow or ()))
            for remark in (*([] if plan.metric_why is None else [
                    f"{title(plan.metric)} decides because {plan.metric_why}"]), *plan.remarks()):
                console.print(f"note: {remark}", soft_wrap=True)
            if trials:
                searches = execute.searches(plan, labels, trials, jobs)
                needed = duration(execute.seconds_of(plan, searches, jobs))
                if searches:
                    rounds = [search.experiment.train.rounds for search in searches]
                    each = " to ".join(f"{count:,}" for count in sorted({min(rounds), max(rounds)}))
                    console.print(f"tuning: {times(len(searches), 'method')} x {times(trials, 'trial')} x "
                                  f"{each} rounds, about {needed}; "
                                  "trials that fall behind are stopped", soft_wrap=True)
                with Watching(console, searches) as display:
                    for label, found in execute.search(searches, jobs, display).items():
                        plan = plan.tuned(label, getattr(found, "values", None), found.note)
                        plan.write()
            while True:
                planned = plan.runs(labels, plan.seeds if until_decided else numbers, jobs=jobs)
                with Watching(console, planned) as display:
                    failed = execute.execute(plan, planned, jobs, display)
                results = read(plan)
                if not until_decided or failed:
                    break
                more = outlook.extended(plan, results)
                console.print(more.words, soft_wrap=True)
                plan = more.plan
                plan.write()
                if not more.seeds:
                    break
            if results.rows:
                write(results, out / "results.csv")
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

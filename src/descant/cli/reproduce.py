"""`descant reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from descant.cli.common import reporting
from descant.cli.options import DataDir, option


def reproduce(
    item: Annotated[str | None, typer.Argument(
        metavar="[PAPER[/ITEM]]", show_default=False,
        help="What to repeat, such as pfedbred/table_2_fmnist_mclr. A paper alone, or nothing: the items are "
             "listed.")] = None,
    every: Annotated[bool, typer.Option(
        "--all", help="Repeat all items (of PAPER) that this machine can carry, one after another.")] = False,
    jobs: Annotated[int, typer.Option("--jobs", metavar="N", min=1, help="Runs at the same time.")] = 1,
    repetitions: Annotated[int | None, option(
        "--repetitions", "N", "Make only the first N repetitions. Default: as many as the item says.",
        min=1)] = None,
    budget: Annotated[Literal["both", "rounds", "steps"], typer.Option(
        "--budget", help="What all methods have the same number of: rounds, as in the papers, gradient "
                         "steps, or both, one after the other.")] = "both",
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the runs are kept.")
                   ] = Path("results"),
    experiments: Annotated[Path | None, option(
        "--experiments", "DIR", "Where the items are. Default: ./experiments, or that of the sources which "
                                "descant runs from.")] = None,
    time: Annotated[bool, typer.Option(
        "--time", help="Play one round of each method, and write down how long the items would take.")
                    ] = False,
    data_dir: DataDir = None,
) -> None:
    """Repeat tables and figures of the papers, and judge their claims.

    Without --all, a single item is run, and several are listed with the time that they take here. Rerun the
    same command to finish what is missing. What is kept (tables, claims with commit and command; no models)
    lies beside the item, in experiments/PAPER/results/ITEM.

    \b
    Examples:
      descant reproduce
      descant reproduce one_stage_fedprox/figure_1a --jobs 2
      descant reproduce cgpfl --all --jobs 2
    """
    with reporting("stopped; rerun the same command to finish") as console:
        from descant.comparison.reproduce import items as of
        from descant.comparison.reproduce import times
        from descant.comparison.reproduce.execute import ReproduceOptions
        from descant.comparison.reproduce.execute import reproduce as execute
        from descant.view.comparison import draw
        from descant.view.progress import Shown
        from descant.view.reproduce import show_claims, show_items

        place = of.place(experiments)
        found = of.chosen(of.find(place), item)
        single = item is not None and "/" in item
        if time:
            for each in found if single else of.runnable(found):
                times.write(place, {each.name: times.measured(each)})
        if not (every or single) or time:
            show_items(console, found, times.read(place))
            return
        wanted = ReproduceOptions(out, jobs, repetitions, budget)
        for each in found if single else of.runnable(found, budget):
            console.print(f"{each.name}: {each.about().source}", soft_wrap=True)
            for made in execute(each, wanted, Shown(console), draw):
                show_claims(console, made)

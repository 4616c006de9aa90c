"""Carry out a comparison: plan, searches, runs, results. The command line and Python both do it here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, get_args

from descant.comparison import execute, outlook, results
from descant.comparison.execute import Display
from descant.comparison.make import make
from descant.comparison.methods import Listed
from descant.comparison.plan import Budget, Plan, PlannedRun, Population, Splits, held
from descant.comparison.taken import take
from descant.core.metric import title
from descant.core.permit import Permit
from descant.core.units import duration, times
from descant.errors import DescantError, UsageError, unknown
from descant.experiment import trackers


@dataclasses.dataclass(frozen=True)
class CompareOptions:
    """What is asked for besides the experiment; the names are those of the options."""

    algorithms: Listed | None
    seeds: list[int]
    until_decided: bool
    splits: Splits | None
    jobs: int
    budget: Budget
    tune: int
    metric: str | None
    population: Population | None
    baselines: bool
    command: str
    track: Sequence[str] = ()  # names of tools that are told of the runs
    others: Path | None = None  # where comparisons are whose runs may serve

    def __post_init__(self) -> None:
        for name, least in (("jobs", 1), ("tune", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise UsageError(f"{name} must be a whole number from {least}, not {value!r}")
        for name, known in (("budget", Budget), ("splits", Splits), ("population", Population)):
            value = getattr(self, name)
            if value not in get_args(known) and not (value is None and name != "budget"):
                raise unknown(name, value, get_args(known))


class Shown(Protocol):
    """Shows what a comparison does."""

    def say(self, text: str) -> None:
        """A line for the user."""

    def watching(self, jobs: Sequence[Any]) -> AbstractContextManager[Display]:
        """Shows how far some jobs are."""


def conduct(tables: dict[str, Any], out: Path, asked: CompareOptions, permit: Permit, shown: Shown,
            draw: Callable[[Plan], None]) -> tuple[Plan, list[tuple[PlannedRun, str]]]:
    """Make what is missing of a comparison, and write its files, of which `draw` writes the pictures and the
    page; returns which runs failed and why."""
    trackers.named(asked.track, shown.say)  # before hours of work: are they known, and there?
    with held(out):
        plan, labels = make(
            tables, out, asked.seeds, algorithms=asked.algorithms, budget=asked.budget, metric=asked.metric,
            splits=asked.splits, population=asked.population,
            looks=outlook.LOOKS if asked.until_decided else 1, baselines=asked.baselines,
            command=asked.command, permit=permit)
        for remark in (*([] if plan.metric_why is None else [
                f"{title(plan.metric)} decides because {plan.metric_why}"]), *plan.remarks()):
            shown.say(f"note: {remark}")
        if asked.tune:
            plan = _tuned(plan, labels, asked, shown)
        if asked.others is not None:
            plan = _taken(plan, labels, asked, asked.others, shown)
        plan, failed = _played(plan, labels, asked, shown)
        found = results.read(plan)
        if found.rows:
            results.write(found, out / "results.csv")
            draw(plan)
    return plan, failed


def _tuned(plan: Plan, labels: Sequence[str], asked: CompareOptions, shown: Shown) -> Plan:
    """The plan with what the searches for the methods' hyper-parameters have found."""
    searches = execute.searches(plan, labels, asked.tune, asked.jobs)
    if searches:
        rounds = [search.experiment.train.rounds for search in searches]
        each = " to ".join(f"{count:,}" for count in sorted({min(rounds), max(rounds)}))
        needed = duration(execute.seconds_of(plan, searches, asked.jobs))
        shown.say(f"tuning: {times(len(searches), 'method')} x {times(asked.tune, 'trial')} x "
                  f"{each} rounds, about {needed}; trials that fall behind are stopped")
    with shown.watching(searches) as display:
        for label, found in execute.search(searches, asked.jobs, display).items():
            plan = plan.tuned(label, getattr(found, "values", None), found.note)
            plan.write()
    return plan


def _taken(plan: Plan, labels: Sequence[str], asked: CompareOptions, others: Path, shown: Shown) -> Plan:
    """The plan with the runs that other comparisons have made."""
    plan, count = take(plan, plan.runs(labels, asked.seeds, jobs=asked.jobs), others)
    if count:
        plan.write()
        shown.say(f"{times(count, 'run')} taken from other comparisons in {others}")
    return plan


def _played(plan: Plan, labels: Sequence[str], asked: CompareOptions, shown: Shown
            ) -> tuple[Plan, list[tuple[PlannedRun, str]]]:
    """Make the runs, with more repetitions where these were asked for."""
    while True:
        planned = plan.runs(labels, plan.seeds if asked.until_decided else asked.seeds, jobs=asked.jobs)
        with shown.watching(planned) as display:
            failed = execute.execute(plan, planned, asked.jobs, display, asked.track)
        if not asked.until_decided or failed:
            return plan, failed
        more = outlook.extended(plan, results.read(plan))
        shown.say(more.words)
        plan = more.plan
        plan.write()
        if not more.seeds:
            return plan, failed


def require_no_failures(failed: list[tuple[PlannedRun, str]]) -> None:
    if failed:
        raise DescantError("; ".join(f"{run.label} with seed {run.seed} failed: {why}"
                                     for run, why in failed))

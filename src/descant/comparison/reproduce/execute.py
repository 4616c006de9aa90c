"""Reproduce an item: make its runs, judge its claims, and keep both beside the experiment."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from descant.comparison import results
from descant.comparison.conduct import CompareOptions, Shown, conduct, require_no_failures
from descant.comparison.make import source_commit
from descant.comparison.paper import NEEDS
from descant.comparison.plan import Budget, Plan
from descant.comparison.reproduce import baselines, claims, orderings, pages, study
from descant.comparison.reproduce.claims import Claim
from descant.comparison.reproduce.items import Item
from descant.core.files import write_atomic, write_csv
from descant.core.permit import ran
from descant.errors import UsageError, unknown
from descant.experiment.config import read_toml

KEPT = ("results.csv", "orderings.csv")  # of a comparison


BudgetChoice: TypeAlias = Literal["both", "rounds", "steps"]


class Reproduced(NamedTuple):
    """An item as it came out with one budget."""

    item: Item
    budget: Budget
    claims: list[Claim]
    directory: Path  # what is kept

    @property
    def name(self) -> str:
        return self.item.name + ("" if self.budget == "rounds" else f", same {self.budget}")

    @property
    def remarks(self) -> list[str]:
        """Which pairs do not appear, and what stands how beside the baselines; with matched steps, what these
        change."""
        changed = [] if self.budget == "rounds" else [pages.what_changes(self.item)]
        return [*changed, *orderings.sentences(orderings.read(self.directory), orderings.FILE),
                *baselines.sentences(baselines.read(self.directory))]


@dataclasses.dataclass(frozen=True)
class ReproduceOptions:
    """How to reproduce."""

    out: Path  # for the runs, PAPER/ITEM in it
    jobs: int = 1
    repetitions: int | None = None  # fewer than the item's, for a first look
    budget: BudgetChoice = "both"  # equal rounds, as in the papers, then equal gradient steps; or one of them

    def __post_init__(self) -> None:
        for name, value in (("jobs", self.jobs), ("repetitions", self.repetitions)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UsageError(f"{name} must be a whole number from 1, not {value!r}")
        if self.budget not in get_args(BudgetChoice):
            raise unknown("budget", self.budget, get_args(BudgetChoice))

    def budgets(self, item: Item) -> list[Budget]:
        """Those of an item. A study has the paper's alone."""
        if item.is_study and self.budget == "steps":
            raise UsageError(f"{item.name} is a study of its own, which has no other budget: leave "
                             "--budget out")
        if self.budget == "both":
            return ["rounds"] if item.is_study else ["rounds", "steps"]
        return [self.budget]


def reproduce(item: Item, wanted: ReproduceOptions, shown: Shown, draw: Callable[[Plan], None]
              ) -> Iterator[Reproduced]:
    """Make what is missing of an item with each budget, and write what is kept of it."""
    for budget in wanted.budgets(item):
        yield _reproduced(item, wanted, budget, shown, draw)


def _reproduced(item: Item, wanted: ReproduceOptions, budget: Budget, shown: Shown,
                draw: Callable[[Plan], None]) -> Reproduced:
    about = item.about()
    repetitions = wanted.repetitions or about.repetitions
    matched = budget != "rounds"
    if (before := _repetitions_in(item.results / budget if matched else item.results)) > repetitions:
        raise UsageError(f"{before} repetitions of {item.name} are kept, and {repetitions} would take their "
                         "place: leave --repetitions out, or copy the experiments and name the copy with "
                         "--experiments")
    if about.needs is not None:
        shown.say(f"note: {item.name} needs {NEEDS[about.needs]}; without, it takes very long, or stops")
    place = wanted.out / item.paper
    out = place / (f"{item.path.stem}-{budget}" if matched else item.path.stem)
    kept = item.results / budget if matched else item.results
    command = f"descant reproduce {item.name}" + (f" --budget {budget}" if matched else "")
    if item.is_study:
        found, facts = _studied(item, out, repetitions, wanted.jobs, shown, kept)
    else:
        asked = CompareOptions(None, list(range(repetitions)), False, None, wanted.jobs, budget, 0, None,
                               None, True, command, others=place)
        plan, failed = conduct(read_toml(item.path), out, asked, ran(), shown, draw)
        require_no_failures(failed)
        found, facts = compared(results.read(plan), kept)
    if repetitions < about.repetitions:
        command += f" --repetitions {repetitions}"
    facts = {"item": item.name, "source": about.source, "command": command, "repetitions": repetitions,
             "of": about.repetitions, "budget": budget} | facts
    write_atomic(kept / "about.json", (json.dumps(facts, indent=1) + "\n").encode())
    claims.write(found, kept / "claims.csv")
    pages.write(item.path.parent)
    return Reproduced(item, budget, found, kept)


def compared(found: results.Results, kept: Path) -> tuple[list[Claim], dict[str, Any]]:
    """Keep the tables of a comparison; returns its claims, and facts of its runs."""
    kept.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        if (found.plan.out / name).exists():
            shutil.copyfile(found.plan.out / name, kept / name)
    baselines.write(baselines.of(found), kept)
    versions = found.plan.versions
    return claims.of_comparison(found), {
        "commit": versions.get("commit"), "torch": versions["torch"],
        **computing([run.summary for run in found.finished])}


def computing(summaries: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The seconds of runs by the clock, and of processor time where all of them know it: runs of older
    versions do not, nor do those with workers."""
    known = [name for name in ("seconds", "processor_seconds")
             if all(summary.get(name) is not None for summary in summaries)]
    return {name: round(sum(summary[name] for summary in summaries)) for name in known}


def _repetitions_in(kept: Path) -> int:
    """How many repetitions what is kept was made of."""
    try:
        return int(json.loads((kept / "about.json").read_text(encoding="utf-8"))["repetitions"])
    except (OSError, ValueError, KeyError):
        return 0


def _studied(item: Item, out: Path, repetitions: int, jobs: int, shown: Shown, kept: Path
             ) -> tuple[list[Claim], dict[str, Any]]:
    commit = source_commit()
    module = study.load(item.path)
    # judged with the digits that are kept, so that anybody can judge again
    rows = [{name: _short(value) for name, value in row.items()}
            for row in study.play(item.path, out, repetitions, jobs, shown)]
    kept.mkdir(parents=True, exist_ok=True)
    heads = list(dict.fromkeys(name for row in rows for name in row))
    write_csv(kept / "results.csv", [heads, *([_cell(row.get(name, "")) for name in heads] for row in rows)])
    if hasattr(module, "draw"):
        module.draw(rows, kept / "figure.png")
    return claims.corrected(module.claims(rows)), {
        "commit": commit, "processor_seconds": round(sum(row["seconds"] for row in rows))}


def _short(value: Any) -> Any:
    return float(_cell(value)) if isinstance(value, float) else value


def _cell(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value

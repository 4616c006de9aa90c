"""Reproduce an item: make its runs, judge its claims, and keep both beside the experiment."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from descant.comparison import results
from descant.comparison.conduct import Asked, Shown, conduct, require_no_failures
from descant.comparison.make import source_commit
from descant.comparison.plan import Budget, Plan
from descant.comparison.reproduce import claims, pages, study
from descant.comparison.reproduce.claims import Claim
from descant.comparison.reproduce.items import Item
from descant.core.files import write_atomic, write_csv
from descant.core.permit import ran
from descant.errors import UsageError
from descant.experiment.config import read_toml

KEPT = ("results.csv", "orderings.csv")  # of a comparison


class Reproduced(NamedTuple):
    """An item as it came out."""

    item: Item
    claims: list[Claim]
    directory: Path  # what is kept


@dataclasses.dataclass(frozen=True)
class Wanted:
    """How to reproduce."""

    out: Path  # for the runs, PAPER/ITEM in it
    jobs: int = 1
    repetitions: int | None = None  # fewer than the item's, for a first look
    budget: Budget = "rounds"  # what the papers hold equal; or "steps"

    def __post_init__(self) -> None:
        for name, value in (("jobs", self.jobs), ("repetitions", self.repetitions)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UsageError(f"{name} must be a whole number from 1, not {value!r}")
        if self.budget not in ("rounds", "steps"):
            raise UsageError(f'budget must be "rounds", as in the papers, or "steps", not {self.budget!r}')


def reproduce(item: Item, wanted: Wanted, shown: Shown, draw: Callable[[Plan], None]) -> Reproduced:
    """Make what is missing of an item, and write what is kept of it."""
    about = item.about()
    repetitions = wanted.repetitions or about.repetitions
    suffix = "" if wanted.budget == "rounds" else f"-{wanted.budget}"
    out = wanted.out / item.paper / f"{item.path.stem}{suffix}"
    command = f"descant reproduce {item.name}"
    if wanted.budget == "steps":
        command += " --budget steps"
        if item.is_study:
            raise UsageError(f"{item.name} is a study of its own, which has no other budget: leave "
                             "--budget out")
    kept = item.results if wanted.budget == "rounds" else item.results / "steps"
    if item.is_study:
        found, facts = _studied(item, out, repetitions, wanted.jobs, shown, kept)
    else:
        asked = Asked(None, list(range(repetitions)), False, None, wanted.jobs, wanted.budget, 0, None, None,
                      True, command)
        plan, failed = conduct(read_toml(item.path), out, asked, ran(), shown, draw)
        require_no_failures(failed)
        found, facts = compared(results.read(plan), kept)
    if repetitions < about.repetitions:
        command += f" --repetitions {repetitions}"
    facts = {"item": item.name, "source": about.source, "command": command, "repetitions": repetitions,
             "of": about.repetitions, "budget": wanted.budget} | facts
    write_atomic(kept / "about.json", (json.dumps(facts, indent=1) + "\n").encode())
    claims.write(found, kept / "claims.csv")
    pages.write(item.path.parent)
    return Reproduced(item, found, kept)


def compared(found: results.Results, kept: Path) -> tuple[list[Claim], dict[str, Any]]:
    """Keep the tables of a comparison; returns its claims, and facts of its runs."""
    kept.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        if (found.plan.out / name).exists():
            shutil.copyfile(found.plan.out / name, kept / name)
    seconds = sum(run.summary["seconds"] for run in found.finished)
    versions = found.plan.versions
    return claims.of_comparison(found), {
        "commit": versions.get("commit"), "torch": versions["torch"], "seconds": round(seconds)}


def _studied(item: Item, out: Path, repetitions: int, jobs: int, shown: Shown, kept: Path
             ) -> tuple[list[Claim], dict[str, Any]]:
    commit = source_commit()
    module = study.load(item.path)
    rows = study.play(item.path, out, repetitions, jobs, shown)
    kept.mkdir(parents=True, exist_ok=True)
    heads = list(dict.fromkeys(name for row in rows for name in row))
    write_csv(kept / "results.csv", [heads, *([_cell(row.get(name, "")) for name in heads] for row in rows)])
    if hasattr(module, "draw"):
        module.draw(rows, kept / "figure.png")
    return list(module.claims(rows)), {
        "commit": commit, "seconds": round(sum(row["seconds"] for row in rows))}


def _cell(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value

"""Runs that another comparison has made need not be made again: the same experiment on the same rows,
whatever it is called there. Tables of a paper share many, and so do budgets of rounds and of steps."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from descant.comparison import plan as planning
from descant.comparison.plan import Plan, PlannedRun
from descant.errors import DescantError

UNFINISHED = ".taken"  # a copy that may not be whole


def take(plan: Plan, planned: Sequence[PlannedRun], place: Path) -> tuple[Plan, int]:
    """Copy what comparisons in `place` have of the planned runs; returns the plan, with the versions that
    these were made with, and how many there are. The directory of the plan is held."""
    others = list(_others(plan, place))
    used, count = {}, 0
    for run in planned:
        if run.place.exists():
            continue
        for other in others:
            if (found := _same(run, other.out)) is not None:
                _copy(found, plan.out / UNFINISHED, run.place)
                used[other.out] = other
                count += 1
                break
    for other in used.values():
        plan = plan.also_made_with(other.versions)
    return plan, count


def _others(plan: Plan, place: Path) -> Iterator[Plan]:
    """Comparisons of the same rows."""
    for path in sorted(place.glob("*/comparison.json")):
        with contextlib.suppress(DescantError):  # a damaged one has nothing to take
            other = planning.read(path.parent)
            if other.out != plan.out and other.fingerprint == plan.fingerprint:
                yield other


def _same(run: PlannedRun, out: Path) -> Path | None:
    """A finished run of the same experiment in another comparison."""
    places = sorted(out.glob(f"runs/*/seed-{run.seed}"))
    return next((place for place in places if run._replace(place=place).is_the_same), None)


def _copy(source: Path, part: Path, target: Path) -> None:
    """Whole, or not at all."""
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(source, part)
    target.parent.mkdir(parents=True, exist_ok=True)
    part.replace(target)

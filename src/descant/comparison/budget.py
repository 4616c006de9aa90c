"""What methods took where each was trained until it no longer improved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from descant.comparison.finished import Finished
from descant.comparison.plan import Plan
from descant.core.units import times


def spent(plan: Plan, finished: Sequence[Finished]) -> Iterator[str]:
    """For each method, after how many rounds and steps it stopped, or that it has not."""
    for label, method in plan.methods.items():
        runs = [run for run in finished if run.label == label]
        if not runs:
            continue
        rounds, steps = ([run.summary[key] for run in runs] for key in ("rounds", "grad_steps"))
        cost = f"{_range(rounds)} rounds, {_range(steps)} gradient steps"
        going = sum(run.summary.get("stopped") is None for run in runs)
        if going:
            yield (f"{label} was still improving at the cap of {method.rounds} rounds with {going} of "
                   f"{times(len(runs), 'seed')} ({cost}).")
        else:
            yield f"{label} stopped improving after {cost}."


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"

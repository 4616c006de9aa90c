"""What a comparison came to, as peers.json has it, and its table."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.peers.contest import DESCANT, Figures
from benchmarks.peers.libraries import LIBRARIES
from benchmarks.speed.case import BATCH, Case
from descant.core.units import times


def dump(case: Case, figures: dict[str, Figures]) -> dict[str, Any]:
    """A model with all its figures: medians, and every single repetition."""
    own = figures[DESCANT].per_step
    assert own is not None
    sides = {}
    for name, found in figures.items():
        sides[name] = {
            "note": found.note,
            "us_per_step": None if found.per_step is None else 1e6 * found.per_step,
            "us_per_step_all": [1e6 * seconds for seconds in found.steps],
            "times_descant": None if found.per_step is None else found.per_step / own,
        }
    return {"model": case.model, "parameters": case.task.dim, "clients": case.federation.population,
            "cohort": case.cohort, "batch": BATCH, "batches_per_round": case.batches,
            "grad_steps_per_round": case.grad_steps, "sides": sides}


def show(console: Console, case: dict[str, Any], repetitions: int) -> None:
    """All sides on one model."""
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, title_justify="left", title_style="",
        title=f"FedAvg on {case['model']} ({times(case['parameters'], 'parameter')}): "
              f"{times(case['cohort'], 'client')} x {case['batches_per_round']} batches, "
              f"{case['grad_steps_per_round']:,} gradient steps; median of {repetitions}")
    table.add_column("side", no_wrap=True)
    for heading in ("µs per step", "least to most", "times descant"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, side in case["sides"].items():
        every = side["us_per_step_all"]
        table.add_row(title(name), *(
            ("-", "", "") if not every else
            (f"{side['us_per_step']:,.0f}", f"{min(every):,.0f} to {max(every):,.0f}",
             "" if name == DESCANT else f"{side['times_descant']:.2f}")))
    console.print(table)
    for name, side in case["sides"].items():
        console.print(f"{title(name)}: {side['note']}", soft_wrap=True, markup=False)
    console.print()


def title(name: str) -> str:
    return LIBRARIES[name].title if name in LIBRARIES else name

"""What a comparison came to, as peers.json has it, and its table."""

from __future__ import annotations

import statistics
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
    own, own_computed = figures[DESCANT].per_step, figures[DESCANT].computed_per_step
    assert own is not None
    sides = {}
    for name, found in figures.items():
        sides[name] = {
            "note": found.note,
            "us_per_step": None if found.per_step is None else 1e6 * found.per_step,
            "us_per_step_all": [1e6 * seconds for seconds in found.steps],
            "times_descant": None if found.per_step is None else found.per_step / own,
            "processor_us_per_step": _micro(found.computed_per_step),
            "processor_times_descant": None if found.computed_per_step is None or own_computed is None
            else found.computed_per_step / own_computed,
        }
    return {"model": case.model, "parameters": case.task.dim, "clients": case.federation.population,
            "cohort": case.cohort, "batch": BATCH, "batches_per_round": case.batches,
            "grad_steps_per_round": case.grad_steps, "sides": sides}


def _micro(seconds: float | None) -> float | None:
    return None if seconds is None else 1e6 * seconds


def joined(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Several runs as one: of each model the medians over its runs, and the figures of every run."""
    cases: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        for case in run["cases"]:
            cases.setdefault(case["model"], []).append(case)
    found = []
    for of_model in cases.values():
        sides = {}
        for name in of_model[0]["sides"]:
            each = [side for case in of_model if (side := case["sides"][name])["us_per_step"] is not None]
            if not each:
                continue
            ratios = [side["times_descant"] for side in each]
            computed = [side["processor_times_descant"] for side in each
                        if side.get("processor_times_descant") is not None]
            sides[name] = {"note": " | ".join(dict.fromkeys(side["note"] for side in each)),
                           "us_per_step": statistics.median(side["us_per_step"] for side in each),
                           "us_per_step_all": [side["us_per_step"] for side in each],
                           "times_descant": statistics.median(ratios), "times_descant_all": ratios,
                           "processor_times_descant_all": computed}
        found.append(of_model[0] | {"sides": sides, "runs": len(of_model)})
    return runs[0] | {"cases": found, "runs": max(case["runs"] for case in found)}


def show_joined(console: Console, found: dict[str, Any]) -> None:
    """All models: times descant's step, the median over the runs and every run."""
    names = [name for name in LIBRARIES if any(name in case["sides"] for case in found["cases"])]
    table = Table(box=box.SIMPLE_HEAD, title_justify="left", title_style="",
                  title="FedAvg: µs per gradient step, and times descant's in each run (of processor time)")
    table.add_column("model", no_wrap=True)
    for name in (DESCANT, *names):
        table.add_column(title(name), justify="right", no_wrap=True)
    for case in found["cases"]:
        cells = []
        for name in (DESCANT, *names):
            side = case["sides"].get(name)
            if side is None:
                cells.append("-")
                continue
            every = ", ".join(f"{ratio:.1f}" for ratio in side["times_descant_all"])
            if side["processor_times_descant_all"]:
                every += f" ({', '.join(f'{ratio:.1f}' for ratio in side['processor_times_descant_all'])})"
            own = ", ".join(f"{step:,.0f}" for step in side["us_per_step_all"])
            cells.append(own if name == DESCANT else f"{side['us_per_step']:,.0f}: {every}")
        table.add_row(case["model"], *cells)
    console.print(table)


def show(console: Console, case: dict[str, Any], repetitions: int) -> None:
    """All sides on one model."""
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, title_justify="left", title_style="",
        title=f"FedAvg on {case['model']} ({times(case['parameters'], 'parameter')}): "
              f"{times(case['cohort'], 'client')} x {case['batches_per_round']} batches, "
              f"{case['grad_steps_per_round']:,} gradient steps; median of {repetitions}")
    table.add_column("side", no_wrap=True)
    for heading in ("µs per step", "least to most", "times descant", "of processor time", "times descant"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, side in case["sides"].items():
        every, computed = side["us_per_step_all"], side["processor_us_per_step"]
        cells = [""] * 5 if every else ["-", *[""] * 4]
        if every:
            cells[:2] = f"{side['us_per_step']:,.0f}", f"{min(every):,.0f} to {max(every):,.0f}"
            cells[2] = "" if name == DESCANT else f"{side['times_descant']:.2f}"
        if every and computed is not None:
            cells[3] = f"{computed:,.0f}"
            cells[4] = "" if name == DESCANT else f"{side['processor_times_descant']:.2f}"
        table.add_row(title(name), *cells)
    console.print(table)
    for name, side in case["sides"].items():
        console.print(f"{title(name)}: {side['note']}", soft_wrap=True, markup=False)
    console.print()


def title(name: str) -> str:
    return LIBRARIES[name].title if name in LIBRARIES else name

"""How long an item takes on this machine: what it took, or what it would take at the paper's budget.

`experiments/times.json` has the processor seconds of each item as they were measured once, with the time that
a small fixed piece of work took there; here it is timed again, and the seconds are scaled by the ratio.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from descant.comparison.budget import rounds_of
from descant.comparison.methods import contenders
from descant.comparison.reproduce import study
from descant.comparison.reproduce.items import Item
from descant.core.files import write_atomic
from descant.core.permit import ran
from descant.core.threads import one_thread
from descant.core.units import duration
from descant.engine.settings import Eval
from descant.experiment import run as runs
from descant.experiment.config import Experiment, read_toml

FILE = "times.json"  # in the directory of the experiments


def pace() -> float:
    """Processor seconds of the fixed piece of work: batched products as a round makes them. The least of
    three, so that what else runs here counts little."""
    with one_thread():
        generator = torch.Generator().manual_seed(0)
        x, w = (torch.randn(*shape, generator=generator) for shape in ((50, 20, 784), (50, 784, 10)))
        taken = []
        for _ in range(3):
            start = time.process_time()
            for _ in range(40):
                torch.baddbmm(w, x.transpose(1, 2), torch.bmm(x, w).softmax(2), alpha=-0.01)
            taken.append(time.process_time() - start)
    return min(taken)


def measured_in(directory: Path) -> dict[str, float]:
    """Seconds where they were measured, by the name of the item."""
    return _read(directory)[1]


def read(directory: Path) -> dict[str, float]:
    """Seconds on this machine by the name of the item, where they are known, by one process."""
    at, known = _read(directory)
    ratio = pace() / at if known else 1.0
    return {name: ratio * seconds for name, seconds in known.items()}


def _read(directory: Path) -> tuple[float, dict[str, float]]:
    try:
        found = json.loads((directory / FILE).read_text(encoding="utf-8"))
        return float(found["pace"]), dict(found["seconds"])
    except (OSError, ValueError, KeyError):
        return 1.0, {}


def took(kept: Mapping[str, Any]) -> str:
    """The computing of what is kept, and by which clock: older runs do not know their processor time."""
    if "processor_seconds" in kept:
        return f"{duration(kept['processor_seconds'])} of processor time"
    return f"{duration(kept['seconds'])} by the clock"


def write(directory: Path, items: dict[str, float]) -> None:
    """Add what was measured here, scaled to where the others were: these stay as they are, since a pace is
    never the same twice, and what is scaled often would drift."""
    now = pace()
    at, known = _read(directory)
    at = at if known else now
    seconds = known | {name: float(f"{taken * at / now:.3g}") for name, taken in items.items()}
    table: dict[str, Any] = {"pace": at, "seconds": dict(sorted(seconds.items()))}
    write_atomic(directory / FILE, (json.dumps(table, indent=1) + "\n").encode())


def measured(item: Item) -> float:
    """The processor seconds of an item at the paper's budget, from one round and one evaluation of every
    method, or from the point of a study that is the least work."""
    repetitions = item.about().repetitions
    if item.is_study:
        module = study.load(item.path)
        work = [module.work(**point) if hasattr(module, "work") else 1.0 for point in module.POINTS]
        least, point = min(zip(work, module.POINTS, strict=True), key=lambda each: each[0])
        start = time.process_time()
        study.measure(item.path, 0, point)
        return repetitions * (time.process_time() - start) * sum(work) / least
    tables = read_toml(item.path)
    base = Experiment.parse({**tables, "algorithm": {"name": "fedavg"}}, ran())
    found = contenders(tables, None, base.train, baselines=True, permit=ran())
    costs = rounds_of(runs.Setup.of(base), found, "rounds", scored=True)
    return repetitions * sum(cost.rounds * cost.seconds + _evaluations(base.eval, cost.rounds) * cost.scoring
                             for cost in costs.values())


def _evaluations(settings: Eval, rounds: int) -> int:
    return sum(settings.due(number, rounds) for number in range(1, rounds + 1))

"""How long an item takes on this machine.

`experiments/times.json` has the processor seconds of each item as they were measured once, with the time that
a small fixed piece of work took there; here it is timed again, and the seconds are scaled by the ratio.
"""

from __future__ import annotations

import json
import time
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
    """The processor seconds of an item, from one round of every method, or from the first point of a study;
    without evaluation."""
    repetitions = item.about().repetitions
    if item.is_study:
        points = study.load(item.path).POINTS
        start = time.process_time()
        study.measure(item.path, 0, points[0])
        return repetitions * len(points) * (time.process_time() - start)
    tables = read_toml(item.path)
    base = Experiment.parse({**tables, "algorithm": {"name": "fedavg"}}, ran())
    found = contenders(tables, None, base.train, baselines=True, permit=ran())
    costs = rounds_of(runs.Setup.of(base), found, "rounds")
    return repetitions * sum(cost.rounds * cost.seconds for cost in costs.values())

"""What a benchmark came to, as bench.json has it."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import numpy
import torch

from benchmarks.speed.case import BATCH
from benchmarks.speed.contest import Outcome
from descant import __version__


def cores() -> int:
    """How many cores this process may use: of a shared machine not always all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load() -> float | None:
    """How many processes wanted a core during the last minute; None where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def machine() -> dict[str, Any]:
    """What the figures depend on besides the code."""
    return {
        "processor": _processor(), "cores": cores(), "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__,
        "descant": __version__, "load_at_start": load(),
    }


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in facts.read_text().splitlines()
             if line.startswith("model name")] if facts.exists() else []
    return names[0] if names else platform.processor() or "unknown"


def dump(outcome: Outcome) -> dict[str, Any]:
    """A case with all its figures: medians, and every single repetition."""
    case = outcome.case
    return {
        "method": case.method,
        "model": case.model if isinstance(case.model, str) else case.model.name,
        "parameters": case.task.dim, "clients": case.federation.population, "cohort": case.cohort,
        "batch": BATCH, "batches_per_round": case.batches, "grad_steps_per_round": case.grad_steps,
        "evaluated_clients": case.evaluated,
        "sides": {name: _side(outcome, name) for name in outcome.sides},
        "floor_tried": [t.arrangement._asdict() | {"us_per_step": 1e6 * t.seconds} for t in outcome.tried],
    }


def _side(outcome: Outcome, name: str) -> dict[str, Any]:
    figures = outcome.sides[name]
    found: dict[str, Any] = {
        "note": figures.note, "us_per_step": 1e6 * figures.per_step,
        "us_per_step_all": [1e6 * seconds for seconds in figures.step],
        "times_as_fast_as_lean_loop": outcome.speed(name),
        "times_the_floor": outcome.above_floor(name),
    }
    if figures.per_evaluation is not None:
        found |= {"evaluation_ms": 1e3 * figures.per_evaluation,
                  "evaluation_ms_all": [1e3 * seconds for seconds in figures.evaluation],
                  "evaluation_share_of_round": outcome.evaluation_share(name)}
    return found | {"peak_memory_bytes": figures.memory}

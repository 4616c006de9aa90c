"""A study: an item that is no comparison of methods on one federation, written as a small Python file.

    \"\"\"One-stage FedProx, Figure 1(a): error of the local models against heterogeneity.\"\"\"

    SOURCE = "One-stage FedProx, Figure 1(a)"
    SEEDS = 5
    POINTS = [{"method": method, "R": R} for method in METHODS for R in (0.1, 1.0)]

    def measure(seed, **point):          # one point in one repetition -> {"error": ...}
    def claims(rows):                    # of all rows -> [Claim, ...]
    def draw(rows, path):                # a picture, if there is one to draw
    def work(**point):                   # how much work a point is beside others, if they differ in it

Points are measured in processes of their own, each once: what is measured is kept, and a study that was
stopped goes on.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from descant.comparison.conduct import Shown
from descant.comparison.execute import in_processes
from descant.comparison.paper import NEEDS
from descant.comparison.plan import held
from descant.core.files import write_atomic
from descant.errors import DescantError, UsageError, unknown

CALLED = ("measure", "claims")
GIVEN = ("SOURCE", "SEEDS", "POINTS")


class Facts(NamedTuple):
    """What a study says of itself before it is run."""

    source: str
    seeds: int
    needs: str | None


class Job(NamedTuple):
    """One point in one repetition."""

    path: Path  # of the study
    point: dict[str, Any]
    seed: int
    place: Path  # where what is measured is kept

    @property
    def title(self) -> str:
        words = [str(value) if isinstance(value, str) else f"{name} {value}"
                 for name, value in self.point.items()]
        return f"{', '.join(words)}, seed {self.seed}"

    @property
    def done(self) -> bool:
        return self.place.exists()

    @property
    def size(self) -> int:
        return 1

    @property
    def size_done(self) -> int:
        return int(self.done)


def read_facts(path: Path) -> Facts:
    """SOURCE, SEEDS and NEEDS of a study, which must be written as plain values."""
    found: dict[str, Any] = {"NEEDS": None}
    try:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                with suppress(ValueError):
                    found[node.targets[0].id] = ast.literal_eval(node.value)
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(f"cannot read the study {path}: {error}") from None
    if not isinstance(found.get("SOURCE"), str) or not isinstance(found.get("SEEDS"), int):
        raise UsageError(f'{path} is not a study: it needs SOURCE = "..." and SEEDS = a whole number')
    if found["NEEDS"] is not None and found["NEEDS"] not in NEEDS:
        raise unknown(f"{path}: NEEDS", found["NEEDS"], NEEDS)
    return Facts(found["SOURCE"], found["SEEDS"], found["NEEDS"])


@contextmanager
def _beside(path: Path) -> Iterator[None]:
    """Files beside the study can be imported."""
    sys.path.insert(0, str(path.parent))
    try:
        yield
    finally:
        sys.path.remove(str(path.parent))


def load(path: Path) -> ModuleType:
    """The study as a module."""
    spec = importlib.util.spec_from_file_location(f"descant_study_{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _beside(path):
        spec.loader.exec_module(module)
    for name in (*GIVEN, *CALLED):
        if not hasattr(module, name):
            raise UsageError(f"{path} is not a study: it has no {name}")
    return module


def measure(path: Path, seed: int, point: dict[str, Any]) -> dict[str, float]:
    """One point in one repetition; the study may name what is beside it, such as a diagnostic."""
    with _beside(path):
        figures = load(path).measure(seed, **point)
    return {name: float(value) for name, value in figures.items()}


def jobs_of(path: Path, points: Sequence[dict[str, Any]], seeds: int, out: Path) -> list[Job]:
    found = []
    for seed in range(seeds):  # whole repetitions first: these can be judged
        for point in points:
            text = json.dumps([point, seed], sort_keys=True)
            found.append(Job(path, dict(point), seed, out / "points" / f"{_digest(text)}.json"))
    return found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def play(path: Path, out: Path, seeds: int, jobs: int, shown: Shown) -> list[dict[str, Any]]:
    """Measure what is missing; returns all rows: the fields of the point, the seed, what was measured."""
    module = load(path)
    with held(out):
        planned = jobs_of(path, module.POINTS, seeds, out)
        (out / "points").mkdir(exist_ok=True)
        failed = []
        with shown.watching(planned) as display:
            missing = [job for job in planned if not job.done]
            for job, outcome in in_processes(_measure, missing, jobs, display):
                if isinstance(outcome, Exception):
                    failed.append(f"{job.title}: {outcome}")
        if failed:
            raise DescantError(f"{len(failed)} of {len(planned)} points failed; the first: {failed[0]}")
    return rows_of(planned)


def rows_of(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """What was measured of the jobs that are done."""
    return [job.point | {"seed": job.seed} | json.loads(job.place.read_text(encoding="utf-8"))
            for job in jobs if job.done]


def _measure(job: Job) -> None:
    start = time.process_time()
    kept = measure(job.path, job.seed, job.point)
    write_atomic(job.place, json.dumps(kept | {"seconds": round(time.process_time() - start, 2)}).encode())

"""`python -m benchmarks.fuzz`, or `make fuzz`: as many cases of every kind as time allows."""

from __future__ import annotations

import secrets
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.fuzz.case import run_cases
from benchmarks.fuzz.kinds import KINDS

BATCH = 200  # cases between looks at the clock: hypothesis begins each with simple ones


def main(seconds: Annotated[float, typer.Option(help="For all kinds together.")] = 600.0,
         cases: Annotated[int, typer.Option(help="Of each kind, however long they take; 0: as time allows."
                                            )] = 0,
         only: Annotated[str, typer.Option(help="Words of the kinds to try.")] = "",
         seed: Annotated[int, typer.Option(help="Of the first cases; 0: any.")] = 0) -> None:
    """Try hostile and damaged input of every kind. The first finding is shown, and ends this."""
    seed = seed or secrets.randbelow(2**31)
    chosen = [make for name, make in KINDS.items() if all(word in name for word in only.split())]
    print(f"seed {seed}")
    for make in chosen:
        with tempfile.TemporaryDirectory() as home:
            kind = make(Path(home))
            until, began = time.monotonic() + seconds / len(chosen), time.process_time()
            tried = refused = 0
            while tried < cases if cases else time.monotonic() < until:
                refused += run_cases(kind, BATCH, seed + tried)
                tried += BATCH
            computed = time.process_time() - began
            print(f"{kind.name:22} {tried:7,} cases, {refused:7,} refused, {computed:.0f} s of computing",
                  flush=True)


if __name__ == "__main__":
    typer.run(main)

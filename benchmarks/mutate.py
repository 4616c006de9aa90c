"""Do the tests notice a wrong line? `python -m benchmarks.mutate`

Every mutation changes one place of the package in a copy of it, and the quick tests that are responsible for
that place must then fail. Survivors are printed; there should be none.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.progress import track

from benchmarks.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 300  # seconds: a mutation may also be noticed by a test that never ends
MEMORY = 12 * 2**30  # bytes: or by one that takes all there is


class Verdict(NamedTuple):
    mutation: Mutation
    caught: bool
    by: str  # the first test that failed


def mutated(text: str, mutation: Mutation) -> str:
    """The text with the one place changed."""
    if (count := text.count(mutation.old)) != 1:
        raise ValueError(f"{mutation.file}: {mutation.old!r} is there {count} times, not once; "
                         "bring benchmarks/mutations up to date")
    return text.replace(mutation.old, mutation.new)


def judge(mutation: Mutation) -> Verdict:
    """Run the responsible tests on a copy of the package with the mutation."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "src"
        shutil.copytree(ROOT / "src", copy)  # with what is compiled, which fits all files but the changed one
        path = copy / "descant" / mutation.file
        path.write_text(mutated(path.read_text(encoding="utf-8"), mutation), encoding="utf-8")
        environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1",
                                    "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider",
                   "--no-header", "--tb=no", "-m", mutation.mark, *mutation.tests]
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True,
                                  timeout=TIMEOUT, check=False, preexec_fn=_bounded)
        except subprocess.TimeoutExpired:
            return Verdict(mutation, True, "a test that did not end")
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode not in (0, 1, 2):
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return Verdict(mutation, done.returncode != 0, failed[0].split(" ", 1)[1] if failed else "")


def _bounded() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def main(
    only: Annotated[str, typer.Option("--only", metavar="TEXT",
                                      help="Mutations of files with this in their name.")] = "",
    jobs: Annotated[int, typer.Option("--jobs", metavar="N", min=1, help="How many at a time.")] = 2,
) -> None:
    """Apply the mutations one at a time; the exit code is the number of survivors."""
    console = Console()
    chosen = [mutation for mutation in MUTATIONS if only in mutation.file]
    for mutation in chosen:  # before an hour is spent: all of them must fit the code
        mutated((ROOT / "src" / "descant" / mutation.file).read_text(encoding="utf-8"), mutation)
    survivors = 0
    with ThreadPoolExecutor(jobs) as pool:
        verdicts = track(pool.map(judge, chosen), "mutations", total=len(chosen), console=console)
        for mutation, caught, by in verdicts:
            survivors += not caught
            found = f"caught by {by}" if caught else f"SURVIVED: {mutation.old!r} -> {mutation.new!r}"
            console.print(f"{mutation.file}: {mutation.why}: {found}", soft_wrap=True, markup=False,
                          highlight=False)
    console.print(f"{len(chosen) - survivors} of {len(chosen)} mutations caught")
    raise SystemExit(survivors)


if __name__ == "__main__":
    typer.run(main)

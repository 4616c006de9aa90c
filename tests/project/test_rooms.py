"""The plan of the package: layers that import downwards, rooms that say what they are, short files."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.mutate import mutated
from benchmarks.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "descant"
MOST_LINES = 400
MOST_ROOMS = 12
LIMITS = {"cgpfl": 150, "fedmap": 170, "pfedbred": 170, "pfedgt": 200, "fedamp": 60}


def lint_imports(package: Path) -> subprocess.CompletedProcess[str]:
    """Check the layers of a copy of the package, wherever it lies."""
    script = Path(sys.executable).with_name("lint-imports")
    command = [script, "--no-cache", "--config", ROOT / "pyproject.toml"]
    return subprocess.run(command, cwd=package.parent, capture_output=True, text=True, check=False,
                          env=os.environ | {"PYTHONPATH": str(package.parent)})


@pytest.mark.thorough
def test_no_room_imports_a_higher_one() -> None:
    done = lint_imports(PACKAGE)
    assert done.returncode == 0, done.stdout


FORBIDDEN = {
    "core.tree -> descant.engine.rounds": "from descant.engine import rounds",
    "priors.precision -> descant.algorithms.fedavg":
        "def hidden():\n    from descant.algorithms import fedavg",
    "comparison.plan -> descant.view.tables": "def hidden():\n    import descant.view.tables",
    "core.vector -> descant.core.task": "def hidden():\n    from descant.core.task import Task",
}


@pytest.mark.thorough
def test_a_forbidden_import_is_found_even_in_a_function(tmp_path: Path) -> None:
    copy = tmp_path / "descant"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for arrow, line in FORBIDDEN.items():
        room = arrow.partition(" ")[0].replace(".", "/")
        with (copy / f"{room}.py").open("a", encoding="utf-8") as file:
            file.write(f"\n\n{line}\n")
    done = lint_imports(copy)
    assert done.returncode == 1, done.stdout
    assert [arrow for arrow in FORBIDDEN if f"descant.{arrow}" not in done.stdout] == []


def test_the_rooms_are_few_and_say_what_they_are() -> None:
    rooms = [path for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert len(rooms) <= MOST_ROOMS
    files = {path.name for path in PACKAGE.iterdir() if path.is_file()}
    assert files == {"__init__.py", "__main__.py", "api.py", "errors.py", "py.typed", "testing.py"}
    for room in rooms:
        text = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8")))
        assert text, room
        what, _, imports = text.partition("\n\n")
        assert what.endswith("."), room  # a sentence
        assert "import" in imports.lower(), f"{room.name} does not say what it may import"


def test_files_are_short() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {path.name: n for path, n in lengths.items() if n > MOST_LINES} == {}
    methods = {path.stem: n for path, n in lengths.items() if path.parent.name == "algorithms"}
    assert {name: methods[name] for name, most in LIMITS.items() if methods[name] > most} == {}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: f"{mutation.file}: {mutation.why}")
def test_every_mutation_fits_the_code(mutation: Mutation) -> None:
    path = PACKAGE / mutation.file
    text = path.read_text(encoding="utf-8")
    changed = mutated(text, mutation)
    assert changed != text
    ast.parse(changed)
    for test in mutation.tests:
        file, _, name = test.partition("::")
        assert (ROOT / file).exists(), test
        if name:  # one that the mark leaves out would notice nothing
            before, found, _ = (ROOT / file).read_text(encoding="utf-8").partition(f"def {name}(")
            assert found, test
            is_slow = "@pytest.mark.slow\n" in before.rpartition("\n\n\n")[2] or re.search(
                r"^pytestmark = .*mark\.slow\b", before, re.MULTILINE)
            assert mutation.mark == ("slow" if is_slow else "not slow"), test

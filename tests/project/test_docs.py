"""What the documents say is true: their examples run, and their line of metrics is a real one."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
from torch import nn

import descant
from cli_helpers import call
from descant import algorithms
from descant.comparison import execute
from descant.experiment.config import Experiment
from helpers import PoolHere

ROOT = Path(__file__).parents[2]


def blocks(document: str, language: str) -> list[str]:
    text = (ROOT / document).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("k", range(2))
def test_the_python_of_the_readme_runs(k, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    code = blocks("README.md", "python")[k].replace("rounds=50", "rounds=2")
    scope: dict[str, object] = {}
    exec(code, scope)
    assert capsys.readouterr().out.strip()
    if k == 0:
        assert isinstance(scope["model"], nn.Module)


@pytest.mark.slow
def test_the_python_of_docs_python_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(execute.concurrent.futures, "ProcessPoolExecutor", PoolHere)
    scope: dict[str, object] = {}
    for code in blocks("docs/python.md", "python"):
        small = re.sub(r"rounds=\d+", 'rounds=2, local={"steps": 2}, backend="vectorised"', code)
        exec(small.replace("fed, 10", "fed, 2"), scope)
    assert isinstance(scope["model"], nn.Module)
    experiment = Experiment.parse(tomllib.loads(blocks("docs/python.md", "toml")[0]))
    assert experiment.algorithm.solver.schedule.factor(50) < 0.02
    assert "Run(ditto on digits, partition classes: " in capsys.readouterr().out


def test_the_experiment_of_the_readme_is_valid():
    experiment = Experiment.parse(tomllib.loads(blocks("README.md", "toml")[0]))
    assert experiment.algorithm == algorithms.pFedMe(lam=15.0)
    assert experiment.train.cohort == 10


def test_the_table_of_the_readme_is_complete():
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## What is there")[2]
    for registry in (algorithms.ALGORITHMS, descant.data.DATASETS, descant.data.PARTITIONS,
                     descant.models.MODELS):
        for name in registry:
            assert f"`{name}`" in text, name


@pytest.mark.thorough
def test_the_method_of_the_contributing_guide_works(tmp_path, monkeypatch):
    (tmp_path / "example_of_a_method.py").write_text(blocks("CONTRIBUTING.md", "python")[0])
    monkeypatch.syspath_prepend(tmp_path)
    method = importlib.import_module("example_of_a_method").ClippedAvg
    federation = descant.federation("quadratics", clients=4)
    settings = {"federation": federation, "model": "quadratic", "rounds": 3, "dtype": "float64",
                "backend": "vectorised"}
    clipped = descant.run(method(C=0.01), **settings)
    free = descant.run(method(C=1e9), **settings)
    plain = descant.run(algorithms.FedAvg(weights="uniform"), **settings)
    assert free.personal(0).theta.allclose(plain.personal(0).theta, rtol=1e-12)
    assert 0 < clipped.personal(0).theta.norm() <= 3 * 0.01 + 1e-12


@pytest.mark.slow
def test_the_commands_of_ones_own_method_work(tmp_path, monkeypatch):
    """The class of the guide in a package where one stands: shown, run, resumed and checked."""
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Your own method")[2]
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "methods.py").write_text(blocks("CONTRIBUTING.md", "python")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setattr("sys.path", [*sys.path])
    [commands] = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    for command in commands.splitlines():
        done = call(*shlex.split(command)[1:])
        assert done.code == 0, done
    [test] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    scope: dict[str, object] = {}
    exec(test, scope)
    scope["test_clipped_avg"]()  # type: ignore[operator]
    [points] = re.findall(r"```toml\n(.*?)```", section, re.DOTALL)
    [(name, place)] = tomllib.loads(points)["project"]["entry-points"]["descant.algorithms"].items()
    assert getattr(sys.modules["my_package.methods"], place.partition(":")[2]).name == name


def test_the_line_of_metrics_is_a_real_one():
    shown = json.loads(blocks("docs/run-directory.md", "json")[0])
    federation = descant.federation("digits", partition="classes", clients=20, classes_per_client=2)
    run = descant.run("pfedme", federation=federation, rounds=1, cohort=10, backend="vectorised")

    def keys(value):
        return {k: keys(v) for k, v in value.items()} if isinstance(value, dict) else type(value)

    assert keys(shown) == keys(run.history[-1])


def test_the_files_that_the_architecture_names_are_there():
    named = re.findall(r"`([\w/]+/\w+\.py)`", (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    there = [path.as_posix() for folder in ("src", "tests", "benchmarks", "examples")
             for path in (ROOT / folder).rglob("*.py")]
    assert len(named) > 20
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in there)] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "methods").glob("*.md")), ids=lambda page: page.stem)
def test_the_functions_beside_the_equations_are_where_the_table_says(page):
    """`module.name` in a table is defined in a module of that name, not merely imported there."""
    code: dict[str, str] = {}
    for path in (ROOT / "src" / "descant").rglob("*.py"):
        code[path.stem] = code.get(path.stem, "") + path.read_text(encoding="utf-8")
    rows = "".join(re.findall(r"^\|.*\n", page.read_text(encoding="utf-8"), re.MULTILINE))
    named = [(module, name) for module, name in re.findall(r"`(?:\w+/)?(\w+)\.([A-Za-z]\w+)", rows)
             if module in code and name != "py"]
    assert named
    for module, name in named:
        assert re.search(rf"^(class|def) {name}\b", code[module], re.MULTILINE), f"{module}.{name}"


def test_the_belief_of_the_contributing_guide_is_that_of_ditto():
    [shown] = [code for code in blocks("CONTRIBUTING.md", "python") if "def belief" in code]
    assert shown.rstrip() in inspect.getsource(algorithms.Ditto)

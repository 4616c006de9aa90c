"""What the documents say is true: their examples run, and their line of metrics is a real one."""

from __future__ import annotations

import importlib
import json
import re
import tomllib
from pathlib import Path

import pytest
from torch import nn

import descant
from descant import algorithms
from descant.experiment.config import Experiment

ROOT = Path(__file__).parents[2]


def blocks(document: str, language: str) -> list[str]:
    text = (ROOT / document).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.thorough
@pytest.mark.parametrize("k", range(2))
def test_the_python_of_the_readme_runs(k, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    code = blocks("README.md", "python")[k].replace("rounds=50", "rounds=2")
    scope: dict[str, object] = {}
    exec(code, scope)
    assert capsys.readouterr().out.strip()
    if k == 0:
        assert isinstance(scope["model"], nn.Module)


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


def test_the_line_of_metrics_is_a_real_one():
    shown = json.loads(blocks("docs/run-directory.md", "json")[0])
    federation = descant.federation("digits", partition="classes", clients=20, classes_per_client=2)
    run = descant.run("pfedme", federation=federation, rounds=1, cohort=10, backend="vectorised")

    def keys(value):
        return {k: keys(v) for k, v in value.items()} if isinstance(value, dict) else type(value)

    assert keys(shown) == keys(run.history[-1])

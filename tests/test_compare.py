"""Comparing methods: the plan, what is done again and what is not, and the table."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from descant.algorithms import FedAvg, LocalTrain, pFedMe
from descant.errors import UsageError
from descant.experiment import compare
from descant.experiment import directory as layout
from descant.experiment.config import Experiment, read_toml
from descant.report.comparison import show_comparison

TOML = """
[data]
dataset = "digits"
partition = "classes"
clients = 6
[algorithm]
name = "pfedme"
K = 3
[train]
rounds = 4
cohort = 3
local = { steps = 2 }
backend = "vectorised"
[eval]
every = 2
[[algorithms]]
name = "localtrain"
[[algorithms]]
label = "tuned"
name = "fedavg"
finetune = 2
"""


@pytest.fixture
def tables(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "e.toml").write_text(TOML)
    return read_toml(tmp_path / "e.toml")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs are carried out in this process, one after another; says which."""
    played: list[str] = []

    class Pool:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def submit(self, play: Any, run: Any) -> Any:
            future: Any = compare.concurrent.futures.Future()
            played.append(f"{run.label} {run.seed}")
            try:
                future.set_result(play(run))
            except Exception as error:
                future.set_exception(error)
            return future

    monkeypatch.setattr(compare.concurrent.futures, "ProcessPoolExecutor", Pool)
    return played


def test_the_methods_of_a_file(tables: dict[str, Any]) -> None:
    assert compare.methods(tables) == {"pfedme": pFedMe(K=3), "localtrain": LocalTrain(),
                                       "tuned": FedAvg(finetune=2)}
    assert Experiment.parse(tables).algorithm == pFedMe(K=3)  # as `descant run` sees it


def test_equal_budgets(tables: dict[str, Any], tmp_path: Path) -> None:
    """pFedMe makes 3 steps on a batch, the others 1: they get 3 times its rounds, and as many evaluations."""
    planned = compare.plan(tables, [0, 5], tmp_path / "out", "steps")
    assert [(p.label, p.seed, p.rounds, p.tables["eval"]["every"]) for p in planned] == [
        (label, seed, rounds, every) for seed in (0, 5)
        for label, rounds, every in (("pfedme", 4, 2), ("localtrain", 12, 6), ("tuned", 12, 6))]
    for p in planned:  # a seed is one federation and one initial model for all
        assert (p.tables["data"]["seed"], p.tables["train"]["seed"]) == (p.seed, p.seed)
    assert {p.rounds for p in compare.plan(tables, [0], tmp_path / "out", "rounds")} == {4}
    fixed = tables | {"data": tables["data"] | {"seed": 7}}
    assert {p.tables["data"]["seed"] for p in compare.plan(fixed, [0, 1], tmp_path / "out")} == {7}


def test_what_is_missing_is_done_and_the_budgets_are_equal_on_disk(tables: dict[str, Any], tmp_path: Path,
                                                                   here: list[str]) -> None:
    out = tmp_path / "out"
    planned = compare.plan(tables, [0, 1], out)
    told: list[int] = []
    assert compare.carry_out(planned[:2], 1, told.append) == []
    assert here == ["pfedme 0", "localtrain 0"]
    assert told[-1] == 4 + 12
    assert compare.carry_out(planned, 1) == []
    assert here[2:] == ["tuned 0", "pfedme 1", "localtrain 1", "tuned 1"]
    assert compare.carry_out(planned, 1) == []
    assert len(here) == 6
    summaries = {(p.label, p.seed): json.loads((p.place / "summary.json").read_text()) for p in planned}
    assert {s["grad_steps"] for s in summaries.values()} == {4 * 3 * 2 * 3}

    rows = compare.collect(planned)
    assert [row.label for row in rows] == ["pfedme", "localtrain", "tuned"]
    values = [summaries["tuned", seed]["last"]["personal"]["test"]["accuracy"]["mean"] for seed in (0, 1)]
    assert rows[2].figures["personal"][0] == pytest.approx(sum(values) / 2, abs=1e-15)
    assert rows[2].figures["personal"][1] == pytest.approx(abs(values[0] - values[1]) / 2**0.5, abs=1e-15)
    assert "global" not in rows[1].figures
    assert {"personal_loss", "personal_balanced_accuracy", "worst_decile_best"} <= rows[0].figures.keys()
    [_, _, balanced] = compare.collect(planned, "balanced_accuracy")
    assert balanced.figures["personal"] == rows[2].figures["personal_balanced_accuracy"]
    assert balanced.figures["personal_accuracy"] == rows[2].figures["personal"]
    with pytest.raises(UsageError, match="unknown metric 'acuracy': did you mean 'accuracy'"):
        compare.collect(planned, "acuracy")

    compare.write(rows, planned, out)
    found = list(csv.DictReader((out / "results.csv").read_text().splitlines()))
    assert [row["method"] for row in found] == ["pfedme", "localtrain", "tuned"]
    assert float(found[2]["personal_mean"]) == rows[2].figures["personal"][0]
    assert found[1]["global_mean"] == ""
    assert (out / "comparison.png").read_bytes().startswith(b"\x89PNG")
    console = Console(width=200, record=True)
    show_comparison(console, rows)
    text = console.export_text()
    assert f"{rows[2].figures['personal'][0]:.4f}" in text


def test_a_stopped_run_is_resumed(tables: dict[str, Any], tmp_path: Path, here: list[str],
                                  monkeypatch: pytest.MonkeyPatch) -> None:
    [planned, *_] = compare.plan(tables, [0], tmp_path / "out")
    whole = compare.plan(tables, [0], tmp_path / "whole")[0]
    half = planned._replace(tables=planned.tables | {"train": planned.tables["train"] | {"rounds": 2}})
    assert compare.carry_out([half, whole], 1) == []
    (planned.place / "summary.json").unlink()
    assert compare.carry_out([planned], 1) == []
    assert layout.rounds(planned.place) == 4
    state = "checkpoint/state.safetensors"
    assert (planned.place / state).read_bytes() == (whole.place / state).read_bytes()


def test_a_run_that_fails_does_not_stop_the_others(tables: dict[str, Any], tmp_path: Path, here: list[str]
                                                   ) -> None:
    planned = compare.plan(tables, [0], tmp_path / "out")
    planned[0].place.mkdir(parents=True)
    (planned[0].place / "something").write_text("of the user's")
    [(run, why)] = compare.carry_out(planned, 1)
    assert run.label == "pfedme"
    assert "not empty" in why
    assert [row.label for row in compare.collect(planned)] == ["localtrain", "tuned"]


def test_a_directory_holds_one_comparison(tables: dict[str, Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    compare.prepare(out, tables, "steps")
    compare.prepare(out, tables, "steps")
    for other, match in ((tables, "rounds"), (tables | {"train": {"rounds": 5}}, "steps")):
        with pytest.raises(UsageError, match="another comparison"):
            compare.prepare(out, other, match)  # type: ignore[arg-type]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(UsageError, match="not empty"):
        compare.prepare(tmp_path / "full", tables, "steps")


@pytest.mark.parametrize(("change", "words"), [
    ({"algorithms": [{"name": "fedavgg"}]}, ["algorithms[0].name", "did you mean 'fedavg'?"]),
    ({"algorithms": [{"name": "pfedme"}]}, ["algorithms[0]", "'pfedme'", "label"]),
    ({"algorithms": [{"name": "fedavg", "label": "../up"}]}, ["label", "directory"]),
    ({"algorithms": ["fedavg"]}, ["algorithms[0]", "section"]),
    ({"algorithms": [{"name": "fedavg", "finetune": -1}]}, ["algorithms[0].finetune", "at least 0"]),
])
def test_bad_files(tables: dict[str, Any], tmp_path: Path, change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        compare.plan(tables | change, [0], tmp_path)
    for word in words:
        assert word in str(caught.value)


def test_bad_seeds(tables: dict[str, Any], tmp_path: Path) -> None:
    for seeds in ([], [1, 1]):
        with pytest.raises(UsageError, match="seeds"):
            compare.plan(tables, seeds, tmp_path)


@pytest.mark.parametrize("name", ["pfedbred", "one_stage_fedprox", "cgpfl", "fedmap", "pfedgt"])
def test_every_experiment_of_the_project_can_be_read(name: str) -> None:
    tables = read_toml(Path(__file__).parents[1] / "experiments" / f"{name}.toml")
    assert tables["algorithm"]["name"] == name
    Experiment.parse(tables)
    labels = compare.methods(tables)
    for baseline in ("localtrain", "fedavg", "fedavg + fine-tuning", "pfedme"):
        assert baseline in labels

"""Run directories: damage to any of their files is told, or changes nothing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

import descant
from benchmarks.fuzz.case import Kind
from benchmarks.fuzz.draw import CHANGES, Change
from descant.core.tree import leaves
from descant.experiment import directory
from descant.experiment import run as runs

ROUNDS = 2
RELIED_ON = ("metrics.jsonl", "clients.csv", "checkpoint")  # by a resume; config.toml may be edited


def make_run(out: Path) -> Path:
    """A small run whose clients have states; without its pictures, which no resume reads."""
    fed = descant.federation("quadratics", clients=3, rows=6, dim=2, noise=0.1)
    descant.run("ditto", federation=fed, model="quadratic", rounds=ROUNDS, cohort=2, batch=2,
                local={"steps": 1}, eval={"every": 1}, backend="loop", out=out)
    for picture in out.glob("*.png"):
        picture.unlink()
    return out


def outcome(out: Path) -> tuple[Any, ...]:
    """What a resume would go on from."""
    run = runs.load(out)
    directory.truncate(out, run.rounds)
    kept = ("last", "best")
    models = [run.personal(client, which).theta for which in kept for client in range(3)]
    models += [leaf for which in kept for _, leaf in leaves(run.snapshot(which).server)]
    return run.history, run.best_round, run.best_key, models, (out / "clients.csv").read_text()


def kind(home: Path) -> Kind:
    whole = make_run(home / "whole")
    expected = outcome(whole)
    files = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())

    def use(given: tuple[Path, Change]) -> None:
        name, change = given
        out = home / "run"
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(whole, out)
        (out / name).write_bytes(change.of((out / name).read_bytes()))
        *facts, models, clients = outcome(out)
        if name.parts[0] in RELIED_ON:
            *known, expected_models, expected_clients = expected
            assert facts == known
            assert clients == expected_clients
            assert all(torch.equal(a, b) for a, b in zip(models, expected_models, strict=True))

    return Kind("run directories", st.tuples(st.sampled_from(files), CHANGES), use)

"""A crash at every single step of writing leaves a state from which the run continues bit for bit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import descant
from descant.core.files import write_atomic
from descant.experiment import directory, run


class Crash(BaseException):
    """The process is gone: nothing that would follow happens."""


class Crasher:
    """Lets the first `allowed` operations on files through; from then on there is no process."""

    OPERATIONS = ((os, "fsync"), (os, "fdatasync"), (os, "pwrite"), (Path, "replace"), (Path, "unlink"))

    def __init__(self, monkeypatch: pytest.MonkeyPatch, allowed: int | None) -> None:
        self.count = 0
        for owner, name in self.OPERATIONS:
            monkeypatch.setattr(owner, name, self._guard(getattr(owner, name), allowed))

    def _guard(self, operation, allowed):
        def guarded(*args, **kwargs):
            if allowed is not None and self.count >= allowed:
                raise Crash
            self.count += 1
            return operation(*args, **kwargs)

        return guarded


@pytest.fixture(autouse=True)
def _quick_picture(monkeypatch):
    """A picture takes as long as everything else here, and how it is drawn does not matter."""
    monkeypatch.setattr(run, "draw_curve",
                        lambda history, best, path, *about: write_atomic(path, b"a picture"))


FEDERATION = descant.federation("quadratics", clients=5, rows=6, dim=3, noise=0.1)
METHODS = {"pfedme": descant.algorithms.pFedMe(K=1), "fedavg": descant.algorithms.FedAvg()}


def play(out: Path, method: str, resume: bool = False):
    """4 of 5 clients a round: some take part in both rounds, and the second overwrites their states."""
    return descant.run(METHODS[method], federation=FEDERATION, model="quadratic", rounds=2, cohort=4, batch=2,
                       local={"steps": 2}, eval={"every": 1}, backend="loop", out=out, resume=resume)


def contents(out: Path) -> dict[str, bytes]:
    kept = out / "checkpoint"
    return {str(p.relative_to(kept)): p.read_bytes() for p in sorted(kept.rglob("*")) if p.is_file()}


def without_clock(rows: list[dict]) -> list[dict]:
    return [{k: v for k, v in row.items() if "seconds" not in k} for row in rows]


@pytest.mark.thorough
@pytest.mark.parametrize(("method", "every"), [  # with and without client states
    ("pfedme", 5), *(pytest.param(method, 1, marks=pytest.mark.slow) for method in ("pfedme", "fedavg"))])
def test_crash_at_every_step_of_writing(tmp_path, method, every):
    with pytest.MonkeyPatch.context() as patch:
        steps = Crasher(patch, allowed=None)
        whole = play(tmp_path / "whole", method)
    expected = contents(tmp_path / "whole")
    assert steps.count > 15  # there is something to interrupt

    for allowed in range(0, steps.count, every):
        out = tmp_path / f"crash{allowed}"
        with pytest.MonkeyPatch.context() as patch:
            Crasher(patch, allowed)
            with pytest.raises(Crash):
                play(out, method)
        continued = play(out, method, resume=True)
        # what a crash leaves half-written is never read, and goes with the next write
        found = {name: data for name, data in contents(out).items() if not name.endswith(".tmp")}
        assert found == expected, f"crash after {allowed} operations"
        assert without_clock(directory.read_metrics(out)) == without_clock(whole.history)
        assert continued.best_round == whole.best_round
        rows = (out / "clients.csv").read_text().splitlines()
        assert rows == (tmp_path / "whole" / "clients.csv").read_text().splitlines()


@pytest.mark.thorough
def test_the_best_round_is_kept_when_later_rounds_are_worse(tmp_path):
    """Its models are those of that round, also after a resume."""
    federation = descant.federation("digits", partition="classes", clients=6, classes_per_client=3)
    settings = {"federation": federation, "rounds": 5, "cohort": 3, "eval": {"every": 1},
                "backend": "vectorised"}
    # steps that are far too large: the first round is better than the last
    method = descant.algorithms.Ditto(solver=descant.SGD(lr=8.0), lam=0.01)
    whole = descant.run(method, out=tmp_path / "run", **settings)
    best = whole.best_round
    assert best is not None
    assert best < 5
    shorter = descant.run(method, **(settings | {"rounds": best}))
    again = descant.load(tmp_path / "run")
    for client in range(6):
        for name, tensor in shorter.personal_model(client, "last").state_dict().items():
            assert (again.personal_model(client, "best").state_dict()[name] == tensor).all()
    differs = [not again.personal(c, "best").theta.equal(again.personal(c, "last").theta) for c in range(6)]
    assert any(differs)

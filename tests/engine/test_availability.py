"""Traces: who is sampled, who is late, and that a resumed run sees the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import descant
from cli_helpers import call
from descant import UsageError
from descant.algorithms import FedAvg
from descant.engine.availability import read_trace
from helpers import engine, ragged

NAMES = ("a", "b", "c", "d")


def written(tmp_path: Path, text: str) -> str:
    (tmp_path / "trace.csv").write_text(text)
    return str(tmp_path / "trace.csv")


def test_a_trace_by_brute_force(tmp_path):
    rng = np.random.default_rng(0)
    lines = [(rng.choice(["a", "b", "c"]), int(first), int(first + rng.integers(0, 4)), float(rng.random()))
             for first in rng.integers(1, 20, 12)]
    text = "pace,client,first,last\n" + "".join(f"{p},{c},{f},{t}\n" for c, f, t, p in lines)
    trace = read_trace(written(tmp_path, text), NAMES)
    named = {c for c, *_ in lines}
    steps = np.array([3, 5, 7, 9])
    for number in range(1, 25):
        expected = [name not in named or any(c == name and f <= number <= t for c, f, t, _ in lines)
                    for name in NAMES]
        assert trace.reachable(number).tolist() == expected
        now = {c: p for c, f, t, p in lines if f <= number <= t}  # the last of several
        paces = [now.get(name, 0.0) for name in NAMES]
        assert trace.seconds(number, steps) == pytest.approx(np.array(paces) * steps)


def cohorts(path: str, rounds: int, **train: Any) -> list[list[int]]:
    with engine(FedAvg(), ragged(), availability=path, rounds=rounds, **train) as e:
        found = []
        for number in range(1, rounds + 1):
            e.training.number = number
            found.append(e.training.sample()[0].tolist())
        return found


def test_only_who_is_there_is_sampled(tmp_path):
    federation = ragged()
    first, second, *rest = federation.names
    text = f"client,first,last\n{first},3,4\n{second},1,2\n{second},4,\n"
    path = written(tmp_path, text + "".join(f"{name},5,\n" for name in rest))
    everyone = list(range(federation.population))
    assert cohorts(path, 6) == [[1], [1], [0], [0, 1], everyone[1:], everyone[1:]]
    assert all(len(cohort) <= 2 for cohort in cohorts(path, 6, cohort=2))
    assert cohorts(path, 6, cohort=1)[2] == [0]
    assert {k for cohort in cohorts(path, 40, cohort=1, sampling="samples") for k in cohort} == set(everyone)


def test_a_trace_of_everyone_changes_nothing(tmp_path):
    path = written(tmp_path, "client,first,last\n")
    for train in ({"cohort": 2}, {"cohort": 2, "sampling": "samples"}, {"cohort": 3, "drop": 0.4}):
        with engine(FedAvg(), ragged(), **train) as e:
            e.training.number = 7
            assert cohorts(path, 7, **train)[-1] == e.training.sample()[0].tolist()


def test_stragglers_miss_the_deadline(tmp_path):
    """With two epochs of batches of 4, a client with n rows takes 2 ceil(n / 4) steps."""
    federation = ragged()
    sizes = federation.train.sizes[: federation.population]
    path = written(tmp_path, "client,first,last,pace\n" + "".join(f"{n},1,,1.5\n" for n in federation.names))
    seconds = 1.5 * 2 * np.ceil(sizes / 4)
    limit = float(np.sort(seconds)[1])
    train: dict[str, Any] = {"availability": path, "local": {"epochs": 2}, "rounds": 3}
    with engine(FedAvg(), federation, deadline=limit, **train) as e:
        [report] = e.play(1)
        expected = np.flatnonzero(seconds <= limit)
        assert 0 < len(expected) < len(sizes)
        assert (report.participants, report.late, report.away) == (
            len(expected), len(sizes) - len(expected), 0)
        assert np.flatnonzero(e.training.store.took_part(e.everyone)).tolist() == expected.tolist()
    with engine(FedAvg(), federation, deadline=0.01, **train) as e:  # nobody can: the fastest is waited for
        assert e.training.sample()[0].tolist() == np.flatnonzero(seconds == seconds.min()).tolist()


def test_a_file_and_a_call_are_the_same_and_resume(tmp_path):
    written(tmp_path, "client,first,last\n0,1,2\n1,3,\n")
    (tmp_path / "e.toml").write_text("""
[data]
dataset = "digits"
partition = "classes"
clients = 4
[algorithm]
name = "fedavg"
[train]
rounds = 4
backend = "vectorised"
availability = "trace.csv"
[eval]
every = 1
""")
    assert call("run", tmp_path / "e.toml", "--out", tmp_path / "typed").code == 0
    settings: dict[str, Any] = {
        "federation": descant.federation("digits", partition="classes", clients=4), "backend": "vectorised",
        "availability": tmp_path / "trace.csv", "eval": {"every": 1}}
    descant.run("fedavg", rounds=2, out=tmp_path / "python", **settings)
    run = descant.resume(tmp_path / "python", rounds=4)
    typed, python = ((tmp_path / name / "checkpoint" / "state.safetensors").read_bytes()
                     for name in ("typed", "python"))
    assert typed == python
    assert [(row["participants"], row["away"]) for row in run.history] == [(3, 1)] * 4
    assert "late" not in run.history[0]
    written(tmp_path, "client,first,last\n0,1,3\n1,3,\n")
    with pytest.raises(UsageError, match=r"changed setup \(train.availability"):
        descant.resume(tmp_path / "python", rounds=6)


@pytest.mark.parametrize(("text", "words"), [
    ("client,first\na,1\n", "no column 'last'"), ("client,first,last\nz,1,2\n", "line 2: unknown client 'z'"),
    ("client,first,last\na,0,2\n", "line 2, first must be the number of a round"),
    ("client,first,last\na,5,2\n", "last = 2 is before first = 5"),
    ("client,first,last,pace\na,1,2,slow\n", "pace must be seconds"), ("", "no column 'client'"),
])
def test_a_wrong_trace(text, words, tmp_path):
    with pytest.raises(UsageError, match=words):
        read_trace(written(tmp_path, text), NAMES)


def test_what_is_refused(tmp_path):
    federation = ragged()
    lines = "".join(f"{name},1,3\n{name},5,9\n" for name in federation.names)
    path = written(tmp_path, f"client,first,last\n{lines}")
    with pytest.raises(UsageError, match="nobody can be reached in round 4"):
        descant.run("fedavg", federation=federation, rounds=5, availability=path)
    with pytest.raises(UsageError, match="needs the pace"):
        descant.run("fedavg", federation=federation, deadline=1.0)
    with pytest.raises(UsageError, match="cannot read"):
        descant.run("fedavg", federation=federation, availability=str(tmp_path / "none.csv"))

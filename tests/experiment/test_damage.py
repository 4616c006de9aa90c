"""What a resume relies on is sealed: a digit that changed on disk is told, and not believed."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import descant
from descant.errors import DescantError
from descant.experiment import directory

FEDERATION = descant.Federation.from_arrays(
    np.random.default_rng(0).standard_normal((40, 3)), np.arange(40) % 2, np.repeat(np.arange(4), 10),
    names=["north", 'a "quoted" name', "west", "south, east"])


def play(out: Path, rounds: int = 3, **options: Any) -> Any:
    return descant.run("ditto", federation=FEDERATION, rounds=rounds, batch=4, local={"steps": 1},
                       eval={"every": 2}, backend="loop", out=out, **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("damage") / "run"
    play(out)
    return out


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def replace(path: Path, old: str, new: str) -> None:
    with path.open(encoding="utf-8", newline="") as file:
        text = file.read()
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8", newline="")


def refused(out: Path) -> str:
    with pytest.raises(DescantError) as error:
        play(out, 4, resume=True)
    return str(error.value)


def test_a_whole_run_is_resumed(out: Path) -> None:
    assert play(out, 4, resume=True).rounds == 4
    names = {row[2] for row in _rows(out)}
    assert names == {"name", *FEDERATION.names}


def _rows(out: Path) -> list[list[str]]:
    with (out / "clients.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


@pytest.mark.parametrize("field", ["seconds", "grad_steps", "bytes_up", "loss", "worst_decile", "std"])
def test_a_digit_of_the_metrics(out: Path, field: str) -> None:
    line = (out / "metrics.jsonl").read_text().splitlines()[1]
    start = line.index(f'"{field}": ') + len(field) + 4
    at = next(k for k in range(start, len(line)) if line[k] in "123456789")
    replace(out / "metrics.jsonl", line, line[:at] + ("8" if line[at] == "9" else "9") + line[at + 1 :])
    assert "metrics.jsonl is damaged (its checksum does not match): restore it from a copy" in refused(out)
    with pytest.raises(DescantError, match="checksum"):
        directory.read_metrics(out)


@pytest.mark.parametrize(("old", "new", "words"), [
    ('"check": ', '"chock": ', "round 2 has no checksum"),
    ('"round": 2', '"round": 3', "its rounds are not 1, 2, 3"),
    ("{", "[", "is damaged"),
    ('"loss": ', '"lass": ', "checksum"),
])
def test_a_line_of_the_metrics(out: Path, old: str, new: str, words: str) -> None:
    line = (out / "metrics.jsonl").read_text().splitlines()[1]
    replace(out / "metrics.jsonl", line, line.replace(old, new, 1))
    assert words in refused(out)


@pytest.mark.parametrize(("old", "new"), [
    ("personal_test_loss", "personal_test_lost"), ("\n2,0,north,0,", "\n2,0,south,0,"),
    ("\n2,1,", "\n2,7,"), ("\n2,1,", "\n1,1,"), ("south, east", "south; east"),
])
def test_a_cell_of_the_clients(out: Path, old: str, new: str) -> None:
    replace(out / "clients.csv", old, new)
    assert "clients.csv is damaged (its lines of round 2 are not as they were written)" in refused(out)


def test_clients_that_are_gone(out: Path) -> None:
    (out / "clients.csv").unlink()
    assert "its lines of round 2 are not as they were written" in refused(out)


def test_a_line_that_is_no_client(out: Path) -> None:
    replace(out / "clients.csv", "\n2,0,", "\ntwo,0,")
    assert "clients.csv is damaged (invalid literal" in refused(out)


def test_lines_that_were_never_whole(out: Path) -> None:
    """A kill while lines are appended leaves no damage."""
    with (out / "clients.csv").open("a", newline="") as file:
        file.write('4,1,"a ""quo')
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "sec')
    assert play(out, 4, resume=True).rounds == 4
    assert [row[0] for row in _rows(out)] == ["round", *"2222", *"3333", *"4444"]
    killed = out.parent / "killed"
    killed.mkdir()
    (killed / "clients.csv").write_text("round,cli")
    directory.truncate(killed, 0)
    assert not (killed / "clients.csv").exists()


def test_a_run_of_an_older_version(out: Path) -> None:
    """It has no checksums; the rounds that are added have them."""
    path = out / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({name: value for name, value in row.items()
                                        if name not in ("check", "clients_csv")}) + "\n" for row in rows))
    assert play(out, 4, resume=True).rounds == 4
    assert ["check" in json.loads(line) for line in path.read_text().splitlines()] == [False] * 3 + [True]
    assert play(out, 5, resume=True).rounds == 5


def test_a_history_is_that_of_the_run(finished: Path) -> None:
    """The checksums are no part of it."""
    assert play(finished.parent / "again").history[0].keys() == directory.read_metrics(finished)[0].keys()

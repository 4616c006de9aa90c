"""Experiment files with numbers that no machine holds, and text that is no TOML."""

from __future__ import annotations

from pathlib import Path

import pytest

from descant.core import fields
from descant.engine.settings import Train
from descant.errors import UsageError
from descant.experiment.config import DEMO, Experiment, override, read_toml

HUGE = "1" + "0" * 309


@pytest.mark.parametrize(("text", "words"), [
    (f"[train]\nrounds = {HUGE}", "train.rounds is a whole number beyond 64 bits"),
    (f"[algorithm]\nname = 'pfedme'\nlam = {HUGE}", "algorithm.lam is a whole number beyond 64 bits"),
    (f"[data]\ndataset = 'digits'\nmean = [1, {HUGE}]", "data.mean[1] is a whole number beyond 64 bits"),
    (f"[train]\nseed = 0x{'f' * 5000}", "train.seed is a whole number beyond 64 bits"),
    (f"[train]\nseed = {'9' * 5000}", "is not valid TOML"),
    (f"[train]\nseed = {'[' * 5000}", "is not valid TOML"),
    ("[train]\nrounds = 9223372036854775808", "from -2^63 to 2^63 - 1 are allowed"),
])
def test_numbers_beyond_64_bits(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "e.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        Experiment.parse(read_toml(path))
    assert words in str(error.value)
    assert str(path) in str(error.value)
    assert len(str(error.value)) < 500


def test_numbers_from_python_and_the_command_line() -> None:
    with pytest.raises(UsageError, match=r"train\.rounds is a whole number beyond 64 bits"):
        Train(rounds=10**309)
    with pytest.raises(UsageError, match=r"algorithm\.lam is too large for a number"):
        Experiment.parse(DEMO | {"algorithm": {"name": "pfedme", "lam": 10**309}})
    with pytest.raises(UsageError, match="beyond 64 bits"):
        override(DEMO, [f"train.rounds={HUGE}"])
    assert fields.written("[" * 5000) == "[" * 5000
    assert fields.written("9" * 5000) == "9" * 5000


@pytest.mark.parametrize("place", ["a\x00b/c", "~nobody-of-this-name/x", "x/" * 3000, "/" + "y" * 3000])
def test_places_that_no_disk_has(tmp_path: Path, place: str) -> None:
    with pytest.raises(UsageError):
        Experiment.parse(DEMO | {"data": {"dataset": place}}).data.federation()
    with pytest.raises(UsageError):
        Experiment.parse(DEMO | {"data": {"dataset": "digits", "partition_file": place}}).data.federation()

"""A few cases of every kind that `make fuzz` tries, always the same ones."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import strategies as st

from benchmarks.fuzz import case
from benchmarks.fuzz.kinds import KINDS
from descant.core import sealed
from descant.errors import DescantError

pytestmark = pytest.mark.thorough


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_some_cases_of_a_kind(name: str, tmp_path: Path) -> None:
    pytest.importorskip("flwr" if name in ("requests", "replies", "frames") else "pyarrow")
    assert 0 <= case.run_cases(KINDS[name](tmp_path), 30, 1) <= 300


def take_long(given: int) -> None:
    time.sleep(0.01)
    while given > 5:
        pass


def take_memory(given: int) -> None:
    bytearray(given * 10**11)  # refused at once; what fits would be filled with zeros, slowly


@pytest.mark.parametrize(("use", "finding"), [
    (lambda given: 1 // (given - 5), ZeroDivisionError), (take_long, case.Hang), (take_memory, MemoryError)])
def test_findings_are_raised(use: object, finding: type[BaseException], monkeypatch: pytest.MonkeyPatch
                             ) -> None:
    monkeypatch.setattr(case, "SECONDS", 0.05 if finding is case.Hang else case.SECONDS)
    with pytest.raises(finding):
        case.run_cases(case.Kind("numbers", st.integers(0, 9), use), 200, 0)  # type: ignore[arg-type]


def test_errors_of_descant_are_no_findings() -> None:
    def refuse(given: int) -> None:
        raise DescantError("no")

    assert case.run_cases(case.Kind("numbers", st.integers(0, 9), refuse), 10, 0) == 10


class Digit:
    """A change of one digit of a loss."""

    @staticmethod
    def of(data: bytes) -> bytes:
        at = data.index(b"loss") + data[data.index(b"loss"):].index(b".") + 1
        return data[:at] + bytes([48 + (data[at] - 48 + 1) % 10]) + data[at + 1 :]


@pytest.mark.parametrize("is_sealed", [True, False])
def test_a_silent_difference_is_a_finding(is_sealed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                          ) -> None:
    """A digit of the metrics: told because of the checksum, and seen by a case if nobody looks at that."""
    if not is_sealed:
        monkeypatch.setattr(sealed, "text_check", lambda text: "00000000")
    kind = KINDS["runs"](tmp_path)
    planted = kind._replace(inputs=st.just((Path("metrics.jsonl"), Digit)))
    if is_sealed:
        assert case.run_cases(planted, 1, 0) == 1
    else:
        with pytest.raises(AssertionError):
            case.run_cases(planted, 1, 0)

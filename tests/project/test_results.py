"""Figures in docs/results.md are those of the committed results."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

HOME = Path(__file__).parents[2]
RESULTS = sorted((HOME / "experiments" / "results").glob("*/results.csv"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.parent.name)
def test_a_table_is_that_of_its_results(path: Path) -> None:
    spec = importlib.util.spec_from_file_location("table", HOME / "experiments" / "table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (HOME / "docs" / "results.md").read_text(encoding="utf-8")
    assert f"](../{path.relative_to(HOME).as_posix()})" in text
    assert module.table(path) in text


def test_there_are_results() -> None:
    assert RESULTS

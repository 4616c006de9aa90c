"""The tests that SECURITY.md names exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_behind_each_threat_there_is_a_test() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) > 15
    for row in rows:
        named = re.findall(r"`([\w.]*)::(\w+)`", row)
        assert named, row
        file = ""
        for place, test in named:
            file = place or file  # "::test" is in the file that was named before it
            source = (ROOT / "tests" / "deploy" / file).read_text(encoding="utf-8")
            assert f"def {test}(" in source, f"{file}::{test}"

"""The table of docs/results.md that belongs to a comparison's results.csv.

    python experiments/table.py experiments/results/field_har/results.csv
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

HEAD = """\
| method | personal | global | worst 10 % | gain over alone | worse off | rounds | MB per client |
|---|---|---|---|---|---|---|---|"""


def table(path: Path) -> str:
    """Accuracies in percent, the best method first, ± the reach of the 95 % interval."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return "\n".join([HEAD, *(f"| {' | '.join(_cells(row))} |" for row in rows)])


def _cells(row: dict[str, str]) -> list[str]:
    reach = (float(row["personal_high"]) - float(row["personal_low"])) / 2
    return [row["method"], f"{_percent(row['personal'])} ± {100 * reach:.2f}", _percent(row["global"]),
            _percent(row["worst_decile"]), _percent(row["gain"], "+.2f"),
            f"{_percent(row['worse_off'], '.0f')} %" if row["worse_off"] else "",
            row["rounds"], f"{float(row['bytes_per_client']) / 1e6:.1f}"]


def _percent(text: str, form: str = ".2f") -> str:
    return f"{100 * float(text):{form}}" if text else ""


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))

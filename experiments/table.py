"""The table of docs/results.md that belongs to a comparison's results.csv, and the sentences below it.

    python experiments/table.py experiments/results/field_har/results.csv
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

TUNED = "FedAvg + fine-tuning"
SINCE = {  # what has changed since a comparison was run, by its directory; counted with the rules of then
    "field_har": "Since these runs chance decides which labels a client's few validation rows have. In all "
                 "five repetitions none of the 30 people was validated on standing, and all 30 were on "
                 "walking, sitting and laying.",
}
HEAD = """\
| method | personal | global | worst 10 % | gain over alone | worse off | rounds | MB per client |
|---|---|---|---|---|---|---|---|"""


def table(path: Path) -> str:
    """Accuracies in percent, the best method first, ± the reach of the 95 % interval."""
    return "\n".join([HEAD, *(f"| {' | '.join(_cells(row))} |" for row in _read(path))])


def _cells(row: dict[str, str]) -> list[str]:
    reach = (float(row["personal_high"]) - float(row["personal_low"])) / 2
    return [row["method"], f"{_percent(row['personal'])} ± {100 * reach:.2f}", _percent(row["global"]),
            _percent(row["worst_decile"]), _percent(row["gain"], "+.2f"),
            f"{_percent(row['worse_off'], '.0f')} %" if row["worse_off"] else "",
            row["rounds"], f"{float(row['bytes_per_client']) / 1e6:.1f}"]


def _percent(text: str, form: str = ".2f") -> str:
    return f"{100 * float(text):{form}}" if text else ""


def sentences(path: Path) -> list[str]:
    """What results.csv and the differences.csv beside it say: who is best, beside whom, and who gains."""
    rows, pairs = (_read(path.with_name(name)) for name in ("results.csv", "differences.csv"))
    best = rows[0]["method"]
    improving = [row["method"] for row in rows if 2 * int(row["still_improving"]) > int(row["seeds"])]
    beside = {pair["against"]: pair for pair in pairs if pair["method"] == best}
    behind, level = ([_gap(pair) for other, pair in beside.items()
                      if other not in improving and (float(pair["p"]) < 0.05) == significant]
                     for significant in (True, False))
    ends = f"{_percent(rows[0]['personal_low'], '.1f')} to {_percent(rows[0]['personal_high'], '.1f')}"
    said = [f"**{best} is best**, with {_percent(rows[0]['personal'], '.1f')} % (95 % interval {ends}).",
            f"Significantly behind it, in points with simultaneous 95 % intervals: {', '.join(behind)}.",
            f"No significant difference from {', '.join(level)}."]
    if improving:
        said.append(f"No verdict on {', '.join(improving)}: still improving at the end.")
    below = [row["method"] for row in rows if row["gain"] and float(row["gain"]) < 0]
    tuned = next(row for row in rows if row["method"] == TUNED)
    gains, worse = ([_percent(row[name], form) for row in (rows[0], tuned)]
                    for name, form in (("gain", ".1f"), ("worse_off", ".0f")))
    return [*said, f"**Over training alone** a client gains {gains[0]} points with {best}, and {gains[1]} "
                   f"with {TUNED}; worse off than alone are {worse[0]} % and {worse[1]} % of the clients.",
            f"Below training alone on average: {', '.join(below) or 'none'}.",
            *([SINCE[path.parent.name]] if path.parent.name in SINCE else [])]


def _gap(pair: dict[str, str]) -> str:
    mean, low, high = (_percent(pair[name], ".1f") for name in ("mean", "low", "high"))
    return f"{pair['against']} ({mean}, {low} to {high})"


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    place = Path(sys.argv[1])
    print(table(place), "", *(f"- {said}" for said in sentences(place)), sep="\n")

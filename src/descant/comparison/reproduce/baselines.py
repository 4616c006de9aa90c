"""How the methods of a paper stand beside LocalTrain and FedAvg with fine-tuning, which papers often leave
out. By the clients' own models and the metric that decides; what stands is computed."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

from descant.algorithms import FedAvg, LocalTrain
from descant.comparison.paper import Paper
from descant.comparison.plan import Method
from descant.comparison.results import Results
from descant.core.files import write_csv
from descant.core.metric import is_share

FILE = "baselines.csv"

Stands: TypeAlias = Literal["ahead", "behind", "still improving", "open"]
WORDS: dict[Stands, str] = {
    "ahead": "ahead of it", "behind": "behind it", "still improving": "behind it, but still improving",
    "open": "no significant difference"}


class Beside(NamedTuple):
    """A method beside a baseline; figures as people read them."""

    baseline: str
    method: str
    baseline_figure: str
    method_figure: str
    p: str  # corrected over all pairs of methods
    stands: Stands


def of(found: Results) -> list[Beside]:
    """Every method that is compared by its clients' own models, beside each baseline. What the paper scores
    by a model for all is left out: its clients' own models are another line of the table, or none."""
    if found.analysis is None:
        return []
    levels = {row.label: row.figures["personal"].mean for row in found.rows}
    own = {label for label in found.compared if _is_baseline(found.plan.methods[label])}
    methods = [label for label in found.compared
               if label not in own and not _is_global(found.plan.paper, label)]
    rows = []
    for baseline in (label for label in found.compared if label in own):
        for method in methods:
            pair = found.analysis.beside(found.compared.index(method), found.compared.index(baseline))
            stands: Stands = "open"
            if pair.p is not None and pair.p < found.analysis.level:
                stands = "ahead" if pair.mean > 0 else (
                    "still improving" if method in found.unfinished else "behind")
            rows.append(Beside(baseline, method, _figure(found.metric, levels[baseline]),
                               _figure(found.metric, levels[method]),
                               "" if pair.p is None else f"{pair.p:.3g}", stands))
    return rows


def _is_baseline(method: Method) -> bool:
    algorithm = method.algorithm
    return isinstance(algorithm, LocalTrain) or (isinstance(algorithm, FedAvg) and bool(algorithm.finetune))


def _is_global(paper: Paper | None, label: str) -> bool:
    return paper is not None and label in paper.figures and paper.figures[label].column.startswith("global")


def _figure(metric: str, value: float) -> str:
    return f"{100 * value:.2f} %" if is_share(metric) else f"{value:.4g}"


def sentences(rows: Sequence[Beside]) -> list[str]:
    """What stands how beside each baseline."""
    said = []
    for baseline in dict.fromkeys(row.baseline for row in rows):
        mine = [row for row in rows if row.baseline == baseline]
        parts = [f"{WORDS[stands]}: {', '.join(f'{row.method} ({row.method_figure})' for row in some)}"
                 for stands in get_args(Stands) if (some := [row for row in mine if row.stands == stands])]
        said.append(f"**{baseline}** has {mine[0].baseline_figure}; {'; '.join(parts)}.")
    return said


def changes(before: Sequence[Beside], after: Sequence[Beside]) -> list[str]:
    """What stands otherwise afterwards."""
    stood = {(row.baseline, row.method): row.stands for row in before}
    return [f"{row.method} beside {row.baseline} ({stood[at]}, then {row.stands})" for row in after
            if (at := (row.baseline, row.method)) in stood and stood[at] != row.stands]


def write(rows: Sequence[Beside], place: Path) -> None:
    write_csv(place / FILE, [Beside._fields, *rows])


def read(place: Path) -> list[Beside]:
    """What was kept; nothing of a study, or of what was kept before there was such a file."""
    try:
        with (place / FILE).open(newline="", encoding="utf-8") as file:
            return [Beside(**row) for row in csv.DictReader(file)]  # type: ignore[arg-type]
    except FileNotFoundError:
        return []

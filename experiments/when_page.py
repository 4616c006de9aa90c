"""docs/results/when.md, its picture, and the evidence that `descant advise` answers from, all written from
what experiments/when.py keeps.

    python experiments/when_page.py
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from when import FAMILIES as PLANNED
from when import METHODS, TOO_FEW_ROUNDS, Family
from when import cells as planned
from when_cells import ALONE, FAMILIES, FINE_TUNED, MEASURES, USED, Gap, Seen, judged, read

from descant.algorithms import ALGORITHMS
from descant.core.units import times

HOME = Path(__file__).parents[1]
PAGE = HOME / "docs" / "results" / "when.md"
EVIDENCE = HOME / "src" / "descant" / "experiment" / "evidence.csv"
MOST_UNSEEN = 0.5  # beyond this share of rows a cell is named
ENOUGH = 12  # cells with others to predict them by, before measures are judged
SHORT = {ALONE: "alone", FINE_TUNED: "FedAvg\n+ FT"}


# -- the picture -------------------------------------------------------------------------------------------


class Panel(NamedTuple):
    """What a row of panels shows."""

    title: str
    gap: Callable[[Seen], Gap]
    words: Callable[[Seen], str]
    colours: str
    reach: tuple[float, float]  # points at the ends of the colours


def _winner(cell: Seen) -> str:
    best = SHORT.get(cell.best, cell.best)
    return best if cell.best == cell.simple else f"{best}\n{cell.lead.mean:+.1f}"


PANELS = (
    Panel("learning together over training alone", lambda cell: cell.together,
          lambda cell: f"{cell.together.mean:+.1f}", "PuOr", (-20.0, 20.0)),
    Panel("the best method over the better of training alone and FedAvg + fine-tuning",
          lambda cell: cell.lead, _winner, "Blues", (0.0, 8.0)),
)


def draw(cells: Sequence[Seen], path: Path) -> None:
    """Heat maps: colours and numbers are points of accuracy; what is significant has a frame and is bold."""
    figure = Figure(figsize=(14.5, 7.6), layout="constrained")
    for part, panel in zip(figure.subfigures(2, 1, hspace=0.04), PANELS, strict=True):
        part.suptitle(f"Points gained: {panel.title}", fontsize=12)
        every = part.subplots(1, len(FAMILIES), width_ratios=[5, 5, 5, 4])
        colours = ScalarMappable(Normalize(*panel.reach), panel.colours)
        for axes, (family, title) in zip(every, FAMILIES.items(), strict=True):
            mine = [cell for cell in cells if cell.family == family]
            _map(axes, mine, PLANNED[family], panel, colours)
            axes.set_title(title, fontsize=11)
        bar = part.colorbar(colours, ax=every, extend="both" if panel.reach[0] else "max", pad=0.01)
        bar.set_label("points of accuracy")
        part.supxlabel("training rows of a client", fontsize=10)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _map(axes: Axes, cells: Sequence[Seen], family: Family, panel: Panel, colours: ScalarMappable) -> None:
    rows, levels = family.rows, list(family.levels)
    for number in range(len(levels)):
        for place in range(len(rows)):
            axes.add_patch(Rectangle((place, number), 1, 1, facecolor="white", edgecolor="0.8", hatch="//"))
    for cell in cells:
        place, gap = rows.index(cell.rows), panel.gap(cell)
        colour = colours.to_rgba(gap.mean)
        axes.add_patch(Rectangle((place, cell.number), 1, 1, facecolor=colour, edgecolor="white"))
        if gap.significant:
            axes.add_patch(Rectangle((place + 0.04, cell.number + 0.05), 0.92, 0.9, fill=False,
                                     edgecolor="black", linewidth=1.6))
        bright = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] > 0.55
        axes.text(place + 0.5, cell.number + 0.5, panel.words(cell), ha="center", va="center", fontsize=8,
                  color="black" if bright else "white", weight="bold" if gap.significant else "normal",
                  style="normal" if gap.significant else "italic")
    axes.set(xlim=(0, len(rows)), ylim=(0, len(levels)), xticks=np.arange(len(rows)) + 0.5,
             yticks=np.arange(len(levels)) + 0.5)
    axes.set_xticklabels([f"{each:,}" for each in rows])
    axes.set_yticklabels(levels)
    axes.tick_params(length=0, labelsize=9)


# -- the page ----------------------------------------------------------------------------------------------


HEAD = """# Where personalization pays

Written by `python experiments/when_page.py` from `experiments/when/results`; do not edit. The runs are those
of

```
python experiments/when.py --out results/when
```

{run}

A cell is one federation of 20 clients: a family, a number of training rows per client, a level of
heterogeneity. In each, the methods ({methods};
FedPer for human activities alone, IFCA for four centres alone) have 250 gradient steps for each client, on
batches of 10 rows; each is tuned by 4 trials on validation rows, and has 3 repetitions with splits of their
own. Differences are in points of accuracy, with intervals and p-values that are simultaneous over all pairs
of methods in the cell, and have the noise of the test rows in them. Models are softmax regressions, for human
activities a network of 16 hidden units. So it is about small models, few clients, and one draw of the clients
in each cell. Commit {commits}.

"No method" and "best" are about these methods. {few} are left out: they make several gradients on a batch, so
that 250 steps are too few rounds for them. Not tried are {others}.

![Two rows of heat maps: what learning together gains over training alone, and what the best method gains over
the better of training alone and FedAvg with fine-tuning](when.png)

Colours and numbers are points of accuracy. **Bold in a black frame: significant at 5 %**; in italics: not
significant. Below, a cell names the best method; where there is no number, it is training alone ("alone") or
fine-tuned FedAvg itself, so that no method of the study is ahead of these two.
"""
LEFT = """**{count} of {planned} cells have been run**; the others are hatched in the picture and listed at
the end, and the same command makes them."""


ALL = """All methods and all pairs of them are in
[experiments/when/results](../../experiments/when/results). Accuracies in percent, differences in points with
their simultaneous intervals; bold where significant. *Still improving*: no verdict, since the method that is
behind was still improving when its training ended.
"""


def page(cells: Sequence[Seen]) -> str:
    """The whole page."""
    parts = [_head(cells), "## What was seen\n", *(f"- {said}" for said in findings(cells)), "",
             "## How heterogeneity is measured\n", *_measuring(cells), "## All cells\n", ALL, *_tables(cells),
             *_left(cells)]
    return "\n".join(parts)


def _head(cells: Sequence[Seen]) -> str:
    methods = dict.fromkeys(row["method"] for cell in cells for row in sorted(
        cell.methods, key=lambda row: row["method"]))
    tried = {table["name"] for family in PLANNED.values() for table in (METHODS | family.more).values()}
    few, others = ([cls.__name__ for key, cls in ALGORITHMS.items()
                    if key not in tried and (key in TOO_FEW_ROUNDS) == is_few] for is_few in (True, False))
    return HEAD.format(
        few=_and(few), others=_and(others),
        run=(LEFT.format(count=len(cells), planned=len(planned())) if len(cells) < len(planned())
             else f"All {len(cells)} cells have been run."),
        methods=", ".join(sorted(methods, key=str.lower)),
        commits=", ".join(dict.fromkeys(
            commit for cell in cells for commit in cell.about["commit"].split(", then "))))


def _and(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def findings(cells: Sequence[Seen]) -> list[str]:
    """Sentences whose figures are counted, not written."""
    gains = [cell for cell in cells if cell.together.significant and cell.together.mean > 0]
    loses = [cell for cell in cells if cell.together.significant and cell.together.mean < 0]
    ahead = [cell for cell in cells if cell.lead.significant]
    level = [cell for cell in cells if not cell.behind.significant]
    winners = Counter(cell.best for cell in ahead)
    named = ", ".join(f"{name} {times(count, 'time')}" for name, count in winners.most_common())
    said = [
        f"**Learning together** is significantly better than training alone in {len(gains)} of {len(cells)} "
        f"cells ({_points(gains, lambda cell: cell.together.mean)}), significantly worse in {len(loses)}, "
        f"and neither in {len(cells) - len(gains) - len(loses)}.",
        *(_by_rows(cells)),
        f"**No method beats the better of training alone and fine-tuned FedAvg**, significantly, in "
        f"{len(cells) - len(ahead)} of {len(cells)} cells. In the other {len(ahead)} it is "
        f"{_points(ahead, lambda cell: cell.lead.mean)} ({named})." if ahead else
        "**No method beats the better of training alone and fine-tuned FedAvg**, significantly, in any cell.",
        f"**Fine-tuned FedAvg** has no method significantly above it in {len(level)} of {len(cells)} cells.",
        *_unseen(cells),
    ]
    return said


def _unseen(cells: Sequence[Seen]) -> list[str]:
    """Where a client is tuned or tested on what it could not learn."""
    blind = [cell for cell in cells if max(cell.unseen) > MOST_UNSEEN]
    without = [cell for cell in cells if cell.about["without_validation"]]
    said = []
    if blind:
        named = "; ".join(f"{_named(cell)}: {100 * cell.unseen[0]:.0f} % and {100 * cell.unseen[1]:.0f} %"
                          for cell in blind)
        said.append(f"**Labels without training rows**: in {len(blind)} of {len(cells)} cells more than half "
                    "of the validation rows, or of the test rows, have a label that the client has no "
                    "training row of (validation and test, in the first repetition: "
                    f"{named}). There, methods are tuned or tested mostly on what a client has never seen.")
    if without:
        named = "; ".join(f"{_named(cell)}: {cell.about['without_validation']:.0f}" for cell in without)
        said.append(f"**Clients without a validation row**, in the first repetition: {named}. They have no "
                    "say in what is tuned.")
    return said


def _named(cell: Seen) -> str:
    return f"{FAMILIES[cell.family]}, {cell.n:.0f} rows, {cell.level}"


def _by_rows(cells: Sequence[Seen]) -> list[str]:
    said = []
    for low, high in ((0, 15), (15, 60), (60, 150), (150, 2000)):
        some = [cell for cell in cells if low < cell.rows <= high]
        if not some:
            continue
        rows = sorted({cell.rows for cell in some})
        paid = sum(cell.together.significant and cell.together.mean > 0 for cell in some)
        named = f"{rows[0]:,}" if len(rows) == 1 else f"{rows[0]:,} to {rows[-1]:,}"
        said.append(f"With {named} rows a client: learning together pays in {paid} of {len(some)} cells; the "
                    f"median gain is {np.median([cell.together.mean for cell in some]):+.1f} points.")
    return said


def _points(cells: Sequence[Seen], value: Callable[[Seen], float]) -> str:
    if not cells:
        return "no points"
    values = sorted(map(value, cells))
    return f"{values[0]:.1f} to {values[-1]:.1f} points"


def _measuring(cells: Sequence[Seen]) -> list[str]:
    without = judged(cells, None)
    if without.predicted < ENOUGH:
        return ["Too few cells have been run to see which measure predicts what is gained. `descant advise` "
                "uses transfer meanwhile: by how much models that are fitted to the rows of other clients "
                "predict a client's validation rows better than its own model.\n"]
    rows = [(name, judged(cells, measure)) for name, measure in MEASURES.items()]
    best = min(rows, key=lambda row: row[1].error)[0]
    used = next(name for name, measure in MEASURES.items() if measure is USED)
    return [
        "Heterogeneity is measured before any method is chosen, as `descant advise` does: the clients fit a "
        "model of their own to their training rows. Transfer compares such models on validation rows. R is "
        "the distance of the clients' models from their mean, without the noise of estimation. What predicts "
        "the gain of learning together over training alone? "
        "*Correlation*: Spearman's, between cells with about as many rows (within a factor of two). *Error*: "
        "a cell is predicted by the three nearest ones of the other families, with about as many rows; by "
        "how many points that is wrong, on average.\n",
        "| measure | correlation with the gain | error |\n|---|---|---|",
        *(f"| {name} | {found.correlation} | {found.error:.1f} points |" for name, found in rows),
        f"| none: rows alone | | {without.error:.1f} points |\n",
        f"`descant advise` uses {used}"
        + (", which has the smallest error.\n" if used == best else f"; {best} has the smallest error.\n")]


def _tables(cells: Sequence[Seen]) -> list[str]:
    lines = []
    for family, title in FAMILIES.items():
        some = [cell for cell in cells if cell.family == family]
        if not some:
            continue
        lines += [f"### {title}\n",
                  "| rows | level | transfer | best method | accuracy | alone | FedAvg + fine-tuning | "
                  "FedAvg | together over alone | best over the better of both |\n|" + "---|" * 10]
        for cell in some:
            level = {row["method"]: f"{100 * float(row['personal']):.1f}" for row in cell.methods}
            entries = [f"{cell.n:.0f}", cell.level, f"{100 * USED(cell):+.0f}", cell.best, level[cell.best],
                       level[ALONE], level[FINE_TUNED], level["FedAvg"], _gap(cell.together), _gap(cell.lead)]
            lines.append(f"| {' | '.join(entries)} |")
        lines.append("")
    return lines


def _left(cells: Sequence[Seen]) -> list[str]:
    """The cells that have not been run."""
    kept = {(cell.family, cell.rows, cell.level) for cell in cells}
    lines = []
    for family, title in FAMILIES.items():
        for rows in PLANNED[family].rows:
            levels = [level for level in PLANNED[family].levels if (family, rows, level) not in kept]
            if levels:
                lines.append(f"- {title}, {rows:,} rows: {', '.join(levels)}")
    return ["## Not run\n", *lines, ""] if lines else []


def _gap(gap: Gap) -> str:
    if gap.mean == gap.low == gap.high == 0:
        return "0"
    text = f"{gap.mean:+.1f} ({gap.low:.1f} to {gap.high:.1f})"
    if gap.withheld:
        return f"{text}, still improving"
    return f"**{text}**" if gap.significant else text


# -- the evidence ------------------------------------------------------------------------------------------


def evidence(cells: Sequence[Seen]) -> str:
    """The table that `descant advise` answers from."""
    rows = [["family", "level", "n", "transfer", "clients", "together", "together_verdict", "best",
             "over_fine_tuned", "fine_tuned_verdict"]]
    for cell in cells:
        gap = cell.together
        verdict = "open" if not gap.significant else "gains" if gap.mean > 0 else "loses"
        rows.append([FAMILIES[cell.family], cell.level, f"{cell.n:.1f}", f"{USED(cell):.4f}",
                     str(cell.about["clients"]), f"{gap.mean:.2f}", verdict, cell.best,
                     f"{cell.behind.mean:.2f}", "behind" if cell.behind.significant else "as good"])
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def main() -> None:
    cells = read()
    PAGE.write_text(page(cells), encoding="utf-8")
    EVIDENCE.write_text(evidence(cells), encoding="utf-8")
    draw(cells, PAGE.with_suffix(".png"))


if __name__ == "__main__":
    main()

"""What was seen in federations like this one: the study of docs/results/when.md, looked up by rows per client
and transfer (`Estimates.transfer`), which is measured before any method is chosen.

evidence.csv has a row for each federation of the study; experiments/when_page.py writes it. Nothing is said
beyond the numbers of rows that were studied, nor where too few of the studied federations are near.
"""

from __future__ import annotations

import csv
import functools
import math
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from typing import Literal, NamedTuple, TypeAlias

from descant.core.units import times

ROWS_APART = 2.0  # factor between the rows of a client in federations that count as near
APART = 0.08  # and the difference of their transfer
LEAST = 3  # federations that must be near, of two families
PAGE = "docs/results/when.md"

Verdict: TypeAlias = Literal["gains", "loses", "open", "unknown"]  # of learning together over training alone


class Cell(NamedTuple):
    """A federation of the study; gains are points of accuracy, with the ends of simultaneous intervals."""

    family: str
    level: str
    n: float  # training rows of a client
    transfer: float  # accuracy of others' models less that of a client's own, on validation rows
    clients: int
    together: float  # of the best method that learns together over training alone
    together_verdict: str  # "gains", "loses" or "open"
    best: str  # method
    over_fine_tuned: float  # of the best method over FedAvg + fine-tuning
    fine_tuned_verdict: str  # "behind", or "as good": no method is significantly better


class Answer(NamedTuple):
    """What the study says of a federation."""

    together: Verdict
    near: tuple[Cell, ...]
    words: tuple[str, ...]


@functools.cache
def study() -> tuple[Cell, ...]:
    """All federations of the study."""
    with resources.files("descant.experiment").joinpath("evidence.csv").open(encoding="utf-8") as file:
        return tuple(Cell(row["family"], row["level"], float(row["n"]), float(row["transfer"]),
                          int(row["clients"]), float(row["together"]), row["together_verdict"], row["best"],
                          float(row["over_fine_tuned"]), row["fine_tuned_verdict"])
                     for row in csv.DictReader(file))


def answer(n: float, transfer: float | None, clients: int, cells: Sequence[Cell] | None = None) -> Answer:
    """What was gained in studied federations with about as many rows and about this transfer."""
    cells = study() if cells is None else cells
    if transfer is None:
        return _unknown("transfer, by which federations are compared, needs classes and validation rows")
    fewest, most = min(cell.n for cell in cells), max(cell.n for cell in cells)
    if not fewest <= n <= most:
        return _unknown(f"the studied federations have {fewest:,.0f} to {most:,.0f} training rows a client, "
                        f"and this one has {n:,.0f}")
    near = tuple(cell for cell in cells if abs(math.log(cell.n / n)) <= math.log(ROWS_APART)
                 and abs(cell.transfer - transfer) <= APART)
    about = f"about {n:,.0f} rows a client and a transfer of about {100 * transfer:+.0f} points"
    if len(near) < LEAST or len({cell.family for cell in near}) < 2:
        return _unknown(f"{times(len(near), 'studied federation')} {'has' if len(near) == 1 else 'have'} "
                        f"{about}, and an answer needs {LEAST} of two families")
    verdict, said = _of_together(near, f"With {about},")
    return Answer(verdict, near, (said, _of_fine_tuning(near), _of_study(near, clients)))


def _unknown(why: str) -> Answer:
    return Answer("unknown", (), (f"Not known: {why}. Compare LocalTrain, FedAvg with fine-tuning and the "
                                  "method of your choice (`descant compare --tune`).",))


def _of_together(near: Sequence[Cell], about: str) -> tuple[Verdict, str]:
    verdicts = Counter(cell.together_verdict for cell in near)
    gains, losses, of = verdicts["gains"], verdicts["loses"], len(near)
    if (gains and losses) or 2 * max(gains, losses, verdicts["open"]) <= of:
        return "unknown", (
            f"{about} it is not known whether learning together pays: in {of} studied federations the gain "
            f"over training alone was {_range(near)}, significantly positive in {gains} and negative in "
            f"{losses}. Compare both.")
    if gains > losses + verdicts["open"]:
        some = [cell for cell in near if cell.together_verdict == "gains"]
        return "gains", (f"{about} learning together gained {_range(some)} over training alone in {gains} of "
                         f"{of} studied federations.")
    if losses > verdicts["open"]:
        some = [cell for cell in near if cell.together_verdict == "loses"]
        return "loses", (f"{about} the best method that learns together was significantly worse than "
                         f"training alone in {losses} of {of} studied federations, by {_range(some, -1)}.")
    return "open", (f"{about} learning together made no significant difference to training alone in "
                    f"{verdicts['open']} of {of} studied federations ({_range(near)}).")


def _of_fine_tuning(near: Sequence[Cell]) -> str:
    behind = [cell for cell in near if cell.fine_tuned_verdict == "behind"]
    level = len(near) - len(behind)
    if not behind:
        return "In none of them was any method significantly better than FedAvg with fine-tuning."
    ahead = ", ".join(f"{name} {times(count, 'time')}"
                      for name, count in Counter(cell.best for cell in behind).most_common())
    return (f"No method was significantly better than FedAvg with fine-tuning in {level} of them; in "
            f"{len(behind)} the best one was, by "
            f"{_range([cell._replace(together=cell.over_fine_tuned) for cell in behind])} ({ahead}).")


def _of_study(near: Sequence[Cell], clients: int) -> str:
    families = Counter(cell.family for cell in near)
    kinds = ", ".join(f"{family} ({count})" for family, count in families.items())
    fewest, most = min(cell.clients for cell in near), max(cell.clients for cell in near)
    size = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    return (f"They are: {kinds}, with {size} clients and small models; this one has {clients:,} clients. "
            f"{PAGE} has them all. Yours is another one: a comparison decides.")


def _range(cells: Sequence[Cell], sign: int = 1) -> str:
    values = sorted(sign * cell.together for cell in cells)
    low, high = f"{values[0]:.1f}", f"{values[-1]:.1f}"
    return f"{low} points" if low == high else f"{low} to {high} points"

"""How cost grows with the number of clients, with the cohort and with the size of the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.speed.case import Case, random_federation
from descant.models import DNN

METHOD = "pfedme"  # whose clients have a state
BACKENDS = ("vectorised", "processes")
REPETITIONS = 3
ROWS = 20  # of a client: a batch
BATCHES = 5  # of a client in a round
FEW = 10  # clients in a cohort, where something else grows
CLIENTS = (10, 100, 1000, 10_000)
COHORTS = (10, 32, 100, 316, 1000)
HIDDEN = (1, 13, 126, 1258, 12_579)  # units with 795 parameters each: 10^3 to 10^7
COUNT = len(CLIENTS) + len(COHORTS) + len(HIDDEN)


class Point(NamedTuple):
    curve: str  # "clients", "cohort" or "parameters"
    at: int
    case: Case


def points() -> Iterator[Point]:
    """The cases of all curves; each is made when it is its turn, because the largest are large."""
    for clients in CLIENTS:
        federation = random_federation(clients, ROWS, 1)
        yield Point("clients", clients, Case(METHOD, "mclr", federation, FEW, BATCHES, evaluated=0))
    federation = random_federation(max(COHORTS), ROWS, 1)
    for cohort in COHORTS:
        yield Point("cohort", cohort, Case(METHOD, "mclr", federation, cohort, BATCHES, evaluated=0))
    federation = random_federation(FEW, ROWS, 1)
    for hidden in HIDDEN:
        batches = BATCHES if hidden < max(HIDDEN) else 1
        case = Case(METHOD, DNN(hidden=hidden), federation, FEW, batches, evaluated=0)
        yield Point("parameters", case.task.dim, case)

"""Where personalization pays: rows per client x heterogeneity x tuned methods, on four families.

    python experiments/when.py --out results/when              # runs what is missing, or goes on after a stop
    python experiments/when.py --out results/when --only har   # one family
    python experiments/when_page.py                            # page, picture, evidence, of what is kept

The plan. A cell is one federation: a family, a number of training rows per client, a level of heterogeneity.
In each cell the methods are compared as `descant compare --tune 4 --seeds 0-2 --metric accuracy
--no-baselines` does: equal numbers of gradient steps (250 for each client, of 10 rows), four trials for each
method, judged by the validation rows of a split that no reported run has; then three repetitions, each with a
split of its own. Intervals and p-values are simultaneous over all pairs of methods of the cell, and have the
noise of the test rows in them.

- Families. "logistic": 20 clients, 20 features, 5 classes, models that differ by chance around one centre.
  "clusters": the same around four centres. "fashion": 20 clients of Fashion-MNIST with 10, 5, 3 or 2 classes.
  "har": human activities, 20 clients: windows dealt at random, by person, with three activities, with two.
  Softmax regression, and for "har" a network 1152-16-6.
- Rows. 10, 30, 100, 300 and 1000 training rows, and a quarter of that for validation. Every client has about
  200 test rows beside them. Windows of HAR that overlap stay together, in runs of about 12, and a person has
  281 to 409: there it is 2, 4, 8 and 16 such runs, about 24 to 192 rows, and all others are tested.
- Methods. LocalTrain, FedAvg, FedAvg with 20 steps of fine-tuning, Ditto, FedMAP, pFedGT; FedPer where there
  is a network with a head, IFCA with four models in "clusters". Methods that make several gradients on a
  batch (pFedMe, pFedBreD, CGPFL) are left out: 250 steps are too few rounds for them. The others, such as
  one-stage FedProx, have not been tried; the page names them all.
- Order. The corners of all families first, then the other levels, then 100 rows, then 30 and 300: a stopped
  study is a coarse map.
- Heterogeneity is measured before any method is chosen, in several ways, in the first repetition: on the
  training rows, and for transfer models of training rows are scored on validation rows. The page says which
  measure predicts what is gained.
- Where few rows lie in few runs, a client may be tested on labels that it never trains: that is told too.

What is kept, in experiments/when/results/CELL: about.json (what was measured before), methods.csv and
differences.csv (all pairs of methods). Several processes can share the work: a cell that another one has is
passed over.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console

from descant.comparison import execute, measure, results, tune
from descant.comparison.make import make
from descant.comparison.plan import held
from descant.comparison.results import Results
from descant.core.federation import Federation
from descant.core.files import write_atomic, write_csv
from descant.core.permit import ran
from descant.core.splits import SPLITS
from descant.data import heterogeneity
from descant.errors import DescantError
from descant.experiment import run as runs
from descant.experiment.config import Experiment
from descant.theory.estimate import survey, transfer

KEPT = Path(__file__).parent / "when" / "results"
SEEDS, TRIALS, TESTED = 3, 4, 200
PILOT_STEPS = 50  # in which a client fits a model of its own, before any method is chosen
SMALL, FEW = 1000, 6  # parameters up to which R is that of all clients; beyond, of so many
ROWS = (10, 30, 100, 300, 1000)  # for training
ORDER = ((0, -1), (2,), (1, 3))  # numbers of rows in the order in which they are run: a coarse map first
METHODS: dict[str, dict[str, Any]] = {
    "LocalTrain": {"name": "localtrain"},
    "FedAvg": {"name": "fedavg"},
    "FedAvg + fine-tuning": {"name": "fedavg", "finetune": 20},
    "Ditto": {"name": "ditto"},
    "FedMAP": {"name": "fedmap"},
    "pFedGT": {"name": "pfedgt"},
}
OF_NETWORKS = {"FedPer": {"name": "fedper"}}
OF_CLUSTERS = {"IFCA": {"name": "ifca", "K": 4}}
TOO_FEW_ROUNDS = ("pfedme", "pfedbred", "cgpfl")  # would be made of as many steps


@dataclass(frozen=True)
class Family:
    """Federations that differ in rows and heterogeneity."""

    data: dict[str, Any]
    levels: dict[str, dict[str, Any]]  # of heterogeneity, by name, from alike to different
    model: dict[str, Any]
    more: dict[str, dict[str, Any]]  # methods besides METHODS
    rows: tuple[int, ...] = ROWS


FAMILIES = {
    "logistic": Family(
        {"dataset": "logistic", "clients": 20},
        {f"deviation {h:g}": {"heterogeneity": h} for h in (0.0, 0.5, 1.0, 2.0)}, {"name": "mclr"}, {}),
    "clusters": Family(
        {"dataset": "logistic", "clients": 20, "clusters": 4, "heterogeneity": 0.2},
        {f"separation {s:g}": {"separation": s} for s in (0.25, 0.5, 1.0, 2.0)}, {"name": "mclr"},
        OF_CLUSTERS),
    "fashion": Family(
        {"dataset": "fashion_mnist", "clients": 20, "partition": "classes", "sizes": "uniform"},
        {f"{k} classes": {"classes_per_client": k} for k in (10, 5, 3, 2)}, {"name": "mclr"}, {}),
    "har": Family(
        {"dataset": "har", "clients": 20},
        {"at random": {"partition": "iid"}, "by person": {"partition": "natural", "fewer": "sample"},
         "3 activities": {"partition": "classes", "classes_per_client": 3},
         "2 activities": {"partition": "classes", "classes_per_client": 2}}, {"name": "dnn", "hidden": 16},
        OF_NETWORKS, (24, 48, 96, 192)),
}
WINDOWS = 12  # of HAR in a run that overlap
OF_PERSON, DEALT = 343.3, 10299 / 20  # windows of a client, by person or otherwise


class Cell(NamedTuple):
    """One federation of the study."""

    family: str
    rows: int  # for training, as planned
    level: str

    @property
    def name(self) -> str:
        return f"{self.family}-{self.rows}-{self.level.replace(' ', '_')}"

    def tables(self) -> dict[str, Any]:
        """The experiment, as the sections of a file."""
        family = FAMILIES[self.family]
        methods = METHODS | family.more
        first, *others = [{"label": label, **table} for label, table in methods.items()]
        return {"data": family.data | family.levels[self.level] | self._sizes(), "model": family.model,
                "train": {"rounds": 25, "batch": 10, "local": {"steps": 10}, "backend": "vectorised"},
                "eval": {"every": 5, "metric": "accuracy"}, "algorithm": first, "algorithms": others}

    def _sizes(self) -> dict[str, Any]:
        """The rows of a client, and the share of them that is tested: the rest is four parts for training and
        one for validation."""
        if self.family == "har":
            runs = max(3, round(self.rows / WINDOWS / 0.8))
            return {"test": 1 - runs * WINDOWS / (OF_PERSON if self.level == "by person" else DEALT)}
        rest = math.ceil(self.rows / 0.8)
        total = rest + TESTED
        sizes = {"smallest": total, "largest": total} if self.family == "fashion" else {"rows": total}
        return {"test": TESTED / total, **sizes}


def cells() -> list[Cell]:
    """All cells, in the order in which they are run."""
    def chosen(rows: tuple[int, ...], pick: int) -> int:
        return rows[min(pick, len(rows) - 1)]

    levels = ((0, 3), (1, 2))
    order = [(pick, level) for of_level in levels for pick in ORDER[0] for level in of_level]
    order += [(pick, level) for picks in ORDER[1:] for pick in picks for level in range(4)]
    found = [Cell(name, chosen(family.rows, pick), list(family.levels)[level])
             for pick, level in order for name, family in FAMILIES.items()]
    return list(dict.fromkeys(found))


ABOUT = "about.json"
METHOD = ("method", "rounds", "personal", "personal_low", "personal_high", "global", "worst_decile", "gain",
          "worse_off", "diverged", "still_improving")
PAIR = ("method", "against", "mean", "low", "high", "p")


# -- one cell ----------------------------------------------------------------------------------------------


def play(cell: Cell, out: Path) -> Results:
    """Make what is missing of a cell, all in this process: thousands of short runs are slower to start in
    processes of their own than to make."""
    place = out / cell.name
    with held(place):
        plan, labels = make(cell.tables(), place, range(SEEDS), metric="accuracy", baselines=False,
                            command="python experiments/when.py", permit=ran())
        for search in execute.searches(plan, labels, TRIALS, 1):
            found = tune.search(search.experiment, search.size, search.record, fixed=search.fixed)
            plan = plan.tuned(search.label, getattr(found, "values", None), found.note)
            plan.write()
        for planned in plan.runs(labels):
            if not planned.done:
                shutil.rmtree(planned.place, ignore_errors=True)
                made = runs.start(runs.Setup.of(planned.experiment), planned.place)
                measure.write(made, planned.place, None)
        return results.read(plan)


def first_of(cell: Cell) -> Experiment:
    """The experiment of the first repetition, whose federation is measured."""
    tables = cell.tables()
    del tables["algorithms"]
    tables["data"] |= {"split": 0}
    return Experiment.parse(tables)


def measured(cell: Cell) -> dict[str, float]:
    """What can be measured of a federation before any method is chosen, as `descant advise` does."""
    experiment = first_of(cell)
    federation = experiment.data.federation().to(torch.float64)
    task = experiment.model.task(federation, torch.float64, 0)
    everyone, n = np.arange(federation.population), float(federation.train.sizes.mean())
    pilots = everyone if task.dim <= SMALL else everyone[:FEW]
    found = survey(task, federation, pilots, ridge=1 / n, steps=PILOT_STEPS)
    moved = transfer(task, federation, everyone, ridge=1 / n, steps=PILOT_STEPS)
    assert moved is not None
    noise = float(found.noise.mean())
    length = max(0.0, float(found.models.mean(0).square().sum()) - noise / len(pilots)) ** 0.5
    return {"n": n, "transfer": moved.gain, "R": found.spread.R, "R_naive": found.spread.naive,
            "noise": noise, "length": length} | of_labels(federation)


def of_labels(federation: Federation) -> dict[str, float]:
    """How much the clients' training labels differ, and the shares of test and validation rows whose label
    the client has no training row of."""
    train, validation, test = (heterogeneity.class_counts(federation, [name]) for name in SPLITS)
    assert train is not None
    assert validation is not None
    assert test is not None

    def unseen(counts: np.ndarray) -> float:
        return float(counts[train == 0].sum() / max(1, counts.sum()))

    return {"label_distance": float(heterogeneity.label_distances(train).mean()),
            "unseen_test": unseen(test), "unseen_validation": unseen(validation),
            "without_validation": int((validation.sum(1) == 0).sum())}


def keep(cell: Cell, found: Results) -> None:
    """Write what is kept of a cell; about.json last, which says that it is complete."""
    about = {"family": cell.family, "rows": cell.rows, "level": cell.level,
             "number": list(FAMILIES[cell.family].levels).index(cell.level),
             "clients": found.people, "repetitions": found.repetitions,
             "commit": found.plan.versions.get("commit")}
    about |= {name: float(f"{value:.6g}") for name, value in measured(cell).items()}
    place = KEPT / cell.name
    place.mkdir(parents=True, exist_ok=True)
    for name, columns, (head, *rows) in (("methods", METHOD, results.table(found)),
                                         ("differences", PAIR, results.differences_table(found))):
        write_csv(place / f"{name}.csv", [columns, *([row[head.index(column)] for column in columns]
                                                     for row in rows)])
    write_atomic(place / ABOUT, (json.dumps(about, indent=1) + "\n").encode())


def main(words: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--out", type=Path, required=True, help="directory for the runs")
    options.add_argument("--only", choices=FAMILIES, help="one family")
    chosen = options.parse_args(words)
    console = Console(stderr=True)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # cautions of methods: what diverges is in the tables
    wanted = [cell for cell in cells() if chosen.only in (None, cell.family)]
    left = []
    for number, cell in enumerate(wanted, 1):
        if not (KEPT / cell.name / ABOUT).exists():
            console.print(f"cell {number} of {len(wanted)}: {cell.name}", soft_wrap=True)
            try:
                keep(cell, play(cell, chosen.out))
            except DescantError as error:
                left.append(cell.name)
                console.print(f"{cell.name} is passed over: {error}", soft_wrap=True)
    if left:
        raise SystemExit(f"passed over: {', '.join(left)}; the same command makes them")


if __name__ == "__main__":
    main()

"""What a comparison consists of, and the directory it is kept in; docs/comparing.md lists its files.

All runs have the clients and the rows of the file's federation ([data] has its own seed). The seed of a
repetition gives the initial model, the cohorts, the batches and, unless the split is fixed, the rows of each
client that are tested: with the same seed, all methods see the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from descant.algorithms import CGPFL
from descant.comparison import finished
from descant.comparison.finished import FinishedRun
from descant.comparison.methods import GridPoint
from descant.comparison.paper import Paper
from descant.core import fields
from descant.core.algorithm import Algorithm
from descant.core.files import locked, write_atomic
from descant.core.import_object import is_place, marked
from descant.core.metric import METRICS, Metric, is_share
from descant.core.permit import NOTHING, opened
from descant.core.plain import plain
from descant.core.splits import folds_of
from descant.data.spec import DataSpec
from descant.errors import DescantError, UsageError
from descant.experiment import directory as layout
from descant.experiment.config import Experiment, differences, parse_algorithm
from descant.experiment.methods import NotImported

# 1: one split for all seeds, and --match in place of --budget; 2: splits in which few held-out rows of a
# client had the same labels at all clients
FORMAT = 3
CAP = 10  # with --budget converge, a method stops after so many times the rounds of equal steps
TUNING = 10_000  # the seed of searches and of their split, which no reported run has
OWN_MAY_DIFFER = ("train.rounds", "train.backend", "train.chunk", "train.workers", "train.ray_address",
                  "eval.metrics", "privacy.noise")
Budget = Literal["steps", "rounds", "converge"]
Splits = Literal["repeated", "folds", "fixed"]
Population = Literal["rows", "clients", "new clients"]


class Method(NamedTuple):
    """A method of a comparison: a contender with its number of rounds."""

    label: str
    asked: Algorithm  # as the user set it
    rounds: int  # of a run; the upper bound where runs stop by themselves
    given: list[str]
    grid: GridPoint | None
    added: bool
    seconds: float = 0.0  # of a round, measured while its steps were counted
    tuned: dict[str, Any] | None = None  # what a search has found, by dotted field
    search_note: str | None = None

    @property
    def algorithm(self) -> Algorithm:
        """As it runs: what is asked for, with what a search has found. A value from a file names no code."""
        if isinstance(self.asked, NotImported):
            return self.asked.changed(self.tuned or {})
        return fields.replaced(self.asked, marked(self.tuned or {}, NOTHING))

    def dump(self) -> dict[str, Any]:
        asked = fields.dump(self.asked)
        if is_place(asked["name"]):  # a report does not import it to learn its name
            asked |= {"label": self.asked.name}
        return self._asdict() | {"asked": plain(asked),
                                 "grid": None if self.grid is None else self.grid._asdict()}


class PlannedRun(NamedTuple):
    """One run of a comparison."""

    label: str
    seed: int
    experiment: Experiment
    place: Path

    @property
    def size(self) -> int:
        """How many rounds it has."""
        return self.experiment.train.rounds

    @property
    def done(self) -> bool:
        """Whether the run is complete, with everything that is to be measured."""
        return self._has(self.experiment.eval.metrics, rows=True)

    @property
    def is_finished(self) -> bool:
        """Whether the run is complete, though perhaps without a metric that was asked for later."""
        return self._has(None)

    def _has(self, metrics: Sequence[str] | None, *, rows: bool = False) -> bool:
        if not all((self.place / name).exists() for name in ("config.toml", "summary.json")):
            return False
        rounds = layout.rounds(self.place)
        if rounds < self.size:
            return False
        stopped = self._stopped_at()
        return finished.is_current(self.place, rounds if stopped is None else stopped, metrics, rows=rows)

    def _stopped_at(self) -> int | None:
        """After how many rounds the run stopped by itself."""
        try:
            summary = json.loads((self.place / "summary.json").read_text(encoding="utf-8"))
            return int(summary["rounds"]) if summary.get("stopped") is not None else None
        except (OSError, ValueError, KeyError):
            return None

    @property
    def is_the_same(self) -> bool:
        """Whether there is such a run, of so many rounds, and it is complete."""
        return self.done and layout.rounds(self.place) == self.size and not self._changed()

    def _changed(self) -> list[str]:
        """What the experiment of the run that is there has otherwise."""
        there = layout.config(self.place)
        with contextlib.suppress(UsageError):  # with the defaults of fields that are newer than the run
            there = plain(Experiment.parse(there).dump())
        return [line for line in differences(there, plain(self.experiment.dump()))
                if not line.startswith(OWN_MAY_DIFFER)]

    def require_own(self) -> None:
        """Refuse a run that is another one, such as one copied from another comparison."""
        if (self.place / "config.toml").exists() and (changed := self._changed()):
            raise DescantError(f"the run in {self.place} does not belong to this comparison ({changed[0]}): "
                               "remove it, and compare again")

    def read(self) -> FinishedRun | None:
        """What the files of the run tell, if it is finished."""
        try:
            if not self.is_finished:
                return None
            self.require_own()
            summary = json.loads((self.place / "summary.json").read_text(encoding="utf-8"))
        except (ValueError, UsageError) as error:
            raise DescantError(f"the run in {self.place} is damaged ({error}): remove that directory, and "
                               "compare again") from None
        columns = finished.read_figures(self.place / finished.FILE)
        return FinishedRun(self.label, self.seed, summary["rounds"], self.place, summary, columns,
                           finished.read_rows(self.place / finished.ROWS, int(columns["round"][0])))

    @property
    def title(self) -> str:
        return f"{self.label}, seed {self.seed}"

    @property
    def size_done(self) -> int:
        """How many rounds are done; all of them where the run has stopped by itself."""
        if self._stopped_at() is not None:
            return self.size
        try:
            with (self.place / "metrics.jsonl").open("rb") as file:
                return sum(1 for _ in file)
        except OSError:
            return 0


class Plan(NamedTuple):
    """A comparison as it is written down."""

    out: Path
    budget: Budget
    splits: Splits  # a repetition has a split of its own, a fold, or the split of all others
    population: Population  # the answer is about: these rows, new rows of these clients, new clients
    experiment: Experiment  # its algorithm sets the budget
    fingerprint: str  # of the clients and their rows
    clients: int  # that train
    methods: dict[str, Method]
    seeds: list[int]
    metric: str  # the one that decides
    metric_why: str | None  # the reason, where it is neither the usual one nor asked for
    metrics: dict[str, Metric]
    looks: int  # how many times the results may be looked at while repetitions are added
    looked_at: list[int]  # the number of repetitions at each look so far
    commands: list[str]
    versions: dict[str, str]
    paper: Paper | None = None  # what is published for some of the methods

    def runs(self, labels: Sequence[str] | None = None, seeds: Sequence[int] | None = None, *, jobs: int = 1
             ) -> list[PlannedRun]:
        """The runs of some methods and seeds, or of all."""
        methods = self.methods.values() if labels is None else [self.methods[label] for label in labels]
        return [PlannedRun(method.label, seed, self.experiment_of(method, seed, jobs),
                        self.place_of(method.label) / f"seed-{seed}")
                for seed in (self.seeds if seeds is None else seeds) for method in methods]

    def place_of(self, label: str) -> Path:
        """Where the runs of a method are kept."""
        return self.out / "runs" / label

    def experiment_of(self, method: Method, seed: int, jobs: int) -> Experiment:
        """The experiment of a method: its share of the budget, evaluated about as often as all others."""
        base = self.experiment
        every = max(1, round(base.eval.every * self._matched(method) / base.train.rounds))
        train = dataclasses.replace(base.train, seed=seed, rounds=method.rounds)
        if jobs > 1 and train.backend == "auto":  # the cores belong to the other runs
            train = dataclasses.replace(train, workers=1)
        return dataclasses.replace(
            base, data=split_of(base.data, self.splits, seed), algorithm=method.algorithm, train=train,
            eval=dataclasses.replace(base.eval, every=every))

    def trial_of(self, method: Method, jobs: int) -> Experiment:
        """The experiment of a search: the seed and the split (unless fixed) of no reported run, and the same
        number of gradient steps in each trial, also where runs stop by themselves."""
        made = self.experiment_of(method, TUNING, jobs)
        return dataclasses.replace(made, train=dataclasses.replace(
            made.train, rounds=self._matched(method), patience=None))

    def _matched(self, method: Method) -> int:
        """The rounds of a method where all have the same steps, or rounds."""
        return max(1, method.rounds // CAP) if self.budget == "converge" else method.rounds

    def lower_is_better(self, metric: str) -> bool:
        return metric in self.metrics and self.metrics[metric].lower_is_better

    def is_ratio(self, metric: str) -> bool:
        """Whether methods are compared by the ratio of their values: losses, which have no upper bound."""
        return self.lower_is_better(metric) and not is_share(metric)

    def remarks(self) -> list[str]:
        """What is particular about this comparison, whatever the results."""
        found = [f"{label}: {method.search_note}." for label, method in self.methods.items()
                 if method.search_note is not None]
        data = self.experiment.data
        if self.splits == "fixed" and (field := given_split(data)) is not None:
            found.append(f"All repetitions test the same rows, which data.{field} sets: the results say "
                         "nothing about other splits.")
        if self.splits == "folds" and len(self.seeds) % (count := folds_of(data.test)):
            found.append(f"{len(self.seeds)} repetitions are not a whole cross-validation of {count} folds: "
                         "some rows are tested more often than others.")
        return found + [f"{label} has {method.algorithm.K} clusters for {self.clients} clients: each client "
                        "can be its own cluster, and then nothing is shared. Use fewer clusters."
                        for label, method in self.methods.items()
                        if isinstance(method.algorithm, CGPFL) and isinstance(method.algorithm.K, int)
                        and self.clients <= method.algorithm.K]

    def record(self, label: str) -> Path:
        """Where the search for a method's hyper-parameters is kept."""
        return self.out / "tuning" / label

    def tuned(self, label: str, values: dict[str, Any] | None, note: str | None = None) -> Plan:
        """The plan with what a search has found for a method, if anything."""
        before = self.methods[label]
        after = before._replace(tuned=values, search_note=note)
        if before.algorithm != after.algorithm and self.has_runs(label):
            raise UsageError(f"{self.out} holds runs of {label} with other hyper-parameters than this search "
                             "has found: choose another --out")
        return self._replace(methods=self.methods | {label: after})

    def also_made_with(self, versions: Mapping[str, str]) -> Plan:
        """The plan of which some runs were made with other versions."""
        return self._replace(versions=joined_versions(versions, self.versions))

    def has_runs(self, label: str) -> bool:
        return any(self.place_of(label).glob("seed-*"))

    def failures(self) -> dict[str, str]:
        """Which runs failed when they were last tried, and why."""
        try:
            found: dict[str, str] = json.loads((self.out / "failures.json").read_text(encoding="utf-8"))
            return found
        except (OSError, ValueError):
            return {}

    def write_failures(self, failures: Mapping[str, str]) -> None:
        write_atomic(self.out / "failures.json", json.dumps(failures, indent=1).encode())

    def write(self) -> None:
        table = self._asdict() | {
            "format": FORMAT, "experiment": plain(self.experiment.dump()),
            "methods": [method.dump() for method in self.methods.values()],
            "paper": None if self.paper is None else self.paper.dump(),
            "metrics": {name: {"lower_is_better": metric.lower_is_better, "meaning": metric.meaning}
                        for name, metric in self.metrics.items()}}
        del table["out"]
        write_atomic(self.out / "comparison.json", json.dumps(table, indent=1).encode())


def read(out: Path) -> Plan:
    """The comparison in a directory."""
    path = out / "comparison.json"
    if not path.exists():
        if (out / "config.toml").exists():
            raise UsageError(f"{out} holds a single run, not a comparison: make one with `descant compare`")
        raise UsageError(f"{out} holds no comparison: there is no comparison.json, which `descant compare` "
                         "writes")
    allow = opened()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if (number := found.pop("format")) != FORMAT:
            raise DescantError(f"{path} has format {number}, and this version of descant reads {FORMAT}: it "
                               "splits rows and selects rounds in another way; use the version that made it, "
                               "or compare anew in another directory")
        listed = [Method(**entry | {"asked": parse_algorithm(entry["asked"], f"methods[{k}].asked", allow),
                                    "grid": entry["grid"] and GridPoint(**entry["grid"])})
                  for k, entry in enumerate(found.pop("methods"))]
        metrics = {name: METRICS.get(name) or Metric(**about)
                   for name, about in found.pop("metrics").items()}
        paper = found.pop("paper", None)
        return Plan(out, experiment=Experiment.parse(found.pop("experiment"), allow),
                    methods={method.label: method for method in listed}, metrics=metrics,
                    paper=None if paper is None else Paper.read(paper), **found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = error if isinstance(error, UsageError) else repr(error)
        raise DescantError(f"{path} is damaged ({reason}): restore it from a copy, or compare anew in "
                           "another directory") from None


@contextlib.contextmanager
def held(out: Path) -> Iterator[None]:
    """Hold the directory of a comparison. If it was made for that and stays empty, it is removed again."""
    new = [place for place in (out, *out.parents) if not place.exists()]
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to {out}: {error.strerror}; choose another --out") from None
    try:
        with locked(out):
            yield
    finally:
        with contextlib.suppress(OSError):  # not empty: it holds a comparison
            for place in new:
                place.rmdir()


def joined_versions(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, str]:
    """Of everything that the results depend on, also where a version has changed on the way."""
    then = ", then "

    def joined(old: str, new: str) -> str:
        if old in new.split(then):
            return new
        return old if old.endswith(then + new) else old + then + new

    return {name: joined(before.get(name, version), version) for name, version in now.items()}


def given_split(data: DataSpec) -> str | None:
    """The field of [data] that says which rows are tested."""
    table = data.dump()
    return next((field for field in ("partition_file", "split", "fold") if table.get(field) is not None),
                None)


def split_of(data: DataSpec, splits: Splits, seed: int) -> DataSpec:
    """[data] of the repetition with a seed."""
    if splits == "repeated":
        return dataclasses.replace(data, split=seed)
    if splits == "folds":
        split, fold = divmod(seed, folds_of(data.test))
        return dataclasses.replace(data, split=split, fold=fold)
    return data

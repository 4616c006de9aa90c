"""What a comparison consists of, and the directory it is kept in.

    comparison.json           what is compared: the experiment, the methods, their rounds, the seeds
    federation.json           the clients: who has how many rows of which class
    runs/<label>/seed-<n>/    one ordinary run for each method and seed, with figures.csv besides
    tuning/<label>/           the record of a search for hyper-parameters
    failures.json             runs that failed, and why
    results.csv, comparison.png, report.html    what came out

All runs have the clients and the rows of the file's federation ([data] has a seed of its own). The seed of
a repetition stands for the initial model, the cohorts and the batches, and, unless the split is fixed, for
which of each client's rows are tested: with the same seed, all methods see the same. Methods and seeds can be
added later; a method of another setting, or another federation, is refused.

Budgets are gradient steps of training: what a method does before it predicts (fine-tuning) does not count,
since it happens only when a model is asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from descant import __version__
from descant.algorithms import CGPFL
from descant.comparison import measure as figures
from descant.comparison.methods import Contender, Place, contenders, reference
from descant.comparison.tune import with_values
from descant.core import fields
from descant.core.algorithm import Algorithm, Message
from descant.core.federation import Federation
from descant.core.files import locked, write_atomic
from descant.core.import_object import marked, permit_of
from descant.core.measures import Metric
from descant.core.permit import NOTHING, Permit
from descant.core.plain import plain
from descant.core.splits import SPLITS, folds_of
from descant.core.threads import one_thread
from descant.core.tree import Tree
from descant.data.heterogeneity import facts, measure
from descant.data.spec import DataSpec
from descant.engine.backends.base import InProcess
from descant.engine.rounds import Training
from descant.engine.settings import Train
from descant.engine.work import Job, Outcome
from descant.errors import DescantError, UsageError, unknown
from descant.experiment import directory as layout
from descant.experiment import run as runs
from descant.experiment.config import Experiment, differences, parse_algorithm

FORMAT = 2  # 1: one split for all seeds, and --match in place of --budget
PATIENCE = 5  # evaluations without improvement, after which a method has converged ...
CAP = 10  # ... if it has not taken so many times the rounds of equal steps
TUNING = 10_000  # the seed of searches, and of their split: none of those that are reported
WARM = 0.5  # seconds of a round that tell what it takes, though it was the first
LOOKS = 3  # that --until-decided may take; the level of the tests is divided by them
OWN_MAY_DIFFER = ("train.rounds", "train.backend", "train.chunk", "train.workers", "train.ray_address",
                  "eval.metrics")
# what may be another one in the same directory: the results are the same, or more is measured
MAY_CHANGE = ("train.seed", "train.backend", "train.chunk", "train.workers", "eval.metrics")
Budget = Literal["steps", "rounds", "converge"]
Splits = Literal["repeated", "folds", "fixed"]
Population = Literal["rows", "clients", "new clients"]


class Method(NamedTuple):
    """A method of a comparison: a contender with its number of rounds."""

    label: str
    asked: dict[str, Any]  # its [algorithm] section, every field written out
    rounds: int  # of a run; where it stops by itself, the most there are
    given: list[str]
    grid: Place | None
    added: bool
    seconds: float = 0.0  # of a round when its steps were counted: roughly what one takes
    tuned: dict[str, Any] | None = None  # what a search has found, by dotted field
    search_note: str | None = None  # what people should know of the search

    @property
    def algorithm(self) -> Algorithm:
        """As it runs: what is asked for, with what a search has found."""
        return with_values(parse_algorithm(self.asked), self.tuned or {})


class Planned(NamedTuple):
    """One run of a comparison."""

    label: str
    seed: int
    tables: dict[str, Any]  # of its experiment
    place: Path

    @property
    def rounds(self) -> int:
        return int(self.tables["train"]["rounds"])

    @property
    def done(self) -> bool:
        """Whether the run is there, to its last round, with all that is to be measured."""
        return self._has(self.tables["eval"].get("metrics"), rows=True)

    @property
    def is_finished(self) -> bool:
        """Whether the run is there, though perhaps without a metric that was asked for later."""
        return self._has(None)

    def _has(self, metrics: Sequence[str] | None, *, rows: bool = False) -> bool:
        if not all((self.place / name).exists() for name in ("config.toml", "summary.json")):
            return False
        rounds = layout.rounds(self.place)
        if rounds >= self.rounds and (stopped := self._stopped_at()) is not None:
            rounds = stopped
        elif rounds < self.rounds:
            return False
        return figures.is_current(self.place / figures.FILE, rounds, metrics, rows=rows)

    def _stopped_at(self) -> int | None:
        """After how many rounds the run has stopped by itself."""
        try:
            summary = json.loads((self.place / "summary.json").read_text(encoding="utf-8"))
            return int(summary["rounds"]) if summary.get("stopped") is not None else None
        except (OSError, ValueError, KeyError):
            return None

    def require_own(self) -> None:
        """Refuse a run that is another one, such as one copied from another comparison."""
        if not (self.place / "config.toml").exists():
            return
        there = layout.config(self.place)
        changed = [line for line in differences(there, json.loads(json.dumps(self.tables)))
                   if not line.startswith(OWN_MAY_DIFFER)]
        if changed:
            raise DescantError(f"the run in {self.place} is not of this comparison ({changed[0]}): remove "
                               "it, and compare again")

    @property
    def title(self) -> str:
        return f"{self.label}, seed {self.seed}"

    @property
    def size(self) -> int:
        return self.rounds

    @property
    def size_done(self) -> int:
        """How many rounds there are already; all of them where the run has stopped by itself."""
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
    splits: Splits  # whether a repetition has a split of its own, a fold, or the same split as the others
    population: Population  # what the answer speaks of: these rows, new rows of these clients, other clients
    experiment: dict[str, Any]  # the sections [data], [model], [train], [eval]; [algorithm] sets the budget
    fingerprint: str  # of the clients and their rows
    clients: int  # that train
    methods: dict[str, Method]
    seeds: list[int]
    metric: str  # the one that decides
    metric_why: str | None  # it is not accuracy, or the loss, though nobody asked for another
    metrics: dict[str, Metric]  # what each figure means
    looks: int  # how many times the results may be looked at while repetitions are added
    looked_at: list[int]  # how many repetitions there were at each look so far
    commands: list[str]
    versions: dict[str, str]

    def runs(self, labels: Sequence[str] | None = None, seeds: Sequence[int] | None = None, *, jobs: int = 1
             ) -> list[Planned]:
        """The runs of some methods and seeds, or of all."""
        return [self._run(self.methods[label], seed, jobs)
                for seed in (self.seeds if seeds is None else seeds)
                for label in (self.methods if labels is None else labels)]

    def _run(self, method: Method, seed: int, jobs: int) -> Planned:
        return Planned(method.label, seed, self.experiment_of(method, seed, jobs).dump(),
                       self.place_of(method.label) / f"seed-{seed}")

    def place_of(self, label: str) -> Path:
        """Where the runs of a method are kept."""
        return self.out / "runs" / label

    def experiment_of(self, method: Method, seed: int, jobs: int) -> Experiment:
        """The experiment of a method: its share of the budget, evaluated about as often as all others."""
        base = Experiment.parse(self.experiment)
        every = max(1, round(base.eval.every * self._matched(method) / base.train.rounds))
        train = dataclasses.replace(base.train, seed=seed, rounds=method.rounds)
        if jobs > 1 and train.backend == "auto":  # the cores belong to the other runs
            train = dataclasses.replace(train, workers=1)
        return dataclasses.replace(
            base, data=_split(base.data, self.splits, seed), algorithm=method.algorithm, train=train,
            eval=dataclasses.replace(base.eval, every=every))

    def trial_of(self, method: Method, jobs: int) -> Experiment:
        """The experiment that a search tries values on: a seed and, unless it is fixed, a split that no
        reported run has; and the same gradient steps for each trial, also where runs stop by themselves."""
        made = self.experiment_of(method, TUNING, jobs)
        return dataclasses.replace(made, train=dataclasses.replace(
            made.train, rounds=self._matched(method), patience=None))

    def _matched(self, method: Method) -> int:
        """The rounds of a method where all have the same steps, or rounds."""
        return max(1, method.rounds // CAP) if self.budget == "converge" else method.rounds

    def remarks(self) -> list[str]:
        """What is particular about this comparison, whatever comes out."""
        found = [f"{label}: {method.search_note}." for label, method in self.methods.items()
                 if method.search_note is not None]
        if self.splits == "fixed" and (field := _given_split(self.experiment["data"])) is not None:
            found.append(f"All repetitions test the same rows, since data.{field} says which: what another "
                         "split would say is not known.")
        if self.splits == "folds" and len(self.seeds) % (count := folds_of(self.experiment["data"]["test"])):
            found.append(f"{len(self.seeds)} repetitions are no whole cross-validation: there are {count} "
                         "folds, so that some rows are tested more often than others.")
        return found + [f"{label} has {method.algorithm.K} clusters for {self.clients} clients: each client "
                        "can be a cluster of its own, so that nothing is shared; take fewer."
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
            raise UsageError(f"{self.out} holds runs of {label} with other hyper-parameters than the search "
                             "has found now: choose another --out")
        return self._replace(methods=self.methods | {label: after})

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
        methods = [method._asdict() | {"grid": None if method.grid is None else method.grid._asdict()}
                   for method in self.methods.values()]
        metrics = {name: metric._asdict() for name, metric in self.metrics.items()}
        plain = self._asdict() | {"format": FORMAT, "methods": methods, "metrics": metrics}
        del plain["out"]
        write_atomic(self.out / "comparison.json", json.dumps(plain, indent=1).encode())


def read(out: Path) -> Plan:
    """The comparison in a directory."""
    path = out / "comparison.json"
    if not path.exists():
        if (out / "config.toml").exists():
            raise UsageError(f"{out} holds one run, and no comparison: make one with `descant compare`")
        raise UsageError(f"{out} holds no comparison: there is no comparison.json, which `descant compare` "
                         "writes")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if (number := found.pop("format")) != FORMAT:
            raise DescantError(f"{path} is of format {number}, and this version of descant has {FORMAT}: it "
                               "splits rows and selects rounds in another way; use the version that made it, "
                               "or compare anew in another directory")
        listed = [Method(**entry | {"grid": entry["grid"] and Place(**entry["grid"])})
                  for entry in found.pop("methods")]
        metrics = {name: Metric(**metric) for name, metric in found.pop("metrics").items()}
        return Plan(out, methods={method.label: method for method in listed}, metrics=metrics, **found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DescantError(f"{path} is damaged ({error!r}): restore it from a copy, or compare anew in "
                           "another directory") from None


@contextlib.contextmanager
def held(out: Path) -> Iterator[None]:
    """Hold the directory of a comparison for this process. One that is made for it is gone again if nothing
    comes of it."""
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


def make(tables: Mapping[str, Any], out: Path, seeds: Sequence[int], *, algorithms: str | None = None,
         budget: Budget = "steps", splits: Splits | None = None, population: Population | None = None,
         metric: str | None = None, looks: int = 1, baselines: bool = True, command: str = "",
         permit: Permit = NOTHING) -> tuple[Plan, list[str]]:
    """Write down what is to be compared, with what was there before, in a directory that is held; also gives
    the labels of the methods that are asked for now. What is None is as before, or else: splits are repeated,
    the answer speaks of these clients, and the data say which metric decides. `permit` is for code that the
    tables name; the directory may name what they name, and what is allowed by name."""
    if len(set(seeds)) != len(seeds) or not seeds or min(seeds) < 0:
        raise UsageError(f"the seeds must be different whole numbers from 0, at least one: not {list(seeds)}")
    setting = {name: table for name, table in tables.items() if name != "algorithms"}
    # [train], for the baselines
    probe = Experiment.parse(setting | {"algorithm": {"name": "fedavg"}}, permit)
    found = contenders(tables, algorithms, probe.train, baselines=baselines, permit=permit)
    asked = [fields.dump(contender.algorithm) for contender in found]
    there = permit_of(probe.dump() | {"algorithms": asked}, Permit(permit.allow))
    before = read(out) if (out / "comparison.json").exists() else None
    if before is None:
        layout.require_free(out)
    # methods that are added later have the budget of the first
    first = found[0].algorithm if before is None else parse_algorithm(before.experiment["algorithm"],
                                                                      allow=there)
    base = dataclasses.replace(
        probe, algorithm=reference(marked(tables, permit), first), train=_until(probe.train, budget),
        eval=dataclasses.replace(probe.eval, metric=_metric(before, metric or probe.eval.metric, out),
                                 metrics=_metrics(before, probe.eval.metrics, there)))
    splits = _splits(before, base.data, splits)
    setup = runs.Setup.of(base)
    names = figures.names(setup.task, base.eval.metrics)
    if base.eval.metric is not None and base.eval.metric not in names:
        raise unknown("metric", base.eval.metric, names)
    why = setup.deciding.why if before is None else before.metric_why
    setup = setup.decided()
    base = dataclasses.replace(base, eval=setup.eval)
    known = {} if before is None else dict(before.methods)
    _require_same(before, base, {"budget": budget, "splits": splits}, setup.federation, out)
    metrics = {name: about for name, about in figures.described(base.eval.metrics).items() if name in names}
    counted = _rounds(setup, [c for c in found if c.label not in known], budget)
    for contender in found:
        table = plain(fields.dump(contender.algorithm))
        if contender.label not in known:
            known[contender.label] = Method(contender.label, table, counted[contender.label].rounds,
                                            sorted(contender.given), contender.grid, contender.added,
                                            counted[contender.label].seconds)
        elif not contender.added and (changed := differences(known[contender.label].asked, table)):
            raise UsageError(f"{out} has {contender.label!r} with another setting ({changed[0]}): give one "
                             f"of them a label ({contender.algorithm.name}:label=...), or choose another "
                             "--out")
        elif not contender.added:  # the same; but this one is the user's, whoever made the directory
            known[contender.label] = known[contender.label]._replace(asked=table)
    commands = [*([] if before is None else before.commands)]
    if command and command not in commands:
        commands.append(command)
    every = sorted({*seeds, *([] if before is None else before.seeds)})
    plan = Plan(
        out, budget, splits, population or (before.population if before is not None else "clients"),
        plain(base.dump()), setup.federation.pool_fingerprint(), setup.federation.population,
        known, every, setup.deciding.name, why, metrics,
        max(looks, 1 if before is None else before.looks), [] if before is None else before.looked_at,
        commands, versions({} if before is None else before.versions))
    try:
        shown = _federation(setup.federation, base.data, _split(base.data, splits, every[0]))
        write_atomic(out / "federation.json", json.dumps(_picture(shown)).encode())
        plan.write()
    except OSError as error:
        raise DescantError(f"cannot write to {out}: {error.strerror}; choose another --out") from None
    return plan, [contender.label for contender in found]


def _until(train: Train, budget: Budget) -> Train:
    """[train] with when a run stops by itself."""
    if budget == "converge":
        return dataclasses.replace(train, patience=train.patience or PATIENCE)
    if train.patience is not None:
        raise UsageError(f"train.patience stops runs early, and --budget {budget} gives all methods the "
                         "same: leave patience out, or compare with --budget converge")
    return train


def _metric(before: Plan | None, wanted: str | None, out: Path) -> str | None:
    """What the rounds of this directory are selected by; None: what the data say."""
    if before is None:
        return wanted
    if wanted is not None and wanted != before.metric:
        raise UsageError(f"{out} holds runs whose rounds were selected by {before.metric}, and not by "
                         f"{wanted}: choose another --out; what {wanted} says of these runs is in "
                         "results.csv")
    return before.metric


def _metrics(before: Plan | None, wanted: Sequence[str] | None, permit: Permit) -> tuple[str, ...] | None:
    """The user's own metrics, with those of before: what some runs have, all have."""
    places = [] if before is None else marked(before.experiment["eval"].get("metrics", []), permit)
    merged = {place: place for place in [*places, *(wanted or ())]}  # as the user names it, where both do
    return tuple(merged.values()) or None


def _given_split(data: Mapping[str, Any]) -> str | None:
    """The field of [data] that says which rows are tested."""
    return next((field for field in ("partition_file", "split", "fold") if data.get(field) is not None), None)


def _splits(before: Plan | None, data: DataSpec, wanted: Splits | None) -> Splits:
    given = _given_split(data.dump())
    if wanted is None:
        wanted = before.splits if before is not None else "repeated" if given is None else "fixed"
    if wanted != "fixed" and given is not None:
        raise UsageError(f"data.{given} says which rows are tested, and --splits {wanted} tests others in "
                         "each repetition: leave one of them out, or take --splits fixed")
    if wanted == "folds":
        folds_of(data.test)
    return wanted


def _split(data: DataSpec, splits: Splits, seed: int) -> DataSpec:
    """[data] of the repetition with a seed."""
    if splits == "repeated":
        return dataclasses.replace(data, split=seed)
    if splits == "folds":
        split, fold = divmod(seed, folds_of(data.test))
        return dataclasses.replace(data, split=split, fold=fold)
    return data


def _federation(made: Federation, data: DataSpec, wanted: DataSpec) -> Federation:
    """The federation of a split; the one that is made, if that is the same."""
    is_same = (data.split_seed, data.fold) == (wanted.split_seed, wanted.fold)
    return made if is_same else wanted.federation()


def _require_same(before: Plan | None, base: Experiment, choices: dict[str, str], federation: Federation,
                  out: Path) -> None:
    """Refuse to put results of different federations, budgets or splits into one directory."""
    if before is None:
        return
    changed = differences(before.experiment | {name: getattr(before, name) for name in choices},
                          json.loads(json.dumps(base.dump())) | choices)
    changed = [line for line in changed if not line.startswith(MAY_CHANGE)]
    if not changed and before.fingerprint != federation.pool_fingerprint():
        changed = [f"the rows of the federation: fingerprint {before.fingerprint} became "
                   f"{federation.pool_fingerprint()}"]
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise UsageError(f"{out} holds another comparison ({'; '.join(changed[:3])}{more}): choose another "
                         "--out")


class _Cost(NamedTuple):
    """What a method takes."""

    rounds: int  # of a run
    seconds: float  # of a round


def _rounds(setup: runs.Setup, found: Sequence[Contender], budget: Budget) -> dict[str, _Cost]:
    """How many rounds each method gets: those of [train] are for the method of [algorithm]."""
    if not found:
        return {}
    planned = setup.train.rounds
    # the same round for all, lest they are measured on different cohorts
    number = 1 + any(method.opens() for method in (setup.algorithm, *(c.algorithm for c in found)))
    whole = planned * _steps(setup, number)[0]
    rounds = {}
    for contender in found:
        method = contender.algorithm
        steps, seconds = _steps(dataclasses.replace(setup, algorithm=method), number)
        least, fitting = 1 + method.opens(), planned
        if budget != "rounds" and steps:  # without any, it fails on all clients: its run will say so
            fitting = max(least, round(whole / steps))
        rounds[contender.label] = _Cost(fitting * (CAP if budget == "converge" else 1), seconds)
    return rounds


class _Counted(InProcess):
    """Keeps what the last job took, also where nothing that came of it can be used."""

    grad_steps = 0

    def run(self, job: Job, clients: np.ndarray, number: int, message: Message, states: Tree) -> Outcome:
        outcome = super().run(job, clients, number, message, states)
        self.grad_steps = outcome.grad_steps
        return outcome


def _steps(setup: runs.Setup, number: int) -> tuple[int, float]:
    """How many gradients a round takes, and about how many seconds: by playing it. A method that diverges at
    once has made its steps all the same."""
    work = setup.work()
    backend, seconds = _Counted(work, 16), 0.0
    with one_thread():
        training = Training(work, setup.train)
        if work.algorithm.opens():
            with contextlib.suppress(DescantError):
                training.play(backend)
        for _ in range(2):  # the first time, much is done that later rounds are spared
            training.number = number - 1
            start = time.perf_counter()
            with contextlib.suppress(DescantError):
                training.play(backend)
            seconds = time.perf_counter() - start
            if seconds > WARM:
                break
    return backend.grad_steps, seconds


def _picture(federation: Federation) -> dict[str, Any]:
    """What a report shows of the federation, so that it needs no data."""
    measured = measure(federation)
    return {
        "facts": facts(federation, measured) | (
            {"notes": "; ".join(federation.notes)} if federation.notes else {}),
        "names": list(federation.names),
        "unseen": federation.unseen,
        "sizes": {split: federation.split(split).sizes.tolist() for split in SPLITS},
        "classes": None if measured.counts is None else measured.counts.tolist(),
        "class_names": None if federation.class_names is None else list(federation.class_names),
    }


def versions(before: Mapping[str, str]) -> dict[str, str]:
    """Of what the figures depend on, also where that has changed on the way."""
    now = {"descant": __version__, "Python": platform.python_version(), "system": platform.platform()}
    now |= {name: metadata.version(name) for name in ("torch", "numpy", "scikit-learn")}
    return {name: version if before.get(name, version) == version else
            before[name] if before[name].endswith(f", then {version}") else f"{before[name]}, then {version}"
            for name, version in now.items()}

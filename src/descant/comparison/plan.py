"""What a comparison consists of, and the directory it is kept in.

    comparison.json           what is compared: the experiment, the methods, their rounds, the seeds
    federation.json           the clients: who has how many rows of which class
    runs/<label>/seed-<n>/    one ordinary run for each method and seed, with figures.csv besides
    tuning/<label>/           the record of a search for hyper-parameters
    failures.json             runs that failed, and why
    results.csv, comparison.png, report.html    what came out

All runs have the federation of the file ([data] has a seed of its own). The seed of a repetition stands for
the initial model, the cohorts and the batches: with the same seed, all methods see the same. Methods and
seeds can be added later; a method of another setting, or another federation, is refused.

Budgets are gradient steps of training: what a method does before it predicts (fine-tuning) does not count,
since it happens only when a model is asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NamedTuple

from descant import fields
from descant._version import __version__
from descant.algorithm import Algorithm
from descant.comparison import figures
from descant.comparison.methods import Contender, Place, contenders, reference
from descant.comparison.tune import with_values
from descant.data.heterogeneity import measure
from descant.division import SPLITS
from descant.engine.backend import InProcess, one_thread
from descant.engine.rounds import Training
from descant.errors import DescantError, UsageError, unknown
from descant.experiment import directory as layout
from descant.experiment import run as runs
from descant.experiment.config import Experiment, differences, parse_algorithm
from descant.files import locked, write_atomic
from descant.measures import Metric
from descant.pool import Federation
from descant.report.data_table import facts

FORMAT = 1
OWN_MAY_DIFFER = ("train.rounds", "train.backend", "train.chunk", "train.workers", "train.ray_address",
                  "eval.metrics")
# what may be another one in the same directory: the results are the same, or more is measured
MAY_CHANGE = ("train.seed", "train.backend", "train.chunk", "train.workers", "eval.metrics")
Match = Literal["steps", "rounds"]
Population = Literal["rows", "clients", "new clients"]


class Method(NamedTuple):
    """A method of a comparison: a contender with its number of rounds."""

    label: str
    asked: dict[str, Any]  # its [algorithm] section, every field written out
    rounds: int
    given: list[str]
    grid: Place | None
    added: bool
    tuned: dict[str, Any] | None = None  # what a search has found, by dotted field

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
        return rounds >= self.rounds and figures.is_current(
            self.place / figures.FILE, rounds, metrics, rows=rows)

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
        """How many rounds there are already."""
        try:
            with (self.place / "metrics.jsonl").open("rb") as file:
                return sum(1 for _ in file)
        except OSError:
            return 0


class Plan(NamedTuple):
    """A comparison as it is written down."""

    out: Path
    match: Match
    experiment: dict[str, Any]  # the sections [data], [model], [train], [eval]; [algorithm] sets the budget
    fingerprint: str  # of the federation
    methods: dict[str, Method]
    seeds: list[int]
    metric: str | None  # which of them decides; None: accuracy, or the loss
    metrics: dict[str, Metric]  # what each figure means
    commands: list[str]
    versions: dict[str, str]
    population: Population = "clients"  # what the intervals speak of
    looks: int = 1  # how often the comparison may be looked at
    metric_why: str | None = None  # why another metric than accuracy decides

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
        every = max(1, round(base.eval.every * method.rounds / base.train.rounds))
        train = dataclasses.replace(base.train, seed=seed, rounds=method.rounds)
        if jobs > 1 and train.backend == "auto":  # the cores belong to the other runs
            train = dataclasses.replace(train, workers=1)
        return dataclasses.replace(base, algorithm=method.algorithm, train=train,
                                   eval=dataclasses.replace(base.eval, every=every))

    def record(self, label: str) -> Path:
        """Where the search for a method's hyper-parameters is kept."""
        return self.out / "tuning" / label

    def tuned(self, label: str, values: dict[str, Any]) -> Plan:
        """The plan with what a search has found for a method."""
        before = self.methods[label]
        after = before._replace(tuned=values)
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
        if found.pop("format") != FORMAT:
            raise DescantError(f"{path} is of another version of descant: use that one")
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
         match: Match = "steps", metric: str | None = None, baselines: bool = True, command: str = ""
         ) -> tuple[Plan, list[str]]:
    """Write down what is to be compared, with what was there before, in a directory that is held; also gives
    the labels of the methods that are asked for now."""
    if len(set(seeds)) != len(seeds) or not seeds or min(seeds) < 0:
        raise UsageError(f"the seeds must be different whole numbers from 0, at least one: not {list(seeds)}")
    setting = {name: table for name, table in tables.items() if name != "algorithms"}
    probe = Experiment.parse(setting | {"algorithm": {"name": "fedavg"}})  # [train], for the baselines
    found = contenders(tables, algorithms, probe.train, baselines=baselines)
    before = read(out) if (out / "comparison.json").exists() else None
    if before is None:
        layout.require_free(out)
    # methods that are added later have the budget of the first
    first = found[0].algorithm if before is None else parse_algorithm(before.experiment["algorithm"])
    base = dataclasses.replace(probe, algorithm=reference(tables, first), eval=dataclasses.replace(
        probe.eval, metrics=_metrics(before, probe.eval.metrics)))
    setup = runs.Setup.of(base)
    known = {} if before is None else dict(before.methods)
    _require_same(before, base, match, setup.federation, out)
    names = figures.names(setup.task, base.eval.metrics)
    if metric is not None and metric not in names:
        raise unknown("metric", metric, names)
    metrics = {name: about for name, about in figures.described(base.eval.metrics).items() if name in names}
    rounds = _rounds(setup, [c for c in found if c.label not in known], match)
    for contender in found:
        table = json.loads(json.dumps(fields.dump(contender.algorithm)))
        if contender.label not in known:
            known[contender.label] = Method(contender.label, table, rounds[contender.label],
                                            sorted(contender.given), contender.grid, contender.added)
        elif not contender.added and (changed := differences(known[contender.label].asked, table)):
            raise UsageError(f"{out} has {contender.label!r} with another setting ({changed[0]}): give one "
                             f"of them a label ({contender.algorithm.name}:label=...), or choose another "
                             "--out")
    commands = [*([] if before is None else before.commands)]
    if command and command not in commands:
        commands.append(command)
    every = sorted({*seeds, *([] if before is None else before.seeds)})
    plan = Plan(out, match, json.loads(json.dumps(base.dump())), setup.federation.fingerprint(), known, every,
                metric or (None if before is None else before.metric), metrics, commands,
                versions({} if before is None else before.versions))
    try:
        write_atomic(out / "federation.json", json.dumps(_picture(setup.federation)).encode())
        plan.write()
    except OSError as error:
        raise DescantError(f"cannot write to {out}: {error.strerror}; choose another --out") from None
    return plan, [contender.label for contender in found]


def _metrics(before: Plan | None, wanted: Sequence[str] | None) -> tuple[str, ...] | None:
    """The user's own metrics, with those of before: what some runs have, all have."""
    places = [] if before is None else before.experiment["eval"].get("metrics", [])
    merged = tuple(dict.fromkeys([*places, *(wanted or ())]))
    return merged or None


def _require_same(before: Plan | None, base: Experiment, match: Match, federation: Federation, out: Path
                  ) -> None:
    """Refuse to put results of different federations, or budgets, into one directory."""
    if before is None:
        return
    changed = differences(before.experiment | {"match": before.match},
                          json.loads(json.dumps(base.dump())) | {"match": match})
    changed = [line for line in changed if not line.startswith(MAY_CHANGE)]
    if not changed and before.fingerprint != federation.fingerprint():
        changed = [f"the rows of the federation: fingerprint {before.fingerprint} became "
                   f"{federation.fingerprint()}"]
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise UsageError(f"{out} holds another comparison ({'; '.join(changed[:3])}{more}): choose another "
                         "--out")


def _rounds(setup: runs.Setup, found: Sequence[Contender], match: Match) -> dict[str, int]:
    """How many rounds each method gets: those of [train] are for the method of [algorithm]."""
    planned = setup.train.rounds
    if match == "rounds":
        return {contender.label: planned for contender in found}
    # the same round for all, lest they are measured on different cohorts
    number = 1 + any(method.opens() for method in (setup.algorithm, *(c.algorithm for c in found)))
    budget = planned * _steps(setup, number) if found else 0
    rounds = {}
    for contender in found:
        method = contender.algorithm
        try:
            steps = _steps(dataclasses.replace(setup, algorithm=method), number)
        except DescantError:  # it diverges at once: its run will say so, and the others go on
            rounds[contender.label] = planned
            continue
        rounds[contender.label] = max(1 + method.opens(), round(budget / steps))
    return rounds


def _steps(setup: runs.Setup, number: int) -> int:
    """How many gradients a round takes: by playing it."""
    work = setup.work()
    with one_thread():
        training = Training(work, setup.train)
        return [training.play(InProcess(work, 16)) for _ in range(number)][-1].grad_steps


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
    }


def versions(before: Mapping[str, str]) -> dict[str, str]:
    """Of what the figures depend on, also where that has changed on the way."""
    now = {"descant": __version__, "Python": platform.python_version(), "system": platform.platform()}
    now |= {name: metadata.version(name) for name in ("torch", "numpy", "scikit-learn")}
    return {name: version if before.get(name, version) == version else
            before[name] if before[name].endswith(f", then {version}") else f"{before[name]}, then {version}"
            for name, version in now.items()}

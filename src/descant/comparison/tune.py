"""Hyper-parameters by validation: the declared ranges of a method's fields, searched by Optuna.

A trial is an ordinary run in memory, judged by the validation figure that selects a run's best round. Trial 0
is the method with its own settings. Only finished trials are written, each in one line of Optuna's journal.
The next trial depends on these and on the seed alone: a killed search continues as if nothing had happened,
and a finished one can be extended. docs/comparing.md (`--tune`) has the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from descant.comparison import trials as records
from descant.core import fields
from descant.core.algorithm import Algorithm
from descant.core.files import locked
from descant.core.metric import LOWER
from descant.core.random import stream
from descant.core.ranges import Log, Range, Step, Whole
from descant.engine.backends.choose import Timing
from descant.engine.settings import Train
from descant.errors import DescantError, UsageError
from descant.experiment import run as runs
from descant.experiment.config import Experiment, completed, differences

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

STARTUP = 5  # trials before later ones are made, and stopped, by what came of earlier ones
WARM_UP = 1 / 3  # of a trial's rounds: it is not stopped earlier
FIRST = 2  # trials that all fail before smaller steps are tried ...
DESCENTS = 5  # ... so many times: at the low ends, and down to 10,000 times below
HOW = ("backend", "chunk", "workers")  # the fields of [train] that a run settles


class Tuning(NamedTuple):
    """The result of a search."""

    algorithm: Algorithm
    values: dict[str, Any]  # of the searched fields
    best: int  # the number of the best trial: of equal ones the first
    validation: float  # mean over the clients in the best round of the metric that decides, or minus a loss
    trials: int
    pruned: int
    failed: int
    grad_steps: int  # of all trials together
    metric: str  # that decides
    note: str | None = None


class Untrained(NamedTuple):
    """The result of a search in which nothing trained."""

    trials: int
    why: str

    @property
    def note(self) -> str:
        return f"{self.why}; it runs with its own settings"


# -- what is searched ------------------------------------------------------------------------------------


def space(algorithm: Algorithm, fixed: Collection[str] = ()) -> dict[str, Range]:
    """Where each field is searched, by its dotted name: not those in `fixed` (`solver` fixes all of the
    solver's), those that are no number now or switched off by a 0, and those that may not be changed as the
    others stand. A range is stretched to the present value."""
    found = {name: declared for name, declared in _declared(algorithm)
             if not any(name == kept or name.startswith(f"{kept}.") for kept in fixed)}
    return {name: declared for name, declared in found.items() if _can_be_changed(algorithm, name, declared)}


def _declared(part: Any, prefix: str = "") -> Iterator[tuple[str, Range]]:
    for field in dataclasses.fields(part):
        value, declared = getattr(part, field.name), field.metadata.get("search")
        if dataclasses.is_dataclass(value):
            yield from _declared(value, f"{prefix}{field.name}.")
        elif declared is not None and isinstance(value, int | float) and not isinstance(value, bool) \
                and not (isinstance(declared, Log) and value <= 0):
            yield prefix + field.name, declared.holding(value)


def _can_be_changed(algorithm: Algorithm, name: str, declared: Range) -> bool:
    try:
        for end in (declared.low, declared.high):
            fields.replaced(algorithm, {name: end})
    except UsageError:
        return False
    return True


# -- the search ------------------------------------------------------------------------------------------


def search(experiment: Experiment, trials: int, record: Path, *, fixed: Collection[str] = (),
           progress: Callable[[int], None] = lambda rounds: None) -> Tuning | Untrained:
    """The method of an experiment with the best values of so many trials, written in `record`. There are
    more trials only where none of so many has trained, and finished trials are not repeated. `progress` gets
    the number of rounds done; the rounds that a stopped trial skips count as done."""
    optuna = _optuna()
    if trials < 1:
        raise UsageError(f"the number of trials must be at least 1, not {trials}")
    ranges = space(experiment.algorithm, fixed)
    if not ranges:
        name = experiment.algorithm.name
        raise UsageError(f"{name} has no field left to tune: `descant show {name}` says which have a range; "
                         "do not set all of them, or do not tune it")
    setup = runs.Setup.of(experiment).decided()
    if not _judged(setup):
        raise UsageError("the clients have no validation rows to tune by: set data.validation above 0, such "
                         "as 0.2, or do not tune")
    rounds = setup.train.rounds
    with records.writing(record):
        record.mkdir(parents=True, exist_ok=True)
    with locked(record), _quiet(optuna):
        with records.writing(record):
            study = _opened(optuna, record, setup, ranges)
            done = study.get_trials(deepcopy=False)
            if _goes_on(done, trials, ranges):
                (record / "best.json").unlink(missing_ok=True)  # until there is a new one
        while _goes_on(done, trials, ranges):
            found = _try(optuna, study, setup, ranges, progress)
            _require_equal_cost([*done, found], setup.algorithm, ranges)
            with records.writing(record):
                study.add_trial(found)
                done = study.get_trials(deepcopy=False)
                records.write_trials(record, done, ranges)
            progress(len(done) * rounds)
        # a longer search that was made before began as this one
        done = done[: max(trials, _failures(done) + 1)]
        result = _concluded(setup, done, ranges)
        with records.writing(record):
            records.write_trials(record, done, ranges)
            if isinstance(result, Tuning):
                metric, reach = setup.deciding.name, _reaching(done, ranges)
                records.write_best(record, {
                    "best": result.best, "figure": f"minus {metric}" if metric in LOWER else metric,
                    "validation": result.validation, "values": result.values,
                    "algorithm": fields.dump(result.algorithm), "trials": result.trials,
                    "pruned": result.pruned, "failed": result.failed, "grad_steps": result.grad_steps,
                    "ranges": {name: str(declared) for name, declared in reach.items()}})
    return result


def _failures(done: Sequence[FrozenTrial]) -> int:
    """How many trials failed before one trained."""
    return next((number for number, trial in enumerate(done) if records.state(trial) != "failed"), len(done))


def _goes_on(done: Sequence[FrozenTrial], trials: int, ranges: Mapping[str, Range]) -> bool:
    if _failures(done) < len(done) or not _steps(ranges):
        return len(done) < trials
    return len(done) < FIRST + DESCENTS  # until something trains, whatever was asked for


def _steps(ranges: Mapping[str, Range]) -> dict[str, Step]:
    return {name: declared for name, declared in ranges.items() if isinstance(declared, Step)}


def _reaching(done: Sequence[FrozenTrial], ranges: dict[str, Range]) -> dict[str, Range]:
    """The ranges as far down as the search has had to go."""
    times = max(0, _failures(done) - FIRST)
    return ranges | {name: declared.lowered(times) for name, declared in _steps(ranges).items()}


def _optuna() -> Any:
    try:
        import optuna  # an extra
    except ModuleNotFoundError as error:
        if error.name != "optuna":
            raise
        raise UsageError("tuning needs Optuna, which is not installed: pip install 'descant[tune]'") from None
    return optuna


def _judged(setup: runs.Setup) -> int:
    """How many of the evaluated clients have validation rows."""
    return int((setup.federation.validation.sizes[setup.evaluated[0]] > 0).sum())


@contextlib.contextmanager
def _quiet(optuna: Any) -> Iterator[None]:
    """Silence Optuna's log and warnings."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)


def _opened(optuna: Any, record: Path, setup: runs.Setup, ranges: dict[str, Range]) -> optuna.Study:
    """The record's journal, which must be of the same search; a new one where there is none."""
    journal = record / "journal.log"
    if journal.exists():
        text = journal.read_bytes()
        os.truncate(journal, text.rfind(b"\n") + 1)  # a kill may have left half a line
    # the directory is locked: Optuna's own lock is free, though a kill may have left it
    (record / "journal.log.lock").unlink(missing_ok=True)
    try:
        storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(journal)))
        study = optuna.create_study(storage=storage, study_name="descant", direction="maximize",
                                    load_if_exists=True)
        known = study.user_attrs.get("identity")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DescantError(f"{journal} is damaged ({error}): restore it from a copy, or remove {record} and "
                           "search anew") from None
    identity = {**setup.identity(), "rounds": setup.train.rounds,
                "ranges": {name: str(declared) for name, declared in ranges.items()}}
    if known is None:
        study.set_user_attr("identity", identity)
    elif changed := differences(completed(known), identity):
        first = changed[0].removeprefix("config.")
        raise UsageError(f"{record} holds another search ({first}): undo that change, or choose another "
                         "directory")
    return study  # type: ignore[no-any-return]


class _Pruned(Exception):
    """The trial has fallen behind."""


@dataclasses.dataclass
class _Observer:
    """Observes the run of a trial: its cost, its figures, and whether it falls behind."""

    trial: optuna.Trial
    settled: Callable[[Train], None]
    progress: Callable[[int], None]
    rounds: int = 0
    grad_steps: int = 0
    rejected: int = 0  # uploads
    key: tuple[float, ...] | None = None  # of the best round so far
    reported: dict[int, float] = dataclasses.field(default_factory=dict)  # round -> best figure until then

    def started(self, run: runs.Run, measured: list[Timing]) -> None:
        self._run = run
        self.settled(run.setup.train)

    def played(self, row: dict[str, Any]) -> None:
        self.rounds = row["round"]
        self.grad_steps += row["grad_steps"]
        self.rejected += row["rejected"]
        self.progress(self.rounds)
        if "personal" not in row:
            return
        self.key = self._run.best_key
        if (figure := records.figure(self.key)) is None:
            return
        self.reported[self.rounds] = figure
        self.trial.report(figure, self.rounds)
        if self.rounds < self._run.setup.train.rounds and self.trial.should_prune():
            raise _Pruned


def _is_lost(key: Sequence[float] | None, setup: runs.Setup) -> bool:
    """Whether half of the clients or more have a diverged model, by their validation rows."""
    return key is None or -2 * key[0] >= _judged(setup)


def _try(optuna: Any, study: optuna.Study, setup: runs.Setup, ranges: dict[str, Range],
         progress: Callable[[int], None]) -> FrozenTrial:
    """The next trial, finished."""
    done = study.get_trials(deepcopy=False)
    ranges = _reaching(done, ranges)
    distributions = {name: _distribution(optuna, declared) for name, declared in ranges.items()}
    all_failed = len(done) >= FIRST and _failures(done) == len(done)
    lowest = {name: declared.low for name, declared in _steps(ranges).items()} if all_failed else {}
    trial = _asked(optuna, done, setup, distributions, lowest)
    values = dict(trial.params)
    if done:
        values = {name: ranges[name].rounded(value) for name, value in values.items()}
    how = study.user_attrs.get("how")

    def settled(train: Train) -> None:
        if how is None:  # all trials, also after a kill, do it in the way that was measured once
            study.set_user_attr("how", {name: getattr(train, name) for name in HOW})

    before = len(done) * setup.train.rounds
    judge = _Observer(trial, settled, lambda rounds: progress(before + rounds))
    states = optuna.trial.TrialState
    state, failure = states.COMPLETE, None
    try:
        train = setup.train
        if how is not None and train.backend in ("auto", how["backend"]):
            train = dataclasses.replace(train, **how)
        algorithm = fields.replaced(setup.algorithm, values)
        runs.start(dataclasses.replace(setup, algorithm=algorithm, train=train), None, judge)
        if records.figure(judge.key) is None:
            failure = "no client has a finite figure on its validation rows"
        elif _is_lost(judge.key, setup):
            failure = "the models of half of the clients or more diverge"
    except _Pruned:
        state = states.PRUNED
    except DescantError as error:
        if isinstance(error, UsageError) and not done:
            raise  # the experiment itself is wrong, whatever the values
        failure = str(error)
    attributes: dict[str, Any] = {"key": judge.key, "grad_steps": judge.grad_steps, "rounds": judge.rounds,
                                  "rejected": judge.rejected}
    if failure is not None:  # as one that was stopped before it began: the sampler takes it for the worst
        state, judge.reported = states.PRUNED, {}
        attributes["failure"] = failure
    value = records.figure(judge.key) if state == states.COMPLETE else None
    found: FrozenTrial = optuna.trial.create_trial(
        state=state, value=value, params=values, distributions=distributions, user_attrs=attributes,
        intermediate_values=judge.reported)
    return found


def _asked(optuna: Any, done: list[FrozenTrial], setup: runs.Setup,
           distributions: dict[str, BaseDistribution], lowest: dict[str, float]) -> optuna.Trial:
    """What to try next: it depends on the finished trials and the seed, not on who finished them."""
    seed = int(stream(setup.train.seed, "tune", len(done)).integers(2**32))
    scratch = optuna.create_study(
        direction="maximize",
        sampler=optuna.samplers.TPESampler(n_startup_trials=STARTUP, multivariate=True, seed=seed),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=STARTUP,
                                           n_warmup_steps=round(WARM_UP * setup.train.rounds)))
    # in the ranges of now, which hold those of before: the sampler takes no others together
    scratch.add_trials([optuna.trial.create_trial(
        state=trial.state, value=trial.value, params=trial.params, distributions=distributions,
        user_attrs=trial.user_attrs, intermediate_values=trial.intermediate_values) for trial in done])
    if not done or lowest:
        now = {name: fields.value_of(setup.algorithm, name) for name in distributions}
        scratch.enqueue_trial(now | lowest)
    return scratch.ask(distributions)  # type: ignore[no-any-return]


def _distribution(optuna: Any, declared: Range) -> BaseDistribution:
    if isinstance(declared, Whole):
        found = optuna.distributions.IntDistribution(declared.low, declared.high)
    else:
        found = optuna.distributions.FloatDistribution(declared.low, declared.high,
                                                       log=isinstance(declared, Log))
    return found  # type: ignore[no-any-return]


def _require_equal_cost(trials: list[FrozenTrial], algorithm: Algorithm, ranges: dict[str, Range]) -> None:
    """Where the cost of a round follows from a searched field, the budgets would not be the same."""
    costs = {trial.user_attrs["grad_steps"] for trial in trials
             if records.state(trial) == "complete" and not trial.user_attrs["rejected"]}
    if len(costs) > 1:
        raise UsageError(f"the trials of {algorithm.name} take from {min(costs)} to {max(costs)} gradient "
                         f"steps, since these depend on {' or '.join(ranges)} here: set what they depend on, "
                         "or do not tune it")


def _concluded(setup: runs.Setup, trials: list[FrozenTrial], ranges: dict[str, Range]) -> Tuning | Untrained:
    states = [records.state(trial) for trial in trials]
    complete = [number for number, state in enumerate(states) if state == "complete"]
    smallest = ", ".join(f"{name} = {min(trial.params[name] for trial in trials):.3g}"
                         for name in _steps(ranges))
    if not complete:
        down, why = f", down to {smallest}" if smallest else "", trials[-1].user_attrs["failure"]
        return Untrained(len(trials), f"none of the {len(trials)} trials of its search trained{down}: {why}")
    best = max(complete, key=lambda number: tuple(trials[number].user_attrs["key"]))
    values = dict(trials[best].params)
    widened = _reaching(trials, ranges) != ranges
    note = (f"the first {_failures(trials)} trials of its search diverged, so it went on below the usual "
            f"step sizes, down to {smallest}") if widened else None
    return Tuning(fields.replaced(setup.algorithm, values), values, best, trials[best].user_attrs["key"][1],
                  len(trials), states.count("pruned"), states.count("failed"),
                  sum(trial.user_attrs["grad_steps"] for trial in trials), setup.deciding.name, note)

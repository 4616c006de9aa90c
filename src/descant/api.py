"""descant from Python: runs, comparisons, searches, with the words of the command line."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
from torch import Tensor, nn

from descant.comparison import plan as planning
from descant.comparison import tune as searching
from descant.comparison.conduct import CompareOptions, conduct, require_no_failures
from descant.comparison.methods import Listed
from descant.comparison.plan import Budget, Population, Splits
from descant.comparison.reproduce import items as papers
from descant.comparison.reproduce.execute import BudgetChoice, ReproduceOptions
from descant.comparison.reproduce.execute import reproduce as execute
from descant.core import fields
from descant.core.algorithm import Algorithm
from descant.core.federation import Federation
from descant.core.losses import Loss, LossName
from descant.core.permit import ran
from descant.core.privacy.settings import Privacy
from descant.core.task import Task
from descant.engine.attack import Attack
from descant.engine.robust import Robust
from descant.engine.settings import Eval, Train
from descant.errors import DescantError, UsageError, one, unknown
from descant.experiment import config, methods
from descant.experiment import run as runs
from descant.experiment.config import Experiment
from descant.experiment.observe import Callback, Calling, Observer, Silent, Together, require_observer
from descant.experiment.run import Run, Setup
from descant.experiment.trackers import Tracker
from descant.models import ModelSpec, NetworkSpec, TaskSpec, make_task, named
from descant.models.module import Precision
from descant.view.comparison import draw, write_page
from descant.view.objects import Comparison, Search
from descant.view.progress import Shown, counting
from descant.view.reproduce import Reproduction
from descant.view.script import Bar, is_watched
from descant.view.script import console as script_console

Described: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | Experiment | Federation
Settings: TypeAlias = Mapping[str, Any] | Sequence[str]  # {"train.rounds": 5}, or ["train.rounds=5"]
Watchers: TypeAlias = Observer | Sequence[Observer] | None

T = TypeVar("T")
_TRAINED = {field.name for field in fields.describe(Train)}
_ELSEWHERE = {name: f"give it to the solver of the method, as in FedAvg(solver=SGD({name}={{!r}}))"
              for name in ("lr", "momentum", "weight_decay", "schedule", "clip")} | {
    name: f"give local={{{{{name!r}: {{!r}}}}}}" for name in ("epochs", "steps")} | {
    "batch_size": "it is called batch={!r}"}


def run(
    algorithm: Algorithm | str,
    federation: Federation | None = None,
    *,
    model: str | NetworkSpec | TaskSpec | nn.Module | Task = "mclr",
    loss: LossName | Loss | None = None,
    class_weights: Sequence[float] | Tensor | np.ndarray | None = None,
    autocast: Precision | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    eval: Mapping[str, Any] | None = None,
    privacy: Mapping[str, Any] | None = None,
    robust: Mapping[str, Any] | None = None,
    attack: Mapping[str, Any] | None = None,
    observer: Watchers = None,
    on_round: Callback | None = None,
    on_evaluate: Callback | None = None,
    progress: bool | None = None,
    initial: Mapping[str, Tensor] | None = None,
    **train: Any,
) -> Run:
    """Train a federation; returns the run, with its figures and every client's model.

    `train` are the fields of the [train] section: `rounds`, `cohort`, `batch`, `local={"steps": 20}`, `seed`,
    `backend`, `dtype` and so on; `eval` those of [eval], `privacy`, `robust` and `attack`
    those of the sections of these names. With `out` the run is kept in a directory: the same call with
    `resume=True` continues it after a kill, or loads it if it is finished. Without, it is in memory.
    `progress` shows a bar on standard error; by default where that is a terminal or a notebook. An
    `observer` (`descant.experiment.observe.Observer`), or several, take its place; `descant.TensorBoard()`,
    `descant.MLflow()` and `descant.WandB()` are beside it. `on_round(run, row)` is called after
    every round and `on_evaluate(run, row)` after every evaluated one, with its line of metrics; `run.stop()`
    in them ends the run. `class_weights` say what the rows of each class count in training, and
    `autocast="bfloat16"` that passes compute in that precision. `initial` is a
    `state_dict` with which a network starts in place of its own parameters.
    """
    place = None if out is None else _where(out)
    if not isinstance(federation, Federation):
        raise UsageError(f"federation must be a Federation, not {one(federation)}: make one with "
                         "descant.federation(...), Federation.from_arrays(...) or from_frame(...)")
    method = _method(algorithm, train)
    settings = fields.parse(Train, {name: os.fspath(value) if isinstance(value, os.PathLike) else value
                                    for name, value in train.items()}, "train")
    federation = federation.to(settings.torch_dtype)
    if isinstance(class_weights, Tensor | np.ndarray):  # as torch and scikit-learn have them
        class_weights = class_weights.tolist()
    asked = ModelSpec(class_weights=class_weights, autocast=autocast)  # type: ignore[arg-type]
    weights = asked.class_weights
    task = make_task(model, federation, loss=loss, dtype=settings.torch_dtype, seed=settings.seed,
                     initial=initial, class_weights=weights, autocast=asked.autocast)
    if task.dtype != settings.torch_dtype:
        raise UsageError(f"the task is in {task.dtype}, but train.dtype is {settings.dtype}: "
                         "make them the same")
    section = _section(model, loss, asked)
    # the [data] and [model] sections, if everything came from the registries
    own = section is None or initial is not None or callable(loss)
    origin = None if federation.origin is None or own else {
        "data": dict(federation.origin), "model": section}
    setup = Setup(method, task, federation, settings, _section_of(Eval, eval or {}, "eval"), origin, section,
                  privacy=None if privacy is None else _section_of(Privacy, privacy, "privacy"),
                  robust=None if robust is None else _section_of(Robust, robust, "robust"),
                  attack=None if attack is None else _section_of(Attack, attack, "attack"))
    if resume and place is None:
        raise UsageError("resume=True needs the directory of the run as out")
    with _watching(observer, progress, on_round, on_evaluate) as watcher:
        if resume and place is not None and (place / "config.toml").exists():
            return runs.resume(place, setup, observer=watcher)
        return runs.start(setup, place, watcher)


def _method(algorithm: Algorithm | str, train: Mapping[str, Any]) -> Algorithm:
    """The method that is meant; none of its fields is among those of the training."""
    # a place is named by the program itself, and needs no permit
    method = (fields.parse(methods.find(algorithm, "algorithm.name"), {}, "algorithm")
              if isinstance(algorithm, str) else algorithm)
    if not isinstance(method, Algorithm):
        raise UsageError("algorithm must be a name or a method such as FedAvg() (with brackets), "
                         f"not {algorithm!r}")
    for name in train.keys() & {field.name for field in fields.describe(type(method))} - _TRAINED:
        raise UsageError(f"{name} is a field of the method: give it there, as in "
                         f"{type(method).__name__}({name}={train[name]!r})")
    for name in train.keys() & _ELSEWHERE.keys():
        raise UsageError(f"{name} is not a field of [train]: " + _ELSEWHERE[name].format(train[name]))
    return method


def _section_of(kind: type[T], given: Mapping[str, Any], name: str) -> T:
    """The section with these fields."""
    if not isinstance(given, Mapping):
        first = fields.describe(kind)[0]
        raise UsageError(f"{name} must hold the fields of [{name}], such as "
                         f"{{{first.name!r}: {first.default!r}}}, not {given!r}")
    return fields.parse(kind, given, name)


@contextmanager
def _watching(observer: Watchers, progress: bool | None, on_round: Callback | None = None,
              on_evaluate: Callback | None = None) -> Iterator[Observer]:
    """The user's observers, and a bar where somebody looks and nothing else shows the run; then the user's
    functions."""
    several: Any = [] if observer is None else observer if isinstance(observer, list | tuple) else [observer]
    given: list[Observer] = [*several]
    for each in given:
        require_observer(each)
    calling = Calling(on_round, on_evaluate)
    if not all(isinstance(each, Tracker) for each in given):
        yield Together([*given, calling])
    elif is_watched() if progress is None else progress:
        with Bar() as bar:
            yield Together([bar, *given, calling])
    else:
        yield Together([Silent(), *given, calling])


def _section(model: Any, loss: Any, asked: ModelSpec) -> dict[str, Any] | None:
    """The [model] section, if the network has a name; without a user's own loss."""
    spec = named(model) if isinstance(model, str) else model
    if not isinstance(spec, NetworkSpec | TaskSpec):
        return None
    return dataclasses.replace(asked, model=spec, loss=None if callable(loss) else loss).dump()


def resume(out: str | Path, *, rounds: int | None = None, observer: Watchers = None,
           allow: Collection[str] = (), progress: bool | None = None, on_round: Callback | None = None,
           on_evaluate: Callback | None = None) -> Run:
    """Continue the run in a directory, bit for bit; `rounds` extends it. Code that the directory names is
    imported only if its package is in `allow`, or in the user's settings."""
    with _watching(observer, progress, on_round, on_evaluate) as watcher:
        return runs.resume(_where(out), None, rounds, watcher, allow)


def load(out: str | Path, *, allow: Collection[str] = ()) -> Run:
    """The figures and models of a run from its directory; `allow` as for `resume`. The files that it was
    trained on need not be there, unless a client's model is made with its rows, as by fine-tuning."""
    return runs.load(_where(out), allow=allow)


def compare(experiment: Described, out: str | os.PathLike[str], *, algorithms: Listed | None = None,
            seeds: Sequence[int] = (0, 1, 2, 3, 4), until_decided: bool = False, splits: Splits | None = None,
            jobs: int = 1, budget: Budget = "steps", tune: int = 0, metric: str | None = None,
            population: Population | Literal["new-clients"] | None = None, baselines: bool = True,
            set: Settings = (), allow: Collection[str] = (), track: Sequence[str] = (),
            progress: bool | None = None, model: Any = None, **train: Any) -> Comparison:
    """Compare methods on the same federation, as `descant compare` does, with the same words.

    `experiment` is a TOML file, its sections as a dict, an `Experiment`, or a federation that was made of a
    dataset or a folder; with that one, `model`, `eval` and the fields of [train] are given here, as for
    `descant.run`. `algorithms` is text as on the command line, or a list of methods: names, objects such as
    `Ditto(lam=0.5)`, tables as in a file. `set` changes single fields: `{"train.rounds": 20}`. The same call
    finishes what is missing, and methods and seeds can be added. `track`, such as `["mlflow"]`, names tools
    that are told of every run. `progress` shows on standard error how far
    it is; by default where that is a terminal or a notebook.
    """
    place, permit = _where(out), ran(allow)
    asked = CompareOptions(algorithms, _seeds(seeds), until_decided, splits, jobs, budget, tune, metric,
                           "new clients" if population == "new-clients" else population, baselines,
                           f"descant.compare(..., {str(place)!r})", _names(track, "track", '["mlflow"]'))
    tables = _tables(experiment, set, model, train)
    plan, failed = conduct(tables, place, asked, permit, Shown(script_console(progress)), draw)
    require_no_failures(failed)
    return Comparison(place, plan, permit.allow)


def report(directory: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Comparison:
    """Make a page of a comparison, as `descant report` does, and return the comparison."""
    place = _where(directory)
    plan = planning.read(place)
    write_page(place, None if out is None else _where(out))
    return Comparison(place, plan)


def reproduce(item: str | None = None, *, out: str | os.PathLike[str] = "results", jobs: int = 1,
              repetitions: int | None = None, budget: BudgetChoice = "both",
              experiments: str | os.PathLike[str] | None = None, progress: bool | None = None
              ) -> Reproduction:
    """Repeat a table or a figure of a paper, as `descant reproduce` does, with the same words.

    `item` is "PAPER/ITEM", or "PAPER" for all of a paper that this machine can carry; None: for all. The
    items are in descant's repository: where one stands, beside the sources, or in `experiments`. The same
    call finishes what is missing. The result has the claims of the paper beside ours, with verdicts.
    """
    if item is not None and not isinstance(item, str):
        raise UsageError(f'item must be text, such as "pfedbred/table_1_fmnist_mclr", not {item!r}')
    place = papers.place(None if experiments is None else _where(experiments))
    found = papers.chosen(papers.find(place), item)
    if item is None or "/" not in item:
        found = papers.runnable(found, budget)
    wanted, shown = ReproduceOptions(_where(out), jobs, repetitions, budget), Shown(script_console(progress))
    return Reproduction(tuple(made for each in found for made in execute(each, wanted, shown, draw)))


def tune(experiment: Described, trials: int, out: str | os.PathLike[str], *,
         algorithm: Algorithm | str | None = None, fixed: Collection[str] = (), set: Settings = (),
         allow: Collection[str] = (), progress: bool | None = None, model: Any = None, **train: Any
         ) -> Search:
    """Search the hyper-parameters of an experiment's method by validation, with so many trials.

    `experiment`, `set`, `model` and the fields of [train] are those of `descant.compare`; `algorithm` takes
    the place of the experiment's method. Fields in `fixed`, such as `["lam"]`, are not searched. The same
    call continues a search that was stopped, and one with more trials extends it. A comparison searches in
    the same way (`tune=N`), with a seed and a split that no reported run has.
    """
    if not isinstance(trials, int) or isinstance(trials, bool):
        raise UsageError(f"trials must be a whole number, not {trials!r}")
    place, permit = _where(out), ran(allow)
    tables = _tables(experiment, set, model, train)
    if algorithm is not None:
        tables |= {"algorithm": _algorithm_table(algorithm)}
    made = Experiment.parse(tables, permit)
    known = searching.space(made.algorithm)
    for name in _names(fixed, "fixed", '["lam"]'):
        if not any(field == name or field.startswith(f"{name}.") for field in known):
            raise unknown("field in fixed", name, known)
    with counting(script_console(progress), trials * made.train.rounds, "round") as show:
        found = searching.search(made, trials, place, fixed=fixed, progress=show)
    if isinstance(found, searching.Untrained):
        raise DescantError(f"{made.algorithm.name}: {found.why}")
    return Search(place, found)


def _algorithm_table(algorithm: Algorithm | str) -> dict[str, Any]:
    if isinstance(algorithm, Algorithm):
        table: dict[str, Any] = fields.dump(algorithm)
        return table
    methods.find(algorithm, "algorithm")
    return {"name": algorithm}


# -- what a call says ----------------------------------------------------------------------------------


def _tables(experiment: Described, settings: Settings, model: Any, train: Mapping[str, Any]
              ) -> dict[str, Any]:
    """The sections of an experiment. `model` and `train` are for a federation, and for nothing else."""
    if isinstance(experiment, Federation):
        return config.override(_of_federation(experiment, model, train), settings)
    if train or model is not None:
        word = "model" if model is not None else next(iter(train))
        raise UsageError(f"{word} is in the experiment already: change it with set={{...}}, such as "
                         'set={"train.rounds": 5}')
    if isinstance(experiment, Experiment):
        tables: Mapping[str, Any] = experiment.dump()
    elif isinstance(experiment, Mapping):
        tables = experiment
    elif isinstance(experiment, str | os.PathLike):
        tables = config.read_toml(Path(experiment))
    else:
        raise UsageError("the experiment must be a TOML file, its sections, an Experiment or a Federation, "
                         f"not {one(experiment)}")
    return config.override(tables, settings)


def _of_federation(federation: Federation, model: Any, train: Mapping[str, Any]) -> dict[str, Any]:
    if federation.origin is None:
        raise UsageError("several runs are made in processes of their own, which make the federation again, "
                         "and this one was made of arrays: keep the rows in a folder, one file for each "
                         "client, and give descant.federation(folder, ...)")
    spec = named(model) if isinstance(model, str) else model
    if not isinstance(spec, NetworkSpec | TaskSpec | None):
        raise UsageError("several runs are made in processes of their own, which make the model again: give "
                         f'its name, or the place of a function as "package.module:function", not {model!r}')
    own = dict(train)
    sections = {"data": dict(federation.origin), "eval": own.pop("eval", None) or {}, "train": own}
    return sections | ({} if spec is None else {"model": ModelSpec(spec).dump()})


def _where(out: Any) -> Path:
    """The directory that is named by `out`."""
    if not isinstance(out, str | os.PathLike):
        raise UsageError(f"out must be the path of a directory, not {out!r}")
    return Path(out)


def _names(given: Any, what: str, example: str) -> list[str]:
    if isinstance(given, str) or not isinstance(given, Collection):
        raise UsageError(f"{what} must be a list of names, such as {example}, not {given!r}")
    return list(given)


def _seeds(seeds: Any) -> list[int]:
    if isinstance(seeds, str) or not isinstance(seeds, Collection) or not all(
            isinstance(seed, int) and not isinstance(seed, bool) for seed in seeds):
        raise UsageError(f"seeds must be whole numbers, such as [0, 1, 2], not {seeds!r}")
    return list(seeds)

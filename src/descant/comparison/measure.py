"""The full figures of a finished run: exact, for every client, at the validation-best and at the last round.

The sums that score the rounds of a run give no AUROC, no calibration, and none of the user's own functions.
So the models of the two rounds are made once more, and their outputs on the clients' test rows are measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from descant.comparison import finished
from descant.comparison.finished import FACTS, POOLED, Columns, RowInfluences
from descant.core import scoring
from descant.core.import_object import imported
from descant.core.metric import METRICS, Metric, of_classifier
from descant.core.task import Batch, Task, inputs
from descant.core.threads import one_thread
from descant.core.tree import Tree, map_tree, nbytes, take
from descant.core.units import times
from descant.engine.backends.base import InProcess
from descant.engine.backends.choose import fitted_chunk
from descant.engine.divergence import Levels
from descant.engine.evaluation import all_test_rows
from descant.engine.personal import STATES_AT_ONCE, Snapshot, personal_models
from descant.engine.work import CPU
from descant.errors import UsageError
from descant.experiment.run import Run, Which
from descant.models.module import ModuleTask

ROUNDS: tuple[Which, ...] = ("best", "last")  # without validation data, the best is the last

OwnMetric: TypeAlias = Callable[[Tensor, Tensor], Any]  # (raw outputs [n, ...], targets [n, ...]) -> number


class Measurements(NamedTuple):
    """The measurements of a run."""

    columns: Columns
    single: RowInfluences
    notes: list[str]  # what could not be measured


def own_metrics(places: Sequence[str] | None) -> dict[str, OwnMetric]:
    """The user's functions by their names, imported. Called before training, so that errors come early."""
    found: dict[str, OwnMetric] = {}
    for place in places or ():
        name = place.partition(":")[2]
        if name in METRICS or name in FACTS:
            raise UsageError(f"eval.metrics {place}: {name!r} is the name of a column that is there already: "
                             "give the function another name")
        if name in found:
            raise UsageError(f"eval.metrics {place}: another metric is called {name!r} too: "
                             "give one of them another name")
        function = imported(place, "eval.metrics")
        if not isinstance(function, FunctionType):
            raise UsageError(f"eval.metrics {place}: it must be a function (outputs, y) -> number, not an "
                             f"object of type {type(function).__name__}")
        found[name] = function
    return found


def described(places: Sequence[str] | None) -> dict[str, Metric]:
    """What a table should know of each figure: descant's, then the user's own."""
    return METRICS | {name: Metric(bool(getattr(function, "lower_is_better", False)), _first_line(function))
                      for name, function in own_metrics(places).items()}


def names(task: Task, places: Sequence[str] | None) -> tuple[str, ...]:
    """The figures of a task."""
    return _Scale(task, own_metrics(places)).names


def _first_line(function: OwnMetric) -> str:
    lines = (getattr(function, "__doc__", None) or "").strip().splitlines()
    return lines[0].rstrip(".") if lines else "a metric of your own"


def measure(run: Run, metrics: Sequence[str] | None = None) -> Measurements:
    """The figures of a run on the clients' test rows, best round first. `metrics` are the places of the
    user's own; absent: those of the run's [eval]."""
    setup = run.setup
    if setup.federation.is_remote:
        raise UsageError("the clients of this run are on their own machines, and their test rows with them: "
                         "only what they reported can be compared")
    scale = _Scale(setup.task, own_metrics(setup.eval.metrics if metrics is None else metrics))
    snapshots = {which: run.snapshot(which) for which in ROUNDS}
    done: dict[int, list[Columns]] = {}  # by the number of the round: the best may be the last
    best, rows = snapshots["best"].number, [{"row": np.zeros(0, np.int64), "client": np.zeros(0, np.int64)}]
    with one_thread(), torch.no_grad():
        for number, snapshot in {each.number: each for each in snapshots.values()}.items():
            done[number] = [part for group in run.setup.evaluated for part in _of_round(
                run, snapshot, group, scale, rows if number == best else None)]
    which = np.concatenate([np.repeat(which, sum(len(part["client"]) for part in done[snapshot.number]))
                            for which, snapshot in snapshots.items()])
    columns = _joined([part for snapshot in snapshots.values() for part in done[snapshot.number]])
    personal = {name: column[:-1] for name, column in done[best][0].items()}  # without the pooled rows
    values = torch.from_numpy(np.stack([personal[name] for name in scale.names], 1))
    lost = Levels(run.work).diverged(values, "test", personal["client"])  # by the rule that judges rounds
    single = RowInfluences(_joined(rows[1:] or rows), personal["client"][lost])
    return Measurements({"which": which} | columns, single, scale.notes())


def _joined(parts: Sequence[Columns]) -> Columns:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


class _Scale:
    """What is measured of outputs; remembers what could not be measured."""

    def __init__(self, task: Task, own: dict[str, OwnMetric]) -> None:
        self.task = task
        self.classes = task.classes if isinstance(task, ModuleTask) else None
        self.own = own
        exact = () if self.classes is None else of_classifier(self.classes)
        self.names = (*dict.fromkeys([*task.metric_names, *exact, *self.own]),)
        self._failed: dict[str, list[str]] = {}

    @property
    def looks_at_outputs(self) -> bool:
        """Whether the tallies alone are not enough."""
        return self.classes is not None or bool(self.own and not self.task.scores_need_x)

    def pooled(self, clients: Sequence[tuple[Tensor, Tensor, Tensor]]) -> list[float]:
        """The figures of the rows of many clients together: their tallies, outputs and targets."""
        if not clients:
            return [math.nan] * len(self.names)
        tallies, outputs, y = zip(*clients, strict=True)
        return self.figures(torch.stack(tallies).sum(0), torch.cat(outputs), torch.cat(y))

    def figures(self, tally: Tensor, outputs: Tensor, y: Tensor) -> list[float]:
        """The figures `names` of some rows."""
        found = dict(zip(self.task.metric_names, self.task.figures(tally).double().tolist(), strict=True))
        if self.classes is not None:
            found |= scoring.classification(outputs.numpy(), y.numpy(), self.classes)
        found |= {name: self._by(name, outputs, y) for name in self.own}
        return [found[name] for name in self.names]

    @np.errstate(all="ignore")  # a diverged model has figures that are not finite
    def influences(self, outputs: Tensor, batch: Batch) -> Columns:
        """How much each row moves those figures that have influences."""
        losses = self.task.row_losses(outputs, batch).double().numpy()
        found = {"loss": scoring.mean_influence(losses)}
        if self.classes is not None:
            found |= scoring.classification_influences(outputs.numpy(), batch.y.numpy(), self.classes)
        elif "mse" in self.task.metric_names:
            found |= scoring.regression_influences(outputs.numpy(), batch.y.numpy())
        return {name: values.astype(np.float32) for name, values in found.items()}

    def _by(self, name: str, outputs: Tensor, y: Tensor) -> float:
        if self.task.scores_need_x:  # what it calls outputs means nothing without the samples
            self.failed(f"eval.metrics {name}", f"a {type(self.task).__name__} predicts nothing")
            return math.nan
        try:
            # copies: what a function does to them must not reach the next one
            value = float(self.own[name](outputs.clone(), y.clone()))
        except Exception as error:
            self.failed(f"eval.metrics {name}", f"{type(error).__name__}: {_reason(error)}")
            return math.nan
        if math.isnan(value):
            self.failed(f"eval.metrics {name}", "it gives NaN")
        return value

    def failed(self, what: str, why: str) -> None:
        self._failed.setdefault(what, []).append(why)

    def notes(self) -> list[str]:
        return [f"{what} could not be measured {times(len(whys), 'time')}; first: {whys[0]}"
                for what, whys in self._failed.items()]  # one line each, of however many clients


def _of_round(run: Run, snapshot: Snapshot, clients: np.ndarray, scale: _Scale,
              influences: list[Columns] | None) -> Iterator[Columns]:
    """The figures of some clients after one round, for each kind of model, with their pooled rows at the end.
    `influences` takes what each test row does to the figures of its client's own model."""
    federation, task = run.setup.federation, run.setup.task
    shared = run.work.algorithm.global_model(snapshot.server)
    kinds = ("personal",) if shared is None else ("personal", "global")
    every = all_test_rows(federation) if run.setup.eval.rows == "all" else None
    everywhere = np.full((len(clients) + 1, len(scale.names)), np.nan)
    pools: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {kind: [] for kind in kinds}
    pooled_rows, kept = dict.fromkeys(kinds, 0), slice(None) if scale.looks_at_outputs else slice(0)
    values = {kind: np.full((len(clients) + 1, len(scale.names)), np.nan) for kind in kinds}
    unseen = bool(clients[0] >= federation.population)
    for at, personal in _personal(run, snapshot, clients, scale):
        rows = torch.from_numpy(federation.test[int(clients[at])])
        if not len(rows):
            continue
        x, y = federation.x[rows if task.scores_need_x else rows[:0]], federation.y[rows]
        targets = Batch(inputs(x, task.dtype), y)
        if every is not None:
            everywhere[at] = _on_all(run, personal, every, scale, federation.names[clients[at]])
        for kind, model in zip(kinds, (personal, shared), strict=False):
            try:
                outputs = _outputs(run, kind, model, rows)
                tally = task.tally(outputs, targets)
            except Exception as error:
                name = federation.names[clients[at]]
                scale.failed("models of clients", f"client {name!r}: {_reason(error)}")
                continue
            values[kind][at] = scale.figures(tally, outputs, y)
            pools[kind].append((tally, outputs[kept], y[kept]))
            pooled_rows[kind] += len(y)
            if influences is not None and kind == "personal" and not unseen:
                influences.append({"row": rows.numpy(), "client": np.full(len(rows), clients[at])}
                                  | scale.influences(outputs, targets))
    names = np.array([*(federation.names[client] for client in clients), "pooled"])
    for kind in kinds:
        values[kind][-1] = scale.pooled(pools[kind])
    if every is not None:
        values["everywhere"], pooled_rows["everywhere"] = everywhere, 0
    for kind in values:
        sizes = np.append(federation.test.sizes[clients], pooled_rows[kind])
        facts: tuple[Any, ...] = (snapshot.number, kind, np.append(clients, POOLED), names, unseen, sizes)
        yield {name: np.broadcast_to(fact, len(names)) for name, fact in zip(FACTS[1:], facts, strict=True)
               } | dict(zip(scale.names, values[kind].T, strict=True))


def _on_all(run: Run, model: Tree, rows: Tensor, scale: _Scale, name: str) -> list[float]:
    """The figures of a client's own model on the test rows of all clients."""
    task, federation = run.setup.task, run.setup.federation
    y = federation.y[rows]
    try:
        outputs = _outputs(run, "personal", model, rows)
        x = inputs(federation.x[rows if task.scores_need_x else rows[:0]], task.dtype)
        return scale.figures(task.tally(outputs, Batch(x, y)), outputs, y)
    except Exception as error:
        scale.failed("models of clients", f"client {name!r}: {_reason(error)}")
        return [math.nan] * len(scale.names)


def _personal(run: Run, snapshot: Snapshot, clients: np.ndarray, scale: _Scale) -> Iterator[tuple[int, Tree]]:
    """What each client predicts with, by its position; no more at a time than fit into little memory."""
    work, train = run.work, run.setup.train
    chunk = 1 if train.backend == "loop" else train.chunk or fitted_chunk(work)
    backend = InProcess(work, chunk)
    each = nbytes(snapshot.store.template) + work.task.dim * work.task.dtype.itemsize
    size = chunk * max(1, STATES_AT_ONCE // (chunk * each))
    for at, outcome in personal_models(backend, snapshot, clients, size):
        for k, why in outcome.failed.items():
            scale.failed("models of clients", f"client {work.federation.names[clients[at[k]]]!r}: {why}")
        for k, position in enumerate(at[outcome.done].tolist()):
            yield position, take(outcome.values, k)


def _outputs(run: Run, kind: str, model: Tree, rows: Tensor) -> Tensor:
    """What a client predicts for its rows, where its models are trained."""
    task, x, device = run.setup.task, run.setup.federation.x, run.work.device
    blocks = []
    with nullcontext() if device == CPU else device:
        model = model if device == CPU else map_tree(lambda t: t.to(device), model)
        for part in rows.split(task.rows_at_once):
            samples = inputs(x[part], task.dtype).to(device)
            blocks.append(task.predict(model, samples) if kind == "global"
                          else run.setup.algorithm.predict(task, model, samples))
        return torch.cat(blocks).cpu()


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def write(run: Run, directory: Path, metrics: Sequence[str] | None = None) -> list[str]:
    """Write the figures of a run into its directory; returns what could not be measured."""
    columns, single, notes = measure(run, metrics)
    finished.write(directory, columns, single)
    return notes

"""A run: rounds, evaluation, files; from the start, or from where it was left."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import nn

from descant.core.algorithm import Algorithm, Round
from descant.core.federation import Federation
from descant.core.files import locked
from descant.core.metrics import AUROC
from descant.core.permit import Allowed
from descant.core.plain import plain
from descant.core.stopwatch import Stopwatch
from descant.core.task import ModuleTask, Task
from descant.core.tree import Tree, take
from descant.core.vector import Model
from descant.data.heterogeneity import heading
from descant.engine.backends.base import Backend, one_thread
from descant.engine.backends.choose import Measured, make_backend
from descant.engine.divergence import symptom
from descant.engine.evaluation import Evaluation, evaluate, evaluated_clients, selection_key, summarise
from descant.engine.remedy import remedy
from descant.engine.rounds import RoundReport, Training, state_template
from descant.engine.selection import Deciding, deciding, idle, usual
from descant.engine.settings import Eval, Train
from descant.engine.store import require_files
from descant.engine.work import Work
from descant.errors import DescantError, UsageError
from descant.experiment import checkpoint
from descant.experiment import directory as layout
from descant.experiment.checkpoint import Keeper, Snapshot
from descant.experiment.config import Experiment, completed, differences
from descant.view.plots import draw_clusters, draw_curve

Which = Literal["best", "last"]


class Observer(Protocol):
    """Whoever watches a run: a progress display, a log."""

    def started(self, run: Run, measured: list[Measured]) -> None:
        """The first round is about to begin."""

    def played(self, row: dict[str, Any]) -> None:
        """A round is committed; `row` is its line of metrics.jsonl."""


class Silent:
    def started(self, run: Run, measured: list[Measured]) -> None:
        for caution in (*run.setup.algorithm.cautions(), *run.notes):
            warnings.warn(caution, stacklevel=5)

    def played(self, row: dict[str, Any]) -> None:
        if "divergence" in row:
            warnings.warn(f"round {row['round']}: {row['divergence']}", stacklevel=6)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C: the run stands at its last committed round, and what it has so far is `run`."""

    def __init__(self, message: str, run: Run) -> None:
        super().__init__(message)
        self.run = run


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a run is made of. `origin` are the [data] and [model] sections where they are known; a run
    on a user's own objects has none and can be resumed only from Python. `model` is the [model] section
    where the data alone are the user's own."""

    algorithm: Algorithm
    task: Task
    federation: Federation
    train: Train
    eval: Eval
    origin: dict[str, Any] | None = None
    model: dict[str, Any] | None = None

    @classmethod
    def of(cls, experiment: Experiment) -> Setup:
        federation = experiment.data.federation().to(experiment.train.torch_dtype)
        task = experiment.model.task(federation, experiment.train.torch_dtype, experiment.train.seed)
        sections = experiment.dump()
        return cls(experiment.algorithm, task, federation, experiment.train, experiment.eval,
                   {name: sections[name] for name in ("data", "model")})

    def work(self) -> Work:
        return Work(self.algorithm, self.task, self.federation, self.train.seed, self.train.batch,
                    self.train.local, torch.device(self.train.device), ranks=self.eval.metric == AUROC)

    @cached_property
    def deciding(self) -> Deciding:
        """The metric by which the best round is selected."""
        return deciding(self.eval.metric, self.task, self.federation)

    def decided(self) -> Setup:
        """With the metric that decides written down; what a run asks of its data is checked."""
        if self.train.patience is not None and not self.federation.validation.sizes[evaluated_clients(
                self.federation.population, self.eval, self.train.seed)].any():
            raise UsageError("train.patience stops by validation figures, and the clients have no validation "
                             "rows: set data.validation above 0, such as 0.2, or leave patience out")
        return dataclasses.replace(self, eval=dataclasses.replace(self.eval, metric=self.deciding.name))

    def tables(self) -> dict[str, Any]:
        """The sections of the run's config.toml."""
        return layout.tables(self.origin, self.algorithm, self.train, self.eval)

    def identity(self) -> dict[str, Any]:
        """What two parts of one run must share. The number of rounds may grow, the cluster may move, and how
        clients are run may change where there is less of everything: results agree to rounding. What is
        measured when all is done changes nothing, nor does when to stop. The usual metric is left out: runs
        that were made before there was a choice have it."""
        tables = self.tables()
        tables["eval"].pop("metrics", None)
        if self.deciding.name == usual(self.task):
            tables["eval"].pop("metric", None)
        for name in ("rounds", "patience", "ray_address", "backend", "chunk", "workers"):
            tables["train"].pop(name, None)
        parts = {"config": tables, "federation": self.federation.fingerprint(),
                 "initial model and loss": self.task.fingerprint()}
        plain: dict[str, Any] = json.loads(json.dumps(parts))
        return plain


class Run:
    """The result of a run (also while it goes on)."""

    def __init__(self, setup: Setup, directory: Path | None, *, read_only: bool = False) -> None:
        self.setup = setup
        self.directory = directory
        self.history: list[dict[str, Any]] = []  # one row a round, as in metrics.jsonl
        self.notes: list[str] = []  # what is not as it was asked for in how clients are run
        self.why_metric: str | None = None  # why a new run does not select its rounds by the usual metric
        self._work = setup.work()
        kept = None if directory is None else directory / "checkpoint"
        self._training = Training(self._work, setup.train, None if kept is None else kept / "clients",
                                  read_only=read_only)
        self._keeper = Keeper(self._training, kept, setup.identity(), read_only=read_only)

    @property
    def work(self) -> Work:
        """What there is to do, for whoever does it."""
        return self._work

    @property
    def stopwatch(self) -> Stopwatch:
        """Where the time of this process's rounds went."""
        return self._training.watch

    @property
    def rounds(self) -> int:
        """How many rounds are committed."""
        return len(self.history)

    @property
    def best_round(self) -> int | None:
        """The round with the best validation figures; None without validation data."""
        return None if self._keeper.best is None else self._keeper.best.number

    @property
    def best_key(self) -> tuple[float, ...] | None:
        """The validation figures of the best round: greater is better, in this order."""
        return self._keeper.best_key

    @property
    def summary(self) -> dict[str, Any]:
        """The last round and the validation-best round, and what the run cost."""
        return layout.summary(self.history, self.best_round, self.best_key, self.setup, self.is_converged)

    @property
    def is_converged(self) -> bool:
        """Whether the run has stopped, or stops now, because nothing improves any more."""
        patience = self.setup.train.patience
        return patience is not None and idle(self.history, self.setup.deciding.name) >= patience

    def snapshot(self, which: Which = "best") -> Snapshot:
        """The state after the last round, or after the validation-best one (the last without any)."""
        if which not in ("best", "last"):
            raise UsageError(f'which must be "best" or "last", not {which!r}')
        if which == "best" and self._keeper.best is not None:
            return self._keeper.best
        return Snapshot(self._training.number, self._training.server, self._training.store)

    def round_of(self, clients: np.ndarray, number: int) -> Round:
        """The facts of a round that was."""
        return self._training.round_of(clients)._replace(number=number)

    def personal(self, client: int, which: Which = "best") -> Tree:
        """What a client predicts with: the method's own object, usually a Model."""
        everyone = self.setup.federation.everyone
        if not 0 <= client < everyone:
            raise UsageError(f"client {client} does not exist: there are clients 0 to {everyone - 1}")
        if self.setup.federation.elsewhere:
            raise UsageError("the personal models of this run are with its clients, on their own machines")
        number, server, store = self.snapshot(which)
        clients = np.array([client])
        facts = self.round_of(clients, number)
        algorithm = self.setup.algorithm
        if store.took_part(clients)[0]:
            message, job = algorithm.broadcast(server, facts), "personalize"
        else:
            message, job = algorithm.newcomer(server, facts), "adapt"
        with one_thread():
            done, values, failed, *_ = self._work.execute(
                job, clients, number, message, store.read(clients))  # type: ignore[arg-type]
        if not len(done):
            raise DescantError(f"client {client} cannot be personalized: {failed[0]}")
        return take(values, 0)

    def personal_model(self, client: int, which: Which = "best") -> nn.Module:
        """A client's own model as an ordinary module, ready to predict."""
        return self._module(self.personal(client, which))

    def global_model(self, which: Which = "best") -> nn.Module:
        """The model for all as an ordinary module."""
        model = self.setup.algorithm.global_model(self.snapshot(which).server)
        if model is None:
            raise UsageError(f"{self.setup.algorithm.name} has no global model")
        return self._module(model)

    def _module(self, model: Tree) -> nn.Module:
        if not isinstance(self.setup.task, ModuleTask) or not isinstance(model, Model):
            raise UsageError("what the clients of this run predict with is not one nn.Module: "
                             "use run.personal")
        return self.setup.task.module(model)

    # -- how it is made --------------------------------------------------------------------------

    def drive(self, backend: Backend, observer: Observer) -> None:
        """Play the rounds that are left."""
        settings, train, federation = self.setup.eval, self.setup.train, self.setup.federation
        clients = evaluated_clients(federation.population, settings, train.seed)
        metric = self.setup.deciding.name
        if self.rounds == 0:
            with _shielded(), self._writing():
                self._keeper.commit(None)
        while self.rounds < train.rounds and not self.is_converged:
            start = time.perf_counter()
            report = self._training.play(backend)
            played = time.perf_counter()
            evaluations: list[Evaluation] = []
            if settings.due(report.number, train.rounds):
                groups = (clients, np.arange(federation.population, federation.everyone))  # and the unseen
                with self.stopwatch("evaluate"):
                    evaluations = [evaluate(self._training, backend, group)
                                   for group in groups if len(group)]
            row = self._row(report, played - start, evaluations, time.perf_counter() - played)
            with _shielded(), self._writing(), self.stopwatch("checkpoint"):
                if self.directory is not None:
                    layout.append_row(self.directory, row, evaluations, federation)
                self._keeper.commit(
                    selection_key(evaluations[0], federation, metric) if evaluations else None)
                self.history.append(row)
            self.stopwatch.rounds += 1
            observer.played(row)
        if self.directory is not None:
            with _shielded(), self._writing():
                layout.write_summary(self.directory, self.summary)
                draw_curve(self.history, self.best_round, self.directory / "curve.png", metric,
                           f"{self.setup.algorithm.name} on {heading(federation)}")
                draw_clusters(self.history, self.directory / "clusters.png")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A full disk is told with what is safe and how to go on."""
        try:
            yield
        except OSError as error:
            where = "" if self.directory is None else f": {layout.resume_command(self.directory)}"
            raise DescantError(f"cannot write the run: {error.strerror or error}; {self.rounds} whole "
                               f"rounds are safe: mend that, then continue with{where}") from None

    def restore(self) -> None:
        """Read the last committed round from the run's directory."""
        assert self.directory is not None
        self._keeper.resume()
        self.history = layout.rows_until(self.directory, self._training.number)

    def _row(self, report: RoundReport, seconds: float, evaluations: list[Evaluation], eval_seconds: float
             ) -> dict[str, Any]:
        names = self.setup.federation.names
        row: dict[str, Any] = {
            "round": report.number, "seconds": round(seconds, 6), "grad_steps": report.grad_steps,
            "bytes_down": report.bytes_down, "bytes_up": report.bytes_up,
            "participants": report.participants, "rejected": len(report.rejected), "loss": report.loss,
        }
        if report.rejected:
            row["rejections"] = {names[client]: why for client, why in report.rejected.items()}
        if report.info:
            row["info"] = {key: value for key, value in report.info.items() if key != "note"}
        if "note" in report.info:
            row["note"] = report.info["note"]
        if report.note is not None:
            row["note"] = report.note
        if evaluations:
            figures = [summarise(evaluation, self.setup.federation) for evaluation in evaluations]
            row |= {"eval_seconds": round(eval_seconds, 6)} | figures[0]
            if len(figures) > 1:
                row["unseen"] = figures[1]
        if not any("divergence" in earlier for earlier in self.history):  # told once, with what to do
            first = self.history[0]["loss"] if self.history else report.loss
            found = symptom(report.loss, row.get("personal"), self._training.levels,
                            math.nan if first is None else first)
            if found is not None:
                row["divergence"] = f"{found}; {remedy(self._work)}"
        return plain(row)  # type: ignore[no-any-return]


def start(setup: Setup, out: Path | None = None, observer: Observer | None = None) -> Run:
    """A new run, in a directory that must not hold one yet, or in memory."""
    if out is not None:
        layout.require_free(out)
    why, setup = setup.deciding.why, setup.decided()
    with one_thread():
        backend, settled, measured = _settle(setup)
        with closing(backend), nullcontext() if out is None else layout.created(out, settled.tables()):
            run = Run(settled, out)
            run.why_metric = why
            return _finish(run, backend, observer, measured)


def resume(out: Path, setup: Setup | None = None, rounds: int | None = None, observer: Observer | None = None,
           allow: Allowed = ()) -> Run:
    """Continue the run in a directory, bit for bit. A run on a user's own objects needs them again as
    `setup`; `rounds` extends the run. Code that the directory names must be in `allow`."""
    if setup is None:
        setup = Setup.of(layout.experiment(out, allow))
    else:
        setup = dataclasses.replace(setup, train=layout.settled_train(out, setup.train))
    setup = _as_decided(out, setup)
    if rounds is not None:
        setup = dataclasses.replace(setup, train=dataclasses.replace(setup.train, rounds=rounds))
    planned = layout.rounds(out)
    if setup.train.rounds < planned:
        raise UsageError(f"rounds = {setup.train.rounds} is less than the {planned} rounds of the run: "
                         "a run can only be extended")
    _begun(out, setup)  # what is wrong is told before anything is measured
    if rounds is not None and setup.train.patience is not None and idle(
            layout.read_metrics(out), setup.deciding.name) >= setup.train.patience:
        raise UsageError(f"{out} has stopped, since its validation figures had not improved for "
                         f"{setup.train.patience} evaluations: to go on, take patience out of its "
                         "config.toml")
    with one_thread():
        # workers are made before the lock is taken, lest they inherit it and outlive us
        backend, settled, measured = _settle(setup)
        with closing(backend), locked(out):
            changed = settled.train.rounds > planned or settled.train != setup.train
            return _finish(_continued(settled, out, changed), backend, observer, measured)


def lead(setup: Setup, out: Path, backend: Callable[[Run], Backend], observer: Observer) -> Run:
    """A run whose clients are elsewhere, where `backend` reaches them: begun, or continued from its last
    committed round."""
    setup = setup.decided()
    with one_thread():
        if not (out / "config.toml").exists():
            with layout.created(out, setup.tables()):
                run = Run(setup, out)
                return _finish(run, backend(run), observer, [])
        with locked(out):
            run = _continued(setup, out, setup.train.rounds != layout.rounds(out))
            return _finish(run, backend(run), observer, [])


def _continued(setup: Setup, out: Path, changed: bool) -> Run:
    """The run in a directory, at its last committed round; a changed setup is written down."""
    begun = _begun(out, setup)
    run = Run(setup, out)
    if begun:
        run.restore()
        layout.truncate(out, run.rounds)
    if changed:
        layout.write_config(out, setup.tables())
    return run


def load(out: Path, setup: Setup | None = None, allow: Allowed = ()) -> Run:
    """A run's models and figures as they are on disk; nothing is written. `setup` is needed where the
    directory alone does not tell what the run is made of; code that it names must be in `allow`."""
    setup = _as_decided(out, setup or Setup.of(layout.experiment(out, allow)))
    with locked(out, shared=True):
        if not _begun(out, setup):
            raise DescantError(f"{out} has no checkpoint yet: run `{layout.resume_command(out)}` first")
        run = Run(setup, out, read_only=True)
        run.restore()
    return run


def _as_decided(out: Path, setup: Setup) -> Setup:
    """With the metric that the run's rounds are selected by, unless another is asked for (and then refused):
    what its config says, and in one from before there was a choice, the usual one."""
    if setup.eval.metric is None:
        metric = layout.config(out).get("eval", {}).get("metric", usual(setup.task))
        setup = dataclasses.replace(setup, eval=dataclasses.replace(setup.eval, metric=metric))
    return setup.decided()


def _settle(setup: Setup) -> tuple[Backend, Setup, list[Measured]]:
    """The backend, and the setup with its choice written down."""
    backend, train, measured = make_backend(Training(setup.work(), setup.train))
    return backend, dataclasses.replace(setup, train=train), measured


def _finish(run: Run, backend: Backend, observer: Observer | None, measured: list[Measured]) -> Run:
    observer = observer or Silent()
    run.notes = backend.notes
    observer.started(run, measured)
    try:
        run.drive(backend, observer)
    except KeyboardInterrupt:
        where = "" if run.directory is None else f"; continue with: {layout.resume_command(run.directory)}"
        done = f"stopped after round {run.rounds} of {run.setup.train.rounds}"
        raise Interrupted(f"{done}{where}", run) from None
    return run


def _begun(out: Path, setup: Setup) -> bool:
    """Whether the directory has a checkpoint; an error if it is damaged or not of this setup."""
    kept = out / "checkpoint"
    if not (kept / "state.safetensors").exists() and not (kept / "journal.safetensors").exists():
        if (out / "metrics.jsonl").exists() or (kept / "best" / "state.safetensors").exists():
            raise DescantError(f"the checkpoint is damaged: {kept / 'state.safetensors'} is missing; "
                               "restore it from a copy, or start the run anew")
        return False
    if changed := differences(completed(checkpoint.identity(kept)), setup.identity()):
        first = changed[0].removeprefix("config.")
        raise UsageError(f"{out} cannot be resumed with a changed setup ({first}): put it back, "
                         "or start a new run")
    for part in (kept / "clients", kept / "best" / "clients"):
        require_files(part, state_template(setup.work()), setup.federation.population)
    return True


@contextmanager
def _shielded() -> Iterator[None]:
    """Let Ctrl-C wait until what is being written is whole."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if caught:
        raise KeyboardInterrupt

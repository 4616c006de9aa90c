"""A run: rounds, evaluation, files; new, or resumed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import nn

from descant.core.files import locked, uninterrupted
from descant.core.permit import Allowed
from descant.core.threads import one_thread
from descant.core.tree import Tree
from descant.core.vector import Model
from descant.engine.account import Account
from descant.engine.backends.base import Backend, InProcess
from descant.engine.backends.choose import Timing, make_backend
from descant.engine.evaluation import Evaluation, evaluate, selection_key
from descant.engine.personal import Snapshot, personal_model
from descant.engine.rounds import Training
from descant.engine.selection import idle, usual
from descant.engine.store import require_files
from descant.errors import DescantError, UsageError
from descant.experiment import checkpoint, present
from descant.experiment import directory as layout
from descant.experiment.checkpoint import Checkpointer
from descant.experiment.config import Experiment, completed, differences
from descant.experiment.kept import keep, kept
from descant.experiment.observe import Interrupted, Observer, Silent, tell_end
from descant.experiment.plots import draw_clusters, draw_curve
from descant.experiment.rows import row_of
from descant.experiment.setup import Setup as Setup  # a run is made of one
from descant.models.module import ModuleTask

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Which = Literal["best", "last"]


class Run:
    """The result of a run, also while it goes on."""

    def __init__(self, setup: Setup, training: Training, directory: Path | None, *, read_only: bool = False
                 ) -> None:
        self.setup = setup
        self.directory = directory
        self.history: list[dict[str, Any]] = []  # one row a round, as in metrics.jsonl
        self.notes: list[str] = []  # where clients are not run as the settings ask
        self.why_metric: str | None = None  # why a new run does not select its rounds by the usual metric
        self.stop_asked: str | None = None  # why, once `stop` was called
        self.work, self.stopwatch = training.work, training.watch
        self._training = training
        kept = None if directory is None else directory / "checkpoint"
        if kept is not None:
            training.keep_in(kept / "clients", read_only=read_only)
        self._checkpoints = Checkpointer(training, kept, setup.identity(), read_only=read_only)

    @property
    def rounds(self) -> int:
        """How many rounds are committed."""
        return len(self.history)

    @property
    def account(self) -> Account | None:
        """What the rounds spend of the clients' privacy, where there is any."""
        return self._training.account

    @property
    def cohort(self) -> np.ndarray:
        """Whose uploads are aggregated in the present round."""
        return self._training.sample()[0]

    @property
    def best_round(self) -> int | None:
        """The round with the best validation figures; None without validation data."""
        return None if self._checkpoints.best is None else self._checkpoints.best.number

    @property
    def best_key(self) -> tuple[float, ...] | None:
        """Its validation figures: greater is better, in this order."""
        return self._checkpoints.best_key

    @property
    def summary(self) -> dict[str, Any]:
        """The last round and the validation-best round, and what the run cost."""
        stopped = ("converged" if self.is_converged else "budget" if self.is_spent
                   else None if self.stop_asked is None else "asked")
        found = layout.summary(self.history, self.best_round, self.best_key, self.setup, stopped)
        if self.account is not None and self.account.again:  # the last row may be from before
            found["privacy"]["epsilon"] = self.account.spent(self.rounds)
        return found

    @property
    def is_converged(self) -> bool:
        """Whether the run has stopped, or stops now, because nothing improves any more."""
        patience = self.setup.train.patience
        return patience is not None and idle(self.history, self.setup.deciding.name) >= patience

    @property
    def is_spent(self) -> bool:
        """Whether another round would exceed the budget of privacy."""
        account = self.account
        return (account is not None and self.rounds < self.setup.train.rounds
                and not account.allows(self.rounds + 1))

    @property
    def _goes_on(self) -> bool:
        """Whether another round follows the present one, whatever its figures are. Where training spends
        privacy, nobody trains for a round before the one before it is committed."""
        train, metric = self.setup.train, self.setup.deciding.name
        return (self._training.number < train.rounds and self.account is None and self.stop_asked is None
                and (train.patience is None or idle(self.history, metric) + 1 < train.patience))

    def stop(self, why: str = "") -> None:
        """End the run after the present round, from `on_round` or `on_evaluate`. It can be resumed."""
        self.stop_asked = why

    def snapshot(self, which: Which = "best") -> Snapshot:
        """The state after the last round, or after the validation-best one (the last without any)."""
        if which not in ("best", "last"):
            raise UsageError(f'which must be "best" or "last", not {which!r}')
        if which == "best" and self._checkpoints.best is not None:
            return self._checkpoints.best
        return self._training.snapshot

    def __repr__(self) -> str:
        return present.line(self)

    def _repr_html_(self) -> str:
        return present.html(self)

    def table(self) -> Any:
        """The rounds as a pandas DataFrame."""
        return present.table(self)

    def plot(self) -> Figure:
        """The curve of the run as a Matplotlib figure; `run.plot().savefig("curve.png")` keeps it."""
        return present.plot(self)

    def personal(self, client: int | str, which: Which = "best") -> Tree:
        """What a client, named or numbered, predicts with: the method's own object, usually a Model."""
        client = self.setup.federation.number_of(client)
        if self.setup.federation.is_remote:
            raise UsageError("the personal models of this run are with its clients, on their own machines")
        snapshot = self.snapshot(which)
        try:
            with one_thread():
                return personal_model(self.work, snapshot, client)
        except DescantError as error:
            raise DescantError(f"client {client} cannot be personalized: {error}") from None

    def personal_model(self, client: int | str, which: Which = "best") -> nn.Module:
        """A client's own model as an ordinary module, ready to predict."""
        return self._module(self.personal(client, which))

    def global_model(self, which: Which = "best") -> nn.Module:
        """The model for all as an ordinary module."""
        model = self.work.algorithm.global_model(self.snapshot(which).server)
        if model is None:
            raise UsageError(f"{self.setup.algorithm.name} has no global model")
        return self._module(model)

    def _module(self, model: Tree) -> nn.Module:
        if not isinstance(self.setup.task, ModuleTask) or not isinstance(model, Model):
            raise UsageError("what the clients of this run predict with is not one nn.Module: "
                             "use run.personal")
        return self.setup.task.module(model)

    def drive(self, backend: Backend, observer: Observer) -> None:
        """Run the rounds that are left."""
        settings, train, federation = self.setup.eval, self.setup.train, self.setup.federation
        groups, metric = self.setup.evaluated, self.setup.deciding.name
        if self.rounds == 0:
            with uninterrupted(), self._writing():
                self._checkpoints.commit(None)
        while (self.rounds < train.rounds and not self.is_converged and self.stop_asked is None
               and not self.is_spent):
            start, worked = time.perf_counter(), time.process_time()
            report = self._training.play(backend)
            played = time.perf_counter()
            evaluations: list[Evaluation] = []
            if self.setup.is_told and settings.due(report.number, train.rounds):
                with self._writing():
                    self._checkpoints.tell()
                if backend.asks and self._goes_on:
                    backend.announce([self._training.upcoming()])
                with self.stopwatch("evaluate"):
                    evaluations = [evaluate(self._training, backend, group, settings.rows)
                                   for group in groups]
            row = row_of(self._training, report, played - start, evaluations,
                         time.perf_counter() - played, self.history)
            if isinstance(backend, InProcess):  # what workers or clients do is not known here
                row["processor_seconds"] = round(time.process_time() - worked, 6)
            with uninterrupted(), self._writing(), self.stopwatch("checkpoint"):
                if self.directory is not None:
                    layout.append_row(self.directory, row, evaluations, federation)
                self._checkpoints.commit(
                    selection_key(evaluations[0], federation, metric) if evaluations else None)
                self.history.append(row)
            self.stopwatch.rounds += 1
            observer.played(row)
        if self.directory is not None:
            with uninterrupted(), self._writing():
                layout.write_summary(self.directory, self.summary)
                if self.account is not None:
                    layout.write_privacy(self.directory, self.account, self.rounds, federation)
                draw_curve(self.history, self.best_round, self.directory / "curve.png", metric,
                           f"{self.setup.algorithm.name} on {federation.heading}")
                draw_clusters(self.history, self.directory / "clusters.png")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A full disk: say what is saved and how to resume."""
        try:
            yield
        except OSError as error:
            where = "" if self.directory is None else f" {layout.resume_command(self.directory)}"
            raise DescantError(f"cannot write the run: {error.strerror or error}; {self.rounds} rounds are "
                               f"saved. Fix this, then run{where}") from None

    def restore(self) -> None:
        """Read the last committed round from the run's directory."""
        assert self.directory is not None
        self._checkpoints.resume()
        self.history = layout.rows_until(self.directory, self._training.number)


def start(setup: Setup, out: Path | None = None, observer: Observer | None = None) -> Run:
    """A new run, in a directory that must not hold one yet, or in memory."""
    if out is not None:
        layout.require_free(out)
    why, setup = setup.deciding.why, setup.decided()
    with one_thread():
        training = setup.training()
        backend, setup, measured = _with_backend(setup, training)
        with closing(backend), nullcontext() if out is None else layout.created(out, setup.tables()):
            run = Run(setup, training, out)
            if out is not None:
                with run._writing():
                    keep(out / "checkpoint", setup.federation)
            run.why_metric = why
            return _finish(run, backend, observer, measured)


def resume(out: Path, setup: Setup | None = None, rounds: int | None = None, observer: Observer | None = None,
           allow: Allowed = ()) -> Run:
    """Continue the run in a directory, bit for bit; `rounds` extends it. A run on Python objects needs them
    again as `setup`; code that the directory names must be in `allow`."""
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
    if rounds is not None and setup.train.patience is not None and idle(
            layout.read_metrics(out), setup.deciding.name) >= setup.train.patience:
        raise UsageError(f"{out} has stopped, since its validation figures had not improved for "
                         f"{setup.train.patience} evaluations: to go on, take patience out of its "
                         "config.toml")
    with one_thread():
        training = setup.training()
        _begun(out, setup, training)  # errors come before anything is measured
        # workers are made before the lock is taken, lest they inherit it and outlive us
        backend, settled, measured = _with_backend(setup, training)
        with closing(backend), locked(out):
            changed = settled.train.rounds > planned or settled.train != setup.train
            return _finish(_continued(settled, training, out, changed), backend, observer, measured)


def lead(setup: Setup, out: Path, backend: Callable[[Run], Backend], observer: Observer) -> Run:
    """A run whose clients are on remote machines, which `backend` reaches: new, or resumed."""
    setup = setup.decided()
    with one_thread():
        training = setup.training()
        is_new = not (out / "config.toml").exists()
        with layout.created(out, setup.tables()) if is_new else locked(out):
            run = Run(setup, training, out) if is_new else _continued(
                setup, training, out, setup.train.rounds != layout.rounds(out))
            with closing(backend(run)) as made:
                return _finish(run, made, observer, [])


def _continued(setup: Setup, training: Training, out: Path, changed: bool) -> Run:
    """The run in a directory, at its last committed round; a changed setup is written down."""
    begun = _begun(out, setup, training)
    run = Run(setup, training, out)
    with run._writing():
        keep(out / "checkpoint", setup.federation)
    if begun:
        run.restore()
        layout.truncate(out, run.rounds)
    if changed:
        layout.write_config(out, setup.tables())
    return run


def load(out: Path, setup: Setup | None = None, allow: Allowed = ()) -> Run:
    """A run's models and figures as they are on disk, read only; `setup` and `allow` as in `resume`. The
    user's files need not be there, unless a model is made with a client's rows."""
    setup = _as_decided(out, setup or _of_kept(out, layout.experiment(out, allow)))
    with locked(out, shared=True):
        training = setup.training()
        if not _begun(out, setup, training):
            raise DescantError(f"{out} has no checkpoint yet: run `{layout.resume_command(out)}` first")
        run = Run(setup, training, out, read_only=True)
        run.restore()
    if not setup.federation.has_rows:
        run.work = dataclasses.replace(run.work, closed=True)
    return run


def _of_kept(out: Path, experiment: Experiment) -> Setup:
    """The setup of an experiment; without rows where the user's files are not as they were."""
    known = kept(out / "checkpoint", experiment.train.torch_dtype)
    try:
        setup = Setup.of(experiment)
    except DescantError:
        if known is None:
            raise
        return Setup.of(experiment, known)
    if known is None or setup.federation.fingerprint() == known.fingerprint():
        return setup
    return Setup.of(experiment, known)


def _as_decided(out: Path, setup: Setup) -> Setup:
    """With the metric that selects the run's rounds: that of its config, or in an old one, the usual."""
    if setup.eval.metric is None:
        metric = layout.config(out).get("eval", {}).get("metric", usual(setup.task))
        setup = dataclasses.replace(setup, eval=dataclasses.replace(setup.eval, metric=metric))
    return setup.decided()


def _with_backend(setup: Setup, training: Training) -> tuple[Backend, Setup, list[Timing]]:
    """The backend, and the setup with its choice filled in."""
    backend, training.train, measured = make_backend(training)
    return backend, dataclasses.replace(setup, train=training.train), measured


def _finish(run: Run, backend: Backend, observer: Observer | None, measured: list[Timing]) -> Run:
    observer = observer or Silent()
    account = run.account
    run.notes = [*run.setup.algorithm.remarks(run.setup.task), *backend.notes,
                 *([] if account is None else account.cautions())]
    observer.started(run, measured)
    try:
        run.drive(backend, observer)
    except BaseException as error:
        tell_end(observer, run, "interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
        if not isinstance(error, KeyboardInterrupt):
            raise
        where = "" if run.directory is None else f"; continue with: {layout.resume_command(run.directory)}"
        done = f"stopped after round {run.rounds} of {run.setup.train.rounds}"
        raise Interrupted(f"{done}{where}", run) from None
    tell_end(observer, run, "finished")
    return run


def _begun(out: Path, setup: Setup, training: Training) -> bool:
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
        require_files(part, training.store.template, training.store.population)
    return True

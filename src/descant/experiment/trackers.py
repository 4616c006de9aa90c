"""Observers for the tools in which people keep their runs: TensorBoard, MLflow, Weights & Biases.

A tool is told the run's settings once and the figures of every round. A tool that is away ends no run: it is
a warning, and nothing more is sent. What was not sent, before a kill or while the tool was away, is sent when
the run is resumed, so that a resumed run has the same figures there as one that was never stopped.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from descant.core import fields
from descant.core.files import write_atomic
from descant.engine.backends.choose import Timing
from descant.errors import UsageError, first_line, unknown
from descant.experiment.observe import Status
from descant.experiment.present import PLAIN, means
from descant.experiment.run import Run

KEPT = "tracking.json"  # in a run's directory: by which names the tools know it
PARAMETERS, LONGEST = 100, 500  # MLflow's limits: parameters of a call, letters of a value
LONGEST_WAIT = 5.0  # seconds
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}  # unless set


class Tracker(ABC):
    """Keeps the figures of a run in a tool. `name` is also that of the extra with its package."""

    name: ClassVar[str]
    module: ClassVar[str]

    def __init__(self) -> None:
        try:
            self._tool: Any = importlib.import_module(self.module)
        except ModuleNotFoundError:
            raise UsageError(f"{type(self).__name__} needs a package that is not installed: "
                             f"pip install 'descant[{self.name}]'") from None
        self._is_away = False
        self.title: str | None = None  # by which people know the run; None: by its directory
        self.warn: Callable[[str], None] = partial(warnings.warn, stacklevel=7)

    def started(self, run: Run, measured: list[Timing]) -> None:
        self._is_away = False
        self._attempt(self._begin, run)

    def played(self, row: dict[str, Any]) -> None:
        self._attempt(self._log, row["round"], figures(row))

    def ended(self, run: Run, status: Status) -> None:
        self._attempt(self._close, run, status)

    def _begin(self, run: Run) -> None:
        self._open(run)
        for row in run.history:
            self._log(row["round"], figures(row))

    def _attempt(self, what: Callable[..., None], *arguments: Any) -> None:
        if self._is_away:
            return
        try:
            with warnings.catch_warnings():  # those of the tools' own code
                warnings.simplefilter("ignore")
                what(*arguments)
        except Exception as error:  # whatever a tool raises, the run goes on
            self._is_away = True
            why = f"{type(error).__name__}: {first_line(error)}"
            self.warn(f"{type(self).__name__} is told nothing more of this run, which goes on ({why}); when "
                      "it is there again, resume the run with it, also if it is finished: what is missing is "
                      "sent then")

    def _called(self, run: Run) -> str:
        found = run.setup.algorithm.name if run.directory is None else run.directory.name
        return self.title or found

    @abstractmethod
    def _open(self, run: Run) -> None:
        """Begin, or go on with what the tool has of this run."""

    @abstractmethod
    def _log(self, number: int, figures: Mapping[str, float]) -> None:
        """The figures of a round, which the tool may have already."""

    @abstractmethod
    def _close(self, run: Run, status: Status) -> None: ...


def figures(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a round's line of metrics.jsonl; those over clients as means."""
    plain = {name: row[name] for name in PLAIN if name != "round"}
    info = {f"info/{name}": value for name, value in row.get("info", {}).items()}
    found = plain | means(dict(row), "/") | info
    return {name: float(value) for name, value in found.items()
            if isinstance(value, int | float) and math.isfinite(value)}


def settings(run: Run) -> dict[str, str]:
    """The settings of a run, by their dotted names."""
    return {name: str(value) for name, value in fields.dotted(run.setup.tables()).items()}


def _known(run: Run, tool: str) -> str | None:
    """By which name a tool knows the run, if it was told of it."""
    path = None if run.directory is None else run.directory / KEPT
    return None if path is None or not path.exists() else json.loads(path.read_text("utf-8")).get(tool)


def _keep(run: Run, tool: str, name: str) -> None:
    if run.directory is not None:
        path = run.directory / KEPT
        kept = json.loads(path.read_text("utf-8")) if path.exists() else {}
        write_atomic(path, json.dumps(kept | {tool: name}).encode())


def _wait_for_a_later_second(place: Path) -> None:
    """Event files are read in the order of their names, which begin with the second in which they were made.
    One that is to hide what earlier ones have must come after them. A clock that was set back by more than
    some seconds is not waited for."""
    stamps = [int(found[1]) for path in place.glob("events.out.tfevents.*")
              if (found := re.match(r"events\.out\.tfevents\.(\d+)\.", path.name))]
    if stamps and 0 < (left := max(stamps) + 1 - time.time()) <= LONGEST_WAIT:
        time.sleep(left)


class TensorBoard(Tracker):
    """Event files in a folder, which `tensorboard --logdir` shows; without one, in that of the run."""

    name = "tensorboard"
    module = "torch.utils.tensorboard"

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self._directory = None if directory is None else Path(directory)

    def started(self, run: Run, measured: list[Timing]) -> None:
        if self._directory is None and run.directory is None:
            raise UsageError('TensorBoard has nowhere to write: give it a folder, TensorBoard("logs"), or '
                             "the run a directory with out=")
        super().started(run, measured)

    def _open(self, run: Run) -> None:
        place = self._directory if self._directory is not None else Path(str(run.directory)) / "tensorboard"
        _wait_for_a_later_second(place)
        # what earlier processes wrote may lack its end: it is hidden, and written again
        self._writer = self._tool.SummaryWriter(str(place), purge_step=1 if run.history else None)
        rows = "\n".join(f"| {name} | {value} |" for name, value in settings(run).items())
        self._writer.add_text("settings", f"| field | value |\n|---|---|\n{rows}", 0)

    def _log(self, number: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, number)
        self._writer.flush()

    def _close(self, run: Run, status: Status) -> None:
        self._writer.close()


class MLflow(Tracker):
    """A run of MLflow, in the store `uri` (such as "sqlite:///mlflow.db"; without one, MLflow's own)."""

    name = "mlflow"
    module = "mlflow"

    def __init__(self, uri: str | None = None, experiment: str | None = None) -> None:
        super().__init__()
        self._uri = uri
        self._experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "descant")

    def _attempt(self, what: Callable[..., None], *arguments: Any) -> None:
        with _environment(PATIENCE):  # MLflow waits for minutes
            super()._attempt(what, *arguments)

    def _open(self, run: Run) -> None:
        client = self._client = self._tool.tracking.MlflowClient(tracking_uri=self._uri)
        self._id = self._found(run) or self._made(run)
        data = client.get_run(self._id).data
        new = [self._tool.entities.Param(name, value[:LONGEST]) for name, value in settings(run).items()
               if name not in data.params]
        for start in range(0, len(new), PARAMETERS):
            client.log_batch(self._id, params=new[start : start + PARAMETERS])
        for name, value in settings(run).items():  # parameters are for ever: what was extended is a tag
            if data.params.get(name, value[:LONGEST]) != value[:LONGEST]:
                client.set_tag(self._id, name, value)
        self._told = {(name, point.step) for name in data.metrics
                      for point in client.get_metric_history(self._id, name)}

    def _found(self, run: Run) -> str | None:
        """The run that was begun before, if this store has it."""
        if (name := _known(run, self.name)) is None:
            return None
        try:
            self._client.update_run(name, status="RUNNING")
        except self._tool.exceptions.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        return name

    def _made(self, run: Run) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        number = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        name: str = self._client.create_run(number, run_name=self._called(run)).info.run_id
        _keep(run, self.name, name)
        return name

    def _log(self, number: int, figures: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        self._client.log_batch(self._id, metrics=[
            self._tool.entities.Metric(name, value, now, number) for name, value in figures.items()
            if (name, number) not in self._told])

    def _close(self, run: Run, status: Status) -> None:
        if run.best_round is not None:
            self._client.set_tag(self._id, "best_round", str(run.best_round))
        for name in ("config.toml", "summary.json", "curve.png"):
            if run.directory is not None and (run.directory / name).exists():
                self._client.log_artifact(self._id, str(run.directory / name))
        self._client.set_terminated(
            self._id, {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}[status])


class WandB(Tracker):
    """A run of Weights & Biases; offline unless `mode` or WANDB_MODE says something else."""

    name = "wandb"
    module = "wandb"

    def __init__(self, project: str | None = None, mode: Literal["offline", "online"] | None = None) -> None:
        super().__init__()
        if mode not in (None, "offline", "online"):
            raise UsageError(f'mode must be "offline" or "online", not {mode!r}')
        self._project = project or os.environ.get("WANDB_PROJECT", "descant")
        self._mode = mode or os.environ.get("WANDB_MODE", "offline")

    def _open(self, run: Run) -> None:
        known = _known(run, self.name)
        self._run = self._tool.init(
            project=self._project, mode=self._mode, name=self._called(run), config=settings(run), id=known,
            dir=None if run.directory is None else str(run.directory), reinit="create_new",
            resume=None if known is None or self._mode == "offline" else "must",
            settings=self._tool.Settings(silent=True, console="off"))
        _keep(run, self.name, self._run.id)

    def _log(self, number: int, figures: Mapping[str, float]) -> None:
        if number >= self._run.starting_step:  # a server has those before; offline, a process writes all
            self._run.log(dict(figures), step=number)

    def _close(self, run: Run, status: Status) -> None:
        if run.best_round is not None:
            self._run.summary["best_round"] = run.best_round
        self._run.finish(exit_code=0 if status == "finished" else 1)


TRACKERS: dict[str, type[TensorBoard] | type[MLflow] | type[WandB]] = {
    cls.name: cls for cls in (TensorBoard, MLflow, WandB)}


def named(names: Sequence[str], warn: Callable[[str], None]) -> list[Tracker]:
    """The trackers of these names, set up by the tools' own environment variables."""
    found: list[Tracker] = []
    for name in dict.fromkeys(names):
        if name not in TRACKERS:
            raise unknown("--track", name, TRACKERS)
        found.append(TRACKERS[name]())
        found[-1].warn = warn
    return found


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """With these variables where the user has set none."""
    mine = {name: value for name, value in values.items() if name not in os.environ}
    os.environ |= mine
    try:
        yield
    finally:
        for name in mine:
            os.environ.pop(name, None)

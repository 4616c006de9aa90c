"""What a run is made of: a method, a task, a federation and settings."""

from __future__ import annotations

import dataclasses
import json
from functools import cached_property
from typing import Any

import numpy as np
import torch

from descant.core.algorithm import Algorithm
from descant.core.federation import Federation
from descant.core.metric import AUROC
from descant.core.privacy.settings import Privacy
from descant.core.task import Task
from descant.engine.attack import Attack
from descant.engine.averaging import averaged
from descant.engine.evaluation import evaluated_clients
from descant.engine.features import on_features
from descant.engine.protect import protected, settled
from descant.engine.robust import Robust
from descant.engine.rounds import Training
from descant.engine.selection import DecidingMetric, deciding, usual
from descant.engine.settings import Eval, Train
from descant.engine.work import Work
from descant.errors import UsageError
from descant.experiment.config import Experiment, dumped


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a run is made of. `origin` are the [data] and [model] sections; a run on Python objects has none
    and can be resumed only from Python. `model` is the [model] section where only the data are objects."""

    algorithm: Algorithm
    task: Task
    federation: Federation
    train: Train
    eval: Eval
    origin: dict[str, Any] | None = None
    model: dict[str, Any] | None = None
    most: float = 1.0  # the largest share of one client in an average, where clients are not trusted
    privacy: Privacy | None = None
    robust: Robust | None = None
    attack: Attack | None = None

    @classmethod
    def of(cls, experiment: Experiment, federation: Federation | None = None) -> Setup:
        """The setup of an experiment, on the federation that its [data] makes unless one is given."""
        federation = (federation or experiment.data.federation()).to(experiment.train.torch_dtype)
        task = experiment.model.task(federation, experiment.train.torch_dtype, experiment.train.seed)
        sections = experiment.dump()
        return cls(experiment.algorithm, task, federation, experiment.train, experiment.eval,
                   {name: sections[name] for name in ("data", "model")}, privacy=experiment.privacy,
                   robust=experiment.robust, attack=experiment.attack)

    def work(self, *, training: bool = False) -> Work:
        """The work of the run. For `training`, behind frozen layers with which the network begins."""
        attack, seed, task = self.attack, self.train.seed, self.task
        federation = self.federation if attack is None else attack.poisoned(self.federation, seed)
        if training:
            task, federation = on_features(task, federation)
        work = Work(self.algorithm, task, federation, seed, self.train.batch, self.train.local,
                    torch.device(self.train.device), self.most, self.eval.metric == AUROC)
        if self.privacy is not None:
            work = protected(work, self.train, self.privacy, secret=self.federation.is_remote)
        if self.train.average is None:
            return work
        first = self.train.rounds - self.train.average + 1
        return dataclasses.replace(work, algorithm=averaged(work.algorithm, first))

    def training(self) -> Training:
        if self.privacy is not None and self.eval.diagnostics:
            raise UsageError("eval.diagnostics are figures of the uploads that [privacy] does not account "
                             "for: leave one of them out")
        training = Training(self.work(training=True), self.train, self.eval.diagnostics)
        training.scored_in(lambda number: self.eval.due(number, self.train.rounds))
        return training.screen(self.robust, self.attack)

    @cached_property
    def deciding(self) -> DecidingMetric:
        """The metric by which the best round is selected."""
        return deciding(self.eval.metric, self.task, self.federation)

    @property
    def is_told(self) -> bool:
        """Whether clients tell the figures of their held-out rows. In a simulation they are there to see."""
        return not (self.federation.is_remote and self.privacy is not None and self.privacy.figures == "off")

    @property
    def evaluated(self) -> list[np.ndarray]:
        """The clients that rounds are evaluated on, honest ones, and the unseen, if there are any."""
        honest = np.setdiff1d(np.arange(self.federation.population), self.attackers)
        seen = evaluated_clients(honest, self.eval, self.train.seed)
        unseen = np.arange(self.federation.population, self.federation.everyone)
        return [seen, unseen] if len(unseen) else [seen]

    @property
    def attackers(self) -> np.ndarray:
        """The clients that attack, in simulation."""
        population = self.federation.population
        return np.zeros(0, np.int64) if self.attack is None else self.attack.attackers(
            population, self.train.seed)

    def about_attacks(self) -> list[str]:
        """What there is to know about attackers, and about what guards against them."""
        federation, train = self.federation, self.train
        cohort = train.cohort_size(federation.population)
        return [*([] if self.attack is None else [self.attack.words(federation, train.seed)]),
                *([] if self.robust is None else [self.robust.described(cohort)])]

    def decided(self) -> Setup:
        """With the deciding metric filled in. An error if the data cannot serve `patience`."""
        if self.train.patience is not None and not self.federation.validation.sizes[self.evaluated[0]].any():
            raise UsageError("train.patience stops by validation figures, and the clients have no validation "
                             "rows: set data.validation above 0, such as 0.2, or leave patience out")
        if self.privacy is not None and self.train.availability is not None:
            raise UsageError("train.availability changes who is sampled, which the account of [privacy] does "
                             "not know: leave one of them out")
        privacy = self.privacy and settled(dataclasses.replace(self, privacy=None).work(), self.train,
                                           self.privacy)
        return dataclasses.replace(self, eval=dataclasses.replace(self.eval, metric=self.deciding.name),
                                   privacy=privacy)

    def tables(self) -> dict[str, Any]:
        """The sections of the run's config.toml."""
        return (self.origin or {}) | dumped(self)

    def identity(self) -> dict[str, Any]:
        """What must not change between the parts of a run. The usual metric is left out,
        since older runs do not name it."""
        tables = self.tables()
        tables["algorithm"]["name"] = self.algorithm.name  # a class may move to another module
        for name in ("metrics", "diagnostics", *(["rows"] if self.eval.rows == "own" else [])):
            tables["eval"].pop(name, None)
        if self.deciding.name == usual(self.task):
            tables["eval"].pop("metric", None)
        tables["train"] = self.train.identity()
        parts = {"config": tables, "federation": self.federation.fingerprint(),
                 "initial model and loss": self.task.fingerprint()}
        return json.loads(json.dumps(parts))  # type: ignore[no-any-return]

"""descant's side: rounds and evaluations through the real engine, in memory."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from benchmarks.speed.case import Case
from benchmarks.speed.side import COMPARED, Played, Scored
from descant.core.tree import map_tree
from descant.core.units import times
from descant.engine.backends.choose import make_backend
from descant.engine.evaluation import evaluate
from descant.engine.rounds import Training


class Engine:
    def __init__(self, case: Case, backend: str) -> None:
        self._training = Training(case.work, case.train(backend))
        self._evaluated = np.arange(case.evaluated)
        # as if everybody had taken part, with the initial state: a newcomer would train when it is scored
        store = self._training.store
        store.stage(self._evaluated,
                    map_tree(lambda t: t.expand(case.evaluated, *t.shape), store.template), 1)
        store.write()
        self._backend, settled, _ = make_backend(self._training)
        facts: list[str] = [settled.backend] if backend == "auto" else []
        facts += [] if settled.workers is None else [times(settled.workers, "worker")]
        facts += [] if settled.chunk is None else [f"chunk {settled.chunk}"]
        self.note = ", ".join(facts)

    def round(self) -> Played:
        start = time.perf_counter()
        report = self._training.play(self._backend)
        self._training.store.write()
        return Played(time.perf_counter() - start, report.grad_steps)

    def evaluate(self) -> Scored:
        start = time.perf_counter()
        found = evaluate(self._training, self._backend, self._evaluated)
        seconds = time.perf_counter() - start
        return Scored(seconds, float(found.personal.test[:, found.metrics.index("accuracy")].mean()))

    def models(self) -> Tensor:
        work, training = self._training.work, self._training
        clients = training.sample()[0][:COMPARED]
        message = work.algorithm.participant(training.server, training.round_of(clients))
        personal = self._backend.run("personalize", clients, training.number, message,
                                     training.store.read(clients)).values
        shared = work.algorithm.global_model(training.server)
        assert shared is not None
        return torch.cat([shared.theta[None], personal.theta])

    def close(self) -> None:
        self._backend.close()

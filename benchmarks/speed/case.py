"""What is timed: a method on a model and a federation, and how much of it one repetition does."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import torch

from descant.algorithms.fedavg import FedAvg
from descant.algorithms.pfedbred import pFedBreD
from descant.algorithms.pfedme import pFedMe
from descant.core.federation import Federation
from descant.core.splits import Table
from descant.data import DataSpec
from descant.engine.batches import LocalWork
from descant.engine.settings import Train
from descant.engine.work import Work
from descant.models import NetworkSpec, make_task
from descant.models.module import ModuleTask
from descant.view.data import list_datasets

METHODS: dict[str, FedAvg | pFedMe | pFedBreD] = {
    "fedavg": FedAvg(), "pfedme": pFedMe(K=5, start="theta"), "mh": pFedBreD(K=5, strategy="mh"),
}
MODELS = ("mclr", "dnn", "cnn2")
CLIENTS, COHORT, BATCH = 100, 20, 20
TRAIN_ROWS, TEST_ROWS = 525, 175  # of a client; together all 70,000 rows of Fashion-MNIST
EPOCH = -(-TRAIN_ROWS // BATCH)  # batches, the last of 5 rows
SEED = 0


@dataclass(frozen=True)
class Case:
    """The same work for every side. `batches` per client and round: as many as an epoch has, or fewer
    where that would take too long; figures are per gradient step anyway."""

    method: str
    model: str | NetworkSpec
    federation: Federation = field(repr=False)
    cohort: int = COHORT
    batches: int = EPOCH
    evaluated: int = CLIENTS  # clients, the first ones; 0: no evaluation is timed
    dtype: Literal["float32", "float64"] = "float32"

    @property
    def algorithm(self) -> FedAvg | pFedMe | pFedBreD:
        return METHODS[self.method]

    @cached_property
    def task(self) -> ModuleTask:
        task = make_task(self.model, self.federation, dtype=self.train("loop").torch_dtype, seed=SEED)
        assert isinstance(task, ModuleTask)
        return task

    @property
    def work(self) -> Work:
        train = self.train("loop")
        return Work(self.algorithm, self.task, self.federation, train.seed, train.batch, train.local)

    def train(self, backend: str) -> Train:
        return Train(cohort=self.cohort, batch=BATCH, local=LocalWork(steps=self.batches), seed=SEED,
                     dtype=self.dtype, backend=backend)  # type: ignore[arg-type]

    @property
    def grads_per_batch(self) -> int:
        """How many gradients the method takes of each batch."""
        if isinstance(self.algorithm, pFedBreD):
            return self.algorithm.K + 1  # mh: one more, at w, for the mean of the prior
        return self.algorithm.K if isinstance(self.algorithm, pFedMe) else 1

    @property
    def widths(self) -> list[int]:
        """The rows of each batch of a client's round."""
        size = int(self.federation.train.sizes[0])
        return [int(width) for width in LocalWork(steps=self.batches).lengths(size, BATCH)]

    @property
    def grad_steps(self) -> int:
        """How many gradients a round takes, over all clients of the cohort."""
        return self.cohort * self.batches * self.grads_per_batch

    @property
    def passes(self) -> int:
        """How many models an evaluation tries on each row: the personal one, and the global one where it
        is another."""
        return 1 if isinstance(self.algorithm, FedAvg) else 2


def fashion_mnist() -> tuple[Federation, bool]:
    """100 clients with two shards of Fashion-MNIST each, and whether they are real: where its files are not
    here, random bytes of the same shape do. Nothing is downloaded for a benchmark."""
    [where] = [entry["where"] for entry in list_datasets() if entry["name"] == "fashion_mnist"]
    if where != "present" and not where.endswith("to be prepared"):
        return random_federation(CLIENTS, TRAIN_ROWS, TEST_ROWS), False
    spec = DataSpec.parse({"dataset": "fashion_mnist", "partition": "shards", "clients": CLIENTS,
                           "test": TEST_ROWS / (TRAIN_ROWS + TEST_ROWS), "validation": 0.0})
    return spec.federation(), True


def random_federation(clients: int, train: int, test: int, shape: tuple[int, ...] = (1, 28, 28)
                      ) -> Federation:
    """Clients of equal size with random images."""
    rows, rng = clients * (train + test), np.random.default_rng(SEED)
    x = torch.from_numpy(rng.integers(0, 256, (rows, *shape), np.uint8))
    y = torch.from_numpy(rng.integers(0, 10, rows))
    own = np.arange(rows).reshape(clients, -1)
    tables = [Table.of(list(own[:, part])) for part in (slice(train), slice(0), slice(train, None))]
    return Federation(x, y, tables[0], tables[1], tables[2], 10, tuple(map(str, range(clients))))

"""What each process of pfl-research does; `with_pfl.py` starts them."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from networks import flat, network
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from session import Session, Work, work_of_this_process

RANK = int(os.environ.get("PFL_WORKER_RANK", "0"))


def simulate() -> None:
    work = work_of_this_process()
    torch.manual_seed(0)
    np.random.seed(0)  # the same on all workers, as pfl asks for
    model = Net(work)
    users = iter([(number, place) for number in range(work.rounds) for place in range(work.cohort)])
    data = FederatedDataset(Rows(work), lambda: next(users))
    central = torch.optim.SGD(model.parameters(), lr=1.0)
    FederatedAveraging().run(
        NNAlgorithmParams(central_num_iterations=work.rounds + 1, evaluation_frequency=10**9,
                          train_cohort_size=work.cohort, val_cohort_size=None),
        SimulatedBackend(training_data=data, val_data=data),
        PyTorchModel(model, torch.optim.SGD, central),
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=work.lr, local_batch_size=work.batch),
        callbacks=[Turns(model)], send_metrics_to_platform=False)


class Net(torch.nn.Module):
    def __init__(self, work: Work) -> None:
        super().__init__()
        self.net = network(work.model, work.initial)
        self.steps = 0

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return torch.nn.functional.cross_entropy(self.net(x), y)

    @torch.no_grad()
    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        return {}


class Rows:
    """A user's rows in the order of a round's batches."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._x, self._y = torch.from_numpy(work.x), torch.from_numpy(work.y)
        self._orders = torch.from_numpy(work.orders)

    def __call__(self, user: tuple[int, int]) -> PyTorchTensorDataset:
        client, order = int(self._work.cohorts[user]), self._orders[user]
        return PyTorchTensorDataset((self._x[client][order], self._y[client][order]), user_id=str(client))


class Turns(TrainingProcessCallback):
    """Lets a round begin when it is asked for. The first process is asked and tells the others, which would
    otherwise begin at once and take time from whoever is timed."""

    def __init__(self, model: Net) -> None:
        self._session = Session("pfl", "torch") if RANK == 0 else None
        self._model = model

    def on_train_begin(self, *, model: Any) -> Metrics:
        self._wait()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
                                ) -> tuple[bool, Metrics]:
        steps = self._sum(self._model.steps)
        if self._session is not None:
            self._session.played(steps)
        return not self._wait(), Metrics()

    def _wait(self) -> bool:
        self._model.steps = 0
        asked = self._session is not None and self._session.begin(
            lambda: flat(list(self._model.parameters())))
        return self._sum(int(asked)) > 0

    @staticmethod
    def _sum(value: int) -> int:
        if not torch.distributed.is_initialized():
            return value
        total = torch.tensor([value])
        torch.distributed.all_reduce(total)
        return int(total)

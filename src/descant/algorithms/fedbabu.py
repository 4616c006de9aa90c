"""FedBABU: the body is trained under a head that never moves; clients fine-tune at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from descant.algorithms.fedper import FedPer
from descant.core.algorithm import ClientData, Message
from descant.core.fields import hyper
from descant.core.task import Task
from descant.core.vector import Model
from descant.priors.solve import solve


@dataclass(frozen=True)
class FedBABU(FedPer):
    """Body aggregation and body update.

    Client, from w:  w_i <- w_i - lr grad_w f_i(w_i, h0)   on each batch of the round, h0 the initial head.
    Server:          w <- (1 - beta) w + beta sum_{i in S} p_i w_i.

    A client, also a newcomer, predicts with (w, h0) after `finetune` steps on its own batches, on all layers.
    """

    name: ClassVar[str] = "fedbabu"
    citation: ClassVar[str] = ("Oh, Kim, Yun: FedBABU: Towards Enhanced Representation for Federated Image "
                               "Classification. ICLR 2022, arXiv:2106.06042")
    trains_to_personalize: ClassVar[bool] = True

    finetune: int = hyper(20, "steps on its own batches, on all layers, before a client predicts", ge=0)

    def personal_steps(self) -> int:
        return self.finetune

    def trained(self, task: Task, model: Model, data: ClientData) -> Model:
        parts = self.split(task)
        return solve(task, model, data, self.solver, only=None if parts is None else parts.shared)

    def personalize(self, task: Task, message: Message, state: Model, data: ClientData) -> Model:
        return solve(task, self.whole(task, message, state), data, self.solver)

    def adapt(self, task: Task, message: Message, data: ClientData) -> Model:
        return self.personalize(task, message, self.init_client(task, task.init()), data)

"""FedAvg: the average of locally trained models, with fine-tuning if asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from descant.core.algorithm import Algorithm, ClientData, Message, Round, Weights, interpolate
from descant.core.fields import hyper
from descant.core.task import Task
from descant.core.vector import Model
from descant.priors.solve import SGD, Solver, solve


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """Federated averaging.

    Client, from w:   w_i <- w_i - lr grad f_i(w_i)   on each batch of the round.
    Server:           w <- (1 - beta) w + beta sum_{i in S} p_i w_i.

    `finetune` makes FedAvg+FT: a client predicts with w after that many steps on its own batches (0:
    with w itself). The fine-tuned model is used, never uploaded.
    `beta` > 1 is aggregation momentum (the AM trick of pFedBreD).
    """

    name: ClassVar[str] = "fedavg"
    citation: ClassVar[str] = (
        "McMahan, Moore, Ramage, Hampson, Agüera y Arcas: Communication-Efficient Learning of Deep "
        "Networks from Decentralized Data. AISTATS 2017, arXiv:1602.05629"
    )

    trains_to_personalize: ClassVar[bool] = True

    solver: Solver = hyper(SGD(lr=0.05), "local optimizer")
    finetune: int = hyper(0, "steps on its own batches before a client predicts (FedAvg+FT)", ge=0)
    beta: float = hyper(1.0, "aggregation step; above 1 it is momentum", gt=0)
    weights: Weights = hyper("samples", "what a client counts in the average")

    def personal_steps(self) -> int:
        return self.finetune

    def init_server(self, task: Task, model: Model, round: Round) -> Model:
        return model

    def broadcast(self, server: Model, round: Round) -> Message:
        return Message(shared=server)

    def local(self, task: Task, message: Message, state: tuple[()], data: ClientData
              ) -> tuple[Model, tuple[()]]:
        return solve(task, message.shared, data, self.solver), ()

    def absorb(self, server: Model, mean: Model, round: Round) -> tuple[Model, dict[str, Any]]:
        return interpolate(server, mean, self.beta), {}

    def personalize(self, task: Task, message: Message, state: tuple[()], data: ClientData) -> Model:
        return self.adapt(task, message, data)

    def adapt(self, task: Task, message: Message, data: ClientData) -> Model:
        return solve(task, message.shared, data, self.solver)

    def global_model(self, server: Model) -> Model:
        return server

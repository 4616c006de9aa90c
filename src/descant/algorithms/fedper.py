"""FedPer: some layers are averaged, the others stay with each client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from descant.core.algorithm import Algorithm, ClientData, Message, Round, Weights, interpolate
from descant.core.fields import hyper
from descant.core.parts import Shared, Split, split
from descant.core.task import Task
from descant.core.vector import Model
from descant.priors.solve import SGD, Solver, finetuned, solve


@dataclass(frozen=True)
class FedPer(Algorithm):
    """A body for all, and a head for each client.

    Client, from (w, v_i):  (w_i, v_i) <- (w_i, v_i) - lr grad f_i(w_i, v_i)   on each batch of the round.
    Server:                 w <- (1 - beta) w + beta sum_{i in S} p_i w_i.

    v_i are the private layers: all but `shared`. They are never sent, and begin alike. A client predicts
    with the server's w and its own v_i. A newcomer fits the private layers to its rows, w held fixed (our
    rule: the paper has none).
    """

    name: ClassVar[str] = "fedper"
    citation: ClassVar[str] = ("Arivazhagan, Aggarwal, Singh, Choudhary: Federated Learning with "
                               "Personalization Layers. 2019, arXiv:1912.00818")

    shared: Shared = hyper("body", "the layers that are averaged; the others are private")
    solver: Solver = hyper(SGD(lr=0.05), "local optimizer")
    beta: float = hyper(1.0, "aggregation step; above 1 it is momentum", gt=0)
    weights: Weights = hyper("samples", "what a client counts in the average")
    finetune: int = hyper(0, "steps on the loss alone before a client predicts (FT: 1)", ge=0)

    def split(self, task: Task) -> Split | None:
        """The shared and the private layers; None: all are shared."""
        return split(task, self.shared, self.name)

    def init_server(self, task: Task, model: Model, round: Round) -> Model:
        parts = self.split(task)
        return model if parts is None else parts.of_shared(model)

    def init_client(self, task: Task, model: Model) -> Model:
        parts = self.split(task)
        return Model(model.theta[:0], model.stats[:0]) if parts is None else parts.of_private(model)

    def broadcast(self, server: Model, round: Round) -> Message:
        return Message(shared=server)

    def whole(self, task: Task, message: Message, own: Model) -> Model:
        """ONE: the server's layers and its own."""
        parts, w = self.split(task), message.shared
        return w if parts is None else parts.whole(w, own)

    def local(self, task: Task, message: Message, state: Model, data: ClientData) -> tuple[Model, Model]:
        parts = self.split(task)
        trained = self.trained(task, self.whole(task, message, state), data)
        return (trained, state) if parts is None else (parts.of_shared(trained), parts.of_private(trained))

    def trained(self, task: Task, model: Model, data: ClientData) -> Model:
        """ONE: its whole model after the work of a round."""
        return solve(task, model, data, self.solver)

    def absorb(self, server: Model, mean: Model, round: Round) -> tuple[Model, dict[str, Any]]:
        return interpolate(server, mean, self.beta), {}

    def personalize(self, task: Task, message: Message, state: Model, data: ClientData) -> Model:
        return finetuned(task, self.whole(task, message, state), data, self.solver, self.finetune)

    def adapt(self, task: Task, message: Message, data: ClientData) -> Model:
        if (parts := self.split(task)) is None:
            return self.personalize(task, message, self.init_client(task, message.shared), data)
        model = self.whole(task, message, self.init_client(task, task.init()))
        fitted = solve(task, model, data, self.solver, only=parts.private)
        return self.personalize(task, message, parts.of_private(fitted), data)

    def global_model(self, server: Model) -> Model | None:
        return server if self.shared == "all" else None

"""FedProx: FedAvg whose clients are held near the server's model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from descant.algorithm import Algorithm, ClientData, Message, Round, Weights, average
from descant.fields import hyper
from descant.prior import Gaussian
from descant.solve import SGD, Solver, solve
from descant.task import Task
from descant.vector import Model


@dataclass(frozen=True)
class FedProx(Algorithm):
    """Federated averaging with a proximal term.

    Client, from w:   w_i ~ argmin f_i(v) + mu/2 ||v - w||^2   by one step on each batch of the round.
    Server:           w <- sum_{i in S} p_i w_i.

    This is the method of Li et al., whose clients restart at w and whose result is one global model;
    the bilevel method with warm-started personal models is one-stage FedProx.
    """

    name: ClassVar[str] = "fedprox"
    citation: ClassVar[str] = (
        "Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous "
        "Networks. MLSys 2020, arXiv:1812.06127"
    )

    mu: float = hyper(0.1, "strength of the pull to the server's model", low=0)
    solver: Solver = hyper(SGD(lr=0.01), "local optimizer")
    weights: Weights = hyper("samples", "what a client counts in the average")

    def init_server(self, task: Task, model: Model, round: Round) -> Model:
        return model

    def broadcast(self, server: Model, round: Round) -> Message:
        return Message(shared=server)

    def local(self, task: Task, message: Message, state: tuple[()], data: ClientData
              ) -> tuple[Model, tuple[()]]:
        w: Model = message.shared
        return solve(task, w, data, self.solver, Gaussian(w.theta, self.mu)), ()

    def aggregate(self, server: Model, uploads: Model, round: Round) -> tuple[Model, dict[str, Any]]:
        return average(uploads, round.weights(self.weights)), {}

    def personalize(self, task: Task, message: Message, state: tuple[()], data: ClientData) -> Model:
        w: Model = message.shared
        return w

    def adapt(self, task: Task, message: Message, data: ClientData) -> Model:
        w: Model = message.shared
        return w

    def global_model(self, server: Model) -> Model:
        return server

"""Ditto: a personal model beside FedAvg, held near its global model."""

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
class Ditto(Algorithm):
    """Fair and robust federated learning through personalization.

    Client, from the received w:
        w_i <- w_i - lr grad f_i(w_i)                      from w_i = w, uploaded;
        v_i <- v_i - lr (grad f_i(v_i) + lam (v_i - w))    persistent, never uploaded.
    Server:  w <- sum_{i in S} p_i w_i.

    Both see the same batches. The client predicts with v_i; a newcomer solves the same problem for
    the local work of one round, starting at w.
    """

    name: ClassVar[str] = "ditto"
    citation: ClassVar[str] = (
        "Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization. "
        "ICML 2021, arXiv:2012.04221"
    )

    lam: float = hyper(1.0, "strength of the pull of the personal to the global model", low=0)
    solver: Solver = hyper(SGD(lr=0.01), "local optimizer of both models")
    weights: Weights = hyper("samples", "what a client counts in the average")

    def init_server(self, task: Task, model: Model, round: Round) -> Model:
        return model

    def init_client(self, task: Task, model: Model) -> Model:
        return model

    def broadcast(self, server: Model, round: Round) -> Message:
        return Message(shared=server)

    def local(self, task: Task, message: Message, state: Model, data: ClientData) -> tuple[Model, Model]:
        w: Model = message.shared
        return solve(task, w, data, self.solver), self._personal(task, state, w, data)

    def aggregate(self, server: Model, uploads: Model, round: Round) -> tuple[Model, dict[str, Any]]:
        return average(uploads, round.weights(self.weights)), {}

    def personalize(self, task: Task, message: Message, state: Model, data: ClientData) -> Model:
        return state

    def adapt(self, task: Task, message: Message, data: ClientData) -> Model:
        return self._personal(task, message.shared, message.shared, data)

    def global_model(self, server: Model) -> Model:
        return server

    def _personal(self, task: Task, v: Model, w: Model, data: ClientData) -> Model:
        return solve(task, v, data, self.solver, Gaussian(w.theta, self.lam))

"""The dichotomous strategy: alone or all together, each client takes what serves it better."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from descant.core.algorithm import (
    Algorithm,
    ClientData,
    Message,
    Round,
    Weights,
    interpolate,
    least_loss,
)
from descant.core.fields import hyper
from descant.core.task import Task
from descant.core.tree import map_tree, pick, stack
from descant.core.vector import Model
from descant.priors.solve import SGD, Solver, solve


class Server(NamedTuple):
    w: Model
    initial: Model  # where a newcomer begins to train alone


@dataclass(frozen=True)
class Dichotomous(Algorithm):
    """A client's own model or the one of all, whichever is better on its validation data.

    Half of each client's training rows (every second one) is for purely local training, the other half for
    the model of all:
        theta_i <- theta_i - lr grad f_i(theta_i)   persistent, on batches of the first half;
        w_i <- w_i - lr grad f_i(w_i)               from w_i = w, on batches of the second half, uploaded.
    Server:  w <- (1 - beta) w + beta sum_{i in S} p_i w_i.
    The client predicts with theta_i if its mean validation loss is lower than w's, else with w.

    The paper compares the two on test data, which is no way to choose: here test data only tells how good
    the choice was. A client without validation rows takes w, because its training loss would nearly always
    speak for theta_i. The model of all is trained by FedAvg, as in the paper's experiments; with one step on
    a full batch in each round that is GlobalTrain. `split = "none"` gives both models all rows (the
    paper's "hypothetical scenario"). A newcomer trains theta_i alone for the local work of one round, from
    the common initial model, and chooses as the others do.
    """

    name: ClassVar[str] = "dichotomous"
    citation: ClassVar[str] = (
        "Chen, Zheng, Long, Su: Minimax Estimation for Personalized Federated Learning: An Alternative "
        "between FedAvg and Local Training? JMLR 2023, arXiv:2103.01901"
    )
    disjoint_batches: ClassVar[bool] = True

    solver: Solver = hyper(SGD(lr=0.05), "local optimizer of both models")
    split: Literal["halves", "none"] = hyper("halves", "whether the two models have separate training rows")
    weights: Weights = hyper("samples", "what a client counts in the average")
    beta: float = hyper(1.0, "aggregation step; above 1 it is momentum", gt=0)

    def batches_per_step(self) -> int:
        return 2 if self.split == "halves" else 1

    def init_server(self, task: Task, model: Model, round: Round) -> Server:
        return Server(model, map_tree(torch.clone, model))

    def init_client(self, task: Task, model: Model) -> Model:
        return model

    def broadcast(self, server: Server, round: Round) -> Message:
        return Message(shared=server.w)

    def local(self, task: Task, message: Message, state: Model, data: ClientData) -> tuple[Model, Model]:
        own = solve(task, state, data, self.solver)
        pooled = solve(task, message.shared, data, self.solver, which=-1)
        return pooled, own

    def absorb(self, server: Server, mean: Model, round: Round) -> tuple[Server, dict[str, Any]]:
        return server._replace(w=interpolate(server.w, mean, self.beta)), {}

    def personalize(self, task: Task, message: Message, state: Model, data: ClientData) -> Model:
        return better(task, state, message.shared, data)

    def newcomer(self, server: Server, round: Round) -> Message:
        return Message(shared=server)

    def adapt(self, task: Task, message: Message, data: ClientData) -> Model:
        w, initial = message.shared
        return better(task, solve(task, initial, data, self.solver), w, data)

    def global_model(self, server: Server) -> Model:
        return server.w


def better(task: Task, own: Model, shared: Model, data: ClientData) -> Model:
    """The model of ONE client with the lower validation loss: `shared` if there is no telling."""
    both = stack([shared, own])
    chosen: Model = pick(both, least_loss(task, both, data, "validation"))
    return chosen

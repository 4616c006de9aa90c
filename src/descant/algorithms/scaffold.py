"""SCAFFOLD: control variates against client drift."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from descant.core.algorithm import Algorithm, ClientData, LocalStep, Message, Round
from descant.core.fields import hyper
from descant.core.ranges import Step
from descant.core.task import Task
from descant.core.vector import Model
from descant.priors.belief import Tracked
from descant.priors.quadratic import Quadratic
from descant.priors.solve import SGD, decayed, solve


class Server(NamedTuple):
    x: Model
    c: Tensor  # [d] the mean of the clients' c_i over the population


class Upload(NamedTuple):
    dx: Tensor  # [d] y - x
    stats: Tensor  # [s]
    dc: Tensor  # [d] c_i(new) - c_i(old)


@dataclass(frozen=True)
class SCAFFOLD(Algorithm):
    """Stochastic controlled averaging.

    Client, from y = x, for each of its K batches:
        y <- y - eta_l (grad f_i(y) - c_i + c);
        c_i+ = c_i - c + (x - y) / (K eta_l)    (option II), or grad f_i(x) over all its data (option I).
    Server:  x <- x + eta_g mean_{i in S}(y_i - x),   c <- c + |S|/N mean_{i in S}(c_i+ - c_i).

    c stays the mean of all c_i exactly, because a client's c_i moves only when its upload counts.
    """

    name: ClassVar[str] = "scaffold"
    citation: ClassVar[str] = (
        "Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for "
        "Federated Learning. ICML 2020, arXiv:1910.06378"
    )
    tracking: ClassVar[bool] = True

    eta_l: float = hyper(0.05, "local step size", gt=0, search=Step(0.001, 1.0))
    eta_g: float = hyper(1.0, "server step size", gt=0)
    option: Literal["I", "II"] = hyper("II", "how c_i is renewed: full gradient at x, or from the path")
    weight_decay: float = hyper(0.0, "strength of the pull to zero", ge=0)

    def local_step(self) -> LocalStep:
        return LocalStep("eta_l")

    def init_server(self, task: Task, model: Model, round: Round) -> Server:
        return Server(model, torch.zeros_like(model.theta))

    def init_client(self, task: Task, model: Model) -> Tensor:
        return torch.zeros_like(model.theta)

    def broadcast(self, server: Server, round: Round) -> Message:
        return Message(shared=server)

    def local(self, task: Task, message: Message, state: Tensor, data: ClientData) -> tuple[Upload, Tensor]:
        x, c = message.shared
        c_i, correction = state, c - state
        solver = SGD(lr=self.eta_l, weight_decay=self.weight_decay)
        y = solve(task, x, data, solver, Quadratic(correction))
        if self.option == "I":
            gradient = data.mean(lambda batch: task.grad(x, batch).theta)
            c_new = decayed(gradient, x.theta, self.weight_decay)
        else:
            c_new = (x.theta - y.theta) / (data.steps * self.eta_l) - correction
        return Upload(y.theta - x.theta, y.stats, c_new - c_i), c_new

    def absorb(self, server: Server, mean: Upload, round: Round) -> tuple[Server, dict[str, Any]]:
        x = Model(server.x.theta + self.eta_g * mean.dx, mean.stats)
        return Server(x, Tracked()(server.c, mean.dc, round)), {}

    def personalize(self, task: Task, message: Message, state: Tensor, data: ClientData) -> Model:
        return self.adapt(task, message, data)

    def adapt(self, task: Task, message: Message, data: ClientData) -> Model:
        x: Model = message.shared.x
        return x

    def global_model(self, server: Server) -> Model:
        return server.x

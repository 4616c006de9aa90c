"""GlobalTrain: one model that minimises everyone's loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from descant.core.algorithm import Algorithm, ClientData, LocalStep, Message, Round, Weights
from descant.core.fields import hyper
from descant.core.ranges import Step
from descant.core.task import Batch, Task
from descant.core.tree import Tree
from descant.core.vector import Model
from descant.priors.quadratic import Flat
from descant.priors.solve import SGD


class Server(NamedTuple):
    w: Model
    direction: Tree  # [d] the momentum, where there is one


class Sum(NamedTuple):
    """What a client gathers over its batches."""

    gradient: Tensor  # [d] the sum over samples
    stats: Tensor  # [s]
    samples: Tensor  # []


@dataclass(frozen=True)
class GlobalTrain(Algorithm):
    """One model for all, by gradient steps on the pooled loss: the other end of what lambda spans.

    Client:  g_i = the mean over the samples of the round's batches of grad f_i(w), all at the same w.
    Server:  v <- momentum v + sum_{i in S} p_i g_i + weight_decay w,   w <- w - lr v.

    Objective (2) of the analysis of one-stage FedProx, min sum_i p_i L_i(w). Its experiments run FedAvg for
    it, which with several local steps ends elsewhere: here the gradient is exact with everyone in the round
    and full batches, or whole epochs of batches of any size, and w comes to the pooled minimiser. A round is
    one step, so that more than one pass over the rows of a client only costs time.
    """

    name: ClassVar[str] = "globaltrain"
    citation: ClassVar[str] = (
        "pooled empirical risk minimisation, by the FedSGD of McMahan, Moore, Ramage, Hampson, "
        "Agüera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized Data. "
        "AISTATS 2017, arXiv:1602.05629"
    )

    lr: float = hyper(0.1, "step size of the server", gt=0, search=Step(0.01, 10.0))
    momentum: float = hyper(0.9, "share of the last direction that is kept", ge=0, lt=1)
    weight_decay: float = hyper(0.0, "strength of the pull to zero", ge=0)
    weights: Weights = hyper("samples", "what a client counts in the average")

    def local_step(self) -> LocalStep:
        return LocalStep("lr")

    @property
    def solver(self) -> SGD:
        return SGD(self.lr, self.momentum, self.weight_decay)

    def init_server(self, task: Task, model: Model, round: Round) -> Server:
        return Server(model, self.solver.init(model.theta))

    def broadcast(self, server: Server, round: Round) -> Message:
        return Message(shared=server.w)

    def local(self, task: Task, message: Message, state: tuple[()], data: ClientData
              ) -> tuple[Model, tuple[()]]:
        w: Model = message.shared

        def add(total: Sum, batch: Batch) -> Sum:
            gradient = task.grad(Model(w.theta, total.stats), batch)
            n = len(batch.y) if batch.weight is None else batch.weight.sum()
            return Sum(total.gradient + n * gradient.theta, gradient.stats, total.samples + n)

        total = data.scan(add, Sum(torch.zeros_like(w.theta), w.stats, torch.zeros((), dtype=w.theta.dtype)))
        return Model(total.gradient / total.samples, total.stats), ()

    def absorb(self, server: Server, mean: Model, round: Round) -> tuple[Server, dict[str, Any]]:
        theta, direction = self.solver.step(server.w.theta, mean.theta, Flat(), server.direction)
        return Server(Model(theta, mean.stats), direction), {}

    def personalize(self, task: Task, message: Message, state: tuple[()], data: ClientData) -> Model:
        return self.adapt(task, message, data)

    def adapt(self, task: Task, message: Message, data: ClientData) -> Model:
        w: Model = message.shared
        return w

    def global_model(self, server: Server) -> Model:
        return server.w

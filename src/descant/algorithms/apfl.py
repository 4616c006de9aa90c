"""APFL: every client mixes a model of its own with the one of all."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from descant.core.algorithm import Algorithm, ClientData, Message, Round, Weights, interpolate
from descant.core.fields import hyper
from descant.core.ranges import Linear
from descant.core.task import Batch, Task
from descant.core.tree import Tree, map_tree
from descant.core.vector import Model
from descant.priors.quadratic import Flat
from descant.priors.solve import SGD, Solver, decayed, require_ridge


class Own(NamedTuple):
    v: Model
    alpha: Tensor  # [] share of v in the mixture


class Carry(NamedTuple):
    w: Model
    own: Own
    memory: Tree  # of the solver, for w and for v


@dataclass(frozen=True)
class APFL(Algorithm):
    """Adaptive personalized federated learning: the mixture  m_i = alpha_i v_i + (1 - alpha_i) w_i  predicts.

    Client, from w_i = w and its last v_i, on each batch:
        w_i <- w_i - lr grad f_i(w_i)                        uploaded;
        v_i <- v_i - lr alpha_i grad f_i(m_i)                kept, never uploaded; the gradient in v_i;
        alpha_i <- alpha_i - lr <v_i - w_i, grad f_i(m_i)>   if `adaptive`, on the first batch of a round,
                                                             cut to [0, 1]; the gradient in alpha_i.
    Server:  w <- (1 - beta) w + beta sum_{i in S} p_i w_i.

    A client predicts with its mixture of v_i and the server's w. alpha = 0 is FedAvg, alpha = 1 LocalTrain.
    Traps: the gradient is that at the mixture. Public code takes it at v_i alone, which is local training, or
    mixes the gradients at v_i and at w_i, which is no gradient of f_i(m_i). v_i moves with alpha_i lr: with a
    small alpha it needs many rounds. The paper averages with equal weights: weights = "uniform".
    The paper has no rule for newcomers. Ours: the work of one round with v_i = w to begin with.
    """

    name: ClassVar[str] = "apfl"
    citation: ClassVar[str] = (
        "Deng, Kamani, Mahdavi: Adaptive Personalized Federated Learning. arXiv:2003.13461, 2020")

    alpha: float = hyper(0.5, "share of v_i in the mixture; the first one, if adaptive", ge=0, le=1,
                         search=Linear(0.1, 0.9))
    adaptive: bool = hyper(False, "whether each client learns its alpha_i")
    solver: Solver = hyper(SGD(lr=0.05), "local optimizer of both models")
    beta: float = hyper(1.0, "aggregation step; above 1 it is momentum", gt=0)
    weights: Weights = hyper("samples", "what a client counts in the average")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_ridge(self.solver, self.name)

    def cautions(self) -> list[str]:
        if self.adaptive and self.alpha == 0:
            return ["alpha = 0 with adaptive = true: v_i does not learn before alpha_i leaves 0; begin with "
                    "0.5, or with 0.01"]
        return []

    def init_server(self, task: Task, model: Model, round: Round) -> Model:
        return model

    def init_client(self, task: Task, model: Model) -> Own:
        return Own(model, torch.tensor(self.alpha, dtype=model.theta.dtype))

    def broadcast(self, server: Model, round: Round) -> Message:
        return Message(shared=server)

    def local(self, task: Task, message: Message, state: Own, data: ClientData) -> tuple[Model, Own]:
        solver, w = self.solver, message.shared
        alone = dataclasses.replace(solver, weight_decay=0.0)  # of v: the ridge is on the mixture

        def step(carry: Carry, batch: Batch) -> Carry:
            w, (v, alpha), (of_w, of_v) = carry
            mixed = mixture(v, w, alpha)
            at_w, at_m = task.grad(w, batch), task.grad(mixed, batch)
            slope = decayed(at_m.theta, mixed.theta, solver.weight_decay)
            w_theta, of_w = solver.step(w.theta, at_w.theta, Flat(), of_w)
            v_theta, of_v = alone.step(v.theta, alpha * slope, Flat(), of_v)
            if self.adaptive and next(number) == 0:  # a scan begins with the first batch of every client
                alpha = (alpha - solver.rate * ((v.theta - w.theta) * slope).sum()).clamp(0.0, 1.0)
            return Carry(Model(w_theta, at_w.stats), Own(Model(v_theta, at_m.stats), alpha), (of_w, of_v))

        number = itertools.count()
        done: Carry = data.scan(step, Carry(w, state, (solver.init(w.theta), alone.init(state.v.theta))))
        return done.w, done.own

    def absorb(self, server: Model, mean: Model, round: Round) -> tuple[Model, dict[str, Any]]:
        return interpolate(server, mean, self.beta), {}

    def personalize(self, task: Task, message: Message, state: Own, data: ClientData) -> Model:
        return mixture(state.v, message.shared, state.alpha)

    def adapt(self, task: Task, message: Message, data: ClientData) -> Model:
        own = self.local(task, message, self.init_client(task, message.shared), data)[1]
        return mixture(own.v, message.shared, own.alpha)

    def global_model(self, server: Model) -> Model:
        return server


def mixture(v: Model, w: Model, alpha: Tensor) -> Model:
    """alpha v + (1 - alpha) w: parameters and statistics alike."""
    mixed: Model = map_tree(lambda own, common: torch.lerp(common, own, alpha), v, w)
    return mixed

"""Per-FedAvg: a model from which one gradient step leads every client to a good one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from descant.core.algorithm import (
    Algorithm,
    ClientData,
    LocalStep,
    Message,
    Round,
    Weights,
    interpolate,
)
from descant.core.fields import hyper
from descant.core.ranges import Step
from descant.core.task import Batch, Gradient, Task
from descant.core.vector import Model
from descant.priors.solve import SGD, decayed, solve


@dataclass(frozen=True)
class PerFedAvg(Algorithm):
    """Model-agnostic meta-learning: the server minimises  F(w) = sum_i p_i f_i(w - alpha grad f_i(w)).

    Client, from w_i = w, with independent batches D, D' and D'' in each step:
        u = w_i - alpha grad f_i(w_i; D),   g = grad f_i(u; D');
        fo:  w_i <- w_i - beta g                               (first order: as if the Hessian were zero);
        hf:  w_i <- w_i - beta (g - alpha h),                  (Hessian-free)
             h = (grad f_i(w_i + delta g; D'') - grad f_i(w_i - delta g; D'')) / (2 delta) ~ hess f_i(w_i) g.
    Server:  w <- (1 - server_lr) w + server_lr sum_{i in S} p_i w_i.

    A client predicts with w after `finetune` steps of size alpha on batches of its own TRAINING rows, and so
    does a newcomer; nothing is adapted on test rows. w itself is not meant to predict well.
    Traps: fo rests where sum_i p_i grad f_i(u_i) = 0, which is not a minimum of F unless the Hessians agree.
    A step takes two gradients (fo) or four (hf), and as many batches as it names; with full batches these are
    all the same rows. alpha beyond 1 / L makes I - alpha hess f_i change its sign, beyond 2 / L, u diverge.
    hf looks as far as delta ||g||: with unscaled inputs, and so large gradients, 0.001 is too far.
    Public code has alpha from 0.005 to 0.03 and beta from 0.001 to 0.003, for hundreds of rounds.
    """

    name: ClassVar[str] = "perfedavg"
    citation: ClassVar[str] = (
        "Fallah, Mokhtari, Ozdaglar: Personalized Federated Learning with Theoretical Guarantees: A "
        "Model-Agnostic Meta-Learning Approach. NeurIPS 2020, arXiv:2002.07948"
    )
    trains_to_personalize: ClassVar[bool] = True

    variant: Literal["fo", "hf"] = hyper("hf", "first order, or Hessian-free second order")
    alpha: float = hyper(0.05, "step size with which a client adapts", gt=0, search=Step(0.001, 1.0))
    beta: float = hyper(0.05, "step size of w", gt=0, search=Step(0.001, 1.0))
    delta: float = hyper(0.001, "how far hf looks along g to either side", gt=0)
    finetune: int = hyper(1, "steps of size alpha before a client predicts", ge=0)
    server_lr: float = hyper(1.0, "aggregation step; above 1 it is momentum", gt=0)
    weights: Weights = hyper("uniform", "what a client counts in the average")
    weight_decay: float = hyper(0.0, "strength of the pull to zero, as part of f_i", ge=0)

    def personal_steps(self) -> int:
        return self.finetune

    def batches_per_step(self) -> int:
        return 3 if self.variant == "hf" else 2

    def local_step(self) -> LocalStep:
        return LocalStep("alpha" if self.alpha > self.beta else "beta")

    def cautions(self) -> list[str]:
        if self.variant == "hf" and self.delta < 1e-6:  # 1e-7: half of it, or all, on the digits
            return [f"delta = {self.delta:g}: in float32 the difference of gradients so close to each other "
                    "is mostly rounding; use 1e-5 or more"]
        return []

    def init_server(self, task: Task, model: Model, round: Round) -> Model:
        return model

    def broadcast(self, server: Model, round: Round) -> Message:
        return Message(shared=server)

    def local(self, task: Task, message: Message, state: tuple[()], data: ClientData
              ) -> tuple[Model, tuple[()]]:
        def step(w: Model, *batches: Batch) -> Model:
            here = self._grad(task, w, batches[0])
            u = Model(torch.sub(w.theta, here.theta, alpha=self.alpha), here.stats)
            there = self._grad(task, u, batches[1])
            g = there.theta
            if self.variant == "hf":
                difference = self._difference(task, w, batches[2], g)
                g = torch.sub(g, difference, alpha=self.alpha / (2 * self.delta))
            # the statistics are those of the adapted model, which is the one that predicts
            return Model(torch.sub(w.theta, g, alpha=self.beta), there.stats)

        return data.scan(step, message.shared), ()

    def _grad(self, task: Task, w: Model, batch: Batch) -> Gradient:
        found = task.grad(w, batch)
        return found._replace(theta=decayed(found.theta, w.theta, self.weight_decay))

    def _difference(self, task: Task, w: Model, batch: Batch, g: Tensor) -> Tensor:
        """2 delta hess f_i(w) g, on the same rows and random numbers to either side."""
        ahead, behind = (self._grad(task, w._replace(theta=torch.add(w.theta, g, alpha=step)), batch).theta
                         for step in (self.delta, -self.delta))
        return ahead - behind

    def absorb(self, server: Model, mean: Model, round: Round) -> tuple[Model, dict[str, Any]]:
        return interpolate(server, mean, self.server_lr), {}

    def personalize(self, task: Task, message: Message, state: tuple[()], data: ClientData) -> Model:
        return self.adapt(task, message, data)

    def adapt(self, task: Task, message: Message, data: ClientData) -> Model:
        return solve(task, message.shared, data, SGD(lr=self.alpha, weight_decay=self.weight_decay))

    def global_model(self, server: Model) -> Model:
        return server

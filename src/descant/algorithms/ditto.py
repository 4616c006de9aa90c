"""Ditto: a personal model beside FedAvg, held near its global model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from descant.core.algorithm import ClientData, LocalStep, Message, Weights
from descant.core.fields import hyper
from descant.core.parts import Shared
from descant.core.ranges import Log
from descant.core.task import Task
from descant.core.vector import Model
from descant.priors.belief import Belief, PriorMethod, Upload
from descant.priors.gaussian import Average, Counted, GaussianBelief
from descant.priors.grouping import KMeans, grouped
from descant.priors.precision import Lam, as_rule, strongest, unstable
from descant.priors.solve import SGD, Solver, finetuned, solve, step_size


@dataclass(frozen=True)
class Ditto(PriorMethod):
    """Fair and robust federated learning through personalization.

    Client, from the received w:
        w_i <- w_i - lr grad f_i(w_i)                      from w_i = w, uploaded;
        v_i <- v_i - lr (grad f_i(v_i) + lam (v_i - w))    persistent, never uploaded.
    Server:  w <- (1 - beta) w + beta sum_{i in S} p_i w_i.

    Both see the same batches. The client predicts with v_i; a newcomer solves the same problem for
    the local work of one round, starting at w.
    """

    name: ClassVar[str] = "ditto"
    citation: ClassVar[str] = (
        "Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization. "
        "ICML 2021, arXiv:2012.04221"
    )

    lam: Lam = hyper(1.0, "strength of the pull of the personal to the global model", ge=0,
                     search=Log(0.01, 10.0))
    solver: Solver = hyper(SGD(lr=0.05), "local optimizer of both models")
    beta: float = hyper(1.0, "aggregation step; above 1 it is momentum", gt=0)
    weights: Weights = hyper("samples", "what a client counts in the average")
    groups: KMeans | None = hyper(None, "a server model for each cluster of clients; absent: one for all")
    shared: Shared = hyper("all", "the layers of which there is a global model; the others are private")
    finetune: int = hyper(0, "steps on the loss alone before a client predicts (FT: 1)", ge=0)

    def local_step(self) -> LocalStep:
        return LocalStep("solver.lr", strongest(self.lam))

    def cautions(self) -> list[str]:
        return unstable("solver.lr", step_size(self.solver), self.lam, "lam")

    @property
    def belief(self) -> Belief:
        prior = GaussianBelief(as_rule(self.lam), Average(self.beta), Counted(self.weights))
        return grouped(prior, self.groups, self.name)

    def local(self, task: Task, message: Message, state: Model, data: ClientData) -> tuple[Upload, Model]:
        received = self.received(task, message, state)
        w_i = solve(task, received.centre, data, self.solver)
        v_i = solve(task, state, data, self.solver, received.prior)
        return received.tell(w_i, v_i), v_i

    def personalize(self, task: Task, message: Message, state: Model, data: ClientData) -> Model:
        return finetuned(task, state, data, self.solver, self.finetune)

    def adapt(self, task: Task, message: Message, data: ClientData) -> Model:
        received = self.joining(task, message, data)
        v_i = solve(task, received.centre, data, self.solver, received.prior)
        return self.personalize(task, message, v_i, data)

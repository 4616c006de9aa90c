"""FedProx: FedAvg whose clients are held near the server's model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from descant.core.algorithm import ClientData, LocalStep, Message, Weights
from descant.core.fields import hyper
from descant.core.ranges import Log
from descant.core.task import Task
from descant.core.vector import Model
from descant.priors.belief import Belief, PriorMethod, Upload
from descant.priors.gaussian import Average, Counted, GaussianBelief
from descant.priors.grouping import KMeans, grouped
from descant.priors.precision import Lam, as_rule, strongest, unstable
from descant.priors.solve import SGD, Solver, finetuned, solve, step_size


@dataclass(frozen=True)
class FedProx(PriorMethod):
    """Federated averaging with a proximal term.

    Client, from w:   w_i ~ argmin f_i(v) + mu/2 ||v - w||^2   by one step on each batch of the round.
    Server:           w <- (1 - beta) w + beta sum_{i in S} p_i w_i.

    This is the method of Li et al., whose clients restart at w and whose result is one global model;
    the bilevel method with warm-started personal models is one-stage FedProx.
    """

    name: ClassVar[str] = "fedprox"
    citation: ClassVar[str] = (
        "Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous "
        "Networks. MLSys 2020, arXiv:1812.06127"
    )

    mu: Lam = hyper(0.1, "strength of the pull to the server's model", ge=0, search=Log(0.001, 10.0))
    solver: Solver = hyper(SGD(lr=0.05), "local optimizer")
    beta: float = hyper(1.0, "aggregation step; above 1 it is momentum", gt=0)
    weights: Weights = hyper("samples", "what a client counts in the average")
    groups: KMeans | None = hyper(None, "a server model for each cluster of clients; absent: one for all")
    finetune: int = hyper(0, "steps on the loss alone before a client predicts (FT: 1)", ge=0)

    def local_step(self) -> LocalStep:
        return LocalStep("solver.lr", strongest(self.mu))

    def cautions(self) -> list[str]:
        return unstable("solver.lr", step_size(self.solver), self.mu, "mu")

    @property
    def belief(self) -> Belief:
        prior = GaussianBelief(as_rule(self.mu), Average(self.beta), Counted(self.weights))
        return grouped(prior, self.groups, self.name)

    def init_client(self, task: Task, model: Model) -> tuple[()]:
        return ()

    def local(self, task: Task, message: Message, state: tuple[()], data: ClientData
              ) -> tuple[Upload, tuple[()]]:
        w_i = solve(task, self.belief.centre(message), data, self.solver, self.belief.prior(message))
        return self.belief.tell(message, w_i, w_i), ()

    def personalize(self, task: Task, message: Message, state: tuple[()], data: ClientData) -> Model:
        return finetuned(task, self.belief.centre(message), data, self.solver, self.finetune)

    def adapt(self, task: Task, message: Message, data: ClientData) -> Model:
        return self.personalize(task, self.belief.chosen(task, message, data), (), data)

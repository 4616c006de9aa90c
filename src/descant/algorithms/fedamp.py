"""FedAMP: attentive message passing between clients with similar models."""

from dataclasses import dataclass
from typing import Any, ClassVar

from descant.core.algorithm import Algorithm, ClientData, Message, Round
from descant.core.fields import hyper
from descant.core.ranges import Log
from descant.core.task import Task
from descant.core.tree import Tree, map_tree, stack
from descant.core.vector import Model
from descant.priors.quadratic import Gaussian
from descant.priors.solve import SGD, Solver, solve


@dataclass(frozen=True)
class FedAMP(Algorithm):
    """Every client is drawn to a mean of all clients' last models, in which similar ones count more.

    Server:  u_i = sum_j xi_ij w_j,   xi_ij = alpha exp(-||w_i - w_j||^2 / sigma) / sigma,   xi_ii = 1 - sum.
    Client:  w_i ~ argmin f_i(w) + lam/2 ||w - u_i||^2   by one step on each batch, from u_i; uploaded.
    """

    name: ClassVar[str] = "fedamp"
    citation: ClassVar[str] = ("Huang, Chu, Zhou, Wang, Liu, Pei, Zhang: Personalized Cross-Silo Federated "
                               "Learning on Non-IID Data. AAAI 2021, arXiv:2007.03797")
    alpha: float = hyper(0.1, "weight of the others; above sigma / (m - 1), xi_ii may be negative", gt=0)
    sigma: float = hyper(10.0, "squared distance at which attention fades", gt=0, search=Log(0.1, 1000.0))
    lam: float = hyper(1.0, "strength of the pull of w_i to u_i", ge=0, search=Log(0.01, 10.0))
    solver: Solver = hyper(SGD(lr=0.05), "local optimizer")

    def init_server(self, task: Task, model: Model, round: Round) -> Tree:
        return stack([model] * round.population)  # the last w_j of all clients

    def init_client(self, task: Task, model: Model) -> Model:
        return model

    def broadcast(self, server: Model, round: Round) -> Message:
        def mean(i: int) -> Tree:  # one after the other: to the last bit the same in any cohort
            squares = (server.theta - server.theta[i]).square().sum(1)
            xi = self.alpha / self.sigma * (-squares / self.sigma).exp()
            xi[i] += 1 - xi.sum()
            return map_tree(lambda w: xi @ w, server)
        return Message(each=stack([mean(i) for i in round.cohort.tolist()]))

    def local(self, task: Task, message: Message, state: Model, data: ClientData) -> tuple[Model, Model]:
        w_i = solve(task, message.each, data, self.solver, Gaussian(message.each.theta, self.lam))
        return w_i, w_i

    def aggregate(self, server: Model, uploads: Model, round: Round) -> tuple[Tree, dict[str, Any]]:
        return map_tree(lambda old, new: old.index_copy(0, round.cohort, new), server, uploads), {}

    def personalize(self, task: Task, message: Message, state: Model, data: ClientData) -> Model:
        return state

    def newcomer(self, server: Model, round: Round) -> Message:
        return Message(map_tree(lambda models: models.mean(0), server))  # whom it resembles nobody knows

    def adapt(self, task: Task, message: Message, data: ClientData) -> Model:
        return self.local(task, Message(each=message.shared), message.shared, data)[0]

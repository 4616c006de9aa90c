"""FedFomo: every client takes from the others what lowers its loss on its own validation rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from descant.core.algorithm import Algorithm, ClientData, Message, Round, mean_losses, renewed
from descant.core.fields import hyper
from descant.core.kernels.products import taken_rows
from descant.core.ranges import Linear
from descant.core.task import Task
from descant.core.tree import map_tree, repeat, take
from descant.core.vector import Model
from descant.priors.solve import SGD, Solver, solve


class Server(NamedTuple):
    theta: Model  # [m, ...] the last model of each client
    P: Tensor  # [m, m] what j's models have been worth to i


class Upload(NamedTuple):
    model: Model
    w: Tensor  # [M] what the models that it was sent were worth to it


@dataclass(frozen=True)
class FedFomo(Algorithm):
    """First-order model optimization: steps towards the models of others that a client finds useful.

    Client i, with its last theta_i and the M models theta_j that it is sent, L_i on its validation rows:
        w_j = max(0, (L_i(theta_i) - L_i(theta_j)) / ||theta_j - theta_i||), normalised to sum 1 (or all 0);
        theta_i <- theta_i + sum_j w_j (theta_j - theta_i);
        theta_i <- theta_i - lr grad f_i(theta_i)   on each batch of the round; uploaded, with w.
    Server:  P_ij <- P_ij + w_j. Of the M places each has with probability eps_t = eps (1 - decay)^(t - 1) a
        client at random, and otherwise the next of largest P_ij.

    The client predicts with theta_i. A newcomer (the paper has no rule) begins at the mean of all models, is
    sent the M that were worth most to others, and does the work of a round. M above the number of others is
    all of them.

    Traps: a client without validation rows has no w and stays alone; without any in the federation the
    method is refused. Validation figures, and what is chosen by them, are of rows that made the models.
    A message holds M models for each client.
    """

    name: ClassVar[str] = "fedfomo"
    citation: ClassVar[str] = ("Zhang, Sapra, Fidler, Yeung, Alvarez: Personalized Federated Learning with "
                               "First Order Model Optimization. ICLR 2021, arXiv:2012.08565")
    needs_validation: ClassVar[bool] = True

    M: int = hyper(5, "models that a client is sent", ge=1)
    eps: float = hyper(0.3, "share of the places that is for exploring, in the first round", ge=0, le=1,
                       search=Linear(0.0, 1.0))
    decay: float = hyper(0.05, "by which share eps falls in a round", ge=0, le=1)
    solver: Solver = hyper(SGD(lr=0.05), "local optimizer")

    def init_server(self, task: Task, model: Model, round: Round) -> Server:
        m = round.population
        return Server(map_tree(torch.clone, repeat(model, m)), model.theta.new_zeros((m, m)))

    def init_client(self, task: Task, model: Model) -> Model:
        return model

    def places(self, P: Tensor, round: Round) -> Tensor:
        """Whose models each client is sent: int64 [cohort, M]. Drawn for the whole population: who else is in
        the cohort makes no difference, and `aggregate` finds the same again."""
        m, generator, own = round.population, round.generator("places"), round.cohort[:, None]
        M = min(self.M, m - 1)
        chance = torch.from_numpy(generator.random((m, m)))[round.cohort].scatter(1, own, -1.0)
        eps = self.eps * (1 - self.decay) ** max(0, round.number - 1)
        greedy = M - torch.from_numpy(generator.binomial(M, eps, m))[round.cohort, None]
        # clients that were worth as much come in the order of chance
        best = (P[round.cohort].double() + 1e-9 * chance).scatter(1, own, -1.0).topk(M).indices
        first = torch.where(torch.arange(M) < greedy, 1.0 + torch.arange(M, 0, -1), chance.gather(1, best))
        return chance.scatter(1, best, first).topk(M).indices

    def broadcast(self, server: Server, round: Round) -> Message:
        places = self.places(server.P, round)
        return Message(each=map_tree(lambda rows: taken_rows(rows, places), server.theta))

    def local(self, task: Task, message: Message, state: Model, data: ClientData) -> tuple[Upload, Model]:
        w = worth(task, state, message.each, data)
        start: Model = map_tree(lambda own, others: own + (w[:, None] * (others - own)).sum(0), state,
                                message.each)
        theta = solve(task, start, data, self.solver)
        return Upload(theta, w), theta

    def aggregate(self, server: Server, uploads: Upload, round: Round) -> tuple[Server, dict[str, Any]]:
        theta = renewed(server.theta, uploads.model, round)
        sent = (round.cohort[:, None], self.places(server.P, round))
        P = server.P.index_put(sent, uploads.w, accumulate=True)
        return Server(theta, P), {"alone": (uploads.w.sum(1) == 0).double().mean()}

    def personalize(self, task: Task, message: Message, state: Model, data: ClientData) -> Model:
        return state

    def participant(self, server: Server, round: Round) -> Message:
        return Message()

    def newcomer(self, server: Server, round: Round) -> Message:
        most = server.P.sum(0).topk(min(self.M, round.population - 1)).indices
        return Message((map_tree(lambda rows: rows.mean(0), server.theta), take(server.theta, most)))

    def adapt(self, task: Task, message: Message, data: ClientData) -> Model:
        mean, models = message.shared
        return self.local(task, Message(each=models), mean, data)[1]


def worth(task: Task, own: Model, others: Model, data: ClientData) -> Tensor:
    """w of ONE client for the models of others [M, ...]."""
    both = map_tree(lambda one, more: torch.cat([one[None], more]), own, others)
    L = mean_losses(task, both, data, "validation")
    distance = torch.linalg.vector_norm(others.theta - own.theta, dim=1)
    w = torch.where(distance > 0, (L[0] - L[1:]) / distance, 0.0)
    w = w.nan_to_num(nan=0.0, posinf=0.0).clamp(min=0)  # no rows: no losses
    total = w.sum()
    return torch.where(total > 0, w / total, 0.0)

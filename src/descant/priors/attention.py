"""Message passing: every client has a prior around a mean of its own, of all clients' last models.

The server's work is matrix products over the population, on all cores, in blocks of clients that are always
the same: what a client is sent depends to the last bit on the models alone, not on who else is in the cohort.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from descant.core.algorithm import Algorithm, ClientData, LocalStep, Message, Round, renewed
from descant.core.fields import hyper
from descant.core.kernels.products import some_rows
from descant.core.ranges import Log
from descant.core.task import Task
from descant.core.threads import on_all_cores
from descant.core.tree import Tree, map_tree, repeat
from descant.core.vector import Model
from descant.priors.quadratic import Gaussian
from descant.priors.solve import SGD, Solver, solve

BLOCK = 256  # clients whose rows of a matrix are made together


@dataclass(frozen=True)
class MessagePassing(Algorithm):
    """A method whose server mixes the clients' models by how alike they are.

    Server:  u_i = sum_j xi_ij w_j,   xi_ij by `attention`,   xi_ii = 1 - sum_{j != i} xi_ij.
    Client:  w_i ~ argmin f_i(w) + lam/2 ||w - u_i||^2   by one step on each batch, from u_i; uploaded.
    """

    lam: float = hyper(1.0, "strength of the pull of w_i to u_i", ge=0, search=Log(0.01, 10.0))
    solver: Solver = hyper(SGD(lr=0.05), "local optimizer")

    @abstractmethod
    def points(self, w: Tensor) -> Tensor:
        """What products are made of, from the parameters of all clients [m, d]."""

    @abstractmethod
    def attention(self, products: Tensor, squares: Tensor, clients: Tensor) -> Tensor:
        """What the models of all count for some clients [b, m], whose numbers are `clients` [b, 1]: from the
        products of their points with all points, and the squares of all [m]. What it says of xi_ii is not
        used."""

    def local_step(self) -> LocalStep:
        return LocalStep("solver.lr", self.lam)

    def init_server(self, task: Task, model: Model, round: Round) -> Tree:
        return map_tree(torch.clone, repeat(model, round.population))  # the last w_j of all clients

    def init_client(self, task: Task, model: Model) -> Model:
        return model

    def broadcast(self, server: Model, round: Round) -> Message:
        blocks = self._blocks(server.theta, round)
        return Message(each=map_tree(lambda w: some_rows(blocks, w), server))

    def _blocks(self, w: Tensor, round: Round) -> list[tuple[Tensor, Tensor]]:
        """xi of the blocks that have clients of the cohort [b, m], and which of their rows are theirs."""
        points = self.points(w)
        parts = points.split(BLOCK)
        squares = torch.cat(on_all_cores(lambda part: torch.linalg.vector_norm(part, dim=1).square(), parts))
        wanted = (round.cohort // BLOCK).unique().tolist()
        # of each pair of blocks one product, since the matrix is symmetric
        pairs = sorted({(min(k, other), max(k, other)) for k in wanted for other in range(len(parts))})
        product = dict(zip(pairs, on_all_cores(lambda pair: parts[pair[0]] @ parts[pair[1]].T, pairs),
                           strict=True))
        found = []
        for k in wanted:
            rows = [product[k, other] if k <= other else product[other, k].T for other in range(len(parts))]
            clients = torch.arange(k * BLOCK, k * BLOCK + len(parts[k]))[:, None]
            xi = self.attention(torch.cat(rows, 1), squares, clients).scatter(1, clients, 0.0)
            xi = xi.scatter(1, clients, 1 - xi.sum(1, keepdim=True))
            found.append((xi, torch.isin(clients[:, 0], round.cohort).nonzero()[:, 0]))
        return found

    def forgets(self) -> bool:
        return True

    def local(self, task: Task, message: Message, state: Model, data: ClientData) -> tuple[Model, Model]:
        w_i = solve(task, message.each, data, self.solver, Gaussian(message.each.theta, self.lam))
        return w_i, w_i

    def aggregate(self, server: Model, uploads: Model, round: Round) -> tuple[Tree, dict[str, Any]]:
        return renewed(server, uploads, round), {}

    def personalize(self, task: Task, message: Message, state: Model, data: ClientData) -> Model:
        return state

    def participant(self, server: Model, round: Round) -> Message:
        return Message()

    def newcomer(self, server: Model, round: Round) -> Message:
        return Message(map_tree(lambda models: models.mean(0), server))  # whom it resembles nobody knows

    def adapt(self, task: Task, message: Message, data: ClientData) -> Model:
        return self.local(task, Message(each=message.shared), message.shared, data)[0]

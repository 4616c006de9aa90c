"""pFedBayes: Gaussian weights, each client's drawn to the server's by their KL divergence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from descant.core import random
from descant.core.algorithm import Algorithm, ClientData, Message, Round, Weights
from descant.core.fields import hyper
from descant.core.kernels.lift import over_clients
from descant.core.ranges import Log
from descant.core.task import Batch, Task
from descant.core.tree import Tree
from descant.core.vector import Model
from descant.priors import variational
from descant.priors.quadratic import Flat
from descant.priors.solve import Adam, Solver, decayed, require_ridge, step_size
from descant.priors.variational import NOISE, Gauss, prior_slopes


class Carry(NamedTuple):
    q: Gauss
    w: Gauss
    q_memory: Tree  # of the optimizer
    w_memory: Tree


@dataclass(frozen=True)
class pFedBayes(Algorithm):
    """Personalized federated learning by variational Bayesian inference.

    Client, from w_i = w and its q_i of the round before, for each batch:
        K steps on q_i = (mu, rho) for  E_eps f_i(mu + sigma eps; batch) + (zeta / n_i) KL(q_i || w_i),
            each with one draw of eps ~ N(0, I), sigma = softplus(rho);
        one step on w_i for             (zeta / n_i) KL(q_i || w_i).
    Server:  w <- (1 - beta) w + beta sum_{i in S} p_i w_i   for mu and rho.

    f_i is the mean over rows, so that this is the paper's sum of the n_i losses + zeta KL. The authors' code
    takes the rows of all batches of a round for n_i, and draws eps with a standard deviation of 0.001:
    nearly without noise. The client predicts with the mean mu of q_i, in one pass. Weight decay is that of
    the sampled weights: a ridge in f_i. A newcomer does the work of a round from the server's Gaussian.
    """

    name: ClassVar[str] = "pfedbayes"
    citation: ClassVar[str] = ("Zhang, Li, Li, Guo, Shen: Personalized Federated Learning via Variational "
                               "Bayesian Inference. ICML 2022, arXiv:2206.07977")
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"zeta": 10.0, "sigma": 0.048587, "solver": Adam(lr=0.001)}}  # softplus(-3)
    draws: ClassVar[bool] = True

    zeta: float = hyper(1.0, "strength of the KL divergence, of the size of one row's loss", ge=0,
                        search=Log(0.01, 100.0))
    sigma: float = hyper(0.05, "standard deviation of all weights before training", gt=0,
                         search=Log(0.005, 0.5))
    K: int = hyper(5, "gradient steps on q_i for each batch", ge=1)
    solver: Solver = hyper(Adam(lr=0.01), "local optimizer of q_i and w_i")
    beta: float = hyper(1.0, "aggregation step; above 1 it is momentum", gt=0)
    weights: Weights = hyper("samples", "what a client counts in the average")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_ridge(self.solver, self.name)

    def cautions(self) -> list[str]:
        lr = step_size(self.solver)
        rows = 0.0 if lr is None else lr * self.zeta / (2 * self.sigma**2)
        return [f"solver.lr = {lr:g}: a step on q_i overshoots in clients of fewer than {rows:.0f} training "
                "rows, where lr zeta / (n sigma^2) > 2: take smaller ones, or Adam"] if rows > 1 else []

    def init_server(self, task: Task, model: Model, round: Round) -> Gauss:
        return self.init_client(task, model)

    def init_client(self, task: Task, model: Model) -> Gauss:
        rho = self.sigma + math.log(-math.expm1(-self.sigma))  # the inverse of softplus
        return Gauss(model.theta.clone(), torch.full_like(model.theta, rho), model.stats.clone())

    def broadcast(self, server: Gauss, round: Round) -> Message:
        return Message(shared=server)

    def local(self, task: Task, message: Message, state: Gauss, data: ClientData) -> tuple[Gauss, Gauss]:
        w, weight = message.shared, self.zeta / data.size
        solver = dataclasses.replace(self.solver, weight_decay=0.0)  # of theta, not of mu and rho
        fast = variational.descend(task, state, w, weight, data, solver, self.K, self.solver.weight_decay)
        if fast is not None:
            return fast[1], fast[0]

        def stepped(at: Gauss, g_mu: Tensor, g_rho: Tensor, memory: Tree) -> tuple[Gauss, Tree]:
            mu, first = solver.step(at.mu, g_mu, Flat(), memory[0])
            rho, second = solver.step(at.rho, g_rho, Flat(), memory[1])
            return at._replace(mu=mu, rho=rho), (first, second)

        def local_round(carry: Carry, batch: Batch) -> Carry:
            q, w, q_memory, w_memory = carry
            s = F.softplus(w.rho)
            precision = weight / s.square()
            for k in range(self.K):
                g = self._gradient(task, q, w.mu, precision, weight, batch.redrawn(k))
                q, q_memory = stepped(q._replace(stats=g.stats), g.mu, g.rho, q_memory)
            w, w_memory = stepped(w._replace(stats=q.stats), *prior_slopes(q, w, s, weight), w_memory)
            return Carry(q, w, q_memory, w_memory)

        begin = (solver.init(w.mu), solver.init(w.rho))
        found: Carry = data.scan(local_round, Carry(state, w, begin, begin))
        return found.w, found.q

    def _gradient(self, task: Task, q: Gauss, m: Tensor, precision: Tensor, weight: Tensor, batch: Batch
                  ) -> Gauss:
        """The gradient of f(mu + sigma eps; batch) + weight KL(q || N(m, weight / precision)) for mu and rho,
        and the new statistics."""
        assert batch.key is not None
        theta, eps, sigma, turn = _together(_sampled, q.mu, q.rho, random.fold(batch.key, NOISE))
        found = task.grad(Model(theta, q.stats), batch)
        slope = decayed(found.theta, theta, self.solver.weight_decay)
        g_mu, g_rho = _together(_slopes, slope, eps, sigma, turn, q.mu, m, precision, weight)
        return Gauss(g_mu, g_rho, found.stats)

    def absorb(self, server: Gauss, mean: Gauss, round: Round) -> tuple[Gauss, dict[str, Any]]:
        mu, rho = (old + self.beta * (new - old) for old, new in zip(server[:2], mean[:2], strict=True))
        return Gauss(mu, rho, mean.stats), {"sigma": F.softplus(rho).mean()}

    def personalize(self, task: Task, message: Message, state: Gauss, data: ClientData) -> Model:
        return Model(state.mu, state.stats)

    def adapt(self, task: Task, message: Message, data: ClientData) -> Model:
        _, q = self.local(task, message, message.shared, data)
        return Model(q.mu, q.stats)

    def global_model(self, server: Gauss) -> Model:
        return Model(server.mu, server.stats)


def _together(work: Callable[..., tuple[Tensor, ...]], *own: Tensor) -> tuple[Tensor, ...]:
    """`work`, which is written for any leading axes, on all clients at once where that is possible."""
    return over_clients(work, *own) or work(*own)


def _sampled(mu: Tensor, rho: Tensor, key: Tensor) -> tuple[Tensor, ...]:
    """theta = mu + sigma eps, with eps, sigma and the slope of sigma for rho."""
    eps = random.coarse_normal(key, mu.shape[-1], mu.dtype)
    turn = rho.exp()
    sigma = turn.log1p()
    return torch.addcmul(mu, sigma, eps), eps, sigma, turn.div_(turn + 1)


def _slopes(slope: Tensor, eps: Tensor, sigma: Tensor, turn: Tensor, mu: Tensor, m: Tensor, precision: Tensor,
            weight: Tensor) -> tuple[Tensor, ...]:
    """The gradient for mu and rho, from that of the loss at theta."""
    g_sigma = (slope * eps).addcmul_(precision, sigma).sub_(weight.unsqueeze(-1) / sigma)
    return (mu - m).mul_(precision).add_(slope), g_sigma.mul_(turn)

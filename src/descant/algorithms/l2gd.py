"""L2GD and L2SGD: by the toss of a coin, a step on the own loss or a step towards the mean of all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from descant.core import random
from descant.core.algorithm import Algorithm, ClientData, LocalStep, Message, Round
from descant.core.fields import hyper
from descant.core.ranges import Log, Step
from descant.core.task import Task
from descant.core.tree import map_tree
from descant.core.vector import Model
from descant.priors.belief import Tracked
from descant.priors.fused import Add
from descant.priors.prior import Prior
from descant.priors.quadratic import Gaussian
from descant.priors.solve import decayed, solve


class Broadcast(NamedTuple):
    mean: Model  # of the models of all clients
    key: Tensor  # [] int64, from which the coins of the round follow


class Coins:
    """A solver that tosses a coin at each step: a step of size lr on the loss alone, or, with probability p,
    a `share` of the way to the mean of the prior, which is a Gaussian."""

    def __init__(self, key: Tensor, p: float, lr: float, share: float, weight_decay: float) -> None:
        self._key, self._p, self._weight_decay = key, p, weight_decay
        self._zero, self._one = torch.tensor([[lr, 0.0], [0.0, share]], dtype=torch.float64)
        self._known: dict[int, list[float]] = {}  # a network has many parameters, but a step has one coin

    def _sizes(self, number: Tensor | int) -> Tensor:
        """How far the step of this number, 1, 2, ..., goes on the loss, and towards the mean: [2]."""
        is_one = random.uniform(self._key + number, (1,), torch.float64) < self._p
        return torch.where(is_one, self._one, self._zero)

    def init(self, theta: Tensor) -> Tensor:
        return torch.zeros((), dtype=torch.int64)

    def step(self, theta: Tensor, gradient: Tensor, prior: Prior, state: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(prior, Gaussian)
        lr, share = self._sizes(state + 1).to(theta.dtype)
        slope = decayed(gradient, theta, self._weight_decay)
        return theta - lr * slope - share * (theta - prior.mean), state + 1

    def remembered(self) -> int:
        return 0

    def step_(self, theta: Tensor, add: Add, prior: Prior, memory: list[Tensor], number: int) -> None:
        assert isinstance(prior, Gaussian)
        if number not in self._known:
            self._known[number] = self._sizes(number).tolist()
        lr, share = self._known[number]  # one of them is zero
        theta.lerp_(prior.mean, share)
        add(theta, 1 - lr * self._weight_decay, -lr)


@dataclass(frozen=True)
class L2GD(Algorithm):
    """Loopless local gradient descent on  mean_i f_i(x_i) + lam/2 mean_i ||x_i - xbar||^2, xbar = mean_i x_i.

    Client, at every toss of a coin, which all clients see alike:
        zero, with probability 1 - p:  x_i <- x_i - lr grad f_i(x_i),                lr = alpha / (n (1 - p));
        one, with probability p:       x_i <- x_i - lr lam (1 - p)/p (x_i - xbar),   as alpha lam / (n p).
    Server:  xbar <- xbar + |S|/n mean_{i in S} (x_i - x_i(old)):  the mean over all n clients, absent or not.

    With full batches it is L2GD, with smaller ones L2SGD. In the mean over the coin nothing moves where
    one-stage FedProx with the same lam ends. The paper's alpha grows with n, so that the field is lr.

    Coins and rounds: every local step of a round tosses a coin, all of them from a key that the server draws
    from its stream of the round and sends. The paper talks whenever a one follows a zero, p (1 - p) times a
    toss; here clients talk once a round, and its ones go towards the xbar that it began with. With one local
    step a round that is the paper's method to the letter; with 1 / (p (1 - p)) of them clients talk as often
    as in the paper. Who is not in the cohort tosses no coin and keeps its x_i. At a one the batch counts for
    the statistics of BatchNorm alone, but its gradient is computed, and counted.

    A client keeps x_i and predicts with it. The paper has no newcomers; ours do a round's work from xbar.
    """

    name: ClassVar[str] = "l2gd"
    citation: ClassVar[str] = ("Hanzely, Richtárik: Federated Learning of a Mixture of Global and Local "
                               "Models. arXiv:2002.05516, 2020")
    tracking: ClassVar[bool] = True

    lam: float = hyper(0.5, "strength of the pull of x_i to the mean", gt=0, search=Log(0.01, 10.0))
    lr: float = hyper(0.05, "size of a step on f_i: alpha / (n (1 - p))", gt=0, search=Step(0.001, 1.0))
    p: float = hyper(None, "how often a coin shows one; absent: lam / (lam + 10), the best for L = 10", gt=0,
                     lt=1, derived=lambda self: self.lam / (self.lam + 10))
    weight_decay: float = hyper(0.0, "strength of the pull to zero, as part of f_i", ge=0)

    @property
    def share(self) -> float:
        """How much of the way to the mean a step goes."""
        return self.lr * self.lam * (1 - self.p) / self.p

    def local_step(self) -> LocalStep:
        return LocalStep("lr")

    def cautions(self) -> list[str]:
        if self.share <= 1:
            return []
        least = self.lr * self.lam / (1 + self.lr * self.lam)
        effect = "the models diverge" if self.share >= 2 else "the models overshoot it"
        return [f"p = {self.p:g} with lr = {self.lr:g} and lam = {self.lam:g}: a step towards the mean goes "
                f"{self.share:g} of the way and {effect}; use p >= {least:.3g}, or a smaller lr"]

    def init_server(self, task: Task, model: Model, round: Round) -> Model:
        return model

    def init_client(self, task: Task, model: Model) -> Model:
        return model

    def broadcast(self, server: Model, round: Round) -> Message:
        return Message(Broadcast(server, torch.tensor(int(round.generator("coins").integers(2**63)))))

    def local(self, task: Task, message: Message, state: Model, data: ClientData) -> tuple[Model, Model]:
        mean, key = message.shared
        coins = Coins(key, self.p, self.lr, self.share, self.weight_decay)
        x = solve(task, state, data, coins, Gaussian(mean.theta, self.lam))
        return map_tree(torch.sub, x, state), x

    def absorb(self, server: Model, mean: Model, round: Round) -> tuple[Model, dict[str, Any]]:
        after: Model = map_tree(lambda own, change: Tracked()(own, change, round), server, mean)
        return after, {}

    def personalize(self, task: Task, message: Message, state: Model, data: ClientData) -> Model:
        return state

    def adapt(self, task: Task, message: Message, data: ClientData) -> Model:
        return self.local(task, message, message.shared.mean, data)[1]

    def global_model(self, server: Model) -> Model:
        return server

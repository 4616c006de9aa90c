"""FedEM: every client's data are a mixture of a few components that all clients share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from descant.core.algorithm import Algorithm, ClientData, Message, Round, apart, interpolate
from descant.core.fields import hyper
from descant.core.ranges import Log
from descant.core.task import Batch, Task
from descant.core.tree import map_tree, stack, take
from descant.core.vector import Model
from descant.errors import UsageError
from descant.priors.solve import SGD, Solver, solve_each


class Upload(NamedTuple):
    models: Model  # [M, ...]
    pi: Tensor  # [M]


class Mixture(NamedTuple):
    """What a client predicts with."""

    theta: Tensor  # [M, d]
    stats: Tensor  # [M, s]
    pi: Tensor  # [M]


@dataclass(frozen=True)
class FedEM(Algorithm):
    """Expectation maximisation over clients: M shared models, and each client's shares of them.

    Client i, from the received theta_1 ... theta_M and its last pi_i:
        q_i(m | x, y) = pi_im exp(-loss(theta_m; x, y)) / sum_l pi_il exp(-loss(theta_l; x, y));
        pi_im <- mean over its rows of q_i(m);
        theta_im <- theta_im - lr mean over the batch of (q_i(m) / pi_im) grad loss(theta_im)   from theta_m.
    Server:  theta_m <- (1 - beta) theta_m + beta sum_i n_i pi_im theta_im / sum_i n_i pi_im.
    Prediction:  sum_m pi_im p(y | x; theta_m), for real targets the mean of the outputs.

    q is of the models received and stays for the round. With one step on full batches a round is a
    gradient step on EM's bound, of length lr n / sum_i n_i pi_im. aggregation = "samples" is the paper's: no
    division by pi_im, and clients count n_i; then clients without a component hold it where it is, and the
    same step has length lr. With M = 1 this is FedAvg.

    A newcomer learns pi_i alone, by `steps_pi` steps of EM with the models fixed (the paper's rule).

    Traps: components that begin alike stay alike: all but the first begin with noise (`spread`). A loss is
    taken for minus a log-likelihood: mean squared errors are those of a Gaussian of variance 1/2.
    """

    name: ClassVar[str] = "fedem"
    citation: ClassVar[str] = (
        "Marfoq, Neglia, Bellet, Kameni, Vidal: Federated Multi-Task Learning under a Mixture of "
        "Distributions. NeurIPS 2021, arXiv:2108.10252"
    )
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"aggregation": "samples", "solver": SGD(lr=0.03)}}

    M: int = hyper(3, "components", ge=1)
    solver: Solver = hyper(SGD(lr=0.05), "local optimizer of each component")
    aggregation: Literal["responsibilities", "samples"] = hyper(
        "responsibilities", "what a client counts in the average of a component: n_i pi_im, or n_i (paper)")
    spread: float = hyper(1.0, "size of the noise with which models begin, by that of the initial parameters",
                          gt=0, search=Log(0.1, 10.0))
    steps_pi: int = hyper(10, "steps of EM on the shares of a newcomer", ge=1)
    beta: float = hyper(1.0, "aggregation step; above 1 it is momentum", gt=0)

    def init_server(self, task: Task, model: Model, round: Round) -> Model:
        if round.population < self.M:
            raise UsageError(f"{self.name}.M is {self.M}, but the federation has only {round.population} "
                             f"clients: take at most {round.population}")
        return apart(model, self.M, self.spread, round.key("apart"))

    def init_client(self, task: Task, model: Model) -> Tensor:
        return torch.full((self.M,), 1 / self.M, dtype=model.theta.dtype)

    def client_weights(self, round: Round) -> Tensor:
        return round.weights("samples")  # in all components together

    def broadcast(self, server: Model, round: Round) -> Message:
        return Message(shared=server)

    def local(self, task: Task, message: Message, state: Tensor, data: ClientData) -> tuple[Upload, Tensor]:
        q = posteriors(losses(task, message.shared, data), state)
        pi = shares(q, data)
        counts = q / pi.clamp(min=torch.finfo(pi.dtype).tiny) if self.aggregation == "responsibilities" else q
        return Upload(solve_each(task, message.shared, data, self.solver, counts), pi), pi

    def counts(self, sizes: Tensor) -> Tensor:
        return sizes

    def contribution(self, message: Message, upload: Upload) -> Upload:
        if self.aggregation == "samples":
            return upload
        counted = map_tree(lambda models: upload.pi[:, None] * models, upload.models)
        return upload._replace(models=counted)

    def absorb(self, server: Model, mean: Upload, round: Round) -> tuple[Model, dict[str, Any]]:
        after = []
        for m, share in enumerate(mean.pi if self.aggregation == "responsibilities"
                                  else torch.ones_like(mean.pi)):
            theta_m = take(server, m)
            if share > 0:
                of_m = map_tree(lambda models, m=m, share=share: models[m] / share, mean.models)
                theta_m = interpolate(theta_m, of_m, self.beta)
            after.append(theta_m)
        return stack(after), {"pi": mean.pi}

    def personalize(self, task: Task, message: Message, state: Tensor, data: ClientData) -> Mixture:
        theta, stats = message.shared
        return Mixture(theta, stats, state)

    def adapt(self, task: Task, message: Message, data: ClientData) -> Mixture:
        theta, stats = message.shared
        found, pi = losses(task, message.shared, data), torch.full_like(theta[:, 0], 1 / self.M)
        for _ in range(self.steps_pi):
            pi = shares(posteriors(found, pi), data)
        return Mixture(theta, stats, pi)

    def predict(self, task: Task, personal: Mixture, x: Tensor) -> Tensor:
        theta, stats, pi = personal
        outputs = [task.predict(Model(theta[m], stats[m]), x) for m in range(self.M)]
        return task.mixture(torch.stack(outputs), pi)

    def global_model(self, server: Model) -> Model | None:
        return take(server, 0) if self.M == 1 else None


def losses(task: Task, models: Model, data: ClientData) -> Tensor:
    """The losses of the models on the training rows of ONE client [n, M]."""

    def of_batch(batch: Batch) -> Tensor:
        return torch.stack([task.losses(take(models, m), batch)[0] for m in range(len(models.theta))], 1)

    return data.each(of_batch)


def posteriors(losses: Tensor, pi: Tensor) -> Tensor:
    """q of ONE client's rows [n, M]."""
    return torch.softmax(pi.log() - losses, 1)


def shares(q: Tensor, data: ClientData) -> Tensor:
    """The mean of q over the training rows of ONE client [M]."""
    real = torch.arange(len(q)) < data.size
    return q.where(real[:, None], 0.0).sum(0) / data.size

"""IFCA: iterative federated clustering, in which every client chooses its cluster by its loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from descant.core.algorithm import (
    Algorithm,
    ClientData,
    Message,
    Round,
    Weights,
    apart,
    average,
    interpolate,
    least_loss,
)
from descant.core.fields import hyper
from descant.core.random import fold
from descant.core.ranges import Log
from descant.core.task import Task
from descant.core.tree import Tree, map_tree, pick, stack, take
from descant.core.vector import Model
from descant.errors import UsageError
from descant.priors.solve import SGD, Solver, solve


class Broadcast(NamedTuple):
    models: Model  # [K, ...]
    key: Tensor  # int64 [] of the noise with which they begin


class Server(NamedTuple):
    models: Model
    key: Tensor
    cluster: Tensor  # int64 [m] which one each client trained last; -1: none yet


class Upload(NamedTuple):
    model: Model
    cluster: Tensor  # int64 []
    choices: Tree = ()  # int64 [starts], told in the opening, where there is one


@dataclass(frozen=True)
class IFCA(Algorithm):
    """K models on the server; every client trains the one that suits it best.

    Client:  k_i = argmin_k f_i(w_k) over all its training rows;
             w_i <- w_i - lr grad f_i(w_i)   on each batch of the round, from w_{k_i}.
    Server:  w_k <- (1 - beta) w_k + beta sum_{i in S: k_i = k} p_i w_i,   an empty cluster keeps its w_k.

    With K = 1 this is FedAvg. A client predicts with the model that it would choose now, and so does a
    newcomer (the paper has no other rule); `finetune` steps on its own batches may follow.

    Traps: models that begin alike stay alike, since a client without a preference takes the first. So all but
    the first begin with noise (`spread`). A model that is best for everybody takes all clients and never
    gives them back, as one without noise does among others with much of it. The paper restarts such runs.
    Here `starts` > 1 draws so many sets of K models, asks every client once which of each set it would
    choose, and trains the set that divides the clients most evenly, by the least sum of squared cluster
    sizes. That is our rule, for clusters of similar size; the first round does nothing else.
    This is the paper's model averaging; its gradient averaging is that with { steps = 1 }.
    """

    name: ClassVar[str] = "ifca"
    citation: ClassVar[str] = (
        "Ghosh, Chung, Yin, Ramchandran: An Efficient Framework for Clustered Federated Learning. "
        "NeurIPS 2020, arXiv:2006.04088"
    )
    trains_to_personalize: ClassVar[bool] = True

    K: int = hyper(4, "clusters", ge=1)
    solver: Solver = hyper(SGD(lr=0.1), "local optimizer")
    spread: float = hyper(0.1, "size of the noise with which models begin, by that of the initial parameters",
                          gt=0, search=Log(0.01, 1.0))
    starts: int = hyper(1, "sets of models of which the best begins; more than 1 ask every client once", ge=1)
    finetune: int = hyper(0, "steps on its own batches before a client predicts", ge=0)
    beta: float = hyper(1.0, "aggregation step; above 1 it is momentum", gt=0)
    weights: Weights = hyper("samples", "what a client counts in the average of its cluster")

    def personal_steps(self) -> int:
        return self.finetune

    def opens(self) -> bool:
        return self.starts > 1

    def init_server(self, task: Task, model: Model, round: Round) -> Server:
        if round.population < self.K:
            raise UsageError(f"{self.name}.K is {self.K}, but the federation has only {round.population} "
                             f"clients: take at most {round.population}")
        key = round.key("apart")
        return Server(self.begun(model, key, 0), key, torch.full((round.population,), -1))

    def begun(self, model: Model, key: Tensor, s: int) -> Model:
        """The models of set s, the same on the server and on clients."""
        return apart(model, self.K, self.spread, fold(key, s))

    def broadcast(self, server: Server, round: Round) -> Message:
        return Message(Broadcast(server.models, server.key))

    def opening(self, task: Task, message: Message, state: tuple[()], data: ClientData
                ) -> tuple[Upload, tuple[()]]:
        models, key = message.shared
        first = take(models, 0)
        choices = [least_loss(task, self.begun(first, key, s), data, "train") for s in range(self.starts)]
        return Upload(first, choices[0], torch.stack(choices)), ()

    def chosen(self, task: Task, models: Model, data: ClientData) -> Upload:
        """The cluster of ONE client, and its model."""
        if self.K == 1:
            return Upload(take(models, 0), torch.zeros((), dtype=torch.int64))
        k = least_loss(task, models, data, "train")
        return Upload(pick(models, k), k)

    def local(self, task: Task, message: Message, state: tuple[()], data: ClientData
              ) -> tuple[Upload, tuple[()]]:
        w_k, k, _ = self.chosen(task, message.shared.models, data)
        choices = k.expand(self.starts) if self.opens() else ()
        return Upload(solve(task, w_k, data, self.solver), k, choices), ()

    def aggregate(self, server: Server, uploads: Upload, round: Round) -> tuple[Server, dict[str, Any]]:
        # a client on another machine may send any number
        uploads = uploads._replace(cluster=uploads.cluster.clamp(0, self.K - 1),
                                   choices=map_tree(lambda k: k.clamp(0, self.K - 1), uploads.choices))
        if self.opens() and round.number == 1:
            sizes = torch.stack([each.bincount(minlength=self.K) for each in uploads.choices.T])
            best = int(sizes.square().sum(1).argmin())
            models = self.begun(take(server.models, 0), server.key, best)
            return server._replace(models=models), {"start": best, "cluster_sizes": sizes[best]}
        after = []
        for k in range(self.K):
            w_k = take(server.models, k)
            if len(at := torch.nonzero(uploads.cluster == k).flatten()):
                mean = average(take(uploads.model, at), self.counts(round.sizes[at]))
                w_k = interpolate(w_k, mean, self.beta)
            after.append(w_k)
        sizes = uploads.cluster.bincount(minlength=self.K)
        if self.K == 1:
            return server._replace(models=stack(after)), {"cluster_sizes": sizes}
        before = server.cluster[round.cohort]
        moved = (uploads.cluster != before)[before >= 0].double()
        cluster = server.cluster.index_copy(0, round.cohort, uploads.cluster)
        models = stack(after)
        return Server(models, server.key, cluster), {
            "cluster_sizes": sizes, "K": self.K, "clusters": cluster, "distances": distances(models),
            "moved": float(moved.mean()) if len(moved) else None}

    def personalize(self, task: Task, message: Message, state: tuple[()], data: ClientData) -> Model:
        return self.adapt(task, message, data)

    def adapt(self, task: Task, message: Message, data: ClientData) -> Model:
        return solve(task, self.chosen(task, message.shared.models, data).model, data, self.solver)

    def global_model(self, server: Server) -> Model | None:
        return take(server.models, 0) if self.K == 1 else None


def distances(models: Model) -> Tensor:
    """Between the clusters' models, pair by pair [K, K]."""
    w = models.theta.double()
    return torch.cdist(w, w, compute_mode="donot_use_mm_for_euclid_dist")

"""FedPAC: features aligned to common class centroids, and heads combined by a quadratic program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core.algorithm import Algorithm, ClientData, LocalStep, Message, Round, Weights, average, renewed
from descant.core.fields import hyper
from descant.core.ranges import Log, Step
from descant.core.task import Batch, Pull, Task
from descant.core.tree import Tree
from descant.core.vector import Model
from descant.errors import UsageError
from descant.priors.phases import solve_in_phases
from descant.priors.solve import SGD, decayed


class Common(NamedTuple):
    """What all clients are sent."""

    w: Model  # the mean of the clients' models, of which the body is used
    c: Tensor  # [classes, k] the centroids: mean features of each class ...
    known: Tensor  # [classes] ... 1 where any client had rows of it


class Facts(NamedTuple):
    """What the server knows of a client's features and head, from when it last took part."""

    head: Tensor  # [d_h] its trained head
    h: Tensor  # [classes, k] its mean features by class, times the share of the class
    v: Tensor  # [] the variance of its mean feature
    joined: Tensor  # [] 1 after it took part


class Server(NamedTuple):
    common: Common
    facts: Facts  # of all clients: [m, ...]


class Upload(NamedTuple):
    model: Model
    h: Tensor  # [classes, k]
    v: Tensor  # []
    sums: Tensor  # [classes, k] of the features of each class after training
    counts: Tensor  # [classes]


@dataclass(frozen=True)
class FedPAC(Algorithm):
    """Personalization with feature alignment and classifier collaboration, for classification.

    The head is the last layer with parameters, and linear; the feature g(x) [k] is what it is given.
    The first steps of a round train the head, the others the body phi:
        head <- head - eta_g grad f_i,    phi <- phi - eta_f grad (f_i + (lam / k) mean ||g(x) - c_y||^2).
    Client: this, from the server's body and its combined head. It uploads its model, the sums and counts of
    its features by class after training, and, with the body that it was sent,
        h_i[y] = p_i(y) E[g | y],   v_i = (E ||g||^2 - ||h_i||^2) / n_i.
    Server:  phi <- sum_{i in S} p_i phi_i;   c_y = the mean of the cohort's features of class y;
        head_i = sum_j a_j head_j,   a = argmin on the simplex of sum_j a_j^2 v_j + ||h_i - sum_j a_j h_j||^2.

    The client predicts with the model that it trained last. j is every client that ever took part, with its
    last upload; the authors combine the heads of a cohort. lam is by coordinate, as in the authors' code, of
    which momentum is left out. A class that nobody in a cohort has keeps its centroid. The variance of one
    row is 0: such a client keeps its own head, and others trust it too much. In softmax regression the rows
    themselves are the features, and there is no body. A newcomer (our rule) does the work of a round from the
    mean of the models, heads included.
    """

    name: ClassVar[str] = "fedpac"
    citation: ClassVar[str] = ("Xu, Tong, Huang: Personalized Federated Learning with Feature Alignment and "
                               "Classifier Collaboration. ICLR 2023, arXiv:2306.11867")
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {
        "head": 1 / 6, "eta_g": 0.1, "eta_f": 0.01, "weight_decay": 5e-4}}

    lam: float = hyper(1.0, "strength of the pull of features to centroids", ge=0, search=Log(0.01, 100.0))
    head: float = hyper(0.2, "share of a round's steps that train the head, at least one", gt=0, lt=1)
    eta_g: float = hyper(0.1, "step size of the head", gt=0, search=Step(0.001, 1.0))
    eta_f: float = hyper(0.05, "step size of the body", gt=0, search=Step(0.001, 1.0))
    weight_decay: float = hyper(0.0, "strength of the pull to zero", ge=0)
    weights: Weights = hyper("samples", "what a client counts in the mean of the bodies")

    def local_step(self) -> LocalStep:
        return LocalStep("eta_g")

    def init_server(self, task: Task, model: Model, round: Round) -> Server:
        k = task.feature_width
        if task.classes is None:
            raise UsageError("fedpac is for classification, and the targets are not classes: it aligns the "
                             "features of each class; use another method")
        m, d_h, zeros = round.population, task.dim - body_size(task), model.theta.new_zeros
        return Server(Common(model, zeros(task.classes, k), zeros(task.classes)),
                      Facts(zeros(m, d_h), zeros(m, task.classes, k), zeros(m), zeros(m)))

    def init_client(self, task: Task, model: Model) -> Model:
        return model

    def broadcast(self, server: Server, round: Round) -> Message:
        common, facts = server
        mean = common.w.theta[-facts.head.shape[1]:]
        there = facts.joined.nonzero().flatten()
        h = facts.h[there].double().flatten(1)
        gram, heads, v = h @ h.T, facts.head[there], facts.v[there].double()

        def head(i: int) -> Tensor:
            if not facts.joined[i]:
                return mean
            a = combination(gram, v, int((there == i).nonzero()))
            return a.to(heads.dtype) @ heads

        # one after the other: to the last bit the same in any cohort
        return Message(common, torch.stack([head(i) for i in round.cohort.tolist()]))

    def forgets(self) -> bool:
        return True

    def local(self, task: Task, message: Message, state: Model, data: ClientData) -> tuple[Upload, Model]:
        (w, c, known), own = message
        size = body_size(task)
        before = mean, second, _ = _moments(task, w, data)
        v = (second - mean.square().sum()) / data.size
        first = (self.head * data.steps).round().clamp(min=1)
        pull = Pull(c, self.lam / c.shape[1] * known)
        model = self._trained(task, Model(torch.cat([w.theta[:size], own]), w.stats), data, first, pull)
        # features that nothing is learned of are what they were
        after, _, shares = _moments(task, model, data) if size or w.stats.numel() else before
        return Upload(model, mean, v, data.size * after, data.size * shares), model

    def _trained(self, task: Task, model: Model, data: ClientData, first: Tensor, pull: Pull) -> Model:
        """The model after the steps of a round, of which the `first` are on the head."""
        head, body = (SGD(lr=eta, weight_decay=self.weight_decay) for eta in (self.eta_g, self.eta_f))
        if (fast := solve_in_phases(task, model, data, head, body, first, pull)) is not None:
            return fast
        is_head = torch.arange(len(model.theta)) >= body_size(task)
        head_rate, body_rate = (eta * part.to(model.theta.dtype) for eta, part in (
            (self.eta_g, is_head), (self.eta_f, ~is_head)))

        def step(carry: tuple[Model, Tensor], batch: Batch) -> tuple[Model, Tensor]:
            model, t = carry
            found = task.grad(model, batch, pull)
            rate = torch.where(t < first, head_rate, body_rate)
            slope = decayed(found.theta, model.theta, self.weight_decay)
            return Model(torch.addcmul(model.theta, rate, slope, value=-1), found.stats), t + 1

        trained: Model = data.scan(step, (model, torch.zeros_like(data.steps)))[0]
        return trained

    def aggregate(self, server: Server, uploads: Upload, round: Round) -> tuple[Server, dict[str, Any]]:
        w = average(uploads.model, round.weights(self.weights))
        counts = uploads.counts.sum(0)
        there = counts > 0
        means = uploads.sums.sum(0) / counts.clamp(min=1)[:, None]
        c = torch.where(there[:, None], means, server.common.c)
        known = torch.where(there, 1.0, server.common.known)
        heads = uploads.model.theta[:, -server.facts.head.shape[1]:]
        told = Facts(heads, uploads.h, uploads.v, torch.ones_like(uploads.v))
        return Server(Common(w, c, known), renewed(server.facts, told, round)), {}

    def personalize(self, task: Task, message: Message, state: Model, data: ClientData) -> Model:
        return state

    def participant(self, server: Server, round: Round) -> Message:
        return Message()

    def newcomer(self, server: Server, round: Round) -> Message:
        return Message(server.common)

    def adapt(self, task: Task, message: Message, data: ClientData) -> Model:
        w: Model = message.shared.w
        return self.local(task, Message(message.shared, w.theta[body_size(task):]), w, data)[1]

    def global_model(self, server: Server) -> Model:
        return server.common.w


def body_size(task: Task) -> int:
    """How many parameters come before the head."""
    assert task.layout is not None
    return int((~task.layout.head()).sum())


def combination(gram: Tensor, v: Tensor, i: int) -> Tensor:
    """argmin over the simplex of sum_j a_j^2 v_j + ||h_i - sum_j a_j h_j||^2, from gram = (h_j . h_l): [m].

    That is a' P a with P = diag(v) + ((h_i - h_j) . (h_i - h_l)). The least y' P y / 2 - sum_j y_j over
    y >= 0 lies on the same ray, and non-negative least squares finds it exactly in finitely many steps.
    """
    from scipy.linalg import solve_triangular  # slow to import
    from scipy.optimize import nnls

    P = (torch.diag(v) + gram[i, i] - gram[i][:, None] - gram[i] + gram).numpy()
    scale = float(np.trace(P)) / len(P)
    P = P / (scale or 1.0) + 1e-10 * np.eye(len(P))  # it may be singular: a client of one row has v = 0
    L = np.linalg.cholesky(P)
    y, _ = nnls(L.T, solve_triangular(L, np.ones(len(P)), lower=True))
    return torch.from_numpy(y / y.sum())


def _moments(task: Task, model: Model, data: ClientData) -> tuple[Tensor, Tensor, Tensor]:
    """Over the training rows of ONE client: E[g 1_y] for each class y [classes, k], E ||g||^2, and the shares
    of the classes."""
    def of(batch: Batch) -> Tree:
        assert batch.weight is not None and task.classes is not None
        features = task.features(model, batch.x)
        share = batch.weight.to(features.dtype) / batch.weight.sum()
        rows = (batch.y.long()[:, None] == torch.arange(task.classes)) * share[:, None]
        return rows.T @ features, share @ torch.linalg.vector_norm(features, dim=1).square(), rows.sum(0)

    found: tuple[Tensor, Tensor, Tensor] = data.mean(of)
    return found

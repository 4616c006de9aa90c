"""FedMAP: local training as MAP estimation under a prior that the server learns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from descant.core import parts
from descant.core.algorithm import ClientData, Message, Round, Weights
from descant.core.fields import hyper
from descant.core.task import Task
from descant.core.tree import Tree, where
from descant.core.vector import Model
from descant.errors import UsageError
from descant.priors.belief import Belief, PriorMethod, Received, Upload
from descant.priors.energy import Energy, EnergyBelief, InputConvex, OwnPrior, require_named
from descant.priors.gaussian import Descend, GaussianBelief, Tempered
from descant.priors.grouping import KMeans, grouped
from descant.priors.precision import Adaptive, DiagonalVariance, FixedVariance, LearnedVariance, unstable
from descant.priors.solve import Adam, Proximal, Solver, solve, step_size


class State(NamedTuple):
    theta: Model  # the personal model
    joined: Tensor  # [] whether theta was trained under the prior: 0 or 1


class Shared(NamedTuple):
    prior: Tree  # what the belief sends to all
    begun: Tree  # [] 0 in a round that only initialises, 1 afterwards; only with init = "client"


@dataclass(frozen=True)
class FedMAP(PriorMethod):
    """Clients find the most probable model given their data and a prior rho_gamma; the server fits gamma.

    Client k, by the solver's steps (Algorithm 2, Eq. 7), with R = -log rho_gamma:
        theta_k ~ argmin  (1/N_k) sum_i loss(theta; z_i) + R(theta, gamma);
        log omega_k = -sum_i loss(theta_k; z_i) - R(theta_k, gamma), up to a constant                (Eq. 8).
    Server, with weights w_k = omega_k^(1/T) / sum_j omega_j^(1/T) (Algorithm 3):
        gamma <- gamma - lambda sum_k w_k grad_gamma R(theta_k, gamma)                               (Eq. 3),
    or, for a Gaussian prior, whose gamma is its mean, the minimiser of sum_k w_k R(theta_k, gamma):
        gamma <- sum_k w_k theta_k                                                                   (Eq. 9).

    Traps: the printed weights omega mostly give one client all the weight (the report's `effective` is the
    number that count; a `temperature` above 1 tempers them). likelihood = "sum" is Eq. 2, whose prior is N_k
    times weaker. init = "client" uses a random client's model and nothing else of round 1. A run with an
    `Energy` object is resumed by the same call of `descant.run`. More in docs/methods/fedmap.md.
    """

    name: ClassVar[str] = "fedmap"
    citation: ClassVar[str] = (
        "Zhang, Esteve-Yagüe, Dittmer, Schönlieb, Roberts: FedMAP: Unlocking Potential in Personalized "
        "Federated Learning through Bi-Level MAP Optimization. 2024, arXiv:2405.19000")

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {"solver": Adam(lr=1e-4)}}

    prior: (FixedVariance | DiagonalVariance | LearnedVariance | Adaptive | InputConvex | OwnPrior
            | Energy) = hyper(FixedVariance(), "the family of priors")
    solver: Solver = hyper(Adam(lr=0.003), "local optimizer")
    weights: Weights | Literal["omega", "mean_log"] = hyper("omega", "what a client counts on the server")
    temperature: float = hyper(1.0, "weights are taken to the power 1 / temperature", gt=0)
    server_lr: float | Literal["mean"] = hyper("mean", "step lambda of Eq. 3, or the weighted mean", gt=0)
    likelihood: Literal["mean", "sum"] = hyper("mean", "of a client's samples, beside the prior: Eq. 7 or 2")
    start: Literal["own", "global"] = hyper("own", "where local training starts")
    init: Literal["model", "client"] = hyper("model", "where the prior begins: initial model, or a client's")
    groups: KMeans | None = hyper(None, "a prior for each cluster of clients; absent: one for all")
    shared: parts.Shared = hyper("all", "the layers that have a prior; the others are private")

    def __post_init__(self) -> None:
        super().__post_init__()
        prior = self.prior
        if isinstance(prior, Adaptive) and prior.per_client and self.weights in ("omega", "mean_log"):
            raise UsageError("fedmap.weights: omega compares densities of one prior, and prior.per_client "
                             'gives every client its own: use weights = "samples" or "uniform"')
        if self.groups is not None and self.init == "client" and self.groups.k_rounds == 1:
            raise UsageError('fedmap.groups: with init = "client" the first round only finds where the prior '
                             "begins: use groups.k_rounds = 2 or more")
        if not isinstance(prior, Energy):
            return
        require_named(prior, "fedmap.prior")
        if self.shared != "all":
            raise UsageError(f'fedmap.shared: {prior.name} is a prior of whole models: use shared = "all"')
        if self.server_lr == "mean":
            raise UsageError(f"fedmap.server_lr: the prior {prior.name} has no weighted mean: give the step "
                             "size lambda of Eq. 3, such as server_lr = 1.0")
        if isinstance(self.solver, Proximal):
            raise UsageError(f"fedmap.solver: the prior {prior.name} has no proximal map in closed form: use "
                             "sgd or adam")

    def cautions(self) -> list[str]:
        if isinstance(self.prior, Energy):
            return []
        name = "1/sigma2" if isinstance(self.prior, FixedVariance) else "the precision"
        step = None if self.likelihood == "sum" else step_size(self.solver)
        found = unstable("solver.lr", step, self.prior, name)
        fixed = isinstance(self.prior, FixedVariance | DiagonalVariance)
        if fixed and self.server_lr != "mean" and self.server_lr * self.prior.upper_bound() > 1:
            least = 1 / self.prior.upper_bound()
            found.append(f"server_lr = {self.server_lr:g} with sigma2 = {least:g}: the mean "
                         "overshoots the clients' models; it needs server_lr <= sigma2")
        return found

    @property
    def belief(self) -> Belief:
        weights = Tempered(self.weights, self.temperature)
        step = None if self.server_lr == "mean" else self.server_lr
        if isinstance(self.prior, Energy):
            assert step is not None  # refused above
            return grouped(EnergyBelief(self.prior, step, weights), self.groups, self.name)
        # a gradient step is taken for all of gamma at once, the minimiser for one part after the other
        prior = GaussianBelief(self.prior, Descend(step, self.prior.ridge()), weights,
                               "new" if step is None else "old")
        return grouped(prior, self.groups, self.name)

    def init_client(self, task: Task, model: Model) -> State:
        return State(model, torch.zeros((), dtype=model.theta.dtype))

    def forgets(self) -> bool:
        return self.shared == "all" and self.start != "own"

    def broadcast(self, server: Tree, round: Round) -> Message:
        return self._marked(self.belief.send(server, round), round, begun=round.number > 1)

    def newcomer(self, server: Tree, round: Round) -> Message:
        return self._marked(self.belief.newcomer(server, round), round, begun=True)

    def _marked(self, sent: Message, round: Round, begun: bool) -> Message:
        mark = round.sizes.new_tensor(float(begun)) if self.init == "client" else ()
        return Message(Shared(sent.shared, mark), sent.each)

    def local(self, task: Task, message: Message, state: State, data: ClientData) -> tuple[Upload, State]:
        (shared, begun), each = message
        received = self.received(task, Message(shared, each), state.theta)
        start = received.centre
        if self.start == "own":
            start = where(state.joined > 0, state.theta, start)
        theta = self._solved(task, received, begun, start, data)
        upload = received.tell(theta, theta)._replace(log_weight=self._log_omega(task, received, theta, data))
        joined = torch.ones_like(state.joined) if self.init == "model" else begun.clone()
        return upload, State(theta, joined)

    def _solved(self, task: Task, received: Received, begun: Tree, start: Model, data: ClientData) -> Model:
        prior = received.prior
        if self.likelihood == "sum":
            prior = prior.scaled(1 / data.size)
        if self.init == "client":
            prior = prior.scaled(begun)
        return solve(task, start, data, self.solver, prior)

    def _log_omega(self, task: Task, received: Received, theta: Model, data: ClientData) -> Tree:
        if self.weights in ("uniform", "samples"):
            return ()
        mean_loss = data.mean(lambda batch: task.loss(theta, batch))
        return -data.size * mean_loss - received.prior.energy(theta.theta)

    def contribution(self, message: Message, upload: Upload) -> Tree:
        return self._summed.contribution(Message(message.shared.prior, message.each), upload)

    def personalize(self, task: Task, message: Message, state: State, data: ClientData) -> Model:
        return state.theta

    def adapt(self, task: Task, message: Message, data: ClientData) -> Model:
        (shared, begun), each = message
        received = self.joining(task, Message(shared, each), data)
        return self._solved(task, received, begun, received.centre, data)

"""What the server believes about the clients' models, as a value.

A belief is composed of small parts: how the mean follows from the uploads (`Average`, `Descend`), how
strongly the prior pulls (`precision.py`), what a client counts (`Counted`, `Tempered`), and whether there is
one belief for all or one per group (`grouping.py`). It has no state: its functions take the server's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.func import vmap

from descant.core.algorithm import (
    Algorithm,
    ClientData,
    Message,
    Round,
    Weights,
    at_most,
    average,
    interpolate,
)
from descant.core.parts import Split, split
from descant.core.task import Task
from descant.core.tree import Tree
from descant.core.vector import Model
from descant.priors.precision import Pooled, Precision
from descant.priors.prior import Prior
from descant.priors.quadratic import Gaussian


class Upload(NamedTuple):
    """What a client returns: a model for the mean, and what the other parts of the belief ask for."""

    model: Model
    evidence: Tree = ()  # for the precision
    log_weight: Tree = ()  # [] for weights that depend on the client's work


def itself(model: Model) -> Model:
    return model


class Belief(ABC):
    """Functions marked ONE are for one client, which finds its own row in `each` of what it was sent."""

    @abstractmethod
    def init(self, model: Model, round: Round) -> Tree:
        """The server's state before the first round."""

    @abstractmethod
    def send(self, state: Tree, round: Round) -> Message:
        """What the cohort is sent."""

    @abstractmethod
    def newcomer(self, state: Tree, round: Round) -> Message:
        """What a client is sent that never took part."""

    def chosen(self, task: Task, message: Message, data: ClientData, whole: Callable[[Model], Model] = itself
               ) -> Message:
        """ONE: what a newcomer makes of that, in the form of what a client of the cohort is sent. `whole`
        adds its private layers to a centre."""
        return message

    @abstractmethod
    def prior(self, sent: Message) -> Prior:
        """ONE: the prior on its model."""

    @abstractmethod
    def centre(self, sent: Message) -> Model:
        """ONE: the model that the prior is around."""

    def tell(self, sent: Message, upload: Model, theta: Model, around: Tensor | None = None) -> Upload:
        """ONE: its upload, with evidence from its own theta, measured from the centre or from `around`."""
        return Upload(upload)

    @abstractmethod
    def update(self, state: Tree, uploads: Upload, round: Round, learn: bool = True
               ) -> tuple[Tree, dict[str, Any]]:
        """The new state, and what to report. Without `learn`, evidence is not used: the mean alone moves."""

    def restarted(self, state: Tree, round: Round) -> Tree:
        """The same centre, with whatever else was learned as before the first round."""
        return state

    @abstractmethod
    def model(self, state: Tree) -> Model | None:
        """The one model for all, where there is one."""

    @abstractmethod
    def client_weights(self, round: Round) -> Tensor | None:
        """What each client counts, where that depends on no upload."""


# -- the parts of a Gaussian belief ---------------------------------------------------------------------


@dataclass(frozen=True)
class Average:
    """mean <- (1 - beta) mean + beta sum_i p_i upload_i. Beta above 1 is aggregation momentum."""

    beta: float = 1.0

    def __call__(self, old: Model, uploads: Model, weights: Tensor, pulls: Pooled) -> Model:
        return interpolate(old, average(uploads, weights), self.beta)


@dataclass(frozen=True)
class Descend:
    """mean <- mean - gamma (sum_i p_i lam_i (mean - upload_i) + 2 ridge mean); without a gamma, the minimiser
    of sum_i p_i lam_i/2 ||upload_i - mean||^2 + ridge ||mean||^2."""

    gamma: float | None = None
    ridge: float = 0.0

    def __call__(self, old: Model, uploads: Model, weights: Tensor, pulls: Pooled) -> Model:
        target = average(uploads, pulls.weights)
        if self.gamma is None:
            shrunk = target.theta / (1 + 2 * self.ridge / pulls.precision) if self.ridge else target.theta
            return Model(shrunk, target.stats)
        gradient = pulls.precision * (old.theta - target.theta) + 2 * self.ridge * old.theta
        return Model(old.theta - self.gamma * gradient, target.stats)


@dataclass(frozen=True)
class Counted:
    """What a client counts: alike, or by its samples."""

    kind: Weights = "samples"

    def __call__(self, uploads: Upload, round: Round) -> tuple[Tensor, dict[str, Any]]:
        return round.weights(self.kind), {}

    def known(self, round: Round) -> Tensor:
        return round.weights(self.kind)


@dataclass(frozen=True)
class Tempered:
    """Weights to the power 1 / temperature (FedMAP), in float64: a softmax of logarithms, which neither over-
    nor underflows. "omega" takes the logarithms that the clients upload, "mean_log" these by sample."""

    kind: Weights | Literal["omega", "mean_log"] = "omega"
    temperature: float = 1.0

    def __call__(self, uploads: Upload, round: Round) -> tuple[Tensor, dict[str, Any]]:
        if (w := self.known(round)) is None:
            logs = uploads.log_weight.double() / (1 if self.kind == "omega" else round.sizes.double())
            w = torch.softmax(logs / self.temperature, 0)
            if (lowered := at_most(w, round.most)) is not w:
                w = lowered / lowered.sum()
        return w, {"weights": {"most": w.max(), "effective": 1 / w.square().sum()}, "client_weights": w}

    def known(self, round: Round) -> Tensor | None:
        if self.kind in ("omega", "mean_log"):
            return None
        N = round.sizes.double()
        logs = torch.zeros_like(N) if self.kind == "uniform" else N.log()
        return torch.softmax(logs / self.temperature, 0)


MeanRule: TypeAlias = Callable[[Model, Model, Tensor, Pooled], Model]


class Weighting(Protocol):
    """What each client of a round counts in the mean."""

    def __call__(self, uploads: Upload, round: Round) -> tuple[Tensor, dict[str, Any]]:
        """The weights, which sum to one, and what to report."""

    def known(self, round: Round) -> Tensor | None:
        """The weights, where they depend on no upload."""


class GaussianState(NamedTuple):
    """The state of the server, and (with what the rule sends in place of its state) the message."""

    mean: Model
    pull: Tree  # of the rule for the precision


@dataclass(frozen=True)
class GaussianBelief(Belief):
    """A Gaussian prior for all clients."""

    precision: Precision
    mean: MeanRule = Average()
    weights: Weighting = Counted()
    #: What evidence is measured from: by the client from what it was sent, or by the server, where the
    #: uploads are the clients' own models, from its old or its new mean.
    evidence: Literal["sent", "old", "new"] = "sent"

    def init(self, model: Model, round: Round) -> GaussianState:
        return GaussianState(model, self.precision.init(model.theta, round))

    def send(self, state: GaussianState, round: Round) -> Message:
        shared, each = self.precision.send(state.pull, round)
        return Message(GaussianState(state.mean, shared), each)

    def newcomer(self, state: GaussianState, round: Round) -> Message:
        return Message(GaussianState(state.mean, self.precision.newcomer(state.pull).shared))

    def prior(self, sent: Message) -> Gaussian:
        mean, shared = sent.shared
        return Gaussian(mean.theta, self.precision.value(Message(shared, sent.each)))

    def centre(self, sent: Message) -> Model:
        state: GaussianState = sent.shared
        return state.mean

    def tell(self, sent: Message, upload: Model, theta: Model, around: Tensor | None = None) -> Upload:
        if self.evidence != "sent":
            return Upload(upload)
        around = self.centre(sent).theta if around is None else around
        return Upload(upload, self.precision.evidence(theta.theta, around))

    def update(self, state: GaussianState, uploads: Upload, round: Round, learn: bool = True
               ) -> tuple[GaussianState, dict[str, Any]]:
        weights, report = self.weights(uploads, round)
        pulls = self.precision.pooled(state.pull, weights, round)
        mean = self.mean(state.mean, uploads.model, weights, pulls)
        if not learn:
            return state._replace(mean=mean), report
        evidence = uploads.evidence
        if self.evidence != "sent":
            around = state.mean if self.evidence == "old" else mean
            measure = vmap(self.precision.evidence, in_dims=(0, None))
            evidence = measure(uploads.model.theta, around.theta)
        pull, said = self.precision.update(state.pull, evidence, weights, round)
        return GaussianState(mean, pull), report | said

    def restarted(self, state: GaussianState, round: Round) -> GaussianState:
        return self.init(state.mean, round)

    def model(self, state: GaussianState) -> Model:
        return state.mean

    def client_weights(self, round: Round) -> Tensor | None:
        return self.weights.known(round)


# -- methods -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Received:
    """What ONE client was sent, as a prior on its whole model: private layers are its own and have none."""

    belief: Belief
    sent: Message
    split: Split | None  # None: all layers are shared
    own: Model  # a whole model, whose private layers are used

    @property
    def centre(self) -> Model:
        return self._whole(self.belief.centre(self.sent))

    @property
    def prior(self) -> Prior:
        prior = self.belief.prior(self.sent)
        if self.split is None:
            return prior
        assert isinstance(prior, Gaussian)  # others are refused where there are private layers
        theta = self.own.theta
        return Gaussian(self.split.lifted(prior.mean, theta),
                        self.split.lifted(prior.precision, torch.zeros_like(theta)))

    def tell(self, upload: Model, theta: Model, around: Tensor | None = None) -> Upload:
        """The upload: that of the shared layers."""
        if self.split is not None:
            upload, theta = self.split.of_shared(upload), self.split.of_shared(theta)
            around = None if around is None else self.split.of_shared(Model(around, self.own.stats)).theta
        return self.belief.tell(self.sent, upload, theta, around)

    def kept(self, w: Tensor, theta: Tensor) -> Tensor:
        """w with the private layers of theta: these are no one else's."""
        return w if self.split is None else self.split.shared.moved(theta, w)

    def chosen(self, task: Task, data: ClientData) -> Received:
        return replace(self, sent=self.belief.chosen(task, self.sent, data, self._whole))

    def _whole(self, model: Model) -> Model:
        return model if self.split is None else self.split.joined(model, self.own)


class PriorMethod(Algorithm):
    """A method whose server is a belief. It says which one, and what a client does (`local`). With a field
    `shared`, that belief is about the shared layers alone."""

    @property
    @abstractmethod
    def belief(self) -> Belief:
        """What the server believes, made of the method's fields."""

    def split(self, task: Task) -> Split | None:
        """Which layers are shared, and which are private; None: all are shared."""
        return split(task, getattr(self, "shared", "all"), self.name)

    def received(self, task: Task, message: Message, own: Model) -> Received:
        """ONE: what it was sent, with the private layers of its own model."""
        return Received(self.belief, message, self.split(task), own)

    def joining(self, task: Task, message: Message, data: ClientData) -> Received:
        """ONE: what a newcomer makes of what it was sent; its private layers are the initial ones."""
        return self.received(task, message, task.init()).chosen(task, data)

    def init_server(self, task: Task, model: Model, round: Round) -> Tree:
        parts = self.split(task)
        return self.belief.init(model if parts is None else parts.of_shared(model), round)

    def init_client(self, task: Task, model: Model) -> Tree:
        return model

    def broadcast(self, server: Tree, round: Round) -> Message:
        return self.belief.send(server, round)

    def newcomer(self, server: Tree, round: Round) -> Message:
        return self.belief.newcomer(server, round)

    def aggregate(self, server: Tree, uploads: Upload, round: Round) -> tuple[Tree, dict[str, Any]]:
        return self.belief.update(server, uploads, round)

    def personalize(self, task: Task, message: Message, state: Tree, data: ClientData) -> Tree:
        return state

    def adapt(self, task: Task, message: Message, data: ClientData) -> Tree:
        """A newcomer does the work of a round from the prior's centre."""
        received = self.joining(task, message, data)
        _, state = self.local(task, received.sent, self.init_client(task, received.centre), data)
        return self.personalize(task, received.sent, state, data)

    def global_model(self, server: Tree) -> Model | None:
        return self.belief.model(server) if getattr(self, "shared", "all") == "all" else None

    def client_weights(self, round: Round) -> Tensor | None:
        return self.belief.client_weights(round)


@dataclass(frozen=True)
class Tracked:
    """The mean of what all clients last told, by the changes c_i(new) - c_i(old) of a cohort:

        c <- c + lam mean_{i in S} change_i.

    Without a lam it is |S|/m, and c stays the mean over the whole population, whoever takes part.
    """

    lam: float | None = None

    def __call__(self, c: Tensor, changes: Tensor, round: Round) -> Tensor:
        share = len(round.cohort) / round.population if self.lam is None else self.lam
        return c + share * changes.mean(0)

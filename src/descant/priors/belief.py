"""What the server believes about the clients' models, as a value.

A belief is composed of small parts: how the mean follows from the uploads (`Average`, `Descend`) and what a
client counts (`Counted`, `Tempered`: `gaussian.py`), how strongly the prior pulls (`precision.py`), and
whether there is one belief for all or one per group (`grouping.py`). It has no state: its functions take the
server's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from descant.core.algorithm import (
    Algorithm,
    ClientData,
    Message,
    Round,
)
from descant.core.parts import Split, split
from descant.core.task import Task
from descant.core.tree import Tree, take
from descant.core.vector import Model
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

    @property
    def needs_rows(self) -> bool:
        """Whether `update` needs the uploads of all clients one by one."""
        return True

    def restarted(self, state: Tree, round: Round) -> Tree:
        """The same centre, with whatever else was learned as before the first round."""
        return state

    @abstractmethod
    def model(self, state: Tree) -> Model | None:
        """The one model for all, where there is one."""

    @abstractmethod
    def client_weights(self, round: Round) -> Tensor | None:
        """What each client counts, where that depends on no upload."""


class Summed(Belief):
    """A belief that may learn from a mean of what clients contribute, as in `Algorithm`, and from no more."""

    @abstractmethod
    def counts(self, sizes: Tensor) -> Tensor:
        """What clients with so many samples count in the mean, up to a common factor."""

    @abstractmethod
    def contribution(self, sent: Message, upload: Upload) -> Tree:
        """ONE: what the mean is of."""

    @abstractmethod
    def absorb(self, state: Tree, mean: Tree, round: Round) -> tuple[Tree, dict[str, Any]]:
        """The new state, and what to report, from the mean over the clients of `round`."""


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

    @property
    def needs_rows(self) -> bool:
        return super().needs_rows or self.belief.needs_rows or self._begins_with_a_client

    @property
    def _begins_with_a_client(self) -> bool:
        """Whether the first round only finds where the belief begins: at the model of a random client."""
        return getattr(self, "init", "model") == "client"

    @property
    def _summed(self) -> Summed:
        assert isinstance(self.belief, Summed)  # others need rows
        return self.belief

    def counts(self, sizes: Tensor) -> Tensor:
        return self._summed.counts(sizes)

    def contribution(self, message: Message, upload: Upload) -> Tree:
        return self._summed.contribution(message, upload)

    def absorb(self, server: Tree, mean: Tree, round: Round) -> tuple[Tree, dict[str, Any]]:
        return self._summed.absorb(server, mean, round)

    def aggregate(self, server: Tree, uploads: Upload, round: Round) -> tuple[Tree, dict[str, Any]]:
        if self._begins_with_a_client and round.number == 1:
            j = int(round.generator("initial client").integers(len(round.cohort)))
            return self.belief.init(take(uploads.model, j), round), {"initial client": int(round.cohort[j])}
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
    """The mean of what all clients last told, by the mean change c_i(new) - c_i(old) of a cohort:

        c <- c + lam mean_{i in S} change_i.

    Without a lam it is |S|/m, and c stays the mean over the whole population, whoever takes part.
    """

    lam: float | None = None

    def __call__(self, c: Tensor, change: Tensor, round: Round) -> Tensor:
        share = len(round.cohort) / round.population if self.lam is None else self.lam
        return c + share * change

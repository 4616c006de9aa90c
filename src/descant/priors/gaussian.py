"""A Gaussian belief and its parts: how the mean follows from the uploads, what a client counts, and what is
learned of the precision.

What it learns from is a mean over the clients (`Contribution`), unless weights or precision need to see them
one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.func import vmap

from descant.core.algorithm import Message, Round, Weights, at_most, contributions, counted, interpolate
from descant.core.sums import weighted_mean
from descant.core.tree import Tree, map_tree
from descant.core.vector import Model
from descant.priors.belief import Summed, Upload
from descant.priors.precision import Precision
from descant.priors.quadratic import Gaussian

COLDEST = 0.05  # a temperature below which a power of a number of samples may be too large for float64


@dataclass(frozen=True)
class Average:
    """mean <- (1 - beta) mean + beta sum_i p_i upload_i. Beta above 1 is aggregation momentum."""

    by_pull: ClassVar[bool] = False

    beta: float = 1.0

    def __call__(self, old: Model, mean: Model, precision: Tensor | float) -> Model:
        return interpolate(old, mean, self.beta)


@dataclass(frozen=True)
class Descend:
    """mean <- mean - gamma (sum_i p_i lam_i (mean - upload_i) + 2 ridge mean); without a gamma, the minimiser
    of sum_i p_i lam_i/2 ||upload_i - mean||^2 + ridge ||mean||^2."""

    by_pull: ClassVar[bool] = True

    gamma: float | None = None
    ridge: float = 0.0

    def __call__(self, old: Model, mean: Model, precision: Tensor | float) -> Model:
        if self.gamma is None:
            shrunk = mean.theta / (1 + 2 * self.ridge / precision) if self.ridge else mean.theta
            return Model(shrunk, mean.stats)
        gradient = precision * (old.theta - mean.theta) + 2 * self.ridge * old.theta
        return Model(old.theta - self.gamma * gradient, mean.stats)


@dataclass(frozen=True)
class Counted:
    """What a client counts: alike, or by its samples."""

    kind: Weights = "samples"

    @property
    def needs_rows(self) -> bool:
        return False

    def counts(self, sizes: Tensor) -> Tensor:
        return counted(sizes, self.kind)

    def __call__(self, uploads: Upload, round: Round) -> Tensor:
        return self.known(round)

    def known(self, round: Round) -> Tensor:
        return round.weights(self.kind)

    def report(self, weights: Tensor) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Tempered:
    """Weights to the power 1 / temperature (FedMAP), in float64: a softmax of logarithms, which neither over-
    nor underflows. "omega" takes the logarithms that the clients upload, "mean_log" these by sample."""

    kind: Weights | Literal["omega", "mean_log"] = "omega"
    temperature: float = 1.0

    @property
    def needs_rows(self) -> bool:
        """Weights that the clients tell need a common scale. So do powers that float64 may not hold."""
        return self.kind in ("omega", "mean_log") or self.temperature < COLDEST

    def counts(self, sizes: Tensor) -> Tensor:
        return self._logs(sizes).exp()

    def __call__(self, uploads: Upload, round: Round) -> Tensor:
        if (w := self.known(round)) is None:
            logs = uploads.log_weight.double() / (1 if self.kind == "omega" else round.sizes.double())
            w = torch.softmax(logs / self.temperature, 0)
            if (lowered := at_most(w, round.most)) is not w:
                w = lowered / lowered.sum()
        return w

    def known(self, round: Round) -> Tensor | None:
        return None if self.kind in ("omega", "mean_log") else torch.softmax(self._logs(round.sizes), 0)

    def _logs(self, sizes: Tensor) -> Tensor:
        N = sizes.double()
        return torch.zeros_like(N) if self.kind == "uniform" else N.log() / self.temperature

    def report(self, weights: Tensor) -> dict[str, Any]:
        if not len(weights):  # of a cohort that coins make, there may be nobody
            return {}
        return {"weights": {"most": weights.max(), "effective": 1 / weights.square().sum()},
                "client_weights": weights}


class MeanRule(Protocol):
    """How the mean of a belief follows from that of the uploads, whose priors have this precision."""

    by_pull: ClassVar[bool]  # whether an upload counts in the mean by the precision of its prior besides

    def __call__(self, old: Model, mean: Model, precision: Tensor | float) -> Model: ...


class Weighting(Protocol):
    """What each client of a round counts in the mean."""

    @property
    def needs_rows(self) -> bool:
        """Whether that depends on the uploads of all."""

    def counts(self, sizes: Tensor) -> Tensor:
        """What clients with so many samples count, up to a common factor, where it does not."""

    def __call__(self, uploads: Upload, round: Round) -> Tensor:
        """The weights, which sum to one."""

    def known(self, round: Round) -> Tensor | None:
        """The weights, where they depend on no upload."""

    def report(self, weights: Tensor) -> dict[str, Any]:
        """What to report of them."""


class Spread(NamedTuple):
    """How far ONE client's model lies from the server's old mean, to measure from the new one: float64."""

    evidence: Tree
    shift: Tensor  # [d]


class Contribution(NamedTuple):
    """What a Gaussian belief learns from of ONE client."""

    model: Model  # times the pull, if there is one
    pull: Tree  # [] the client's own precision, where its upload counts by that
    evidence: Tree  # or a Spread; () where the rule needs rows


class GaussianState(NamedTuple):
    """The state of the server, and (with what the rule sends in place of its state) the message."""

    mean: Model
    pull: Tree  # of the rule for the precision


@dataclass(frozen=True)
class GaussianBelief(Summed):
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

    @property
    def needs_rows(self) -> bool:
        return self.weights.needs_rows or self.precision.needs_rows

    def counts(self, sizes: Tensor) -> Tensor:
        return self.weights.counts(sizes)

    def contribution(self, sent: Message, upload: Upload) -> Contribution:
        model, pull = upload.model, sent.each if self.mean.by_pull else ()
        if isinstance(pull, Tensor):
            model = map_tree(lambda own: pull * own, model)
        return Contribution(model, pull, () if self.precision.needs_rows else self._evidence(sent, upload))

    def _evidence(self, sent: Message, upload: Upload) -> Tree:
        """ONE: the evidence, or what it follows from when the new mean is known."""
        theta, old = upload.model.theta, self.centre(sent).theta
        if self.evidence != "new":
            return upload.evidence if self.evidence == "sent" else self.precision.evidence(theta, old)
        found = self.precision.evidence(theta.double(), old.double())
        return Spread(found, theta.double() - old.double()) if isinstance(found, Tensor) else ()

    def absorb(self, state: GaussianState, mean: Contribution, round: Round
               ) -> tuple[GaussianState, dict[str, Any]]:
        weights = self.weights.known(round)
        assert weights is not None  # else it needs rows
        return self._learned(state, self._moved(state, mean, round), mean.evidence, weights, round)

    def update(self, state: GaussianState, uploads: Upload, round: Round, learn: bool = True
               ) -> tuple[GaussianState, dict[str, Any]]:
        weights = self.weights(uploads, round)
        each = contributions(self.contribution, self.send(state, round), uploads)
        counts = weights if self.weights.needs_rows else self.counts(round.sizes)
        told: Contribution = weighted_mean(each, counts)
        mean = self._moved(state, told, round)
        if not learn:
            return state._replace(mean=mean), self.weights.report(weights)
        evidence = told.evidence
        if self.precision.needs_rows:
            around = state.mean if self.evidence == "old" else mean
            measure = vmap(self.precision.evidence, in_dims=(0, None))
            evidence = (uploads.evidence if self.evidence == "sent"
                        else measure(uploads.model.theta, around.theta))
        return self._learned(state, mean, evidence, weights, round)

    def _moved(self, state: GaussianState, told: Contribution, round: Round) -> Model:
        """The new mean."""
        if isinstance(told.pull, Tensor):
            return self.mean(state.mean, map_tree(lambda own: own / told.pull, told.model), told.pull)
        precision = self.precision.value(self.precision.send(state.pull, round)) if self.mean.by_pull else 0.0
        return self.mean(state.mean, told.model, precision)

    def _learned(self, state: GaussianState, mean: Model, evidence: Tree, weights: Tensor, round: Round
                 ) -> tuple[GaussianState, dict[str, Any]]:
        """The state with the new mean, and with what the rule learns from the evidence."""
        if isinstance(evidence, Spread):
            gap = mean.theta.double() - state.mean.theta.double()
            evidence = self.precision.recentred(evidence.evidence, evidence.shift, gap)
        pull, said = self.precision.update(state.pull, evidence, round)
        return GaussianState(mean, pull), self.weights.report(weights) | said

    def restarted(self, state: GaussianState, round: Round) -> GaussianState:
        return self.init(state.mean, round)

    def model(self, state: GaussianState) -> Model:
        return state.mean

    def client_weights(self, round: Round) -> Tensor | None:
        return self.weights.known(round)

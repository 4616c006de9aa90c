"""What the server believes about the clients' models: a Gaussian prior whose precision follows a rule.

`precision.py` has the rules.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from descant.core.algorithm import Algorithm, Message, Round, Weights, average, toward
from descant.core.task import Task
from descant.core.tree import Tree
from descant.core.vector import Model
from descant.priors.precision import Lam, Precision, Sent, as_rule
from descant.priors.prior import Gaussian


class Belief(NamedTuple):
    """The state of the server, and (with what the rule sends in place of its state) the message."""

    mean: Model
    pull: Tree  # of the rule for the precision


class Told(NamedTuple):
    """An upload: a model, and what the rule for the precision asks for."""

    model: Model
    evidence: Tree


class SharedPrior(Algorithm):
    """The server of methods whose clients have one Gaussian prior, around the average of their uploads:

        mean <- (1 - beta) mean + beta sum_{i in S} p_i upload_i,   the precision by its rule.

    A method of this kind has the fields `lam` (or its own name for it: see `rule`), `beta` and `weights`.
    """

    lam: Lam
    beta: float
    weights: Weights

    @property
    def rule(self) -> Precision:
        """What the precision of the prior follows."""
        return as_rule(self.lam)

    def init_server(self, task: Task, model: Model, round: Round) -> Belief:
        return Belief(model, self.rule.init(model.theta, round))

    def broadcast(self, server: Belief, round: Round) -> Message:
        shared, each = self.rule.send(server.pull, round)
        return Message(Belief(server.mean, shared), each)

    def newcomer(self, server: Belief, round: Round) -> Message:
        return Message(Belief(server.mean, self.rule.newcomer(server.pull).shared))

    def prior(self, message: Message) -> Gaussian:
        """The prior that ONE client was sent."""
        belief: Belief = message.shared
        return Gaussian(belief.mean.theta, self.rule.value(Sent(belief.pull, message.each)))

    def told(self, model: Model, theta: Model, message: Message) -> Told:
        """The upload of ONE client: a model for the average, and how far its own theta lies from the mean."""
        return Told(model, self.rule.evidence(theta.theta, message.shared.mean.theta))

    def aggregate(self, server: Belief, uploads: Told, round: Round) -> tuple[Belief, dict[str, Any]]:
        weights = round.weights(self.weights)
        pull, report = self.rule.update(server.pull, uploads.evidence, weights, round)
        return Belief(toward(server.mean, average(uploads.model, weights), self.beta), pull), report

    def global_model(self, server: Belief) -> Model:
        return server.mean

"""One-stage FedProx: local and global models of FedProx's objective, learned together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from descant.core.algorithm import ClientData, LocalStep, Message, Round, Weights, average
from descant.core.fields import hyper
from descant.core.ranges import Log, Step
from descant.core.task import Batch, Task
from descant.core.vector import Model
from descant.errors import UsageError
from descant.priors.belief import Belief, SharedPrior, Told
from descant.priors.precision import Lam, inner_step, strongest, unstable
from descant.priors.prior import Gaussian
from descant.priors.solve import SGD, settle
from descant.theory.moreau import corollary_steps


class Schedule(NamedTuple):
    eta: float
    gamma: float | None
    K: int


@dataclass(frozen=True)
class OneStageFedProx(SharedPrior):
    """Minimises sum_i p_i (L_i(w_i) + lam/2 ||w_i - w_g||^2) over w_g and all w_i (Algorithm 1).

    Client, from its own w_i of the last time, K times for each batch:
        w_i <- w_i - eta (grad L_i(w_i) + lam (w_i - w_g)).
    Server:  w_g <- w_g - gamma lam (w_g - sum_{i in S} p_i w_i).

    The client predicts with w_i; one that is absent keeps it. The paper's form with full gradients is
    batch = "full", one local step and K; its form with minibatches is K = 1 and some epochs. Without a gamma
    it is 1 / lam, as in the paper's experiments on real data: then w_g is the mean of the w_i. With
    steps = "theory", eta, gamma and K are those of Corollary 1 for the L and mu that are given. With a
    weight_decay, L_i(w) has weight_decay/2 ||w||^2 besides, and L and mu are those with it.

    lam may differ from client to client (objective 18, which the paper leaves open) or follow a rule. The
    server's step is then w_g <- w_g - gamma sum_i p_i lam_i (w_g - w_i), and without a gamma w_g goes to the
    minimiser sum_i p_i lam_i w_i / sum_i p_i lam_i.

    The authors' experiments state gamma = 1 / L_g = (lam + L) / (lam L) on synthetic data, which Theorem 2
    excludes, and their code does not reach: it takes the mean over all clients, also over those not sampled.
    Here the server averages the clients that took part. A newcomer does the work of one round from w_g.
    """

    name: ClassVar[str] = "one_stage_fedprox"
    citation: ClassVar[str] = (
        "Yu, He, Sun, Xue, Li: The Effect of Personalization in FedProx: A Fine-grained Analysis on "
        "Statistical Accuracy and Communication Efficiency. 2024, arXiv:2410.08934"
    )

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {"eta": 0.01}}

    lam: Lam = hyper(0.1, "strength of the pull of the local models to the global one", gt=0,
                     search=Log(0.01, 10.0))
    steps: Literal["given", "theory"] = hyper("given", "eta, gamma and K: as given, or those of Corollary 1")
    eta: float | None = hyper(
        None, "step size of the local models; absent: 1 / (lam + L), L = 20 where it is not given", gt=0,
        search=Step(0.001, 1.0), derived=lambda self: None if self.steps == "theory" else inner_step(
            self.lam, self.L))
    gamma: float | None = hyper(None, "step size of the global model; absent: 1 / lam", gt=0)
    K: int = hyper(1, "gradient steps for each batch", ge=1)
    L: float | None = hyper(None, "smoothness of the clients' losses, where it is known", gt=0)
    mu: float | None = hyper(None, "their strong convexity, where it is known", gt=0)
    weights: Weights = hyper("uniform", "what a client counts in the average")
    weight_decay: float = hyper(0.0, "strength of the pull to zero", ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.L is not None and self.mu is not None and self.mu > self.L:
            raise UsageError(f"{self.name}: mu = {self.mu:g} is greater than L = {self.L:g}; no loss is more "
                             "strongly convex than it is smooth")
        if self.steps == "theory":
            if self.L is None or self.mu is None:
                raise UsageError(f'{self.name}: steps = "theory" needs L and mu')
            if not isinstance(self.lam, float):
                raise UsageError(f'{self.name}: steps = "theory" needs one number for lam; where it differs '
                                 "or changes, give eta, gamma and K")
            if given := [field.name for field in dataclasses.fields(self)
                         if field.name in Schedule._fields and getattr(self, field.name) != field.default]:
                raise UsageError(f'{self.name}: steps = "theory" takes eta, gamma and K from Corollary 1: '
                                 f'leave out {", ".join(given)}, or use steps = "given"')

    def schedule(self) -> Schedule:
        """The steps that are taken."""
        if self.steps == "theory":
            assert isinstance(self.lam, float) and self.L is not None and self.mu is not None
            return Schedule(*corollary_steps(self.lam, self.L, self.mu))
        assert self.eta is not None  # derived, if it was not given
        return Schedule(self.eta, self.gamma, self.K)

    def local_step(self) -> LocalStep:
        return LocalStep("eta", strongest(self.lam))

    def cautions(self) -> list[str]:
        lam = strongest(self.lam)
        if self.steps == "theory" or self.L is None:
            return unstable("eta", self.eta, self.lam) if self.steps == "given" else []
        L, cautions = self.L, []
        assert self.eta is not None
        if self.eta * (L + lam) >= 2:
            cautions.append(f"eta = {self.eta:g} with lam = {lam:g} and L = {L:g}: the local steps diverge; "
                            f"they need eta < 2 / (L + lam) = {2 / (L + lam):g}")
        if not isinstance(self.lam, float):
            return cautions
        bound = 1 / lam + 1 / L
        if self.gamma is not None and self.gamma >= bound:
            cautions.append(f"gamma = {self.gamma:g} with lam = {lam:g} and L = {L:g}: the global model need "
                            f"not converge; Theorem 2 needs gamma < 1 / L_g = {bound:g}")
        if self.mu is not None and (enough := corollary_steps(lam, L, self.mu).K) > self.K:
            cautions.append(f"K = {self.K} with lam = {lam:g}, L = {L:g} and mu = {self.mu:g}: for the rate "
                            f"of Theorem 2, K times the local steps of a round must be at least {enough}, "
                            "on full batches")
        return cautions

    def init_client(self, task: Task, model: Model) -> Model:
        return model

    def local(self, task: Task, message: Message, state: Model, data: ClientData) -> tuple[Told, Model]:
        w_i = self._descended(task, state, self.prior(message), data)
        return self.told(w_i, w_i, message), w_i

    def _descended(self, task: Task, w_i: Model, prior: Gaussian, data: ClientData) -> Model:
        eta, _, K = self.schedule()
        solver = SGD(lr=eta, weight_decay=self.weight_decay)

        def steps(w_i: Model, batch: Batch) -> Model:
            return settle(task, w_i, batch, solver, prior, K)

        w_i = data.scan(steps, w_i)
        return w_i

    def aggregate(self, server: Belief, uploads: Told, round: Round) -> tuple[Belief, dict[str, Any]]:
        weights = round.weights(self.weights)
        pulls = self.rule.pooled(server.pull, weights, round)
        w_g = average(uploads.model, pulls.weights)
        if (gamma := self.schedule().gamma) is not None:
            step = gamma * pulls.precision * (server.mean.theta - w_g.theta)
            w_g = Model(server.mean.theta - step, w_g.stats)
        pull, report = self.rule.update(server.pull, uploads.evidence, weights, round)
        return Belief(w_g, pull), report

    def personalize(self, task: Task, message: Message, state: Model, data: ClientData) -> Model:
        return state

    def adapt(self, task: Task, message: Message, data: ClientData) -> Model:
        return self._descended(task, message.shared.mean, self.prior(message), data)

"""One-stage FedProx: local and global models of FedProx's objective, learned together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from descant.core.algorithm import ClientData, LocalStep, Message, Weights
from descant.core.fields import hyper
from descant.core.ranges import Log, Step
from descant.core.task import Batch, Task
from descant.core.vector import Model
from descant.errors import UsageError
from descant.priors.belief import Belief, PriorMethod, Upload
from descant.priors.gaussian import Counted, Descend, GaussianBelief
from descant.priors.grouping import KMeans, grouped
from descant.priors.precision import Lam, as_rule, inner_step, strongest, unstable
from descant.priors.solve import SGD, inner_solve, solve
from descant.theory.moreau import corollary_steps


class Schedule(NamedTuple):
    eta: float
    gamma: float | None
    K: int


@dataclass(frozen=True)
class OneStageFedProx(PriorMethod):
    """Minimises sum_i p_i (L_i(w_i) + lam/2 ||w_i - w_g||^2) over w_g and all w_i (Algorithm 1).

    Client, from its own w_i of the last time, K times for each batch:
        w_i <- w_i - eta (grad L_i(w_i) + lam (w_i - w_g)).
    Server:  w_g <- w_g - gamma lam (w_g - sum_{i in S} p_i w_i).

    Without a gamma it is 1 / lam, and w_g the mean of the w_i. steps = "theory" takes eta, gamma and K of
    Corollary 1 for the given L and mu. With a weight_decay, L and mu are those of the losses with it. Where
    lam differs or follows a rule, w_g <- w_g - gamma sum_i p_i lam_i (w_g - w_i), and without a gamma the
    minimiser sum_i p_i lam_i w_i / sum_i p_i lam_i. More in docs/methods/one_stage_fedprox.md.
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
    groups: KMeans | None = hyper(None, "a server model for each cluster of clients; absent: one for all")

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

    @property
    def belief(self) -> Belief:
        prior = GaussianBelief(as_rule(self.lam), Descend(self.schedule().gamma), Counted(self.weights))
        return grouped(prior, self.groups, self.name)

    def local(self, task: Task, message: Message, state: Model, data: ClientData) -> tuple[Upload, Model]:
        eta, _, K = self.schedule()
        solver, prior = SGD(lr=eta, weight_decay=self.weight_decay), self.belief.prior(message)

        def steps(w_i: Model, batch: Batch) -> Model:
            return inner_solve(task, w_i, batch, solver, prior, K)

        w_i = solve(task, state, data, solver, prior) if K == 1 else data.scan(steps, state)
        return self.belief.tell(message, w_i, w_i), w_i

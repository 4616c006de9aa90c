"""pFedMe: personalized federated learning with Moreau envelopes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from descant.core.algorithm import ClientData, LocalStep, Message, Weights
from descant.core.fields import hyper
from descant.core.parts import Shared
from descant.core.ranges import Log, Step
from descant.core.task import Batch, Task
from descant.core.vector import Model
from descant.priors.belief import Belief, PriorMethod, Received, Upload
from descant.priors.gaussian import Average, Counted, GaussianBelief
from descant.priors.grouping import KMeans, grouped
from descant.priors.precision import Lam, as_rule, inner_step, outer_step, overshooting, strongest, unstable
from descant.priors.quadratic import Gaussian
from descant.priors.solve import SGD, finetuned, inner_solve


class Carry(NamedTuple):
    w: Model
    theta: Model


@dataclass(frozen=True)
class pFedMe(PriorMethod):
    """The server minimises the average of the clients' Moreau envelopes.

    Client, from w_i = w, for each batch (the R local rounds of the paper):
        theta ~ argmin f_i(theta; batch) + lam/2 ||theta - w_i||^2   by K gradient steps of size alpha;
        w_i <- w_i - eta lam (w_i - theta).
    Server:  w <- (1 - beta) w + beta sum_{i in S} p_i w_i.

    The client predicts with theta (the authors' code scores w_i by mistake). `start` says where the
    K steps of a batch begin: at the theta of the batch before ("theta", as the authors' code does;
    the first batch of a round begins at w), or at the present w_i ("w"). A newcomer does the work of
    one round from the server's w. The preset "paper" has the step sizes of the authors' code.
    """

    name: ClassVar[str] = "pfedme"
    citation: ClassVar[str] = (
        "Dinh, Tran, Nguyen: Personalized Federated Learning with Moreau Envelopes. "
        "NeurIPS 2020, arXiv:2006.08848"
    )

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {"lam": 15.0, "eta": 0.005, "alpha": 0.09}}

    lam: Lam = hyper(15.0, "strength of the pull of theta to w", ge=0, search=Log(1.0, 100.0))
    eta: float = hyper(None, "step size of w; absent: 3/4 of the way to theta, 0.75 / lam", gt=0,
                       search=Step(0.001, 0.1), derived=lambda self: outer_step(self.lam))
    alpha: float = hyper(None, "step size of theta; absent: 1 / (lam + 20)", gt=0, search=Step(0.001, 0.3),
                         derived=lambda self: inner_step(self.lam))
    K: int = hyper(5, "gradient steps on theta for each batch", ge=1)
    beta: float = hyper(1.0, "aggregation step; above 1 it is momentum", gt=0)
    weights: Weights = hyper("samples", "what a client counts in the average")
    start: Literal["theta", "w"] = hyper("theta", "where the steps on theta begin for each batch")
    weight_decay: float = hyper(0.0, "strength of the pull of theta to zero", ge=0)
    groups: KMeans | None = hyper(None, "a server model for each cluster of clients; absent: one for all")
    shared: Shared = hyper("all", "the layers that have a prior; the others are private")
    finetune: int = hyper(0, "steps on the loss alone before a client predicts (FT: 1)", ge=0)

    def local_step(self) -> LocalStep:
        return LocalStep("alpha", strongest(self.lam))

    def cautions(self) -> list[str]:
        return unstable("alpha", self.alpha, self.lam) + overshooting("eta", self.eta, self.lam)

    @property
    def belief(self) -> Belief:
        prior = GaussianBelief(as_rule(self.lam), Average(self.beta), Counted(self.weights))
        return grouped(prior, self.groups, self.name)

    def forgets(self) -> bool:
        return self.shared == "all"

    def local(self, task: Task, message: Message, state: Model, data: ClientData) -> tuple[Upload, Model]:
        received = self.received(task, message, state)
        w, theta = moreau_rounds(task, received, data, self._solver, eta=self.eta, K=self.K, start=self.start)
        return received.tell(w, theta), theta

    def personalize(self, task: Task, message: Message, state: Model, data: ClientData) -> Model:
        return finetuned(task, state, data, self._solver, self.finetune)

    @property
    def _solver(self) -> SGD:
        return SGD(lr=self.alpha, weight_decay=self.weight_decay)


def moreau_rounds(task: Task, received: Received, data: ClientData, solver: SGD, *, eta: Tensor | float,
                  K: int, start: Literal["theta", "w"] = "theta") -> Carry:
    """The R local rounds of ONE client from the centre of its prior: its w_i, and its theta."""
    w, prior = received.centre, received.prior
    assert isinstance(prior, Gaussian)
    lam = prior.precision

    def local_round(carry: Carry, batch: Batch) -> Carry:
        w, theta = carry
        if start == "w":
            theta = Model(w.theta, theta.stats)
        theta = inner_solve(task, theta, batch, solver, Gaussian(w.theta, lam), K)
        moved = torch.lerp(w.theta, theta.theta, eta * lam)  # w - eta lam (w - theta), in one pass
        # the statistics of w are those of the theta that has seen the data
        return Carry(Model(received.kept(moved, theta.theta), theta.stats), theta)

    carry: Carry = data.scan(local_round, Carry(w, w))
    return carry

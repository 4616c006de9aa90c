"""pFedMe: personalized federated learning with Moreau envelopes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from descant.core.algorithm import ClientData, LocalStep, Message, Weights
from descant.core.fields import hyper
from descant.core.ranges import Log, Step
from descant.core.task import Batch, Task
from descant.core.vector import Model
from descant.priors.belief import SharedPrior, Told
from descant.priors.precision import Lam, inner_step, outer_step, overshooting, strongest, unstable
from descant.priors.prior import Gaussian
from descant.priors.solve import SGD, settle


class Carry(NamedTuple):
    w: Model
    theta: Model


@dataclass(frozen=True)
class pFedMe(SharedPrior):
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

    def local_step(self) -> LocalStep:
        return LocalStep("alpha", strongest(self.lam))

    def cautions(self) -> list[str]:
        return unstable("alpha", self.alpha, self.lam) + overshooting("eta", self.eta, self.lam)

    def init_client(self, task: Task, model: Model) -> Model:
        return model

    def local(self, task: Task, message: Message, state: Model, data: ClientData) -> tuple[Told, Model]:
        w, theta = moreau_rounds(task, message.shared.mean, self.prior(message).precision, data, eta=self.eta,
                                 alpha=self.alpha, K=self.K, start=self.start)
        return self.told(w, theta, message), theta

    def personalize(self, task: Task, message: Message, state: Model, data: ClientData) -> Model:
        return state

    def adapt(self, task: Task, message: Message, data: ClientData) -> Model:
        _, theta = self.local(task, message, message.shared.mean, data)
        return theta


def moreau_rounds(task: Task, w: Model, lam: Tensor | float, data: ClientData, *, eta: Tensor | float,
                  alpha: float, K: int, start: Literal["theta", "w"]) -> Carry:
    """The R local rounds of ONE client from w: its w_i, and its theta."""
    solver = SGD(lr=alpha)

    def local_round(carry: Carry, batch: Batch) -> Carry:
        w, theta = carry
        if start == "w":
            theta = Model(w.theta, theta.stats)
        theta = settle(task, theta, batch, solver, Gaussian(w.theta, lam), K)
        step = eta * lam * (w.theta - theta.theta)
        # the statistics of w are those of the theta that has seen the data
        return Carry(Model(w.theta - step, theta.stats), theta)

    carry: Carry = data.scan(local_round, Carry(w, w))
    return carry

"""CGPFL and CGPFL-Heur: personalized federated learning with clustered generalization."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from descant.algorithms.pfedme import moreau_rounds
from descant.core.algorithm import ClientData, LocalStep, Message, Round
from descant.core.fields import hyper
from descant.core.ranges import Log, Step, Whole
from descant.core.task import Task
from descant.core.tree import Tree
from descant.core.vector import Model
from descant.priors.belief import Belief, PriorMethod, Upload
from descant.priors.gaussian import Average, Counted, GaussianBelief
from descant.priors.grouping import Grouped, Groups, KMeans
from descant.priors.precision import Lam, as_rule, inner_step, outer_step, overshooting, strongest, unstable
from descant.priors.quadratic import Gaussian
from descant.priors.solve import SGD


@dataclass(frozen=True)
class CGPFL(PriorMethod):
    """K models on the server, each the pFedMe model of a cluster of clients that k-means finds.

    Client, from w_i = w_k of its cluster, for each batch (the R local rounds of the paper):
        theta ~ argmin f_i(theta; batch) + lam/2 ||theta - w_i||^2   by S gradient steps of size eta;
        w_i <- w_i - beta lam (w_i - theta).
    Server:  C_1 ... C_K <- k-means of the uploaded w_i;
             w_k <- (1 - alpha) w_k + alpha mean_{i in C_k} w_i,   an empty cluster keeps its w_k.

    theta is what a client predicts with, and never leaves it. With K = 1 this is pFedMe. K = "auto" is
    CGPFL-Heur: the round `k_rounds` takes the K <= K_max with the least bound
        e(K) = sqrt(d K / m  max(ln(e m / d), 0)) + mu sum_i (m_i / m) ||w_i - w_{k(i)}||^2          (12).

    Traps: mu is in effect a knob for K, and its scale that of the first uploads (the report `choice` says
    which K every mu would choose). The printed step of w_i is beta (2/N) (w_i - theta), which trains nothing:
    outer = "printed" takes it. Absent and late clients: see `Grouped`. More in docs/methods/cgpfl.md.
    """

    name: ClassVar[str] = "cgpfl"
    citation: ClassVar[str] = (
        "Tang, Guo, Guo: Personalized Federated Learning With Contextualized Generalization. "
        "IJCAI 2022, arXiv:2106.13044"
    )

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"lam": 12.0, "eta": 0.09, "beta": 0.005, "mu": 200.0}}

    K: int | Literal["auto"] = hyper(4, 'clusters; "auto": by the least bound (CGPFL-Heur)',
                                     ge=1, search=Whole(1, 10))
    lam: Lam = hyper(12.0, "strength of the pull of theta to w", gt=0, search=Log(1.0, 100.0))
    eta: float = hyper(None, "step size of theta; absent: 1 / (lam + 20)", gt=0, search=Step(0.001, 0.3),
                       derived=lambda self: inner_step(self.lam))
    beta: float = hyper(None, "step size of w; absent: 3/4 of the way to theta, 0.75 / lam (printed: 0.005)",
                        gt=0, search=Step(0.001, 0.1),
                        derived=lambda self: outer_step(self.lam) if self.outer == "pfedme" else 0.005)
    alpha: float = hyper(1.0, "aggregation step; above 1 it is momentum", gt=0)
    S: int = hyper(5, "gradient steps on theta for each batch", ge=1)
    outer: Literal["pfedme", "printed"] = hyper("pfedme", "step of w: beta lam, or the printed 2 beta / N")
    starts: int = hyper(10, "k-means++ starts", ge=1)
    k_rounds: int = hyper(1, "the round that makes the clusters; one model for all before", ge=1)
    mu: float = hyper(5.0, 'weight of the cost in the bound, for K = "auto"', ge=0)
    K_max: int = hyper(20, 'largest K that "auto" tries', ge=1)
    weight_decay: float = hyper(0.0, "strength of the pull of theta to zero", ge=0)

    def local_step(self) -> LocalStep:
        return LocalStep("eta", strongest(self.lam))

    def cautions(self) -> list[str]:
        overshoots = overshooting("beta", self.beta, self.lam) if self.outer == "pfedme" else []
        return unstable("eta", self.eta, self.lam) + overshoots

    @property
    def belief(self) -> Belief:
        how = KMeans(self.K, self.starts, self.k_rounds, self.mu, self.K_max)
        prior = GaussianBelief(as_rule(self.lam), Average(self.alpha), Counted("uniform"))
        return Grouped(prior, how, f"{self.name}.K")

    def broadcast(self, server: Groups, round: Round) -> Message:
        return Message(self._printed(server, round), super().broadcast(server, round).each)

    def newcomer(self, server: Groups, round: Round) -> Message:
        return Message((super().newcomer(server, round).shared, self._printed(server, round)))

    def _printed(self, server: Groups, round: Round) -> Tree:
        """2 / N, where the printed step is taken."""
        return () if self.outer == "pfedme" else server.centres.new_tensor(2 / round.population)

    def forgets(self) -> bool:
        return True

    def local(self, task: Task, message: Message, state: Model, data: ClientData) -> tuple[Upload, Model]:
        received = self.received(task, message, state)
        prior = received.prior
        assert isinstance(prior, Gaussian)
        # the step on w is pFedMe's eta lam: divided by lam, so that the printed one is without it
        eta = self.beta if self.outer == "pfedme" else self.beta * message.shared / prior.precision
        w, theta = moreau_rounds(task, received, data, SGD(lr=self.eta, weight_decay=self.weight_decay),
                                 eta=eta, K=self.S)
        return received.tell(w, theta), theta

    def adapt(self, task: Task, message: Message, data: ClientData) -> Model:
        sent, printed = message.shared
        own = self.belief.chosen(task, Message(sent), data)
        _, theta = self.local(task, Message(printed, own.each), self.belief.centre(own), data)
        return theta

"""pFedBreD: a personalized prior from the exponential family for every client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from descant.core.algorithm import ClientData, LocalStep, Message, Round, Weights
from descant.core.fields import hyper
from descant.core.parts import Shared
from descant.core.ranges import Log, Step
from descant.core.task import Batch, Task
from descant.core.tree import Tree
from descant.core.vector import Model
from descant.priors.belief import Belief, PriorMethod, Received, Upload
from descant.priors.bregman import Family, Mirror, SphericalGaussian, require_fit
from descant.priors.gaussian import Counted, GaussianBelief
from descant.priors.grouping import KMeans, grouped
from descant.priors.personal_mean import Loss, Projected, Strategy, place_of, potential, strategy
from descant.priors.precision import (
    Lam,
    LearnedVariance,
    as_rule,
    inner_step,
    outer_step,
    overshooting,
    strongest,
    unstable,
)
from descant.priors.quadratic import Gaussian
from descant.priors.solve import SGD, finetuned, inner_solve, less


class Own(NamedTuple):  # the state of a client
    theta: Model
    memory: Tree  # [d] w_{i,R} of its last participation; () for strategies that look at none


class Carry(NamedTuple):
    w: Model
    theta: Model
    begin: Model  # where the next steps on theta begin
    mu: Tensor  # [d] the mean of the prior that theta was found with


@dataclass(frozen=True)
class pFedBreD(PriorMethod):
    """The server minimises the average of the clients' Bregman-Moreau envelopes, each around its own mean.

    Client, from w_i = w, for each batch (the R local rounds of the paper):
        mu    = w_i - eta_a grad f_i(w_i) - eta (w_{i,R} - theta)    the prior's mean (`Strategy`, Eq. 14);
        theta ~ argmin f_i(theta; batch) + lam D_{g*}(theta, mu)     by K steps of size a, in grad g*(theta);
        w_i  <- w_i - a_m lam Dmu(w_i)' Hess g*(mu) (mu - theta)     a step down the envelope (Eq. 13).
    Server:  w <- (1 - beta) w + beta sum_{i in S} p_i w_i.

    w_{i,R} is the client's own w_i at the end of the last round in which it took part. Order "first" puts I
    for Dmu and the Hessian (a Gaussian keeps its constant Sigma^-1). mu and w are projected to the domain.
    Traps: mh_code is what the authors' code calls mh (with start = "w"); it takes two batches a local round.
    A learned variance is the prior's: evidence is measured from mu. More in docs/methods/pfedbred.md.
    """

    name: ClassVar[str] = "pfedbred"
    citation: ClassVar[str] = ("Shi, Zhou, Wang, Zhang, Huang, Ye, Lv: PRIOR: Personalized Prior for "
        "Reactivating the Information Overlooked in Federated Learning. NeurIPS 2023, arXiv:2310.09183")
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {"lam": 15.0, "a_m": 0.01, "a": 0.01}}

    lam: Lam = hyper(15.0, "strength of the pull of theta to mu", ge=0, search=Log(1.0, 100.0))
    eta: float = hyper(0.05, "step of mu along the memorised envelope gradient", ge=0, search=Log(0.001, 1.0))
    eta_a: float = hyper(0.01, "step of mu along the loss gradient", ge=0)
    a_m: float = hyper(None, "step size of w; absent: 3/4 of the way to theta, 0.75 / lam", gt=0,
                       search=Step(0.001, 0.1), derived=lambda self: outer_step(self._pull))
    a: float = hyper(None, "step size of theta; absent: 1 / (lam + 20)", gt=0, search=Step(0.001, 0.3),
                     derived=lambda self: inner_step(self.lam))
    K: int = hyper(5, "steps on theta for each batch", ge=1)
    beta: float = hyper(1.0, "aggregation step; above 1 it is momentum (AM: 2)", gt=0)
    weights: Weights = hyper("samples", "what a client counts in the average")
    strategy: Literal["identity", "lg", "meg", "mh", "mh_nested", "mh_code", "own"] = hyper(
        "mh", "how the mean of the prior is made; own: w - eta grad phi(w)")
    family: Family = hyper(SphericalGaussian(), "the family of the prior")
    start: Literal["last", "theta", "w", "mu"] = hyper("last", "where the steps on theta begin")
    order: Literal["first", "exact"] = hyper("first", "whether the step of w has the second derivatives")
    finetune: int = hyper(0, "steps on the loss alone before a client predicts (FT: 1)", ge=0)
    weight_decay: float = hyper(0.0, "strength of the pull of theta to zero", ge=0)
    groups: KMeans | None = hyper(None, "a server model for each cluster of clients; absent: one for all")
    shared: Shared = hyper("all", "the layers that have a prior; the others are private")
    phi: str | Callable[..., Any] | None = hyper(
        None, 'Phi of the strategy "own": a function, or "package.module:function", of (f, w, theta, memory)')
    eta_inner: float = hyper(None, "step to where nested strategies take the loss gradient; absent: eta_a",
                             ge=0, derived=lambda self: self.eta_a)

    def __post_init__(self) -> None:
        object.__setattr__(self, "phi", place_of(self.phi, self.strategy == "own"))
        super().__post_init__()
        require_fit(self.family, self.lam, self.name)

    def local_step(self) -> LocalStep:
        return LocalStep("a", strongest(self.lam))

    def cautions(self) -> list[str]:
        found = unstable("a", self.a, self.lam)  # in the dual variable the pull is lam in every family
        pull = "lam" if isinstance(self.family, SphericalGaussian) else "lam / Sigma"
        return found + (overshooting("a_m", self.a_m, self._pull, pull) if self.family.is_gaussian else [])

    @property
    def _pull(self) -> float:
        """The most by which w is pulled to theta: lam Sigma^-1 of a Gaussian."""
        return strongest(self.lam) * self.family.sharpest()

    @property
    def belief(self) -> Belief:
        prior = GaussianBelief(as_rule(self.lam), Projected(self.family, self.beta), Counted(self.weights))
        return grouped(prior, self.groups, self.name)

    @property
    def _means(self) -> Strategy:
        made = strategy(self.strategy, self.family, self.eta, self.eta_a, self.eta_inner)
        return made._replace(phi=potential(self.phi)) if isinstance(self.phi, str) else made

    def batches_per_step(self) -> int:
        return 2 if self._means.moves else 1

    def init_server(self, task: Task, model: Model, round: Round) -> Tree:
        self.family.require(model.theta)
        return super().init_server(task, Model(self.family.project(model.theta), model.stats), round)

    def init_client(self, task: Task, model: Model) -> Own:
        theta = self.family.project(model.theta)
        return Own(Model(theta, model.stats), theta if self._means.remembers else ())

    def forgets(self) -> bool:
        return self.shared == "all" and not self._means.remembers and self.start != "last"

    def local(self, task: Task, message: Message, state: Own, data: ClientData) -> tuple[Upload, Own]:
        received = self.received(task, message, state.theta)
        done = self.rounds(task, received, state, data)
        upload = received.tell(done.w, done.theta, done.mu if isinstance(self.lam, LearnedVariance) else None)
        return upload, Own(done.theta, done.w.theta if self._means.remembers else ())

    def rounds(self, task: Task, received: Received, state: Own, data: ClientData) -> Carry:
        """The R local rounds of ONE client: what the last of them left."""
        w, prior, means = received.centre, received.prior, self._means
        assert isinstance(prior, Gaussian)
        lam, family, a, decay = prior.precision, self.family, self.a, self.weight_decay
        solver = SGD(a, 0.0, decay) if isinstance(family, SphericalGaussian) else Mirror(family, a, decay)

        def local_round(carry: Carry, *batches: Batch) -> Carry:
            f = Loss(task, carry.w.stats, batches, self.K, decay)
            mean = means.mean(f, carry.w.theta, carry.theta.theta, state.memory)
            begin = {"w": mean.w, "mu": mean.mu}.get(self.start, carry.begin.theta)
            theta = inner_solve(task, Model(begin, carry.begin.stats), batches[-1], solver,
                                Gaussian(family.grad_g_star(mean.mu), lam), self.K)
            gap, step = mean.mu - theta.theta, self.a_m * lam
            if self.order == "exact" or family.is_gaussian:
                gap = family.hessian_g_star(mean.mu, gap)
            if self.order == "exact":
                gap, step = means.pulled_back(f, mean, lam * gap, carry.theta.theta, state.memory), self.a_m
            # the statistics of w are those of the theta that has seen the data
            w_i = received.kept(family.project(less(mean.w, gap, step)), theta.theta)
            return Carry(Model(w_i, theta.stats), theta, theta, mean.mu)

        begin = state.theta if self.start == "last" else w
        return data.scan(local_round, Carry(w, state.theta, begin, w.theta))  # type: ignore[no-any-return]

    def personalize(self, task: Task, message: Message, state: Own, data: ClientData) -> Model:
        mirror = Mirror(self.family, self.a, self.weight_decay)
        return finetuned(task, state.theta, data, mirror, self.finetune)

"""pFedBreD: a personalized prior from the exponential family for every client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from descant.core.algorithm import ClientData, LocalStep, Message, Round, Weights
from descant.core.fields import hyper
from descant.core.ranges import Log, Step
from descant.core.task import Batch, Task
from descant.core.tree import Tree
from descant.core.vector import Model
from descant.errors import UsageError
from descant.priors.belief import Belief, SharedPrior, Told
from descant.priors.bregman import DiagonalGaussian, Family, FullGaussian, SphericalGaussian
from descant.priors.precision import (
    Adaptive,
    Lam,
    LearnedVariance,
    inner_step,
    outer_step,
    overshooting,
    strongest,
    unstable,
)
from descant.priors.prior import Gaussian
from descant.priors.solve import SGD, settle


class Own(NamedTuple):
    """The state of a client."""

    theta: Model
    memory: Tree  # [d] w_{i,R} of its last participation; () for strategies that look at none


class Carry(NamedTuple):
    w: Model
    theta: Model
    begin: Model  # where the next steps on theta begin
    mu: Tensor  # [d] the mean of the prior that theta was found with


@dataclass(frozen=True)
class pFedBreD(SharedPrior):
    """The server minimises the average of the clients' Bregman-Moreau envelopes, each around its own mean.

    F_i(w) = min_theta f_i(theta) + lam D_{g*}(theta, mu_i(w)), with a prior of the family of g around a mean
    that client i makes itself. Client, from w_i = w, for each batch (the R local rounds of the paper):
        mu    = w_i - eta_a grad f_i(w_i) - eta (w_{i,R} - theta)    the mean of the prior (`strategy`);
        theta ~ argmin f_i(theta; batch) + lam D_{g*}(theta, mu)     by K steps of size a;
        w_i  <- w_i - a_m lam Dmu(w_i)' Hess g*(mu) (mu - theta)     a step down F_i (Eq. 13).
    Server:  w <- (1 - beta) w + beta sum_{i in S} p_i w_i.

    w_{i,R} is remembered: the client's own w_i at the end of the last round in which it took part (at first
    the initial model, as theta). `strategy` says which terms the mean has (Eq. 14):
        identity    neither: with a Gaussian prior this is pFedMe;
        lg          the loss gradient;
        meg         the memorised envelope gradient;
        mh          both;
        mh_nested   both, the loss gradient being that at w_i - eta_a grad f_i(w_i) (Eq. 22);
        mh_code     what the authors' code does as mh: it first moves w_i itself,
                        w_i <- w_i - eta_a grad f_i(w_i - eta_a grad f_i(w_i; batch 1); batch 2),
                    and has mu = w_i - eta (w_{i,R} - theta) from there. Each local round takes two batches,
                    theta sees the second. start = "w" makes it the code. It scores better than what is
                    printed, and the extra step on w_i without any memory does as well.
    lg of the authors' code differs too: it uses eta in place of eta_a, and start = "mu".

    `start` says where the K steps begin: at the theta before ("last": as printed, in the first batch of a
    round the theta of the round before; "theta": as pFedMe, in the first batch w), at the present w_i ("w"),
    or at mu. Order "first" puts I for Dmu and for the Hessian (Appendix A.7; a Gaussian keeps its constant
    Sigma^-1); "exact" has both, where Dmu = I - eta_a Hess f_i(w_i), the memory being a constant.

    Steps on theta are made in grad g*(theta), where they cannot leave the family's domain; for the Gaussian
    that is gradient descent. mu and w are projected to the domain (`descant.priors.bregman`). With a learned
    variance, which is that of the prior, the clients tell how far theta lies from the last mu (the precision
    is then at most 1 / c: c = 1/15 suits these step sizes); other rules for lam ask how far the clients are
    apart and are told the distance from the server's w.

    `finetune` is the FT trick: before it predicts, theta makes that many steps of size a on f_i alone, over
    all rows of the client (the paper makes one and does not say on what). beta = 2 is the AM trick. A
    newcomer does the work of one round from the server's w, with that as its memory.
    """

    name: ClassVar[str] = "pfedbred"
    citation: ClassVar[str] = (
        "Shi, Zhou, Wang, Zhang, Huang, Ye, Lv: PRIOR: Personalized Prior for Reactivating the Information "
        "Overlooked in Federated Learning. NeurIPS 2023, arXiv:2310.09183"
    )

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {"lam": 15.0, "a_m": 0.01, "a": 0.01}}

    lam: Lam = hyper(15.0, "strength of the pull of theta to mu", ge=0, search=Log(1.0, 100.0))
    eta: float = hyper(0.05, "step of mu along the memorised envelope gradient", ge=0,
                       search=Log(0.001, 1.0))
    eta_a: float = hyper(0.01, "step of mu along the loss gradient", ge=0)
    a_m: float = hyper(None, "step size of w; absent: 3/4 of the way to theta, 0.75 / lam", gt=0,
                       search=Step(0.001, 0.1), derived=lambda self: outer_step(self._pull))
    a: float = hyper(None, "step size of theta; absent: 1 / (lam + 20)", gt=0, search=Step(0.001, 0.3),
                     derived=lambda self: inner_step(self.lam))
    K: int = hyper(5, "steps on theta for each batch", ge=1)
    beta: float = hyper(1.0, "aggregation step; above 1 it is momentum (AM: 2)", gt=0)
    weights: Weights = hyper("samples", "what a client counts in the average")
    strategy: Literal["identity", "lg", "meg", "mh", "mh_nested", "mh_code"] = hyper(
        "mh", "how the mean of the prior is made")
    family: Family = hyper(SphericalGaussian(), "the family of the prior")
    start: Literal["last", "theta", "w", "mu"] = hyper("last", "where the steps on theta begin")
    order: Literal["first", "exact"] = hyper("first", "whether the step of w has the second derivatives")
    finetune: int = hyper(0, "steps on the loss alone before a client predicts (FT: 1)", ge=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.lam, LearnedVariance) and not isinstance(self.family, SphericalGaussian):
            raise UsageError(f"pfedbred.lam = {{ name = \"learned\" }} learns the variance of a Gaussian and "
                             f"does not fit the family {self.family.name}: use family = "
                             '{ name = "gaussian" }, or a number for lam')
        if isinstance(self.lam, Adaptive) and not self.family.is_gaussian:
            raise UsageError(f"pfedbred.lam = {{ name = \"adaptive\" }} is derived for Gaussian priors and "
                             f"does not fit the family {self.family.name}: use a number for lam")

    def local_step(self) -> LocalStep:
        return LocalStep("a", strongest(self.lam))

    def cautions(self) -> list[str]:
        found = unstable("a", self.a, self.lam)  # in the dual variable the pull is lam in every family
        if not self.family.is_gaussian:
            return found
        return found + overshooting("a_m", self.a_m, self._pull,
                                    "lam" if isinstance(self.family, SphericalGaussian) else "lam / Sigma")

    @property
    def _pull(self) -> float:
        """The most by which w is pulled to theta: lam Sigma^-1 of a Gaussian."""
        return strongest(self.lam) * _sharpest(self.family)

    def batches_per_step(self) -> int:
        return 2 if self.strategy == "mh_code" else 1

    @property
    def remembers(self) -> bool:
        """Whether the mean looks at w_{i,R}."""
        return self.strategy not in ("identity", "lg")

    def init_server(self, task: Task, model: Model, round: Round) -> Belief:
        self.family.require(model.theta)
        return super().init_server(task, self._projected(model), round)

    def init_client(self, task: Task, model: Model) -> Own:
        model = self._projected(model)
        return Own(model, model.theta if self.remembers else ())

    def local(self, task: Task, message: Message, state: Own, data: ClientData) -> tuple[Told, Own]:
        w: Model = message.shared.mean
        lam = self.prior(message).precision

        def local_round(carry: Carry, *batches: Batch) -> Carry:
            w, mu, kept = self._mean(task, carry, state.memory, batches)
            begin = {"w": w.theta, "mu": mu}.get(self.start, carry.begin.theta)
            theta = self._prox(task, Model(begin, carry.begin.stats), mu, lam, batches[-1])
            step = self.a_m * lam * self._curved(mu, mu - theta.theta)
            if self.order == "exact":
                step = self._pulled_back(task, w, torch.where(kept, step, 0.0), batches[-1])
            # the statistics of w are those of the theta that has seen the data
            w = Model(self.family.project(w.theta - step), theta.stats)
            return Carry(w, theta, theta, mu)

        begin = state.theta if self.start == "last" else w
        done: Carry = data.scan(local_round, Carry(w, state.theta, begin, w.theta))
        mean = done.mu if isinstance(self.lam, LearnedVariance) else w.theta
        told = Told(done.w, self.rule.evidence(done.theta.theta, mean))
        return told, Own(done.theta, done.w.theta if self.remembers else ())

    def _mean(self, task: Task, carry: Carry, memory: Tree, batches: tuple[Batch, ...]
              ) -> tuple[Model, Tensor, Tensor]:
        """w_i (which mh_code moves), the mean of the prior, and which of its coordinates were in the domain.
        """
        w, theta = carry.w, carry.theta.theta
        mu = w.theta
        if self.strategy in ("lg", "mh"):
            mu = mu - self.eta_a * self._gradient(task, w, batches[0], 0)
        elif self.strategy in ("mh_nested", "mh_code"):  # one batch for both gradients, or two batches
            inner, _ = self._descended(task, w, batches[0])
            mu = mu - self.eta_a * self._gradient(task, inner, batches[-1], 1)
        if self.strategy == "mh_code":
            mu = self.family.project(mu)
            w = Model(mu, w.stats)
        if self.remembers:
            mu = mu - self.eta * (memory - theta)
        mean = self.family.project(mu)
        return w, mean, mean == mu

    def _pulled_back(self, task: Task, w: Model, v: Tensor, batch: Batch) -> Tensor:
        """Dmu(w)' v. (mh_code steps from the w that it has moved, in which mu has the derivative I.)"""
        if self.strategy in ("lg", "mh"):
            return v - self.eta_a * self._hessian(task, w, batch, 0, v)
        if self.strategy == "mh_nested":
            inner, kept = self._descended(task, w, batch)
            u = torch.where(kept, self._hessian(task, inner, batch, 1, v), 0.0)
            return v - self.eta_a * (u - self.eta_a * self._hessian(task, w, batch, 0, u))
        return v

    def _curved(self, mu: Tensor, v: Tensor) -> Tensor:
        """Hess g*(mu) v, or v."""
        is_cheap = self.family.is_gaussian
        return self.family.hessian_g_star(mu, v) if is_cheap or self.order == "exact" else v

    def _descended(self, task: Task, w: Model, batch: Batch) -> tuple[Model, Tensor]:
        """w - eta_a grad f(w), put into the domain, and which of its coordinates were there."""
        descended = w.theta - self.eta_a * self._gradient(task, w, batch, 0)
        inner = self.family.project(descended)
        return Model(inner, w.stats), inner == descended

    def _gradient(self, task: Task, model: Model, batch: Batch, k: int) -> Tensor:
        # random numbers of their own: the K steps on theta draw the same with and without this
        return task.grad(model, batch.redrawn(self.K + k)).theta

    def _hessian(self, task: Task, model: Model, batch: Batch, k: int, v: Tensor) -> Tensor:
        return task.hessian(model, batch.redrawn(self.K + k), v)

    def _prox(self, task: Task, theta: Model, mu: Tensor, lam: Tensor | float, batch: Batch) -> Model:
        """K steps on f(theta; batch) + lam D(theta, mu), D with the gradient grad g*(theta) - grad g*(mu)."""
        if isinstance(self.family, SphericalGaussian):
            return settle(task, theta, batch, SGD(lr=self.a), Gaussian(mu, lam), self.K)
        y, center = self.family.grad_g_star(theta.theta), self.family.grad_g_star(mu)
        for k in range(self.K):
            gradient = task.grad(theta, batch.redrawn(k))
            y = self.family.move(y, self.a * (gradient.theta + lam * (y - center)))
            theta = Model(self.family.grad_g(y), gradient.stats)
        return theta

    def aggregate(self, server: Belief, uploads: Told, round: Round) -> tuple[Belief, dict[str, Any]]:
        new, report = super().aggregate(server, uploads, round)
        return Belief(self._projected(new.mean), new.pull), report  # beta > 1 may overshoot the domain

    def personalize(self, task: Task, message: Message, state: Own, data: ClientData) -> Model:
        theta = state.theta
        for _ in range(self.finetune):
            theta = self._finetuned(task, theta, data)
        return theta

    def _finetuned(self, task: Task, theta: Model, data: ClientData) -> Model:
        gradient = data.mean(lambda batch: task.grad(theta, batch).theta)
        y = self.family.move(self.family.grad_g_star(theta.theta), self.a * gradient)
        return Model(self.family.grad_g(y), theta.stats)

    def adapt(self, task: Task, message: Message, data: ClientData) -> Model:
        w: Model = message.shared.mean
        _, own = self.local(task, message, Own(w, w.theta if self.remembers else ()), data)
        return self.personalize(task, message, own, data)

    def _projected(self, model: Model) -> Model:
        return Model(self.family.project(model.theta), model.stats)


def _sharpest(family: Family) -> float:
    """The largest eigenvalue of Sigma^-1."""
    if isinstance(family, DiagonalGaussian):
        return 1 / min(family.variance, default=1.0)
    if isinstance(family, FullGaussian):
        return 1 / float(torch.linalg.eigvalsh(torch.tensor(family.sigma, dtype=torch.float64))[0])
    return 1.0

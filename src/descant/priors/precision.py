"""How strongly a Gaussian prior pulls, and what changes that: the lambda of proximal methods as a part.

A method's `lam` is a number, a list with one number per client, or one of the rules below; the method
does not know which. On the server a rule has a state; a client is sent what it needs of it, tells after
its work how far its model lies from the prior's mean (`evidence`), and the rule learns from that. A
number has no state, sends nothing and asks nothing, so that it costs nothing.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from descant.core.algorithm import Message, Round
from descant.core.fields import Checked, hyper
from descant.core.ranges import Log
from descant.core.tree import Tree
from descant.errors import UsageError
from descant.priors.adaptive import Choice, practical_lambda, theorem_lambda


class Precision(ABC):
    """A rule for the precision of a Gaussian prior."""

    def init(self, theta: Tensor, round: Round) -> Tree:
        """The state of the rule on the server, before the first round."""
        return ()

    def send(self, state: Tree, round: Round) -> Message:
        """What the clients of a cohort are told."""
        return Message(shared=state)

    def newcomer(self, state: Tree) -> Message:
        """What a client is told that never took part."""
        return Message(shared=state)

    def value(self, sent: Message) -> Tensor | float:
        """The precision for ONE client: a number, or one for each coordinate."""
        lam: Tensor = sent.each if isinstance(sent.each, Tensor) else sent.shared
        return lam

    def ridge(self) -> float:
        """The weight of ||mean||^2 in what a server minimises that learns mean and precision together."""
        return 0.0

    @abstractmethod
    def upper_bound(self) -> float:
        """The largest precision that there can be: what step sizes must be fit for."""

    #: Whether the rule learns from the evidence of every client by itself; otherwise from its mean.
    needs_rows: ClassVar[bool] = False

    def evidence(self, theta: Tensor, mean: Tensor) -> Tree:
        """What ONE client tells after its work."""
        return ()

    def recentred(self, evidence: Tree, shift: Tree, gap: Tensor) -> Tree:
        """The mean evidence around a mean that lies `gap` from the one it was measured around, where the
        clients' models lie `shift` from that on average."""
        return evidence

    def update(self, state: Tree, evidence: Tree, round: Round) -> tuple[Tree, dict[str, Any]]:
        """The new state, and what to report. `evidence` is the mean over the clients of `round`, or has a row
        for each."""
        return state, {}


@dataclass(frozen=True)
class Fixed(Precision):
    """One number for all, for ever."""

    lam: float

    def value(self, sent: Message) -> float:
        return self.lam

    def upper_bound(self) -> float:
        return self.lam


@dataclass(frozen=True)
class FixedVariance(Checked, Precision):
    """Every coordinate has the same variance sigma2, for ever: precision 1 / sigma2 (FedMAP, Eq. 6)."""

    name: ClassVar[str] = "fixed"

    sigma2: float = hyper(15.0, "variance of the prior", gt=0, search=Log(0.1, 100.0))

    def value(self, sent: Message) -> float:
        return 1 / self.sigma2

    def upper_bound(self) -> float:
        return 1 / self.sigma2


@dataclass(frozen=True)
class DiagonalVariance(Checked, Precision):
    """Every coordinate has a variance of its own, for ever: precision 1 / sigma2_j (FedMAP, Eq. 16, whose
    sigma_j^2 is the precision)."""

    name: ClassVar[str] = "diagonal"

    sigma2: tuple[float, ...] = hyper((15.0,), "variances of the prior: one for each coordinate")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sigma2 or not min(self.sigma2) > 0:
            raise UsageError(f"{self.name}.sigma2 must be numbers greater than 0, not {list(self.sigma2)}")

    def init(self, theta: Tensor, round: Round) -> Tensor:
        if len(self.sigma2) != len(theta):
            raise UsageError(f"{self.name}.sigma2 has {len(self.sigma2)} numbers for {len(theta)} "
                             'coordinates: give one for each, or use the prior "fixed"')
        return 1 / torch.tensor(self.sigma2, dtype=theta.dtype)

    def upper_bound(self) -> float:
        return 1 / min(self.sigma2)


@dataclass(frozen=True)
class PerClient(Precision):
    """One number for each client (objective 18 of one-stage FedProx). A newcomer gets the mean."""

    lams: tuple[float, ...]

    def init(self, theta: Tensor, round: Round) -> Tensor:
        if len(self.lams) != round.population:
            raise UsageError(f"lam is a list of {len(self.lams)} numbers for {round.population} clients: "
                             "it must have one for each client")
        return torch.tensor(self.lams, dtype=theta.dtype)

    def send(self, state: Tensor, round: Round) -> Message:
        return Message(each=state[round.cohort])

    def newcomer(self, state: Tensor) -> Message:
        return Message(shared=state.mean())

    def upper_bound(self) -> float:
        return max(self.lams, default=0.0)


class AdaptiveState(NamedTuple):
    """The state of `Adaptive`."""

    lam: Tensor  # [population] or []
    square: Tensor  # [population] ||theta_i - mean||^2 - noise / n_i, when client i was last heard of
    size: Tensor  # [population] its number of samples; 0 if it was never heard of
    heard: Tensor  # int64 [] pilot rounds so far, of this rule: those in which it was given evidence


@dataclass(frozen=True)
class Adaptive(Checked, Precision):
    """lambda from the clients' measured heterogeneity: large where they are alike, small where they differ.

    For `rounds` rounds the pull is `pilot`, weak enough that the clients' models show how far apart they
    want to be (a round in which none of a prior's clients is heard of does not count for it). Then R^2 is
    the mean of ||theta_i - mean||^2 less `noise` / n_i, the part that is only the error of estimating from
    n_i samples, and lambda is set once, by

        practical:  c / (n R^2) if R >= 1/sqrt(n), else c / (sqrt(n) R)    (the authors' experiments);
        theorem:    Theorem 1 with L, mu, rho.

    It is at most `cap`. With `per_client`, every client has its own R_i and n_i; one that was not heard of
    during the pilot gets lambda from the mean R.
    """

    name: ClassVar[str] = "adaptive"
    needs_rows: ClassVar[bool] = True

    rule: Literal["practical", "theorem"] = hyper("practical", "how lambda follows from R")
    pilot: float = hyper(0.1, "lambda of the pilot rounds", gt=0)
    rounds: int = hyper(10, "pilot rounds", ge=1)
    c: float = hyper(5.0, "factor of the practical rule; stands for rho^2 / mu", gt=0)
    L: float = hyper(1.0, "smoothness of the clients' losses, for the theorem's rule", gt=0)
    mu: float = hyper(0.1, "their strong convexity, for the theorem's rule", gt=0)
    rho: float = hyper(2.0, "bound of the gradient noise, for the theorem's rule", gt=0)
    noise: float = hyper(0.0, "n times the expected squared error of a local estimate", ge=0)
    cap: float = hyper(100.0, "largest lambda", gt=0)
    per_client: bool = hyper(False, "every client has its own lambda")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule == "theorem" and self.mu > self.L:
            raise UsageError(f"{self.name}: mu = {self.mu:g} is greater than L = {self.L:g}; no loss is more "
                             "strongly convex than it is smooth")

    def init(self, theta: Tensor, round: Round) -> AdaptiveState:
        lam = torch.full((round.population,) if self.per_client else (), self.pilot, dtype=theta.dtype)
        nothing = torch.zeros(round.population, dtype=theta.dtype)
        return AdaptiveState(lam, nothing, nothing.clone(), torch.tensor(0))

    def send(self, state: AdaptiveState, round: Round) -> Message:
        return Message(each=state.lam[round.cohort]) if self.per_client else Message(shared=state.lam)

    def newcomer(self, state: AdaptiveState) -> Message:
        return Message(shared=state.lam.mean())

    def upper_bound(self) -> float:
        return max(self.pilot, self.cap)

    def evidence(self, theta: Tensor, mean: Tensor) -> Tensor:
        return (theta - mean).square().sum()

    def update(self, state: AdaptiveState, evidence: Tensor, round: Round
               ) -> tuple[AdaptiveState, dict[str, Any]]:
        if int(state.heard) >= self.rounds:
            return state, {"lam": state.lam}
        square, size = state.square.clone(), state.size.clone()
        square[round.cohort] = evidence - self.noise / round.sizes  # may be below 0: the mean is unbiased
        size[round.cohort] = round.sizes
        state = state._replace(square=square, size=size, heard=state.heard + 1)
        return (state, {"lam": state.lam}) if int(state.heard) < self.rounds else self._chosen(state)

    def _chosen(self, state: AdaptiveState) -> tuple[AdaptiveState, dict[str, Any]]:
        heard = state.size > 0
        square, n = state.square[heard].mean().clamp(min=0), state.size[heard].mean()
        N = float(n) * len(state.size)
        if self.per_client:
            squares, sizes = state.square.clamp(min=0).where(heard, square), state.size.where(heard, n)
            choices = [self._choose(math.sqrt(r), m, N)
                       for r, m in zip(squares.tolist(), sizes.tolist(), strict=True)]
            lam = torch.tensor([choice.lam for choice in choices], dtype=state.lam.dtype)
        else:
            choices = [self._choose(math.sqrt(float(square)), float(n), N)]
            lam = torch.tensor(choices[0].lam, dtype=state.lam.dtype)
        report = {"lam": lam, "R": square.sqrt(), "capped": sum(choice.capped for choice in choices)}
        return state._replace(lam=lam), report

    def _choose(self, R: float, n: float, N: float) -> Choice:
        if self.rule == "practical":
            return practical_lambda(R, n, c=self.c, cap=self.cap)
        return theorem_lambda(R, n, N, L=self.L, mu=self.mu, rho=self.rho, cap=self.cap)


@dataclass(frozen=True)
class LearnedVariance(Checked, Precision):
    """The precision of every coordinate is learned from how much the clients differ in it (FedMAP, Lemma 1).

    The prior is Gaussian with precision alpha(s_j) = 1 / (s_j + c); the server minimises over s

        sum_i p_i sum_j (theta_ij - mean_j)^2 / (2 (s_j + c)) + epsilon s_j^2,

    exactly (the one root s > 0 of s (s + c)^2 = V / (4 epsilon), V_j the mean square deviation), or by one
    gradient step of size `lr` a round. Lemma 1 has epsilon ||mean||^2 besides, for a method that learns the
    mean by the same problem (`ridge`).
    """

    name: ClassVar[str] = "learned"

    c: float = hyper(1.0, "alpha(s) = 1 / (s + c)", gt=0)
    epsilon: float = hyper(1e-4, "weight of s^2, which keeps the variance finite", gt=0)
    s: float = hyper(1.0, "where s starts: above -c; A.4 has 0")
    lr: float | Literal["exact"] = hyper("exact", "step size of s, or its exact minimiser", gt=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.s <= -self.c:
            raise UsageError(f"{self.name}.s = {self.s:g} must be greater than -c = {-self.c:g}, so that the "
                             "variance s + c is positive")

    @property
    def _least(self) -> float:
        """The least s that there can be: all minima lie above zero, and gradients below it lead upwards."""
        return min(0.0, self.s)

    def init(self, theta: Tensor, round: Round) -> Tensor:
        return torch.full_like(theta, self.s)

    def value(self, sent: Message) -> Tensor:
        s: Tensor = sent.shared
        return 1 / (s + self.c)

    def upper_bound(self) -> float:
        return 1 / (self._least + self.c)

    def ridge(self) -> float:
        return self.epsilon

    def evidence(self, theta: Tensor, mean: Tensor) -> Tensor:
        return (theta - mean).square()

    def recentred(self, evidence: Tensor, shift: Tensor, gap: Tensor) -> Tensor:
        return (evidence - gap * (2 * shift - gap)).clamp(min=0)

    def update(self, state: Tensor, evidence: Tensor, round: Round) -> tuple[Tensor, dict[str, Any]]:
        V = evidence.to(state.dtype)
        if self.lr == "exact":
            s = stationary_s(V, self.c, self.epsilon)
        else:
            gradient = 2 * self.epsilon * state - V / (2 * (state + self.c).square())
            s = (state - self.lr * gradient).clamp(min=self._least)
        return s, {"s": {"least": s.min(), "median": s.median(), "most": s.max()}}


def stationary_s(V: Tensor, c: float, epsilon: float) -> Tensor:
    """The root s >= 0 of s (s + c)^2 = V / (4 epsilon): increasing in s, so there is exactly one.

    By Newton's method from the upper bound (V / (4 epsilon))^(1/3); the function is convex for s >= 0, so
    that the iterates fall to the root and never pass it.
    """
    b = V / (4 * epsilon)
    s = b.pow(1 / 3)
    for _ in range(60):
        s = s - (s * (s + c).square() - b) / ((s + c) * (3 * s + c))
    return s.clamp(min=0)


Lam: TypeAlias = float | tuple[float, ...] | Adaptive | LearnedVariance


def as_rule(lam: Lam | Precision) -> Precision:
    """The rule that a method's field stands for."""
    if isinstance(lam, Precision):
        return lam
    return PerClient(tuple(lam)) if isinstance(lam, Sequence) else Fixed(lam)


def strongest(lam: Lam | Precision) -> float:
    """The largest value that a lam can take."""
    return as_rule(lam).upper_bound()


#: What the clients' losses are taken to curve where nobody says: those of linear models on features in [0, 1]
#: or with deviation 1 mostly have an L between 1 and 20, and steps of 1 / L leave room for batches that curve
#: twice as much.
USUAL_CURVATURE = 20.0


def inner_step(lam: Lam | Precision, L: float | None = None) -> float:
    """A step on f + lam/2 ||. - w||^2 that is stable for an f of usual curvature: 1 / (L + lam)."""
    return 1 / ((USUAL_CURVATURE if L is None else L) + strongest(lam))


def outer_step(lam: Lam | Precision) -> float:
    """The step of w <- w - step lam (w - theta) that takes three quarters of the way to theta, with room
    below the bound 1 / lam. Without a pull, w stays whatever the step."""
    return 0.75 / top if (top := strongest(lam)) > 0 else 1.0


def unstable(name: str, step: float | None, lam: Lam | Precision, pull: str = "lam") -> list[str]:
    """A caution where gradient steps on f + lam/2 ||. - w||^2 diverge: they need step (L + lam) < 2."""
    top = strongest(lam)
    if step is None or step * top < 2:
        return []
    reached = "up to" if isinstance(lam, Adaptive | LearnedVariance) else "="
    return [f"{name} = {step:g} with {pull} {reached} {top:g}: the steps diverge for any loss; "
            f"they need {name} < 2 / (L + {pull}), at most {2 / top:g}"]


def overshooting(name: str, step: float, lam: Lam, pull: str = "lam") -> list[str]:
    """A caution where w <- w - step lam (w - theta) passes theta: it needs step lam <= 1."""
    top = strongest(lam)
    if step * top <= 1:
        return []
    return [f"{name} {pull} = {step * top:g}: w overshoots theta; "
            f"it needs {name} <= 1 / {pull} = {1 / top:g}"]

"""Priors given as functions: any energy R(theta, gamma), with gradients in theta and gamma by autograd.

A Gaussian prior has a form of its own (`prior.py`, `precision.py`). Whatever else a server may learn about
its clients' models is an `Energy`: the clients descend on loss + R(., gamma), the server on R(theta_k, .).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from types import FunctionType
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap

from descant.core.algorithm import Message, Round, average
from descant.core.fields import Checked, hyper
from descant.core.import_object import imported, is_place, require
from descant.core.tree import Tree, leaves, map_tree
from descant.core.vector import Model
from descant.errors import UsageError
from descant.priors.belief import Belief, Upload
from descant.priors.gaussian import Weighting


class Energy(ABC):
    """A family of priors exp(-R(theta, gamma)). Derive a frozen dataclass with a `name` of its own.

    `energy` is for ONE theta [d], made of torch functions that autograd and vmap know. gamma is any tree of
    tensors. By default it is a vector as long as theta, begins at the common initial model, and is where the
    prior is strongest; a gamma of another form needs `init` and `centre`.

    The server minimises sum_k w_k R(theta_k, gamma) + penalty(gamma) over gamma. An energy is not normalised,
    so nothing but R and its penalty keeps that minimum from being "all theta alike": see that it has one.
    """

    name: ClassVar[str]

    @abstractmethod
    def energy(self, theta: Tensor, gamma: Tree) -> Tensor:
        """R(theta, gamma), up to what does not depend on theta."""

    def penalty(self, gamma: Tree) -> Tensor:
        """The part of R that does not depend on theta: the server alone needs it."""
        return torch.zeros(())

    def init(self, theta: Tensor, rng: np.random.Generator) -> Tree:
        """gamma before the first round; theta is the common initial model."""
        return theta

    def centre(self, gamma: Tree) -> Tensor:
        """[d] the theta that stands for all: the global model, and where newcomers start."""
        centre: Tensor = gamma
        return centre


class EnergyPrior(NamedTuple):
    """The prior of a client that was sent gamma: the energy scale R(., gamma)."""

    family: Energy
    gamma: Tree
    scale: Tensor | float = 1.0

    def energy(self, theta: Tensor) -> Tensor:
        return self.scale * self.family.energy(theta, self.gamma)

    def grad(self, theta: Tensor) -> Tensor:
        gradient: Tensor = grad(self.energy)(theta)
        return gradient

    def scaled(self, factor: Tensor | float) -> EnergyPrior:
        return self._replace(scale=factor * self.scale)

    def prox(self, theta: Tensor, step: float) -> Tensor:
        raise UsageError(f"the prior {self.family.name} has no proximal map in closed form: "
                         "use the solver sgd or adam")


def server_gradient(family: Energy, gamma: Tree, thetas: Tensor, weights: Tensor) -> Tree:
    """The gradient in gamma of sum_k w_k R(theta_k, gamma) + penalty(gamma). thetas: [clients, d]."""

    def objective(gamma: Tree) -> Tensor:
        energies = vmap(family.energy, in_dims=(0, None))(thetas, gamma)
        return weights.to(thetas.dtype) @ energies + family.penalty(gamma)

    return grad(objective)(gamma)


class EnergyState(NamedTuple):
    """The state of an `EnergyBelief`, and what it sends."""

    gamma: Tree  # of the energy
    stats: Tensor  # [s] of the global model


@dataclass(frozen=True)
class EnergyBelief(Belief):
    """A prior exp(-R(theta, gamma)) for all clients; the server descends on sum_k w_k R(theta_k, gamma)."""

    energy: Energy
    step: float
    weights: Weighting

    def init(self, model: Model, round: Round) -> EnergyState:
        if round.number == 0:
            check(self.energy, model.theta)
        return EnergyState(self.energy.init(model.theta, round.generator("prior")), model.stats)

    def send(self, state: EnergyState, round: Round) -> Message:
        return Message(state)

    def newcomer(self, state: EnergyState, round: Round) -> Message:
        return Message(state)

    def prior(self, sent: Message) -> EnergyPrior:
        return EnergyPrior(self.energy, sent.shared.gamma)

    def centre(self, sent: Message) -> Model:
        return self.model(sent.shared)

    def update(self, state: EnergyState, uploads: Upload, round: Round, learn: bool = True
               ) -> tuple[EnergyState, dict[str, Any]]:
        weights = self.weights(uploads, round)
        gradient = server_gradient(self.energy, state.gamma, uploads.model.theta, weights)
        gamma = map_tree(lambda old, g: old - self.step * g, state.gamma, gradient)
        return EnergyState(gamma, average(uploads.model, weights).stats), self.weights.report(weights)

    def model(self, state: EnergyState) -> Model:
        return Model(self.energy.centre(state.gamma), state.stats)

    def client_weights(self, round: Round) -> Tensor | None:
        return self.weights.known(round)


def require_named(family: Energy, field: str) -> None:
    """Refuse an object that the record of a run could not tell from others."""
    if not is_dataclass(family) or not isinstance(getattr(family, "name", None), str):
        raise UsageError(f"{field}: {type(family).__name__} must be a frozen dataclass with a `name`: the "
                         "record of a run tells what it was by these")


def check(family: Energy, theta: Tensor) -> None:
    """Try a prior near the initial model, so that what cannot be trained with is told before training."""
    who, rng = f"the prior {family.name}", np.random.default_rng(0)
    try:
        gamma = family.init(theta, rng)
        centre = family.centre(gamma)
        # off the centre, where the gradient of any prior may vanish
        thetas = centre + torch.from_numpy(rng.standard_normal((2, len(theta)))).to(theta.dtype)
        energy = family.energy(thetas[0], gamma)
    except UsageError:  # which says by itself what is wrong: there is no such prior, or it is not allowed
        raise
    except Exception as error:
        raise UsageError(f"{who} fails near the initial model with {type(error).__name__}: "
                         f"{_first_line(error)}") from error
    if centre.shape != theta.shape or centre.dtype != theta.dtype:
        raise UsageError(f"{who}: the centre of gamma has shape {tuple(centre.shape)} of {centre.dtype}: it "
                         f"must be a vector like the model's, {tuple(theta.shape)} of {theta.dtype}")
    if not isinstance(energy, Tensor) or energy.shape != ():
        found = f"shape {tuple(energy.shape)}" if isinstance(energy, Tensor) else f"a {type(energy).__name__}"
        raise UsageError(f"{who}: R(theta, gamma) gives {found}: it must give a tensor with one number; is "
                         "its .sum() missing?")
    try:
        in_theta = vmap(EnergyPrior(family, gamma).grad)(thetas)
        in_gamma = server_gradient(family, gamma, thetas, torch.full((2,), 0.5))
    except Exception as error:
        raise UsageError(f"{who}: R(theta, gamma) cannot be differentiated ({_first_line(error)}): use torch "
                         "functions alone, without .item(), .numpy() or branches on values") from error
    for variable, gradient in (("theta", in_theta), ("gamma", in_gamma)):
        parts = [tensor for _, tensor in leaves(gradient)]
        if not all(bool(part.isfinite().all()) for part in parts):
            raise UsageError(f"{who}: the gradient of R in {variable} is not finite near the initial model")
        if not any(bool(part.any()) for part in parts):
            raise UsageError(f"{who}: the gradient of R in {variable} is zero: R does not depend on it, or "
                             "not as autograd sees it (.detach(), .data, torch.no_grad(), rounding)")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


@dataclass(frozen=True)
class OwnPrior(Checked, Energy):
    """A prior that you wrote, by its place "package.module:name".

    There lies a function R(theta, gamma) of two vectors, or an `Energy` (the class, or an object of it). The
    module is looked for where Python looks, and in the current directory.
    """

    name: ClassVar[str] = "own"

    place: str = hyper("", 'where it is: "package.module:name"')

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_place(self.place):
            raise UsageError('own.place must read "package.module:name", such as '
                             f'"my_package.priors:laplace", not {self.place!r}')

    def energy(self, theta: Tensor, gamma: Tree) -> Tensor:
        return _found(self.place).energy(theta, gamma)

    def penalty(self, gamma: Tree) -> Tensor:
        return _found(self.place).penalty(gamma)

    def init(self, theta: Tensor, rng: np.random.Generator) -> Tree:
        return _found(self.place).init(theta, rng)

    def centre(self, gamma: Tree) -> Tensor:
        return _found(self.place).centre(gamma)


@dataclass(frozen=True)
class _Function(Energy):
    """A bare function R(theta, gamma) of two vectors."""

    function: Callable[[Tensor, Tensor], Tensor]

    def energy(self, theta: Tensor, gamma: Tensor) -> Tensor:
        return self.function(theta, gamma)


def _found(place: str) -> Energy:
    require(place, "prior.place")  # each time: two files may name it, and only one may have been trusted
    return _made(place)


@functools.cache
def _made(place: str) -> Energy:
    thing = imported(place, "prior.place")
    if isinstance(thing, type) and issubclass(thing, Energy):
        thing = thing()
    if isinstance(thing, Energy):
        return thing
    if not isinstance(thing, FunctionType):
        raise UsageError(f"prior.place {place}: it must be a function R(theta, gamma) or an Energy, "
                         f"not {thing!r}")
    return _Function(thing)


class ConvexNetwork(NamedTuple):
    """gamma of `InputConvex`."""

    mean: Tensor  # [d]
    W: Tensor  # [hidden, d] first layer: the directions of its rows count, not their lengths
    b: Tensor  # [hidden]
    A: Tensor  # [hidden, hidden] second layer: logits of weights that sum to one
    c: Tensor  # [hidden]
    a: Tensor  # [hidden] logits of the output's weights


@dataclass(frozen=True)
class InputConvex(Checked, Energy):
    """An input-convex network: convex in theta whatever its weights, so that the local problems stay easy.

        R(theta, gamma) = ||u||^2 / (2 sigma2) + N(u) - N(0) - N'(0) u,    u = theta - mean,
        N(u) = a' phi(A phi(W u + b) + c),   a and A not negative,   phi(x) = (x + sqrt(x^2 + 4)) / 2.

    phi is convex and increasing, hence N is convex and R at least 1 / sigma2 strongly convex in theta, with
    its least value, 0, at the mean (the last three terms are the Bregman divergence of N). Far from the mean
    the network pulls with a bounded force, where a Gaussian pulls ever harder.

    Stiffness is a budget: the rows of W have length `kappa`, a and the rows of A sum to one, and what is
    learned is where to spend it: in directions in which clients agree. The remaining parameters are held by
    epsilon times their squares (as in Lemma 1). R is not jointly convex in (theta, gamma): the server's steps
    descend on M, but to a stationary point.

    gamma has (hidden + 1) d numbers and a few more, which the clients are sent each round; they return d.
    """

    name: ClassVar[str] = "input_convex"

    hidden: int = hyper(8, "width of both layers; so many times the model's size is sent", ge=1)
    sigma2: float = hyper(15.0, "variance of the Gaussian part", gt=0)
    kappa: float = hyper(1.0, "length of the rows of the first layer: the stiffness to spend", gt=0)
    epsilon: float = hyper(1e-4, "weight of the squares of all of gamma but W", gt=0)

    def init(self, theta: Tensor, rng: np.random.Generator) -> ConvexNetwork:
        h = self.hidden
        W = torch.from_numpy(rng.standard_normal((h, len(theta)))).to(theta.dtype)
        b, c, a = torch.zeros((3, h), dtype=theta.dtype)
        return ConvexNetwork(theta, W, b, torch.zeros((h, h), dtype=theta.dtype), c, a)

    def energy(self, theta: Tensor, gamma: ConvexNetwork) -> Tensor:
        u = theta - gamma.mean
        # sums, not matrix products, whose last bit for one client would depend on who is beside it in a chunk
        x = torch.stack([self.kappa / w.norm() * (w * u).sum() for w in gamma.W])
        A, a = gamma.A.softmax(1), gamma.a.softmax(0)
        at_mean = (A * _phi(gamma.b)).sum(1) + gamma.c
        at_theta = (A * _phi(x + gamma.b)).sum(1) + gamma.c
        tangent = _slope(at_mean) * (A * (_slope(gamma.b) * x)).sum(1)  # a' of it is N'(0) u
        divergence = a * (_phi(at_theta) - _phi(at_mean) - tangent)
        return u.square().sum() / (2 * self.sigma2) + divergence.sum()

    def penalty(self, gamma: ConvexNetwork) -> Tensor:
        held = (gamma.mean, gamma.b, gamma.A, gamma.c, gamma.a)
        return self.epsilon * torch.stack([t.square().sum() for t in held]).sum()

    def centre(self, gamma: ConvexNetwork) -> Tensor:
        return gamma.mean


def _phi(x: Tensor) -> Tensor:
    """A softplus of correctly rounded operations alone: torch's own, like all that is made of exp, may differ
    in the last bit with the place of a number in its tensor."""
    return (x + (x.square() + 4).sqrt()) / 2


def _slope(x: Tensor) -> Tensor:
    return (1 + x / (x.square() + 4).sqrt()) / 2

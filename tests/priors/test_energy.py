"""Priors given as functions: gradients, the input-convex network, and the user's own.

Gradients are held against finite differences, everything in float64.
"""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

import descant
from descant.algorithms import FedMAP
from descant.core import fields, tree
from descant.core.tree import Tree
from descant.errors import UsageError
from descant.experiment.config import parse_algorithm
from descant.priors.energy import (
    ConvexNetwork,
    Energy,
    EnergyPrior,
    InputConvex,
    OwnPrior,
    check,
    server_gradient,
)
from descant.priors.solve import SGD, Proximal
from helpers import assert_same, engine, finite_differences, quadratics

EXAMPLES = Path(__file__).parents[2] / "examples"
D = 5


@dataclass(frozen=True)
class Robust(Energy):
    name: ClassVar[str] = "robust"
    width: float = 1.0

    def energy(self, theta: Tensor, gamma: Tensor) -> Tensor:
        return (self.width**2 * ((1 + ((theta - gamma) / self.width).square()).sqrt() - 1)).sum()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def flat(gamma: Tree) -> Tensor:
    return torch.cat([tensor.reshape(-1) for _, tensor in tree.leaves(gamma)])


def unflat(like: Tree, vector: Tensor) -> Tree:
    names, tensors = zip(*tree.leaves(like), strict=True)
    parts = vector.split([t.numel() for t in tensors])
    return tree.rebuild(like, {n: p.reshape(t.shape) for n, p, t in zip(names, parts, tensors, strict=True)})


def network(hidden: int = 3, seed: int = 1) -> ConvexNetwork:
    """Any weights, not only those that a network starts with."""
    like = InputConvex(hidden=hidden).init(torch.zeros(D, dtype=torch.float64), np.random.default_rng(0))
    gamma: ConvexNetwork = unflat(like, normal(flat(like).numel(), seed=seed))
    return gamma


CASES: list[tuple[Energy, Tree]] = [
    (Robust(0.7), normal(D, seed=3)),
    (InputConvex(hidden=3, sigma2=2.0, kappa=3.0, epsilon=0.1), network()),
]
each_case = pytest.mark.parametrize(("family", "gamma"), CASES, ids=["robust", "input_convex"])


@each_case
def test_gradients_in_theta_and_gamma_are_those_of_finite_differences(family: Energy, gamma: Tree) -> None:
    """The prior of a client (scaled by 1/N for Eq. 2), and the objective of the server over three clients."""
    thetas, weights = normal(3, D, seed=2), torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    prior = EnergyPrior(family, gamma, 0.25)
    torch.testing.assert_close(prior.grad(thetas[0]), finite_differences(prior.energy, thetas[0]),
                               rtol=1e-7, atol=1e-8)
    assert prior.energy(thetas[0]) == 0.25 * family.energy(thetas[0], gamma)

    def objective(vector: Tensor) -> Tensor:
        at = unflat(gamma, vector)
        return weights @ torch.stack([family.energy(t, at) for t in thetas]) + family.penalty(at)

    found = flat(server_gradient(family, gamma, thetas, weights))
    torch.testing.assert_close(found, finite_differences(objective, flat(gamma)), rtol=1e-7, atol=1e-8)


@each_case
def test_energies_are_vectorised_over_clients(family: Energy, gamma: Tree) -> None:
    thetas = normal(4, D, seed=5)
    prior = EnergyPrior(family, gamma)
    torch.testing.assert_close(vmap(prior.energy)(thetas), torch.stack([prior.energy(t) for t in thetas]),
                               rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(vmap(prior.grad)(thetas), torch.stack([prior.grad(t) for t in thetas]),
                               rtol=1e-14, atol=1e-14)


# -- the input-convex network ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_the_network_is_convex_in_theta_and_least_at_the_mean(seed: int) -> None:
    """With any weights: R(mean) = 0 with gradient 0, R > ||u||^2 / (2 sigma2) elsewhere, and the Hessian is
    at least I / sigma2, because the rest is the Bregman divergence of a convex function."""
    family, gamma = InputConvex(hidden=3, sigma2=2.0, kappa=4.0), network(seed=seed)
    assert family.energy(gamma.mean, gamma).abs() < 1e-15
    assert EnergyPrior(family, gamma).grad(gamma.mean).abs().max() < 1e-14
    for scale in (0.1, 1.0, 10.0):
        theta = gamma.mean + scale * normal(D, seed=seed + 50)
        least = torch.linalg.eigvalsh(jacrev(grad(family.energy))(theta, gamma)).min()
        assert least >= 1 / 2.0 - 1e-12
        assert family.energy(theta, gamma) > (theta - gamma.mean).square().sum() / 4


def test_the_network_pulls_with_bounded_force() -> None:
    """N'(u) = sum_i c_i w_i with c_i >= 0 of sum at most 1 (phi' < 1) and rows w_i of length kappa: the force
    beside the Gaussian's is at most |N'(u)| + |N'(0)| <= 2 kappa, however far theta is."""
    family, gamma = InputConvex(hidden=3, sigma2=1e12, kappa=1.5), network()
    for seed in range(5):
        force = EnergyPrior(family, gamma).grad(gamma.mean + 1e4 * normal(D, seed=seed)).norm()
        assert 1e-3 < force <= 2 * 1.5


@pytest.mark.slow
def test_learning_the_network_is_well_posed_and_spends_stiffness_where_clients_agree() -> None:
    """Clients differ in the first coordinates only. The server's objective falls with every step, stays above
    its bound 0, and the directions of W turn away from where the clients differ; their lengths count for
    nothing, so that the network cannot buy a small energy by vanishing."""
    family = InputConvex(hidden=4, sigma2=5.0, kappa=2.0)
    thetas = torch.zeros((6, D), dtype=torch.float64)
    thetas[:, :2] = 3 * normal(6, 2, seed=7)
    weights = torch.full((6,), 1 / 6, dtype=torch.float64)
    gamma = family.init(thetas.mean(0), np.random.default_rng(1))

    def objective(gamma: Tree) -> Tensor:
        energies = vmap(family.energy, in_dims=(0, None))(thetas, gamma)
        assert energies.min() >= 0
        return weights @ energies + family.penalty(gamma)

    def share_where_they_agree(gamma: ConvexNetwork) -> Tensor:
        rows = gamma.W / gamma.W.norm(dim=1, keepdim=True)
        return rows[:, 2:].square().sum(1).mean()

    values, before = [objective(gamma)], share_where_they_agree(gamma)
    for _ in range(150):
        gradient = server_gradient(family, gamma, thetas, weights)
        gamma = tree.map_tree(lambda old, g: old - 1.5 * g, gamma, gradient)
        values.append(objective(gamma))
    falls = torch.stack(values).diff()
    assert falls.max() < 0
    assert all(bool(t.isfinite().all()) for _, t in tree.leaves(gamma))
    assert before < 0.7
    assert share_where_they_agree(gamma) > 0.95
    longer = gamma._replace(W=5 * gamma.W)
    torch.testing.assert_close(objective(longer), objective(gamma), rtol=1e-13, atol=1e-13)
    stiff = jacrev(grad(family.energy))(gamma.mean, gamma) - torch.eye(D) / 5.0
    assert stiff[2:, 2:].trace() > 0.1  # it has not vanished ...
    assert stiff[:2, :2].trace() < 0.1 * stiff[2:, 2:].trace()  # ... but gone where it costs nothing


@pytest.mark.parametrize("hidden", [2, 8])
def test_what_the_network_costs(hidden: int) -> None:
    """Down: mean and first layer, (hidden + 1) d numbers, and hidden^2 + 3 hidden more; up: d, log omega."""
    method = FedMAP(InputConvex(hidden=hidden), server_lr=0.1)
    with engine(method, quadratics(4), "quadratic", backend="vectorised") as e:
        [report] = e.play(1)
    assert report.bytes_down == 4 * 8 * ((hidden + 1) * 4 + hidden**2 + 3 * hidden)
    assert report.bytes_up == 4 * 8 * (4 + 1)


# -- the user's own ----------------------------------------------------------------------------------------


def played(prior: Energy) -> Any:
    method = FedMAP(prior, SGD(lr=0.2), weights="samples", server_lr=0.5)
    with engine(method, quadratics(4), "quadratic") as e:
        e.play(3)
        return e.server, e.states(), e.model


def test_a_function_a_class_and_an_object_are_the_same_prior(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    function, cls = OwnPrior("own_prior:robust"), OwnPrior("own_prior:Robust")
    expected = played(Robust())
    assert_same(played(function), expected, 1e-14)
    assert_same(played(cls), expected, 1e-14)
    assert_same(played(sys.modules["own_prior"].Robust(1.0)), expected, 1e-14)
    assert pickle.loads(pickle.dumps(function)) == function


def test_own_priors_in_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"name": "fedmap", "prior": {"name": "own", "place": "own_prior:robust"}, "server_lr": 0.5}
    method = parse_algorithm(table)
    assert isinstance(method, FedMAP)
    assert method.prior == OwnPrior("own_prior:robust")
    assert parse_algorithm(fields.dump(method)) == method
    # an object of one's own is told apart from descant's: a table never turns into another prior
    mine = fields.dump(FedMAP(Robust(0.5), server_lr=0.5))
    assert mine["prior"] == {"name": "robust", "width": 0.5}
    with pytest.raises(UsageError, match=r"prior.name 'robust'.*known are adaptive, diagonal, fixed"):
        parse_algorithm(mine)


@pytest.mark.thorough
def test_a_run_with_an_object_of_ones_own_says_how_to_go_on(tmp_path: Path) -> None:
    """Its directory cannot make the object again; the same call can."""
    def train(prior: Energy, name: str, rounds: int, **more: Any) -> descant.Run:
        return descant.run(FedMAP(prior, SGD(lr=0.05), server_lr=0.5), federation=quadratics(3),
                           out=tmp_path / name, rounds=rounds, model="quadratic",
                           backend="vectorised", **more)

    train(Robust(), "object", 2)
    for again in (descant.load, descant.resume):
        with pytest.raises(UsageError, match=r"algorithm\.prior was a Python object, 'robust'.*resume=True"
                                             r'.*name = "own", place = "package\.module:name"'):
            again(tmp_path / "object")
    assert len(train(Robust(), "object", 3, resume=True).history) == 3
    train(InputConvex(), "named", 1)
    assert descant.load(tmp_path / "named").summary["rounds"] == 1


@pytest.mark.parametrize(("place", "why"), [
    ("", r'own.place must read "package.module:name"'),
    ("own_prior.robust", r'own.place must read "package.module:name"'),
    ("own_prior:robust:x", r'own.place must read "package.module:name"'),
    (3, "own.place must be text"),
])
def test_places_that_are_none(place: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        OwnPrior(place)


@pytest.mark.parametrize(("place", "why"), [
    ("no_such_module:robust", "no_such_module:robust: there is no module 'no_such_module'"),
    ("own_prior:robst", "name in module own_prior 'robst': did you mean 'robust'"),
    ("own_prior:__doc__", "must be a function R.theta, gamma. or an Energy, not"),
    ("helpers:Engine", "must be a function R.theta, gamma. or an Energy, not <class"),
    ("collections:OrderedDict", "collections is a module of Python itself"),
])
def test_places_where_no_prior_is(place: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    with pytest.raises(UsageError, match=why), \
         engine(FedMAP(OwnPrior(place), server_lr=1.0), quadratics(3), "quadratic"):
        pass




def per_coordinate(theta: Tensor, gamma: Tensor) -> Tensor:
    return (theta - gamma).square()


def a_number(theta: Tensor, gamma: Tensor) -> Any:
    return float((theta - gamma).square().sum())


def detached(theta: Tensor, gamma: Tensor) -> Tensor:
    return (theta - gamma).detach().square().sum()


def without_gamma(theta: Tensor, gamma: Tensor) -> Tensor:
    return theta.square().sum()


def through_numpy(theta: Tensor, gamma: Tensor) -> Tensor:
    return torch.as_tensor(np.square((theta - gamma).numpy()).sum())


def by_branch(theta: Tensor, gamma: Tensor) -> Tensor:
    return (theta - gamma).square().sum() if theta.sum() > 0 else (theta - gamma).abs().sum()


def infinite(theta: Tensor, gamma: Tensor) -> Tensor:
    return ((theta - gamma).square() - 100).sqrt().sum()


def of_one(theta: Tensor) -> Tensor:
    return theta.sum()


@pytest.mark.parametrize(("function", "why"), [
    (per_coordinate, r"gives shape \(4,\): it must give a tensor with one number"),
    (a_number, "gives a float: it must give a tensor"),
    (detached, "the gradient of R in theta is zero: R does not depend on it, or not as autograd sees it"),
    (without_gamma, "the gradient of R in gamma is zero"),
    (through_numpy, "cannot be differentiated"),
    (by_branch, r"cannot be differentiated .*without .item\(\), .numpy\(\) or branches"),
    (infinite, "the gradient of R in theta is not finite"),
    (of_one, "fails near the initial model with TypeError"),
])
def test_functions_that_are_no_prior(function: Any, why: str) -> None:
    method = FedMAP(OwnPrior(f"{__name__}:{function.__name__}"), server_lr=1.0)
    with pytest.raises(UsageError, match=why), engine(method, quadratics(3), "quadratic"):
        pass


def test_energies_that_are_no_prior() -> None:
    class Nameless(Energy):
        def energy(self, theta: Tensor, gamma: Tensor) -> Tensor:
            return per_coordinate(theta, gamma).sum()

    @dataclass(frozen=True)
    class OffCentre(Robust):
        def centre(self, gamma: Tensor) -> Tensor:
            return gamma[:1]

    with pytest.raises(UsageError, match="Nameless must be a frozen dataclass with a `name`"):
        FedMAP(Nameless(), server_lr=1.0)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"the centre of gamma has shape \(1,\)"):
        check(OffCentre(), torch.zeros(4))
    with pytest.raises(UsageError, match="server_lr: the prior robust has no weighted mean"):
        FedMAP(Robust())
    with pytest.raises(UsageError, match="solver: the prior robust has no proximal map"):
        FedMAP(Robust(), Proximal(), server_lr=1.0)
    with pytest.raises(UsageError, match="no proximal map"):
        EnergyPrior(Robust(), torch.zeros(4)).prox(torch.zeros(4), 0.1)
    with pytest.raises(UsageError, match="hidden must be at least 1"):
        InputConvex(hidden=0)

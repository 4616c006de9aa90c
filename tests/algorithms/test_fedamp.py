"""FedAMP and HeurFedAMP: attention by hand, its ends, and its fixed point."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from descant.algorithms import FedAMP, FedProx, HeurFedAMP, LocalTrain
from descant.core.algorithm import Round
from descant.core.vector import Model
from descant.priors.attention import BLOCK
from descant.priors.solve import SGD
from helpers import assert_same, engine, quadratics, unbalanced

FEDERATION = unbalanced(quadratics(5, rows=12), (9, 1, 4, 2, 6))
H, A = FEDERATION.truth["H"], FEDERATION.truth["optima"]
I = torch.eye(4, dtype=torch.float64)  # noqa: E741 (the identity)
FULL: dict[str, Any] = {"batch": "full", "backend": "vectorised", "chunk": 5}


def attention(w: torch.Tensor, alpha: float, sigma: float) -> torch.Tensor:
    """xi [m, m], entry by entry."""
    m = len(w)
    xi = torch.zeros((m, m), dtype=w.dtype)
    for i in range(m):
        for j in range(m):
            if i != j:
                xi[i, j] = alpha * math.exp(-float((w[i] - w[j]).square().sum()) / sigma) / sigma
        xi[i, i] = 1 - sum(float(xi[i, j]) for j in range(m) if j != i)
    return xi


def test_what_a_cohort_is_sent() -> None:
    """u_i of the clients of the cohort, in their order, from the models of all."""
    method = FedAMP(alpha=0.4, sigma=3.0)
    with engine(method, FEDERATION, "quadratic", **FULL) as e:
        server = Model(A.clone(), torch.zeros((5, 0), dtype=torch.float64))
        cohort = e.training.round_of(e.everyone).of(torch.tensor([1, 4]))
        expected = attention(A, 0.4, 3.0) @ A
        sent = method.broadcast(server, cohort).each
        torch.testing.assert_close(sent.theta, expected[[1, 4]], rtol=0, atol=1e-12)
        assert (expected - A).abs().max() > 0.01
        newcomer = method.newcomer(server, cohort).shared
        torch.testing.assert_close(newcomer.theta, A.mean(0))


@pytest.mark.slow
def test_it_comes_to_rest_at_its_fixed_point() -> None:
    """w_i = (H_i + lam)^-1 (H_i a_i + lam u_i), u = xi(w) w: one round with exact solves leaves it there."""
    lam = 1.0
    method = FedAMP(alpha=0.4, sigma=4.0, lam=lam, solver=SGD(lr=0.6))
    with engine(method, FEDERATION, "quadratic", local={"steps": 15}, **FULL) as e:
        e.play(100)  # each shrinks the error by lam / (lam + 0.2) = 0.83: 0.83^100 = 1e-8
        w = e.server.theta
        u = attention(w, 0.4, 4.0) @ w
        expected = torch.linalg.solve(H + lam * I, torch.einsum("ijk,ik->ij", H, A) + lam * u)
        torch.testing.assert_close(w, expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(e.personal().theta, w, rtol=0, atol=0)
        assert (w - A).abs().max() > 0.05
        assert e.model is None


def test_absent_clients_count_with_their_last_model() -> None:
    with engine(FedAMP(), FEDERATION, "quadratic", local={"steps": 2}, **FULL | {"cohort": 2}) as e:
        for _ in range(4):
            before, last = e.server.theta.clone(), e.training.store.last_round.copy()
            e.play()
            moved = torch.from_numpy(e.training.store.last_round != last)
            assert int(moved.sum()) == 2
            assert torch.equal(e.server.theta[~moved], before[~moved])
            assert not torch.equal(e.server.theta[moved], before[moved])


def test_without_attention_every_client_is_alone() -> None:
    """alpha -> 0: u_i = w_i. With lam = 0 besides, and where a round starts at w_i, that is LocalTrain."""
    solver = SGD(lr=0.3)
    with engine(FedAMP(alpha=1e-300, lam=0.0, solver=solver), FEDERATION, "quadratic", **FULL) as e, \
         engine(LocalTrain(solver), FEDERATION, "quadratic", **FULL) as alone:
        e.play(5)
        alone.play(5)
        assert_same(e.states(), alone.states(), 1e-13)


def test_with_equal_attention_it_is_fedprox_of_personal_models() -> None:
    """sigma -> inf with alpha = sigma / m: xi_ij = 1/m, every u_i is the mean, and a round is FedProx's."""
    solver, sigma = SGD(lr=0.3), 1e9
    with engine(FedAMP(alpha=sigma / 5, sigma=sigma, lam=0.7, solver=solver), FEDERATION, "quadratic",
                **FULL) as e, \
         engine(FedProx(mu=0.7, solver=solver, weights="uniform"), FEDERATION, "quadratic", **FULL) as prox:
        e.play(5)
        prox.play(5)
        torch.testing.assert_close(e.server.theta.mean(0), prox.model.theta, rtol=0, atol=1e-6)


def server_of(models: torch.Tensor) -> Model:
    return Model(models, models.new_zeros((len(models), 0)))


@pytest.mark.parametrize("method", [FedAMP(alpha=0.4, sigma=3.0), HeurFedAMP(sigma=3.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_a_client_is_sent_does_not_depend_on_the_cohort(method: Any, dtype: torch.dtype) -> None:
    """Bit for bit, with clients in several blocks, the last of them short."""
    m = 2 * BLOCK + 33
    models = 0.2 * torch.randn((m, 51), generator=torch.Generator().manual_seed(1), dtype=dtype)
    everyone = Round(0, 1, torch.arange(m), torch.ones(m, dtype=dtype), m)
    expected = method.broadcast(server_of(models), everyone).each.theta
    if isinstance(method, FedAMP) and dtype == torch.float64:  # and it is right, across blocks
        xi = 0.4 / 3.0 * (-torch.cdist(models, models).square() / 3.0).exp()
        xi.fill_diagonal_(0).diagonal().copy_(1 - xi.sum(1))
        torch.testing.assert_close(expected, xi @ models, rtol=0, atol=1e-10)
    for cohort in ([0], [m - 1], [3, BLOCK, 2 * BLOCK + 5], [*range(5, m, 7)]):
        sent = method.broadcast(server_of(models), everyone.of(torch.tensor(cohort))).each.theta
        assert torch.equal(sent, expected[cohort])


def test_huge_and_tiny_sigma() -> None:
    """sigma -> inf with alpha = sigma / m mixes alike, u_i = mean; sigma -> 0: exp(-||.||^2 / sigma) / sigma
    -> 0 for models that differ, u_i = w_i."""
    facts = Round(0, 1, torch.arange(5), torch.ones(5, dtype=torch.float64), 5)
    uniform = FedAMP(alpha=1e9 / 5, sigma=1e9).broadcast(server_of(A), facts).each.theta
    torch.testing.assert_close(uniform, A.mean(0).expand(5, 4), rtol=0, atol=1e-7)
    alone = FedAMP(alpha=1.0, sigma=1e-3).broadcast(server_of(A), facts).each.theta
    assert torch.equal(alone, A)


def heuristic(w: torch.Tensor, sigma: float, own: float) -> torch.Tensor:
    """xi [m, m] of HeurFedAMP, entry by entry."""
    m = len(w)
    xi = torch.zeros((m, m), dtype=w.dtype)
    for i in range(m):
        e = {j: math.exp(sigma * float(w[i] @ w[j] / w[i].norm() / w[j].norm())) for j in range(m) if j != i}
        for j, value in e.items():
            xi[i, j] = (1 - own) * value / sum(e.values())
        xi[i, i] = own
    return xi


@pytest.mark.parametrize(("sigma", "own"), [(4.0, 0.3), (0.0, 0.3), (2.0, 0.0), (7.0, 1.0)])
def test_the_attention_of_heurfedamp(sigma: float, own: float) -> None:
    """By hand; sigma = 0: all others alike; own = 1: u_i = w_i."""
    facts = Round(0, 1, torch.arange(5), torch.ones(5, dtype=torch.float64), 5)
    sent = HeurFedAMP(sigma=sigma, self_attention=own).broadcast(server_of(A), facts).each.theta
    torch.testing.assert_close(sent, heuristic(A, sigma, own) @ A, rtol=0, atol=1e-12)
    if sigma == 0:
        others = (A.sum(0) - A) / 4
        torch.testing.assert_close(sent, own * A + (1 - own) * others, rtol=0, atol=1e-12)
    if own == 1:
        torch.testing.assert_close(sent, A, rtol=0, atol=1e-15)


def test_huge_sigma_attends_to_the_nearest_angle_and_one_client_to_itself() -> None:
    w = torch.tensor([[1.0, 0.0], [2.0, 0.1], [0.0, 3.0]], dtype=torch.float64)
    facts = Round(0, 1, torch.arange(3), torch.ones(3, dtype=torch.float64), 3)
    method = HeurFedAMP(sigma=1e4, self_attention=0.0)
    assert torch.equal(method.broadcast(server_of(w), facts).each.theta, w[[1, 0, 1]])
    alone = facts.of(torch.tensor([0]))._replace(population=1)
    assert torch.equal(method.broadcast(server_of(w[:1]), alone).each.theta, w[:1])
    zero = torch.zeros((3, 2), dtype=torch.float64)  # no angle is defined: all count alike
    assert torch.equal(method.broadcast(server_of(zero), facts).each.theta, zero)

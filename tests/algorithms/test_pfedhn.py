"""pFedHN: the server's gradient, descent by hand, what it reduces to, and the fit of a newcomer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from descant.algorithms import FedAvg, pFedHN
from descant.algorithms.pfedhn import Layer, Server, Upload, generated
from descant.core.tree import leaves, map_tree
from descant.core.vector import Model
from descant.priors.solve import SGD
from helpers import Engine, engine, finite_differences, quadratics

FEDERATION = quadratics(5)
H, A = FEDERATION.truth["H"], FEDERATION.truth["optima"]
FULL: dict[str, Any] = {"batch": "full", "backend": "vectorised", "chunk": 5}
PLAIN = {"clip": 1e9, "server": SGD(lr=1.0)}


def randomised(server: Server, seed: int = 0) -> Server:
    generator = torch.Generator().manual_seed(seed)
    drawn = map_tree(lambda t: torch.randn(t.shape, generator=generator, dtype=t.dtype),
                     (server.phi, server.v))
    return server._replace(phi=drawn[0], v=drawn[1])


def pulled(e: Engine) -> Tensor:
    """The clients' gradients at the models that they are sent."""
    thetas = e.training.work.algorithm.broadcast(e.server, e.training.round_of(e.everyone)).each.theta
    return torch.einsum("ijk,ik->ij", H, thetas - A)


def test_the_servers_gradient_is_that_of_finite_differences() -> None:
    """It descends on -mean_{i in S} <h(v_i; phi), delta_i> with delta fixed: for two clients of five."""
    method = pFedHN(embedding=2, hidden=3, layers=2, **PLAIN)
    with engine(method, FEDERATION, "quadratic", **FULL) as e:
        server = randomised(e.server)
        cohort = e.training.round_of(e.everyone).of(torch.tensor([1, 4]))
    shapes = [t.shape for _, t in leaves((server.phi, server.v))]
    flat = torch.cat([t.flatten() for _, t in leaves((server.phi, server.v))])
    delta = torch.randn((2, 4), generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def objective(flat: Tensor) -> Tensor:
        *parts, v = [p.view(shape) for p, shape in
                     zip(flat.split([s.numel() for s in shapes]), shapes, strict=True)]
        phi = tuple(Layer(*parts[k : k + 2]) for k in range(0, len(parts), 2))
        return -torch.stack([generated(phi, v[i]) @ delta[k] for k, i in enumerate((1, 4))]).mean()

    stats = torch.zeros((2, 0), dtype=torch.float64)
    moved, report = method.aggregate(server, Upload(delta, stats), cohort)
    found = flat - torch.cat([t.flatten() for _, t in leaves((moved.phi, moved.v))])
    torch.testing.assert_close(found, finite_differences(objective, flat), rtol=0, atol=1e-8)
    torch.testing.assert_close(report["gradient"], found.norm())
    assert torch.equal(moved.v[[0, 2, 3]], server.v[[0, 2, 3]])
    clipped, _ = pFedHN(clip=0.5, server=SGD(lr=1.0)).aggregate(server, Upload(delta, stats), cohort)
    shorter = flat - torch.cat([t.flatten() for _, t in leaves((clipped.phi, clipped.v))])
    torch.testing.assert_close(shorter, 0.5 * found / found.norm())


def test_a_linear_hypernetwork_of_one_client_by_hand() -> None:
    """theta = W v + b. A step of the client is delta = -lr H (theta - a); then W += eta delta v', b += eta
    delta and v += eta W' delta: gradient descent on f(W v + b) with step lr * eta."""
    federation, lr, eta = quadratics(1), 0.2, 0.3
    H, a = federation.truth["H"][0], federation.truth["optima"][0]
    method = pFedHN(embedding=2, layers=0, solver=SGD(lr=lr), server=SGD(lr=eta), clip=1e9)
    with engine(method, federation, "quadratic", batch="full", local={"steps": 1}) as e:
        e.training.server = randomised(e.server)
        (last,), [v], *_ = e.server
        W, b = last
        for _ in range(3):
            delta = -lr * H @ (W @ v + b - a)
            W, b, v = W + eta * torch.outer(delta, v), b + eta * delta, v + eta * W.T @ delta
            e.play()
        torch.testing.assert_close(e.server.phi[0].weight, W)
        torch.testing.assert_close(e.server.phi[0].bias, b)
        torch.testing.assert_close(e.server.v[0], v)
        torch.testing.assert_close(e.personal().theta[0], W @ v + b)


def test_everyone_begins_at_the_common_model() -> None:
    with engine(pFedHN(), FEDERATION, "quadratic", **FULL) as e:
        assert torch.equal(e.personal().theta, torch.zeros_like(A))
        assert e.server.v.shape == (5, 2)  # 1 + 5 // 4
        assert e.model is None


@pytest.mark.thorough
def test_where_it_can_it_gives_every_client_its_optimum() -> None:
    """At a point of rest J' delta = 0. With a linear h and m independent embeddings that is delta_i = 0 for
    all i, where every client is at its own optimum."""
    method = pFedHN(embedding=5, layers=0, solver=SGD(lr=0.3), server=SGD(lr=0.8))
    with engine(method, FEDERATION, "quadratic", local={"steps": 5}, **FULL) as e:
        e.training.server = e.server._replace(v=2 * torch.eye(5, dtype=torch.float64))
        e.play(40)
        torch.testing.assert_close(e.personal().theta, A, rtol=0, atol=1e-4)
        assert pulled(e).abs().max() < 1e-3


def test_with_embeddings_of_zero_it_is_fedavg() -> None:
    """theta_i = b for all, W and v stay at zero, and b moves by the mean of the deltas."""
    solver = SGD(lr=0.3)
    with engine(pFedHN(layers=0, solver=solver, **PLAIN), FEDERATION, "quadratic", **FULL) as e, \
         engine(FedAvg(solver, weights="uniform"), FEDERATION, "quadratic", **FULL) as average:
        e.training.server = e.server._replace(v=torch.zeros_like(e.server.v))
        e.play(4)
        average.play(4)
        torch.testing.assert_close(e.personal().theta, average.model.theta.expand(5, -1))


@pytest.mark.parametrize("backend", ["loop", "vectorised"])
def test_a_newcomer_fits_its_embedding_alone(backend: str) -> None:
    """From the mean embedding: v <- v - lr_v W' H_i (W v + b - a_i), twice."""
    method = pFedHN(embedding=2, layers=0, lr_v=0.05)
    with engine(method, FEDERATION, "quadratic", batch="full", backend=backend, local={"steps": 2}) as e:
        server = randomised(e.server)
        (W, b), = server.phi
        sent = method.newcomer(server, e.training.round_of(e.everyone))
        found: Model = e.backend.run("adapt", e.everyone, 1, sent, e.states()).values
        for i in range(5):
            v = server.v.mean(0)
            for _ in range(2):
                v = v - 0.05 * W.T @ H[i] @ (W @ v + b - A[i])
            torch.testing.assert_close(found.theta[i], W @ v + b)


def test_the_mean_of_the_statistics_travels() -> None:
    with engine(pFedHN(), FEDERATION, "quadratic", **FULL) as e:
        stats = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
        cohort = e.training.round_of(e.everyone).of(torch.tensor([0, 2]))
        moved, _ = e.training.work.algorithm.aggregate(e.server, Upload(A[:2], stats), cohort)
        assert torch.equal(moved.stats, torch.tensor([2.0], dtype=torch.float64))
        sent = e.training.work.algorithm.broadcast(moved, cohort).each
        assert torch.equal(sent.stats, torch.full((2, 1), 2.0, dtype=torch.float64))

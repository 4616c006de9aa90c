"""CGPFL's theorems: the terms against their definitions, and what Theorem 2 says of exact solutions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from descant.errors import UsageError
from descant.theory import clusters

GIVEN: dict[str, Any] = {"alpha": 0.8, "rho": 3.0, "rho_g": 5.0, "L_G": 2.0, "descent": 4.0, "delta": 0.7}


def test_theorem_1_as_printed() -> None:
    K, N, R, T = 3, 20, 10, 500
    step = min(8 * 0.8**2 * 9 / (3 * 4), (4 / 3) ** 0.5 * 0.8 * 3 / 5, (1 / (416 * 4)) ** 0.5 * 0.8)
    found = clusters.theorem1_bound(T, R, N, K, **GIVEN)
    assert found.start == pytest.approx(48 * 0.8**2 * (9 / 3) / (step**2 * 500))
    assert found.noise == pytest.approx(80 * (26 * (9 / 3) * 4 * 0.7**2) ** 0.5 / (20 * 3 * 10 * 500) ** 0.5)
    assert found.floor == pytest.approx(52 * 0.7**2 / 60)
    assert found.value == pytest.approx(sum(found))
    assert clusters.personal_bound(1.5, 2.0, delta_G=3.0, delta=0.5) == 1.5 + 9 / 4 + 0.25
    assert clusters.largest_beta(1, 2.0) == pytest.approx(1 / (2 * math.sqrt(2 * 4)))


def test_theorem_1_scales_as_its_remark_says() -> None:
    """The noise falls with 1 / sqrt(K N R T), by which Remark 1 claims that K clusters are faster; with
    the same rho, the sqrt(K) within makes it 1 / K."""
    one = clusters.theorem1_bound(100, 10, 20, 1, **GIVEN)
    for change, factor in (({"T": 400}, 2), ({"R": 40}, 2), ({"N": 80}, 2), ({"K": 4}, 4)):
        other = clusters.theorem1_bound(**{"T": 100, "R": 10, "N": 20, "K": 1, **change}, **GIVEN)
        assert one.noise / other.noise == pytest.approx(factor)
    assert clusters.theorem1_bound(400, 10, 20, 1, **GIVEN).start == pytest.approx(one.start / 4)
    with pytest.raises(UsageError, match=r"alpha = 1\.5: Theorem 1 needs 0 < alpha <= 1"):
        clusters.theorem1_bound(100, 10, 20, 1, **GIVEN | {"alpha": 1.5})


def test_theorem_2_as_printed() -> None:
    found = clusters.theorem2_bound(5000, 50, 20, 3, delta=0.1, lam=4.0, L=2.0, cost=0.3,
                                    disagreement=0.2, B=1.5, discrepancy=0.05)
    assert found.confidence == pytest.approx(2 * math.sqrt(math.log(200) / 5000))
    assert found.complexity == pytest.approx(math.sqrt(50 * 3 / 5000 * math.log(math.e * 5000 / 50)))
    assert found.data == pytest.approx(2 * 1.5 * 0.2 + 0.05)
    assert found.cost == pytest.approx(5 * 0.3)
    assert found.value == pytest.approx(sum(found))
    with pytest.raises(UsageError, match="delta = 1 must lie between 0 and 1"):
        clusters.theorem2_bound(10, 2, 2, 1, delta=1.0, lam=1.0, L=1.0, cost=0.0)


@pytest.mark.parametrize("seed", range(5))
def test_the_cost_bounds_what_a_cluster_s_model_loses(seed: int) -> None:
    """(28): for theta_i = argmin L_i + lam/2 ||. - omega_k||^2, sum_i (m_i/m) (L_i(omega_k) - L_i(theta_i))
    is at most (lam + L/2) cost. On quadratics of curvature up to L, with the nearest of three centres."""
    rng = torch.Generator().manual_seed(seed)
    lam, L, d, N = 1.5, 3.0, 4, 12
    centres = torch.randn(3, d, generator=rng, dtype=torch.float64)
    optima = 2 * torch.randn(N, d, generator=rng, dtype=torch.float64)
    sizes = torch.randint(1, 50, (N,), generator=rng)
    own = torch.arange(N) % 3
    Q = torch.linalg.qr(torch.randn(N, d, d, generator=rng, dtype=torch.float64)).Q
    H = Q @ torch.diag(torch.linspace(0.1, L, d, dtype=torch.float64)) @ Q.mT
    for _ in range(200):  # until everyone's model is nearest to the centre that it is drawn to
        right = (H @ optima[..., None])[..., 0] + lam * centres[own]
        theta = torch.linalg.solve(H + lam * torch.eye(d, dtype=torch.float64), right)
        nearest = (theta[:, None] - centres).square().sum(2).argmin(1)
        if torch.equal(nearest, own):
            break
        own = nearest
    assert torch.equal(nearest, own)

    def losses(at: torch.Tensor) -> torch.Tensor:
        gap = at - optima
        return torch.einsum("ij,ijk,ik->i", gap, H, gap) / 2

    share = sizes.double() / sizes.sum()
    lost = float(share @ (losses(centres[own]) - losses(theta)))
    cost = clusters.cluster_cost(theta, centres, sizes)
    assert cost == pytest.approx(float(share @ (theta - centres[own]).square().sum(1)))
    bound = clusters.theorem2_bound(1000, d, N, 3, delta=0.1, lam=lam, L=L, cost=cost)
    assert 0 < lost <= bound.cost
    assert lost > 0.2 * bound.cost  # and it is not far from it

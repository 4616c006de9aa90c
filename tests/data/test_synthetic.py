"""The synthetic federations of papers against the truth they are drawn from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from descant import data
from descant.data.samples import Samples
from descant.data.synthetic import FedMAPLinear, FedMAPShell, FedProxLogistic


def rows_of(samples: Samples, client: int) -> torch.Tensor:
    assert samples.owner is not None
    return torch.from_numpy(samples.owner == client)


@pytest.mark.parametrize("r", [0.0, 0.5, 3.0])
def test_fedprox_heterogeneity_is_the_one_asked_for(r: float) -> None:
    samples = FedProxLogistic(heterogeneity=r, rows=1).load(clients=400, seed=0)
    models = samples.truth["models"]
    assert models.shape == (400, 2 * 11)
    weights, biases = models[:, :20], models[:, 20:]
    assert (weights - weights.mean(0)).std().item() == pytest.approx(r, rel=0.03)
    assert not biases.any()
    assert torch.allclose(samples.common["global"], models.mean(0))


def test_fedprox_defaults_and_features() -> None:
    samples = FedProxLogistic().load(clients=10, seed=0)
    assert samples.x.shape == (2000, 10)
    assert samples.classes == 2
    many = FedProxLogistic(rows=4000).load(clients=30, seed=0)
    means = torch.stack([many.x[rows_of(many, k)].mean(0) for k in range(30)])
    assert means.std().item() == pytest.approx(1, rel=0.1)  # v_i
    variances = torch.stack([many.x[rows_of(many, k)].var(0) for k in range(30)]).mean(0)
    assert torch.allclose(variances, torch.arange(1, 11) ** -1.2, rtol=0.05)


def test_fedprox_labels() -> None:
    for labels in ("sampled", "argmax"):
        samples = FedProxLogistic(rows=3000, heterogeneity=1.0, classes=3, labels=labels  # type: ignore[arg-type]
                                  ).load(clients=4, seed=1)
        for k in range(4):
            mine = rows_of(samples, k)
            weight = samples.truth["models"][k, :30].view(3, 10)
            probability = (samples.x[mine] @ weight.T).softmax(1)
            agree = (probability.argmax(1) == samples.y[mine]).float().mean()
            if labels == "argmax":
                assert agree == 1  # separable by the true model
            else:
                assert agree.item() == pytest.approx(probability.amax(1).mean().item(), abs=0.03)


def preimage(samples: Samples, client: int) -> tuple[np.ndarray, np.ndarray]:
    """A client's rows before its affine map, in the subspace and outside of it."""
    matrix, shift = samples.truth["matrix"][client].numpy(), samples.truth["shift"][client].numpy()
    z = np.linalg.solve(matrix.T, (samples.x[rows_of(samples, client)].double().numpy() - shift).T).T
    basis = samples.common["basis"].numpy()
    return z @ basis, z - z @ basis @ basis.T


def test_shell_geometry() -> None:
    samples = FedMAPShell().load(clients=10, seed=0)
    assert samples.x.shape == (20000, 30)
    basis = samples.common["basis"]
    assert torch.allclose(basis.T @ basis, torch.eye(4, dtype=torch.float64))
    for k in (0, 9):
        inner, outer = preimage(samples, k)
        y = samples.y[rows_of(samples, k)].numpy()
        radius = np.linalg.norm(inner[y == 1], axis=1)
        assert radius.mean() == pytest.approx(8, abs=0.2)
        assert radius.var() == pytest.approx(2, rel=0.15)
        assert np.abs(inner[y == 1].mean(0)).max() < 0.5  # all around
        assert inner[y == 0].var() == pytest.approx(2, rel=0.1)
        assert np.square(outer).sum(1).mean() == pytest.approx(26 * 9, rel=0.05)
        assert np.bincount(y).tolist() == [1000, 1000]


def test_shell_maps_are_the_clients_own() -> None:
    truth = FedMAPShell(rows=8).load(clients=40, seed=0).truth
    assert truth["matrix"].std().item() == pytest.approx(1, rel=0.02)
    size = truth["shift"].norm(dim=1) / (5 * torch.arange(1, 41) * 30**0.5)  # grows with the client
    assert size.mean().item() == pytest.approx(1, rel=0.05)
    assert size.std() < 0.2


def test_shell_scenarios() -> None:
    """Clients 1 to 5 are alike; 6 to 10 are small, or have 85 % of class 0."""
    def table(scenario: str) -> list[list[int]]:
        samples = FedMAPShell(scenario).load(clients=10, seed=0)  # type: ignore[arg-type]
        return [torch.bincount(samples.y[rows_of(samples, k)]).tolist() for k in range(10)]

    assert table("feature") == [[1000, 1000]] * 10
    assert table("quantity") == [[1000, 1000]] * 5 + [[250, 250]] * 5
    assert table("label") == [[1000, 1000]] * 5 + [[1700, 300]] * 5


def slope(x: torch.Tensor, y: torch.Tensor) -> float:
    return float(np.polyfit(x[:, 0].numpy(), y.numpy(), 1)[0])


def test_five_falling_lines_look_like_a_rising_one() -> None:
    for seed in range(5):
        samples = FedMAPLinear().load(clients=5, seed=seed)
        sizes = [int(rows_of(samples, k).sum()) for k in range(5)]
        assert sizes == [60, 1, 2, 3, 50]
        assert 1.5 < slope(samples.x, samples.y) < 3
        for k in (0, 4):
            mine = rows_of(samples, k)
            assert slope(samples.x[mine], samples.y[mine]) == pytest.approx(-1, abs=0.5)
            assert samples.x[mine].mean().item() == pytest.approx(k, abs=0.5)
        a, b = samples.truth["models"].T
        assert a.tolist() == [-1] * 5
        assert b.tolist() == [0, 4, 8, 12, 16]
    owner = torch.from_numpy(np.asarray(samples.owner))
    noise = torch.cat([(s.y - a[owner] * s.x[:, 0] - b[owner])
                       for s in (FedMAPLinear().load(5, seed) for seed in range(40))])
    assert noise.var().item() == pytest.approx(0.8, rel=0.05)
    assert abs(noise.mean().item()) < 0.05


def test_linear_clients_are_kept_without_a_test_share() -> None:
    fed = data.federation("fedmap_linear", test=0, validation=0)
    assert fed.train.sizes.tolist() == [60, 1, 2, 3, 50]
    short = data.federation("fedmap_linear")
    assert short.names == ("0", "2", "3", "4")
    assert short.notes == ("client '1' dropped: 1 row", "clients '2' (2) and '3' (3) have fewer than 5 rows: "
                           "scores measured there are mostly noise")
    assert short.truth["models"][:, 1].tolist() == [0, 8, 12, 16]  # of those who are left


@pytest.mark.parametrize("name", ["fedprox_logistic", "fedmap_shell"])
def test_seeds_repeat(name: str) -> None:
    first, again, other = (data.federation(name, rows=20, seed=seed) for seed in (3, 3, 4))
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()
    assert first.population == 10


def test_planted_clusters_as_cgpfl_needs_them() -> None:
    """40 clients in 4 clusters: the models of clients tell the clusters apart, by k-means or by eye."""
    fed = data.federation("logistic", clients=40, clusters=4, heterogeneity=0.3, separation=2.0,
                          imbalance=0.8)
    models, cluster = fed.truth["models"], fed.truth["cluster"]
    centres = torch.stack([models[cluster == k].mean(0) for k in range(4)])
    assert torch.equal(torch.cdist(models, centres).argmin(1), cluster)
    assert torch.bincount(cluster).tolist() == [10] * 4

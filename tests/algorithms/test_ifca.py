"""IFCA: FedAvg with one cluster, clusters by hand, planted clusters found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import descant
from descant.algorithms import IFCA, FedAvg
from descant.core.algorithm import apart
from descant.core.vector import Model
from descant.errors import UsageError
from descant.experiment.directory import read_metrics
from descant.priors.solve import SGD
from helpers import assert_same, batchnorm_net, engine, quadratics, ragged, unbalanced

FEDERATION = unbalanced(quadratics(5, rows=12), (9, 1, 4, 2, 6))
H, A = FEDERATION.truth["H"], FEDERATION.truth["optima"]
N = torch.tensor([9.0, 1, 4, 2, 6], dtype=torch.float64)
FULL: dict[str, Any] = {"batch": "full", "local": {"steps": 1}, "backend": "vectorised", "chunk": 5}


@pytest.mark.parametrize("backend", ["loop", "vectorised"])
@pytest.mark.parametrize("settings", [{}, {"beta": 2.0, "weights": "uniform"}, {"finetune": 2}])
@pytest.mark.thorough
def test_one_cluster_is_fedavg_bit_for_bit(backend: str, settings: dict[str, Any]) -> None:
    solver = SGD(lr=0.05, momentum=0.5)
    for model in ("mclr", batchnorm_net()):
        with engine(IFCA(K=1, solver=solver, **settings), ragged(), model, backend=backend, cohort=4) as e, \
             engine(FedAvg(solver, **settings), ragged(), model, backend=backend, cohort=4) as average:
            e.play(3)
            average.play(3)
            assert_same(e.model, average.model)
            assert_same(e.personal(), average.personal())


def f(w: torch.Tensor) -> torch.Tensor:
    """f_i(w_k) [clients, K]."""
    gap = w[None] - A[:, None]
    return torch.einsum("ikd,ide,ike->ik", gap, H, gap) / 2


def test_a_round_by_hand() -> None:
    """k_i = argmin_k f_i(w_k); w_i = w_k - lr H_i (w_k - a_i); w_k the mean of its clients by their rows. The
    third model is far from everybody: its cluster is empty, and it stays."""
    w = torch.stack([A[0], A[1], torch.full((4,), 50.0, dtype=torch.float64)])
    chosen = f(w).argmin(1)
    assert {*chosen.tolist()} == {0, 1}
    moved = w[chosen] - 0.3 * torch.einsum("ide,ie->id", H, w[chosen] - A)
    shares = [torch.where(chosen == k, N, 0.0) for k in (0, 1)]
    expected = torch.stack([*(n @ moved / n.sum() for n in shares), w[2]])
    with engine(IFCA(K=3, solver=SGD(lr=0.3)), FEDERATION, "quadratic", **FULL) as e:
        e.training.server = e.server._replace(models=Model(w, w.new_zeros((3, 0))))
        [report] = e.play()
        torch.testing.assert_close(e.server.models.theta, expected, rtol=0, atol=1e-12)
        assert torch.equal(e.server.models.theta[2], w[2])
        assert report.info["cluster_sizes"].tolist() == [*chosen.bincount(minlength=3)]
        assert e.model is None
        # clients predict with the model that they would choose now, and so do newcomers
        best = e.server.models.theta[f(e.server.models.theta).argmin(1)]
        assert torch.equal(e.personal().theta, best)
        facts = e.training.round_of(e.everyone)
        message = e.training.work.algorithm.newcomer(e.server, facts)
        assert torch.equal(e.backend.run("adapt", e.everyone, 1, message, e.states()).values.theta, best)


def test_it_finds_planted_clusters() -> None:
    """Three centres, of which each becomes one cluster."""
    federation = descant.federation("logistic", clients=12, clusters=3, separation=2.0, heterogeneity=0.2)
    truth = torch.as_tensor(federation.truth["cluster"])
    with engine(IFCA(K=3, starts=5), federation, "mclr", batch=20, local={"steps": 10},
                backend="vectorised") as e:
        e.play(8)
        models = e.personal().theta
        same = (models[:, None] == models[None]).all(2)
        assert torch.equal(same, truth[:, None] == truth[None])


def test_the_models_begin_apart() -> None:
    """The first is the initial model; the others have noise of its size times `spread`."""
    with engine(IFCA(K=4, spread=0.5), ragged(), batchnorm_net()) as e:
        initial, models = e.training.initial, e.server.models
        assert torch.equal(models.theta[0], initial.theta)
        size = initial.theta.square().mean().sqrt()
        noise = (models.theta - initial.theta)[1:].square().mean(1).sqrt()
        torch.testing.assert_close(noise, 0.5 * size.expand(3), rtol=0.2, atol=0)
        assert torch.equal(models.stats, initial.stats.expand(4, -1))
        facts = e.training.round_of(e.everyone)
        zero = Model(torch.zeros(1000), torch.zeros(0))
        assert 0.4 < apart(zero, 2, 0.5, facts.key("apart")).theta[1].std() < 0.6
        other = facts._replace(seed=1).key("apart")
        assert not torch.equal(apart(initial, 4, 0.5, other).theta[1], models.theta[1])


@pytest.mark.parametrize("backend", ["loop", "vectorised"])
def test_the_best_of_several_starts(backend: str) -> None:
    """The opening asks everyone, takes the set of models that divides them most evenly, and trains nobody."""
    method = IFCA(K=3, starts=6, spread=0.5)
    with engine(method, FEDERATION, "quadratic", **FULL | {"backend": backend, "cohort": 2}) as e:
        models, key, _ = e.server
        sets = [method.begun(Model(models.theta[0], models.stats[0]), key, s).theta for s in range(6)]
        assert torch.equal(sets[0], models.theta)
        sizes = torch.stack([f(each).argmin(1).bincount(minlength=3) for each in sets])
        best = int((sizes**2).sum(1).argmin())
        assert (sizes[best] ** 2).sum() < (sizes[0] ** 2).sum()
        [report] = e.play()
        assert report.info["start"] == best
        assert torch.equal(report.info["cluster_sizes"], sizes[best])
        assert torch.equal(e.server.models.theta, sets[best])
        assert (report.participants, report.grad_steps) == (5, 0)
        [report] = e.play()
        assert report.participants == 2
        assert int(report.info["cluster_sizes"].sum()) == 2


@pytest.mark.slow
def test_with_several_starts_it_finds_planted_clusters_nearly_always() -> None:
    federation = descant.federation("logistic", clients=12, clusters=3, separation=2.0, heterogeneity=0.2)
    truth = torch.as_tensor(federation.truth["cluster"])
    settings: dict[str, Any] = {"batch": 20, "local": {"steps": 10}, "backend": "vectorised"}
    found = {1: 0, 5: 0}
    for starts in found:
        for seed in range(8):
            with engine(IFCA(K=3, starts=starts), federation, "mclr", seed=seed, **settings) as e:
                e.play(8)
                models = e.personal().theta
                same = (models[:, None] == models[None]).all(2)
                found[starts] += torch.equal(same, truth[:, None] == truth[None])
    assert found[1] <= 4
    assert found[5] >= 7


def test_more_clusters_than_clients_are_refused() -> None:
    with pytest.raises(UsageError, match=r"ifca.K is 6, but the .* only 5 clients: take at most 5"), \
         engine(IFCA(K=6), ragged(), "mclr"):
        pass


@pytest.mark.slow
@pytest.mark.pictures
def test_the_clusters_of_a_run_are_drawn(tmp_path: Path) -> None:
    """Of every client the cluster that it trained last; with one cluster there is nothing to draw."""
    federation = descant.federation("logistic", clients=6, clusters=2, separation=3.0, rows=12)
    for K, cohort in ((2, 3), (1, 6)):
        descant.run(IFCA(K=K), federation=federation, out=tmp_path / str(K), rounds=2, backend="vectorised",
                    local={"steps": 1}, cohort=cohort)
    first, last = (row["info"] for row in read_metrics(tmp_path / "2"))
    assert first["clusters"].count(-1) == 3
    assert first["moved"] is None  # nobody was anywhere before
    changed = [k for k in range(6) if first["clusters"][k] not in (-1, last["clusters"][k])]
    assert last["moved"] is None or (last["moved"] > 0) == bool(changed)
    assert np.array(last["distances"]).shape == (2, 2)
    assert last["distances"][0][1] > 0
    assert (tmp_path / "2" / "clusters.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "1" / "clusters.png").exists()

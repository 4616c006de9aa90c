"""Datasets against what is known about them, and the [data] section."""

from __future__ import annotations

import itertools
import tomllib
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import tomli_w
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from descant import data
from descant.core.fields import describe
from descant.core.preprocess import Preprocess
from descant.data import DATASETS, PARTITIONS, DataSpec, Samples
from descant.data.datasets import Digits
from descant.data.samples import Dataset
from descant.data.synthetic import Logistic, Quadratics
from descant.errors import UsageError


def test_digits_are_the_1797_real_ones() -> None:
    samples = Digits().load(clients=7, seed=3)
    assert samples.x.shape == (1797, 64)
    assert samples.x.dtype == torch.float32
    assert samples.y.dtype == torch.int64
    assert samples.classes == 10
    assert samples.owner is None
    assert samples.x.min() == 0
    assert samples.x.max() == 1
    assert torch.equal(samples.x * 16, (samples.x * 16).round())
    assert torch.bincount(samples.y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert samples.y[:10].tolist() == list(range(10))
    assert (samples.x[0, :8] * 16).tolist() == [0, 0, 5, 13, 9, 1, 0, 0]  # the top row of the first zero


def test_quadratics_hold_what_they_say() -> None:
    samples = Quadratics(dim=6, rows=4, kappa=50.0).load(clients=5, seed=1)
    h, a = samples.truth["H"], samples.truth["optima"]
    assert samples.x.shape == (20, 6, 6)
    assert samples.x.dtype == samples.y.dtype == torch.float64
    assert samples.classes is None
    assert samples.owner is not None
    for row, owner in enumerate(samples.owner):
        assert torch.equal(samples.x[row], h[owner])
        assert torch.equal(samples.y[row], a[owner])
    assert torch.equal(h, h.mT)
    expected = torch.from_numpy(np.geomspace(1 / 50, 1, 6)).expand(5, 6)
    assert torch.allclose(torch.linalg.eigvalsh(h), expected)
    assert not torch.allclose(h[0], h[1])  # a basis of its own


def test_quadratics_truth_has_zero_gradient() -> None:
    samples = Quadratics(dim=6, rows=4).load(clients=5, seed=1)
    theta = samples.common["global"].clone().requires_grad_()
    gap = theta - samples.y
    loss = torch.einsum("nj,njk,nk->n", gap, samples.x, gap).mean() / 2
    gradient, = torch.autograd.grad(loss, theta)
    assert gradient.abs().max() < 1e-12
    assert loss.item() > 0.01  # the clients do disagree


def test_quadratics_spread_and_noise_are_standard_deviations() -> None:
    together = Quadratics(spread=0.0).load(clients=3, seed=0)
    assert torch.equal(together.truth["optima"][0], together.truth["optima"][2])
    assert torch.allclose(together.common["global"], together.truth["optima"][0])
    optima = Quadratics(spread=3.0, rows=1).load(clients=400, seed=0).truth["optima"]
    assert optima.std(0).mean().item() == pytest.approx(3, rel=0.05)
    noisy = Quadratics(noise=0.5, rows=2000).load(clients=1, seed=0)
    errors = noisy.y - noisy.truth["optima"][0]
    assert errors.std().item() == pytest.approx(0.5, rel=0.05)
    assert errors.mean(0).abs().max().item() < 0.05


def log_probabilities(model: Tensor, x: Tensor, classes: int) -> Tensor:
    weight, bias = model[:-classes].reshape(classes, -1), model[-classes:]
    return linear(x, weight, bias).log_softmax(1)


def test_logistic_fit_recovers_the_true_model() -> None:
    """The maximum likelihood fit on many rows exists, and predicts as the true model does."""
    samples = Logistic(dim=4, classes=3, rows=6000).load(clients=1, seed=2)
    layer = torch.nn.Linear(4, 3)
    solver = torch.optim.LBFGS(layer.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        solver.zero_grad()
        loss = cross_entropy(layer(samples.x), samples.y)
        loss.backward()
        return loss

    solver.step(closure)
    fit = torch.nn.utils.parameters_to_vector(layer.parameters()).detach()
    p, q = (log_probabilities(m, samples.x, 3).exp() for m in (fit, samples.truth["models"][0]))
    assert (p - q).abs().mean() < 0.02


def test_logistic_labels_are_sampled() -> None:
    """Sampled labels cost the true model its entropy; argmax labels would cost much less."""
    samples = Logistic(rows=4000).load(clients=2, seed=0)
    assert samples.owner is not None
    assert samples.classes == 5
    for client in range(2):
        mine = torch.from_numpy(samples.owner == client)
        log_p = log_probabilities(samples.truth["models"][client], samples.x[mine], 5)
        entropy = -(log_p.exp() * log_p).sum(1).mean()
        cost, argmax_cost = cross_entropy(log_p, samples.y[mine]), -log_p.max(1).values.mean()
        assert abs(cost - entropy) < 0.04 < entropy - argmax_cost
        assert (log_p.argmax(1) != samples.y[mine]).float().mean() > 0.1


def test_logistic_features_shrink() -> None:
    x = Logistic(dim=10, rows=5000).load(clients=2, seed=0).x
    assert x.dtype == torch.float32
    assert torch.allclose(x.var(0), torch.arange(1, 11) ** -1.2, rtol=0.1)


def test_logistic_clusters_are_planted() -> None:
    truth = Logistic(clusters=3, separation=2.0, heterogeneity=0.2).load(clients=8, seed=0).truth
    assert truth["cluster"].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    distance = torch.cdist(truth["models"], truth["models"])
    same = truth["cluster"][:, None] == truth["cluster"]
    assert distance[same].max() < distance[~same].min() / 3
    alike = Logistic(clusters=3, heterogeneity=0.0).load(clients=6, seed=0).truth["models"]
    assert torch.equal(alike[0], alike[3])
    assert not torch.allclose(alike[0], alike[1])


def test_logistic_separation_does_not_move_a_single_centre() -> None:
    near, far = (Logistic(separation=s).load(clients=3, seed=0).truth["models"] for s in (0.0, 9.0))
    assert torch.equal(near, far)


def test_logistic_imbalance() -> None:
    def sizes(**fields: Any) -> np.ndarray:
        owner = Logistic(dim=2, rows=60, **fields).load(clients=300, seed=0).owner
        assert owner is not None
        return np.bincount(owner)

    assert (sizes() == 60).all()
    skewed = sizes(imbalance=1.5)
    assert skewed.min() == 8
    assert skewed.max() > 400
    assert np.log(sizes(imbalance=0.5)).std() == pytest.approx(0.5, rel=0.1)
    assert sizes(imbalance=0.5).mean() == pytest.approx(60, rel=0.1)


def test_logistic_needs_a_client_per_cluster() -> None:
    with pytest.raises(UsageError, match="clusters = 4 with clients = 3 leaves clusters empty"):
        Logistic(clusters=4).load(clients=3, seed=0)


@pytest.mark.parametrize("dataset", [Quadratics(noise=0.1), Logistic(clusters=2, imbalance=0.7)],
                         ids=lambda d: d.name)
def test_synthetic_clients_do_not_depend_on_each_other(dataset: Dataset) -> None:
    few, many = dataset.load(clients=3, seed=4), dataset.load(clients=6, seed=4)
    assert torch.equal(many.x[: len(few.x)], few.x)
    assert torch.equal(many.y[: len(few.y)], few.y)
    assert not torch.equal(dataset.load(clients=3, seed=5).y[:8], few.y[:8])


SPECS: list[dict[str, Any]] = [
    {},
    {"clients": 5, "seed": 3, "test": 0, "validation": 0.5},
    {"partition": "dirichlet", "alpha": 0.1, "min_size": 5},
    {"partition": "classes", "classes_per_client": 3},
    {"dataset": "quadratics", "dim": 3, "kappa": 2, "clients": 4},
    {"dataset": "logistic", "clusters": 2, "imbalance": 1.0},
    {"dataset": "logistic", "partition": "iid"},
    {"partition": "classes", "sizes": "uniform", "smallest": 10, "largest": 40, "unseen": 3},
    {"partition": "quantity", "sizes": [100, 200, 300], "clients": 3},
    {"partition": "shards", "shards_per_client": 5, "scale": "client", "impute": "client"},
    {"partition": "label_majority", "majority": 0.7, "skewed": 0.5},
    {"partition": "feature", "change": "rotation", "rotations": 6},
    {"dataset": "logistic", "min_size": 5, "max_size": 50, "fewer": "merge", "merge_least": 2},
    {"scale": "constants", "mean": [0.5], "std": [0.25], "impute": "constants", "fill": [0]},
    {"dataset": "fedprox_logistic", "labels": "argmax", "heterogeneity": 3.0},
    {"dataset": "fedmap_shell", "scenario": "label", "partition_file": "partition.npz"},
    {"dataset": "fedmap_linear", "test": 0},
]


@pytest.mark.parametrize("table", SPECS, ids=str)
def test_spec_survives_a_round_trip(table: dict[str, Any]) -> None:
    spec = DataSpec.parse(table)
    dumped = spec.dump()
    assert DataSpec.parse(dumped) == spec
    assert table.items() <= dumped.items()
    assert tomllib.loads(tomli_w.dumps(dumped)) == dumped


def test_spec_defaults() -> None:
    assert DataSpec.parse({}).dump() == {
        "dataset": "digits", "partition": "iid", "clients": 20, "seed": 0, "test": 0.25, "validation": 0.2,
        "unseen": 0, "scale": "none", "impute": "none"}
    assert DataSpec.parse({"dataset": "logistic"}).partition.name == "natural"
    assert DataSpec.parse({}) != DataSpec.parse({"seed": 1})


@pytest.mark.parametrize(("table", "message"), [
    ({"partition": "dirichlet", "alpah": 0.1}, "unknown data field 'alpah': did you mean 'alpha'?"),
    ({"dataset": "logistic", "cluster": 2}, "did you mean 'clusters'?"),
    ({"client": 2}, "unknown data field 'client': did you mean 'clients'?"),
    ({"alpha": 0.1}, "unknown data field 'alpha'"),  # iid has none
    ({"dataset": "digit"}, "unknown data.dataset 'digit': did you mean 'digits'?"),
    ({"dataset": ["digits"]}, "unknown data.dataset"),
    ({"partition": "dirichlett"}, "unknown data.partition 'dirichlett': did you mean 'dirichlet'?"),
    ({"clients": 0}, "data.clients must be at least 1, not 0"),
    ({"clients": 2.5}, "data.clients must be an integer, not 2.5"),
    ({"seed": -1}, "data.seed must be at least 0, not -1"),
    ({"test": 1}, "data.test must be less than 1, not 1"),
    ({"validation": float("nan")}, "data.validation must be a finite number, not nan"),
    ({"partition": "dirichlet", "alpha": "low"}, "data.alpha must be a number, not 'low'"),
    ({"dataset": "quadratics", "kappa": 0.5}, "data.kappa must be at least 1, not 0.5"),
    ({"unseen": -1}, "data.unseen must be at least 0, not -1"),
    ({"scale": "clients"}, "unknown data.scale 'clients': did you mean 'client'?"),
    ({"mean": 0.5}, "data.mean must be a list of numbers or absent, not 0.5"),
    ({"scale": "constants", "mean": ["a"]}, "data.mean[0] must be a number, not 'a'"),
    ({"impute": "constants"}, 'impute = "constants" needs fill'),
    ({"preprocess": {"scale": "client"}}, "unknown data field 'preprocess'"),
    ({"partition_file": "p.npz", "unseen": 1}, "data.partition_file sets the unseen clients: remove unseen"),
    ({"partition": "quantity", "sizes": [1.5]}, "data.sizes[0] must be an integer, not 1.5"),
    ({"dataset": "fedmap_shell", "scenario": "labels"}, "'labels': did you mean 'label'?"),
])
def test_bad_tables(table: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        DataSpec.parse(table)
    assert message in str(error.value)


def test_the_flat_table_is_unambiguous() -> None:
    for dataset, partition in itertools.product(DATASETS.values(), PARTITIONS.values()):
        kinds = (DataSpec, Preprocess, dataset, partition)
        names = [field.name for kind in kinds for field in describe(kind)]
        assert len(names) == len(set(names)), (dataset.name, partition.name)


def test_every_field_has_a_meaning_and_every_dataset_a_description() -> None:
    kinds: list[type] = [*DATASETS.values(), *PARTITIONS.values(), Preprocess]
    for kind in kinds:
        assert (kind.__doc__ or "").splitlines()[0].endswith((".", ";")), kind
        assert all(field.doc for field in describe(kind)), kind


def test_federation_of_digits() -> None:
    fed = data.federation(partition="classes", clients=10, seed=1)
    assert fed.population == 10
    assert fed.classes == 10
    assert fed.names == tuple(map(str, range(10)))
    assert fed.train.sizes.sum() + fed.validation.sizes.sum() + fed.test.sizes.sum() == 1797
    assert all(len(set(fed.y[torch.from_numpy(fed.train[k])].tolist())) == 2 for k in range(10))
    assert fed.fingerprint() == data.federation(partition="classes", clients=10, seed=1).fingerprint()
    assert fed.fingerprint() != data.federation(partition="classes", clients=10, seed=2).fingerprint()


def test_natural_client_k_is_owner_k() -> None:
    fed = data.federation("quadratics", clients=12, dim=3)  # "10" sorts before "2": numbers must not
    for k in range(12):
        assert torch.equal(fed.y[int(fed.train[k][0])], fed.truth["optima"][k])
    assert fed.classes is None


def test_truth_is_dropped_when_the_clients_are_not_the_natural_ones() -> None:
    assert data.federation("logistic", clients=3).truth
    assert not data.federation("logistic", clients=3, partition="iid").truth


@dataclass(frozen=True)
class Sites(Dataset):
    """Two sites with names."""

    name: ClassVar[str] = "sites"
    natural: ClassVar[bool] = True
    default_clients: ClassVar[int] = 2

    def load(self, clients: int, seed: int) -> Samples:
        owner = np.array(["west"] * 8 + ["east"] * 8)
        return Samples(torch.arange(16.0)[:, None], torch.zeros(16), None, owner)


def test_a_dataset_with_named_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATASETS, "sites", Sites)
    fed = data.federation("sites")
    assert fed.names == ("east", "west")
    assert bool((fed.x[torch.from_numpy(fed.train[0])] >= 8).all())
    with pytest.raises(UsageError, match="clients = 3, but the data has 2 natural owners: set clients = 2"):
        data.federation("sites", clients=3)


def test_partitions_report_what_the_data_lacks() -> None:
    with pytest.raises(UsageError, match="'dirichlet' needs class labels"):
        data.federation("quadratics", partition="dirichlet")
    with pytest.raises(UsageError, match="'natural' needs data whose rows have owners"):
        data.federation("digits", partition="natural")


def test_unseen_owners_keep_their_truth() -> None:
    fed = data.federation("quadratics", clients=12, dim=3, unseen=4)
    assert (fed.population, fed.everyone) == (8, 12)
    drawn = data.federation("quadratics", clients=12, dim=3).truth["optima"]
    for k, name in enumerate(fed.names):
        assert torch.equal(fed.y[int(fed.train[k][0])], fed.truth["optima"][k])
        assert torch.equal(drawn[int(name)], fed.truth["optima"][k])
    assert fed.truth["global"].shape == (3,)


def test_a_sample_of_owners_keeps_names_and_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DATASETS, "sites", Sites)
    fed = data.federation("sites", clients=1, fewer="sample", seed=3)
    assert fed.names in (("east",), ("west",))
    assert fed.notes[0] == "8 of 16 rows belong to no client"
    assert data.federation("sites", clients=1, fewer="merge").names == ("0",)


def test_notes_tell_what_was_left_out() -> None:
    fed = data.federation("digits", partition="quantity", sizes=[100, 1, 50], clients=3)
    assert fed.notes == ("1646 of 1797 rows belong to no client", "client '1' dropped: 1 row")
    assert fed.names == ("0", "2")
    assert data.federation("digits").notes == ()

"""The real datasets, where they are prepared: what they contain, and numbers that others got on them."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

import descant
from descant.data import DATASETS
from descant.data.samples import Samples
from descant.data.shakespeare import VOCABULARY
from helpers import require_data

_LOADED: dict[str, Samples] = {}


def real(name: str) -> Samples:
    """A prepared dataset; without it, the test is skipped."""
    require_data(name)
    if name not in _LOADED:
        start = time.perf_counter()
        _LOADED[name] = DATASETS[name]().load(1, 0)
        print(f"{name}: loaded in {time.perf_counter() - start:.2f} s")
    return _LOADED[name]


@pytest.fixture(scope="module", autouse=True)
def _forget() -> Any:
    yield
    _LOADED.clear()


def check(samples: Samples, shape: tuple[int, ...], dtype: torch.dtype, classes: int) -> None:
    assert samples.x.shape == shape
    assert samples.x.dtype == dtype
    assert samples.y.shape == shape[:1]
    assert samples.y.dtype == torch.int64
    assert samples.classes == classes
    assert samples.y.unique().tolist() == list(range(classes))


@pytest.mark.parametrize(("name", "train", "shape", "accuracy"), [
    ("mnist", 60000, (70000, 1, 28, 28), 82.03),
    ("fashion_mnist", 60000, (70000, 1, 28, 28), 67.68),
    pytest.param("cifar10", 50000, (60000, 3, 32, 32), 27.7, marks=pytest.mark.slow),
])
@pytest.mark.thorough
def test_nearest_centroid(name: str, train: int, shape: tuple[int, ...], accuracy: float) -> None:
    """Trained on the rows of the official training part, tested on those of the test part."""
    samples = real(name)
    check(samples, shape, torch.uint8, 10)
    if name != "mnist":  # whose classes are not of equal size
        assert samples.y.bincount().tolist() == [shape[0] // 10] * 10
    x, y = samples.x.flatten(1), samples.y
    means = torch.stack([x[:train][y[:train] == k].float().mean(0) for k in range(10)])
    hits = torch.cdist(x[train:].float(), means).argmin(1) == y[train:]
    assert 100 * hits.float().mean().item() == pytest.approx(accuracy, abs=0.1)


def test_mnist_classes() -> None:
    assert real("mnist").y.bincount().tolist() == [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958]


def test_har() -> None:
    samples = real("har")
    check(samples, (10299, 9, 128), torch.float32, 6)
    assert samples.y.bincount().tolist() == [1722, 1544, 1406, 1777, 1906, 1944]
    owner, group = samples.owner, samples.group
    assert owner is not None
    assert group is not None
    assert np.unique(owner).tolist() == [f"subject {k:02}" for k in range(1, 31)]
    # gravity is in the total acceleration, channels 6 to 8, and mostly along x
    assert samples.x[:, 6].mean() > 0.7
    assert samples.x[:, :6].mean((0, 2)).abs().max() < 0.01


def test_har_groups_are_the_runs_of_overlapping_windows() -> None:
    samples = real("har")
    owner, group, x = samples.owner, samples.group, samples.x.numpy()
    assert owner is not None
    assert group is not None
    for values in (owner, samples.y.numpy()):
        pairs = np.unique(np.stack([group, np.unique(values, return_inverse=True)[1]]), axis=1)
        assert pairs.shape[1] == len(np.unique(group))  # no group spans two people, or two activities
    same = group[1:] == group[:-1]
    overlap = (x[1:, :, :64] == x[:-1, :, 64:]).all((1, 2))
    assert (overlap == same).all()
    # whoever splits by group shares not a single half-window between training and test
    test = np.isin(group, np.unique(group)[::4])
    tested, trained = ({half.tobytes() for row in x[rows] for half in (row[:, :64], row[:, 64:])}
                       for rows in (test, ~test))
    assert not tested & trained
    assert len(np.unique(group)) == 857


def test_heart_disease() -> None:
    samples = real("heart_disease")
    check(samples, (920, 13), torch.float32, 2)
    owner = samples.owner
    assert owner is not None
    assert {str(name): int((owner == name).sum()) for name in np.unique(owner)} == {
        "cleveland": 303, "hungarian": 294, "switzerland": 123, "va": 200}
    chol = samples.x[:, 4].numpy()
    assert np.isnan(chol[owner == "switzerland"]).all()
    assert np.isnan(chol[owner == "va"]).sum() == 49 + 7  # unrecorded as 0, and as '?'
    assert np.nanmin(chol) > 0
    assert samples.y.bincount().tolist() == [411, 509]


@pytest.mark.parametrize(("hospital", "accuracy"), [
    ("cleveland", 82.5), ("hungarian", 83.7), ("switzerland", 90.3), ("va", 76.0)])
def test_heart_disease_by_logistic_regression(hospital: str, accuracy: float) -> None:
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    samples = real("heart_disease")
    rows = samples.owner == hospital
    model = make_pipeline(SimpleImputer(keep_empty_features=True), StandardScaler(),
                          LogisticRegression(max_iter=1000))
    # the reference has five stratified folds in the order of the rows
    scores = cross_val_score(model, samples.x[rows].numpy(), samples.y[rows].numpy(), cv=5)
    assert 100 * scores.mean() == pytest.approx(accuracy, abs=2)


@pytest.mark.parametrize(("name", "width", "sizes"), [
    ("office10_surf", 800, {"amazon": 958, "caltech10": 1123, "dslr": 157, "webcam": 295}),
    ("office10_googlenet", 1024, {"amazon": 958, "dslr": 157, "webcam": 295}),
])
def test_office10(name: str, width: int, sizes: dict[str, int]) -> None:
    samples = real(name)
    check(samples, (sum(sizes.values()), width), torch.float32, 10)
    owner = samples.owner
    assert owner is not None
    assert {str(domain): int((owner == domain).sum()) for domain in np.unique(owner)} == sizes
    assert DATASETS[name].default_clients == len(sizes)


@pytest.mark.thorough
def test_shakespeare() -> None:
    samples = real("shakespeare")
    assert samples.x.shape == (len(samples.y), 80)
    assert samples.x.dtype == torch.int64
    assert samples.owner is not None
    assert len(np.unique(samples.owner)) == DATASETS["shakespeare"].default_clients == 1355
    assert samples.y.min() > 0  # padding is never what comes next
    text = "".join(VOCABULARY[k] for k in (*samples.x[0].tolist(), samples.y[0]))
    assert text.startswith("Nay, but this dotage of our general's\nO'erflows the measure")
    # a fifth of all characters are spaces, and e is the most frequent letter
    counts = samples.x[samples.x > 0].bincount(minlength=len(VOCABULARY))
    letters = {VOCABULARY[int(k)] for k in counts.argsort(descending=True)[:2]}
    assert letters == {" ", "e"}


def test_a_federation_of_har_leaks_no_half_window() -> None:
    """Windows overlap by half: no client's test windows share a half with its other windows."""
    real("har")
    federation = descant.federation("har")
    assert federation.population == 30
    x = federation.x.numpy()

    def halves(rows: np.ndarray) -> set[bytes]:
        return {half.tobytes() for row in x[rows] for half in (row[:, :64], row[:, 64:])}

    for client in range(30):
        tested = halves(federation.test[client])
        assert tested
        for other in (federation.train, federation.validation):
            assert not tested & halves(other[client])

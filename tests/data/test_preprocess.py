"""Scaling and imputation: what they compute, and which rows they look at."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from descant import data
from descant.core.federation import Federation
from descant.core.preprocess import Preprocess
from descant.errors import UsageError

NAN = float("nan")


def rows_of(fed: Federation, client: int, *splits: str) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([fed.split(name)[client] for name in splits]))  # type: ignore[arg-type]


def arrays(clients: int = 4, rows: int = 240) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Clients that differ in the location and the scale of every column."""
    rng = np.random.default_rng(1)
    client = rng.integers(clients, size=rows)
    x = rng.standard_normal((rows, 3)) * (1 + client[:, None]) + 10 * client[:, None]
    return x, rng.integers(2, size=rows), client


def test_a_client_is_standardised_by_its_training_rows() -> None:
    x, y, client = arrays()
    fed = Federation.from_arrays(x, y, client, scale="client")
    for k in range(4):
        train = fed.x[rows_of(fed, k, "train")]
        assert torch.allclose(train.mean(0), torch.zeros(3, dtype=torch.float64), atol=1e-12)
        assert torch.allclose(train.std(0, correction=0), torch.ones(3, dtype=torch.float64))
        raw = torch.from_numpy(x)[rows_of(fed, k, "train")]
        tested = rows_of(fed, k, "validation", "test")
        expected = (torch.from_numpy(x)[tested] - raw.mean(0)) / raw.std(0, correction=0)
        assert torch.allclose(fed.x[tested], expected)


@pytest.mark.parametrize("options", [{"scale": "client"}, {"scale": "client", "impute": "client"},
                                     {"impute": "client"}], ids=str)
def test_what_a_client_tests_on_is_not_looked_at(options: dict[str, Any]) -> None:
    """Other test and validation rows change no training row, of this client or of another."""
    x, y, client = arrays()
    before = Federation.from_arrays(x, y, client, **options)
    hidden = np.concatenate([before.validation.indices, before.test.indices])
    changed = x.copy()
    changed[hidden] = 1e6 * np.random.default_rng(0).standard_normal((len(hidden), 3))
    after = Federation.from_arrays(changed, y, client, **options)
    train = torch.from_numpy(before.train.indices)
    assert torch.equal(before.x[train], after.x[train])


def test_other_clients_are_not_looked_at() -> None:
    x, y, client = arrays()
    before = Federation.from_arrays(x, y, client, scale="client")
    changed = x.copy()
    changed[client == 2] *= -7
    after = Federation.from_arrays(changed, y, client, scale="client")
    others = torch.from_numpy(client != 2)
    assert torch.equal(before.x[others], after.x[others])


def test_constants() -> None:
    x, y, client = arrays()
    x[5, 1] = NAN
    fed = Federation.from_arrays(x, y, client, scale="constants", mean=[1, 2, 3], std=[2], impute="constants",
                                 fill=[0, 8, 0])
    filled = x.copy()
    filled[5, 1] = 8
    assert np.allclose(fed.x, (filled - [1, 2, 3]) / 2)


def test_missing_values_become_the_mean_of_the_training_rows() -> None:
    x, y, client = arrays()
    gaps = np.random.default_rng(2).random(x.shape) < 0.3
    x[gaps] = NAN
    fed = Federation.from_arrays(x, y, client, impute="client")
    assert bool(torch.isfinite(fed.x).all())
    for k in range(4):
        mean = np.nanmean(x[rows_of(fed, k, "train")], axis=0)
        rows = rows_of(fed, k, "train", "validation", "test").numpy()
        assert np.allclose(fed.x[rows], np.where(gaps[rows], mean, x[rows]))


@pytest.mark.parametrize("options", [
    {}, {"scale": "client"}, {"scale": "constants", "mean": [3.0], "std": [2.0]}], ids=str)
def test_a_column_without_any_value_is_zero_after_scaling(options: dict[str, Any]) -> None:
    x, y, client = arrays()
    x[client == 1, 2] = NAN
    fed = Federation.from_arrays(x, y, client, impute="client", **options)
    assert bool((fed.x[torch.from_numpy(client == 1), 2] == 0).all())
    assert bool((fed.x[torch.from_numpy(client == 0), 2] != 0).all())


def test_a_constant_column_is_only_centred() -> None:
    x, y, client = arrays()
    x[:, 0] = 0.1
    fed = Federation.from_arrays(x.astype(np.float32), y, client, scale="client")
    assert fed.x[:, 0].abs().max() < 1e-6
    assert fed.x.dtype == torch.float32


def test_columns_of_images_and_series_are_their_channels() -> None:
    x = torch.randn(60, 2, 5, 5) * torch.tensor([1.0, 9.0]).view(2, 1, 1)
    fed = Federation.from_arrays(x.permute(0, 1, 3, 2), torch.zeros(60), [0] * 60, scale="client")
    train = fed.x[rows_of(fed, 0, "train")]
    assert torch.allclose(train.std((0, 2, 3), correction=0), torch.ones(2), atol=1e-5)
    series = Federation.from_arrays(torch.arange(12.0), torch.zeros(12), [0] * 12, scale="constants",
                                    mean=[1.0], std=[2.0])
    assert torch.equal(series.x, (torch.arange(12.0) - 1) / 2)


def test_the_given_array_is_not_changed() -> None:
    x, y, client = arrays()
    kept = x.copy()
    Federation.from_arrays(x, y, client, scale="client")
    assert np.array_equal(x, kept)


def test_from_the_data_section() -> None:
    fed = data.federation("logistic", clients=3, scale="client")
    for k in range(3):
        assert fed.x[rows_of(fed, k, "train")].mean(0).abs().max() < 1e-6
    assert fed.origin is not None
    assert fed.origin["scale"] == "client"
    assert data.federation("logistic", clients=3).fingerprint() != fed.fingerprint()
    fixed = data.federation("digits", clients=3, scale="constants", mean=[0.5], std=[0.25])
    assert (fixed.x.min(), fixed.x.max()) == (-2, 2)


X = np.ones((8, 3))
HOLES = np.where(np.arange(24).reshape(8, 3) == 16, NAN, 1.0)
INFINITE = np.where(np.arange(24).reshape(8, 3) == 16, np.inf, 1.0)


@pytest.mark.parametrize(("x", "options", "message"), [
    (HOLES, {}, 'x has a missing value in row 5, column 1: set impute = "client" or "constants", or leave'),
    (HOLES, {"scale": "client"}, "x has a missing value in row 5, column 1"),
    (INFINITE, {}, "x has an infinite value in row 5, column 1: correct it, or leave the row out"),
    (INFINITE, {"impute": "client"}, "x has an infinite value in row 5, column 1"),
    (HOLES.reshape(8, 1, 3), {}, "in row 5, column 0, 1:"),
    (HOLES[:, 1], {}, "x has a missing value in row 5:"),
    (X.astype(np.uint8), {"scale": "client"}, "scale is for real features, and x holds torch.uint8"),
    (X.astype(int), {"impute": "client"}, "impute is for real features, and x holds torch.int64"),
    (X, {"scale": "constants"}, 'scale = "constants" needs mean: give one number, or one per column'),
    (X, {"scale": "constants", "mean": [0.0]}, 'scale = "constants" needs std'),
    (X, {"impute": "constants"}, 'impute = "constants" needs fill'),
    (X, {"mean": [0.0]}, 'mean is given, but scale = "none" does not use it: set scale = "constants"'),
    (X, {"fill": [0.0], "impute": "client"}, 'fill is given, but impute = "client" does not use it'),
    (X, {"scale": "constants", "mean": [0.0], "std": [0.0]}, "std must be greater than 0, not 0.0"),
    (X, {"scale": "constants", "mean": [NAN], "std": [1.0]}, "mean[0] must be a finite number, not nan"),
    (X, {"scale": "constants", "mean": [0, 1], "std": [1.0]}, "mean has 2 numbers, but x has 3 columns"),
    (X, {"scale": "standard"}, "unknown preprocess.scale 'standard'"),
])
def test_bad_input(x: np.ndarray, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        Federation.from_arrays(x, np.zeros(8), [0] * 8, **options)
    assert message in str(error.value)


def test_targets_are_never_imputed() -> None:
    with pytest.raises(UsageError, match="y has a missing or infinite value in row 2: leave the row out"):
        Federation.from_arrays(X, [0.0, 1.0, NAN, 0, 0, 0, 0, 0], [0] * 8, impute="client")


def test_nothing_to_do_changes_nothing() -> None:
    assert not Preprocess().changes
    x = torch.randn(8, 3)
    assert Federation.from_arrays(x, torch.zeros(8), [0] * 8).x is x

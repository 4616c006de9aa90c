"""Which layers are shared: by words, names and patterns; and a model in two parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import vmap

from descant.core.parts import Shared, Split, _split
from descant.core.vector import Layout, Model
from descant.errors import UsageError


def network() -> nn.Module:
    """Layers "0", "1" (BatchNorm), "3" and "10", the head."""
    layers = {"0": nn.Linear(3, 4), "1": nn.BatchNorm1d(4), "3": nn.Linear(4, 4), "10": nn.Linear(4, 2)}
    return nn.ModuleDict(layers)


LAYOUT = Layout.of(network())
NAMES = [s.name for s in LAYOUT.parameters]


def parts(shared: Shared) -> Split:
    found = _split(LAYOUT, shared, "method.shared")
    assert found is not None
    return found


@pytest.mark.parametrize(("shared", "names"), [
    ("body", ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]),
    ("head", ["10.weight", "10.bias"]),
    ("all but batchnorm", ["0.weight", "0.bias", "3.weight", "3.bias", "10.weight", "10.bias"]),
    (("1",), ["1.weight", "1.bias"]),  # not layer "10"
    (("1*",), ["1.weight", "1.bias", "10.weight", "10.bias"]),
    (("*.bias", "0"), ["0.weight", "0.bias", "1.bias", "3.bias", "10.bias"]),
    (("10.bias",), ["10.bias"]),
])
def test_layers_by_words_names_and_patterns(shared: Shared, names: list[str]) -> None:
    found = parts(shared)
    assert [name for name, one in zip(NAMES, found.shared.parameters, strict=True) if one] == names
    assert [name for name, one in zip(NAMES, found.private.parameters, strict=True) if not one] == names
    for s, one in zip(LAYOUT.parameters, found.shared.parameters, strict=True):
        assert found.shared.theta[s.start : s.stop].tolist() == [one] * (s.stop - s.start)
    assert torch.equal(found.private.theta, ~found.shared.theta)


@pytest.mark.parametrize(("shared", "count"), [
    ("body", 8), ("head", 0), ("all but batchnorm", 0), (("1",), 8)])
def test_statistics_belong_to_their_layer(shared: Shared, count: int) -> None:
    assert parts(shared).places.stats.numel() == count


@pytest.mark.parametrize("shared", ["body", "head", "all but batchnorm", ("*weight",)])
def test_two_parts_make_the_whole(shared: Shared) -> None:
    generator = torch.Generator().manual_seed(0)
    models = Model(torch.randn(5, LAYOUT.dim, generator=generator), torch.randn(5, LAYOUT.stats_dim,
                                                                                generator=generator))
    found = parts(shared)

    def there_and_back(model: Model) -> Model:
        return found.whole(found.of_shared(model), found.of_private(model))

    for whole in (there_and_back(Model(models.theta[2], models.stats[2])), vmap(there_and_back)(models)):
        expected = models if whole.theta.dim() == 2 else Model(models.theta[2], models.stats[2])
        assert torch.equal(whole.theta, expected.theta)
        assert torch.equal(whole.stats, expected.stats)


def test_joined_and_lifted_change_the_shared_coordinates_alone() -> None:
    found, zero = parts("head"), Model(torch.zeros(LAYOUT.dim), torch.zeros(LAYOUT.stats_dim))
    ones = Model(torch.ones(10), torch.ones(0))
    assert torch.equal(found.joined(ones, zero).theta, found.shared.theta.float())
    assert torch.equal(found.lifted(3.0, zero.theta), 3 * found.shared.theta.float())
    assert torch.equal(found.lifted(torch.full((10,), 2.0), zero.theta), 2 * found.shared.theta.float())
    assert torch.equal(found.shared.moved(zero.theta, zero.theta + 1), found.shared.theta.float())


def test_a_model_without_batchnorm_shares_all() -> None:
    assert _split(Layout.of(nn.Linear(2, 2)), "all but batchnorm", "fedbn.shared") is None


def test_a_pattern_that_matches_nothing_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"unknown layer in method\.shared '1\.wieght': did you mean "
                                         r"'1\.weight'\? known are 0, 0\.bias"):
        parts(("0", "1.wieght"))

"""The vocabulary: trees, vectors, layers, tasks, priors, solvers, random numbers, batches, the store."""

from __future__ import annotations

import copy
import math
import zlib
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.modules.batchnorm import _BatchNorm

from descant.core import random, tree
from descant.core.algorithm import Round, least_loss
from descant.core.federation import Federation
from descant.core.meter import metered
from descant.core.task import BLOCK, Batch, FunctionTask, Gradient, inputs
from descant.core.vector import Layout, Model
from descant.engine.batches import ClientTensors, LocalWork, Plan, View, plan_chunk
from descant.engine.pool import Pool
from descant.engine.store import ClientStore
from descant.errors import UsageError
from descant.models.module import ModuleTask
from descant.priors.belief import Tracked
from descant.priors.quadratic import Flat, Gaussian, Quadratic
from descant.priors.solve import SGD, Adam, AdamW, Proximal, Solver, inner_solve
from helpers import assert_same, finite_differences, ragged

DOUBLE = torch.float64


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=DOUBLE)


def perturbed(module: nn.Module, seed: int = 0) -> nn.Module:
    """A module in float64 none of whose tensors is zero or one: a test should see each of them."""
    module = module.double()
    g = generator(seed)
    with torch.no_grad():
        for tensor in module.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=g, dtype=DOUBLE))
        for layer in module.modules():
            if isinstance(layer, _BatchNorm) and layer.running_mean is not None:
                layer.running_mean.copy_(torch.randn(layer.running_mean.shape, generator=g, dtype=DOUBLE))
                layer.running_var.copy_(torch.rand(layer.running_var.shape, generator=g, dtype=DOUBLE) + 0.5)
    return module


# -- trees ------------------------------------------------------------------------------------------


class Inner(NamedTuple):
    a: Tensor
    b: tuple[()]


class Outer(NamedTuple):
    inner: Inner
    pair: tuple[Tensor, Tensor]


def make_tree(value: float = 0.0) -> Outer:
    pair = (torch.full((), value + 1), torch.full((3, 1), value + 2))
    return Outer(Inner(torch.full((2,), value), ()), pair)


def test_leaves_are_named_by_their_path() -> None:
    assert [name for name, _ in tree.leaves(make_tree())] == ["inner.a", "pair.0", "pair.1"]
    assert [name for name, _ in tree.leaves(torch.zeros(1))] == ["value"]
    assert list(tree.leaves(())) == []


@pytest.mark.parametrize("wrong", [[torch.zeros(1)], {"a": torch.zeros(1)}, None, 1.0, (torch.zeros(1), 2)])
def test_only_tensors_in_tuples_are_trees(wrong: Any) -> None:
    with pytest.raises(TypeError, match="NamedTuples only"):
        list(tree.leaves(wrong))


def test_rebuild_undoes_leaves_and_keeps_the_types() -> None:
    for original in (make_tree(3.0), torch.ones(2), ()):
        again = tree.rebuild(original, dict(tree.leaves(original)))
        assert type(again) is type(original)
        assert_same(again, original)
    assert type(tree.rebuild(make_tree(), dict(tree.leaves(make_tree()))).inner) is Inner


def test_map_tree_pairs_the_leaves_of_several_trees() -> None:
    total = tree.map_tree(lambda a, b, c: a + b * c, make_tree(1.0), make_tree(2.0), make_tree(3.0))
    pair = (torch.tensor(14.0), torch.full((3, 1), 23.0))
    assert_same(total, Outer(Inner(torch.full((2,), 7.0), ()), pair))


def test_stack_take_and_concat_undo_each_other() -> None:
    rows = [make_tree(float(k)) for k in range(4)]
    stacked = tree.stack(rows)
    assert stacked.inner.a.shape == (4, 2)
    for k, row in enumerate(rows):
        assert_same(tree.take(stacked, k), row)
    assert_same(tree.concat([tree.take(stacked, slice(0, 3)), tree.take(stacked, slice(3, 4))]), stacked)
    assert_same(tree.take(stacked, torch.tensor([True, False, True, False])), tree.stack([rows[0], rows[2]]))


def test_where_repeat_and_pick() -> None:
    a, b = make_tree(0.0), make_tree(10.0)
    assert_same(tree.where(torch.tensor(True), a, b), a)
    assert_same(tree.where(torch.tensor(False), a, b), b)
    assert_same(tree.take(tree.repeat(a, 3), 2), a)
    assert tree.rows(tree.repeat(a, 3)) == 3
    both = tree.stack([a, b])
    assert_same(tree.pick(both, torch.tensor(1)), b)
    mixed = vmap(lambda row: tree.pick(both, row))(torch.tensor([1, 0, 1]))
    assert_same(mixed, tree.stack([b, a, b]))


def test_the_model_of_least_loss() -> None:
    """On rows of one client; the first one where all are alike, and where there are no rows to tell."""
    task = FunctionTask(lambda theta, x, y: (theta - y).square().sum(1), torch.zeros(2, dtype=DOUBLE))
    far, near = torch.full((2,), 5.0, dtype=DOUBLE), torch.full((2,), 1.0, dtype=DOUBLE)
    models = tree.stack([Model(t, torch.zeros(0, dtype=DOUBLE)) for t in (far, near, near)])

    class Data:
        def __init__(self, rows: int) -> None:
            self.rows = rows

        def mean(self, f: Any, split: str) -> Tensor:
            assert split == "validation"
            values: Tensor = f(Batch(torch.zeros(self.rows, 1), torch.ones(self.rows, 2, dtype=DOUBLE)))
            return values

    assert least_loss(task, models, Data(3), "validation") == 1  # type: ignore[arg-type]
    assert least_loss(task, models, Data(0), "validation") == 0  # type: ignore[arg-type]
    broken = models._replace(theta=torch.stack([torch.full_like(far, math.nan), far, near]))
    assert least_loss(task, broken, Data(3), "validation") == 2  # type: ignore[arg-type]


def test_nbytes_counts_every_element() -> None:
    # 2 + 1 + 3 numbers of 4 bytes; then 5 of 8 and 3 of 1
    assert tree.nbytes(make_tree()) == 24
    assert tree.nbytes((torch.zeros(5, dtype=DOUBLE), torch.zeros(3, dtype=torch.bool))) == 43
    assert tree.nbytes(()) == 0


# -- a model is a vector -----------------------------------------------------------------------------


def network() -> nn.Module:
    """Layers "1" and "10" among others: a part is selected by whole words of its name."""
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4), *(nn.Tanh() for _ in range(8)), nn.Linear(4, 2)]
    return perturbed(nn.Sequential(*layers))


def test_flatten_and_load_are_inverse() -> None:
    module, layout = network(), Layout.of(network())
    # 3*4 + 4 weights, 4 + 4 of BatchNorm, 4*2 + 2; statistics 4 + 4
    assert (layout.dim, layout.stats_dim) == (34, 8)
    model = Model(randn(34, seed=1), randn(8, seed=2).square())
    before = {name: t.clone() for name, t in module.state_dict().items()}
    loaded = layout.load(copy.deepcopy(module), model)
    assert_same(layout.flatten(loaded, DOUBLE), model)
    assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())
    # parameters end to end in the module's own order
    assert torch.equal(model.theta, torch.cat([p.detach().flatten() for p in loaded.parameters()]))
    assert torch.equal(model.stats, torch.cat([loaded[1].running_mean, loaded[1].running_var]))


def test_flatten_is_a_copy() -> None:
    module = network()
    model = Layout.of(module).flatten(module, DOUBLE)
    kept = model.theta.clone()
    with torch.no_grad():
        module[0].weight.add_(1)
    assert torch.equal(model.theta, kept)


def test_a_task_predicts_as_the_module_does() -> None:
    module, x = network(), randn(5, 3)
    task = ModuleTask(module, "cross_entropy", classes=2, dtype=DOUBLE)
    model = Model(randn(34, seed=1), randn(8, seed=2).square())
    expected = Layout.of(module).load(copy.deepcopy(module), model).eval()(x)
    torch.testing.assert_close(task.predict(model, x), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(task.module(model)(x), expected, rtol=1e-12, atol=1e-12)
    assert not task.module(model).training


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def test_tied_weights_are_one_slice_with_the_sum_of_the_gradients() -> None:
    module = perturbed(Tied())
    task = ModuleTask(module, "mse", dtype=DOUBLE)
    assert task.dim == 3 * 3 + 3
    batch = Batch(randn(4, 3), randn(4, 3, seed=1))
    (module(batch.x) - batch.y).square().mean().backward()
    expected = torch.cat([p.grad.flatten() for p in module.parameters()])
    torch.testing.assert_close(task.grad(task.init(), batch).theta, expected, rtol=1e-12, atol=1e-12)


def test_frozen_parameters_are_constants() -> None:
    module = perturbed(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    module[0].requires_grad_(False)
    task = ModuleTask(module, "mse", dtype=DOUBLE)
    assert [s.name for s in task.layout.parameters] == ["2.weight", "2.bias"]
    other = task.module(Model(randn(10, seed=4), randn(0)))
    assert torch.equal(other[0].weight, module[0].weight)
    assert not torch.equal(other[2].weight, module[2].weight)


@pytest.mark.parametrize("module", [nn.LazyLinear(3), nn.Sequential(nn.LazyConv2d(2, 3)),
                                    nn.LazyBatchNorm1d(affine=False)])
def test_lazy_modules_are_refused(module: nn.Module) -> None:
    with pytest.raises(UsageError):
        Layout.of(nn.Sequential(module, nn.Linear(3, 2)))


def test_modules_without_trainable_parameters_are_refused() -> None:
    with pytest.raises(UsageError, match="no trainable parameters"):
        Layout.of(nn.Flatten())
    with pytest.raises(UsageError, match="no trainable parameters"):
        Layout.of(nn.Linear(2, 2).requires_grad_(False))


# -- layers: BatchNorm -------------------------------------------------------------------------------

NORMS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "vectors": (partial(nn.BatchNorm1d, 3), (3,)),
    "sequences": (partial(nn.BatchNorm1d, 3, momentum=0.4), (3, 5)),
    "images": (partial(nn.BatchNorm2d, 3, eps=0.1), (3, 2, 4)),
    "without weights": (partial(nn.BatchNorm1d, 3, affine=False), (3,)),
}


def normed(kind: str) -> nn.Module:
    """A weight before the normalisation, so that gradients pass through its moments."""
    make, shape = NORMS[kind]
    return perturbed(nn.Sequential(nn.Conv1d(3, 3, 1) if len(shape) == 2 else
                                   nn.Conv2d(3, 3, 1) if len(shape) == 3 else nn.Linear(3, 3),
                                   make(), nn.Tanh(), nn.Flatten(), nn.Linear(math.prod(shape), 2)))


def torch_gradient(module: nn.Module, x: Tensor, y: Tensor, *, train: bool = True
                   ) -> tuple[Tensor, Tensor, Tensor]:
    """Mean loss, gradient and statistics after the batch, by torch alone."""
    module = copy.deepcopy(module).train(train)
    loss = F.cross_entropy(module(x), y)
    loss.backward()
    model = Layout.of(module).flatten(module, DOUBLE)
    return loss.detach(), torch.cat([p.grad.flatten() for p in module.parameters()]), model.stats


def padded(x: Tensor, y: Tensor, extra: int) -> Batch:
    """The batch with rows that do not count, and that would be noticed if they did."""
    weight = torch.arange(len(x) + extra) < len(x)
    return Batch(torch.cat([x, 100 + randn(extra, *x.shape[1:], seed=9)]),
                 torch.cat([y, torch.zeros(extra, dtype=y.dtype)]), weight)


@pytest.mark.parametrize("extra", [None, 0, 1, 7])
@pytest.mark.parametrize("kind", NORMS)
def test_batchnorm_on_a_padded_batch_is_torch_on_the_real_rows(kind: str, extra: int | None) -> None:
    module = normed(kind)
    x, y = randn(5, *NORMS[kind][1]), torch.tensor([0, 1, 1, 0, 1])
    batch = Batch(x, y) if extra is None else padded(x, y, extra)
    task = ModuleTask(module, "cross_entropy", classes=2, dtype=DOUBLE)
    found = task.grad(task.init(), batch)
    for part, expected in zip(found, torch_gradient(module, x, y), strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-9, atol=1e-11)
    losses, _ = task.losses(task.init(), batch, train=True)
    expected = F.cross_entropy(copy.deepcopy(module).train()(x), y, reduction="none")
    torch.testing.assert_close(losses[:5], expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("extra", [None, 0, 3])
@pytest.mark.parametrize("kind", ["vectors", "without weights"])
def test_batchnorm_of_one_value_uses_the_running_statistics(kind: str, extra: int | None) -> None:
    """One value has no variance (torch raises): it is normalised as in prediction."""
    module = normed(kind)
    x, y = randn(1, 3), torch.tensor([1])
    task = ModuleTask(module, "cross_entropy", classes=2, dtype=DOUBLE)
    found = task.grad(task.init(), Batch(x, y) if extra is None else padded(x, y, extra))
    for part, expected in zip(found, torch_gradient(module, x, y, train=False), strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-9, atol=1e-11)
    assert torch.equal(found.stats, task.init().stats)


@pytest.mark.parametrize("extra", [None, 0, 3])
@pytest.mark.parametrize("kind", ["sequences", "images"])
def test_batchnorm_of_one_row_with_several_values_is_torch(kind: str, extra: int | None) -> None:
    module = normed(kind)
    x, y = randn(1, *NORMS[kind][1]), torch.tensor([1])
    task = ModuleTask(module, "cross_entropy", classes=2, dtype=DOUBLE)
    found = task.grad(task.init(), Batch(x, y) if extra is None else padded(x, y, extra))
    for part, expected in zip(found, torch_gradient(module, x, y), strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-9, atol=1e-11)


def test_running_statistics_after_several_batches_are_torch() -> None:
    module = normed("vectors")
    task = ModuleTask(module, "cross_entropy", classes=2, dtype=DOUBLE)
    reference, model = copy.deepcopy(module).train(), task.init()
    for k in range(4):
        x = randn(3 + k, 3, seed=k)
        reference(x)
        model = Model(model.theta, task.grad(model, padded(x, torch.zeros(3 + k, dtype=torch.long), 2)).stats)
    torch.testing.assert_close(model.stats, Layout.of(reference).flatten(reference, DOUBLE).stats,
                               rtol=1e-12, atol=1e-12)
    # and neither the user's module nor the task's own buffers have moved
    assert torch.equal(task.init().stats, Layout.of(module).flatten(module, DOUBLE).stats)


class Twice(nn.Module):
    """One BatchNorm layer that is called twice in a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(2 * self.norm(x) + 1))


def test_a_batchnorm_layer_that_is_called_twice_updates_its_statistics_twice() -> None:
    module, x, y = perturbed(Twice()), randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    task = ModuleTask(module, "cross_entropy", classes=2, dtype=DOUBLE)
    for part, expected in zip(task.grad(task.init(), Batch(x, y)), torch_gradient(module, x, y), strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("layer", "hint"), [
    (nn.BatchNorm1d(3, track_running_stats=False), "track_running_stats"),
    (nn.BatchNorm1d(3, momentum=None), "momentum"),
])
def test_batchnorm_without_running_statistics_is_refused(layer: nn.Module, hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        ModuleTask(nn.Sequential(nn.Linear(3, 3), layer), "mse")


# -- layers: Dropout ---------------------------------------------------------------------------------


class Masked(nn.Module):
    """Gives what its layers make of the input, plus a parameter, so that it is a model."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.shift = nn.Parameter(torch.zeros((), dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers], 1) + self.shift


def dropped(module: nn.Module, x: Tensor, key: Any) -> Tensor:
    """What the layers give for every row, in training."""
    seen: list[Tensor] = []

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        seen.append(outputs.detach())
        return outputs.flatten(1).sum(1)

    task = ModuleTask(module, loss, dtype=DOUBLE)
    task.losses(task.init(), Batch(x, torch.zeros(len(x)), None, torch.as_tensor(key)), train=True)
    return seen[0]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_dropout_keeps_the_right_share_and_scales_it(p: float) -> None:
    out = dropped(Masked(nn.Dropout(p)), torch.ones(100, 200, dtype=DOUBLE), 17)
    kept = out != 0
    # 20 000 draws: the share has standard deviation sqrt(p (1 - p) / 20000) <= 0.0036; 5 of them
    assert abs(kept.double().mean().item() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / 20_000)
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / (1 - p)))


def test_dropout_at_its_ends_and_in_prediction() -> None:
    x = randn(4, 5)
    both = dropped(Masked(nn.Dropout(0.0), nn.Dropout(1.0)), x, 3)
    assert torch.equal(both[:, 0], x)
    assert torch.equal(both[:, 1], torch.zeros_like(x))
    task = ModuleTask(Masked(nn.Dropout(0.5)), "mse", dtype=DOUBLE)
    assert torch.equal(task.predict(task.init(), x)[:, 0], x)


def test_dropout2d_drops_whole_channels() -> None:
    out = dropped(Masked(nn.Dropout2d(0.5)), torch.ones(40, 10, 3, 3, dtype=DOUBLE), 5)[:, 0]
    per_channel = (out != 0).flatten(2).double().mean(2)
    assert set(per_channel.flatten().tolist()) == {0.0, 1.0}
    assert abs(per_channel.mean().item() - 0.5) < 5 * math.sqrt(0.25 / 400)


def test_dropout_masks_depend_on_the_key_and_on_the_layer() -> None:
    x = torch.ones(20, 30, dtype=DOUBLE)
    module = Masked(nn.Dropout(0.5), nn.Dropout(0.5))
    first = dropped(module, x, 1)
    assert torch.equal(first, dropped(module, x, 1))
    for a, b in ((first, dropped(module, x, 2)), (first[:, 0], first[:, 1])):
        # independent fair coins agree in half of the places
        assert abs((a == b).double().mean().item() - 0.5) < 5 * math.sqrt(0.25 / 600)


def test_dropout_masks_of_real_rows_ignore_padding_and_vectorisation() -> None:
    module = Masked(nn.Dropout(0.5), nn.Dropout1d(0.5))
    x = randn(4, 3, 2).abs() + 1
    alone = dropped(module, x, 11)
    assert torch.equal(dropped(module, torch.cat([x, x]), 11)[:4], alone)
    task = ModuleTask(module, lambda outputs, y: outputs.flatten(1).sum(1), dtype=DOUBLE)
    rows = vmap(lambda key: task.losses(task.init(), Batch(x, torch.zeros(4), None, key), train=True)[0])(
        torch.tensor([5, 11]))
    assert torch.equal(rows[1], alone.flatten(1).sum(1))


# -- tasks -------------------------------------------------------------------------------------------


def linear(outputs: int) -> nn.Module:
    return perturbed(nn.Linear(3, outputs))


def test_cross_entropy_by_hand() -> None:
    task = ModuleTask(linear(4), "cross_entropy", classes=4, dtype=DOUBLE)
    x, y = randn(6, 3), torch.tensor([0, 3, 1, 1, 2, 0])
    logits = task.predict(task.init(), x)
    expected = logits.exp().sum(1).log() - logits[torch.arange(6), y]
    torch.testing.assert_close(task.losses(task.init(), Batch(x, y))[0], expected)
    torch.testing.assert_close(task.loss(task.init(), Batch(x, y)), expected.mean())


def test_cross_entropy_of_sequences_is_the_mean_over_positions() -> None:
    task = ModuleTask(perturbed(nn.Conv1d(3, 4, 1)), "cross_entropy", classes=4, dtype=DOUBLE)
    x, y = randn(2, 3, 5), torch.tensor([[0, 1, 2, 3, 0], [3, 3, 1, 0, 2]])
    logits = task.predict(task.init(), x)  # [2, 4, 5]
    expected = torch.stack([F.cross_entropy(logits[k].T, y[k]) for k in range(2)])
    torch.testing.assert_close(task.losses(task.init(), Batch(x, y))[0], expected)
    metrics = dict(zip(task.metric_names, task.metrics(logits, Batch(x, y)).tolist(), strict=True))
    assert metrics["accuracy"] == pytest.approx(sklearn.metrics.accuracy_score(y.flatten(),
                                                                               logits.argmax(1).flatten()))


def test_binary_cross_entropy_by_hand() -> None:
    task = ModuleTask(linear(1), "binary_cross_entropy", classes=2, dtype=DOUBLE)
    x, y = randn(6, 3), torch.tensor([0, 1, 1, 1, 0, 0])
    p = torch.sigmoid(task.predict(task.init(), x)[:, 0])
    expected = -(y * p.log() + (1 - y) * (1 - p).log())
    torch.testing.assert_close(task.losses(task.init(), Batch(x, y))[0], expected)


@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
def test_mse_by_hand(shape: tuple[int, ...]) -> None:
    count = math.prod(shape)
    unflatten = nn.Unflatten(1, shape) if len(shape) > 1 else nn.Identity()
    task = ModuleTask(perturbed(nn.Sequential(nn.Linear(3, count), unflatten)), "mse", dtype=DOUBLE)
    x, y = randn(6, 3), randn(6, *shape, seed=1)
    error = task.predict(task.init(), x).reshape(6, -1) - y.reshape(6, -1)
    torch.testing.assert_close(task.losses(task.init(), Batch(x, y))[0], error.square().mean(1))


def test_a_custom_loss_is_used_as_it_is() -> None:
    def huber(outputs: Tensor, y: Tensor) -> Tensor:
        return F.huber_loss(outputs[:, 0], y, reduction="none")

    task = ModuleTask(linear(1), huber, dtype=DOUBLE)
    assert (task.loss_name, task.metric_names) == ("huber", ("loss",))
    batch = Batch(randn(5, 3), 3 * randn(5, seed=1))
    torch.testing.assert_close(task.loss(task.init(), batch),
                               F.huber_loss(task.predict(task.init(), batch.x)[:, 0], batch.y))


def test_losses_and_gradients_ignore_padding() -> None:
    task = ModuleTask(linear(2), "cross_entropy", classes=2, dtype=DOUBLE)
    x, y = randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    model = task.init()
    torch.testing.assert_close(task.loss(model, padded(x, y, 4)), task.loss(model, Batch(x, y)))
    for a, b in zip(task.grad(model, padded(x, y, 4)), task.grad(model, Batch(x, y)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


CASES: dict[str, tuple[Any, str, int | None]] = {
    "cross_entropy": (lambda: nn.Linear(3, 3), "cross_entropy", 3),
    "binary_cross_entropy": (lambda: nn.Linear(3, 1), "binary_cross_entropy", 2),
    "mse": (lambda: nn.Linear(3, 1), "mse", None),
    "batchnorm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)),
                  "cross_entropy", 3),
    "batchnorm 2d": (lambda: nn.Sequential(nn.Unflatten(1, (1, 1, 3)), nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2),
                                           nn.Tanh(), nn.Flatten(), nn.Linear(6, 1)), "mse", None),
    "dropout": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 3)),
                "cross_entropy", 3),
}


@pytest.mark.parametrize("rows", ["whole", "padded", "one"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_by_finite_differences(case: str, rows: str) -> None:
    make, loss, classes = CASES[case]
    task = ModuleTask(perturbed(make()), loss, classes=classes, dtype=DOUBLE)  # type: ignore[arg-type]
    n = 1 if rows == "one" else 5
    x = randn(n, 3)
    y = randn(n, seed=1) if classes is None else torch.arange(n) % classes
    batch = padded(x, y, 3) if rows == "padded" else Batch(x, y)
    batch = batch._replace(key=torch.tensor(7))
    model = task.init()

    def objective(theta: Tensor) -> Tensor:
        losses = task.losses(Model(theta, model.stats), batch, train=True)[0]
        return losses[:n].mean()

    found = task.grad(model, batch)
    # central differences with h = 1e-6 err by about 1e-12 (truncation) + 1e-16 / 1e-6 (rounding)
    torch.testing.assert_close(found.theta, finite_differences(objective, model.theta), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found.loss, objective(model.theta))


@pytest.mark.parametrize("extra", [None, 0, 6])
def test_classification_metrics_are_those_of_scikit_learn(extra: int | None) -> None:
    task = ModuleTask(linear(4), "cross_entropy", classes=4, dtype=DOUBLE)
    x, y = randn(40, 3), torch.randint(3, (40,), generator=generator(2))  # class 3 does not occur
    batch = Batch(x, y) if extra is None else padded(x, y, extra)
    outputs = task.predict(task.init(), batch.x)
    found = dict(zip(task.metric_names, task.metrics(outputs, batch).tolist(), strict=True))
    predicted = outputs[:40].argmax(1)
    recalls = sklearn.metrics.recall_score(y, predicted, average=None, labels=[0, 1, 2])
    assert found["accuracy"] == pytest.approx(sklearn.metrics.accuracy_score(y, predicted))
    assert found["balanced_accuracy"] == pytest.approx(recalls.mean())
    assert found["loss"] == pytest.approx(F.cross_entropy(outputs[:40], y).item())


@pytest.mark.parametrize("extra", [None, 6])
def test_binary_metrics_are_those_of_scikit_learn(extra: int | None) -> None:
    task = ModuleTask(linear(1), "binary_cross_entropy", classes=2, dtype=DOUBLE)
    x, y = randn(40, 3), torch.randint(2, (40,), generator=generator(2))
    batch = Batch(x, y) if extra is None else padded(x, y, extra)
    outputs = task.predict(task.init(), batch.x)
    found = dict(zip(task.metric_names, task.metrics(outputs, batch).tolist(), strict=True))
    predicted = (outputs[:40, 0] > 0).long()
    assert found["accuracy"] == pytest.approx(sklearn.metrics.accuracy_score(y, predicted))
    assert found["balanced_accuracy"] == pytest.approx(sklearn.metrics.balanced_accuracy_score(y, predicted))


@pytest.mark.parametrize("extra", [None, 0, 6])
def test_regression_metrics_are_those_of_scikit_learn(extra: int | None) -> None:
    task = ModuleTask(linear(1), "mse", dtype=DOUBLE)
    x, y = randn(30, 3), 2 + randn(30, seed=1)
    batch = Batch(x, y) if extra is None else padded(x, y, extra)
    outputs = task.predict(task.init(), batch.x)
    found = dict(zip(task.metric_names, task.metrics(outputs, batch).tolist(), strict=True))
    assert found["mse"] == pytest.approx(sklearn.metrics.mean_squared_error(y, outputs[:30, 0]))
    assert found["r2"] == pytest.approx(sklearn.metrics.r2_score(y, outputs[:30, 0]))
    assert found["loss"] == pytest.approx(found["mse"])


def test_a_single_class_is_always_right() -> None:
    task = ModuleTask(linear(1), "cross_entropy", classes=1, dtype=DOUBLE)
    batch = Batch(randn(8, 3), torch.zeros(8, dtype=torch.long))
    found = dict(zip(task.metric_names, task.metrics(task.predict(task.init(), batch.x), batch).tolist(),
                     strict=True))
    assert found == {"loss": 0.0, "accuracy": 1.0, "balanced_accuracy": 1.0}


@pytest.mark.parametrize(("loss", "classes"), [("cross_entropy", 2), ("mse", None)])
def test_metrics_of_an_empty_split_are_nan(loss: Any, classes: int | None) -> None:
    task = ModuleTask(linear(2 if classes else 1), loss, classes=classes, dtype=DOUBLE)
    y = torch.zeros(3, dtype=torch.long) if classes else torch.zeros(3, dtype=DOUBLE)
    batch = Batch(randn(3, 3), y, torch.zeros(3, dtype=torch.bool))
    assert task.metrics(task.predict(task.init(), batch.x), batch).isnan().all()


def test_a_function_task_is_its_function() -> None:
    task = FunctionTask(lambda theta, x, y: ((theta - x) ** 2).sum(1) * y, torch.zeros(3, dtype=DOUBLE))
    x, y = randn(4, 3), randn(4, seed=1).abs()
    model = Model(randn(3, seed=2), task.init().stats)
    expected = 2 * ((model.theta - x) * y[:, None]).mean(0)
    torch.testing.assert_close(task.grad(model, Batch(x, y)).theta, expected)
    [loss] = task.metrics(task.predict(model, x), Batch(x, y))
    torch.testing.assert_close(loss, task.loss(model, Batch(x, y)))
    assert task.init().theta is not task.init().theta


def test_bytes_become_numbers_between_zero_and_one() -> None:
    x = torch.tensor([0, 51, 255], dtype=torch.uint8)
    torch.testing.assert_close(inputs(x, DOUBLE), torch.tensor([0, 0.2, 1], dtype=DOUBLE))
    for same in (torch.tensor([1, 2]), randn(2)):
        assert inputs(same, torch.float32) is same


@pytest.mark.parametrize(("module", "loss", "classes", "hint"), [
    (nn.Linear(5, 3), "cross_entropy", 3, "does not accept.*\\(3,\\)"),
    (nn.Linear(3, 2), "cross_entropy", 3, "3 classes: it must give 3 outputs"),
    (nn.Linear(3, 2), "binary_cross_entropy", 2, "does not fit outputs of shape"),
    (nn.Linear(3, 1), "binary_cross_entropy", 3, "is for two classes, and the data has 3"),
    (nn.Linear(3, 3), F.cross_entropy, 3, 'reduction="none"'),
    (nn.Linear(3, 2), "mse", None, "does not fit outputs of shape"),
])
def test_a_misfit_of_model_loss_and_data_is_told_before_training(module: nn.Module, loss: Any,
                                                                classes: int | None, hint: str) -> None:
    federation = ragged(shape=(3,), classes=classes).to(torch.float32)
    with pytest.raises(UsageError, match=hint):
        ModuleTask(module, loss, classes=classes).fitted(federation)


def test_the_meter_counts_gradients_and_averages_losses() -> None:
    task = ModuleTask(linear(2), "cross_entropy", classes=2, dtype=DOUBLE)
    batch = Batch(randn(5, 3), torch.tensor([0, 1, 1, 0, 1]))
    other = Model(randn(8, seed=3), task.init().stats)
    expected = (task.loss(task.init(), batch) + task.loss(other, batch)) / 2
    with metered(4) as meter:
        assert math.isnan(meter.loss())
        task.grad(task.init(), batch)
        task.grad(other, batch)
        assert meter.grad_steps == 8
        torch.testing.assert_close(meter.loss(), expected)
        meter.stand_for(1, torch.tensor(False))
        task.grad(other, batch)
        assert meter.grad_steps == 9
        torch.testing.assert_close(meter.loss(), expected)
    task.grad(other, batch)
    assert meter.grad_steps == 9


# -- priors and solvers --------------------------------------------------------------------------------

PRIORS = {
    "flat": Flat(),
    "gaussian": Gaussian(randn(4, seed=5), 3.0),
    "diagonal": Gaussian(randn(4, seed=5), torch.tensor([0.0, 0.5, 2.0, 70.0], dtype=DOUBLE)),
    "quadratic": Quadratic(randn(4, seed=6), 0.4),
    "linear": Quadratic(randn(4, seed=6)),
}


@pytest.mark.parametrize("name", PRIORS)
def test_the_gradient_of_a_prior_is_that_of_its_energy(name: str) -> None:
    prior, theta = PRIORS[name], randn(4)
    expected = finite_differences(prior.energy, theta)
    torch.testing.assert_close(prior.grad(theta), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("step", [0.01, 1.0, 50.0])
@pytest.mark.parametrize("name", PRIORS)
def test_the_proximal_map_is_the_minimiser(name: str, step: float) -> None:
    prior, theta = PRIORS[name], randn(4)
    u = prior.prox(theta, step)
    # stationary (the problem is strongly convex): u - theta + step grad energy(u) = 0
    residual = u - theta + step * prior.grad(u)
    torch.testing.assert_close(residual, torch.zeros(4, dtype=DOUBLE), rtol=0, atol=1e-11)


@pytest.mark.parametrize(("solver", "reference"), [
    (SGD(lr=0.3), partial(torch.optim.SGD, lr=0.3)),
    (SGD(lr=0.1, momentum=0.9), partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    (SGD(lr=0.1, weight_decay=0.5), partial(torch.optim.SGD, lr=0.1, weight_decay=0.5)),
    (SGD(lr=0.1, momentum=0.5, weight_decay=0.2),
     partial(torch.optim.SGD, lr=0.1, momentum=0.5, weight_decay=0.2)),
    (Adam(lr=0.05), partial(torch.optim.Adam, lr=0.05)),
    (Adam(lr=0.05, beta1=0.5, beta2=0.7, eps=0.1, weight_decay=0.3),
     partial(torch.optim.Adam, lr=0.05, betas=(0.5, 0.7), eps=0.1, weight_decay=0.3)),
    (AdamW(lr=0.05), partial(torch.optim.AdamW, lr=0.05)),
    (AdamW(lr=0.05, beta1=0.5, beta2=0.7, eps=0.1, weight_decay=0.3),
     partial(torch.optim.AdamW, lr=0.05, betas=(0.5, 0.7), eps=0.1, weight_decay=0.3)),
])
@pytest.mark.parametrize("name", PRIORS)
def test_solvers_step_as_those_of_torch(solver: Solver, reference: Any, name: str) -> None:
    """The gradient of a loss plus that of the prior, step by step."""
    prior, theta = PRIORS[name], randn(4)
    parameter = nn.Parameter(theta.clone())
    optimizer, state = reference([parameter]), solver.init(theta)
    for k in range(7):
        gradient = randn(4, seed=10 + k)
        parameter.grad = gradient + prior.grad(parameter.detach())
        optimizer.step()
        theta, state = solver.step(theta, gradient, prior, state)
        torch.testing.assert_close(theta, parameter.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("solver", [SGD, Adam, AdamW, Proximal])
@pytest.mark.parametrize("clip", [0.5, 100.0])
def test_gradients_are_clipped_as_by_torch(solver: Any, clip: float) -> None:
    """That of the loss; the prior, which is no noise, is not."""
    prior, theta, plain = PRIORS["diagonal"], randn(4), solver(lr=0.1)
    state = found_state = plain.init(theta)
    expected = found = theta
    for k in range(3):
        parameter = nn.Parameter(theta.clone())
        parameter.grad = gradient = 5 * randn(4, seed=10 + k)
        assert (gradient.norm() > clip) == (clip == 0.5)
        nn.utils.clip_grad_norm_([parameter], clip)
        expected, state = plain.step(expected, parameter.grad.clone(), prior, state)
        gradient = 5 * randn(4, seed=10 + k)
        found, found_state = solver(lr=0.1, clip=clip).step(found, gradient, prior, found_state)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_the_proximal_solver_is_a_gradient_step_and_the_proximal_map() -> None:
    theta, gradient, prior = randn(4), randn(4, seed=1), PRIORS["diagonal"]
    found, state = Proximal(lr=0.2).step(theta, gradient, prior, ())
    assert state == ()
    torch.testing.assert_close(found, prior.prox(theta - 0.2 * gradient, 0.2))
    found, _ = Proximal(lr=0.2, weight_decay=0.5).step(theta, gradient, prior, ())
    torch.testing.assert_close(found, prior.prox(theta - 0.2 * (gradient + 0.5 * theta), 0.2))


@pytest.mark.parametrize("name", PRIORS)
def test_a_scaled_prior_has_a_multiple_of_the_energy(name: str) -> None:
    prior, theta = PRIORS[name], randn(4)
    scaled = prior.scaled(2.5)
    torch.testing.assert_close(scaled.energy(theta), 2.5 * prior.energy(theta))
    torch.testing.assert_close(scaled.grad(theta), 2.5 * prior.grad(theta))
    torch.testing.assert_close(scaled.prox(theta, 0.1), prior.prox(theta, 0.25))


def test_tracking_keeps_the_mean_of_what_all_clients_last_told() -> None:
    """Whoever takes part; with lam it moves by lam m / |S| times as much."""
    told, c = torch.zeros(5, 3, dtype=DOUBLE), torch.zeros(3, dtype=DOUBLE)
    for k, cohort in enumerate(([0, 3], [1], [0, 1, 2, 3, 4], [2, 4])):
        facts = Round(0, k, torch.tensor(cohort), torch.ones(len(cohort)), 5)
        changes = randn(len(cohort), 3, seed=k)
        double = Tracked(2 * len(cohort) / 5)(c, changes.mean(0), facts)
        torch.testing.assert_close(double - c, 2 * (Tracked()(c, changes.mean(0), facts) - c))
        c = Tracked()(c, changes.mean(0), facts)
        told[cohort] += changes
        torch.testing.assert_close(c, told.mean(0))


def test_the_facts_of_some_clients_of_a_round() -> None:
    facts = Round(7, 3, torch.tensor([1, 4, 6]), torch.tensor([10.0, 20.0, 30.0]), 9).of(torch.tensor([2, 0]))
    assert facts[:2] == (7, 3)
    assert facts.cohort.tolist() == [6, 1]
    assert facts.weights("samples").tolist() == [0.75, 0.25]
    assert facts.population == 9


@pytest.mark.parametrize(("solver", "field"), [
    (SGD, {"lr": 0.0}), (SGD, {"lr": -1.0}), (SGD, {"lr": math.nan}), (SGD, {"momentum": 1.0}),
    (SGD, {"momentum": -0.1}), (SGD, {"weight_decay": -1.0}), (Adam, {"lr": 0.0}), (Adam, {"beta1": 1.0}),
    (Adam, {"eps": 0.0}), (Proximal, {"lr": 0.0}), (SGD, {"lr": "0.1"}), (SGD, {"lr": True}),
])
def test_solvers_refuse_nonsense(solver: Any, field: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{solver.name}.{next(iter(field))}"):
        solver(**field)


# -- random numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [(0, "a"), (7, "batches.local", 3, 12), (2**32 - 1, "b", 0),
                                  (2**32, "b", 2**40), (123456789012345678901, "c", 1)])
def test_a_stream_is_the_one_of_its_list_and_a_key_its_first_number(name: tuple[Any, ...]) -> None:
    """Runs of earlier versions continue with the numbers that they began with."""
    seed, purpose, *keys = name
    ours, theirs = random.stream(*name), np.random.default_rng([seed, zlib.crc32(purpose.encode()), *keys])
    assert random.key(*name) == int(theirs.integers(2**63)) == random.first_key(ours)
    assert np.array_equal(ours.permutation(50), theirs.permutation(50))


@pytest.mark.parametrize("keys", [(), (3,), (3, 2**32 - 1), (1, 2, 3), (2**32,)])
@pytest.mark.parametrize("count", [3, 40])
def test_streams_made_at_once_are_those_of_their_names(keys: tuple[int, ...], count: int) -> None:
    rng = np.random.default_rng(0)
    last = rng.integers(0, 2**32, count)
    many = random.Streams(7, "batches.local", *keys, last=last)
    for k in rng.permutation(count).tolist():
        ours, theirs = many[k], random.stream(7, "batches.local", *keys, int(last[k]))
        assert ours.bit_generator.state == theirs.bit_generator.state
        assert np.array_equal(ours.permutation(50), theirs.permutation(50))
        ours.integers(10)  # takes half of a number, of which the next stream must know nothing


def test_streams_differ_in_every_part_of_their_name() -> None:
    names = [(0, "a", 1, 2), (1, "a", 1, 2), (0, "b", 1, 2), (0, "a", 2, 1), (0, "a", 1, 3), (0, "a", 1)]
    draws = [random.stream(*name).random(400) for name in names]
    for k, a in enumerate(draws):
        assert np.array_equal(a, random.stream(*names[k]).random(400))
        for b in draws[:k]:
            # the correlation of independent draws has standard deviation 1 / sqrt(400)
            assert abs(np.corrcoef(a, b)[0, 1]) < 5 / 20
    keys = {random.key(*name) for name in names}
    assert len(keys) == len(names)
    assert all(0 <= key < 2**63 for key in keys)


@pytest.mark.thorough
def test_uniform_numbers_are_uniform() -> None:
    """Kolmogorov-Smirnov against U[0, 1): neighbours in a stream, and the first of many streams."""
    along = random.uniform(torch.tensor(random.key(0, "test")), (20_000,), DOUBLE)
    keys = torch.tensor(random.key(1, "test"))
    across = torch.stack([random.uniform(random.fold(keys, k), (1,), DOUBLE)[0] for k in range(4_000)])
    for sample in (along, across):
        assert ((sample >= 0) & (sample < 1)).all()
        assert scipy.stats.kstest(sample.numpy(), "uniform").pvalue > 1e-3
    # neighbours are independent: correlation 0 with standard deviation 1 / sqrt(20000)
    assert abs(np.corrcoef(along[:-1], along[1:])[0, 1]) < 5 / math.sqrt(20_000)
    assert len(along.unique()) > 19_950  # 2^24 values: 20000^2 / 2^25 = 12 pairs are expected to coincide


@pytest.mark.parametrize("key", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_uniform_is_a_pure_function_of_its_key(key: int) -> None:
    keys = torch.tensor([key, 5])
    alone = random.uniform(keys[0], (3, 4), torch.float32)
    assert torch.equal(vmap(lambda k: random.uniform(k, (3, 4), torch.float32))(keys)[0], alone)
    assert torch.equal(random.uniform(keys[0], (3, 4), DOUBLE), alone.double())
    assert torch.equal(random.uniform(keys[0], (12,), torch.float32).reshape(3, 4), alone)


def test_folded_keys_are_distinct_also_under_vmap() -> None:
    keys = torch.tensor([0, 1, 2**62, -5])
    table = torch.stack([random.fold(keys, k) for k in range(500)])
    assert len(table.unique()) == table.numel()
    assert torch.equal(vmap(lambda key: random.fold(key, 7))(keys), table[7])


def test_mixing_is_that_of_splitmix64() -> None:
    """The first outputs of SplitMix64 for seed 1234567, from the generator's published test vector."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    found = random.uniform(torch.tensor(1234567), (4,), DOUBLE)
    assert [int(u * 2**24) for u in found] == [value >> 40 for value in expected]


# -- the store ---------------------------------------------------------------------------------------


class State(NamedTuple):
    theta: Tensor
    count: Tensor
    empty: Tensor


def template() -> State:
    return State(torch.tensor([1.0, 2.0], dtype=DOUBLE), torch.tensor(7), torch.zeros(0))


def rows(clients: np.ndarray, value: float) -> State:
    n = len(clients)
    return State(value + torch.from_numpy(clients).double()[:, None].expand(n, 2),
                 torch.full((n,), int(value)), torch.zeros(n, 0))


@pytest.fixture(params=["memory", "mapped"])
def store(request: pytest.FixtureRequest, tmp_path: Any) -> ClientStore:
    return ClientStore(template(), 6, None if request.param == "memory" else tmp_path / "clients")


def test_a_client_that_never_took_part_is_in_the_initial_state(store: ClientStore) -> None:
    everyone = np.arange(6)
    assert not store.took_part(everyone).any()
    assert_same(store.read(everyone), tree.stack([template()] * 6))


def test_staged_rows_are_read_at_once_and_written_later(store: ClientStore) -> None:
    first, second = np.array([1, 4]), np.array([0, 4])
    store.stage(first, rows(first, 10), 1)
    assert store.took_part(np.arange(6)).tolist() == [False, True, False, False, True, False]
    assert_same(store.read(first), rows(first, 10))
    store.write()
    assert_same(store.read(first), rows(first, 10))
    store.stage(second, rows(second, 20), 2)
    expected = tree.concat([rows(np.array([0]), 20), rows(np.array([1]), 10), tree.stack([template()]),
                            tree.stack([template()]), rows(np.array([4]), 20), tree.stack([template()])])
    assert_same(store.read(np.arange(6)), expected)  # staged, written and untouched ones together
    assert store.last_round.tolist() == [2, 1, 0, 0, 2, 0]
    store.write()
    assert_same(store.read(np.arange(6)), expected)
    assert len(store.staged.clients) == 0


def test_what_is_staged_can_be_taken_back(store: ClientStore) -> None:
    first, second = np.array([1, 4]), np.array([0, 4])
    store.stage(first, rows(first, 10), 1)
    store.write()
    store.stage(second, rows(second, 20), 2)
    store.unstage()
    assert store.last_round.tolist() == [0, 1, 0, 0, 1, 0]
    assert_same(store.read(first), rows(first, 10))
    assert_same(store.read(np.array([0])), tree.stack([template()]))
    store.write()
    assert_same(store.read(first), rows(first, 10))


def test_what_is_read_is_a_copy(store: ClientStore) -> None:
    one = np.array([3])
    store.stage(one, rows(one, 5), 1)
    store.write()
    store.read(one).theta.add_(100)
    assert_same(store.read(one), rows(one, 5))


def test_a_store_follows_another(store: ClientStore) -> None:
    other, some = ClientStore(template(), 6), np.array([1, 2, 5])
    other.stage(some, rows(some, 3), 4)
    store.follow(other, some)
    assert_same(store.read(np.arange(6)), other.read(np.arange(6)))
    assert store.last_round.tolist() == [0, 4, 4, 0, 0, 4]


def test_a_mapped_store_survives_reopening_and_is_sparse(tmp_path: Any) -> None:
    some = np.array([2, 70_000])
    store = ClientStore(template(), 100_000, tmp_path)
    store.stage(some, rows(some, 8), 3)
    store.write()
    del store
    again = ClientStore(template(), 100_000, tmp_path)
    again.last_round[some] = 3  # who took part is kept with the server's state
    assert_same(again.read(some), rows(some, 8))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["count.bin", "theta.bin"]
    # 2 rows written: pages, not 1.6 MB
    assert (tmp_path / "theta.bin").stat().st_size == 1_600_000
    assert (tmp_path / "theta.bin").stat().st_blocks * 512 <= 64 * 1024


# -- batches -----------------------------------------------------------------------------------------


def plan(federation: Federation, clients: Any, *, batch: Any = 4, seed: int = 0, number: int = 1,
         purpose: str = "local", per_step: int = 1, **work: int) -> tuple[Plan, ClientTensors]:
    pool = Pool.of(federation, DOUBLE)
    return plan_chunk(pool, np.asarray(clients), seed=seed, purpose=purpose, number=number, batch=batch,
                      work=LocalWork(**work), per_step=per_step, dtype=DOUBLE, draws=True,
                      splits=("train", "validation", "test"))


def numbered(sizes: tuple[int, ...] = (11, 5, 1, 8)) -> Federation:
    """Rows that say who they are: x is the row's number in the pool."""
    federation = ragged(sizes, shape=(1,), classes=None)
    x = torch.arange(len(federation.x), dtype=DOUBLE)[:, None]
    return Federation(x, federation.y, federation.train, federation.validation, federation.test, None,
                      federation.names)


def seen(chunk: Plan, tensors: ClientTensors, k: int) -> list[list[int]]:
    """The rows of each of client k's batches."""
    view, batches = View(chunk, tree.take(tensors, k)), []

    def step(count: Tensor, batch: Batch) -> Tensor:
        real = batch.x if batch.weight is None else batch.x[batch.weight]
        batches.append(real[:, 0].long().tolist())
        return count + 1

    count = view.scan(step, torch.tensor(0))
    assert int(count) == int(view.steps)  # the carry does not move on steps that a client does not have
    return batches[: int(view.steps)]


@pytest.mark.parametrize("clients", [[0], [1], [2], [0, 1, 2, 3], [3, 1]])
def test_each_epoch_visits_each_row_once(clients: list[int]) -> None:
    federation = numbered()
    chunk, tensors = plan(federation, clients, epochs=3)
    for k, client in enumerate(clients):
        own, n = sorted(federation.train[client].tolist()), int(federation.train.sizes[client])
        batches = seen(chunk, tensors, k)
        per_epoch = -(-n // 4)
        assert len(batches) == 3 * per_epoch
        for epoch in range(3):
            part = batches[epoch * per_epoch : (epoch + 1) * per_epoch]
            assert [len(b) for b in part] == [4] * (n // 4) + [n % 4] * (n % 4 > 0)
            assert sorted(row for batch in part for row in batch) == own
        if n > 4:
            assert batches[:per_epoch] != batches[per_epoch : 2 * per_epoch]


def test_steps_go_through_the_same_sequence_as_epochs() -> None:
    federation = numbered()
    everyone = [0, 1, 2, 3]
    by_epochs, by_steps = plan(federation, everyone, epochs=4), plan(federation, everyone, steps=7)
    for k in everyone:
        sequence = seen(*by_epochs, k)[:7]
        assert seen(*by_steps, k)[: len(sequence)] == sequence
        assert len(seen(*by_steps, k)) == 7


def test_full_batches_are_all_rows_in_order() -> None:
    federation = numbered()
    chunk, tensors = plan(federation, [0, 2, 3], batch="full", steps=2)
    for k, client in enumerate((0, 2, 3)):
        assert seen(chunk, tensors, k) == [federation.train[client].tolist()] * 2


def test_batches_depend_on_seed_round_client_and_purpose_only() -> None:
    federation = numbered()
    reference = seen(*plan(federation, [3], steps=5), 0)
    assert seen(*plan(federation, [0, 3, 1], steps=5), 1) == reference
    assert seen(*plan(federation, [3, 2], steps=5), 0) == reference
    for change in ({"seed": 1}, {"number": 2}, {"purpose": "personal"}):
        assert seen(*plan(federation, [3], steps=5, **change), 0) != reference  # type: ignore[arg-type]


def test_every_client_and_step_has_its_own_random_key() -> None:
    federation = numbered()

    def keys(clients: list[int], k: int, **options: Any) -> list[int]:
        chunk, tensors = plan(federation, clients, steps=6, **options)
        found: list[int] = []

        def step(carry: Tensor, batch: Batch) -> Tensor:
            assert batch.key is not None
            found.append(int(batch.key))
            return carry

        View(chunk, tree.take(tensors, k)).scan(step, torch.tensor(0))
        return found

    table = [keys([0, 1, 2, 3], k, number=number) for k in range(4) for number in (1, 2)]
    assert len({key for row in table for key in row}) == 4 * 2 * 6
    assert keys([2], 0, number=1) == table[4]


@pytest.mark.parametrize("clients", [[0], [1], [0, 1, 2], [2, 0]])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_the_mean_over_a_split_is_the_plain_mean(clients: list[int], split: Any) -> None:
    """Ragged, and longer than one block of rows, so that blocks must be weighted by their real rows."""
    rng = np.random.default_rng(0)
    sizes = (2 * BLOCK + 77, 5, BLOCK)
    client = np.repeat([0, 1, 2], [2 * s for s in sizes])
    x = rng.standard_normal((len(client), 2))
    federation = Federation.from_arrays(x, rng.standard_normal(len(client)), client, test=0, validation=0.5)
    assert tuple(federation.split(split).sizes) == sizes
    chunk, tensors = plan(federation, clients, steps=1)

    def f(batch: Batch) -> tuple[Tensor, Tensor]:
        weight = torch.ones(len(batch.y)) if batch.weight is None else batch.weight
        count = weight.sum()
        return (batch.x.exp() * weight[:, None]).sum(0) / count, (batch.y * weight).sum() / count

    def one(own: ClientTensors) -> Any:
        return View(chunk, own).mean(f, split)

    found = vmap(one)(tensors)
    for k, c in enumerate(clients):
        own = federation.split(split)[c]
        expected = (federation.x[own].exp().mean(0), federation.y[own].mean())
        assert_same(tree.take(found, k), expected, 1e-13)


def test_the_mean_over_no_rows_is_the_same_alone_and_in_a_chunk() -> None:
    federation = ragged()
    assert federation.validation.sizes[2] == 0

    def one(chunk: Plan, own: ClientTensors) -> Tensor:
        found: Tensor = View(chunk, own).mean(lambda batch: batch.x.sum(), "validation")
        return found

    alone, tensors = plan(federation, [2], steps=1)
    single = one(alone, tree.take(tensors, 0))
    together, tensors = plan(federation, [1, 2], steps=1)
    assert_same(vmap(partial(one, together))(tensors)[1], single)


def test_nobody_else_s_rows_are_in_a_client_s_batches() -> None:
    federation = numbered()
    chunk, tensors = plan(federation, [0, 1, 2, 3], epochs=2)
    for k in range(4):
        rows = chunk.pool.train.x[tensors.rows[k], 0]  # padding included
        assert set(rows.tolist()) <= set(federation.train[k].tolist())


@pytest.mark.parametrize("work", [{}, {"steps": 1, "epochs": 1}, {"steps": -1}, {"epochs": -2},
                                  {"steps": 1.5}])
def test_local_work_is_steps_or_epochs(work: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        LocalWork(**work)


def test_every_step_on_one_batch_draws_its_own_random_numbers() -> None:
    keys = []

    class Recording:
        chunk_gradients = None

        def grad(self, model: Model, batch: Batch) -> Gradient:
            assert batch.key is not None
            keys.append(int(batch.key))
            return Gradient(torch.zeros(()), torch.zeros_like(model.theta), model.stats)

    batch = Batch(torch.zeros(1, 2), torch.zeros(1), None, torch.tensor(7))
    model = Model(torch.ones(2), torch.zeros(0))
    inner_solve(cast(Any, Recording()), model, batch, SGD(lr=0.1), Flat(), 4)
    assert len(set(keys)) == 4

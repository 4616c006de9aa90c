"""Private gradients: what each row adds, how much noise there is, and that nothing else is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from torch import Tensor, nn
from torch.func import vmap

from descant.core import meter
from descant.core.privacy import gradients as private
from descant.core.privacy.noise import normals, secret_normals, secret_uniform
from descant.core.privacy.settings import Mechanism, Privacy, Quantile, split_noise
from descant.core.privacy.task import NotPrivate, PrivateTask
from descant.core.task import Batch, FunctionTask
from descant.core.vector import Model
from descant.errors import UsageError
from descant.models.module import ModuleTask

QUIET = 1e-14  # a noise that nobody notices
ROWS = 7


def mechanism(clip: float = 0.5, noise: float = QUIET, **own: Any) -> Mechanism:
    return Mechanism(Privacy(clip=clip, noise=noise), noise, **own)


def networks() -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    return {
        "linear": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), (3, 4)),
        "without biases": (lambda: nn.Linear(5, 3, bias=False), (5,)),
        "layers": (lambda: nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 4), nn.Tanh(),
                                         nn.Linear(4, 3)), (5,)),
        "convolution": (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)),
                        (1, 4, 4)),
        "norm": (lambda: nn.Sequential(nn.Linear(5, 4), nn.GroupNorm(2, 4), nn.ReLU(), nn.Linear(4, 3)),
                 (5,)),
        "series": (lambda: nn.Sequential(nn.Linear(4, 2), nn.Flatten(), nn.Linear(6, 3)), (3, 4)),
    }


def task_of(name: str) -> tuple[ModuleTask, tuple[int, ...]]:
    torch.manual_seed(3)
    make, shape = networks()[name]
    return ModuleTask(make(), loss="cross_entropy", classes=3, dtype=torch.float64), shape


def batch_of(shape: tuple[int, ...], seed: int = 0, **own: Any) -> Batch:
    made = torch.Generator().manual_seed(seed)
    x = 2 * torch.randn(ROWS, *shape, generator=made, dtype=torch.float64)
    return Batch(x, torch.arange(ROWS) % 3, None, torch.tensor(seed), **own)


def by_hand(task: ModuleTask, model: Model, batch: Batch, clip: float) -> Tensor:
    """The definition, a row after the other by autograd: the mean of clipped gradients."""
    total = torch.zeros_like(model.theta)
    for k in range(len(batch.x)):
        if batch.weight is None or bool(batch.weight[k]):
            g = task.grad(model, Batch(batch.x[k : k + 1], batch.y[k : k + 1])).theta
            total += g * min(1.0, clip / float(g.norm()))
    count = len(batch.x) if batch.weight is None else int(batch.weight.sum())
    return total * (1 / count if batch.counts is None else batch.counts[0])


@pytest.mark.parametrize("clip", [0.3, 1.5, 1e6])
@pytest.mark.parametrize("name", networks())
def test_the_gradient_is_the_mean_of_clipped_gradients_of_single_rows(name: str, clip: float) -> None:
    task, shape = task_of(name)
    own = PrivateTask(task, mechanism(clip, QUIET / clip), len(shape))
    assert (own.chunk_gradients is not None) == (name in ("linear", "without biases", "layers"))
    batch, model = batch_of(shape), task.init()
    with torch.no_grad(), meter.metered(1) as counted:
        found = own.grad(model, batch)
    assert torch.allclose(found.theta, by_hand(task, model, batch, clip), rtol=0, atol=1e-12)
    if clip == 1e6:  # no row is shortened, and it is the plain gradient
        assert torch.allclose(found.theta, task.grad(model, batch).theta, rtol=0, atol=1e-12)
        assert counted.shortened == 0
    assert counted.rows == ROWS
    assert found.loss == pytest.approx(float(task.grad(model, batch).loss))


@pytest.mark.parametrize("name", ["layers", "convolution"])
def test_padding_and_batches_by_coins_count_as_they_should(name: str) -> None:
    task, shape = task_of(name)
    own, model = PrivateTask(task, mechanism(), len(shape)), task.init()
    real = torch.arange(ROWS) < 3  # a third has no exact number, in any precision
    expected = torch.full((ROWS,), 1 / 5, dtype=torch.float64)  # five rows were expected, and three came
    for batch in (batch_of(shape)._replace(weight=real),
                  batch_of(shape)._replace(weight=real, counts=expected)):
        with torch.no_grad():
            assert torch.allclose(own.grad(model, batch).theta, by_hand(task, model, batch, 0.5),
                                  rtol=0, atol=1e-12)
    nobody = batch_of(shape)._replace(weight=real & False, counts=expected)
    with torch.no_grad(), meter.metered(1):
        found = PrivateTask(task, mechanism(2.0, 3.0), len(shape)).grad(model, nobody).theta
    assert found.std() == pytest.approx(2.0 * 3.0 / 5, rel=0.35)  # noise comes all the same


@pytest.mark.parametrize("name", ["layers", "convolution"])
def test_clients_together_have_the_gradients_that_they_have_alone(name: str) -> None:
    task, shape = task_of(name)
    own, model = PrivateTask(task, mechanism(noise=1.0), len(shape)), task.init()
    batches = [batch_of(shape, seed) for seed in range(3)]
    together = Batch(torch.stack([b.x for b in batches]), torch.stack([b.y for b in batches]), None,
                     torch.stack([b.key for b in batches if b.key is not None]))
    with torch.no_grad(), meter.metered(3):
        all_of_them = vmap(lambda x, y, key: own.grad(model, Batch(x, y, None, key)).theta)(
            together.x, together.y, together.key)
    for batch, theirs in zip(batches, all_of_them, strict=True):
        with torch.no_grad(), meter.metered(1):
            assert torch.allclose(own.grad(model, batch).theta, theirs, atol=1e-14)


def test_noise_has_the_deviation_that_is_asked_for_and_no_two_draws_are_alike() -> None:
    """Planted: a gradient of zero for every row, so that what is left is the noise."""
    task = FunctionTask(lambda theta, x, y: 0 * theta.sum() + 0 * x[:, 0],
                        torch.zeros(4000, dtype=torch.float64))
    own = PrivateTask(task, mechanism(0.7, 2.0), 1)
    batch = Batch(torch.zeros(10, 1, dtype=torch.float64), torch.zeros(10), None, torch.tensor(5))
    with torch.no_grad(), meter.metered(1) as counted:
        counted.begin_pass()
        draws = [own.grad(task.init(), batch).theta for _ in range(3)]
        counted.begin_pass()  # the same batches again, as for a second model
        draws += [own.grad(task.init(), batch).theta for _ in range(3)]
    scaled = torch.stack(draws) / (2.0 * 0.7 / 10)
    assert kstest(scaled.flatten().numpy(), "norm").pvalue > 1e-3
    assert float((torch.corrcoef(scaled) - torch.eye(6)).abs().max()) < 0.08


@pytest.mark.parametrize("large", [1, 20, 2**30])
def test_noise_is_the_same_numbers_whenever_it_is_drawn(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a client's one stream each parameter has the numbers at its place in the vector, as a whole vector
    has: also if a part of them is drawn only when a step adds it, or for some parameters never."""
    monkeypatch.setattr(private, "LARGE", large)
    task, _ = task_of("layers")
    keys, share = torch.tensor([3, 8]), torch.tensor([0.1, 0.2], dtype=torch.float64)
    assert task.chunk_gradients is not None
    sizes, own = task.chunk_gradients.chain.sizes, mechanism(0.5, 2.0)
    whole = private.noise_of(own, share, [sum(sizes)], keys)
    apart = private.noise_of(own, share, sizes, keys)
    vectors = torch.ones(2, sum(sizes), dtype=torch.float64), torch.ones(2, sum(sizes), dtype=torch.float64)
    whole.add(vectors[0], 0, -3.0)
    for k in reversed(range(len(sizes))):
        apart.add(vectors[1].split([*sizes], 1)[k], k, -3.0)
    assert torch.allclose(*vectors, rtol=0, atol=1e-14)
    drawn = private.random.coarse_normal(private.random.fold(keys, private.STREAM), sum(sizes), torch.float64)
    assert torch.allclose((vectors[0] - 1) / (-3.0 * 0.5 * 2.0 * share[:, None]), drawn, rtol=0, atol=1e-13)


def test_rows_that_only_fill_up_are_not_looked_at() -> None:
    """Where gradients of rows are formed, each costs as much as another."""
    task, shape = task_of("convolution")
    own, batch = PrivateTask(task, mechanism(), len(shape)), batch_of(shape)
    batch.x[3:] = torch.nan
    with torch.no_grad():
        assert own.grad(task.init(), batch._replace(weight=torch.arange(ROWS) < 3)).theta.isfinite().all()


def test_the_numbers_of_the_operating_system_are_uniform_and_normal_and_never_the_same() -> None:
    torch.manual_seed(0)
    np.random.default_rng(0)
    assert kstest(secret_uniform(20_000), "uniform").pvalue > 1e-4
    first, second = secret_normals(20_001), secret_normals(20_001)
    assert kstest(first, "norm").pvalue > 1e-4
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05
    assert np.isfinite(first).all()
    assert normals((3, 2), torch.float32, None).shape == (3, 2)
    same = [normals((4,), torch.float64, np.random.default_rng(1)) for _ in range(2)]
    assert same[0].equal(same[1])


def test_a_real_federation_does_not_draw_its_noise_from_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    task, shape = task_of("layers")
    for name in ("draw_coarse_normal_", "add_coarse_normal_"):
        monkeypatch.setattr(private.random, name, None)  # would fail
    own = PrivateTask(task, mechanism(noise=1.0, secret=True), len(shape))
    batch, model = batch_of(shape)._replace(key=None), task.init()
    with torch.no_grad():
        assert not own.grad(model, batch).theta.equal(own.grad(model, batch).theta)


def test_a_private_task_tells_nothing_else() -> None:
    task, shape = task_of("layers")
    own, batch, model = PrivateTask(task, mechanism(), 1), batch_of(shape), task.init()
    asked: list[Callable[[], Any]] = [
        lambda: own.losses(model, batch), lambda: own.loss(model, batch), lambda: own.predict(model, batch.x),
        lambda: own.features(model, batch.x), lambda: own.hessian(model, batch, model.theta),
        lambda: own.row_losses(batch.x, batch), lambda: own.tally(batch.x, batch),
        lambda: own.figures(batch.x), lambda: own.grad(model, batch, object())]  # type: ignore[arg-type]
    for ask in asked:
        with pytest.raises(NotPrivate, match="does not protect"):
            ask()


def test_batch_norm_is_refused_and_group_norm_is_named() -> None:
    module = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with pytest.raises(UsageError, match="GroupNorm"):
        PrivateTask(ModuleTask(module, loss="cross_entropy", classes=3), mechanism(), 1)


def test_settings_that_promise_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="needs noise, or epsilon"):
        Privacy()
    for wrong in ({"epsilon": 0.0}, {"epsilon": -1.0}, {"noise": 0.0}, {"noise": 1.0, "delta": 0.0},
                  {"noise": 1.0, "clip": 0.0}, {"noise": 1.0, "unit": "hospital"}):
        with pytest.raises(UsageError, match=r"privacy\."):
            Privacy(**wrong)
    with pytest.raises(UsageError, match="unit = \"client\""):
        Privacy(noise=1.0, clip=Quantile())


def test_a_count_and_a_sum_share_the_noise_of_one() -> None:
    # one Gaussian query whose parts have these sensitivities in units of their noise:
    # (1/z)^2 = (1/z_sum)^2 + (1/(2 b))^2
    both = Mechanism(Privacy(unit="client", noise=1.2, clip=Quantile(count_noise=3.0)), 1.2, 60.0)
    assert 1 / both.sum_noise**2 + 1 / (2 * 3.0) ** 2 == pytest.approx(1 / 1.2**2)
    assert Mechanism(Privacy(unit="client", noise=1.2, clip=Quantile()), 1.2, 60.0).count_noise == 3.0
    with pytest.raises(UsageError, match="too little"):
        split_noise(8.0, 3.0)

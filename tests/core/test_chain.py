"""Gradients written out against autograd: every layer, loss and registered network, short batches too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from descant.core.kernels.network import Network, Shaped
from descant.core.losses import LOSSES, SLOPED
from descant.core.sample import SampleFormat
from descant.core.task import Batch, Task
from descant.core.tree import stack, take
from descant.core.vector import Model
from descant.models import MODELS, NetworkSpec
from descant.models.module import ModuleTask

B = 5
CHAINS = {
    "linear": lambda: nn.Linear(6, 3),
    "without bias": lambda: nn.Sequential(nn.Linear(6, 4, bias=False), nn.Tanh(),
                                          nn.Linear(4, 3, bias=False)),
    "activations": lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 5), nn.LeakyReLU(0.2),
                                         nn.Identity(), nn.Linear(5, 5), nn.Sigmoid(), nn.Linear(5, 3)),
    "convolutions": lambda: nn.Sequential(
        Shaped(2, 9, 9), nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, stride=2, dilation=1, groups=2, bias=False), nn.Tanh(), nn.Flatten(),
        nn.Linear(6, 3)),
    "series": lambda: nn.Sequential(
        Shaped(2, 12), nn.Conv1d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool1d(3, 2, 1),
        nn.Conv1d(4, 3, 2, stride=2), nn.Flatten(), nn.Linear(9, 3)),
    "batchnorm": lambda: nn.Sequential(
        Shaped(2, 4, 4), nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 6),
        nn.BatchNorm1d(6, affine=False), nn.BatchNorm1d(6), nn.Linear(6, 3)),
    "dropout": lambda: nn.Sequential(Shaped(4, 3, 3), nn.Dropout2d(0.4), nn.Flatten(), nn.Dropout(0.3),
                                     nn.Linear(36, 5), nn.Dropout(0.0), nn.ReLU(), nn.Linear(5, 3)),
    "head and body": lambda: Network(nn.Sequential(nn.Linear(6, 4), nn.ReLU()), nn.Linear(4, 3)),
    "rows of rows": lambda: nn.Sequential(Shaped(3, 4), nn.Linear(4, 2), nn.Tanh(), nn.Flatten(),
                                          nn.Linear(6, 3)),
}
SIZES = {"convolutions": 162, "series": 24, "batchnorm": 32, "dropout": 36, "rows of rows": 12}


def task_of(module: nn.Module, loss: str = "cross_entropy") -> ModuleTask:
    return ModuleTask(module, loss, classes=3 if loss == "cross_entropy" else None, dtype=torch.float64)


def perturbed(task: ModuleTask) -> Model:
    model = task.init()
    return Model(model.theta + 0.3 * torch.randn(model.theta.shape, dtype=torch.float64),
                 model.stats + torch.rand(model.stats.shape, dtype=torch.float64))


def agree(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], rtol: float = 1e-10) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-12)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("rows", [None, 3, 1])
@pytest.mark.parametrize("name", CHAINS)
def test_the_gradient_of_a_chain_is_that_of_autograd(name: str, rows: int | None) -> None:
    task = task_of(CHAINS[name]())
    assert task._chain is not None, "known layers only, so the chain must be found"
    x, y = torch.randn(B, SIZES.get(name, 6), dtype=torch.float64), torch.randint(3, (B,))
    weight = None if rows is None else torch.arange(B) < rows
    for counts in (None, torch.rand(B, dtype=torch.float64)):
        model, batch = perturbed(task), Batch(x, y, weight, torch.tensor(12345), counts)
        agree(task._gradient(model, batch), Task._gradient(task, model, batch))


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_over_several_clients_is_the_chain_of_each(name: str) -> None:
    task, clients = task_of(CHAINS[name]()), 3
    models = stack([perturbed(task) for _ in range(clients)])
    x = torch.randn(clients, B, SIZES.get(name, 6), dtype=torch.float64)
    y, weight = torch.randint(3, (clients, B)), torch.arange(B) < torch.tensor([[5], [2], [1]])
    keys = torch.arange(clients)
    batches = Batch(x, y, weight, keys, torch.rand(clients, B, dtype=torch.float64))
    together = vmap(task._gradient)(models, batches)
    for k in range(clients):
        agree(take(together, k), task._gradient(take(models, k), take(batches, k)))


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_predicts_as_its_module(name: str) -> None:
    task = task_of(CHAINS[name]())
    model, x = perturbed(task), torch.randn(B, SIZES.get(name, 6), dtype=torch.float64)
    with torch.no_grad():
        agree((task.predict(model, x),), (task.module(model)(x),))


@pytest.mark.parametrize("shape", [(3,), (3, 4)])
@pytest.mark.parametrize("loss", LOSSES)
def test_slopes_of_losses(loss: str, shape: tuple[int, ...]) -> None:
    outputs = torch.randn(2, B, *shape, dtype=torch.float64, requires_grad=True)
    y = torch.randn(2, B, *shape, dtype=torch.float64)
    if loss == "cross_entropy":
        y = torch.randint(3, (2, B, *shape[1:]))
    elif loss == "binary_cross_entropy":
        outputs = torch.randn(2, B, 1, dtype=torch.float64, requires_grad=True)
        y = torch.randint(2, (2, B))
    losses = torch.stack([LOSSES[loss](outputs[k], y[k]) for k in range(2)])
    assert losses.shape == (2, B)
    (slopes,) = torch.autograd.grad(losses.sum(), outputs)
    agree(SLOPED[loss](outputs.detach(), y), (losses.detach(), slopes))


def test_real_targets_of_one_number() -> None:
    outputs, y = torch.randn(2, B, 1, dtype=torch.float64), torch.randn(2, B, dtype=torch.float64)
    found = SLOPED["mse"](outputs, y)
    agree(found, (torch.stack([LOSSES["mse"](outputs[k], y[k]) for k in range(2)]),
                  2 * (outputs - y[..., None])))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(n for n, spec in MODELS.items() if issubclass(spec, NetworkSpec)))
def test_registered_networks(name: str) -> None:
    """The networks of the papers, small inputs; those that are no chains say so here."""
    shape = {"har_cnn": (9, 128), "resnet18": (3, 32, 32)}.get(name, (1, 28, 28))
    if name == "fedbn_alexnet":
        pytest.skip("57 million parameters; it is no chain (adaptive pooling)")
    is_text = name == "lstm"
    facts = SampleFormat((12,) if is_text else shape, classes=10, tokens=20 if is_text else None)
    task = ModuleTask(MODELS[name]().network(facts), "cross_entropy", classes=10, dtype=torch.float64)
    assert (task._chain is None) == (name in {"resnet18", "lstm"})
    if task._chain is None:  # its gradient is that of autograd
        return
    x = torch.rand(2, *facts.shape, dtype=torch.float64)
    batch = Batch(x, torch.randint(10, (2,)), None, torch.tensor(7))
    agree(task._gradient(task.init(), batch), Task._gradient(task, task.init(), batch), rtol=1e-7)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def _hooked() -> nn.Module:
    layer = nn.Linear(6, 3)
    layer.register_forward_hook(lambda module, inputs, out: 2 * out)
    return layer


def _tied() -> nn.Module:
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    second.weight = first.weight
    return nn.Sequential(first, second, nn.Linear(6, 3))


def _frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    module[0].requires_grad_(False)
    return module


def _twice() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, layer, nn.Linear(6, 3))


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :3] + super().forward(x)


@pytest.mark.parametrize("make", [
    lambda: Doubled(6, 3), _hooked, _tied, _frozen, _twice, lambda: Residual(nn.Linear(6, 3)),
    lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)),
    lambda: nn.Sequential(nn.Linear(6, 3), nn.GELU()),
    lambda: nn.Sequential(Shaped(6, 1, 1), nn.Conv2d(6, 3, 1, padding="same"), nn.Flatten()),
    lambda: nn.Sequential(Shaped(6, 1, 1), nn.Conv2d(6, 3, 1, padding_mode="circular"), nn.Flatten())])
def test_what_is_not_a_chain_of_known_layers_goes_through_autograd(make: object) -> None:
    task = task_of(make())  # type: ignore[operator]
    assert task._chain is None
    x = torch.randn(B, 6, dtype=torch.float64)
    gradient = task._gradient(task.init(), Batch(x, torch.randint(3, (B,))))
    assert gradient.theta.shape == (task.dim,)

"""The networks: their sizes, counted by hand, their gradients on every backend, and what they refuse."""

from __future__ import annotations

import dataclasses
import pickle
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from torch import Tensor, nn

from descant.algorithms import FedAvg
from descant.core.federation import Federation
from descant.core.permit import ran
from descant.core.sample import SampleFormat
from descant.core.task import Batch, FunctionTask
from descant.core.vector import Layout
from descant.engine.work import Work
from descant.errors import UsageError
from descant.models import (
    CNN2,
    DNN,
    LSTM,
    MCLR,
    MODELS,
    ModelSpec,
    NetworkSpec,
    OwnModel,
    ResNet18,
    make_task,
    named,
)
from descant.models.alexnet import alexnet
from descant.models.lstm import Recurrence
from descant.models.module import ModuleTask
from descant.models.quadratic import QuadraticTask, quadratic_losses
from descant.models.resnet import resnet
from descant.priors.solve import SGD
from helpers import CLASSES, assert_same, engine, make_work, ragged

NETWORKS = {name: spec for name, spec in MODELS.items() if issubclass(spec, NetworkSpec)}
LARGE = ("resnet18", "fedbn_alexnet")  # networks whose layers others have as well
every_network = pytest.mark.parametrize("name", NETWORKS)


def sample(shape: tuple[int, ...], classes: int, tokens: int | None = None) -> SampleFormat:
    return SampleFormat(shape, classes=classes, tokens=tokens)


def layout(spec: NetworkSpec, facts: SampleFormat) -> Layout:
    """The slices of a network, which is made without memory for its parameters."""
    with torch.device("meta"):
        return Layout.of(spec.network(facts))


# -- sizes -------------------------------------------------------------------------------------------------

MNIST, CIFAR = (1, 28, 28), (3, 32, 32)


def bn(*channels: int) -> int:
    return 2 * sum(channels)


# what the papers train it on; parameters of the body, layer by layer; parameters of the head; statistics
SIZES: dict[str, tuple[SampleFormat, int, int, int]] = {
    "mclr": (sample((784,), 10), 0, 7850, 0),
    "dnn": (sample((784,), 10), 784 * 100 + 100, 1010, 0),
    "mlp128": (sample(MNIST, 10), 784 * 128 + 128, 1290, 0),
    "fedmap_mlp": (sample((30,), 1), (30 * 32 + 32) + (32 * 16 + 16), 17, 0),
    "cnn2": (sample(MNIST, 10), 832 + 51264 + (64 * 4 * 4 * 512 + 512), 5130, 0),
    "cnn3": (sample(CIFAR, 10), 896 + 18496 + 73856 + (128 * 4 * 4 * 128 + 128), 1290, 0),
    "cnn5": (sample(MNIST, 47), 320 + 9248 + 18496 + 36928 + 73856 + (128 * 3 * 3 * 128 + 128), 6063, 0),
    "cifarnet": (sample(CIFAR, 10), 456 + 2416 + (400 * 120 + 120) + (120 * 84 + 84), 850, 0),
    "cgpfl_cnn": (sample(CIFAR, 10), 2432 + 51264 + (64 * 5 * 5 * 128 + 128), 1290, 0),
    # 128 steps become 120, 60, 52, 26
    "har_cnn": (sample((9, 128), 6), 2624 + 18496 + (64 * 26 * 1024 + 1024) + (1024 * 512 + 512), 3078, 0),
    "femnist_cnn": (sample(MNIST, 62), 832 + 51264 + (64 * 7 * 7 * 2048 + 2048), 2048 * 62 + 62, 0),
    "fedmap_cnn": (sample(MNIST, 62), 320 + 18496 + 36928 + 73856 + bn(32, 64, 64, 128)
                   + (128 * 7 * 7 * 512 + 512) + bn(512), 512 * 62 + 62, bn(32, 64, 64, 128, 512)),
    "fedbn_alexnet": (sample((3, 256, 256), 31), 23296 + 307392 + 663936 + 884992 + 590080
                      + bn(64, 192, 384, 256, 256) + (256 * 6 * 6 * 4096 + 4096) + (4096 * 4096 + 4096)
                      + bn(4096, 4096), 4096 * 31 + 31, bn(64, 192, 384, 256, 256, 4096, 4096)),
    # two blocks of two convolutions a stage; shortcuts of 1x1 where the width changes
    "resnet18": (sample(CIFAR, 10), 3 * 64 * 9 + 4 * 64 * 64 * 9
                 + (64 + 3 * 128) * 128 * 9 + 64 * 128 + (128 + 3 * 256) * 256 * 9 + 128 * 256
                 + (256 + 3 * 512) * 512 * 9 + 256 * 512 + bn(*5 * [64], *5 * [128], *5 * [256], *5 * [512]),
                 5130, bn(*5 * [64], *5 * [128], *5 * [256], *5 * [512])),
    "lstm": (sample((25,), 2, tokens=1000), 1000 * 50 + 2 * (2 * 200 * 50 + 2 * 200) + (50 * 100 + 100),
             202, 0),
}


@every_network
def test_parameters_are_those_counted_by_hand(name: str) -> None:
    facts, body, head, statistics = SIZES[name]
    found = layout(NETWORKS[name](), facts)
    parts = {part: sum(s.stop - s.start for s in found.parameters if s.name.startswith(f"{part}."))
             for part in ("body", "head")}
    assert (found.dim, parts, found.stats_dim) == (body + head, {"body": body, "head": head}, statistics)
    assert [s.shape for s in found.parameters[-2:]] == [(facts.outputs, head // facts.outputs - 1),
                                                        (facts.outputs,)]


def test_parameters_that_are_known_from_elsewhere() -> None:
    assert layout(CNN2(), sample(MNIST, 10)).dim == 582_026
    assert layout(CNN2(kernel=3, padding=1, hidden=128), sample((28, 28), 10)).dim == 421_642
    assert layout(NETWORKS["femnist_cnn"](), sample(MNIST, 62)).dim == 6_603_710
    assert layout(ResNet18(), sample(CIFAR, 10)).dim == 11_173_962
    assert layout(ResNet18(), sample((3, 224, 224), 1000)).dim == 11_689_512
    groups = layout(ResNet18(norm="group"), sample(CIFAR, 10))
    assert (groups.dim, groups.stats_dim) == (11_173_962, 0)


@every_network
def test_the_fields_survive_their_table(name: str) -> None:
    spec = ModelSpec(NETWORKS[name]())
    assert ModelSpec.parse(tomllib.loads(tomli_w.dumps(spec.dump()))) == spec
    assert NETWORKS[name].__doc__
    assert all(f.metadata["doc"] for f in dataclasses.fields(NETWORKS[name]))


# -- gradients ---------------------------------------------------------------------------------------------

# The smallest samples that each network takes; the two giants are narrow here.
SMALL = {
    "mclr": (5,), "dnn": (5,), "mlp128": (5,), "fedmap_mlp": (5,), "cnn2": (16, 16), "cnn3": (2, 8, 8),
    "cnn5": (1, 8, 8), "cifarnet": (3, 16, 16), "cgpfl_cnn": (3, 16, 16), "har_cnn": (2, 28),
    "femnist_cnn": (1, 4, 4), "fedmap_cnn": (1, 4, 4), "fedbn_alexnet": (1, 63, 63), "resnet18": (2, 8, 8),
    "lstm": (6,),
}
VOCABULARY = 7


def federation(name: str) -> Federation:
    found = ragged(shape=SMALL[name])
    if name != "lstm":
        return found
    tokens = np.random.default_rng(1).integers(VOCABULARY, size=found.x.shape)
    tokens[0, 0] = VOCABULARY - 1
    return dataclasses.replace(found, x=torch.from_numpy(tokens))


def seeded(make: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module: nn.Module = make()
    return module


def model(name: str) -> Any:
    facts = sample(SMALL[name], CLASSES)
    if name == "fedbn_alexnet":
        return seeded(lambda: alexnet(facts, name, (2, 3, 4, 3, 2), 5))
    if name.startswith("resnet18"):
        return seeded(lambda: resnet(facts, name, "batch", (4, 6)))
    return name


def both_ways(work: Work, clients: Any = (0, 1, 2, 3, 4)) -> tuple[Any, Any]:
    """The clients' uploads, states and losses, run together and one by one."""
    everyone = np.array(clients)
    with engine(work.algorithm, work.federation, work.task, batch=work.batch, local=work.local) as e:
        message = work.algorithm.broadcast(e.server, e.training.round_of(everyone))
        states = e.training.store.read(everyone)
    together, meter = work._together("local", everyone, 1, message, states)
    alone = work._one_by_one("local", everyone, 1, message, states)
    assert not alone.failed
    assert meter.grad_steps == alone.grad_steps > 0
    return together, alone.values


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in LARGE else ())
                                  for name in NETWORKS])
def test_gradients_are_the_same_together_and_one_by_one(name: str) -> None:
    """Batches of 4 from clients with 9, 5, 1, 7 and 3 rows: short ones are filled up, and there are single
    rows. Warnings are errors, also that torch has no rule to vectorise an operation."""
    work = make_work(FedAvg(SGD(lr=0.05)), federation(name), model(name), local={"epochs": 1})
    together, alone = both_ways(work)
    assert_same(together, alone, 1e-10, name)
    assert not torch.equal(alone.upload.theta[0], alone.upload.theta[1])


def test_the_slope_of_a_dnn_is_that_below_zero() -> None:
    x = torch.randn(7, 5, dtype=torch.float64)
    network = seeded(lambda: DNN(hidden=4, slope=0.1).network(sample((5,), CLASSES))).double()
    first, head = network.body[1], network.head
    hidden = first(x)
    assert torch.allclose(network(x), head(torch.where(hidden > 0, hidden, 0.1 * hidden)))
    assert_same(*both_ways(make_work(FedAvg(SGD(lr=0.1)), federation("dnn"), DNN(slope=0.1))), 1e-10)
    assert DNN().slope == 0.01


@pytest.mark.thorough
def test_group_norm_is_the_same_together_and_one_by_one() -> None:
    facts = sample((1, 6, 6), CLASSES)
    net = seeded(lambda: resnet(facts, "resnet18", "group", (4, 6)))
    work = make_work(FedAvg(SGD(lr=0.05)), ragged(shape=facts.shape), net)
    assert_same(*both_ways(work), 1e-10)


@pytest.mark.parametrize("name", [
    "cnn2", "fedmap_cnn", "lstm", pytest.param("resnet18", marks=pytest.mark.slow)])
def test_gradients_are_those_of_the_module_itself(name: str) -> None:
    """At real width, on a whole batch: torch trains the module, in the ordinary way, to the same gradient."""
    fed = federation(name)
    task = make_task(name, fed, dtype=torch.float64)
    assert isinstance(task, ModuleTask)
    start, batch = task.init(), Batch(fed.x[:6], fed.y[:6])
    with torch.no_grad():
        found = task.grad(start, batch)
    module = task.module(start).double().train()
    for layer in module.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0  # nothing is dropped from a batch without a key
    loss = nn.functional.cross_entropy(module(batch.x), batch.y)
    loss.backward()  # type: ignore[no-untyped-call]
    expected = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    torch.testing.assert_close(found.loss, loss.detach(), rtol=1e-10, atol=1e-10)
    assert (found.theta - expected).norm() <= 1e-9 * expected.norm()
    assert_same(task.layout.flatten(module, torch.float64).stats, found.stats, 1e-10)


@pytest.mark.thorough
def test_lstm_in_processes_is_the_loop() -> None:
    found = []
    for settings in ({"backend": "loop"}, {"backend": "processes", "workers": 2, "chunk": 2}):
        with engine(FedAvg(SGD(lr=0.1)), federation("lstm"), "lstm", **settings) as e:
            e.play(2)
            found.append(e.server)
    assert_same(found[1], found[0], 1e-10)


# -- lstm --------------------------------------------------------------------------------------------------


def test_the_recurrence_is_that_of_torch() -> None:
    """Same parameters under the same names, same states, same gradients."""
    torch.manual_seed(0)
    reference = nn.LSTM(3, 4, 2, batch_first=True, dtype=torch.float64)
    own = Recurrence(3, 4, 2, batch_first=True, dtype=torch.float64)
    own.load_state_dict(reference.state_dict())
    x = torch.randn(5, 7, 3, dtype=torch.float64)
    expected, found = reference(x)[0], own(x)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(expected)
    gradients = [torch.autograd.grad((out * weights).sum(), list(net.parameters()))
                 for out, net in ((expected, reference), (found, own))]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_padding_does_not_count_after_the_last_token() -> None:
    net = seeded(lambda: LSTM().network(sample((6,), 2, tokens=7)))
    whole = seeded(lambda: LSTM(pad="none").network(sample((6,), 2, tokens=7)))
    rows = torch.tensor([[3, 5, 0, 2, 0, 0], [3, 5, 0, 2, 1, 6], [0, 0, 0, 0, 0, 0]])
    short = whole(rows[:1, :4])
    torch.testing.assert_close(net(rows)[:1], short)
    torch.testing.assert_close(net(rows)[1:2], whole(rows)[1:2])
    assert not torch.allclose(whole(rows)[:1], short)
    assert net(rows).isfinite().all()
    left = torch.tensor([[0, 0, 3, 5, 0, 2]])  # padding before the first token is read
    torch.testing.assert_close(net(left), whole(left))
    for spec in (LSTM(), LSTM(pad=3), LSTM(pad="none")):
        assert ModelSpec.parse(ModelSpec(spec).dump()).model == spec


def test_the_vocabulary_is_that_of_the_data_or_larger() -> None:
    fed = federation("lstm")
    assert SampleFormat.of_federation(fed) == SampleFormat((6,), "int64", (), "int64", CLASSES, VOCABULARY)
    for vocab, rows in ((None, VOCABULARY), (100, 100)):
        task = make_task(LSTM(vocab=vocab), fed)
        assert task.layout is not None
        assert task.layout.parameters[0].shape == (rows, 50)
    with pytest.raises(UsageError, match=r"model.vocab is 6, but the data have tokens up to 6.*at least 7"):
        make_task(LSTM(vocab=6), fed)


# -- what does not fit -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "facts", "message"), [
    ("cnn2", sample((784,), 10),
     r"\(channels, height, width\).*784 flat numbers are not an image.*1, 28, 28"),
    ("cnn3", sample((3072,), 10), r"reshape x to \(n, 3, 32, 32\)"),
    ("cnn5", sample((13,), 2), r"flat numbers are not an image; use a model such as \"dnn\""),
    ("resnet18", sample((32, 32, 3), 10), r"channels come first, so permute x to \(n, 3, 32, 32\)"),
    ("cifarnet", sample((1, 2, 3, 4), 10), r"needs images of shape .*, not samples of shape \(1, 2, 3, 4\)$"),
    ("cnn2", sample((8, 8), 10), r"'cnn2' needs images of at least 16x16, not 8x8"),
    ("fedbn_alexnet", sample(CIFAR, 10), r"at least 63x63, not 32x32"),
    ("har_cnn", sample((9, 20), 6), r"needs series of at least 28 steps, not 20 steps"),
    ("har_cnn", sample((561,), 6), r"needs series of shape \(channels, time\)"),
    ("lstm", sample((25,), 2), r"rows of tokens .* these are other numbers of shape \(25,\)"),
    ("lstm", sample((5, 25), 2, 9), r"these are tokens of shape \(5, 25\)"),
    ("mclr", sample((25,), 2, 9), r"'mclr' needs real numbers.*use model \"lstm\", or make x a float array"),
    ("har_cnn", sample((9, 128), 2, 9), r"'har_cnn' needs real numbers"),
    ("cnn2", sample(MNIST, 2, 9), r"'cnn2' needs real numbers"),
])
def test_a_network_says_what_samples_it_needs(name: str, facts: SampleFormat, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        NETWORKS[name]().network(facts)


@pytest.mark.parametrize("name", [n for n, shape in SMALL.items() if len(shape) == 3 or n == "cnn2"])
def test_images_that_just_fit(name: str) -> None:
    """SMALL has the smallest images: one pixel less is refused (but for the networks that take any)."""
    smaller = tuple(side - 1 if k >= len(SMALL[name]) - 2 else side for k, side in enumerate(SMALL[name]))
    if name == "resnet18":
        layout(NETWORKS[name](), sample((1, 1, 1), 3))
        return
    layout(NETWORKS[name](), sample(SMALL[name], 3))
    with pytest.raises(UsageError, match="at least"):
        layout(NETWORKS[name](), sample(smaller, 3))


def test_bytes_are_no_tokens() -> None:
    fed = ragged()
    for x, tokens in ((torch.ones(fed.x.shape, dtype=torch.uint8), None), (fed.x, None),
                      (torch.full(fed.x.shape, 4), 5), (torch.full(fed.x.shape, -1), None)):
        assert SampleFormat.of_federation(dataclasses.replace(fed, x=x)).tokens == tokens


def test_one_output_for_the_binary_loss() -> None:
    fed = ragged(shape=(30,), classes=2)
    for loss, outputs in ((None, 2), ("binary_cross_entropy", 1)):
        task = make_task("fedmap_mlp", fed, loss=loss, dtype=torch.float64)
        assert task.predict(task.init(), fed.x[:3]).shape == (3, outputs)
    assert SampleFormat.of_federation(ragged(classes=None)).outputs == 1


# -- your own ----------------------------------------------------------------------------------------------

OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, shape, outputs, width=3):
        super().__init__()
        self.body, self.head = nn.Linear(shape[0], width), nn.Linear(width, outputs)
    def forward(self, x):
        return self.head(torch.relu(self.body(x)))

def fixed():
    return nn.Linear(5, 3)

def anything(**options):
    assert options == {"shape": (5,), "outputs": 3, "sizes": [4, 4]}, options
    return nn.Linear(5, 3)

def text(tokens, outputs):
    return nn.Sequential(nn.Embedding(tokens, 2), nn.Flatten(), nn.Linear(12, outputs))

def breaks(shape):
    raise RuntimeError("no such thing")

def nothing(shape):
    return None

module = nn.Linear(5, 3)
number = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of the user's in the current directory, which is not where Python looks."""
    package = tmp_path / "own_package_of_a_test"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "nets.py").write_text(OWN)
    (package / "faulty.py").write_text("import no_such_module_anywhere")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [p for p in sys.path if p])
    for name in ("", ".nets", ".faulty"):
        monkeypatch.delitem(sys.modules, f"own_package_of_a_test{name}", raising=False)
    return package


NETS = "own_package_of_a_test.nets"


@pytest.mark.usefixtures("own")
def test_a_model_of_the_users() -> None:
    fed = ragged(shape=(5,))
    spec = ModelSpec.parse({"name": f"{NETS}:Net", "width": 4, "loss": "cross_entropy"}, allow=ran())
    assert spec.dump() == {"name": f"{NETS}:Net", "width": 4, "loss": "cross_entropy"}
    assert ModelSpec.parse(tomllib.loads(tomli_w.dumps(spec.dump()))) == spec
    task = spec.task(fed, torch.float64, seed=1)
    assert task.dim == 5 * 4 + 4 + 4 * 3 + 3
    assert task.layout is not None
    assert sum(s.stop - s.start for s in task.layout.parameters if s.name.startswith("head.")) == 15
    again = pickle.loads(pickle.dumps(spec)).task(fed, torch.float64, seed=1)
    assert torch.equal(task.init().theta, again.init().theta)  # drawn from the seed
    assert not torch.equal(task.init().theta, spec.task(fed, torch.float64, seed=2).init().theta)
    assert make_task(f"{NETS}:Net", fed, dtype=torch.float64).dim == 5 * 3 + 3 + 3 * 3 + 3
    assert_same(*both_ways(make_work(FedAvg(), fed, spec.model)), 1e-10)


@pytest.mark.usefixtures("own")
def test_a_users_function_gets_what_it_takes() -> None:
    fed = ragged(shape=(5,))
    assert named(f"{NETS}:fixed").network(SampleFormat.of_federation(fed)).weight.shape == (3, 5)  # type: ignore[union-attr]
    named(f"{NETS}:anything", {"sizes": (4, 4)}).network(SampleFormat.of_federation(fed))  # type: ignore[union-attr]
    assert make_task(f"{NETS}:text", federation("lstm")).dim == VOCABULARY * 2 + 12 * 3 + 3


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(("table", "message"), [
    ({"name": "no_such_package:make"}, "no module 'no_such_package' in this Python or in the current dir"),
    ({"name": "own_package_of_a_test.mets:Net"}, "no module 'own_package_of_a_test.mets'"),
    ({"name": "own_package_of_a_test.faulty:Net"}, "import fails with ModuleNotFoundError.*no_such_module"),
    ({"name": f"{NETS}:Nets"}, "'Nets': did you mean 'Net'"),
    ({"name": f"{NETS}:number"}, "must be a function or class .* type int"),
    ({"name": f"{NETS}:module"}, "must be a function or class .* type Linear"),
    ({"name": f"{NETS}:breaks"}, "the call fails with RuntimeError: no such thing"),
    ({"name": f"{NETS}:text"}, "the call fails with TypeError: .*tokens"),
    ({"name": f"{NETS}:nothing"}, "must return an nn.Module, not NoneType"),
    ({"name": f"{NETS}:Net", "widht": 4}, "parameter 'widht': did you mean 'width'"),
    ({"name": f"{NETS}:"}, "must read \"package.module:function\""),
    ({"name": f"{NETS}.Net"}, "must read \"package.module:function\""),
    ({"name": f"{NETS}:Net", "width": None}, "model.width must be text, a number"),
    ({"name": "mcrl"}, "unknown model.name 'mcrl': did you mean 'mclr'"),
    ({"name": 3}, "unknown model.name 3"),
    ({"name": "mclr", "width": 3}, "unknown model field 'width'"),
])
def test_faults_of_a_users_model_are_told(table: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ModelSpec.parse(table, allow=ran()).task(ragged(shape=(5,)), torch.float32, 0)


def test_an_own_model_is_compared_by_its_table() -> None:
    assert OwnModel("a.b:c", {"d": (1, 2)}) == OwnModel("a.b:c", {"d": [1, 2]}) != OwnModel("a.b:c")
    assert ModelSpec.parse({}) == ModelSpec(MCLR())


def test_a_module_in_python_needs_no_name() -> None:
    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(x)
            return out

    assert make_task(Mine(), ragged(shape=(5,)), dtype=torch.float64).dim == 18


# -- what is no network ------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [None, torch.tensor([True, False, True, True])])
def test_the_gradient_of_quadratics_is_that_of_autograd(weight: Tensor | None) -> None:
    """Also of matrices that are not symmetric, and of rows that do not count."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, 3, dtype=torch.float64, generator=generator)
    y, theta = torch.randn(5, 3, dtype=torch.float64, generator=generator).split([4, 1])
    by_hand = QuadraticTask(theta[0])
    by_autograd = FunctionTask(quadratic_losses, theta[0])
    batch = Batch(x, y, weight, None)
    assert_same(by_hand.grad(by_hand.init(), batch), by_autograd.grad(by_autograd.init(), batch), 1e-14)

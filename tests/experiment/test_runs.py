"""Runs from Python: what they refuse, and what they share when they are continued."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import descant
from descant import DescantError, UsageError
from descant.algorithms import Ditto, FedAvg, LocalTrain, pFedMe
from descant.core.splits import SPLITS
from descant.engine.backends.choose import make_backend
from descant.engine.rounds import Training
from descant.engine.settings import Train
from descant.experiment.config import parse_algorithm
from descant.experiment.run import Interrupted
from descant.priors.solve import SGD, Adam
from helpers import make_work

FEDERATION = descant.federation("digits", partition="dirichlet", clients=6, alpha=0.3)
SMALL = {"rounds": 2, "cohort": 3, "local": {"steps": 2}, "eval": {"every": 1}, "backend": "vectorised"}


def run(method=None, **settings):
    return descant.run(method or Ditto(), **({"federation": FEDERATION} | SMALL | settings))


def files(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    run(out=out)
    return out


@pytest.mark.parametrize(("settings", "hint"), [
    ({"method": FedAvg}, "with brackets"),
    ({"method": "fedavgg"}, "did you mean 'fedavg'"),
    ({"federation": "digits"}, "federation must be a Federation"),
    ({"eval": 5}, "eval must hold the fields"),
    ({"cohort": 7}, "train.cohort is 7, but the federation has only 6 clients"),
    ({"local": {"steps": 0}}, "at least one step"),
    ({"local": {}}, "either"),
    ({"model": "mcl"}, "did you mean 'mclr'"),
    ({"model": 3}, "must be a name, an nn.Module or a Task"),
    ({"loss": "mes"}, "did you mean 'mse'"),
    ({"loss": "binary_cross_entropy"}, "is for two classes, and the data has 10"),
    ({"model": nn.Linear(64, 9)}, "must give 10 outputs"),
    ({"model": nn.Linear(63, 10)}, "does not accept the data's samples"),
    ({"model": nn.LSTM(64, 10)}, "returns a tuple"),
    ({"model": nn.Flatten()}, "no trainable parameters"),
    ({"resume": True}, "needs the directory"),
    ({"method": "scaffold", "participation": "all"}, "does not fit scaffold"),
])
def test_mistakes_are_told_before_anything_is_written(settings, hint, tmp_path):
    settings = {"out": tmp_path / "run"} | settings
    if "resume" in settings:
        del settings["out"]
    with pytest.raises(UsageError, match=hint):
        run(**settings)
    assert not list(tmp_path.iterdir())


def test_a_table_without_a_name_changes_the_default_and_nothing_else():
    """FedMAP's optimizer is Adam with lr 0.003: a setting of one field must not make it another optimizer."""
    changed = parse_algorithm({"name": "fedmap", "solver": {"weight_decay": 0.1}})
    assert changed.solver == Adam(0.003, weight_decay=0.1)
    assert parse_algorithm({"name": "fedmap", "solver": {"name": "adam"}}).solver == Adam()
    assert parse_algorithm({"name": "fedmap", "solver": {"name": "sgd"}}).solver == SGD()
    with pytest.raises(UsageError, match=r"algorithm\.solver field 'momentum'"):
        parse_algorithm({"name": "fedmap", "solver": {"momentum": 0.9}})


def test_cautions_are_python_warnings():
    with pytest.warns(UserWarning, match=r"alpha = 0.2 with lam = 15: the steps diverge.*at most 0.133333"):
        run(pFedMe(alpha=0.2, lam=15.0, K=1), rounds=1)


def test_numbers_of_numpy_are_numbers():
    assert Train(rounds=np.int64(3)).rounds == 3
    assert type(pFedMe(lam=np.float32(2)).lam) is float
    with pytest.raises(UsageError, match="rounds must be an integer"):
        Train(rounds=np.float64(3))
    with pytest.raises(UsageError, match="lam must be a number"):
        pFedMe(lam=True)


@pytest.mark.parametrize("name", ["state.safetensors", "best/state.safetensors"])
def test_a_missing_state_is_damage_not_a_new_start(finished, tmp_path, name):
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    (out / "checkpoint" / name).unlink()
    before = files(out)
    for call in (descant.resume, descant.load):
        with pytest.raises(DescantError, match="missing"):
            call(out)
    assert files(out) == before


def test_a_changed_row_of_a_client_is_noticed(finished, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(finished, out)
    path = out / "checkpoint" / "clients" / "theta.bin"
    rows = np.fromfile(path, np.float32).reshape(6, -1)
    client = int(np.flatnonzero(np.abs(rows).sum(1))[0])
    rows[client, 5] *= 1.0001
    rows.tofile(path)
    loaded = descant.load(out)
    with pytest.raises(DescantError, match=f"the state of client {client} .* is not as it was written"):
        loaded.personal(client, "last")


def test_loading_writes_nothing(finished):
    before = {p: p.stat().st_mtime_ns for p in finished.rglob("*")}
    loaded = descant.load(finished)
    assert loaded.rounds == 2
    assert isinstance(loaded.personal_model(0), nn.Module)
    assert {p: p.stat().st_mtime_ns for p in finished.rglob("*")} == before


@pytest.mark.parametrize("change", [
    {"model": nn.Linear(64, 10)}, {"method": Ditto(lam=2.0)}, {"batch": 5}, {"seed": 1},
    {"federation": descant.federation("digits", partition="dirichlet", clients=6, alpha=0.3, seed=1)},
    {"loss": lambda outputs, y: 5 * nn.functional.cross_entropy(outputs, y, reduction="none")},
])
def test_resuming_with_something_else_is_refused(tmp_path, change):
    torch.manual_seed(0)
    settings = {"model": nn.Linear(64, 10), "out": tmp_path / "run"}
    run(LocalTrain(), **settings)
    before = files(tmp_path)
    with pytest.raises(UsageError, match="changed setup"):
        run(**({"method": LocalTrain()} | settings | change), resume=True)
    assert files(tmp_path) == before
    assert run(LocalTrain(), **settings, resume=True).rounds == 2


def test_the_number_of_threads_does_not_matter_and_comes_back():
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(run(backend="loop", batch="full").personal(0).theta)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert found[0].equal(found[1])


class MixesSamples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(x - x.mean(0) if self.training else x)


@pytest.mark.thorough
def test_auto_does_not_vectorise_a_module_that_mixes_samples():
    owner = np.repeat(np.arange(6), [300, 300, 14, 300, 14, 30])  # somebody's batch is padded
    rows = np.arange(len(owner))
    federation = descant.Federation.from_arrays(FEDERATION.x[rows], FEDERATION.y[rows], owner, classes=10)
    mixed = run(model=MixesSamples(), federation=federation, backend="auto", chunk=3, workers=1)
    assert (mixed.setup.train.backend, mixed.setup.train.chunk) == ("loop", None)
    train = Train(backend="auto", chunk=3, workers=1, batch=20)
    _, _, measured = make_backend(Training(make_work(Ditto(), federation, dtype="float32"), train))
    assert [each.backend for each in measured] == ["loop", "vectorised"]  # of an ordinary module


def test_a_client_whose_loss_is_not_finite_is_counted():
    class Overflows(descant.FunctionTask):
        """The loss of rows with a large target overflows, its gradient does not."""

        def __init__(self) -> None:
            super().__init__(lambda theta, x, y: (theta[0] - y).abs() * 1.0, torch.zeros(1))

        def tally(self, outputs, batch):
            return super().tally(outputs, batch) / (batch.y.max() < 50)

    y = np.r_[np.zeros(40), np.full(10, 100.0)].astype("float32")
    federation = descant.Federation.from_arrays(np.zeros((50, 1), "float32"), y, np.repeat(np.arange(5), 10))
    with pytest.warns(UserWarning, match="the models of 1 of 5 clients have diverged"):
        result = run(model=Overflows(), federation=federation)
    last = result.history[-1]["personal"]
    assert (last["clients"], last["failed"], last["diverged"]) == (5, 0, 1)
    assert last["test"]["loss"]["mean"] < 1


def test_ctrl_c_is_no_ordinary_exception():
    class Stop:
        def started(self, run, measured):
            pass

        def played(self, row):
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="stopped after round 1 of 2") as stopped:
        run(observer=Stop())
    assert not isinstance(stopped.value, Exception)  # `except Exception` in a sweep does not swallow it
    assert stopped.value.run.rounds == 1
    assert isinstance(stopped.value.run.personal_model(0), nn.Module)


def test_a_model_of_a_float64_run_is_in_float64():
    result = run(dtype="float64")
    model = result.personal_model(2)
    weight = next(model.parameters()).detach()
    assert weight.dtype == torch.float64
    x = FEDERATION.x[:5].double()
    expected = result.setup.task.predict(result.personal(2), x)  # W x', where the module has x W'
    # two orders of one sum: each is off by half a last digit of every partial sum at most
    most = x[0].numel() * torch.finfo(torch.float64).eps * float((x.flatten(1).abs() @ weight.abs().T).max())
    torch.testing.assert_close(model(x), expected, rtol=0, atol=most)


def test_dropout_differs_between_the_steps_on_one_batch():
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 10))
    task = descant.ModuleTask(net, "cross_entropy", classes=10)
    batch = descant.Batch(FEDERATION.x[:20], FEDERATION.y[:20], key=torch.tensor(5))
    first, again, other = (task.grad(task.init(), b).theta for b in (batch, batch, batch.redrawn(1)))
    assert first.equal(again)
    assert not first.equal(other)


def test_unseen_clients_never_train_and_are_scored_apart(tmp_path):
    federation = descant.federation("digits", partition="dirichlet", clients=8, alpha=1.0, unseen=3)
    assert (federation.population, federation.everyone) == (5, 8)
    result = run(pFedMe(K=1), federation=federation, cohort="all", rounds=3, out=tmp_path / "run")
    last = result.history[-1]
    assert (last["personal"]["clients"], last["personal"]["newcomers"]) == (5, 0)
    assert (last["unseen"]["personal"]["clients"], last["unseen"]["personal"]["newcomers"]) == (3, 3)
    rows = (tmp_path / "run" / "clients.csv").read_text().splitlines()
    assert len(rows) == 1 + 3 * 8
    assert isinstance(result.personal_model(7), nn.Module)
    # whoever is held out changes nothing for the others
    seen = np.arange(5)
    others = descant.Federation(
        federation.x, federation.y, *(federation.split(split).pick(seen) for split in SPLITS),
        federation.classes, federation.names[:5])
    alone = run(pFedMe(K=1), federation=others, cohort="all", rounds=3)
    assert alone.personal(2).theta.equal(result.personal(2).theta)

"""What is called diverged: losses far above those of a constant prediction, and nothing else."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import descant
from cli_helpers import call
from descant import Federation, algorithms
from descant.cli.run import require_result
from descant.core.task import FunctionTask, Task
from descant.engine.batches import LocalWork
from descant.engine.divergence import FAR, LOST, SOARING, Levels, has_diverged
from descant.engine.remedy import curvature, remedy
from descant.engine.work import Work
from descant.models import make_task


def classes(rows: int = 40, shares: tuple[float, ...] = (0.5, 0.5)) -> Federation:
    """Two clients of so many rows each, with these shares of the classes in every split."""
    y = np.repeat(np.arange(len(shares)), [round(share * rows) for share in shares])
    x = np.eye(len(shares), dtype="float32")[y] + 0.01 * np.arange(rows)[:, None].astype("float32") / rows
    return Federation.from_arrays(np.r_[x, x], np.r_[y, y], np.repeat([0, 1], rows))


def targets(mean: float, spread: float = 1.0) -> Federation:
    """Two clients whose real targets lie around `mean`."""
    rng = np.random.default_rng(0)
    y = (mean + spread * rng.standard_normal(80)).astype("float32")
    return Federation.from_arrays(rng.standard_normal((80, 3)).astype("float32"), y, np.arange(80) % 2)


def levels(federation: Federation, task: Task | None = None, **settings: Any) -> Levels:
    task = task or make_task("mclr", federation, loss=None, dtype=torch.float32, seed=0, **settings)
    return Levels(Work(algorithms.FedAvg(), task, federation, 0, 20, LocalWork(steps=1)))


def told(found: Levels, *figures: float) -> bool:
    """Whether both clients' models are called diverged by these figures of the test rows."""
    table = torch.tensor([figures, figures], dtype=torch.float64)
    one, other = found.diverged(table, "test", np.arange(2)).tolist()
    assert one == other
    return bool(one)


LOG2 = math.log(2)


@pytest.mark.parametrize(("loss", "accuracy", "diverged"), [
    (0.0, 1.0, False),
    (LOG2, 0.5, False),  # knows nothing
    (0.99 * FAR * LOG2, 0.0, False),  # much worse than that, but not far
    (1.01 * FAR * LOG2, 0.5, True),
    (1.01 * FAR * LOG2, 0.62, True),  # a quarter of the constant's errors avoided is 0.625
    (1.01 * FAR * LOG2, 0.63, False),  # overconfident, and right where a constant is not
    (5e4, 0.95, False),
    (0.99 * LOST * LOG2, 0.95, False),
    (1.01 * LOST * LOG2, 0.95, True),  # whatever its accuracy
    (math.nan, 0.5, True),
    (math.inf, 0.95, True),
    (5e19, 0.5, True),
])
def test_a_classifier(loss: float, accuracy: float, diverged: bool) -> None:
    assert told(levels(classes()), loss, accuracy, accuracy) is diverged


def test_unbalanced_classes_do_not_lower_the_level() -> None:
    """Entropy 0.117 of 39 rows to 1: ten times that is 1.2, where a model that has not begun can be. But what
    is clearly better than a constant is more where the constant is right in 39 of 40 rows."""
    found = levels(classes(40, (39 / 40, 1 / 40)))
    assert not told(found, 1.5, 0.5, 0.5)
    assert told(found, 1.01 * FAR * LOG2, 0.95, 0.5)


def test_a_client_of_one_class_can_be_sound() -> None:
    found = levels(classes(40, (1.0, 0.0)), descant.ModuleTask(nn.Linear(2, 2), "cross_entropy", classes=2))
    assert not told(found, 0.3, 1.0, 1.0)
    assert told(found, 30.0, 0.0, 0.0)


def test_a_regression() -> None:
    """Variance 1 around 0: up to ten times as much is bad, more is divergence."""
    found = levels(targets(0.0, 1.0))
    assert not told(found, 5.0, 5.0, -4.0)
    assert told(found, 40.0, 40.0, -39.0)
    assert told(found, 9e17, 9e17, -9e17)


def test_targets_far_from_zero_are_not_divergence_before_they_are_learned() -> None:
    """Mean 1000, deviation 1: a model that predicts about 0 has a million times the variance."""
    found = levels(targets(1000.0))
    assert not told(found, 1e6, 1e6, -1e6)
    assert told(found, 1.1e7, 1.1e7, -1.1e7)


def test_a_client_with_targets_of_its_own_size_is_measured_by_them() -> None:
    """One of fifty clients has targets around 1000, the others around 0: its untrained model is far above the
    variance of all, and not diverged."""
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(50), 20)
    y = (rng.standard_normal(1000) + 1000 * (client == 7)).astype("float32")
    fed = Federation.from_arrays(rng.standard_normal((1000, 2)).astype("float32"), y, client)
    figures = torch.full((50, 3), 1.0)
    figures[7] = 1e6
    figures[8] = 1e6
    found = levels(fed).diverged(figures, "validation", np.arange(50))
    assert found.nonzero()[0].tolist() == [8]


def test_a_loss_of_the_user_s_own_is_measured_by_the_initial_model() -> None:
    fed = targets(0.0)
    task = FunctionTask(lambda theta, x, y: (theta[0] - 30.0).square() + 0 * y, torch.zeros(1))
    found = levels(fed, task)
    assert found.initial == pytest.approx(900)
    assert not told(found, 8900.0)
    assert told(found, 9100.0)


def test_an_initial_model_that_is_far_off_is_no_divergence() -> None:
    """Features of 1000 give an untrained classifier a loss of hundreds."""
    fed = classes()
    net = nn.Linear(2, 2)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[0.0, 500.0], [500.0, 0.0]]))
    found = levels(fed, descant.ModuleTask(net, "cross_entropy", classes=2))
    assert found.initial > 400
    assert not told(found, 4000.0, 0.0, 0.0)
    assert told(found, 6000.0, 0.0, 0.0)


def test_clients_without_rows_have_not_diverged() -> None:
    fed = Federation.from_arrays(np.zeros((40, 1), "float32"), np.arange(40) % 2, np.repeat([0, 1], 20),
                                 validation=0.0)
    assert not levels(fed).diverged(torch.full((2, 3), math.nan), "validation", np.arange(2)).any()


def test_the_training_loss() -> None:
    found = levels(classes())
    assert not found.soars(0.9 * SOARING * LOG2, 0.5)
    assert found.soars(1.1 * SOARING * LOG2, 1.1 * SOARING * LOG2)  # also in the first round
    assert found.soars(math.inf, 0.5)
    assert not found.soars(math.nan, 0.5)  # a method that counts no gradients


@pytest.mark.parametrize(("diverged", "clients", "failed", "no_result"), [
    (0, 20, 0, False), (9, 20, 0, False), (10, 20, 0, True), (1, 1, 0, True), (4, 20, 12, True),
    (0, 5, 5, False),
])
def test_when_a_run_is_no_result(diverged: int, clients: int, failed: int, no_result: bool) -> None:
    assert has_diverged({"diverged": diverged, "clients": clients, "failed": failed}) is no_result


# -- what to do ---------------------------------------------------------------------------------------------


def work(algorithm: descant.core.algorithm.Algorithm, federation: Federation) -> Work:
    task = make_task("mclr", federation, loss=None, dtype=torch.float32, seed=0)
    return Work(algorithm, task, federation, 0, 20, LocalWork(steps=1))


def test_a_step_that_cannot_work_is_named_first() -> None:
    found = remedy(work(algorithms.pFedMe(lam=30.0, alpha=0.09), classes()))
    assert "alpha < 2 / (L + lam)" in found
    assert "0.0667" in found or "0.0666667" in found


def test_features_that_are_not_scaled_come_next() -> None:
    fed = classes()
    large = Federation.from_arrays(fed.x.numpy() * 15 + 41, fed.y.numpy(), np.repeat([0, 1], 40),
                                   column_names=("age", "dose"))
    found = remedy(work(algorithms.FedAvg(), large))
    assert "'age' (mean 48" in found
    assert 'scale = "client"' in found


def test_else_the_bound_of_the_step_is_that_of_the_data() -> None:
    """Softmax regression on x = e_k: L = lambda_max(X'X / n) / 2 with a column of ones, by hand."""
    made = work(algorithms.Ditto(lam=1.0), classes())
    rows = made.federation.train[0]
    x = np.c_[made.federation.x[rows].double().numpy(), np.ones(len(rows))]
    L = np.linalg.eigvalsh(x.T @ x / len(rows))[-1] / 2
    assert curvature(made) == pytest.approx(L, rel=0.05)
    assert f"algorithm.solver.lr < 2 / (L + 1) = {2 / (curvature(made) + 1):.2g}" in remedy(made)


# -- a run --------------------------------------------------------------------------------------------------


def test_python_warns_once_and_the_summary_says_so(tmp_path: Path) -> None:
    fed = descant.federation("digits", partition="classes", clients=4, classes_per_client=2)
    method = algorithms.pFedMe(lam=30.0, alpha=0.09)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = descant.run(method, federation=fed, rounds=4, eval={"every": 2}, backend="vectorised",
                          out=tmp_path / "run")
    assert sum("diverge" in str(each.message) and "round 1" in str(each.message) for each in caught) == 1
    assert run.summary["diverged"] is True
    assert run.summary["divergence"]["round"] == 1
    assert [row["round"] for row in run.history if "divergence" in row] == [1]
    assert run.summary["last"]["personal"]["diverged"] == 4
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["diverged"] is True


def test_a_sound_run_says_nothing() -> None:
    fed = descant.federation("digits", partition="classes", clients=4, classes_per_client=2)
    for lr in (0.1, 300.0):  # the second is overconfident beyond all measure, and right
        run = descant.run(algorithms.LocalTrain(solver=descant.SGD(lr=lr)), federation=fed, rounds=3,
                          eval={"every": 1}, backend="vectorised")
        assert run.summary["last"]["personal"]["test"]["accuracy"]["mean"] > 0.95
        assert (run.summary["diverged"], run.summary["divergence"]) == (False, None)
        assert run.summary["last"]["personal"]["diverged"] == 0


QUICK = ("--set", "train.rounds=4", "--set", "eval.every=2", "--set", "train.backend=vectorised")


@pytest.mark.thorough
def test_the_command_line_fails_and_keeps_the_directory(tmp_path: Path) -> None:
    """A loss of 5e19 in every round used to end with exit code 0 and `diverged: 0`."""
    out = tmp_path / "run"
    code, text, err = call("run", *QUICK, "--set", "algorithm.lam=30", "--set", "algorithm.alpha=0.09",
                           "--out", out)
    assert code == 1
    assert "round 1: the training diverges: its mean loss is" in text
    assert "20 clients in the last round" in text
    assert err.startswith("error: the models of all 20 clients have diverged")
    assert "alpha < 2 / (L + lam)" in err
    assert json.loads((out / "summary.json").read_text())["last"]["personal"]["diverged"] == 20
    code, text, err = call("resume", out, "--rounds", "5")
    assert (code, err.startswith("error: the models of all 20 clients have diverged")) == (1, True)
    assert not any(f"round {number}: the" in text for number in range(1, 6))  # told once


@pytest.mark.thorough
def test_a_stronger_pull_alone_does_not_diverge(tmp_path: Path) -> None:
    """README's first command: the steps follow from lam."""
    code, _, err = call("run", *QUICK, "--set", "algorithm.lam=30", "--out", tmp_path / "run")
    assert (code, err) == (0, "")


def test_a_last_round_that_diverged_after_a_good_one_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    sound = {"round": 2, "personal": {"diverged": 0, "clients": 5, "failed": 0}}
    lost = {"round": 4, "personal": {"diverged": 5, "clients": 5, "failed": 0}}
    summary = {"last": lost, "best": sound, "diverged": False,
               "divergence": {"round": 4, "words": "the models of all 5 clients have diverged; do this"}}
    require_result(summary)
    assert capsys.readouterr().err == (
        "warning: in the last round the models of all 5 clients have diverged; figures and models are those "
        "of the best round; do this\n")

"""L, mu, rho and R from data, and the distance to true models, against closed forms and known truths."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import descant
from descant.algorithms import Ditto, FedAvg, FedMAP, LocalTrain
from descant.core.federation import Federation
from descant.core.task import Batch, Task
from descant.core.vector import Model
from descant.errors import UsageError
from descant.models import DNN, make_task
from descant.models.module import ModuleTask
from descant.priors.solve import SGD
from descant.theory import estimate
from descant.theory.estimate import (
    heterogeneity,
    is_convex,
    lanczos,
    minimise,
    pilot_clients,
    rho2,
    sampling_noise,
    smoothness,
    strong_convexity,
    survey,
)
from descant.theory.truth import (
    identified,
    total_error,
    true_models,
)
from helpers import engine, quadratics, unbalanced

DOUBLE = torch.float64


def near(found: float | Tensor, expected: float | Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(torch.as_tensor(found, dtype=DOUBLE), torch.as_tensor(expected, dtype=DOUBLE),
                               rtol=tolerance, atol=tolerance)


def rows_of(federation: Federation, client: int) -> Batch:
    rows = federation.train[client]
    return Batch(federation.x[rows], federation.y[rows])


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def linear_task(loss: Any, outputs: int, bias: bool = True) -> ModuleTask:
    classes = None if loss == "mse" else max(2, outputs)
    return ModuleTask(nn.Sequential(nn.Flatten(), nn.Linear(3, outputs, bias=bias)), loss, classes=classes,
                      dtype=DOUBLE)


def targets(loss: str, outputs: int, n: int) -> Tensor:
    if loss == "mse":
        return random(n, outputs, seed=1)
    return torch.from_numpy(np.random.default_rng(1).integers(max(2, outputs), size=n))


def zero(task: Task) -> Model:
    return Model(torch.zeros(task.dim, dtype=DOUBLE), torch.zeros(0, dtype=DOUBLE))


# -- curvature --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("loss", "outputs", "c"), [
    ("binary_cross_entropy", 1, 1 / 4), ("cross_entropy", 2, 1 / 2), ("mse", 1, 2.0), ("mse", 4, 1 / 2)])
def test_smoothness_of_linear_models_is_attained(loss: str, outputs: int, c: float, bias: bool) -> None:
    """At theta = 0 the probabilities are 1/2: sigma' = 1/4, and diag(p) - pp' has the eigenvalue 1/2. The
    mean over C outputs of the squared errors has the Hessian 2/C X'X / n, everywhere."""
    task, x = linear_task(loss, outputs, bias), random(20, 3)
    batch = Batch(x, targets(loss, outputs, 20))
    X = torch.cat([x, torch.ones(20, 1, dtype=DOUBLE)], 1) if bias else x
    L = smoothness(task, zero(task), batch)
    near(L, c * float(torch.linalg.eigvalsh(X.T @ X / 20)[-1]))
    near(estimate._ends(task, zero(task), batch).high, L)


def test_smoothness_of_softmax_is_a_bound_everywhere() -> None:
    task, batch = linear_task("cross_entropy", 5), Batch(random(30, 3), targets("cross_entropy", 5, 30))
    L = smoothness(task, zero(task), batch)
    for seed in range(5):
        at = Model(random(task.dim, seed=seed), torch.zeros(0, dtype=DOUBLE))
        assert estimate._ends(task, at, batch).high < L


def test_curvature_of_quadratics_is_known() -> None:
    """H_i has eigenvalues from 1 / kappa to 1."""
    federation = quadratics(2, kappa=5.0)
    task = make_task("quadratic", federation, dtype=DOUBLE)
    model, batch = task.init(), rows_of(federation, 1)
    near(smoothness(task, model, batch), 1.0)
    near(strong_convexity(task, model, batch), 0.2)
    near(strong_convexity(task, model, batch, ridge=0.3), 0.5)
    assert is_convex(task, model, batch)


def test_strong_convexity_of_softmax_leaves_out_what_it_cannot_tell() -> None:
    """At theta = 0, diag(p) - pp' has the eigenvalue 0 for a common shift and 1 / C for the other directions:
    the smallest that can be told is lambda_min(X'X / n) / C."""
    x = random(30, 3)
    task, X = linear_task("cross_entropy", 4), torch.cat([x, torch.ones(30, 1, dtype=DOUBLE)], 1)
    batch = Batch(x, targets("cross_entropy", 4, 30))
    near(strong_convexity(task, zero(task), batch), float(torch.linalg.eigvalsh(X.T @ X / 30)[0]) / 4)


def test_large_models_have_their_ridge_for_convexity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "DENSE", 3)
    federation = quadratics(2)
    task = make_task("quadratic", federation, dtype=DOUBLE)
    assert strong_convexity(task, task.init(), rows_of(federation, 0), ridge=0.1) == 0.1
    near(smoothness(task, task.init(), rows_of(federation, 0)), 1.0)  # by Lanczos, complete in 4 steps


def test_lanczos() -> None:
    """Complete in as many steps as there are dimensions; the upper end of a wide spectrum much sooner."""
    for dim in (1, 5, 30):
        A = random(dim, dim)
        A = A + A.T
        values = torch.linalg.eigvalsh(A)
        ends = lanczos(lambda v, A=A: A @ v, dim, DOUBLE, steps=dim)
        near(ends.low, values[0])
        near(ends.high, values[-1])
    assert lanczos(lambda v: 3 * v, 50, DOUBLE) == pytest.approx((3, 3))  # one step is enough
    D = torch.linspace(0.0, 1.0, 400, dtype=DOUBLE) ** 4 * 7
    ends = lanczos(lambda v: D * v, 400, DOUBLE)
    assert ends.high == pytest.approx(7, rel=1e-6)
    assert 0 <= ends.low < 0.01
    assert lanczos(lambda v: D * v, 400, DOUBLE) == ends


@pytest.mark.thorough
def test_a_network_with_a_hidden_layer_is_not_convex() -> None:
    federation = descant.federation("logistic", clients=2, rows=60, dim=4, classes=3).to(DOUBLE)
    batch = rows_of(federation, 0)
    for model, expected in (("mclr", True), (DNN(hidden=3), False)):
        task = make_task(model, federation, dtype=DOUBLE)
        assert is_convex(task, minimise(task, batch, 1e-2, 100), batch) is expected


# -- pilot solutions, gradients and noise -----------------------------------------------------------------


def test_pilot_solutions_minimise() -> None:
    """(H + ridge)^-1 H a for a quadratic; a vanishing gradient for softmax regression: a line search sees
    values to 1e-16, and so gradients to the square root of that."""
    federation = quadratics(3)
    task = make_task("quadratic", federation, dtype=DOUBLE)
    H, a = federation.truth["H"][2], federation.truth["optima"][2]
    found = minimise(task, rows_of(federation, 2), 0.3, 100)
    near(found.theta, torch.linalg.solve(H + 0.3 * torch.eye(4, dtype=DOUBLE), H @ a), 1e-8)
    task, batch = linear_task("cross_entropy", 3), Batch(random(30, 3), targets("cross_entropy", 3, 30))
    found = minimise(task, batch, 0.1, 200)
    assert float((task.grad(found, batch).theta + 0.1 * found.theta).norm()) < 1e-7


def test_rho_is_the_size_of_single_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """H (theta - y_j) + ridge theta for row j; also when the rows are read a few at a time."""
    federation = quadratics(1, rows=12, noise=2.0)
    task, batch = make_task("quadratic", federation, dtype=DOUBLE), rows_of(federation, 0)
    theta, H = random(4), federation.truth["H"][0]
    model = Model(theta, torch.zeros(0, dtype=DOUBLE))
    expected = float(((theta - batch.y) @ H + 0.2 * theta).square().sum(1).mean())
    near(rho2(task, model, batch, 0.2), expected)
    monkeypatch.setattr(estimate, "AT_ONCE", 9)
    near(rho2(task, model, batch, 0.2), expected)


def test_noise_of_a_mean() -> None:
    """The minimiser is the mean of the y_j, whose expected squared error is estimated without bias by
    sum_j ||y_j - mean||^2 / (n (n - 1)): H^-1 undoes the H of the gradients."""
    federation = quadratics(1, rows=12, noise=2.0)
    task, batch = make_task("quadratic", federation, dtype=DOUBLE), rows_of(federation, 0)
    n, mean = len(batch.y), batch.y.mean(0)
    model = minimise(task, batch, 0.0, 100)
    near(model.theta, mean, 1e-8)
    near(sampling_noise(task, model, batch), float((batch.y - mean).square().sum()) / (n * (n - 1)), 1e-8)


def test_noise_of_a_large_model_by_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Means of n_1 and n_2 rows with variance v differ by v (1/n_1 + 1/n_2) on average; the error of the
    mean of n is v / n."""
    monkeypatch.setattr(estimate, "DENSE", 3)
    federation = unbalanced(quadratics(1, rows=16, noise=2.0), [9])
    task, batch = make_task("quadratic", federation, dtype=DOUBLE), rows_of(federation, 0)
    gap = float((batch.y[0::2].mean(0) - batch.y[1::2].mean(0)).square().sum())
    near(sampling_noise(task, task.init(), batch), gap / (1 / 5 + 1 / 4) / 9, 1e-7)


def test_noise_of_linear_regression() -> None:
    """The sandwich (X'X)^-1 X' diag(e^2) X (X'X)^-1, with n / (n - 1) for the covariance; the factors 2 of
    the squared error cancel."""
    x, y = random(40, 3), random(40, 1, seed=1)
    task, X = linear_task("mse", 1, bias=False), x
    w = torch.linalg.lstsq(X, y).solution
    inverse = torch.linalg.inv(X.T @ X)
    sandwich = inverse @ (X.T @ ((y - X @ w).square() * X)) @ inverse
    model = minimise(task, Batch(x, y), 0.0, 100)
    near(model.theta, w[:, 0], 1e-8)
    near(sampling_noise(task, model, Batch(x, y)), float(torch.trace(sandwich)) * 40 / 39, 1e-7)


def test_noise_needs_two_rows() -> None:
    federation = quadratics(1)
    task, batch = make_task("quadratic", federation, dtype=DOUBLE), rows_of(federation, 0)
    with pytest.raises(UsageError, match="one row"):
        sampling_noise(task, task.init(), Batch(batch.x[:1], batch.y[:1]))


# -- heterogeneity ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.thorough
def test_the_corrected_square_of_r_has_no_bias(uniform: bool) -> None:
    """w_i = w*_i + e_i with E||e_i||^2 = v_i: over 4000 draws the mean of sum_i p_i (corrected squares) comes
    within four standard errors of the truth; the naive one is above it by sum_i p_i (1 - p_i) v_i, which is
    (1 - 2 p_i) v_i + sum_j p_j^2 v_j, averaged."""
    m, d = 6, 3
    truth, v = 0.5 * random(m, d), torch.linspace(0.1, 1.2, m, dtype=DOUBLE)
    p = torch.full((m,), 1 / m, dtype=DOUBLE) if uniform else torch.arange(1, m + 1, dtype=DOUBLE) / 21
    known = float(p @ (truth - p @ truth).square().sum(1))
    errors = random(4000, m, d, seed=1) * (v / d).sqrt()[:, None]
    found = [heterogeneity(truth + e, v, None if uniform else p) for e in errors]
    corrected = torch.stack([p @ f.squares for f in found])
    assert abs(float(corrected.mean()) - known) < 4 * float(corrected.std()) / math.sqrt(4000)
    naive = float(torch.tensor([f.naive**2 for f in found], dtype=DOUBLE).mean())
    assert naive - float(corrected.mean()) == pytest.approx(float(p @ ((1 - p) * v)), rel=1e-9)


def test_r_is_never_imaginary() -> None:
    found = heterogeneity(0.01 * random(4, 2), torch.ones(4, dtype=DOUBLE))
    assert (found.R, found.R_max) == (0.0, 0.0)
    assert found.naive > 0
    exact = heterogeneity(random(4, 2), torch.zeros(4, dtype=DOUBLE))
    assert (exact.R, exact.R_max) == (exact.naive, exact.naive_max)
    assert exact.R_max > exact.R


@pytest.mark.slow
@pytest.mark.parametrize(("dataset", "fields", "model", "ridge"), [
    ("quadratics", {"dim": 6, "rows": 20, "noise": 3.0, "spread": 0.5}, "quadratic", 0.0),
    ("logistic", {"dim": 4, "classes": 3, "rows": 200, "heterogeneity": 0.1}, "mclr", 1 / 200),
    ("logistic", {"dim": 4, "classes": 3, "rows": 200, "heterogeneity": 0.4}, "mclr", 0.2 / 200),
])
def test_the_noise_is_taken_off_r(dataset: str, fields: dict[str, Any], model: str, ridge: float) -> None:
    """Over four seeds, the corrected R is much nearer to the known one on average. (A ridge shrinks the
    models and R with them, which is not noise: where R is large, a strong one would hide it by chance.)"""
    naive, corrected = [], []
    for seed in range(4):
        federation = descant.federation(dataset, clients=8, seed=seed, test=0.0, validation=0.0, **fields
                                        ).to(DOUBLE)
        task = make_task(model, federation, dtype=DOUBLE)
        truth = true_models(task, federation)
        assert truth is not None
        R = float((truth - truth.mean(0)).square().sum(1).mean().sqrt())
        found = survey(task, federation, np.arange(8), ridge=ridge)
        assert bool(found.solved.all())
        naive.append(abs(found.spread.naive - R))
        corrected.append(abs(found.spread.R - R))
    assert np.mean(corrected) < 0.6 * np.mean(naive)


def test_a_survey_gathers_the_figures_of_single_clients() -> None:
    federation = quadratics(5, rows=12, noise=0.5, kappa=5.0)
    task = make_task("quadratic", federation, dtype=DOUBLE)
    told: list[int] = []
    found = survey(task, federation, np.array([0, 3]), ridge=0.1, told=told.append)
    assert told == [1, 2]
    near(found.L, 1.1)
    near(found.mu, 0.3)
    assert (found.n, found.rows, found.population) == (9, 45, 5)
    for k, client in enumerate((0, 3)):
        batch = rows_of(federation, client)
        model = minimise(task, batch, 0.1, 300)
        near(found.models[k], model.theta, 1e-8)
        near(found.rho2[k], rho2(task, model, batch, 0.1), 1e-8)
        near(found.noise[k], sampling_noise(task, model, batch, 0.1), 1e-8)
    near(found.rho, float(found.rho2.mean().sqrt()))
    near(found.spread.R, heterogeneity(found.models, found.noise).R)


def opposed(clients: int, *, validation: float = 0.25) -> Federation:
    """Clients with an odd number call positive what the others call negative."""
    x = random(40 * clients, 1)
    client = np.arange(len(x)) % clients
    y = (x[:, 0] > 0).long() ^ torch.from_numpy(client % 2)
    return Federation.from_arrays(x, y, client, validation=validation, classes=2)


@pytest.mark.slow
def test_transfer_is_what_others_tell_beside_a_clients_own_rows() -> None:
    """Others with the opposite labels tell nothing but wrong; others with the same ones as much as one's
    own rows, and more where these are few."""
    federation = opposed(4)
    task = make_task("mclr", federation, dtype=DOUBLE)
    found = survey(task, federation, np.arange(4), ridge=0.01).transfer
    assert found is not None
    assert found.others < 0.1
    assert found.own > 0.9
    assert found.gain == found.others - found.own
    assert found.rows == sum(federation.validation.sizes)
    alike = survey(task, federation, np.array([0, 2]), ridge=0.01).transfer
    assert alike is not None
    assert abs(alike.gain) < 0.1
    few = descant.federation("logistic", clients=12, rows=60, test=0.4, validation=0.8, heterogeneity=0.0
                             ).to(DOUBLE)
    scarce = survey(make_task("mclr", few, dtype=DOUBLE), few, np.arange(12), ridge=0.1, steps=50).transfer
    assert scarce is not None
    assert scarce.gain > 0.03


def test_transfer_needs_classes_and_validation_rows() -> None:
    federation = opposed(4, validation=0.0)
    task = make_task("mclr", federation, dtype=DOUBLE)
    assert survey(task, federation, np.arange(4), ridge=0.01, steps=5).transfer is None
    federation = quadratics(3, rows=12)
    task = make_task("quadratic", federation, dtype=DOUBLE)
    assert survey(task, federation, np.arange(3), ridge=0.1, steps=5).transfer is None


def test_who_is_asked() -> None:
    federation = unbalanced(quadratics(5, rows=12), (4, 1, 4, 2, 6))
    assert pilot_clients(federation, 20).tolist() == [0, 2, 3, 4]
    some = pilot_clients(federation, 2, seed=1)
    assert len({*some.tolist()} & {0, 2, 3, 4}) == 2
    assert np.array_equal(some, pilot_clients(federation, 2, seed=1))
    with pytest.raises(UsageError, match="has 1 such"):
        pilot_clients(unbalanced(quadratics(3), (1, 1, 3)), 5)
    task = make_task("quadratic", federation, dtype=DOUBLE)
    with pytest.raises(UsageError, match="one client"):
        survey(task, federation, np.array([0]), ridge=0.1)


# -- true models ------------------------------------------------------------------------------------------


def test_what_softmax_cannot_tell() -> None:
    """A vector added to the weights of every class changes no probability, and no error."""
    task, theta = linear_task("cross_entropy", 4), random(16)
    shift = torch.cat([random(3, seed=2).repeat(4), torch.full((4,), 0.7, dtype=DOUBLE)])
    x = random(5, 3, seed=3)
    probabilities = [torch.softmax(task.predict(Model(t, torch.zeros(0)), x), 1)
                     for t in (theta, theta + shift, identified(task, theta))]
    for other in probabilities[1:]:
        near(other, probabilities[0])
    near(identified(task, theta + shift), identified(task, theta))
    near(identified(task, torch.stack([theta, shift]))[0], identified(task, theta))
    near(identified(task, shift), torch.zeros(16, dtype=DOUBLE))
    for loss, outputs in (("mse", 4), ("binary_cross_entropy", 1)):
        task = linear_task(loss, outputs)
        assert torch.equal(identified(task, random(task.dim)), random(task.dim))


class Squashed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def test_which_models_are_linear() -> None:
    assert linear_task("mse", 1).is_linear
    for module in (Squashed(), nn.Sequential(nn.Linear(3, 2), nn.Tanh()),
                   nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))):
        assert not ModuleTask(module, "cross_entropy", classes=2).is_linear
    federation = descant.federation("logistic", clients=2, dim=4)
    assert make_task("mclr", federation).is_linear  # type: ignore[attr-defined]
    assert not make_task("dnn", federation).is_linear  # type: ignore[attr-defined]


def test_total_error_is_at_most_twice_the_other_two() -> None:
    models, minimisers, truth = random(5, 3), random(5, 3, seed=1), random(5, 3, seed=2)
    statistical, rest = total_error(minimisers, truth), total_error(models, minimisers)
    assert statistical.shape == (5,)
    near(statistical[2], float((minimisers[2] - truth[2]).norm()) ** 2)
    assert bool((total_error(models, truth) <= 2 * (statistical + rest)).all())
    near(total_error(minimisers, truth), statistical)


@pytest.mark.parametrize("backend", ["loop", "vectorised", "processes"])
@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_runs_report_the_error_to_the_truth(weights: Any, backend: Any) -> None:
    sizes = (9, 1, 4, 2, 6)
    federation = unbalanced(quadratics(5, rows=12), sizes)
    run = descant.run(Ditto(weights=weights), federation=federation, model="quadratic", rounds=3, cohort=4,
                      dtype="float64", backend=backend, eval={"every": 2})
    a = federation.truth["optima"]
    personal = torch.stack([run.personal(k, "last").theta for k in range(5)])
    p = torch.tensor(sizes if weights == "samples" else [1] * 5, dtype=DOUBLE)
    last = run.history[-1]
    near(last["personal"]["truth_error"], float((personal - a).square().sum(1).mean()))
    w = run.snapshot("last").server.mean.theta
    near(last["global"]["truth_error"], float((w - p / p.sum() @ a).square().sum()))
    assert "personal" not in run.history[0]
    assert run.summary["last"]["personal"]["truth_error"] == last["personal"]["truth_error"]


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("weights", ["omega", "mean_log", "samples"])
def test_the_global_error_has_the_weights_of_the_method(weights: Any, temperature: float) -> None:
    """FedMAP's weights depend on the uploads, and on the temperature."""
    federation = unbalanced(quadratics(5, rows=12, noise=0.5), (9, 1, 4, 2, 6))
    method = FedMAP(solver=SGD(lr=0.1), weights=weights, temperature=temperature)
    with engine(method, federation, "quadratic", cohort=4) as e:
        e.play(2)
        uploads: list[Any] = []
        aggregate = FedMAP.aggregate

        def spy(self: FedMAP, server: Any, upload: Any, round: Any) -> Any:
            server, report = aggregate(self, server, upload, round)
            uploads.append((round.cohort, report["client_weights"]))
            return server, report

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FedMAP, "aggregate", spy)
            (report,) = e.play(1)
        assert "client_weights" not in report.info  # one for every client of the round: not for metrics.jsonl
        cohort, p = uploads[0]
        if weights == "samples":
            N = torch.tensor([9.0, 1, 4, 2, 6], dtype=DOUBLE) ** (1 / temperature)
            cohort, p = torch.arange(5), N / N.sum()
        target = p @ federation.truth["optima"][cohort]
        w = method.global_model(e.server).theta
        near(e.score().shared.error[0], float((w - target).square().sum()))


@pytest.mark.thorough
def test_the_error_falls_to_the_statistical_one() -> None:
    """LocalTrain on rows with noise: each theta_i comes to the mean of its rows, not to the true optimum."""
    federation = quadratics(4, rows=12, noise=0.5)
    means = torch.stack([federation.y[rows].mean(0) for rows in federation.train])
    run = descant.run(LocalTrain(SGD(lr=1.0)), federation=federation, model="quadratic", rounds=40,
                      batch="full", local={"steps": 4}, dtype="float64", backend="vectorised")
    expected = float(total_error(means, federation.truth["optima"]).mean())
    assert expected > 0.01
    near(run.history[-1]["personal"]["truth_error"], expected)
    assert "global" not in run.history[-1]


def test_errors_of_softmax_regression_are_those_of_what_it_can_tell() -> None:
    federation = descant.federation("logistic", clients=3, rows=40, dim=4, classes=3, unseen=1)
    run = descant.run(FedAvg(), federation=federation, rounds=2, dtype="float64", backend="loop")
    task, truth = run.setup.task, true_models(run.setup.task, run.setup.federation)
    assert truth is not None
    assert truth.shape == (3, 15)
    w = identified(task, run.snapshot("last").server.theta)
    near(run.history[-1]["personal"]["truth_error"], float((w - truth[:2]).square().sum(1).mean()))
    near(run.history[-1]["unseen"]["personal"]["truth_error"], float((w - truth[2]).square().sum()))


@pytest.mark.parametrize(("dataset", "model"), [("logistic", "dnn"), ("fedmap_shell", "mclr")])
def test_there_is_no_error_where_the_true_model_is_not_known(dataset: str, model: str) -> None:
    federation = descant.federation(dataset, clients=2, rows=20)
    run = descant.run("fedavg", federation=federation, model=model, rounds=1, backend="loop")
    assert true_models(run.setup.task, federation) is None
    assert "truth_error" not in run.history[-1]["personal"]
    assert "truth_error" not in run.history[-1]["global"]



"""Each method reaches its own fixed point, known in closed form, and reduces to the others where it should.

Client i has the loss f_i(w) = (w - a_i)' H_i (w - a_i) / 2, every row alike, so that with full batches its
gradient H_i (w - a_i) is exact. Everything is in float64. p_i is what client i counts in an average.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from descant.algorithms import SCAFFOLD, Ditto, FedAvg, FedProx, LocalTrain, pFedMe
from descant.core.algorithm import Algorithm
from descant.core.federation import Federation
from descant.core.task import inputs
from descant.core.vector import Model
from descant.priors.quadratic import Gaussian
from descant.priors.solve import SGD, Adam, Proximal
from helpers import assert_same, batchnorm_net, engine, finite_differences, quadratics, ragged, unbalanced

SIZES = (9, 1, 4, 2, 6)
FEDERATION = unbalanced(quadratics(5, rows=12), SIZES)
H, A = FEDERATION.truth["H"], FEDERATION.truth["optima"]  # [clients, d, d], [clients, d]
I = torch.eye(4, dtype=torch.float64)  # noqa: E741 (the identity)
WEIGHTS = {"samples": torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES),
           "uniform": torch.full((5,), 1 / 5, dtype=torch.float64)}
both_weights = pytest.mark.parametrize("weights", ["samples", "uniform"])


def settings(steps: int, **train: Any) -> dict[str, Any]:
    return {"batch": "full", "local": {"steps": steps}, "backend": "vectorised", "chunk": 5} | train


def power(matrix: Tensor, exponent: int) -> Tensor:
    return torch.linalg.matrix_power(matrix, exponent)


def balance(p: Tensor, m: Tensor) -> Tensor:
    """The w with sum_i p_i M_i (w - a_i) = 0: (sum_i p_i M_i)^-1 sum_i p_i M_i a_i."""
    return torch.linalg.solve(torch.einsum("i,ijk->jk", p, m), torch.einsum("i,ijk,ik->j", p, m, A))


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


# -- fixed points -------------------------------------------------------------------------------------


def test_localtrain_reaches_every_client_s_own_optimum() -> None:
    """theta - a_i shrinks by I - lr H_i in each step; the eigenvalues of H_i lie in [0.2, 1]:
    0.84^(4 * 40) = 8e-13."""
    with engine(LocalTrain(SGD(lr=0.8)), FEDERATION, "quadratic", **settings(4)) as e:
        e.play(40)
        close(e.personal().theta, A, 1e-10)
        close(e.server.theta, torch.zeros(4, dtype=torch.float64), 0)


@both_weights
@pytest.mark.thorough
def test_fedavg_with_several_local_steps(weights: Any) -> None:
    """E steps of size lr give w_i = a_i + (I - lr H_i)^E (w - a_i) = w - M_i (w - a_i) with
    M_i = I - (I - lr H_i)^E, so that the average stays where sum_i p_i M_i (w - a_i) = 0."""
    lr, steps = 0.8, 3
    m = I - power(I - lr * H, steps)
    expected = balance(WEIGHTS[weights], m)
    with engine(FedAvg(SGD(lr=lr), weights=weights), FEDERATION, "quadratic", **settings(steps)) as e:
        e.play(60)
        close(e.model.theta, expected, 1e-10)
        close(e.personal().theta, expected.expand(5, 4), 1e-10)  # without fine-tuning all predict with w
    # that is not the minimiser of the average loss: local steps are not free
    assert (expected - balance(WEIGHTS[weights], H)).norm() > 0.05


@pytest.mark.thorough
def test_fedavg_with_fine_tuning() -> None:
    """Personal models are F more steps from w: a_i + (I - lr H_i)^F (w - a_i); w does not notice."""
    lr, tune = 0.8, 2
    m = I - power(I - lr * H, 3)
    w = balance(WEIGHTS["samples"], m)
    expected = A + torch.einsum("ijk,ik->ij", power(I - lr * H, tune), w - A)
    with engine(FedAvg(SGD(lr=lr), finetune=tune), FEDERATION, "quadratic", **settings(3)) as e:
        e.play(60)
        close(e.model.theta, w, 1e-10)
        close(e.personal().theta, expected, 1e-10)


@both_weights
@pytest.mark.parametrize("solver", [SGD(lr=0.5), Proximal(lr=0.5)])
@pytest.mark.thorough
def test_fedprox(weights: Any, solver: Any) -> None:
    """The client's problem f_i(v) + mu/2 ||v - w||^2 is solved by v_i* = (H_i + mu)^-1 (H_i a_i + mu w), and
    w - v_i* = A_i (w - a_i) with A_i = (H_i + mu)^-1 H_i. A gradient step shrinks v - v_i* by
    I - lr (H_i + mu), a proximal one by (I - lr H_i) / (1 + lr mu). From v = w, E steps by Q_i make
    w_i = v_i* + Q_i^E (w - v_i*) = w - (I - Q_i^E) A_i (w - a_i): as FedAvg, with M_i = (I - Q_i^E) A_i."""
    mu, steps = 0.7, 3
    q = I - 0.5 * (H + mu * I) if solver.name == "sgd" else (I - 0.5 * H) / (1 + 0.5 * mu)
    m = (I - power(q, steps)) @ torch.linalg.solve(H + mu * I, H)
    expected = balance(WEIGHTS[weights], m)
    algorithm = FedProx(mu=mu, solver=solver, weights=weights)
    with engine(algorithm, FEDERATION, "quadratic", **settings(steps)) as e:
        e.play(60)
        close(e.model.theta, expected, 1e-6)
    assert (expected - balance(WEIGHTS[weights], I - power(I - 0.5 * H, steps))).norm() > 1e-3  # not FedAvg's


@pytest.mark.thorough
@both_weights
@pytest.mark.parametrize("solver", [SGD(lr=0.6), pytest.param(Proximal(lr=0.6), marks=pytest.mark.slow)])
def test_ditto(weights: Any, solver: Any) -> None:
    """w is FedAvg's (no prior: a proximal step is a gradient step); v_i minimises f_i(v) + lam/2 ||v - w||^2:
    v_i = (H_i + lam)^-1 (H_i a_i + lam w), whatever the number of steps, because v_i persists."""
    lam = 1.5
    w = balance(WEIGHTS[weights], I - power(I - 0.6 * H, 2))
    right = torch.einsum("ijk,ik->ij", H, A) + lam * w
    expected = torch.linalg.solve(H + lam * I, right)
    with engine(Ditto(lam=lam, solver=solver, weights=weights), FEDERATION, "quadratic", **settings(2)) as e:
        e.play(70)
        close(e.model.theta, w, 1e-10)
        close(e.personal().theta, expected, 1e-10)


# pFedMe with an (almost) exact proximal map: a gradient step on theta shrinks its error by
# I - alpha (H_i + lam), with eigenvalues of H_i + lam in [2.2, 3]; alpha = 2 / 5.2 makes that 0.154 at
# worst, and 0.154^16 = 1e-13.
LAM, EXACT = 2.0, {"lam": 2.0, "alpha": 2 / 5.2, "K": 16}
ENVELOPE = torch.linalg.solve(H + LAM * I, H)  # A_i = (H_i + lam)^-1 H_i


@both_weights
@pytest.mark.parametrize("start", ["theta", "w"])
def test_one_round_of_pfedme_is_a_gradient_step_on_the_moreau_envelopes(weights: Any, start: Any) -> None:
    """F_i(w) = min_v f_i(v) + lam/2 ||v - w||^2 has the gradient lam (w - prox_i(w)) = lam A_i (w - a_i).
    With R = 1, a round is w - eta sum_i p_i grad F_i(w) (beta = 1): here F_i by its definition, its
    gradient by finite differences, and by the formula."""
    p, w0, eta = WEIGHTS[weights], torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64), 0.3

    def envelope(w: Tensor) -> Tensor:
        right = torch.einsum("ijk,ik->ij", H, A) + LAM * w
        v = torch.linalg.solve(H + LAM * I, right)
        f = torch.einsum("ij,ijk,ik->i", v - A, H, v - A) / 2
        return p @ (f + LAM / 2 * (v - w).square().sum(1))

    algorithm = pFedMe(eta=eta, weights=weights, start=start, **EXACT)
    with engine(algorithm, FEDERATION, "quadratic", **settings(1)) as e:
        e.training.server = e.server._replace(mean=Model(w0, e.model.stats))
        e.play()
        close(e.model.theta, w0 - eta * finite_differences(envelope, w0, 1e-4), 1e-9)
        close(e.model.theta, w0 - eta * LAM * torch.einsum("i,ijk,ik->j", p, ENVELOPE, w0 - A), 1e-11)


@pytest.mark.thorough
@both_weights
def test_pfedme_minimises_the_average_of_the_envelopes(weights: Any) -> None:
    """sum_i p_i A_i (w - a_i) = 0, and theta_i = prox_i(w) = A_i a_i + (I - A_i) w. A round contracts by
    I - beta eta lam sum_i p_i A_i; eta lam = 1 and beta = 2 make that at most 1 - 2 * 0.09 = 0.82."""
    w = balance(WEIGHTS[weights], ENVELOPE)
    theta = torch.einsum("ijk,ik->ij", ENVELOPE, A) + torch.einsum("ijk,k->ij", I - ENVELOPE, w)
    algorithm = pFedMe(eta=1 / LAM, beta=2.0, weights=weights, **EXACT)
    with engine(algorithm, FEDERATION, "quadratic", **settings(1)) as e:
        e.play(50)
        close(e.model.theta, w, 1e-6)
        close(e.personal().theta, theta, 1e-6)


@pytest.mark.thorough
def test_pfedme_with_several_local_rounds() -> None:
    """R local rounds with the exact proximal map contract w_i - a_i by (I - eta lam A_i)^R: as FedAvg, with
    M_i = I - (I - eta lam A_i)^R. That is not the minimiser of the envelopes any more."""
    m = I - power(I - ENVELOPE, 4)
    algorithm = pFedMe(eta=1 / LAM, start="w", **EXACT)
    with engine(algorithm, FEDERATION, "quadratic", **settings(4)) as e:
        e.play(28)
        close(e.model.theta, balance(WEIGHTS["samples"], m), 1e-6)
    assert (balance(WEIGHTS["samples"], m) - balance(WEIGHTS["samples"], ENVELOPE)).norm() > 1e-2


@pytest.mark.thorough
@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_reaches_the_optimum_that_fedavg_misses(option: Any) -> None:
    """At the minimiser x* of the (unweighted) average loss, c_i = grad f_i(x*) and c = 0 stay: y does not
    move. FedAvg with the same local steps stays at another point."""
    optimum = FEDERATION.truth["global"]
    torch.testing.assert_close(optimum, balance(WEIGHTS["uniform"], H))
    with engine(FedAvg(SGD(lr=0.5), weights="uniform"), FEDERATION, "quadratic", **settings(5)) as e:
        e.play(30)
        assert (e.model.theta - optimum).norm() > 0.05
    with engine(SCAFFOLD(eta_l=0.2, option=option), FEDERATION, "quadratic", **settings(5)) as e:
        e.play(70)
        close(e.server.x.theta, optimum, 1e-7)
        close(e.server.c, torch.zeros(4, dtype=torch.float64), 1e-7)
        close(e.states(), torch.einsum("ijk,ik->ij", H, optimum - A), 1e-7)  # grad f_i at the optimum


@pytest.mark.slow
@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_reaches_the_optimum_with_sampled_cohorts(option: Any) -> None:
    with engine(SCAFFOLD(eta_l=0.2, option=option), FEDERATION, "quadratic", **settings(4, cohort=2)) as e:
        e.play(250)
        close(e.server.x.theta, FEDERATION.truth["global"], 1e-6)


def test_the_control_variate_of_scaffold_is_the_mean_gradient_on_the_path() -> None:
    """Round 1, all c zero: y = a_i + (I - eta H_i)^K (x - a_i), and c_i = (x - y) / (K eta) to rounding.
    K eta = 0.21 is not a float32, which would show in the eighth digit."""
    x0 = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    y = A + torch.einsum("ijk,ik->ij", power(I - 0.07 * H, 3), x0 - A)
    for backend in ("loop", "vectorised"):
        with engine(SCAFFOLD(eta_l=0.07), FEDERATION, "quadratic", **settings(3, backend=backend)) as e:
            e.training.server = e.server._replace(x=Model(x0, e.server.x.stats))
            e.play()
            close(e.states(), (x0 - y) / (3 * 0.07), 1e-13)
            close(e.server.c, e.states().mean(0), 1e-14)
            close(e.server.x.theta, y.mean(0), 1e-14)


@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_s_c_is_the_mean_of_all_c_i(option: Any) -> None:
    """Also of those who were not sampled or dropped out, and with a client whose uploads are NaN."""
    x = FEDERATION.x.clone()
    x[FEDERATION.train[3]] = torch.nan
    broken = dataclasses.replace(FEDERATION, x=x)
    rejected = 0
    with engine(SCAFFOLD(eta_l=0.2, option=option), broken, "quadratic",
                **settings(3, cohort=4, drop=0.3)) as e:
        for _ in range(25):
            [report] = e.play()
            rejected += len(report.rejected)
            close(e.server.c, e.states().mean(0), 1e-14)
        assert rejected > 5
        assert torch.equal(e.states()[3], torch.zeros(4, dtype=torch.float64))
        assert (e.states()[[0, 1, 2, 4]].abs().sum(1) > 0).all()


def test_scaffold_s_server_step() -> None:
    """x moves by eta_g times the plain mean of y_i - x, whatever the clients' sizes."""
    moved = {}
    for eta_g in (1.0, 0.3):
        with engine(SCAFFOLD(eta_l=0.2, eta_g=eta_g), FEDERATION, "quadratic", **settings(2)) as e:
            e.play()
            moved[eta_g] = e.server.x.theta
    y = A - torch.einsum("ijk,ik->ij", power(I - 0.2 * H, 2), A)
    close(moved[1.0], y.mean(0), 1e-14)
    close(moved[0.3], 0.3 * y.mean(0), 1e-14)


# -- reductions -----------------------------------------------------------------------------------------


def after(algorithm: Algorithm, federation: Federation, rounds: int, model: Any = "mclr", **train: Any
          ) -> tuple[Any, Any, Any]:
    """Global model, client states and personal models after some rounds (everyone takes part in the last)."""
    with engine(algorithm, federation, model, **train) as e:
        e.play(rounds)
        return e.model, e.states(), e.personal()


@pytest.mark.parametrize("solver", [SGD(lr=0.1), SGD(lr=0.1, momentum=0.8, weight_decay=0.1), Adam(lr=0.05)])
def test_fedprox_without_pull_is_fedavg(solver: Any) -> None:
    local = {"epochs": 2}
    expected = after(FedAvg(solver), ragged(), 3, local=local)
    assert_same(after(FedProx(mu=0.0, solver=solver), ragged(), 3, local=local)[0], expected[0])
    other = after(FedProx(mu=0.5, solver=solver), ragged(), 3, local=local)
    assert (other[0].theta - expected[0].theta).abs().max() > 1e-4


@pytest.mark.parametrize("solver", [SGD(lr=0.1), SGD(lr=0.1, momentum=0.8), Adam(lr=0.05), Proximal(lr=0.1)])
def test_ditto_without_pull_is_localtrain_beside_fedavg(solver: Any) -> None:
    with engine(Ditto(lam=0.0, solver=solver), ragged(), cohort=3) as e, \
         engine(LocalTrain(solver), ragged(), cohort=3) as alone, \
         engine(FedAvg(solver), ragged(), cohort=3) as average:
        for each in (e, alone, average):
            each.play(5)
        assert_same(e.states(), alone.states())
        assert_same(e.model, average.model)
        assert alone.training.store.took_part(alone.everyone).sum() > 3


def test_fedavg_with_one_full_step_is_gradient_descent_on_the_pooled_loss() -> None:
    """sum_i (n_i / n) (w - lr grad f_i(w)) = w - lr grad of the mean over all rows; by torch alone."""
    federation = ragged()
    rows = federation.train.indices
    with engine(FedAvg(SGD(lr=0.4)), federation, **settings(1)) as e:
        w = e.model.theta.clone().requires_grad_()
        for _ in range(4):
            weight, bias = w[:48].view(3, 16), w[48:]
            outputs = inputs(federation.x[rows], torch.float64).flatten(1) @ weight.T + bias
            [gradient] = torch.autograd.grad(F.cross_entropy(outputs, federation.y[rows]), w)
            w = (w - 0.4 * gradient).detach().requires_grad_()
            e.play()
            close(e.model.theta, w.detach(), 1e-13)


@pytest.mark.thorough
@pytest.mark.parametrize("start", ["theta", "w"])
def test_where_the_inner_steps_of_pfedme_begin(start: Any) -> None:
    """Two local rounds of one inner step each: theta_1 = w - alpha g(w), w_1 = w - eta lam (w - theta_1);
    theta_2 begins at theta_1 or at w_1, with the gradient g(.) + lam (. - w_1)."""
    lam, eta, alpha = 2.0, 0.1, 0.2
    method = pFedMe(lam=lam, eta=eta, alpha=alpha, K=1, start=start)

    def gradient(theta: Tensor) -> Tensor:
        return torch.einsum("ijk,ik->ij", H, theta - A)

    with engine(method, FEDERATION, "quadratic", **settings(2)) as e:
        w = e.server.mean.theta.expand(5, -1)
        theta = w - alpha * gradient(w)
        w = w - eta * lam * (w - theta)
        begin = {"theta": theta, "w": w}[start]
        e.play()
        close(e.personal().theta, begin - alpha * (gradient(begin) + lam * (begin - w)), 1e-12)


@pytest.mark.thorough
def test_the_starts_of_pfedme_coincide_with_one_local_round() -> None:
    for model in ("mclr", batchnorm_net()):
        found = [after(pFedMe(lam=2.0, start=start), ragged(), 3, model, local={"steps": 1})
                 for start in ("theta", "w")]
        assert_same(found[0], found[1])
    found = [after(pFedMe(lam=2.0, start=start), ragged(), 3, local={"steps": 2}) for start in ("theta", "w")]
    assert (found[0][0].theta - found[1][0].theta).abs().max() > 1e-6


def test_aggregation_momentum_overshoots_the_mean() -> None:
    """beta = 2: w + 2 (mean - w); statistics are the mean's, which must not overshoot."""
    with engine(FedAvg(SGD(lr=0.1)), ragged(), batchnorm_net()) as e:
        start = e.server
        e.play()
        mean = e.server
    for algorithm in (FedAvg(SGD(lr=0.1), beta=2.0), FedAvg(SGD(lr=0.1), beta=0.5)):
        with engine(algorithm, ragged(), batchnorm_net()) as e:
            e.play()
            close(e.model.theta, start.theta + algorithm.beta * (mean.theta - start.theta), 1e-15)
            assert torch.equal(e.server.stats, mean.stats)


@both_weights
@pytest.mark.parametrize("make", [FedAvg, FedProx, Ditto, pFedMe])
def test_models_and_statistics_are_averaged_with_the_same_weights(make: Callable[..., Algorithm], weights: Any
                                                                 ) -> None:
    federation = ragged()
    sizes = torch.tensor([9.0, 5, 1, 7, 3], dtype=torch.float64)
    p = sizes / 25 if weights == "samples" else torch.full((5,), 1 / 5, dtype=torch.float64)
    algorithm = make(weights=weights)
    with engine(algorithm, federation, batchnorm_net()) as e:
        message = algorithm.broadcast(e.server, e.training.round_of(e.everyone))
        result = e.backend.run("local", e.everyone, 1, message, e.states())
        e.play()
        uploaded = getattr(result.values.upload, "model", result.values.upload)
        close(e.model.theta, (p[:, None] * uploaded.theta).sum(0), 1e-14)
        close(e.model.stats, (p[:, None] * uploaded.stats).sum(0), 1e-14)
        assert uploaded.stats.std(0).min() > 0  # the clients' statistics differ


# -- the proximal solver -----------------------------------------------------------------------------


@pytest.mark.parametrize("lam", [0.5, 20.0, 1e6])
def test_the_proximal_solver_converges_for_any_strength_of_the_prior(lam: float) -> None:
    """To (H_i + lam)^-1 (H_i a_i + lam w): the error shrinks by (I - lr H_i) / (1 + lr lam) < 0.84 a step."""
    w = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    expected = torch.linalg.solve(H + lam * I, torch.einsum("ijk,ik->ij", H, A) + lam * w)
    theta = torch.zeros_like(A)
    for _ in range(200):
        gradient = torch.einsum("ijk,ik->ij", H, theta - A)
        theta, _ = Proximal(lr=0.8).step(theta, gradient, Gaussian(w, lam), ())
    close(theta, expected, 1e-9)


@pytest.mark.thorough
def test_a_strong_prior_needs_the_proximal_solver() -> None:
    """lam = 1e6: SGD multiplies the distance to w by |1 - lr (h + lam)| = 8e5 a step; Proximal stays at w."""
    with engine(Ditto(lam=1e6, solver=SGD(lr=0.8)), FEDERATION, "quadratic", **settings(2)) as e:
        e.play(3)
        assert e.states().theta.abs().min() > 1e10
    with engine(Ditto(lam=1e6, solver=Proximal(lr=0.8)), FEDERATION, "quadratic", **settings(2)) as e:
        e.play(60)
        close(e.states().theta, e.model.theta.expand(5, 4), 1e-5)


# -- clients that never took part ----------------------------------------------------------------------


def test_what_newcomers_predict_with() -> None:
    """From the server's w, one round's local work: LocalTrain E steps from the initial model, FedAvg w itself
    or the fine-tuned w, Ditto its personal problem, pFedMe the theta of a round."""
    w0 = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    steps, lr, lam = 3, 0.5, 0.9
    descended = A + torch.einsum("ijk,ik->ij", power(I - lr * H, steps), w0 - A)
    target = torch.linalg.solve(H + lam * I, torch.einsum("ijk,ik->ij", H, A) + lam * w0)
    pulled = target + torch.einsum("ijk,ik->ij", power(I - lr * (H + lam * I), steps), w0 - target)
    prox = torch.einsum("ijk,ik->ij", ENVELOPE, A) + torch.einsum("ijk,k->ij", I - ENVELOPE, w0)
    cases: list[tuple[Algorithm, Tensor]] = [
        (LocalTrain(SGD(lr=lr)), descended),
        (FedAvg(SGD(lr=lr)), w0.expand(5, 4)),
        (FedAvg(SGD(lr=lr), finetune=steps), descended),
        (FedProx(mu=lam, solver=SGD(lr=lr)), w0.expand(5, 4)),
        (Ditto(lam=lam, solver=SGD(lr=lr)), pulled),
        (pFedMe(**EXACT, eta=1e-300), prox),  # w_i does not move: theta is prox(w0)
        (SCAFFOLD(eta_l=lr), w0.expand(5, 4)),
    ]
    for algorithm, expected in cases:
        with engine(algorithm, FEDERATION, "quadratic", **settings(steps)) as e:
            model = Model(w0, torch.zeros(0, dtype=torch.float64))
            facts = e.training.round_of(e.everyone)
            server = algorithm.init_server(e.training.work.task, model, facts)
            outcome = e.backend.run("adapt", e.everyone, 0, algorithm.newcomer(server, facts), e.states())
            close(outcome.values.theta, expected, 1e-11)
            assert np.array_equal(outcome.done, e.everyone)

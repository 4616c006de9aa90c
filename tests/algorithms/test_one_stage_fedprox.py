"""One-stage FedProx reaches the closed-form solution of its objective, at the speed that its theory tells.

Client i has L_i(w) = (w - a_i)' H_i (w - a_i) / 2 with eigenvalues of H_i from mu = 0.2 to L = 1, every row
alike, so that the gradient H_i (w - a_i) of any batch is exact. Everything is in float64.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from descant.algorithms import GlobalTrain, OneStageFedProx, pFedMe
from descant.core.vector import Model
from descant.errors import UsageError
from descant.priors.precision import Adaptive, LearnedVariance
from descant.theory import moreau
from helpers import Engine, batchnorm_net, engine, quadratics, ragged, unbalanced

SIZES = (9, 1, 4, 2, 6)
FEDERATION = unbalanced(quadratics(5, rows=12), SIZES)
H, A = FEDERATION.truth["H"], FEDERATION.truth["optima"]  # [clients, d, d], [clients, d]
L, MU = 1.0, 0.2
I = torch.eye(4, dtype=torch.float64)  # noqa: E741 (the identity)
WEIGHTS = {"samples": torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES),
           "uniform": torch.full((5,), 1 / 5, dtype=torch.float64)}
OWN = (0.2, 1.5, 0.6, 3.0, 0.9)  # a lam for each client
FULL = {"batch": "full", "local": {"steps": 1}, "backend": "vectorised", "chunk": 5}
MINIBATCH = {"batch": 2, "local": {"steps": 3}, "backend": "vectorised", "chunk": 5}


def close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


class Solution(NamedTuple):
    w_g: Tensor
    w_i: Tensor


def prox(lam: Tensor, w_g: Tensor) -> Tensor:
    """argmin_w L_i(w) + lam_i/2 ||w - w_g||^2 = (H_i + lam_i)^-1 (H_i a_i + lam_i w_g), for every client."""
    right = torch.einsum("ijk,ik->ij", H, A) + lam[:, None] * w_g
    return torch.linalg.solve(H + lam[:, None, None] * I, right)


def solution(lam: float | tuple[float, ...], p: Tensor) -> Solution:
    """Where both gradients vanish. w_i = prox_i(w_g) means lam_i (w_g - w_i) = lam_i A_i (w_g - a_i) with
    A_i = H_i (H_i + lam_i)^-1, and sum_i p_i lam_i (w_g - w_i) = 0 makes
    w_g = (sum_i p_i lam_i A_i)^-1 sum_i p_i lam_i A_i a_i."""
    each = torch.tensor(lam, dtype=torch.float64).expand(5)
    pull = (p * each)[:, None, None] * torch.linalg.solve(H + each[:, None, None] * I, H)
    w_g = torch.linalg.solve(pull.sum(0), torch.einsum("ijk,ik->j", pull, A))
    return Solution(w_g, prox(each, w_g))


def begin_at(e: Engine, w_g: Tensor) -> None:
    e.training.server = e.server._replace(mean=Model(w_g, e.model.stats))


# -- the fixed point ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weights", "lam", "form"), [  # any two of them together
    ("uniform", 0.7, "full gradients"), ("uniform", OWN, "minibatches"),
    ("samples", 0.7, "minibatches"), ("samples", OWN, "full gradients")])
@pytest.mark.thorough
def test_both_models_reach_the_closed_form(weights: Any, lam: Any, form: str) -> None:
    """K = 3 full gradients, or 3 batches with one step each: the fixed point depends on neither, because the
    w_i go on from where they were. eta (L + lam_i) < 2 for every client."""
    expected = solution(lam, WEIGHTS[weights])
    train, K = (FULL, 3) if form == "full gradients" else (MINIBATCH, 1)
    algorithm = OneStageFedProx(lam=lam, eta=0.45 if lam == OWN else 0.7, K=K, weights=weights)
    with engine(algorithm, FEDERATION, "quadratic", **train) as e:
        e.play(80 if lam == OWN else 50)
        close(e.model.theta, expected.w_g, 1e-6)
        close(e.personal().theta, expected.w_i, 1e-6)
    other = solution(lam, WEIGHTS["samples" if weights == "uniform" else "uniform"])
    assert (other.w_g - expected.w_g).norm() > 0.01
    if lam == OWN:
        assert (solution(float(np.mean(OWN)), WEIGHTS[weights]).w_g - expected.w_g).norm() > 0.01


@pytest.mark.thorough
@pytest.mark.parametrize(("lam", "gamma"), [(0.7, 2.0), *(
    pytest.param(OWN, gamma, marks=pytest.mark.slow) for gamma in (0.9, 1.2))])
def test_the_fixed_point_does_not_depend_on_gamma(lam: Any, gamma: float) -> None:
    expected = solution(lam, WEIGHTS["uniform"])
    algorithm = OneStageFedProx(lam=lam, eta=0.45 if lam == OWN else 0.7, K=3, gamma=gamma)
    with engine(algorithm, FEDERATION, "quadratic", **FULL) as e:
        e.play(75)
        close(e.model.theta, expected.w_g, 1e-6)
        close(e.personal().theta, expected.w_i, 1e-6)


def test_without_pull_every_client_is_alone() -> None:
    """lam -> 0: A_i -> H_i H_i^-1 = I, so that w_i = a_i + O(lam) and w_g = sum_i p_i a_i + O(lam)."""
    algorithm = OneStageFedProx(lam=1e-7, eta=0.9, K=10, weights="samples")
    with engine(algorithm, FEDERATION, "quadratic", **FULL) as e:
        e.play(10)
        close(e.personal().theta, A, 1e-6)
        close(e.model.theta, WEIGHTS["samples"] @ A, 1e-6)


@pytest.mark.slow
def test_with_a_strong_pull_all_clients_agree_on_globaltrain() -> None:
    """lam -> inf: lam A_i -> H_i, so that w_g and all w_i are (sum_i H_i)^-1 sum_i H_i a_i + O(1 / lam): ten
    times the pull, a tenth of the distance. The same model that GlobalTrain's own run finds."""
    with engine(GlobalTrain(lr=0.9, momentum=0.0, weights="uniform"), FEDERATION, "quadratic", **FULL) as e:
        e.play(60)
        together = e.model.theta
    close(together, FEDERATION.truth["global"], 1e-9)
    distances = []
    for lam in (1e3, 1e4):
        algorithm = OneStageFedProx(lam=lam, eta=1 / (L + lam), gamma=0.9, K=2)
        with engine(algorithm, FEDERATION, "quadratic", **FULL) as e:
            e.play(60)
            close(e.model.theta, solution(lam, WEIGHTS["uniform"]).w_g, 1e-6)
            distances.append([float((w - together).norm()) for w in (e.model.theta, *e.personal().theta)])
    ratio = np.array(distances[0]) / distances[1]
    np.testing.assert_allclose(ratio, 10, rtol=0.02)
    assert max(distances[1]) < 1e-3


# -- what one round does ------------------------------------------------------------------------------------


def test_a_round_from_the_client_s_own_model() -> None:
    """With v_i = prox_i(w_g), K steps make w_i = v_i + (I - eta (H_i + lam))^K (w_i - v_i), from the w_i of
    the round before; the server then makes w_g = (1 - gamma lam) w_g + gamma lam sum_i p_i w_i."""
    lam, eta, gamma, K = 0.5, 0.3, 1.4, 3
    p, w_g = WEIGHTS["samples"], torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    shrink = torch.linalg.matrix_power(I - eta * (H + lam * I), K)
    w_i = torch.zeros(5, 4, dtype=torch.float64)  # the initial model of the quadratics
    algorithm = OneStageFedProx(lam=lam, eta=eta, gamma=gamma, K=K, weights="samples")
    with engine(algorithm, FEDERATION, "quadratic", **FULL) as e:
        begin_at(e, w_g)
        for _ in range(3):
            e.play()
            v = prox(torch.full((5,), lam, dtype=torch.float64), w_g)
            w_i = v + torch.einsum("ijk,ik->ij", shrink, w_i - v)
            w_g = (1 - gamma * lam) * w_g + gamma * lam * (p @ w_i)
            close(e.states().theta, w_i, 1e-13)
            close(e.personal().theta, w_i, 1e-13)
            close(e.model.theta, w_g, 1e-13)


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_without_gamma_the_global_model_is_the_mean(weights: Any) -> None:
    """gamma = 1 / lam; with lam_i, gamma = 1 / sum_i p_i lam_i and the mean is that by p_i lam_i."""
    p = WEIGHTS[weights]
    found = []
    for gamma in (None, 1 / 0.7):
        algorithm = OneStageFedProx(lam=0.7, eta=0.3, K=2, gamma=gamma, weights=weights)
        with engine(algorithm, FEDERATION, "quadratic", **FULL) as e:
            e.play(3)
            close(e.model.theta, p @ e.states().theta, 1e-13)
            found.append(e.model.theta)
    close(found[0], found[1], 1e-13)
    pull = p * torch.tensor(OWN, dtype=torch.float64)
    found = []
    for gamma in (None, 1 / float(pull.sum())):
        algorithm = OneStageFedProx(lam=OWN, eta=0.3, K=2, gamma=gamma, weights=weights)
        with engine(algorithm, FEDERATION, "quadratic", **FULL) as e:
            e.play(3)
            close(e.model.theta, pull @ e.states().theta / pull.sum(), 1e-13)
            found.append(e.model.theta)
    close(found[0], found[1], 1e-13)


def test_the_server_s_step_with_own_lam() -> None:
    """w_g - gamma sum_i p_i lam_i (w_g - w_i), term by term."""
    gamma, w_g = 0.4, torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    algorithm = OneStageFedProx(lam=OWN, eta=0.3, K=2, gamma=gamma, weights="samples")
    with engine(algorithm, FEDERATION, "quadratic", **FULL) as e:
        begin_at(e, w_g)
        e.play()
        step = sum(p * lam * (w_g - w_i) for p, lam, w_i
                   in zip(WEIGHTS["samples"], OWN, e.states().theta, strict=True))
        close(e.model.theta, w_g - gamma * step, 1e-14)


@pytest.mark.parametrize("lam", [0.7, OWN], ids=["one lam", "lam_i"])
def test_absent_clients_keep_their_models_and_do_not_count(lam: Any) -> None:
    p, each = WEIGHTS["samples"], torch.tensor(lam, dtype=torch.float64).expand(5)
    algorithm = OneStageFedProx(lam=lam, eta=0.2, K=2, weights="samples")
    with engine(algorithm, FEDERATION, "quadratic", **FULL, cohort=2) as e:
        seen = set()
        for _ in range(8):
            before = e.states().theta.clone()
            e.play()
            came = np.flatnonzero(e.training.store.last_round == e.training.number)
            away = np.setdiff1d(e.everyone, came)
            assert len(came) == 2
            assert torch.equal(e.states().theta[away], before[away])
            assert (e.states().theta[came] != before[came]).any(1).all()
            pull = p[came] * each[came]
            close(e.model.theta, pull @ e.states().theta[came] / pull.sum(), 1e-13)
            seen |= set(came)
        assert len(seen) == 5


def test_statistics_are_averaged_as_the_models_are() -> None:
    """BatchNorm's running statistics follow the weights p_i lam_i; gamma never extrapolates them."""
    pull = torch.tensor(OWN, dtype=torch.float64)
    for gamma in (None, 3.0):
        with engine(OneStageFedProx(lam=OWN, gamma=gamma), ragged(), batchnorm_net()) as e:
            e.play(2)
            close(e.model.stats, pull @ e.states().stats / pull.sum(), 1e-13)
            assert (e.model.stats[-6:] > 0).all()


@pytest.mark.thorough
def test_with_a_weight_decay_the_losses_have_a_ridge() -> None:
    """L_i(w) + r/2 ||w||^2 = (w - b_i)' (H_i + r) (w - b_i) / 2 + const with b_i = (H_i + r)^-1 H_i a_i: the
    closed form with H_i + r and b_i. The local steps of a newcomer have it too."""
    r, lam, eta = 0.3, 0.7, 0.5
    ridged = H + r * I
    b = torch.linalg.solve(ridged, torch.einsum("ijk,ik->ij", H, A))
    A_i = torch.linalg.solve(ridged + lam * I, ridged)
    w_g = torch.linalg.solve(A_i.sum(0), torch.einsum("ijk,ik->j", A_i, b))
    algorithm = OneStageFedProx(lam=lam, eta=eta, K=3, weight_decay=r)
    with engine(algorithm, FEDERATION, "quadratic", **FULL) as e:
        e.play(60)
        close(e.model.theta, w_g, 1e-6)
        close(e.personal().theta, w_g + torch.einsum("ijk,ik->ij", A_i, b - w_g), 1e-6)
        message = algorithm.newcomer(e.server, e.training.round_of(e.everyone))
        found = e.backend.run("adapt", e.everyone, 4, message, e.states()).values.theta
        v = e.model.theta + torch.einsum("ijk,ik->ij", A_i, b - e.model.theta)
        shrink = torch.linalg.matrix_power(I - eta * (ridged + lam * I), 3)
        close(found, v + torch.einsum("ijk,ik->ij", shrink, e.model.theta - v), 1e-13)
    assert (solution(lam, WEIGHTS["uniform"]).w_g - w_g).norm() > 0.1


def test_a_newcomer_does_the_work_of_a_round_from_the_global_model() -> None:
    algorithm = OneStageFedProx(lam=0.7, eta=0.3, K=3)
    with engine(algorithm, FEDERATION, "quadratic", **FULL, cohort=2) as e:
        e.play(4)
        message = algorithm.newcomer(e.server, e.training.round_of(e.everyone))
        found = e.backend.run("adapt", e.everyone, 4, message, e.states()).values
        v = prox(torch.full((5,), 0.7, dtype=torch.float64), e.model.theta)
        shrink = torch.linalg.matrix_power(I - 0.3 * (H + 0.7 * I), 3)
        close(found.theta, v + torch.einsum("ijk,ik->ij", shrink, e.model.theta - v), 1e-13)


def test_with_exact_solutions_it_is_pfedme_with_one_local_round() -> None:
    """pFedMe with R = 1 and eta lam = 1 uploads theta_i = prox_i(w), so that both servers take the mean of
    the same proximal points. alpha = eta = 0.7 and K = 40 solve to (1 - 0.7 * 0.9)^40 = 5e-18."""
    lam = 0.7
    with engine(OneStageFedProx(lam=lam, eta=0.7, K=40), FEDERATION, "quadratic", **FULL) as ours, \
         engine(pFedMe(lam=lam, eta=1 / lam, alpha=0.7, K=40, weights="uniform"), FEDERATION, "quadratic",
                **FULL) as theirs:
        for _ in range(5):
            ours.play()
            theirs.play()
            close(ours.model.theta, theirs.model.theta, 1e-12)
            close(ours.personal().theta, theirs.personal().theta, 1e-12)


# -- how fast -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [None, 0.8, 2.0])
@pytest.mark.parametrize("lam", [0.1, 0.7, 4.0])
def test_the_linear_rate_is_the_spectral_one(lam: float, gamma: float | None) -> None:
    """With w_i = prox_i(w_g), w_g - solution is multiplied by I - gamma mean_i lam H_i (H_i + lam)^-1, which
    is symmetric: in the end it shrinks by the spectral radius. It begins near the slowest direction, so that
    the end is soon. eta is the best for curvatures from lam + mu to lam + L, and the proximal points are then
    exact to ((L - mu) / (2 lam + L + mu))^K < 3e-5."""
    values, vectors = torch.linalg.eigh(lam * torch.linalg.solve(H + lam * I, H).mean(0))
    factors = (1 - (1 / lam if gamma is None else gamma) * values).abs()
    slowest = vectors[:, factors.argmax()]
    expected = solution(lam, WEIGHTS["uniform"]).w_g
    algorithm = OneStageFedProx(lam=lam, eta=2 / (2 * lam + L + MU), K=19, gamma=gamma)
    with engine(algorithm, FEDERATION, "quadratic", **FULL) as e:
        begin_at(e, expected + 100 * slowest + torch.tensor([3.0, -5.0, 4.0, 8.0], dtype=torch.float64))
        errors = []
        for _ in range(8):
            e.play()
            errors.append(float((e.model.theta - expected).norm()))
    measured = np.array(errors[4:]) / np.array(errors[3:-1])
    np.testing.assert_allclose(measured, float(factors.max()), rtol=0.05)


MILD = quadratics(5, kappa=2.0)  # eigenvalues from 0.5 to 1, so that few rounds are enough
START = torch.tensor([0.5, -1.0, 2.0, 1.5], dtype=torch.float64)
EPS = 1e-5


class Path(NamedTuple):
    """A run with steps = "theory" on MILD, until the rounds that Corollary 1 predicts for EPS are over."""

    error: list[float]  # ||w_g - solution||^2, as each round begins
    potential: list[float]  # of Theorem 2: this + c_1 e, where e is the clients' lag in the round
    local: list[float]  # the largest ||w_i - solution||^2, as each round ends
    c_1: float


@cache
def path(lam: float) -> Path:
    h, a = MILD.truth["H"], MILD.truth["optima"]
    A_i = torch.linalg.solve(h + lam * I, h)
    w_g = torch.linalg.solve(A_i.sum(0), torch.einsum("ijk,ik->j", A_i, a))

    def prox_at(w: Tensor) -> Tensor:
        return w + torch.einsum("ijk,ik->ij", A_i, a - w)

    found = Path([], [], [], moreau.lag_weight(lam, 1.0, 0.5, *moreau.corollary_steps(lam, 1.0, 0.5)))
    rounds = 1
    with engine(OneStageFedProx(lam=lam, steps="theory", L=1.0, mu=0.5), MILD, "quadratic", **FULL) as e:
        begin_at(e, START)
        while len(found.error) <= rounds:
            before = e.model.theta
            e.play()
            lag = float((e.states().theta - prox_at(before)).square().sum(1).mean())
            found.error.append(float((before - w_g).square().sum()))
            found.potential.append(found.error[-1] + found.c_1 * lag)
            found.local.append(float((e.states().theta - prox_at(w_g)).square().sum(1).max()))
            rounds = moreau.predicted_rounds(lam, 1.0, 0.5, EPS, start=found.potential[0])
    return found


LAMS = (0.05, 0.5, 5.0)


@pytest.mark.thorough
@pytest.mark.parametrize("lam", LAMS)
def test_no_round_is_slower_than_theorem_2(lam: float) -> None:
    rate = moreau.rate(moreau.corollary_steps(lam, 1.0, 0.5).gamma, moreau.constants(lam, 1.0, 0.5).mu_g)
    potential = path(lam).potential
    assert len(potential) > 20
    assert all(new <= rate * old for old, new in pairwise(potential))


@pytest.mark.parametrize("lam", LAMS)
@pytest.mark.thorough
def test_the_rounds_of_corollary_1_are_enough(lam: float) -> None:
    """Both models are within EPS of the solution after the predicted rounds: the local ones by (123) and
    e_i <= m e: ||w_i - solution||^2 <= 2 m e + 2 L_w^2 ||w_g - solution||^2, at most 2 m / c_1 + 2 times the
    potential."""
    error, _, local, c_1 = path(lam)
    assert error[-1] <= EPS
    assert local[-1] <= (2 * 5 / c_1 + 2) * EPS
    assert error[len(error) // 5] > EPS  # of the right order: a fifth of them is not enough


@pytest.mark.thorough
def test_a_stronger_pull_takes_more_rounds_and_fewer_local_steps() -> None:
    """Corollary 1, measured: the first round with ||w_g - solution||^2 <= EPS."""
    measured = [next(t for t, error in enumerate(path(lam).error) if error <= EPS) for lam in LAMS]
    assert measured[0] < measured[1] < measured[2]
    local = [OneStageFedProx(lam=lam, steps="theory", L=1.0, mu=0.5).schedule().K for lam in LAMS]
    assert local[0] > local[1] > local[2]


# -- with rules for lam -------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("gamma", [None, 0.9])
def test_with_a_learned_variance_all_three_parts_agree(gamma: float | None) -> None:
    """At the fixed point lam is a vector, 1 / (s + c): w_i solves the client's problem with it, w_g is the
    mean, and s is the stationary point for the spread of the w_i."""
    rule = LearnedVariance(c=0.5, epsilon=0.05)
    with engine(OneStageFedProx(lam=rule, eta=0.6, K=3, gamma=gamma), FEDERATION, "quadratic", **FULL) as e:
        e.play(60)
        w_i, w_g, s = e.states().theta, e.model.theta, e.server.pull
    assert s.max() > 2 * s.min()  # not the same for all coordinates
    P = torch.diag(1 / (s + 0.5))
    right = torch.einsum("ijk,ik->ij", H, A) + P @ w_g
    close(w_i, torch.linalg.solve(H + P, right), 1e-6)
    close(w_g, w_i.mean(0), 1e-6)
    V = (w_i - w_g).square().mean(0)
    close(s * (s + 0.5) ** 2, V / (4 * 0.05), 1e-6)


@pytest.mark.slow
def test_with_an_adaptive_lam_it_reaches_the_solution_for_the_lam_chosen() -> None:
    """Also of each client's own: objective (18) with the lam_i that the rule has found."""
    for per_client in (False, True):
        rule = Adaptive(pilot=0.5, rounds=4, c=2.0, cap=4.0, per_client=per_client)
        with engine(OneStageFedProx(lam=rule, eta=0.35, K=3), FEDERATION, "quadratic", **FULL) as e:
            e.play(110)
            lam = tuple(e.server.pull.lam.expand(5).tolist())
            assert len(set(lam)) == (5 if per_client else 1)
            assert 0.5 not in lam
            expected = solution(lam, WEIGHTS["uniform"])
            close(e.model.theta, expected.w_g, 1e-6)
            close(e.personal().theta, expected.w_i, 1e-6)


# -- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fields", "message"), [
    ({"steps": "theory"}, "needs L and mu"),
    ({"steps": "theory", "L": 1.0}, "needs L and mu"),
    ({"steps": "theory", "L": 1.0, "mu": 0.1, "lam": OWN}, "one number for lam"),
    ({"steps": "theory", "L": 1.0, "mu": 0.1, "lam": Adaptive()}, "one number for lam"),
    ({"steps": "theory", "L": 1.0, "mu": 0.1, "eta": 0.2}, "leave out eta, or use steps"),
    ({"steps": "theory", "L": 1.0, "mu": 0.1, "gamma": 2.0, "K": 5}, "leave out gamma, K, or use steps"),
    ({"L": 0.1, "mu": 0.2}, "mu = 0.2 is greater than L = 0.1"),
    ({"lam": 0.0}, "one_stage_fedprox.lam must be greater than 0"),
    ({"lam": (0.1, 0.0)}, r"one_stage_fedprox.lam\[1\] must be greater than 0"),
    ({"gamma": 0.0}, "one_stage_fedprox.gamma must be greater than 0"),
    ({"gamma": "1/lam"}, "one_stage_fedprox.gamma must be"),
])
def test_bad_input(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        OneStageFedProx(**fields)


def test_a_list_of_lam_needs_one_for_each_client() -> None:
    with pytest.raises(UsageError, match="lam is a list of 3 numbers for 5 clients"), \
         engine(OneStageFedProx(lam=(0.1, 0.2, 0.3)), FEDERATION, "quadratic", **FULL):
        pass


def test_cautions() -> None:
    """Each with its bound, and none where the bound is kept."""
    assert OneStageFedProx().cautions() == []
    assert OneStageFedProx(lam=0.5, steps="theory", L=1.0, mu=0.1).cautions() == []
    [caution] = OneStageFedProx(lam=30.0, eta=0.1).cautions()
    assert "eta < 2 / (L + lam), at most 0.0666667" in caution
    [caution] = OneStageFedProx(lam=3.0, eta=0.5, L=1.0).cautions()
    assert "eta < 2 / (L + lam) = 0.5" in caution
    assert OneStageFedProx(lam=3.0, eta=0.49, L=1.0).cautions() == []
    [caution] = OneStageFedProx(lam=0.5, gamma=3.0, L=1.0).cautions()  # 1 / L_g = 1 / lam + 1 / L = 3
    assert "gamma < 1 / L_g = 3" in caution
    assert OneStageFedProx(lam=0.5, gamma=2.99, L=1.0).cautions() == []
    enough = moreau.corollary_steps(0.5, 1.0, 0.1).K
    [caution] = OneStageFedProx(lam=0.5, K=enough - 1, L=1.0, mu=0.1).cautions()
    assert f"K times the local steps of a round must be at least {enough}, on full batches" in caution
    assert OneStageFedProx(lam=0.5, K=enough, L=1.0, mu=0.1).cautions() == []
    [caution] = OneStageFedProx(lam=(0.5, 3.0), eta=0.5, K=1, L=1.0, mu=0.1).cautions()
    assert "lam = 3" in caution


def test_a_step_that_is_cautioned_against_diverges() -> None:
    """eta (L + lam) > 2 at the largest curvature: the bound of the caution is the true one on quadratics."""
    for eta, grows in ((1.15, False), (1.25, True)):  # 2 / (1 + 0.666...) = 1.2
        algorithm = OneStageFedProx(lam=2 / 3, eta=eta, K=10, L=L)
        assert bool(algorithm.cautions()) == grows
        with engine(algorithm, FEDERATION, "quadratic", **FULL) as e:
            e.play(4)  # 40 steps: 1.083^40 = 25, and 0.917^40 = 0.03
            assert (float(e.states().theta.abs().max()) > 10) == grows

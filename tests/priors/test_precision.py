"""The rules for the precision of a Gaussian prior do what their formulas say, alone and in the methods."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from descant.algorithms import Ditto, FedProx, OneStageFedProx, pFedMe
from descant.core.algorithm import Algorithm, Message, Round
from descant.core.tree import take
from descant.core.vector import Model
from descant.errors import UsageError
from descant.priors.adaptive import practical_lambda, theorem_lambda
from descant.priors.belief import Upload
from descant.priors.gaussian import Counted, Descend, GaussianBelief, GaussianState
from descant.priors.precision import (
    Adaptive,
    Fixed,
    LearnedVariance,
    PerClient,
    Precision,
    as_rule,
    overshooting,
    stationary_s,
    unstable,
)
from descant.priors.solve import SGD
from helpers import Engine, assert_same, engine, finite_differences, quadratics, unbalanced

SIZES = (9, 1, 4, 2, 6)
FEDERATION = unbalanced(quadratics(5, rows=12), SIZES)
FULL = {"batch": "full", "local": {"steps": 2}, "backend": "vectorised", "chunk": 5}


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def facts(number: int, cohort: tuple[int, ...] = (0, 1, 2), sizes: tuple[float, ...] = (10.0, 20.0, 30.0),
          population: int = 4) -> Round:
    return Round(0, number, torch.tensor(cohort), vector(*sizes), population)


# -- lambda from the heterogeneity --------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "c"), [(200.0, 5.0), (3.0, 0.7)])
def test_the_practical_rule(n: float, c: float) -> None:
    """c / (n R^2) from R = 1/sqrt(n) on, c / (sqrt(n) R) below it: both are c there, and both fall in R."""
    edge = 1 / math.sqrt(n)
    assert practical_lambda(2 * edge, n, c=c).lam == pytest.approx(c / 4)
    assert practical_lambda(edge / 2, n, c=c).lam == pytest.approx(c * 2)
    for R in (edge * (1 - 1e-9), edge, edge * (1 + 1e-9)):
        assert practical_lambda(R, n, c=c).lam == pytest.approx(c, rel=1e-8)
    lams = [practical_lambda(R, n, c=c).lam for R in np.geomspace(1e-3, 1e3, 50)]
    assert lams == sorted(lams, reverse=True)


def test_the_cap_is_told() -> None:
    assert practical_lambda(0.5, 100, cap=10.0) == (0.2, 0.2, False)
    assert practical_lambda(1e-4, 100, cap=10.0) == (10.0, pytest.approx(5000), True)
    assert practical_lambda(0.0, 100, cap=10.0) == (10.0, math.inf, True)
    assert theorem_lambda(0.0, 100, 1000, L=1.0, mu=0.1, rho=2.0, cap=10.0).capped
    assert theorem_lambda(0.0, 100, 1000, L=1.0, mu=0.1, rho=2.0).wanted > 6000


def test_the_theorem_s_rule_keeps_to_what_the_proof_needs() -> None:
    """(81): lam <= rho^2 / (n mu R^2) where R > 1/sqrt(n), elsewhere lam >= a_1 (54) and a_2 (75). The rule
    is the simplification (82), which must not ask for less than these."""
    jumps = 0
    grid = itertools.product(np.geomspace(1e-4, 10, 12), (2.0, 50.0), (3, 30000), (1.0, 3.0, 20.0),
                             (0.1, 1.0), (0.05, 4.0))
    for R, n, m, L, mu, rho in grid:
        N, kappa = n * m, L / mu
        lam = theorem_lambda(R, n, N, L=L, mu=mu, rho=rho).lam
        if math.sqrt(n) * R > 1:
            assert lam == pytest.approx(rho**2 / (n * mu * R**2))
            continue
        spread = (2 * (L * R) ** 2 + rho**2 / n) / (4 * rho**2 / (mu**2 * N) + 4 * (kappa * R) ** 2)
        a_1 = 8 * kappa / mu * max(8 * L**2, spread) - mu
        above = 8 * (64 * rho**2 / N + 66 * (L * R) ** 2 + rho**2 / n)
        a_2 = math.sqrt(above / (32 * rho**2 / (mu**2 * N) + 33 * (kappa * R) ** 2)) - mu
        assert lam >= max(a_1, a_2) * (1 - 1e-12)
        # and it is a_1 to rounding where kappa >= 5/2: nothing is given away
        assert kappa < 2.5 or lam == pytest.approx(a_1)
        jumps += lam > 100 * rho**2 / mu  # what the other regime allows at R = 1/sqrt(n)
    assert jumps > 10  # the two regimes do not meet, which is why there is a cap


def evidence(rule: Precision, thetas: Tensor, mean: Tensor) -> Tensor:
    return torch.stack([rule.evidence(theta, mean) for theta in thetas])  # type: ignore[arg-type]


def test_adaptive_chooses_once_from_what_the_pilot_told() -> None:
    """Clients 0, 1, 2 of four were heard of, with n = (10, 20, 30) and the squares (4, 1, 3.5) at last; the
    noise takes 6 / n: (3.4, 0.7, 3.3), of mean 37/15. n is 20 on average: lam = c / (20 R^2)."""
    rule = Adaptive(pilot=0.3, rounds=2, c=8.0, noise=6.0)
    mean = torch.zeros(3, dtype=torch.float64)
    first, last = 7 * torch.eye(3, dtype=torch.float64), torch.diag(vector(2.0, 1.0, math.sqrt(3.5)))
    state = rule.init(mean, facts(0))
    assert rule.value(rule.send(state, facts(1))) == 0.3
    state, report = rule.update(state, evidence(rule, first, mean), facts(1))
    assert report == {"lam": vector(0.3)[0]}
    state, report = rule.update(state, evidence(rule, last, mean), facts(2))
    expected = 8.0 / (20 * 37 / 15)
    assert float(report["lam"]) == pytest.approx(expected, rel=1e-12)
    assert float(report["R"]) == pytest.approx(math.sqrt(37 / 15), rel=1e-12)
    assert report["capped"] == 0
    assert float(rule.value(rule.send(state, facts(3)))) == pytest.approx(expected)
    assert float(rule.value(rule.newcomer(state))) == pytest.approx(expected)
    later, _ = rule.update(state, evidence(rule, 100 * first, mean), facts(3))
    assert_same(later, state)  # set once


def test_adaptive_counts_the_rounds_in_which_it_is_told_something() -> None:
    """Not those of the run: a rule that is made late, or seldom told something, has its whole pilot. The last
    of three rounds tells of client 0 alone, whose square 9 replaces its 1: R^2 = (9 + 1 + 1) / 3."""
    rule = Adaptive(pilot=0.3, rounds=3, c=8.0)
    state = rule.init(torch.zeros(3, dtype=torch.float64), facts(20))
    for number, count in ((21, 1), (25, 2)):
        state, report = rule.update(state, vector(1, 1, 1), facts(number))
        assert report == {"lam": vector(0.3)[0]}
        assert int(state.heard) == count
    state, report = rule.update(state, vector(9), facts(40, cohort=(0,), sizes=(10.0,)))
    assert float(report["lam"]) == pytest.approx(8.0 / (20 * 11 / 3), rel=1e-12)
    later, _ = rule.update(state, vector(1, 1, 1), facts(41))
    assert_same(later, state)


def test_adaptive_for_each_client() -> None:
    """lam_i = c / (n_i R_i^2) = 8 / (34, 14, 99); client 3 was not heard of and has the mean R^2 and n;
    a newcomer is sent the mean of all four."""
    rule = Adaptive(pilot=0.3, rounds=1, c=8.0, noise=6.0, per_client=True)
    mean = torch.zeros(3, dtype=torch.float64)
    state = rule.init(mean, facts(0))
    told = evidence(rule, torch.diag(vector(2.0, 1.0, math.sqrt(3.5))), mean)
    state, report = rule.update(state, told, facts(1))
    expected = 8.0 / vector(34, 14, 99, 20 * 37 / 15)
    torch.testing.assert_close(report["lam"], expected, rtol=1e-12, atol=0)
    some = facts(2, cohort=(1, 3), sizes=(20.0, 5.0))
    sent = rule.send(state, some)
    torch.testing.assert_close(sent.each, expected[[1, 3]], rtol=1e-12, atol=0)
    assert rule.value(Message(sent.shared, take(sent.each, 0))) == sent.each[0]
    assert float(rule.value(rule.newcomer(state))) == pytest.approx(float(expected.mean()))


def test_adaptive_counts_the_capped() -> None:
    told = vector(1e-9, 0.0, 4.0)
    for per_client, capped in ((True, 2), (False, 0)):
        rule = Adaptive(rounds=1, cap=3.0, per_client=per_client)
        state = rule.init(torch.zeros(2, dtype=torch.float64), facts(0, population=3))
        state, report = rule.update(state, told, facts(1, population=3))
        assert report["capped"] == capped
        assert float(state.lam.max()) <= 3.0
        assert not per_client or state.lam.tolist()[:2] == [3.0, 3.0]


def test_adaptive_by_the_theorem() -> None:
    """R^2 = 4, n = 20: lam = rho^2 / (n mu R^2); with R = 0 it is the lower end for N = 20 * 4 clients."""
    rule = Adaptive(rule="theorem", rounds=1, L=2.0, mu=0.5, rho=3.0, cap=1e9)
    for square, expected in ((4.0, 9 / (20 * 0.5 * 4)), (0.0, 64 * 16 * 2 - 0.5)):
        state = rule.init(torch.zeros(2, dtype=torch.float64), facts(0))
        state, _ = rule.update(state, vector(square, square, square), facts(1))
        assert float(state.lam) == pytest.approx(expected, rel=1e-12)
        assert float(state.lam) == pytest.approx(
            theorem_lambda(math.sqrt(square), 20, 80, L=2.0, mu=0.5, rho=3.0).lam, rel=1e-12)


def test_the_noise_is_taken_out_without_bias() -> None:
    """theta_i = w*_i + N(0, I sigma^2 / n) and ||w*_i - mean||^2 = R^2 make E||theta_i - mean||^2 =
    R^2 + d sigma^2 / n. With noise = d sigma^2, R is found although the noise is ten times R^2; 3000 clients
    tell it to sqrt(2 / d) / sqrt(3000) = 0.006 (one standard deviation). Without, R would be 1.05."""
    clients, d, n, R2 = 3000, 20, 50, 0.1
    g = torch.Generator().manual_seed(0)
    true = torch.randn(clients, d, generator=g, dtype=torch.float64)
    true = math.sqrt(R2) * true / true.norm(dim=1, keepdim=True)
    theta = true + math.sqrt(1 / d) * torch.randn(clients, d, generator=g, dtype=torch.float64)
    rule = Adaptive(rounds=1, noise=float(n))  # d sigma^2 / n = 1
    everyone = Round(0, 1, torch.arange(clients), torch.full((clients,), float(n)).double(), clients)
    state = rule.init(theta[0], everyone)
    told = evidence(rule, theta, torch.zeros(d, dtype=torch.float64))
    _, report = rule.update(state, told, everyone)
    assert float(report["R"]) ** 2 == pytest.approx(R2, abs=0.024)  # four standard deviations


def test_adaptive_refuses_constants_that_no_loss_has() -> None:
    with pytest.raises(UsageError, match="mu = 2 is greater than L = 1"):
        Adaptive(rule="theorem", mu=2.0)
    with pytest.raises(UsageError, match=r"adaptive\.rho must be greater than 0"):
        Adaptive(rho=0.0)


# -- learned variance ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("c", "epsilon"), [(1.0, 1e-4), (0.01, 1.0), (50.0, 1e-2)])
def test_the_stationary_variance(c: float, epsilon: float) -> None:
    """s (s + c)^2 = V / (4 epsilon), over twenty orders of magnitude of V; no spread, no variance."""
    V = torch.cat([torch.zeros(1), torch.logspace(-10, 10, 41)]).double()
    s = stationary_s(V, c, epsilon)
    torch.testing.assert_close(s * (s + c).square(), V / (4 * epsilon), rtol=1e-12, atol=0)
    assert s[0] == 0
    assert (s.diff() > 0).all()


THETA = torch.tensor([[1.0, 0.2, -3.0], [0.5, 0.1, 4.0], [-2.0, 0.4, 0.3]], dtype=torch.float64)
MEAN, P = vector(0.1, 0.2, 0.3), vector(0.5, 0.2, 0.3)


def objective(s: Tensor, c: float, epsilon: float) -> Tensor:
    """FedMAP, Lemma 1, as a function of s: sum_i p_i R(theta_i), with the epsilon term once."""
    return (P @ (THETA - MEAN).square() / (2 * (s + c)) + epsilon * s.square()).sum()


@pytest.mark.parametrize("c", [1.0, 0.3])
def test_the_learned_variance_minimises_the_printed_objective(c: float) -> None:
    rule = LearnedVariance(c=c, epsilon=0.05)
    s, report = rule.update(vector(1, 1, 1), P @ evidence(rule, THETA, MEAN), facts(1))
    slope = finite_differences(lambda s: objective(s, c, 0.05), s)
    torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0, atol=1e-8)
    for factor in (0.99, 1.01):
        assert objective(factor * s, c, 0.05) > objective(s, c, 0.05)
    torch.testing.assert_close(rule.value(Message(shared=s)), 1 / (s + c))
    assert [float(report["s"][k]) for k in ("least", "median", "most")] == sorted(s.tolist())


def test_its_gradient_form_descends_on_the_same_objective() -> None:
    """One step is s - lr times the gradient, here by finite differences; many reach the exact root. Where the
    gradient would lead below zero, s stays there."""
    exact = LearnedVariance(c=1.0, epsilon=0.05)
    rule = LearnedVariance(c=1.0, epsilon=0.05, lr=0.4)
    told = evidence(rule, THETA, MEAN)
    s = vector(1.0, 0.5, 2.0)
    after, _ = rule.update(s, P @ told, facts(1))
    slope = finite_differences(lambda s: objective(s, 1.0, 0.05), s)
    torch.testing.assert_close(after, s - 0.4 * slope, rtol=0, atol=1e-9)
    for _ in range(600):
        s, _ = rule.update(s, P @ told, facts(1))
    torch.testing.assert_close(s, exact.update(s, P @ told, facts(1))[0], rtol=1e-9, atol=1e-9)
    low, _ = LearnedVariance(lr=1e6).update(vector(1, 1, 1), torch.zeros_like(told[0]), facts(1))
    assert torch.equal(low, torch.zeros(3, dtype=torch.float64))


def test_s_may_start_anywhere_above_minus_c() -> None:
    """Lemma 1's domain: from s < 0 the first step is the gradient's, and leads upwards; the largest
    precision is that of the start."""
    rule = LearnedVariance(c=1.0, epsilon=0.05, s=-0.5, lr=0.1)
    assert rule.upper_bound() == 2.0
    assert LearnedVariance(c=1.0, s=0.0).upper_bound() == 1.0
    s = rule.init(vector(0, 0, 0), facts(0))
    assert torch.equal(s, vector(-0.5, -0.5, -0.5))
    after, _ = rule.update(s, P @ evidence(rule, THETA, MEAN), facts(1))
    slope = finite_differences(lambda s: objective(s, 1.0, 0.05), s)
    torch.testing.assert_close(after, s - 0.1 * slope, rtol=0, atol=1e-8)
    assert (after > s).all()
    for wrong in (-1.0, -3.0):
        with pytest.raises(UsageError, match="must be greater than -c = -1"):
            LearnedVariance(c=1.0, s=wrong)


# -- the pulls together -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [Fixed(0.7), PerClient((0.2, 1.5, 0.6, 3.0)), LearnedVariance(c=0.5),
                                  Adaptive(rounds=1, c=3.0), Adaptive(rounds=1, c=3.0, per_client=True)])
def test_the_pulls_of_a_cohort_together(rule: Precision) -> None:
    """A step of size one on the server is sum_i p_i lam_i (w - w_i), whatever w is; the cohort is part of the
    population, and each lam_i is what that client is sent."""
    round = facts(1, cohort=(0, 1, 3))
    state = rule.init(MEAN, round)
    if not isinstance(rule, Fixed | PerClient):
        told = evidence(rule, THETA, MEAN)
        state, _ = rule.update(state, told if rule.needs_rows else P @ told, round)
    sent = rule.send(state, round)
    lams = [rule.value(Message(sent.shared, take(sent.each, k))) for k in range(3)]
    belief = GaussianBelief(rule, Descend(gamma=1.0), Counted("samples"), "old")
    weights = round.weights("samples")
    for w in (MEAN, vector(5, -3, 1)):
        pulls = sum(p * lam * (w - w_i) for p, lam, w_i in zip(weights, lams, THETA, strict=True))
        uploads = Upload(Model(THETA, torch.zeros(3, 0, dtype=torch.float64)))
        before = GaussianState(Model(w, THETA[0, :0]), state)
        after, _ = belief.update(before, uploads, round)
        torch.testing.assert_close(w - after.mean.theta, pulls, rtol=1e-12, atol=1e-12)


def test_a_number_and_a_list_are_rules_too() -> None:
    assert as_rule(2.0) == Fixed(2.0)
    assert as_rule((1.0, 2.0)) == PerClient((1.0, 2.0))
    rule = Adaptive()
    assert as_rule(rule) is rule


def test_cautions_know_the_largest_lam_of_a_list_and_of_a_rule() -> None:
    """A rule's: the cap of an adaptive lam, and 1 / c, where s = 0, of a learned variance."""
    assert unstable("eta", 0.1, 19.0) == []
    assert "at most 0.1" in unstable("eta", 0.1, (1.0, 20.0))[0]
    assert "with lam up to 100" in unstable("eta", 0.1, Adaptive())[0]
    assert unstable("eta", 0.1, Adaptive(cap=19.0)) == []
    assert "at most 0.05" in unstable("eta", 0.1, Adaptive(cap=1.0, pilot=40.0))[0]
    assert unstable("eta", 1.9, LearnedVariance()) == []
    assert "with lam up to 2" in unstable("eta", 1.0, LearnedVariance(c=0.5))[0]
    assert unstable("eta", None, 50.0) == []
    assert overshooting("eta", 0.1, 10.0) == []
    assert "eta <= 1 / lam = 0.05" in overshooting("eta", 0.1, (1.0, 20.0))[0]
    assert overshooting("eta", 1.0, LearnedVariance()) == []
    assert "eta <= 1 / lam = 1" in overshooting("eta", 10.0, LearnedVariance())[0]


# -- inside the methods -------------------------------------------------------------------------------------


METHODS: dict[str, Any] = {
    "fedprox": lambda lam: FedProx(mu=lam, solver=SGD(lr=0.2)),
    "ditto": lambda lam: Ditto(lam=lam, solver=SGD(lr=0.2)),
    "pfedme": lambda lam: pFedMe(lam=lam, eta=0.1, alpha=0.2, K=2),
    "one_stage_fedprox": lambda lam: OneStageFedProx(lam=lam, eta=0.2, K=2),
}
every_method = pytest.mark.parametrize("method", METHODS)


class Done(NamedTuple):
    model: Model  # what the clients upload, for the average
    state: Any


def work(e: Engine, algorithm: Algorithm, belief: GaussianState, states: Any) -> Done:
    """What all clients do in round 5, if they have these states and the algorithm sends them this belief."""
    with engine(algorithm, FEDERATION, "quadratic", **FULL) as other:
        message = algorithm.broadcast(belief, e.training.round_of(e.everyone))
        done = other.backend.run("local", e.everyone, 5, message, states).values
        return Done(done.upload.model, done.state)


@pytest.mark.parametrize("per_client", [False, True])
@every_method
def test_an_adaptive_lam_is_the_number_that_it_has_come_to(method: str, per_client: bool) -> None:
    """During the pilot it is the run with lam = pilot. Afterwards every client does what it would do with the
    number (the list) that was chosen: at the same mean and states, bit for bit."""
    rule = Adaptive(pilot=0.25, rounds=3, c=2.0, cap=6.0, per_client=per_client)
    adaptive = METHODS[method](rule)
    with engine(adaptive, FEDERATION, "quadratic", **FULL) as e, \
         engine(METHODS[method](0.25), FEDERATION, "quadratic", **FULL) as pilot:
        first = e.play(3)[0]
        pilot.play(3)
        assert_same(e.model, pilot.model, 1e-12)
        assert_same(e.states(), pilot.states(), 1e-12)
        [last] = e.play()
        lam = e.server.pull.lam
        assert torch.equal(first.info["lam"], torch.full_like(lam, 0.25))
        assert torch.equal(last.info["lam"], lam)
        assert len(set(lam.flatten().tolist())) == (5 if per_client else 1)

        number = METHODS[method](tuple(lam.tolist()) if per_client else float(lam))
        pulls = number.belief.precision.init(e.model.theta, e.training.round_of(e.everyone))
        expected = work(e, number, GaussianState(e.model, pulls), e.states())
        found = work(e, adaptive, e.server, e.states())
        assert_same(found, expected)
        # which is something else than with the pilot's; Ditto does not upload the model that is pulled
        weak = work(e, METHODS[method](0.25), GaussianState(e.model, ()), e.states())
        part = "state" if method == "ditto" else "model"
        assert (getattr(found, part).theta - getattr(weak, part).theta).abs().max() > 1e-3


@every_method
def test_a_client_s_own_lam_is_that_of_a_federation_with_this_lam(method: str) -> None:
    """Client i of a run with a list does in a round what it does in one where everyone has lam_i."""
    lams = (0.2, 1.5, 0.6, 3.0, 0.9)
    own = METHODS[method](lams)
    with engine(own, FEDERATION, "quadratic", **FULL) as e:
        e.play(2)
        found = work(e, own, e.server, e.states())
        for k, lam in enumerate(lams):
            alike = work(e, METHODS[method](lam), GaussianState(e.model, ()), e.states())
            assert_same(take(found, k), take(alike, k), 1e-13)


@pytest.mark.parametrize("lams", [(0.1, 0.2), (0.1,) * 6, ()])
@every_method
def test_a_list_of_the_wrong_length(method: str, lams: tuple[float, ...]) -> None:
    with pytest.raises(UsageError, match=f"a list of {len(lams)} numbers for 5 clients"), \
         engine(METHODS[method](lams), FEDERATION, "quadratic", **FULL):
        pass


@every_method
def test_a_learned_variance_pulls_every_coordinate_by_its_own_precision(method: str) -> None:
    """A step on coordinate j is -lr (gradient_j + (theta_j - mean_j) / (s_j + c)): written out for the two
    local steps from theta = mean."""
    H, A = FEDERATION.truth["H"], FEDERATION.truth["optima"]
    rule = LearnedVariance(c=0.5, epsilon=0.05)
    algorithm = METHODS[method](rule)
    with engine(algorithm, FEDERATION, "quadratic", **FULL) as e:
        e.play(2)
        mean, s = e.model.theta, e.server.pull
        assert s.max() > 1.2 * s.min()
        message = algorithm.broadcast(e.server, e.training.round_of(e.everyone))
        theta = mean.expand(5, 4)
        anchored = e.backend.run("adapt", e.everyone, 3, message, e.states()).values.theta
    if method == "fedprox":  # whose newcomers take the global model; its clients do the same from it
        with engine(algorithm, FEDERATION, "quadratic", **FULL) as e:
            anchored = e.backend.run("local", e.everyone, 3, message, e.states()).values.upload.model.theta
    w = mean.expand(5, 4)
    for _ in range(2):  # local steps, of K gradient steps each
        for _ in range(2 if method in ("pfedme", "one_stage_fedprox") else 1):
            gradient = torch.einsum("ijk,ik->ij", H, theta - A)
            theta = theta - 0.2 * (gradient + (theta - w) / (s + 0.5))
        if method == "pfedme":  # whose anchor moves
            w = w - 0.1 / (s + 0.5) * (w - theta)
    torch.testing.assert_close(anchored, theta, rtol=0, atol=1e-12)

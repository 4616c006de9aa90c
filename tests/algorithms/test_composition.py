"""Parts combine: any rule for the precision in any method with a Gaussian prior, any aggregation step in any
method that averages. No class is written for a combination.

Client i has the loss (w - a_i)' H_i (w - a_i) / 2, in float64, as in test_methods.py.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from descant.algorithms import (
    ALGORITHMS,
    APFL,
    CGPFL,
    SCAFFOLD,
    Dichotomous,
    Ditto,
    FedAvg,
    FedMAP,
    FedProx,
    OneStageFedProx,
    PerFedAvg,
    pFedBreD,
    pFedGT,
    pFedMe,
)
from descant.core import fields, tree
from descant.core.algorithm import Algorithm
from descant.core.federation import Federation
from descant.errors import UsageError
from descant.experiment.config import completed, parse_algorithm
from descant.priors.adaptive import practical_lambda
from descant.priors.gaussian import GaussianState
from descant.priors.grouping import KMeans
from descant.priors.precision import Adaptive, FixedVariance, LearnedVariance, stationary_s
from descant.priors.solve import SGD
from helpers import Engine, assert_same, engine, quadratics, ragged, unbalanced

SIZES = (9, 1, 4, 2, 6)
FEDERATION = unbalanced(quadratics(5, rows=12), SIZES)
FULL: dict[str, Any] = {"batch": "full", "local": {"steps": 3}, "backend": "vectorised", "chunk": 5}


def with_rule(name: str, rule: Any) -> Algorithm:
    """A method with a Gaussian prior, with a rule for its precision."""
    solver = SGD(lr=0.3)
    make: dict[str, Callable[[], Algorithm]] = {
        "fedprox": lambda: FedProx(mu=rule, solver=solver),
        "ditto": lambda: Ditto(lam=rule, solver=solver),
        "pfedme": lambda: pFedMe(lam=rule, eta=0.2, alpha=0.3),
        "pfedbred": lambda: pFedBreD(lam=rule, a=0.3, a_m=0.2),
        "one_stage_fedprox": lambda: OneStageFedProx(lam=rule, eta=0.3),
        "cgpfl": lambda: CGPFL(K=1, lam=rule, eta=0.3, beta=0.2),
        "fedmap": lambda: FedMAP(rule, solver, weights="samples"),
    }
    return make[name]()


GAUSSIAN = ["fedprox", "ditto", "pfedme", "pfedbred", "one_stage_fedprox", "cgpfl", "fedmap"]


def precision_state(e: Engine) -> Any:
    """The state of the rule on the server; of the one cluster, where there are clusters."""
    server = e.server
    return server.pull if isinstance(server, GaussianState) else tree.take(server.priors.pull, 0)


def reported_lam(report: Any) -> float:
    """What the rule reported; of the one cluster, where there are clusters."""
    info = report.info.get("priors", [report.info])[0]
    return float(torch.as_tensor(info["lam"]))


def own_thetas(e: Engine) -> Tensor:
    """[clients, d] what the rule is told of: the personal models, or the uploaded where there are none."""
    algorithm = e.training.work.algorithm
    facts = e.training.round_of(e.everyone)
    sent = algorithm.broadcast(e.server, facts)
    outcome = e.backend.run("local", e.everyone, e.training.number + 1, sent, e.states())
    state = outcome.values.state
    if algorithm.name == "fedprox":
        return outcome.values.upload.model.theta
    return (state.theta.theta if hasattr(state.theta, "theta") else state.theta)


@pytest.mark.parametrize("name", GAUSSIAN)
def test_adaptive_lambda_for_any_gaussian_prior(name: str) -> None:
    """Two pilot rounds; the second sets lambda = c / (n R^2) or c / (sqrt(n) R), where R^2 is the mean over
    the clients of ||theta_i - mean||^2 at its end, and n the mean of their sizes."""
    rule = Adaptive(pilot=0.5, rounds=2, c=2.0)
    with engine(with_rule(name, rule), FEDERATION, "quadratic", **FULL) as e:
        [first] = e.play()
        assert reported_lam(first) == 0.5
        mean, thetas = e.model.theta, own_thetas(e)
        [second] = e.play()
        square = (thetas - mean).square().sum(1).mean()
        if name == "fedmap":  # its server measures from the new mean, which it then fits the precision to
            square = (thetas - e.model.theta).square().sum(1).mean()
        expected = practical_lambda(math.sqrt(float(square)), sum(SIZES) / 5, c=2.0).lam
        chosen = precision_state(e).lam
        assert float(chosen) == pytest.approx(expected, rel=1e-10)
        assert abs(expected - 0.5) > 0.05
        assert reported_lam(second) == pytest.approx(expected, rel=1e-10)
        [third] = e.play()  # and stays
        assert float(precision_state(e).lam) == float(chosen)
        assert reported_lam(third) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("name", GAUSSIAN)
def test_an_adaptive_lambda_is_the_same_as_that_number(name: str) -> None:
    """With cap = pilot lambda never changes, and the method is the one with that number, up to rounding (a
    tensor in one case, a number in the other)."""
    runs = []
    fixed = FixedVariance(1 / 0.7) if name == "fedmap" else 0.7
    for rule in (Adaptive(pilot=0.7, rounds=1, cap=0.7, c=1e6), fixed):
        with engine(with_rule(name, rule), FEDERATION, "quadratic", **FULL) as e:
            e.play(4)
            runs.append((e.model.theta, e.states()))
    torch.testing.assert_close(runs[0][0], runs[1][0], rtol=0, atol=1e-13)
    for (_, a), (_, b) in zip(tree.leaves(runs[0][1]), tree.leaves(runs[1][1]), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", GAUSSIAN)
def test_learned_variance_for_any_gaussian_prior(name: str) -> None:
    """s solves s (s + c)^2 = V / (4 epsilon), V_j = sum_i p_i (theta_ij - mean_j)^2, for each coordinate."""
    rule = LearnedVariance(c=0.5, epsilon=1e-3)
    with engine(with_rule(name, rule), FEDERATION, "quadratic", **FULL) as e:
        e.play(2)
        mean, thetas = e.model.theta, own_thetas(e)
        algorithm = e.training.work.algorithm
        if name == "pfedbred":  # measured from mu, which only the client knows: its evidence is uploaded
            facts = e.training.round_of(e.everyone)
            message = algorithm.broadcast(e.server, facts)
            outcome = e.backend.run("local", e.everyone, e.training.number + 1, message, e.states())
            evidence = outcome.values.upload.evidence
        e.play()
        if name != "pfedbred":
            evidence = (thetas - (e.model.theta if name == "fedmap" else mean)).square()
        sizes = torch.tensor(SIZES, dtype=torch.float64)
        kind = "uniform" if name == "cgpfl" else getattr(algorithm, "weights", "samples")
        p = torch.full((5,), 0.2, dtype=torch.float64) if kind == "uniform" else sizes / sizes.sum()
        s = precision_state(e)
        torch.testing.assert_close(s, stationary_s(p @ evidence, 0.5, 1e-3), rtol=1e-9, atol=1e-12)
        assert s.std() > 0.01  # the coordinates differ


def test_learned_variance_with_the_means_of_mh() -> None:
    """FedMAP's variance in pFedBreD: one local round by hand, with lam_j = 1 / (s_j + c) for each coordinate.

    From w, with theta and the memory at the initial model 0: mu = w - eta_a H (w - a) - eta (0 - 0);
    theta <- theta - a (H (theta - a_i) + lam (theta - mu)) once, from 0; w_i = w - a_m lam (mu - theta)."""
    H, A = FEDERATION.truth["H"], FEDERATION.truth["optima"]
    method = pFedBreD(LearnedVariance(c=0.5, s=2.0), eta=0.05, eta_a=0.3, a=0.4, a_m=0.2, K=1, strategy="mh")
    with engine(method, FEDERATION, "quadratic", **FULL | {"local": {"steps": 1}}) as e:
        lam = 1 / (2.0 + 0.5)
        e.play()
        w = torch.zeros(4, dtype=torch.float64)
        mu = w - 0.3 * torch.einsum("ijk,ik->ij", H, w - A)
        theta = -0.4 * (torch.einsum("ijk,ik->ij", H, -A) + lam * (0 - mu))
        p = torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES)
        torch.testing.assert_close(e.states().theta.theta, theta, rtol=0, atol=1e-13)
        torch.testing.assert_close(e.model.theta, p @ (w - 0.2 * lam * (mu - theta)), rtol=0, atol=1e-13)
        expected = stationary_s(p @ (theta - mu).square(), 0.5, 1e-4)
        torch.testing.assert_close(e.server.pull, expected, rtol=1e-10, atol=0)


@pytest.mark.thorough
def test_every_cluster_learns_a_variance_of_its_own() -> None:
    """Two groups, one whose members differ in the first coordinate only, one in the last only: k-means finds
    them, and the s of each cluster is large where its own members differ and least where they agree."""
    optima = torch.tensor([[9.0, 0, 0, 0], [7, 0, 0, 0], [-9, 0, 0, 2], [-9, 0, 0, -2]], dtype=torch.float64)
    federation = quadratics(4, kappa=1.0)
    for client in range(4):  # y holds the optimum, H is the identity
        for split in (federation.train, federation.test):
            federation.y[split[client]] = optima[client]
    method = CGPFL(K=2, lam=LearnedVariance(c=1.0, epsilon=1e-2), eta=0.5, beta=0.5)
    with engine(method, federation, "quadratic", **FULL | {"chunk": 4}) as e:
        [*_, report] = e.play(30)
        clusters = report.info["clusters"]
        assert clusters[0] == clusters[1] != clusters[2] == clusters[3]
        left, right = (e.server.priors.pull[clusters[k]] for k in (0, 2))
        assert left.argmax() == 0
        assert right.argmax() == 3
        assert left[3] < 1e-3 < right[3]
        assert right[0] < 0.1 * left[0]


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "ditto", "pfedme", "pfedbred", "one_stage_fedprox",
                                  "cgpfl", "fedmap", "dichotomous", "pfedgt", "scaffold", "perfedavg",
                                  "apfl"])
def test_aggregation_momentum_for_any_method_that_averages(name: str) -> None:
    """One round with aggregation step b takes w to w + b (mean - w); the mean is where b = 1 takes it."""
    def method(b: float) -> Algorithm:
        solver = SGD(lr=0.3)
        methods: dict[str, Algorithm] = {
            "fedavg": FedAvg(solver, beta=b), "fedprox": FedProx(0.5, solver, beta=b),
            "ditto": Ditto(0.5, solver, beta=b), "pfedme": pFedMe(0.5, eta=0.3, alpha=0.3, beta=b),
            "pfedbred": pFedBreD(0.5, a=0.3, a_m=0.3, beta=b),
            "one_stage_fedprox": OneStageFedProx(0.5, eta=0.3, gamma=b / 0.5),
            "cgpfl": CGPFL(K=1, lam=0.5, eta=0.3, beta=0.3, alpha=b),
            "fedmap": FedMAP(FixedVariance(2.0), solver, weights="samples", server_lr=2.0 * b),
            "dichotomous": Dichotomous(solver, beta=b), "pfedgt": pFedGT(solver=solver, eta_s=b),
            "scaffold": SCAFFOLD(eta_l=0.3, eta_g=b), "apfl": APFL(solver=solver, beta=b),
            "perfedavg": PerFedAvg(alpha=0.3, beta=0.3, server_lr=b),
        }
        return methods[name]

    reached = {}
    for b in (1.0, 2.0, 0.5):
        with engine(method(b), FEDERATION, "quadratic", **FULL) as e:
            start = e.model.theta.clone()
            e.play()
            reached[b] = e.model.theta
    for b in (2.0, 0.5):
        torch.testing.assert_close(reached[b], start + b * (reached[1.0] - start), rtol=0, atol=1e-13)
    assert (reached[1.0] - start).norm() > 0.01


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_rule_can_be_written_in_a_file(name: str) -> None:
    """Every field that takes a rule takes it as a table, and gives it back."""
    method = ALGORITHMS[name]
    taking = [field.name for field in fields.describe(method) if "adaptive" in field.type]
    for field in taking:
        for table in ({"name": "adaptive", "per_client": False, "cap": 7.0}, {"name": "learned", "c": 2.0}):
            made = parse_algorithm({"name": name, field: table})
            rule = getattr(made, field)
            assert type(rule) in (Adaptive, LearnedVariance)
            assert fields.dump(made)[field].items() >= table.items()
    if name in GAUSSIAN:
        assert taking


# -- groups --------------------------------------------------------------------------------------------------

#: Methods with a server mean, as a file writes them; every one takes groups.
WITH_A_MEAN = {
    "fedprox": 'mu = 0.5\nsolver = { name = "sgd", lr = 0.3 }',
    "ditto": 'lam = 0.5\nsolver = { name = "sgd", lr = 0.3 }',
    "pfedme": "lam = 0.5\neta = 0.9\nalpha = 0.5",
    "pfedbred": "lam = 0.5\na = 0.5\na_m = 0.9\neta = 0.05\neta_a = 0.1",
    "one_stage_fedprox": "lam = 0.5\neta = 0.5",
    "fedmap": 'prior = { name = "fixed", sigma2 = 2.0 }\nsolver = { name = "sgd", lr = 0.5 }\n'
              'weights = "samples"',
}


def written(name: str, more: str = "") -> Algorithm:
    """The method of the text of a file."""
    return parse_algorithm(tomllib.loads(f'name = "{name}"\n{WITH_A_MEAN.get(name, "")}\n{more}'))


# every method with the number and each of the rules with some method, the others slowly: a rule is the same
# object in all of them
@pytest.mark.parametrize(("name", "rule"), [
    *((name, "number") for name in WITH_A_MEAN),
    *(pytest.param(name, rule, marks=() if (k + r) % 3 == 0 else pytest.mark.slow)
      for r, rule in enumerate(("learned", "adaptive", "own")) for k, name in enumerate(WITH_A_MEAN))])
def test_with_one_group_it_is_the_method_without_groups(name: str, rule: str) -> None:
    """Bit for bit, for clients that come late and for newcomers too; one by one in one of the cases."""
    field = {"fedprox": "mu", "fedmap": "prior"}.get(name, "lam")
    adaptive = Adaptive(rounds=2, cap=3.0)
    rules: dict[str, Any] = {"learned": LearnedVariance(epsilon=1e-2), "adaptive": adaptive,
                             "own": dataclasses.replace(adaptive, per_client=True)}
    plain = written(name)
    if rule in rules:
        plain = dataclasses.replace(plain, **{field: rules[rule]})
    grouped = dataclasses.replace(plain, groups=KMeans(K=1))
    for backend in ("loop", "vectorised") if rule == "own" else ("vectorised",):
        with engine(plain, ragged(), "mclr", cohort=3, backend=backend) as e, \
             engine(grouped, ragged(), "mclr", cohort=3, backend=backend) as one:
            e.play(4)
            one.play(4)
            assert_same(one.model, e.model)
            assert_same(tree.take(one.server.priors, 0), e.server)
            assert_same(one.states(), e.states())
            # a model that is sent to all alike is predicted with in one product, with another last bit
            assert_same(one.score().personal, e.score().personal, 1e-13)


def two_groups(spread: tuple[float, float] = (1.0, 1.0)) -> Federation:
    """Two far groups of three clients, all with the loss ||w - a_i||^2 / 2. The optima of a group lie on a
    line through its middle, as far apart as its spread says."""
    middle = torch.tensor([[9.0, 0, 0, 0]] * 3 + [[-9.0, 0, 0, 0]] * 3, dtype=torch.float64)
    along = torch.tensor([-1.0, 0, 1.0, -1.0, 0, 1.0], dtype=torch.float64)
    along = along * torch.tensor([spread[0]] * 3 + [spread[1]] * 3, dtype=torch.float64)
    middle[:, 1] += along
    federation = quadratics(6, kappa=1.0)
    for client in range(6):  # y holds the optimum, H is the identity
        for split in (federation.train, federation.test):
            federation.y[split[client]] = middle[client]
    return federation


@pytest.mark.thorough
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in ("pfedme", "fedmap") else
                                               pytest.mark.slow) for name in WITH_A_MEAN])
def test_every_group_has_the_optimum_of_its_members(name: str) -> None:
    """With H = I a round is the same affine map of w and a_i for all members, so that the mean of a group
    comes to rest at the mean of its members' optima: the minimiser of sum_i ||w - a_i||^2."""
    method = written(name, 'groups = { name = "kmeans", K = 2, starts = 1 }')
    with engine(method, two_groups(), "quadratic", **FULL | {"chunk": 6, "local": {"steps": 8}}) as e:
        [*_, report] = e.play(30)
        clusters = report.info["clusters"].tolist()
        assert clusters == [clusters[0]] * 3 + [1 - clusters[0]] * 3
        centres = e.server.priors.mean.theta[[clusters[0], clusters[3]]]
        expected = torch.tensor([[9.0, 0, 0, 0], [-9.0, 0, 0, 0]], dtype=torch.float64)
        torch.testing.assert_close(centres, expected, rtol=0, atol=1e-6)
        assert e.model is None  # there is none for all
        # a newcomer with the data of the second group takes its model, though that is not the first
        message = method.newcomer(e.server, e.training.round_of(e.everyone))
        adapted = e.backend.run("adapt", e.everyone, 31, message, e.states()).values
        assert (adapted.theta[:3, 0] > 5).all()
        assert (adapted.theta[3:, 0] < -5).all()


def test_every_group_has_a_lambda_of_its_own() -> None:
    """One-stage FedProx's rule in a Ditto with two centres: members at distance 1 and 3 from their middle.
    The clusters are made in round 1 and heard of in round 2. lam_k is practical_lambda of the group's own
    R_k^2 = mean_i ||v_i - w_k||^2, with the w_k that the members were sent."""
    method = parse_algorithm(tomllib.loads("""name = "ditto"
        lam = { name = "adaptive", pilot = 0.5, rounds = 1, c = 2.0 }
        solver = { name = "sgd", lr = 0.5 }
        groups = { K = 2 }"""))
    federation = two_groups((1.0, 3.0))
    with engine(method, federation, "quadratic", **FULL | {"chunk": 6, "local": {"steps": 8}}) as e:
        e.play()
        centres, labels = e.server.priors.mean.theta, e.server.cluster
        assert e.server.priors.pull.lam.tolist() == [0.5, 0.5]
        e.play()
        square = (e.states().theta - centres[labels]).square().sum(1)
        for k in range(2):
            R = math.sqrt(float(square[labels == k].mean()))
            expected = practical_lambda(R, float(len(federation.train[0])), c=2.0).lam
            assert float(e.server.priors.pull.lam[k]) == pytest.approx(expected, rel=1e-10)
        assert e.server.priors.pull.lam[labels[0]] > 2 * e.server.priors.pull.lam[labels[3]]


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_groups_are_for_methods_with_a_server_mean(name: str) -> None:
    if name in WITH_A_MEAN:
        made: Any = parse_algorithm({"name": name, "groups": {"K": 3}})
        assert made.groups == KMeans(K=3)
        with pytest.raises(UsageError, match=f"{name}.groups.K is 9, but the federation has only 5"), \
             engine(written(name, "groups = { K = 9 }"), ragged(), "mclr"):
            pass
        return
    with pytest.raises(UsageError, match=rf"algorithm.groups: {name} .*: ditto, fedmap, .* take groups"):
        parse_algorithm({"name": name, "groups": {"K": 3}})


@pytest.mark.parametrize(("table", "told"), [
    ({"name": "ditto", "groups": {"name": "spectral"}}, "algorithm.groups.name.*spectral.*kmeans"),
    ({"name": "ditto", "groups": {"K": "many"}}, "algorithm.groups.K must be an integer"),
    ({"name": "ditto", "groups": 3}, "algorithm.groups must be { kmeans }"),
    ({"name": "fedmap", "init": "client", "groups": {"K": 2}}, "groups.k_rounds = 2 or more"),
    ({"name": "pfedbred", "lam": {"name": "learned"}, "family": {"name": "poisson"}, "groups": {"K": 2}},
     "learned.*does not fit the family poisson: use family"),
])
def test_beliefs_that_do_not_fit_are_refused(table: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        parse_algorithm(table)


@pytest.mark.thorough
def test_a_run_from_before_a_field_was_there_has_its_default() -> None:
    now = fields.dump(pFedMe())
    before = {key: value for key, value in now.items() if key != "weight_decay"}
    assert completed({"config": {"algorithm": before}}) == {"config": {"algorithm": now}}
    unknown = {"config": {"algorithm": {"name": "somebody's own"}}}
    assert completed(unknown) == unknown

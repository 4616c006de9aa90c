"""CGPFL: pFedMe in every cluster, clusters by k-means, and K by a bound.

Client i has the loss f_i(w) = (w - a_i)' H_i (w - a_i) / 2, every row alike, so that with full batches its
gradient is exact. Planted clusters share a_i; everything is in float64.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from torch import Tensor

import descant
from descant.algorithms import CGPFL, FedAvg, pFedMe
from descant.core import tree
from descant.core.federation import Federation
from descant.core.splits import Table
from descant.engine.rounds import Sampled
from descant.errors import DescantError, UsageError
from descant.experiment.directory import read_metrics
from descant.experiment.plots import draw_clusters
from descant.priors import clustering
from descant.priors.precision import Adaptive, LearnedVariance, stationary_s
from helpers import Engine, assert_same, batchnorm_net, engine, quadratics, ragged

GROUPS = (0, 1, 2, 0, 1, 2, 2, 1, 0)  # of the nine clients of PLANTED
CENTRES = torch.tensor([[9.0, 0, 0, 0], [0, -9, 0, 3], [0, 0, 9, -3]], dtype=torch.float64)


def planted(groups: tuple[int, ...] = GROUPS, spread: float = 0.0, **fields: Any) -> Federation:
    """Quadratics whose optima are the centre of the client's group (plus a little)."""
    plain = quadratics(len(groups), kappa=3.0, **fields)
    rng = np.random.default_rng(3)
    optima = CENTRES[list(groups)] + spread * torch.from_numpy(rng.standard_normal((len(groups), 4)))
    y = plain.y.clone()
    for client in range(len(groups)):
        for split in (plain.train, plain.validation, plain.test):
            y[split[client]] = optima[client]
    return dataclasses.replace(plain, y=y, truth={"H": plain.truth["H"], "optima": optima}, origin=None)


PLANTED = planted(spread=0.3)
H, A = PLANTED.truth["H"], PLANTED.truth["optima"]


def alone(federation: Federation, members: list[int]) -> Federation:
    """Some clients of a federation."""
    tables = [Table.of([split[i] for i in members])
              for split in (federation.train, federation.validation, federation.test)]
    return dataclasses.replace(federation, train=tables[0], validation=tables[1], test=tables[2],
                               names=tuple(federation.names[i] for i in members), truth={})


def settings(steps: int = 3, **train: Any) -> dict[str, Any]:
    return {"batch": "full", "local": {"steps": steps}, "backend": "vectorised"} | train


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def attend(e: Engine, *cohorts: list[int]) -> list[Any]:
    """Rounds with these participants."""
    reports = []
    for cohort in cohorts:
        chosen = np.array(cohort)
        who = Sampled(chosen, chosen, chosen, late=0)
        e.training._sampled = lambda who=who: who  # type: ignore[method-assign]
        reports += e.play()
    return reports


# -- reductions -----------------------------------------------------------------------------------------


LAMS: dict[str, Any] = {"number": 12.0, "list": (3.0, 12.0, 5.0, 7.0, 1.0), "learned": LearnedVariance(),
                        "adaptive": Adaptive(rounds=2), "own": Adaptive(rounds=2, per_client=True)}


@pytest.mark.parametrize("lam", LAMS)
@pytest.mark.parametrize("train", [{}, {"cohort": 3}])
@pytest.mark.thorough
def test_with_one_cluster_it_is_pfedme_bit_for_bit(lam: str, train: dict[str, Any]) -> None:
    """Uniform weights, beta = alpha, eta lam = beta lam; also for whoever comes late, and for newcomers."""
    for model in ("mclr", batchnorm_net()) if lam in ("number", "learned") else ("mclr",):
        expected = pFedMe(lam=LAMS[lam], beta=0.7, weights="uniform")
        with engine(CGPFL(K=1, lam=LAMS[lam], alpha=0.7), ragged(), model, **train) as e, \
             engine(expected, ragged(), model, **train) as reference:
            reports = e.play(3)
            reference.play(3)
            assert_same(e.model, reference.model)
            assert_same(e.states(), reference.states())
            assert_same(e.score().personal, reference.score().personal)
            assert not any("clusters" in report.info for report in reports)


@pytest.mark.thorough
def test_the_printed_step_is_pfedme_s_at_another_step_size() -> None:
    """beta (2/N) = eta lam at beta = eta lam N / 2 = 0.15: N = 5, eta lam = 0.06."""
    for backend in ("loop", "vectorised"):
        with engine(CGPFL(K=1, outer="printed", beta=0.15), ragged(), backend=backend) as e, \
             engine(pFedMe(lam=12.0, eta=0.005, weights="uniform"), ragged(), backend=backend) as reference, \
             engine(CGPFL(K=1, outer="printed"), ragged(), backend=backend) as paper:
            start = e.model.theta
            for each in (e, reference, paper):
                each.play(3)
            assert_same(e.model, reference.model, 1e-13)
            assert_same(e.states(), reference.states(), 1e-13)
            assert_same(e.score().personal, reference.score().personal, 1e-11)
            # with the paper's 0.005 w moves by 0.002 of the gap a step, and a thirtieth of pFedMe's way
            ratio = (paper.model.theta - start).norm() / (e.model.theta - start).norm()
            assert 0.02 < ratio < 0.05


# an (almost) exact proximal map: the eigenvalues of H_i + lam lie in [2.33, 3], and a step of 2 / 5.33 on
# theta shrinks its error by 0.125 at worst; 0.125^16 = 4e-15
EXACT = {"lam": 2.0, "eta": 2 / 5.33, "S": 16}


@pytest.mark.thorough
def test_with_a_cluster_for_each_client_nobody_shares() -> None:
    """A local round contracts w_i - a_i by I - beta lam A_i, A_i = (H_i + lam)^-1 H_i, and with K = N,
    alpha = 1 nothing else happens: after T rounds w_i = a_i + (I - beta lam A_i)^RT (w - a_i)."""
    beta, R, T = 0.4, 3, 5
    identity = torch.eye(4, dtype=torch.float64)
    contraction = identity - beta * 2.0 * torch.linalg.solve(H + 2.0 * identity, H)
    expected = A - torch.einsum("ijk,ik->ij", torch.linalg.matrix_power(contraction, R * T), A)
    with engine(CGPFL(K=9, beta=beta, **EXACT), PLANTED, "quadratic", **settings(R)) as e:
        e.play(T)
        assert len(e.server.cluster.unique()) == 9
        close(e.server.priors.mean.theta[e.server.cluster], expected)


@pytest.mark.thorough
@pytest.mark.parametrize(("lam", "alpha"), [
    (lam, alpha) if lam == 2.0 or alpha == 0.6 else pytest.param(lam, alpha, marks=pytest.mark.slow)
    for lam in (2.0, LearnedVariance(epsilon=0.01), Adaptive(rounds=2, c=20.0)) for alpha in (1.0, 0.6)])
def test_planted_clusters_are_found_and_then_each_is_a_pfedme(lam: Any, alpha: float) -> None:
    """Optima 9 apart against 0.3 within a group: the first round finds the groups. From then on cluster k is
    pFedMe on its own members, from the same w. With rules for lam too: their evidence is the members', from
    the second round on, since the first measures from the common model."""
    algorithm = CGPFL(K=3, lam=lam, eta=0.2, beta=0.3, alpha=alpha)
    with engine(algorithm, PLANTED, "quadratic", **settings()) as e:
        references = []
        for group in range(3):
            members = [i for i, k in enumerate(GROUPS) if k == group]
            context = engine(pFedMe(lam=lam, alpha=0.2, eta=0.3, beta=alpha, weights="uniform"),
                             alone(PLANTED, members), "quadratic", **settings())
            references.append((members, context, context.__enter__()))
        for number in range(1, 7):
            [report] = e.play()
            assert report.info["clusters"].tolist() == list(GROUPS)  # numbered by their first members
            assert report.info["moved"] in (None, 0.0)
            assert (report.info["moved"] is None) == (number == 1)
            for k, (members, _, reference) in enumerate(references):
                unlearned = reference.server.pull
                reference.play()
                if number == 1:
                    reference.training.server = reference.server._replace(pull=unlearned)
                close(e.server.priors.mean.theta[k], reference.model.theta)
                close(e.states().theta[members], reference.states().theta)
            gaps = e.server.priors.mean.theta[:, None] - e.server.priors.mean.theta
            close(report.info["distances"], gaps.norm(dim=2))
        for _, context, _ in references:
            context.__exit__(None, None, None)


def test_the_variance_of_each_cluster_is_that_of_its_members() -> None:
    """s_k is the root of s (s + c)^2 = V_k / (4 epsilon), V_k the mean square deviation of the members' theta
    from the w_k that they were sent."""
    rule = LearnedVariance(c=0.7, epsilon=0.02)
    algorithm = CGPFL(K=3, lam=rule, eta=0.2, beta=0.3)
    with engine(algorithm, PLANTED, "quadratic", **settings()) as e:
        e.play(3)
        w = e.server.priors.mean.theta[e.server.cluster]
        [report] = e.play()
        squares = (e.states().theta - w).square()
        for k in range(3):
            V = squares[torch.tensor(GROUPS) == k].mean(0)
            s = e.server.priors.pull[k]
            close(s, stationary_s(V, 0.7, 0.02))
            close(s * (s + 0.7).square(), V / 0.08)
            assert float(report.info["priors"][k]["s"]["most"]) == float(s.max())
        assert (e.server.priors.pull[0] - e.server.priors.pull[1]).abs().max() > 1e-3


@pytest.mark.parametrize("k_rounds", [1, 4])
def test_each_cluster_chooses_its_lambda_when_it_is_heard_of(k_rounds: int) -> None:
    """A pilot of two rounds from the clusters on, whenever they are made. The round that makes them does not
    count: it measures from the common model. Nobody of cluster 2 takes part in the round that ends the pilot
    of the others: it chooses in the next one."""
    rule, everyone = Adaptive(rounds=2, pilot=0.5), list(range(9))
    algorithm = CGPFL(K=3, lam=rule, eta=0.2, beta=0.3, k_rounds=k_rounds)
    with engine(algorithm, PLANTED, "quadratic", **settings()) as e:
        attend(e, *[everyone] * k_rounds)
        assert e.server.K == 3
        assert e.server.priors.pull.heard.tolist() == [0, 0, 0]
        assert (float(e.server.origin.pull.lam) != 0.5) == (k_rounds == 4)
        w = e.server.priors.mean.theta[list(GROUPS)]
        attend(e, everyone)
        assert e.server.priors.pull.lam.tolist() == [0.5] * 3
        square = (e.states().theta - w).square().sum(1)
        for k, group in enumerate(e.server.priors.pull.square):
            close(group, torch.where(torch.tensor(GROUPS) == k, square, 0.0))
        attend(e, [0, 1, 3, 4])
        lam = e.server.priors.pull.lam
        assert lam[0] != 0.5
        assert lam[1] != 0.5
        assert lam[2] == 0.5
        attend(e, [0, 1, 2, 3, 4, 6])
        assert e.server.priors.pull.lam[2] != 0.5
        assert torch.equal(e.server.priors.pull.lam[:2], lam[:2])


# -- who is where -----------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_client_moves_when_its_data_does() -> None:
    """With beta lam = 0.9 and 8 local rounds the upload is nearly the client's optimum; client 0 was of group
    0 and now has the data of group 1."""
    algorithm = CGPFL(K=3, beta=0.45, **EXACT)
    moved = planted((1, *GROUPS[1:]))
    with engine(algorithm, planted(), "quadratic", **settings(8)) as before, \
         engine(algorithm, moved, "quadratic", **settings(8)) as e:
        before.play(2)
        e.training.server = before.server
        e.training.number = 2
        [report] = e.play()
        assert report.info["clusters"].tolist() == [1, *GROUPS[1:]]
        assert report.info["moved"] == pytest.approx(1 / 9)
        assert report.info["kmeans_iterations"] == 1
        [report] = e.play()
        assert report.info["moved"] == 0


@pytest.mark.thorough
def test_the_names_of_clusters_do_not_matter() -> None:
    """k-means++ numbers clusters by their first members. A server whose clusters are called otherwise goes on
    with its own names: with alpha < 1, w_k is mixed with the uploads of its own members."""
    order = torch.tensor([2, 0, 1])  # the clusters' names in the other server
    algorithm = CGPFL(K=3, alpha=0.5, beta=0.3, **EXACT)
    with engine(algorithm, PLANTED, "quadratic", **settings()) as e, \
         engine(algorithm, PLANTED, "quadratic", **settings()) as other:
        e.play(1)
        other.play(1)
        server = other.server
        other.training.server = server._replace(
            priors=tree.take(server.priors, order.argsort()), centres=server.centres[order.argsort()],
            cluster=order[server.cluster])
        for _ in range(4):
            old = e.server.priors.mean.theta
            e.play()
            other.play()
            assert_same(tree.take(other.server.priors, order), e.server.priors, 1e-13)
            assert torch.equal(other.server.cluster, order[e.server.cluster])
            assert (e.server.priors.mean.theta - old).norm(dim=1).max() < 4  # the models are 9 and more apart


def test_a_better_start_is_called_after_the_models_it_is_near() -> None:
    """Points at 0, 1 and 10. Seeded at 10.2, 9.8 and 0.5, k-means stays with two clusters at 10; k-means++
    finds the three. The least sum of squares is 0.5^2 (0 -> 0.5) + 8.8^2 (1 -> 9.8) + 0.2^2 (10 -> 10.2)."""
    points = torch.tensor([0.0, 1, 10.04, 9.98, 0, 1], dtype=torch.float64)[:, None]
    models = torch.tensor([10.2, 9.8, 0.5], dtype=torch.float64)[:, None]
    seeded = clustering.recluster(points, models, None)
    assert seeded.labels.tolist() == [2, 2, 0, 1, 2, 2]
    found = clustering.recluster(points, models, np.random.default_rng(0))
    assert found.labels.tolist() == [2, 1, 0, 0, 2, 1]
    close(found.centres.flatten(), torch.tensor([10.01, 1.0, 0.0], dtype=torch.float64))
    assert found.cost == pytest.approx(2 * 0.03**2)


def test_an_empty_cluster_keeps_its_model_and_its_precision() -> None:
    """Two groups of exactly equal clients and K = 3: there are only two points."""
    plain = planted((0, 1, 0, 1, 1))
    x = plain.x.clone()
    for client in range(5):
        for split in (plain.train, plain.test):
            x[split[client]] = torch.eye(4, dtype=torch.float64)
    algorithm = CGPFL(K=3, lam=LearnedVariance(s=0.3), eta=0.2, beta=0.3, alpha=0.8)
    with engine(algorithm, dataclasses.replace(plain, x=x), "quadratic", **settings(backend="loop")) as e:
        for _ in range(4):
            [report] = e.play()
            assert report.info["clusters"].tolist() == [0, 1, 0, 1, 1]
            assert "priors" not in report.info or report.info["priors"][2] == {}
            assert torch.equal(e.server.priors.mean.theta[2], torch.zeros(4, dtype=torch.float64))
            assert torch.equal(e.server.priors.pull[2], torch.full((4,), 0.3, dtype=torch.float64))
        assert e.server.priors.mean.theta[:2].norm(dim=1).min() > 1


def test_absent_clients_keep_their_cluster_and_their_models_wait() -> None:
    with engine(CGPFL(K=3, beta=0.3, **EXACT), PLANTED, "quadratic", **settings()) as e:
        attend(e, list(range(9)))
        before = e.server
        [report] = attend(e, [0, 1, 3, 4])
        assert report.info["clusters"].tolist() == list(GROUPS)
        assert torch.equal(e.server.priors.mean.theta[2], before.priors.mean.theta[2])  # nobody of group 2
        assert (e.server.priors.mean.theta[:2] - before.priors.mean.theta[:2]).norm(dim=1).min() > 0.1


def test_fewer_participants_than_clusters_go_to_the_nearest_model() -> None:
    with engine(CGPFL(K=3, beta=0.3, **EXACT), PLANTED, "quadratic", **settings()) as e:
        attend(e, list(range(9)))
        before = e.server.priors.mean.theta
        [report] = attend(e, [2, 6])
        assert report.info["clusters"].tolist() == list(GROUPS)
        assert report.info["kmeans_iterations"] == 0
        assert torch.equal(e.server.priors.mean.theta[:2], before[:2])
        assert not torch.equal(e.server.priors.mean.theta[2], before[2])


def test_until_there_are_as_many_participants_as_clusters_it_is_pfedme() -> None:
    algorithm = CGPFL(K=3, beta=0.3, alpha=0.9, **EXACT)
    reference = pFedMe(lam=2.0, alpha=EXACT["eta"], K=16, eta=0.3, beta=0.9, weights="uniform")
    with engine(algorithm, PLANTED, "quadratic", **settings()) as e, \
         engine(reference, PLANTED, "quadratic", **settings()) as pfedme:
        cohorts = [[0, 5], [1, 2], [4, 7]]
        reports = attend(e, *cohorts)
        attend(pfedme, *cohorts)
        assert [report.info["waiting_for"] for report in reports] == [3, 3, 3]
        assert_same(tree.take(e.server.priors.mean, 0), pfedme.model)
        [report] = attend(e, [0, 1, 2, 3])
        assert report.info["clusters"].tolist() == [0, 1, 2, 0, -1, -1, -1, -1, -1]


@pytest.mark.thorough
def test_who_comes_late_finds_its_cluster() -> None:
    """The clusters are made by four clients; when the others come, the models have gone far apart: from any
    of them, a client's upload stays near that one. They start from the common model instead, and their first
    upload is in no average."""
    algorithm = CGPFL(K=3, lam=2.0, eta=0.3, beta=0.05, S=3)
    with engine(algorithm, PLANTED, "quadratic", **settings()) as e:
        attend(e, *[[0, 1, 2, 3]] * 25)
        made = e.server
        everyone = e.training.round_of(e.everyone)
        message = algorithm.broadcast(made, everyone)
        close(message.each.shared.mean.theta[4:], torch.zeros((5, 4), dtype=torch.float64), 0)
        first = tree.take(made.priors.mean, torch.zeros(9, dtype=torch.int64))
        wrong = message.each._replace(shared=message.each.shared._replace(mean=first))
        outcome = e.backend.run("local", e.everyone, 99, message._replace(each=wrong), e.states())
        stayed = clustering.nearest(outcome.values.upload.model.theta, made.priors.mean.theta)
        assert (stayed.labels == 0).all()

        [report] = attend(e, [4, 5, 8])
        assert report.info["clusters"].tolist() == [0, 1, 2, 0, 1, 2, -1, -1, 0]
        assert report.info["moved"] is None
        assert_same(e.server.priors, made.priors)
        [report] = attend(e, [4, 5, 6, 7, 8])
        assert report.info["clusters"].tolist() == list(GROUPS)
        assert report.info["moved"] == 0
        assert not torch.equal(e.server.priors.mean.theta[1], made.priors.mean.theta[1])  # 4 counts by now
        close(algorithm.broadcast(e.server, everyone).each.shared.mean.theta,
              e.server.priors.mean.theta[list(GROUPS)], 0)


def test_late_clients_are_told_the_precision_of_the_common_prior() -> None:
    algorithm = CGPFL(K=3, lam=LearnedVariance(s=0.3), eta=0.2, beta=0.3)
    with engine(algorithm, PLANTED, "quadratic", **settings()) as e:
        attend(e, [0, 1, 2, 3], [0, 1, 2, 3])
        told = algorithm.broadcast(e.server, e.training.round_of(e.everyone)).each.shared.pull
        close(told[4:], torch.full((5, 4), 0.3, dtype=torch.float64), 0)
        assert_same(told[:4], e.server.priors.pull[list(GROUPS[:4])])


def test_clusters_can_be_made_later() -> None:
    """k_rounds = 3: two rounds of pFedMe, then clusters; the rules for lam start anew."""
    lam = LearnedVariance(lr=1.0)
    reference = pFedMe(lam=lam, alpha=0.2, eta=0.3, weights="uniform")
    algorithm = CGPFL(K=3, lam=lam, eta=0.2, beta=0.3, k_rounds=3)
    with engine(algorithm, PLANTED, "quadratic", **settings()) as e, \
         engine(reference, PLANTED, "quadratic", **settings()) as pfedme:
        reports = e.play(2)
        pfedme.play(2)
        assert [report.info["K"] for report in reports] == [1, 1]
        assert_same(e.server.origin.mean, pfedme.model)
        w = pfedme.model.theta
        [report] = e.play()
        assert report.info["clusters"].tolist() == list(GROUPS)
        assert torch.equal(e.server.origin.mean.theta, w)
        assert not torch.equal(e.server.origin.pull, torch.ones(4, dtype=torch.float64))
        close(e.server.priors.pull, torch.ones(3, 4, dtype=torch.float64), 0)
        w = e.server.priors.mean.theta[1]
        e.play()
        V = (e.states().theta - w).square()[torch.tensor(GROUPS) == 1].mean(0)
        close(e.server.priors.pull[1], 1.0 - 2e-4 + V / 8)  # one gradient step of size 1 from s = 1, c = 1


@pytest.mark.thorough
def test_newcomers_take_the_model_that_fits_them() -> None:
    """Each client, as a newcomer, finds its group's model, and its work from there is that of `local`."""
    for K, backend in ((3, "loop"), ("auto", "vectorised")):
        algorithm = CGPFL(K=K, mu=0.2, lam=2.0, eta=0.2, beta=0.3)
        with engine(algorithm, PLANTED, "quadratic", **settings(backend=backend)) as e:
            facts = e.training.round_of(e.everyone)
            forms = [tuple(t.shape) for _, t in tree.leaves(algorithm.newcomer(e.server, facts))]
            e.play(3)
            assert e.server.K == 3
            message = algorithm.newcomer(e.server, facts)
            assert [tuple(t.shape) for _, t in tree.leaves(message)] == forms
            found = e.backend.run("adapt", e.everyone, 7, message, e.states()).values
            own = algorithm.broadcast(e.server, facts)
            expected = e.backend.run("local", e.everyone, 7, own, e.states()).values.state
            assert_same(found, expected, 1e-14)


def test_there_is_a_model_for_all_with_one_cluster_only() -> None:
    for K, expected in ((1, True), (3, False), ("auto", False)):
        with engine(CGPFL(K=K, mu=0.0), PLANTED, "quadratic", **settings()) as e:
            assert (e.model is not None) == expected
            e.play()
            assert (e.model is not None) == expected


# -- k-means ----------------------------------------------------------------------------------------------


def test_coordinates_keep_all_distances() -> None:
    rng = torch.Generator().manual_seed(0)
    for n, d in ((12, 5000), (12, 7), (12, 12), (3, 200_000)):
        rows = torch.randn((n, d), generator=rng, dtype=torch.float64) + 100  # far from the origin
        found = clustering.coordinates(rows)
        assert found.shape[1] <= n
        close(torch.cdist(found, found), torch.cdist(rows, rows), 1e-9 * math.sqrt(d))


@pytest.mark.thorough
def test_k_means_on_the_gram_matrix_is_k_means() -> None:
    """The same labels, cost and number of iterations as on the rows themselves, and as scikit-learn's
    where no cluster is empty (which scikit-learn would move to the farthest point)."""
    rng, compared = np.random.default_rng(1), 0
    for _ in range(10):
        rows = torch.from_numpy(rng.standard_normal((30, 80)) + 3 * rng.integers(0, 3, (30, 1)))
        points = clustering.coordinates(rows)
        start = rng.choice(30, 4, replace=False)
        found, plain = clustering.lloyd(points, points[start]), clustering.lloyd(rows, rows[start])
        assert torch.equal(found.labels, plain.labels)
        assert found.iterations == plain.iterations
        assert found.cost == pytest.approx(plain.cost, rel=1e-12)
        if len(found.labels.unique()) == 4:
            theirs = KMeans(4, init=rows[start].numpy(), n_init=1, tol=0).fit(rows.numpy())
            assert found.labels.tolist() == theirs.labels_.tolist()
            assert found.cost == pytest.approx(theirs.inertia_, rel=1e-12)
            compared += 1
        several = [clustering.kmeans(p, 4, np.random.default_rng(5)) for p in (points, rows)]
        assert torch.equal(several[0].labels, several[1].labels)
        assert several[0].cost == pytest.approx(several[1].cost, rel=1e-12)
        firsts = [several[0].labels.tolist().index(k) for k in range(4)]
        assert firsts == sorted(firsts)
    assert compared >= 8


def test_k_means_leaves_an_empty_centre_where_it_was() -> None:
    points = torch.tensor([0.0, 1, 10, 12], dtype=torch.float64)[:, None]
    found = clustering.lloyd(points, torch.tensor([2.0, 9, 100], dtype=torch.float64)[:, None])
    assert found.labels.tolist() == [0, 0, 1, 1]
    assert found.centres.flatten().tolist() == [0.5, 11, 100]
    assert found.squares.tolist() == [0.25, 0.25, 1, 1]


def test_float32_models_are_told_apart_by_their_displacement() -> None:
    """Models of length 3e4 that differ by one unit in the last place (6e-5) of a single parameter. Products
    of the models themselves, 1e9, would lose the difference, (1.2e-4)^2, to rounding; centred ones do not."""
    rows = torch.full((6, 1000), 1000.0)
    rows[:, 0] += 6.2e-5 * torch.tensor([1.0, -1, 1, -1, 1, -1])
    assert len(rows[:, 0].unique()) == 2
    found = clustering.kmeans(clustering.coordinates(rows), 2, np.random.default_rng(0))
    assert found.labels.tolist() == [0, 1, 0, 1, 0, 1]
    close(torch.cdist(found.centres, found.centres)[0, 1], (rows[0, 0] - rows[1, 0]).double(), 1e-12)


def test_diverged_models_are_told() -> None:
    for d in (2, 20):
        with pytest.raises(DescantError, match="diverges"):
            clustering.coordinates(torch.full((4, d), 1e200, dtype=torch.float64).cumsum(0).square())


# -- how many clusters ------------------------------------------------------------------------------------


def test_the_bound_by_hand() -> None:
    """Points 0, 2, 10, 14 with 1, 1, 2, 4 samples and d = 3: m = 8.
    complexity(K)^2 = (3 K / 8) (1 + ln(8/3)).
    K = 1: the centre is 6.5: 42.25/8 + 20.25/8 + 12.25*2/8 + 56.25*4/8 = 39.
    K = 2: centres 1 and 12: 1/8 + 1/8 + 4*2/8 + 4*4/8 = 3.25."""
    points = torch.tensor([0.0, 2, 10, 14], dtype=torch.float64)[:, None]
    sizes = torch.tensor([1.0, 1, 2, 4])
    factor = 3 / 8 * (1 + math.log(8 / 3))
    for mu, K in ((0.0, 1), (0.009, 1), (0.011, 2)):
        found, choice = clustering.choose_K(points, sizes, 3, mu=mu, most=2,
                                            generator=np.random.default_rng(0))
        assert choice.cost == pytest.approx([39.0, 3.25])
        assert choice.complexity == pytest.approx([math.sqrt(factor), math.sqrt(2 * factor)])
        assert choice.bound == pytest.approx([a + mu * c for a, c in zip(choice.complexity, choice.cost,
                                                                         strict=True)])
        assert choice.K == len(found.centres) == K
    crossing = (math.sqrt(2) - 1) * math.sqrt(factor) / (39 - 3.25)  # 0.00999
    assert clustering.K_by_mu(choice.complexity, choice.cost) == [(0.0, 1), (pytest.approx(crossing), 2)]


def test_a_bound_without_a_logarithm_says_nothing_about_K() -> None:
    """ln(e m / d) < 0 iff d > e m: then the term is 0, and the cost alone counts."""
    small = math.sqrt(271 * 3 / 100 * (1 - math.log(2.71)))
    assert clustering.complexity(3, 271, 100.0) == pytest.approx(small, rel=1e-9)
    assert clustering.complexity(3, 272, 100.0) == 0
    points = torch.randn((8, 5), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    _, choice = clustering.choose_K(points, torch.ones(8), 1000, mu=1e-9, most=4,
                                    generator=np.random.default_rng(0))
    assert choice.complexity == [0, 0, 0, 0]
    assert choice.K == 4


def test_larger_mu_never_means_fewer_clusters() -> None:
    """At mu < nu with minimisers K and L: a_K + mu c_K <= a_L + mu c_L and a_L + nu c_L <= a_K + nu c_K add
    up to (nu - mu)(c_K - c_L) >= 0, hence a_L >= a_K, and a increases with K. `K_by_mu` says where."""
    rng = np.random.default_rng(2)
    for _ in range(20):
        cost = np.sort(rng.exponential(size=12))[::-1].tolist()
        a = [clustering.complexity(K, 50, 400.0) for K in range(1, 13)]
        steps = clustering.K_by_mu(a, cost)
        chosen = [int(np.argmin([x + mu * c for x, c in zip(a, cost, strict=True)])) + 1
                  for mu in np.linspace(0, 2 * steps[-1][0] + 1, 300)]
        assert chosen == sorted(chosen)
        assert [K for _, K in steps] == sorted({K for _, K in steps})
        ends = [*(mu for mu, _ in steps), 2 * steps[-1][0] + 1]
        for k, (_, K) in enumerate(steps):
            middle = (ends[k] + ends[k + 1]) / 2
            assert int(np.argmin([x + middle * c for x, c in zip(a, cost, strict=True)])) + 1 == K


def test_heur_finds_the_planted_number_of_clusters() -> None:
    """Among K <= 9 // 2. Three groups take nearly all of the cost away: they win for a wide range of mu."""
    with engine(CGPFL(K="auto", mu=0.2, beta=0.3, **EXACT), PLANTED, "quadratic", **settings()) as e:
        first, *others = e.play(4)
        choice = first.info["choice"]
        assert len(choice["e"]) == 4
        assert choice["K"] == first.info["K"] == 3
        assert first.info["clusters"].tolist() == list(GROUPS)
        starts = dict(reversed(pair) for pair in choice["K_by_mu"])  # type: ignore[misc]
        assert starts[3] < 0.2 / 3
        assert starts[4] > 3 * 0.2
        # cost(K) by its definition, on the uploads of the first round
        w = e.server.centres[list(GROUPS)]
        with engine(CGPFL(K=1, beta=0.3, **EXACT), PLANTED, "quadratic", **settings()) as one:
            message = one.training.work.algorithm.broadcast(one.server, one.training.round_of(one.everyone))
            uploads = one.backend.run("local", one.everyone, 1, message, one.states()).values.upload
        assert choice["cost"][2] == pytest.approx(float((uploads.model.theta - w).square().sum(1).mean()))
        assert all("choice" not in report.info and report.info["K"] == 3 for report in others)


@pytest.mark.thorough
def test_heur_in_a_later_round_and_with_few() -> None:
    with engine(CGPFL(K="auto", mu=0.2, k_rounds=2, beta=0.3, **EXACT), PLANTED, "quadratic",
                **settings()) as e:
        reports = e.play(3)
        assert ["choice" in report.info for report in reports] == [True, True, False]
        assert [report.info["K"] for report in reports] == [1, 3, 3]
    with engine(CGPFL(K="auto", mu=1e9, K_max=2), PLANTED, "quadratic", **settings()) as e:
        assert len(e.play()[0].info["choice"]["e"]) == 2
    with engine(CGPFL(K="auto", mu=1e9), PLANTED, "quadratic", **settings()) as e:
        [report] = attend(e, [0, 1, 2, 3, 4])
        assert len(report.info["choice"]["e"]) == 2  # half of five
    with engine(CGPFL(K="auto", mu=0.0), PLANTED, "quadratic", **settings()) as e:
        reports = e.play(3)
        assert [report.info["K"] for report in reports] == [1, 1, 1]
        assert ["choice" in report.info for report in reports] == [True, False, False]


# -- bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"K": 0}, {"K": -1}, {"K": 2.5}, {"K": "four"}, {"lam": 0.0},
                                    {"lam": (1.0, 0.0)}, {"mu": -1.0}, {"K_max": 0}, {"k_rounds": 0},
                                    {"outer": "2/N"}])
def test_what_is_out_of_range_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"cgpfl.{next(iter(fields))}"):
        CGPFL(**fields)


def test_more_clusters_than_clients_are_refused() -> None:
    with pytest.raises(UsageError, match=r"cgpfl\.K is 10, but the federation has only 9 clients"), \
         engine(CGPFL(K=10), PLANTED, "quadratic", **settings()):
        pass
    with pytest.raises(UsageError, match="list of 2 numbers for 9 clients"), \
         engine(CGPFL(lam=(1.0, 2.0)), PLANTED, "quadratic", **settings()):
        pass


def test_unstable_steps_are_cautioned_against() -> None:
    assert CGPFL().cautions() == []
    assert "eta < 2 / (L + lam)" in CGPFL(eta=0.2).cautions()[0]
    assert "beta <= 1 / lam" in CGPFL(beta=0.1).cautions()[0]
    assert CGPFL(beta=1.2, outer="printed").cautions() == []


# -- the run directory ------------------------------------------------------------------------------------


CLUSTERED = descant.federation("logistic", clients=18, clusters=3, separation=3.0, rows=24)


@pytest.mark.slow
@pytest.mark.pictures
def test_the_clusters_of_a_run_are_drawn(tmp_path: Path) -> None:
    """With and without a choice of K, few and many clusters, clients that come late; from the files."""
    cases = {"four": CGPFL(K=4), "auto": CGPFL(K="auto", mu=1e9), "one": CGPFL(K=1)}
    for name, algorithm in cases.items():
        descant.run(algorithm, federation=CLUSTERED, out=tmp_path / name, rounds=2, backend="vectorised",
                    local={"steps": 2}, cohort=9 if name == "four" else "all")
        picture = tmp_path / name / "clusters.png"
        if name == "one":
            assert not picture.exists()
            continue
        rows = read_metrics(tmp_path / name)
        info = rows[-1]["info"]
        assert len(info["clusters"]) == 18
        assert info["K"] == {"four": 4, "auto": 9}[name]
        assert np.array(info["distances"]).shape == (info["K"], info["K"])
        assert (min(rows[0]["info"]["clusters"]) == -1) == (name == "four")
        drawn = picture.read_bytes()
        assert drawn.startswith(b"\x89PNG")
        draw_clusters(rows, tmp_path / "again.png")
        assert (tmp_path / "again.png").read_bytes() == drawn
    draw_clusters(rows := read_metrics(tmp_path / "four")[:1], tmp_path / "first.png")
    assert len(rows) == 1  # a single round
    assert (tmp_path / "first.png").read_bytes().startswith(b"\x89PNG")
    descant.run(FedAvg(), federation=CLUSTERED, out=tmp_path / "other", rounds=1, backend="vectorised")
    assert not (tmp_path / "other" / "clusters.png").exists()


def test_clusters_found_again_are_those_of_k_means_and_not_of_the_first_assignment() -> None:
    """2 is nearer to the model 3 than to 0, but to the mean 1/2 of the first cluster than to 6."""
    points, models = torch.tensor([[0.0], [1.0], [2.0], [10.0]]), torch.tensor([[0.0], [3.0]])
    assert clustering.nearest(points, models).labels.tolist() == [0, 0, 1, 1]
    assert clustering.recluster(points, models, None).labels.tolist() == [0, 0, 0, 1]

"""CGPFL and CGPFL-Heur: personalized federated learning with clustered generalization."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from descant.algorithms.pfedme import moreau_rounds
from descant.core.algorithm import Algorithm, ClientData, LocalStep, Message, Round, average, toward
from descant.core.fields import hyper
from descant.core.ranges import Log, Step, Whole
from descant.core.task import Task
from descant.core.tree import Tree, concat, map_tree, stack, take
from descant.core.vector import Model
from descant.errors import UsageError
from descant.priors.belief import Belief, Told
from descant.priors.clustering import Partition, choose_K, coordinates, kmeans, means, nearest, recluster
from descant.priors.precision import (
    Lam,
    Precision,
    Sent,
    as_rule,
    inner_step,
    outer_step,
    overshooting,
    strongest,
    unstable,
)

if TYPE_CHECKING:
    from descant.core.federation import Federation


class Clusters(NamedTuple):
    """The state of the server. Until the clusters are made there is a single one, of all clients."""

    priors: Belief  # [K, ...] the models w_k, and the state of each one's rule for the precision
    origin: Belief  # the one prior from which the clusters were made
    centres: Tensor  # [K, d] the means of the uploads that they were made from
    cluster: Tensor  # int64 [population] where each client was put
    placed: Tensor  # bool [population] whether it was; who was not has cluster 0

    @property
    def K(self) -> int:
        return len(self.centres)


@dataclass(frozen=True)
class CGPFL(Algorithm):
    """K models on the server, each the pFedMe model of a cluster of clients that k-means finds.

    Client, from w_i = w_k of its cluster, for each batch (the R local rounds of the paper):
        theta ~ argmin f_i(theta; batch) + lam/2 ||theta - w_i||^2   by S gradient steps of size eta;
        w_i <- w_i - beta lam (w_i - theta).
    Server:  C_1 ... C_K <- k-means of the uploaded w_i;
             w_k <- (1 - alpha) w_k + alpha mean_{i in C_k} w_i,   an empty cluster keeps its w_k.

    theta is what a client predicts with, and never leaves it. With K = 1 this is pFedMe.

    The printed step of w_i is beta (2/N) (w_i - theta), which with the paper's 0.005 and 40 clients moves
    w_i by 1/4000 of the gap and trains nothing; `outer = "printed"` takes it. In the preset "paper", the
    paper's "lr" is read as beta, and eta is that of pFedMe's code, as are the batches and where the steps on
    theta begin.

    Clusters. The first round (`k_rounds`: a later one, with one model for all before) makes them, by the
    best of several k-means++ starts. Members restart from one model, so that k-means mostly finds the
    clusters of the round before: it is seeded at the models w_k. Where everyone takes part, k-means++
    starts compete with that seed, as the paper runs k-means++ in every round. Cluster k remains that of
    model k (by the best matching), since with alpha < 1 it is mixed with it.

    Partial participation, which the paper does not treat. k-means sees the participants' uploads; those
    who are absent keep their cluster. Fewer participants than K go to the nearest model; before there are
    clusters, K clients are waited for. A client that comes later would stay in whatever cluster it starts
    from. It is therefore sent the model that the clusters were made from, does the work that the others
    did then, and is put where its upload is nearest to theirs; that upload counts in no average.

    K = "auto" is CGPFL-Heur: in the round that makes the clusters, the K with the least bound
        e(K) = sqrt(d K / m  max(ln(e m / d), 0)) + mu cost(K),   K <= K_max and half of the participants,
    where cost(K) = sum_i (m_i / m) ||w_i - w_{k(i)}||^2 (12). The printed logarithm is negative for d > e m;
    0 in its place leaves the cost alone, and K is the largest. Theorem 2 has lam + L/2 for mu; but the first
    uploads lie near each other, and mu is in effect a knob for K. The paper gives none. The default was set
    by its setting of 40 clients of Fashion-MNIST, where less than 4 leads to K = 1, 5 to 5, 8 to 10 and
    more than 16 to 20; elsewhere it may have to be ten times as large or small. (With the smaller steps of
    the preset "paper", uploads lie nearer, and 200 leads to about 10.) The report of the round (`choice`)
    says which K every mu would choose. `K_by_validation` is another way to K.

    `lam` can follow a rule, each cluster its own; the rules start anew when the clusters are made, and learn
    from the next round on, since in this one the distances were measured from the common model. A client
    that moves is evidence for the cluster it comes to, though it was measured from the one it left.

    A newcomer is given all K models, takes the one with the least loss on its training data, and does the
    work of a round from it. There is no model for all, unless K = 1.
    """

    name: ClassVar[str] = "cgpfl"
    citation: ClassVar[str] = (
        "Tang, Guo, Guo: Personalized Federated Learning With Contextualized Generalization. "
        "IJCAI 2022, arXiv:2106.13044"
    )

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"lam": 12.0, "eta": 0.09, "beta": 0.005, "mu": 200.0}}

    K: int | Literal["auto"] = hyper(4, 'clusters; "auto": by the least bound (CGPFL-Heur)',
                                     ge=1, search=Whole(1, 10))
    lam: Lam = hyper(12.0, "strength of the pull of theta to w", gt=0, search=Log(1.0, 100.0))
    eta: float = hyper(None, "step size of theta; absent: 1 / (lam + 20)", gt=0, search=Step(0.001, 0.3),
                       derived=lambda self: inner_step(self.lam))
    beta: float = hyper(None, "step size of w; absent: 3/4 of the way to theta, 0.75 / lam (printed: 0.005)",
                        gt=0, search=Step(0.001, 0.1),
                        derived=lambda self: outer_step(self.lam) if self.outer == "pfedme" else 0.005)
    alpha: float = hyper(1.0, "aggregation step; above 1 it is momentum", gt=0)
    S: int = hyper(5, "gradient steps on theta for each batch", ge=1)
    outer: Literal["pfedme", "printed"] = hyper("pfedme", "step of w: beta lam, or the printed 2 beta / N")
    starts: int = hyper(10, "k-means++ starts", ge=1)
    k_rounds: int = hyper(1, "the round that makes the clusters; one model for all before", ge=1)
    mu: float = hyper(5.0, 'weight of the cost in the bound, for K = "auto"', ge=0)
    K_max: int = hyper(20, 'largest K that "auto" tries', ge=1)

    @property
    def rule(self) -> Precision:
        """What the precision of each cluster's prior follows."""
        return as_rule(self.lam)

    def local_step(self) -> LocalStep:
        return LocalStep("eta", strongest(self.lam))

    def cautions(self) -> list[str]:
        overshoots = overshooting("beta", self.beta, self.lam) if self.outer == "pfedme" else []
        return unstable("eta", self.eta, self.lam) + overshoots

    # -- the client -----------------------------------------------------------------------------------

    def init_client(self, task: Task, model: Model) -> Model:
        return model

    def local(self, task: Task, message: Message, state: Model, data: ClientData) -> tuple[Told, Model]:
        return self._work(task, message.each, message.shared, data)

    def _work(self, task: Task, prior: Belief, printed: Tree, data: ClientData) -> tuple[Told, Model]:
        """The R local rounds from a prior. `printed` is 2 / N where the printed step is taken."""
        lam = self.rule.value(prior.pull)
        # the step on w is pFedMe's eta lam: divided by lam, so that the printed one is without it
        eta = self.beta if self.outer == "pfedme" else self.beta * printed / lam
        w, theta = moreau_rounds(task, prior.mean, lam, data, eta=eta, alpha=self.eta, K=self.S,
                                 start="theta")
        return Told(w, self.rule.evidence(theta.theta, prior.mean.theta)), theta

    def personalize(self, task: Task, message: Message, state: Model, data: ClientData) -> Model:
        return state

    def adapt(self, task: Task, message: Message, data: ClientData) -> Model:
        priors, printed = message.shared
        losses: Tensor = data.mean(lambda batch: vmap(lambda model: task.loss(model, batch))(priors.mean))
        best = losses.nan_to_num(nan=torch.inf).argmin()
        prior = map_tree(lambda rows: rows.index_select(0, best[None])[0], priors)
        _, theta = self._work(task, prior, printed, data)
        return theta

    # -- the server -----------------------------------------------------------------------------------

    def init_server(self, task: Task, model: Model, round: Round) -> Clusters:
        if self.K != "auto" and round.population < self.K:
            raise UsageError(f"cgpfl.K is {self.K}, but the federation has only {round.population} clients: "
                             f'take at most {round.population}, or "auto"')
        origin = Belief(model, self.rule.init(model.theta, round))
        nobody = torch.zeros(round.population, dtype=torch.bool)
        return Clusters(stack([origin]), origin, model.theta[None].clone(), nobody.long(), nobody)

    def broadcast(self, server: Clusters, round: Round) -> Message:
        which = server.cluster[round.cohort]
        priors = server.priors
        if server.K > 1 and bool((joining := ~server.placed[round.cohort]).any()):
            priors = concat([priors, stack([server.origin])])
            which = torch.where(joining, server.K, which)
        return Message(self._printed(server, round), self._each(priors, which, round))

    def newcomer(self, server: Clusters, round: Round) -> Message:
        # always as many models, since the form of a message is fixed; some twice, if need be
        room = self.K if self.K != "auto" else max(1, min(self.K_max, round.population // 2))
        sent = stack([self.rule.newcomer(take(server.priors.pull, k)) for k in range(server.K)])
        priors = take(Belief(server.priors.mean, sent), torch.arange(room) % server.K)
        return Message((priors, self._printed(server, round)))

    def _printed(self, server: Clusters, round: Round) -> Tree:
        return () if self.outer == "pfedme" else server.centres.new_tensor(2 / round.population)

    def _each(self, priors: Belief, which: Tensor, round: Round) -> Belief:
        """What the clients of a round are told, prior which_i each."""
        places, told = [], []
        for k in which.unique().tolist():
            at = torch.nonzero(which == k).flatten()
            shared, each = self.rule.send(take(priors.pull, k), _of(round, at))
            places.append(at)
            told.append(Sent(_repeated(shared, len(at)), each))
        return Belief(take(priors.mean, which), take(concat(told), torch.cat(places).argsort()))

    def aggregate(self, server: Clusters, uploads: Told, round: Round) -> tuple[Clusters, dict[str, Any]]:
        if server.K > 1:
            return self._go_on(server, uploads, round)
        found, report = self._first_clusters(uploads.model.theta, round)
        if found is None:  # one for all, as in pFedMe
            everyone = torch.zeros(len(round.cohort), dtype=torch.int64)
            priors, said = self._updated(server.priors, uploads, everyone, round)
            origin = map_tree(torch.clone, take(priors, 0))
            return server._replace(priors=priors, origin=origin), report | said | {"K": 1}
        K, theta = len(found.centres), uploads.model.theta
        pull = self.rule.init(server.origin.mean.theta, round)
        server = server._replace(priors=_repeated(server.origin._replace(pull=pull), K),
                                 centres=means(theta, found.labels, server.centres.expand(K, -1)))
        made, said = self._placed(server, uploads, found.labels, found.labels >= 0, round, learn=False)
        return made, report | said | {"kmeans_iterations": found.iterations}

    def _first_clusters(self, theta: Tensor, round: Round) -> tuple[Partition | None, dict[str, Any]]:
        """The clusters that this round makes, if it makes any, and how K was chosen."""
        generator = round.generator("kmeans")
        if self.K != "auto":
            if self.K == 1 or round.number < self.k_rounds:
                return None, {}
            if len(theta) < self.K:
                note = (f"{len(theta)} clients took part, fewer than K = {self.K}: one model for all until a "
                        "round has so many")
                return None, {"waiting_for": self.K, "note": note}
            return kmeans(coordinates(theta), self.K, generator, self.starts), {}
        if round.number > self.k_rounds:
            return None, {}
        found, choice = choose_K(coordinates(theta), round.sizes, theta.shape[1], mu=self.mu,
                                 most=max(1, min(self.K_max, len(theta) // 2)), generator=generator,
                                 starts=self.starts)
        makes = round.number == self.k_rounds and choice.K > 1
        return found if makes else None, {"choice": choice.report()}

    def _go_on(self, server: Clusters, uploads: Told, round: Round) -> tuple[Clusters, dict[str, Any]]:
        """A round that finds clusters."""
        theta, placed = uploads.model.theta, server.placed[round.cohort]
        labels = nearest(theta, server.centres).labels  # of those who join
        iterations = 0
        if bool(placed.any()):
            points = coordinates(torch.cat([theta[placed], server.priors.mean.theta]))
            everyone = int(placed.sum()) == round.population
            found = recluster(points[: -server.K], points[-server.K :],
                              round.generator("kmeans") if everyone else None, self.starts)
            labels[placed] = found.labels
            iterations = found.iterations
        after, report = self._placed(server, uploads, labels, placed, round)
        return after, report | {"kmeans_iterations": iterations}

    def _placed(self, server: Clusters, uploads: Told, labels: Tensor, counts: Tensor, round: Round,
                learn: bool = True) -> tuple[Clusters, dict[str, Any]]:
        """The server after the cohort was put into clusters; `counts`: whose uploads are averaged; `learn`:
        whether their evidence is for the rules."""
        some = torch.nonzero(counts).flatten()
        priors, report = self._updated(server.priors, take(uploads, some), labels[some], _of(round, some),
                                       learn)
        known = server.placed[round.cohort]
        moved = (labels != server.cluster[round.cohort])[known].double()
        cluster, placed = server.cluster.clone(), server.placed.clone()
        cluster[round.cohort] = labels
        placed[round.cohort] = True
        w = priors.mean.theta.double()
        distances = torch.cdist(w, w, compute_mode="donot_use_mm_for_euclid_dist")
        return server._replace(priors=priors, cluster=cluster, placed=placed), report | {
            "K": server.K, "clusters": torch.where(placed, cluster, -1), "distances": distances,
            "moved": float(moved.mean()) if len(moved) else None}

    def _updated(self, priors: Belief, uploads: Told, labels: Tensor, round: Round, learn: bool = True
                 ) -> tuple[Belief, dict[str, Any]]:
        """Each cluster's prior after its members' uploads; an empty cluster keeps its own."""
        after, reports = [], []
        for k in range(len(priors.mean.theta)):
            prior = take(priors, k)
            said: dict[str, Any] = {}
            if len(at := torch.nonzero(labels == k).flatten()):
                own, members = take(uploads, at), _of(round, at)
                weights = members.weights("uniform")
                mean = toward(prior.mean, average(own.model, weights), self.alpha)
                pull = prior.pull
                if learn:
                    pull, said = self.rule.update(pull, own.evidence, weights, members)
                prior = Belief(mean, pull)
            after.append(prior)
            reports.append(said)
        return stack(after), {"priors": reports} if any(reports) else {}

    def global_model(self, server: Clusters) -> Model | None:
        model: Model = take(server.priors.mean, 0)
        return model if self.K == 1 else None


def _of(round: Round, at: Tensor) -> Round:
    """The facts of the round for some of its clients."""
    return round._replace(cohort=round.cohort[at], sizes=round.sizes[at])


def _repeated(tree: Tree, count: int) -> Tree:
    return map_tree(lambda t: t.expand(count, *t.shape), tree)


# -- K by validation --------------------------------------------------------------------------------------


class ChosenK(NamedTuple):
    """The K with the best validation figure, and the figures of all."""

    algorithm: CGPFL
    metric: str
    figures: dict[int, float]  # K -> mean over the clients, in the validation-best round


def K_by_validation(federation: Federation, candidates: Sequence[int], algorithm: CGPFL | None = None,
                    **settings: Any) -> ChosenK:
    """CGPFL with the K of `candidates` whose personal models do best on the clients' validation data.

    A run for each K, with the `settings` of `descant.run` (model, rounds, batch, ...): a few rounds will do.
    This needs no bound and no mu. It is not part of the method, because the clients would have to work for
    every K. Equal figures: the smaller K.
    """
    from descant.api import run  # which knows all methods, hence this module

    if not candidates:
        raise UsageError("candidates is empty: name the K to be tried")
    figures: dict[int, float] = {}
    metric = "loss"
    for K in sorted(set(candidates)):
        best = run(replace(algorithm or CGPFL(), K=K), federation=federation, **settings).summary["best"]
        if best is None:
            raise UsageError("the clients have no validation data to choose K by: "
                             "make the federation with validation above 0")
        scores = best["personal"]["val"]
        metric = "accuracy" if "accuracy" in scores else "loss"
        figures[K] = scores[metric]["mean"]
    sign = 1 if metric == "loss" else -1
    K = min(figures, key=lambda K: (sign * figures[K], K))
    return ChosenK(replace(algorithm or CGPFL(), K=K), metric, figures)

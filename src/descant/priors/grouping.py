"""One belief for each group of clients, which k-means finds from their uploads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from descant.core.algorithm import ClientData, Message, Round, least_loss
from descant.core.fields import Checked, hyper
from descant.core.ranges import Whole
from descant.core.task import Task
from descant.core.tree import Tree, concat, map_tree, pick, repeat, rows, stack, take
from descant.core.vector import Model
from descant.errors import UsageError
from descant.priors.belief import Belief, Upload, itself
from descant.priors.clustering import Partition, choose_K, coordinates, kmeans, means, nearest, recluster
from descant.priors.prior import Prior


class Groups(NamedTuple):
    """The state of the server. Until the clusters are made there is a single one, of all clients."""

    priors: Tree  # [K, ...] the state of each cluster's belief
    origin: Tree  # that of the one belief from which the clusters were made
    centres: Tensor  # [K, d] the means of the uploads that they were made from
    cluster: Tensor  # int64 [population] where each client was put
    placed: Tensor  # bool [population] whether it was; who was not has cluster 0

    @property
    def K(self) -> int:
        return len(self.centres)


@dataclass(frozen=True)
class KMeans(Checked):
    """Clusters of clients by k-means of their uploads. K = "auto": the K of least bound (CGPFL-Heur)."""

    name: ClassVar[str] = "kmeans"

    K: int | Literal["auto"] = hyper(4, 'clusters; "auto": by the least bound (CGPFL-Heur)', ge=1,
                                     search=Whole(1, 10))
    starts: int = hyper(10, "k-means++ starts", ge=1)
    k_rounds: int = hyper(1, "the round that makes the clusters; one model for all before", ge=1)
    mu: float = hyper(5.0, 'weight of the cost in the bound, for K = "auto"', ge=0)
    K_max: int = hyper(20, 'largest K that "auto" tries', ge=1)

    def largest(self, population: int) -> int:
        """The most clusters that there can be."""
        return self.K if self.K != "auto" else max(1, min(self.K_max, population // 2))

    def first(self, theta: Tensor, round: Round) -> tuple[Partition | None, dict[str, Any]]:
        """The clusters that this round makes of the uploads [cohort, d], if any, and how K was chosen."""
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
                                 most=self.largest(len(theta)), generator=generator, starts=self.starts)
        makes = round.number == self.k_rounds and choice.K > 1
        return found if makes else None, {"choice": choice.report()}

    def again(self, theta: Tensor, models: Tensor, round: Round) -> Partition:
        """Clusters found again from the uploads and the clusters' models, cluster k being that of model k.
        Where everyone takes part, k-means++ starts compete with the seed at the models."""
        K, points = len(models), coordinates(torch.cat([theta, models]))
        generator = round.generator("kmeans") if len(theta) == round.population else None
        return recluster(points[:-K], points[-K:], generator, self.starts)


@dataclass(frozen=True)
class Grouped(Belief):
    """Any belief, one per cluster of clients.

    The parts of a belief start anew when the clusters are made, and learn from the next round on: in this
    one, evidence was measured from the common model. k-means sees the participants' uploads; absent clients
    keep their cluster. A client that comes later is sent the belief that the clusters were made from, does
    the work that the others did then, and is put where its upload is nearest to theirs; that upload counts
    in no mean. A newcomer is sent all beliefs and takes the one whose centre has the least training loss.
    """

    inner: Belief
    how: KMeans
    field: str  # the field that says K, for errors

    def init(self, model: Model, round: Round) -> Groups:
        if self.how.K != "auto" and round.population < self.how.K:
            raise UsageError(f"{self.field} is {self.how.K}, but the federation has only {round.population} "
                             f'clients: take at most {round.population}, or "auto"')
        origin = self.inner.init(model, round)
        nobody = torch.zeros(round.population, dtype=torch.bool)
        return Groups(stack([origin]), origin, model.theta[None].clone(), nobody.long(), nobody)

    # -- what clients are sent ------------------------------------------------------------------------

    def send(self, state: Groups, round: Round) -> Message:
        which, priors = state.cluster[round.cohort], state.priors
        if state.K > 1 and bool((joining := ~state.placed[round.cohort]).any()):
            priors = concat([priors, stack([state.origin])])
            which = torch.where(joining, state.K, which)
        places, sent = [], []
        for k in which.unique().tolist():
            at = torch.nonzero(which == k).flatten()
            shared, each = self.inner.send(take(priors, k), round.of(at))
            places.append(at)
            sent.append(Message(repeat(shared, len(at)), each))
        return Message(each=take(concat(sent), torch.cat(places).argsort()))

    def newcomer(self, state: Groups, round: Round) -> Message:
        # always as many, since the form of a message is fixed; some twice, if need be
        which = torch.arange(self.how.largest(round.population)) % state.K
        sent = stack([self.inner.newcomer(take(state.priors, k), round) for k in range(state.K)])
        return Message(take(sent, which))

    def chosen(self, task: Task, message: Message, data: ClientData, whole: Callable[[Model], Model] = itself
               ) -> Message:
        sent = message.shared
        centres = stack([whole(self.inner.centre(take(sent, k))) for k in range(rows(sent))])
        return Message(each=pick(sent, least_loss(task, centres, data, "train")))

    def prior(self, sent: Message) -> Prior:
        return self.inner.prior(sent.each)

    def centre(self, sent: Message) -> Model:
        return self.inner.centre(sent.each)

    def tell(self, sent: Message, upload: Model, theta: Model, around: Tensor | None = None) -> Upload:
        return self.inner.tell(sent.each, upload, theta, around)

    # -- what the server makes of the uploads ---------------------------------------------------------

    def update(self, state: Groups, uploads: Upload, round: Round, learn: bool = True
               ) -> tuple[Groups, dict[str, Any]]:
        theta = uploads.model.theta
        if state.K > 1:
            return self._again(state, uploads, round)
        found, report = self.how.first(theta, round)
        if found is None:  # one for all
            everyone = torch.zeros(len(round.cohort), dtype=torch.int64)
            priors, said = self._updated(state.priors, uploads, everyone, round)
            origin = map_tree(torch.clone, take(priors, 0))
            return state._replace(priors=priors, origin=origin), report | said | {"K": 1}
        K = len(found.centres)
        state = state._replace(priors=repeat(self.inner.restarted(state.origin, round), K),
                               centres=means(theta, found.labels, state.centres.expand(K, -1)))
        made, said = self._placed(state, uploads, found.labels, found.labels >= 0, round, learn=False)
        return made, report | said | {"kmeans_iterations": found.iterations}

    def _again(self, state: Groups, uploads: Upload, round: Round) -> tuple[Groups, dict[str, Any]]:
        """A round that finds clusters."""
        theta, placed = uploads.model.theta, state.placed[round.cohort]
        labels = nearest(theta, state.centres).labels  # of those who join
        iterations = 0
        if bool(placed.any()):
            found = self.how.again(theta[placed], self._models(state.priors), round)
            labels[placed] = found.labels
            iterations = found.iterations
        after, report = self._placed(state, uploads, labels, placed, round)
        return after, report | {"kmeans_iterations": iterations}

    def _placed(self, state: Groups, uploads: Upload, labels: Tensor, counts: Tensor, round: Round,
                learn: bool = True) -> tuple[Groups, dict[str, Any]]:
        """The state after the cohort was put into clusters; `counts`: whose uploads are used."""
        some = torch.nonzero(counts).flatten()
        priors, report = self._updated(state.priors, take(uploads, some), labels[some], round.of(some), learn)
        known = state.placed[round.cohort]
        moved = (labels != state.cluster[round.cohort])[known].double()
        cluster, placed = state.cluster.clone(), state.placed.clone()
        cluster[round.cohort] = labels
        placed[round.cohort] = True
        w = self._models(priors).double()
        distances = torch.cdist(w, w, compute_mode="donot_use_mm_for_euclid_dist")
        return state._replace(priors=priors, cluster=cluster, placed=placed), report | {
            "K": state.K, "clusters": torch.where(placed, cluster, -1), "distances": distances,
            "moved": float(moved.mean()) if len(moved) else None}

    def _updated(self, priors: Tree, uploads: Upload, labels: Tensor, round: Round, learn: bool = True
                 ) -> tuple[Tree, dict[str, Any]]:
        """Each cluster's state after its members' uploads; an empty cluster keeps its own."""
        after, reports = [], []
        for k in range(rows(priors)):
            prior = take(priors, k)
            said: dict[str, Any] = {}
            if len(at := torch.nonzero(labels == k).flatten()):
                prior, said = self.inner.update(prior, take(uploads, at), round.of(at), learn)
                said.pop("client_weights", None)  # those of one group are not the method's
            after.append(prior)
            reports.append(said)
        return stack(after), {"priors": reports} if any(reports) else {}

    def _models(self, priors: Tree) -> Tensor:
        """[K, d] the clusters' models."""
        models = [self.inner.model(take(priors, k)) for k in range(rows(priors))]
        return torch.stack([model.theta for model in models if model is not None])

    def model(self, state: Groups) -> Model | None:
        return self.inner.model(take(state.priors, 0)) if self.how.K == 1 else None

    def client_weights(self, round: Round) -> Tensor | None:
        return self.inner.client_weights(round)


def grouped(belief: Belief, groups: KMeans | None, method: str) -> Belief:
    """The belief itself, or one per group."""
    return belief if groups is None else Grouped(belief, groups, f"{method}.groups.K")

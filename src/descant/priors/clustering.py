"""k-means on models, and how many clusters there should be (CGPFL-Heur).

Points are rows. k-means sees only distances, so that n models of any length are first written in n
coordinates (`coordinates`): what follows costs the same for a network of a million parameters as for a
regression.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.errors import DescantError

MOST_ITERATIONS = 300  # Lloyd's algorithm ends by itself; only ties in the last bit could keep it going
BLOCK = 2**16  # columns of a Gram matrix's factor that are in float64 at the same time


class Partition(NamedTuple):
    """A clustering of points."""

    labels: Tensor  # int64 [n] the cluster of each point
    centres: Tensor  # [K, q] the means of the clusters; of an empty one, what it was seeded with
    squares: Tensor  # [n] squared distance of each point to its centre
    iterations: int  # how often the centres were computed

    @property
    def cost(self) -> float:
        """What k-means minimises: the sum of the squared distances."""
        return float(self.squares.sum())


def coordinates(rows: Tensor) -> Tensor:
    """The same points, up to a shift and a rotation, in no more coordinates than there are points.

    With G = X X' the Gram matrix of the centred rows X and G = V diag(v) V', the rows of V diag(sqrt(v))
    have the same products, hence the same distances.
    """
    n, d = rows.shape
    if d <= n:
        points = rows.double()
        points = points - points.mean(0)
    else:
        gram = torch.zeros((n, n), dtype=torch.float64)
        for block in rows.split(BLOCK, 1):
            centred = block.double() - block.double().mean(0)
            gram += centred @ centred.T
        _require_finite(gram)
        values, vectors = torch.linalg.eigh(gram)
        points = vectors * values.clamp(min=0).sqrt()
    _require_finite(points)
    return points


def _require_finite(values: Tensor) -> None:
    if not bool(torch.isfinite(values).all()):
        raise DescantError("the clients' models are too large to be clustered: the training diverges; "
                           "try smaller steps")


def nearest(points: Tensor, centres: Tensor) -> Partition:
    """Every point with the nearest centre; the centres stay."""
    # differences, not the squares of norms: those lose the digits in which near points differ
    distances = torch.cdist(points, centres, compute_mode="donot_use_mm_for_euclid_dist")
    least, labels = distances.min(1)
    return Partition(labels, centres, least.square(), 0)


def lloyd(points: Tensor, centres: Tensor) -> Partition:
    """k-means from given centres. A cluster that is empty keeps its centre."""
    found = nearest(points, centres)
    for iteration in range(1, MOST_ITERATIONS + 1):
        before = found.labels
        found = nearest(points, means(points, before, found.centres))._replace(iterations=iteration)
        if torch.equal(found.labels, before):
            break
    return found


def means(points: Tensor, labels: Tensor, empty: Tensor) -> Tensor:
    """The mean of each cluster's points; an empty cluster has its row of `empty`."""
    return torch.stack([points[labels == k].mean(0) if bool((labels == k).any()) else empty[k]
                        for k in range(len(empty))])


def kmeans(points: Tensor, K: int, generator: np.random.Generator, starts: int = 10) -> Partition:
    """The best of several k-means++ starts. Clusters are numbered by their first members, so that the
    numbers do not depend on the start."""
    from sklearn.cluster import kmeans_plusplus  # slow: only when asked for

    best: Partition | None = None
    for _ in range(starts):
        seeds, _ = kmeans_plusplus(points.numpy(), K, random_state=int(generator.integers(2**31)))
        found = lloyd(points, torch.from_numpy(seeds))
        if best is None or found.cost < best.cost:
            best = found
    assert best is not None
    n = len(points)
    first = torch.full((K,), n).scatter_reduce(0, best.labels, torch.arange(n), "amin")
    return renumbered(best, torch.argsort(torch.argsort(first, stable=True), stable=True))


def renumbered(partition: Partition, number: Tensor) -> Partition:
    """The same clusters with other numbers: cluster k becomes number_k."""
    return partition._replace(labels=number[partition.labels], centres=partition.centres[number.argsort()])


def match(centres: Tensor, models: Tensor) -> Tensor:
    """Which model each cluster is to be called after: the permutation with the least sum of squared
    distances between the clusters' centres and the models of the round before."""
    from scipy.optimize import linear_sum_assignment  # slow: only when asked

    squares = torch.cdist(centres, models, compute_mode="donot_use_mm_for_euclid_dist").square()
    return torch.from_numpy(linear_sum_assignment(squares.numpy())[1])


def recluster(points: Tensor, models: Tensor, generator: np.random.Generator | None, starts: int = 10
              ) -> Partition:
    """k-means seeded at the present models, cluster k being the one of model k.

    With a generator, k-means++ starts compete with that seed; the winner's clusters are matched to the
    models. With fewer points than models, every point goes to the nearest model.
    """
    if len(points) < len(models):
        return nearest(points, models)
    best = lloyd(points, models)
    if generator is not None:
        anew = kmeans(points, len(models), generator, starts)
        # by more than rounding: else the same clusters would be found in another way in every round
        if anew.cost < best.cost * (1 - 1e-9):
            best = anew
    return renumbered(best, match(best.centres, models))


# -- how many clusters ----------------------------------------------------------------------------------


class Choice(NamedTuple):
    """The bound e(K) = complexity(K) + mu cost(K) for K = 1, 2, ..., and where it is least."""

    K: int
    mu: float
    complexity: list[float]
    cost: list[float]

    @property
    def bound(self) -> list[float]:
        return [a + self.mu * c for a, c in zip(self.complexity, self.cost, strict=True)]

    def report(self) -> dict[str, object]:
        """For the metrics of a round: e(K), its parts, and which K other values of mu would choose."""
        return {"K": self.K, "mu": self.mu, "e": self.bound, "complexity": self.complexity,
                "cost": self.cost, "K_by_mu": K_by_mu(self.complexity, self.cost)}


def complexity(K: int, d: int, m: float) -> float:
    """sqrt(d K / m  max(ln(e m / d), 0)): the part of the bound that grows with K; d parameters, m samples.

    For d > e m the printed logarithm is negative, and the bound says nothing about K: 0 is in its place.
    """
    return math.sqrt(d * K / m * max(math.log(math.e * m / d), 0.0))


def choose_K(points: Tensor, sizes: Tensor, d: int, *, mu: float, most: int, generator: np.random.Generator,
             starts: int = 10) -> tuple[Partition, Choice]:
    """The K <= most with the least e(K), and its partition.

    cost(K) = sum_i (m_i / m) min_k ||w_i - w_k||^2 with the clusters of k-means, m_i = sizes_i.
    """
    found = [kmeans(points, K, generator, starts) for K in range(1, most + 1)]
    share = sizes.double() / sizes.double().sum()
    m = float(sizes.double().sum())
    choice = Choice(0, mu, [complexity(K, d, m) for K in range(1, most + 1)],
                    [float(share @ partition.squares) for partition in found])
    best = int(np.argmin(choice.bound))
    return found[best], choice._replace(K=best + 1)


def K_by_mu(complexity: list[float], cost: list[float]) -> list[tuple[float, int]]:
    """Which K is chosen from which mu on: [(0, K0), (mu1, K1), ...].

    e(K) is a line in mu for every K, and their lower envelope runs through lines of ever lesser slope.
    """
    at = int(np.argmin(complexity))
    steps = [(0.0, at + 1)]
    while flatter := [k for k in range(len(cost)) if cost[k] < cost[at]]:
        crossing = {k: (complexity[k] - complexity[at]) / (cost[at] - cost[k]) for k in flatter}
        at = min(flatter, key=lambda k, crossing=crossing: (crossing[k], cost[k]))  # type: ignore[misc]
        steps.append((crossing[at], at + 1))
    return steps

"""Clusters settle, distances between the models become stable, k-means is no bottleneck.

MNIST with MLR, 40 clients of 2 classes, K = 4, the settings of Table 1 but without validation rows: the
paper does not say which dataset, model and K Figures 4 and 5 have. `changes` are the clients that change
their cluster in a round. The paper speaks of the distances between the models' parameters; `spread` is how
far the uploads lie from their mean. The clustering of every round is made a second time and timed. k-means
begins at the present models of the clusters, and takes fresh k-means++ starts only where they are better:
with few changes few iterations are to be expected. How few are few (3), how stable is stable (5 %) and
what is a bottleneck (half of a round) is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import descant
from descant.algorithms import CGPFL
from descant.comparison.reproduce.claims import Claim, fact, of
from descant.view.lines import lines

SOURCE = "CGPFL, Figures 4 and 5, MNIST-MLR: clusters over the rounds, time of k-means"
SEEDS = 5
POINTS = [{"K": 4}]
ROUNDS, PARTS = 200, 10
FEW = 3  # iterations of k-means
STABLE = 0.05  # of the spread, in half of the rounds


def measure(seed: int, K: int) -> dict[str, float]:
    federation = descant.federation("mnist", standardise="pixel", partition="classes", clients=40,
                                    classes_per_client=2, sizes="uniform", smallest=400, largest=5000,
                                    seed=seed, test=0.25, validation=0.0)
    method = CGPFL.preset("paper", K=K, weight_decay=1e-4)
    run = descant.run(method, federation=federation, model="mclr", rounds=ROUNDS, batch=20,
                      local={"steps": 10}, backend="vectorised", seed=seed,
                      eval={"every": ROUNDS, "diagnostics": ["spread", "_watch:clustering_seconds"]})
    labels = np.array([row["info"]["clusters"] for row in run.history])
    changes = (labels[1:] != labels[:-1]).sum(1)
    spread = np.array([row["diagnostics"]["spread"] for row in run.history])
    seconds = np.array([row["seconds"] for row in run.history])
    clustering = np.array([row["diagnostics"]["clustering_seconds"] for row in run.history])
    iterations = np.array([row["info"]["kmeans_iterations"] for row in run.history])
    half = ROUNDS // 2
    return {"changes in the last half": float(changes[half:].sum()),
            "growth of the spread": float(spread[-10:].mean() / spread[half - 5 : half + 5].mean() - 1),
            "iterations from round 10": float(iterations[9:].max()),
            "kmeans_ms": 1000 * float(np.median(clustering)),
            "share of kmeans": float(np.median(clustering) / np.median(seconds))} | {
                f"spread {k}": float(part.mean()) for k, part in enumerate(np.array_split(spread, PARTS))}


def claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    changes, growth, iterations, share, cost = ([row[name] for row in rows] for name in (
        "changes in the last half", "growth of the spread", "iterations from round 10", "share of kmeans",
        "kmeans_ms"))
    return [
        fact("the clusters converge: they stay the same", f"{np.mean(changes):.3g} changes in the last half",
             max(changes) == 0),
        fact("the distances between the models converge to a stable value",
             f"they grow by {100 * np.mean(growth):.2g} % in the last half", max(map(abs, growth)) < STABLE),
        fact("k-means takes few iterations after several rounds",
             f"at most {max(iterations):.0f} from round 10 on", max(iterations) <= FEW),
        fact("the computation of k-means is not a bottleneck",
             f"{np.mean(cost):.2g} ms, {100 * np.mean(share):.2g} % of a round here, in which one process "
             "trains all clients", max(share) < 0.5)]


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    at = [(k + 0.5) * ROUNDS / PARTS for k in range(PARTS)]
    lines({"K = 4": [of(rows, f"spread {k}", K=4) for k in range(PARTS)]}, at, path, x="round",
          y="distance of the uploads from their mean")

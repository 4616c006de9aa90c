"""t-SNE pictures of the synthetic data: clients are clusters under feature skew, and mixed without.

The shells of appendix B.1, 60 rows of each of 10 clients. What the pictures show is counted: the share
of the ten nearest neighbours of a point that belong to its own client.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import descant
from descant.comparison.reproduce.claims import Claim, fact, of

SOURCE = "FedMAP, Figures 4 and 5, t-SNE of the synthetic data"
SEEDS = 3
ROWS = 60  # of each client
POINTS = [{"scenario": scenario} for scenario in ("feature", "quantity", "label")]


def rows_of(seed: int, scenario: str) -> tuple[np.ndarray, np.ndarray]:
    """Standardised rows, and whose they are."""
    made = descant.federation("fedmap_shell", scenario=scenario, seed=seed, test=0.0, validation=0.0)
    x = np.concatenate([made.x[made.train[client][:ROWS]].numpy() for client in range(10)])
    owner = np.repeat(np.arange(10), [min(ROWS, len(made.train[client])) for client in range(10)])
    return (x - x.mean(0)) / x.std(0), owner


def measure(seed: int, scenario: str) -> dict[str, float]:
    from sklearn.manifold import TSNE
    from sklearn.neighbors import NearestNeighbors

    x, owner = rows_of(seed, scenario)
    flat = TSNE(random_state=seed).fit_transform(x)
    near = NearestNeighbors(n_neighbors=11).fit(flat).kneighbors(flat, return_distance=False)[:, 1:]
    return {"own": float((owner[near] == owner[:, None]).mean())}


def claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    return [fact(f"{scenario} skew: clients are clusters of their own",
                 f"{100 * np.mean(of(rows, 'own', scenario=scenario)):.0f} % of the nearest points are of "
                 "the same client (10 % if mixed)", min(of(rows, "own", scenario=scenario)) > 0.5)
            for scenario in ("feature", "quantity", "label")]


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure
    from sklearn.manifold import TSNE

    figure = Figure(figsize=(12, 4), layout="constrained")
    for axes, scenario in zip(figure.subplots(1, 3), ("feature", "quantity", "label"), strict=True):
        x, owner = rows_of(0, scenario)
        flat = TSNE(random_state=0).fit_transform(x)
        axes.scatter(*flat.T, c=owner, cmap="tab10", s=3)
        axes.set_title(f"{scenario} skew", fontsize=10)
        axes.set_axis_off()
    figure.savefig(path, dpi=100, metadata={"Software": None})

"""t-SNE pictures of the synthetic data: mixed without skew, clusters, densities and classes with it.

The shells of appendix B.1, a 25th of the rows of each of 10 clients, chosen at random: 80, or 20 where a
client has 500 of 2000 rows. Without skew, the rows are those of one client, dealt out at random. What the
pictures show is counted: the share of the ten nearest neighbours of a point that belong to its own client; a
client's points for each unit of area (of its covariance); its classes. The limits of these figures are ours.
The paper reads sizes from the densities: that clients with fewer rows have fewer points for a unit of area
is judged, too. Our affine maps are in all three scenarios, so that clients are clusters in all of them; the
paper has maps under feature skew alone (4.1), and names clusters there (B.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import descant
from descant.comparison.reproduce.claims import Claim, fact, of
from descant.core.files import write_atomic
from descant.experiment.plots import png

SOURCE = "FedMAP, Figures 4 and 5, t-SNE of the synthetic data"
SEEDS = 5
CLIENTS, FULL, SHARE = 10, 2000, 25
SCENARIOS = {"none": "no skew", "feature": "feature skew", "quantity": "quantity skew", "label": "label skew"}
CHANCE = 0.03  # by which shares of some 400 points may differ
POINTS = [{"scenario": scenario} for scenario in SCENARIOS]


class Picture(NamedTuple):
    flat: np.ndarray  # [rows, 2]
    owner: np.ndarray  # [rows]
    label: np.ndarray  # [rows]


def picture(seed: int, scenario: str) -> Picture:
    from sklearn.manifold import TSNE

    iid = scenario == "none"
    made = descant.federation("fedmap_shell", scenario="feature" if iid else scenario, seed=seed, test=0.0,
                              validation=0.0, clients=1 if iid else CLIENTS)
    rng = np.random.default_rng(seed)
    dealt = rng.permutation(made.train[0])
    each = [dealt[k :: CLIENTS] if iid else rng.permutation(made.train[k]) for k in range(CLIENTS)]
    kept = [rows[: len(rows) * (CLIENTS if iid else 1) // SHARE] for rows in each]
    rows = np.concatenate(kept)
    x = made.x[rows].numpy()
    flat = TSNE(random_state=seed).fit_transform((x - x.mean(0)) / x.std(0))
    return Picture(flat, np.repeat(np.arange(CLIENTS), [len(each) for each in kept]), made.y[rows].numpy())


def measure(seed: int, scenario: str) -> dict[str, float]:
    from sklearn.neighbors import NearestNeighbors

    flat, owner, label = picture(seed, scenario)
    near = NearestNeighbors(n_neighbors=11).fit(flat).kneighbors(flat, return_distance=False)[:, 1:]
    mine = [owner == k for k in range(CLIENTS)]
    rows = np.array([each.sum() for each in mine])
    density = rows / np.array([np.sqrt(np.linalg.det(np.cov(flat[each].T))) for each in mine])
    zeros = np.array([(label[each] == 0).mean() for each in mine])
    figures = {"own": float((owner[near] == owner[:, None]).mean())}
    for name, values in (("rows", rows), ("density", density), ("class 0", zeros)):
        figures |= {f"{name}, 1-5": float(values[:5].mean()), f"{name}, 6-10": float(values[5:].mean())}
    return figures


def claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    mixed, apart = (of(rows, "own", scenario=scenario) for scenario in ("none", "feature"))
    said = "{:.0f} % of the nearest points are of the same client (10 % if mixed)"
    few, full = (np.mean(of(rows, f"rows, {group}", scenario="quantity")) for group in ("6-10", "1-5"))
    many, thin = (of(rows, f"density, {group}", scenario="quantity") for group in ("1-5", "6-10"))
    skewed, balanced = (float(np.mean(of(rows, f"class 0, {group}", scenario="label")))
                        for group in ("6-10", "1-5"))
    return [
        fact("no skew: points are uniformly mixed across clients", said.format(100 * np.mean(mixed)),
             max(mixed) < 0.2),
        fact("feature skew: distinct clusters for each client", said.format(100 * np.mean(apart)),
             min(apart) > 0.5),
        fact("quantity skew: clients 6-10 have a quarter of the points", f"{few:.0f}, of {full:.0f}",
             bool(4 * few == full)),
        fact("quantity skew: densities vary: those of clients 1-5 and 6-10 differ by a factor of 2 or more",
             f"{np.mean(many):.3g} and {np.mean(thin):.3g} points for a unit of area",
             all(max(a / b, b / a) >= 2 for a, b in zip(many, thin, strict=True))),
        fact("quantity skew: densities indicate sizes: those of clients 6-10, with fewer rows, are lower",
             f"{np.mean(thin):.3g}, of clients 1-5 {np.mean(many):.3g}",
             all(a > b for a, b in zip(many, thin, strict=True))),
        fact("label skew: classes vary: class 0 has 85 % of the points of clients 6-10, 50 % of others",
             f"{100 * skewed:.0f} % and {100 * balanced:.0f} %",
             abs(skewed - 0.85) <= CHANCE and abs(balanced - 0.5) <= CHANCE)]


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.6), layout="constrained")
    for axes, (scenario, title) in zip(figure.subplots(1, 4), SCENARIOS.items(), strict=True):
        flat, owner, label = picture(0, scenario)
        for value, marker in ((0, "o"), (1, "x")):
            shown = label == value
            axes.scatter(*flat[shown].T, c=owner[shown], cmap="tab10", vmin=0, vmax=CLIENTS - 1, s=6,
                         marker=marker, linewidths=0.6)
        axes.set_title(title, fontsize=10)
        axes.set_axis_off()
    figure.supxlabel("colours: clients; dots: class 0, crosses: class 1", fontsize=9)
    write_atomic(path, png(figure))

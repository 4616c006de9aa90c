"""Figure 1(a) of the one-stage FedProx paper: error of the local models against heterogeneity.

    python experiments/figure_1a.py --out results/figure_1a

10 clients of 200 training rows each, logistic regression in 10 dimensions, labels drawn from the model (the
authors' argmax labels are separable, so that a minimiser does not exist). Full gradients: 40 rounds of 40
steps of size 0.1. The adaptive lambda is that of the practical rule, from R after 20 rounds with 0.02, less
the noise of estimation (about 200 / n here, by `descant.theory.estimate`). The error is
mean_i ||w_i - w*_i||^2 after the last round; means over the seeds, with their standard errors. Written:
figure_1a.csv and figure_1a.png.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track

import descant
from descant import SGD
from descant.algorithms import GlobalTrain, LocalTrain, OneStageFedProx
from descant.core.algorithm import Algorithm
from descant.priors.precision import Adaptive
from descant.view.comparison import COLOURS

HETEROGENEITY = (0.1, 0.3, 0.6, 1.0, 2.0, 3.0)
METHODS: dict[str, Algorithm] = {
    "LocalTrain": LocalTrain(SGD(lr=0.1)),
    "GlobalTrain": GlobalTrain(lr=0.1),
    "FedProx, 0.02": OneStageFedProx(lam=0.02, eta=0.1),
    "FedProx, 0.1": OneStageFedProx(lam=0.1, eta=0.1),
    "FedProx, 0.5": OneStageFedProx(lam=0.5, eta=0.1),
    "FedProx, adaptive": OneStageFedProx(lam=Adaptive(pilot=0.02, rounds=20, noise=200.0, cap=2.0), eta=0.1),
}


def error(method: Algorithm, heterogeneity: float, seed: int) -> float:
    """The total error of the local models after training."""
    federation = descant.federation("fedprox_logistic", heterogeneity=heterogeneity, rows=250, seed=seed,
                                    test=0.2, validation=0.0)
    # GlobalTrain makes one step a round, and meets no other model on the way
    rounds, steps = (1600, 1) if isinstance(method, GlobalTrain) else (40, 40)
    run = descant.run(method, federation=federation, model="mclr", rounds=rounds, batch="full",
                      local={"steps": steps}, dtype="float64", backend="vectorised", seed=seed,
                      eval={"every": rounds})
    return float(run.history[-1]["personal"]["truth_error"])


def draw(table: dict[str, np.ndarray], path: Path) -> None:
    """table: [heterogeneity, seeds] for each method."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for (label, errors), colour in zip(table.items(), COLOURS, strict=False):
        spread = errors.std(1, ddof=1) / errors.shape[1] ** 0.5 if errors.shape[1] > 1 else 0 * errors[:, 0]
        axes.errorbar(HETEROGENEITY, errors.mean(1), spread, color=colour, label=label, marker="o",
                      markersize=3, capsize=2)
    axes.set(xlabel="R, standard deviation of the clients' true models", xscale="log", yscale="log",
             ylabel="mean squared error of the local models")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130, metadata={"Software": None})


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--out", type=Path, required=True, help="directory for the table and the picture")
    options.add_argument("--seeds", type=int, default=3, help="number of seeds")
    chosen = options.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    work = [(label, k, seed) for label in METHODS for k in range(len(HETEROGENEITY))
            for seed in range(chosen.seeds)]
    table = {label: np.zeros((len(HETEROGENEITY), chosen.seeds)) for label in METHODS}
    for label, k, seed in track(work, "runs", console=console):
        table[label][k, seed] = error(METHODS[label], HETEROGENEITY[k], seed)
    with (chosen.out / "figure_1a.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["R", *METHODS])
        for k, heterogeneity in enumerate(HETEROGENEITY):
            writer.writerow([heterogeneity, *(f"{table[label][k].mean():.4g}" for label in METHODS)])
    draw(table, chosen.out / "figure_1a.png")
    print((chosen.out / "figure_1a.csv").read_text())


if __name__ == "__main__":
    main()

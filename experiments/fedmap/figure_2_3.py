"""The linear example of appendix A.4: a learned prior finds what five lines share.

y = -x + 4 (k - 1) + noise with 60, 1, 2, 3 and 50 points; epsilon = 1e-4, s from 0, the mean from N(0, 1).

- FedMAP: our method with the learned prior, 10 rounds. Clients take 300 full-batch steps of SGD with momentum
  from their own models, and the server minimises, where the paper's takes gradient steps (Eq. 3).
- Eq. 3: the same with a gradient step of size 1 for all four parameters.
- minimum: that of M, by formulas; the paper draws its figures from it.

The paper prints neither how clients solve their problems nor the server's step size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

import descant
from descant import SGD
from descant.algorithms import FedMAP
from descant.comparison.reproduce.claims import Claim, fact, near_to, of, ordering
from descant.core.files import write_atomic
from descant.experiment.plots import png, tidy
from descant.priors.precision import LearnedVariance, stationary_s
from descant.view.charts import DAY

SOURCE = "FedMAP, appendix A.4, Figures 2 and 3"
SEEDS = 20
POINTS = [{"how": "FedMAP"}, {"how": "Eq. 3"}, {"how": "minimum"}]
EPSILON = 1e-4
FEW = 10  # rounds
STEP = 1.0  # lambda of Eq. 3
PRINTED = {"mu_a": -1.0735, "mu_b": 9.4882, "s_a": 1.9431, "s_b": 97.7605}
MUCH = 5  # alpha(s_a) is "much larger" than alpha(s_b): 34 times as large in print


def problem(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """H_k and c_k of L_k(t) = t' H_k t / 2 - c_k' t + const for t = (a, b), and N_k / N."""
    made = descant.federation("fedmap_linear", test=0.0, validation=0.0, seed=seed).to(torch.float64)
    H, c = [], []
    for k in range(5):
        rows = made.train[k]
        design = torch.cat([made.x[rows], torch.ones((len(rows), 1), dtype=torch.float64)], 1)
        H.append(2 * design.T @ design / len(rows))
        c.append(2 * design.T @ made.y[rows] / len(rows))
    return torch.stack(H), torch.stack(c), torch.tensor([60, 1, 2, 3, 50], dtype=torch.float64) / 116


def errors(theta: Tensor) -> Tensor:
    """The expected squared error of each client's line on new data, less the noise."""
    k = torch.arange(5, dtype=torch.float64)
    slope = theta[:, 0] + 1
    return (slope * k + theta[:, 1] - 4 * k).square() + slope.square()


class Solved(NamedTuple):
    """The prior, and the clients' lines under it."""

    mu: Tensor  # [2]
    s: Tensor  # [2]
    theta: Tensor  # [5, 2]


def first_mean(seed: int) -> Tensor:
    return torch.randn(2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def minimum(seed: int) -> Solved:
    """Of M, by minimising over theta, mu and s in turn."""
    H, c, w = problem(seed)
    mu, s = first_mean(seed), torch.zeros(2, dtype=torch.float64)
    for _ in range(500):
        alpha = 1 / (s + 1)
        theta = torch.linalg.solve(H + torch.diag(alpha), c + alpha * mu)
        mu = alpha * (w @ theta) / (alpha + 2 * EPSILON)
        s = stationary_s(w @ (theta - mu).square(), 1.0, EPSILON)
    return Solved(mu, s, theta)


def by_fedmap(seed: int, step: float | Literal["mean"]) -> Solved:
    """The same by some rounds of the method itself."""
    learned = LearnedVariance(epsilon=EPSILON, s=0.0, lr="exact" if step == "mean" else step)
    method = FedMAP(learned, SGD(lr=0.03, momentum=0.9), weights="samples", server_lr=step)
    federation = descant.federation("fedmap_linear", test=0.0, validation=0.0, seed=seed)
    mu = first_mean(seed)
    run = descant.run(method, federation=federation, model="mclr", rounds=FEW, batch="full",
                      initial={"head.weight": mu[:1, None], "head.bias": mu[1:]}, local={"steps": 300},
                      dtype="float64", backend="vectorised", seed=seed, eval={"every": FEW})
    server = run.snapshot("last").server
    model = method.global_model(server)
    assert model is not None
    return Solved(model.theta, server.pull, torch.stack([run.personal(k, "last").theta for k in range(5)]))


def pooled(seed: int) -> tuple[Tensor, Tensor]:
    """The line of all data together (Eq. 20), and Ditto's lines around it, with the paper's 0.1."""
    H, c, w = problem(seed)
    line = torch.linalg.solve(torch.einsum("k,kij->ij", w, H), w @ c)
    return line, torch.linalg.solve(H + 0.1 * torch.eye(2, dtype=torch.float64), c + 0.1 * line)


def measure(seed: int, how: str) -> dict[str, float]:
    mu, s, theta = minimum(seed) if how == "minimum" else by_fedmap(
        seed, "mean" if how == "FedMAP" else STEP)
    line, ditto = pooled(seed)
    return {"mu_a": float(mu[0]), "mu_b": float(mu[1]), "s_a": float(s[0]), "s_b": float(s[1]),
            "pooled_a": float(line[0]), "small": float(errors(theta)[1:4].mean()),
            "small ditto": float(errors(ditto)[1:4].mean())}


def claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    found = []
    for how in ("FedMAP", "Eq. 3"):
        for name, printed in PRINTED.items():
            ours = of(rows, name, how=how)
            ends = f"({min(ours):.4g} to {max(ours):.4g} over {len(ours)} draws)"
            found.append(Claim(f"{how}: {name} = {printed} after {FEW} rounds", f"{np.mean(ours):.4g} {ends}",
                               near_to(float(np.mean(ours)), printed)))
    for how in ("FedMAP", "Eq. 3", "minimum"):
        slopes, s_a, s_b = (of(rows, name, how=how) for name in ("mu_a", "s_a", "s_b"))
        ratio = [(b + 1) / (a + 1) for a, b in zip(s_a, s_b, strict=True)]
        found += [fact(f"{how}: the prior's mean line falls (mu_a < 0)", f"{max(slopes):.3g} at most",
                       max(slopes) < 0),
                  fact(f"{how}: alpha(s_a) is much larger than alpha(s_b)",
                       f"{min(ratio):.3g} to {max(ratio):.3g} times as large", min(ratio) > MUCH),
                  ordering(f"{how}: clients with 1, 2 and 3 points have better lines than Ditto's",
                           of(rows, "small", how=how), of(rows, "small ditto", how=how),
                           words=("FedMAP", "Ditto"))]
    lines = of(rows, "pooled_a", how="minimum")
    return [*found, fact("the line of all data together rises", f"slope {min(lines):.3g} at least",
                         min(lines) > 0)]


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """The first draw: the points, with the two global lines (Figure 2), and new points of the same clients,
    with their own lines under both (Figure 3)."""
    from matplotlib.figure import Figure

    made = descant.federation("fedmap_linear", test=0.0, validation=0.0, seed=0)
    (line, ditto), ours = pooled(0), minimum(0)
    figure = Figure(figsize=(12, 4), layout="constrained")
    panels = figure.subplots(1, 3, sharex=True, sharey=True)
    across = np.array([-3.0, 7.0])
    for k in range(5):
        x, y = (values[made.train[k]].numpy().ravel() for values in (made.x, made.y))
        panels[0].scatter(x, y, s=10, color=DAY[k], label=f"client {k + 1}")
        rng = np.random.default_rng(k)
        x = k + rng.standard_normal(100)
        y = -x + 4 * k + np.sqrt(0.8) * rng.standard_normal(100)
        near = np.array([k - 3.0, k + 3.0])
        for axes, (a, b) in zip(panels[1:], (ditto[k].tolist(), ours.theta[k].tolist()), strict=True):
            axes.scatter(x, y, s=4, alpha=0.4, color=DAY[k])
            axes.plot(near, a * near + b, color=DAY[k])
    for (a, b), name, style in ((line.tolist(), "all data together", "--"),
                                (ours.mu.tolist(), "FedMAP's prior", "-")):
        panels[0].plot(across, a * across + b, color="grey", linestyle=style, label=name)
    for axes, title in zip(panels, ("points, global lines", "new points, Ditto's lines",
                                    "new points, FedMAP's lines"), strict=True):
        axes.set(title=title, xlabel="x", ylim=(-6, 18))
    panels[0].set_ylabel("y")
    panels[0].legend(fontsize=7)
    tidy(list(panels))
    write_atomic(path, png(figure))

"""Gradient inversion: what a server can see of a client's rows in ONE upload, with and without protection.

    python examples/attacks/inversion.py --out inversion

The upload of FedAvg less the model that was sent is a step along a gradient. The attack looks for rows, and
their labels, whose gradient at that model is the same (Zhu et al. 2019, arXiv:1906.08935), by L-BFGS. It
looks where they must be: the gradient of the first layer is made of the rows, so that they are combinations
of what is in it. Of several starts the one that fits best is kept. Recovered rows are paired with the true
ones, and a row counts as identified if of all rows of the dataset the true one is nearest to what was
recovered. Attackers with more time, more rounds or knowledge of the data do better: this is a lower bound.

Written: inversion.csv, and a picture for each dataset.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from observed import Observed, Rows, clients, digits, observe, patients
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from descant.core.vector import Model
from descant.models import DNN

HIDDEN, LR = 100, 0.1


class Case(NamedTuple):
    """What a client does, and what the server is given of it."""

    label: str
    rows: int
    steps: int = 1
    batch: Any = "full"
    summed: int = 1  # over so many clients: what secure aggregation leaves
    privacy: dict[str, Any] | None = None
    control: bool = False  # the rows that are looked for are somebody else's: what is found is chance

    @property
    def clients(self) -> int:
        """In the federation. Where clients are hidden in a sum, nobody else is in it."""
        hidden = self.privacy is not None and self.privacy["unit"] == "client"
        return self.summed if hidden else self.summed + 1


CASES = (
    Case("1 row, 1 step", 1),
    Case("8 rows, 1 step", 8),
    Case("16 rows, 1 step", 16),
    Case("32 rows, 1 step", 32),
    Case("8 rows, 20 steps of 4", 8, steps=20, batch=4),
    Case("8 rows, sum of 10 clients", 8, summed=10),
    Case("8 rows of somebody who was not in that sum", 8, summed=10, control=True),
    Case("8 rows, rows clipped, noise 0.1", 8, privacy={"unit": "record", "clip": 1.0, "noise": 0.1}),
    Case("8 rows, rows clipped, noise 1", 8, privacy={"unit": "record", "clip": 1.0, "noise": 1.0}),
    Case("8 rows, sum of 10 clients clipped, noise 0.1", 8, summed=10,
         privacy={"unit": "client", "clip": 0.1, "noise": 0.1}),
    Case("8 rows, sum of 10 clients clipped, noise 1", 8, summed=10,
         privacy={"unit": "client", "clip": 0.1, "noise": 1.0}),
)


class Found(NamedTuple):
    """The victim's rows, and what was recovered of each."""

    true: Tensor  # [n, d]
    recovered: Tensor  # [n, d]
    identified: float  # share of the rows
    error: float  # root of the mean square, in units of what a guess of the mean row is off by


def observed_gradient(seen: Observed, summed: int, steps: int) -> Tensor:
    """The gradient that follows from uploads: from the mean of what is seen of them, per step."""
    change: Tensor = (seen.sent - seen.summed(summed)).mean(0)
    return change / (LR * steps)


class Space(NamedTuple):
    """The rows x for which (x, 1) is a combination of given vectors: x = point + c directions."""

    point: Tensor  # [d]
    directions: Tensor  # [k, d]

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor, count: int) -> Space:
        """That of the gradient of a first layer [h, d], [h], which is a sum over `count` rows x of every
        unit's error times (x, 1). With noise, the largest directions are taken."""
        vectors = torch.linalg.svd(torch.cat([weight, bias[:, None]], 1))[2][: count]
        last = vectors[:, -1]
        point = last @ vectors / last.square().sum()
        return cls(point[:-1], (torch.linalg.svd(last[None])[2][1:] @ vectors)[:, :-1])


def inverted(seen: Observed, gradient: Tensor, count: int, rows: Rows, starts: int, steps: int, seed: int
             ) -> Tensor:
    """Rows [count, d] whose gradient at the model that was sent is as near as possible to this one, up to
    its length, which clipping changes."""
    module = seen.task.module(Model(seen.sent, seen.sent[:0]))  # type: ignore[attr-defined]
    named = dict(module.named_parameters())
    pieces = gradient.split([parameter.numel() for parameter in named.values()])
    wanted = [piece.reshape(parameter.shape) for piece, parameter in zip(pieces, named.values(), strict=True)]
    size = sum(float(piece.square().sum()) for piece in wanted)
    classes, generator = int(rows.y.max()) + 1, torch.Generator().manual_seed(seed)
    space = Space.of(wanted[0], wanted[1], count)

    def made(place: Tensor) -> Tensor:
        return space.point + place @ space.directions

    def misfit(place: Tensor, labels: Tensor, length: Tensor) -> Tensor:
        x = made(place)
        loss = functional.cross_entropy(functional_call(module, named, (x,)), labels.softmax(1))
        found = torch.autograd.grad(loss, list(named.values()), create_graph=True)
        apart = torch.stack([(length.exp() * a - b).square().sum()
                             for a, b in zip(found, wanted, strict=True)]).sum() / size
        # pixels are in [0, 1]; standardised columns are seldom far from zero
        outside = torch.relu((x - 0.5).abs() - 0.5) if rows.columns is None else torch.relu(x.abs() - 3)
        return apart + 0.1 * outside.square().mean() + 0.01 * length.square()

    best, least = torch.zeros(count, rows.x.shape[1]), float("inf")
    for _ in range(starts):
        sizes = ((count, len(space.directions)), (count, classes), ())
        unknown = [(spread * torch.randn(size, generator=generator, dtype=torch.float64)).requires_grad_()
                   for size, spread in zip(sizes, (2.0, 0.1, 0.0), strict=True)]
        search = torch.optim.LBFGS(unknown, max_iter=steps, history_size=30, line_search_fn="strong_wolfe",
                                   tolerance_grad=1e-12, tolerance_change=1e-14)

        def evaluate(unknown: list[Tensor] = unknown) -> float:
            value = misfit(*unknown)
            slopes = torch.autograd.grad(value, unknown, materialize_grads=True)
            for tensor, slope in zip(unknown, slopes, strict=True):
                tensor.grad = slope
            return float(value.detach())

        search.step(evaluate)
        if (fit := evaluate()) < least:
            best, least = made(unknown[0]).detach(), fit
        if least < 1e-8:
            break
    return best


def attack(case: Case, rows: Rows, starts: int = 4, steps: int = 300, seed: int = 0) -> Found:
    made = clients(rows, case.clients, case.rows, seed)
    seen = observe(made.federation, model=DNN(hidden=HIDDEN), lr=LR, batch=case.batch,
                   local={"steps": case.steps}, seed=seed, privacy=case.privacy)
    gradient = observed_gradient(seen, case.summed, case.steps)
    guesses = inverted(seen, gradient, case.rows * case.summed, rows, starts, steps, seed)
    true = rows.x[made.train[-1 if case.control else 0]]
    pairs = linear_sum_assignment(torch.cdist(true, guesses).numpy())[1]
    recovered = guesses[pairs]
    nearest = torch.cdist(recovered, rows.x).argmin(1)
    same = (rows.x[nearest] == true).all(1).double().mean()
    return Found(true, recovered, float(same), float((true - recovered).square().mean().sqrt()) / rows.spread)


def draw(found: dict[str, Found], rows: Rows, path: Path) -> None:
    """The first rows of each case, true above recovered."""
    shown = min(8, max(len(each.true) for each in found.values()))
    figure = Figure(figsize=(7.5, 0.3 + 1.6 * len(found)), layout="constrained")
    figure.suptitle(f"{rows.name}: true rows, and below them what the server recovers from one upload",
                    fontsize=9)
    parts = figure.subfigures(len(found), 1, squeeze=False)[:, 0]
    for part, (label, each) in zip(parts, found.items(), strict=True):
        words = f"{label}: {each.identified:.0%} identified, error {each.error:.2f}"
        part.suptitle(words, fontsize=8, x=0.01, ha="left")
        grid = part.subplots(2, shown, squeeze=False)
        for axes in grid.flat:
            axes.axis("off")
        for line, values in zip(grid, (each.true, each.recovered), strict=True):
            for axes, value in zip(line, values, strict=False):
                row = value.numpy()
                picture = row.reshape(round(len(row) ** 0.5), -1) if rows.columns is None else row[None]
                limits = {"vmin": 0, "vmax": 1, "cmap": "gray_r"} if rows.columns is None else {
                    "vmin": -2.5, "vmax": 2.5, "cmap": "coolwarm"}
                axes.imshow(picture, aspect="equal" if rows.columns is None else "auto", **limits)
    figure.savefig(path, dpi=130, metadata={"Software": None})


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--out", type=Path, required=True, help="directory for the table and the pictures")
    options.add_argument("--seeds", type=int, default=3, help="number of seeds; pictures are of the first")
    options.add_argument("--starts", type=int, default=4, help="starts of the search")
    options.add_argument("--steps", type=int, default=300, help="steps of the search")
    options.add_argument("--cases", type=int, default=len(CASES), help="how many of the cases")
    chosen = options.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    lines = []
    for rows in (digits(), patients()):
        found = {}
        for case in CASES[: chosen.cases]:
            each = [attack(case, rows, chosen.starts, chosen.steps, seed) for seed in range(chosen.seeds)]
            found[case.label] = each[0]
            identified, error = (float(np.mean([getattr(one, name) for one in each]))
                                 for name in ("identified", "error"))
            lines.append([rows.name, case.label, f"{identified:.3f}", f"{error:.3f}"])
            print(f"{rows.name:16} {case.label:44} identified {identified:4.0%}  "
                  f"error {error:.2f} of a guess", flush=True)
        draw(found, rows, chosen.out / f"inversion-{rows.name.split()[0]}.png")
    with (chosen.out / "inversion.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["dataset", "case", "identified", "error"])
        writer.writerows(lines)


if __name__ == "__main__":
    main()

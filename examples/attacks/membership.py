"""Membership inference: was this row among a client's training rows? By ONE upload, or by a finished model.

    python examples/attacks/membership.py --out membership

The server has the model that it sent in the last round, the client's upload, and a list of candidates: half
of them are training rows of the client, half are rows of the same kind that nobody trained on. Two scores:

    fit        minus the loss of the candidate under the upload (Yeom et al. 2018, arXiv:1709.01604);
    direction  the product of the candidate's gradient at the model that was sent with the client's step: a
               step contains the gradients of the rows that made it.

Reported for each: the area under the ROC curve (0.5 is guessing), and the share of members that are found
where one in twenty others is taken for one. Means over all clients as victims, and over seeds.

Written: membership.csv and membership.png.
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
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from descant.core.vector import Model
from descant.models import DNN

CLIENTS, HIDDEN, LR = 10, 100, 0.1
SCORES = ("fit", "direction")


class Case(NamedTuple):
    """What a client does, and what the server is given of it."""

    label: str
    rows: int = 20
    steps: int = 20
    batch: Any = 10
    rounds: int = 10
    summed: bool = False
    privacy: dict[str, Any] | None = None


def hidden(noise: float) -> dict[str, Any]:
    """Clients hidden in a sum."""
    return {"unit": "client", "clip": 1.0, "noise": noise}


CASES = (
    Case("20 rows"),
    Case("20 rows, one round of one step", steps=1, batch="full", rounds=1),
    Case("60 rows", rows=60),
    Case("20 rows, sum of 10 clients", summed=True),
    Case("20 rows, rows clipped, noise 1", privacy={"unit": "record", "clip": 1.0, "noise": 1.0}),
    Case("20 rows, rows clipped, noise 8", privacy={"unit": "record", "clip": 1.0, "noise": 8.0}),
    Case("20 rows, sum of 10 clients clipped, noise 0.1", summed=True, privacy=hidden(0.1)),
    Case("20 rows, sum of 10 clients clipped, noise 1", summed=True, privacy=hidden(1.0)),
    Case("20 rows, what the server of that sum sees", privacy=hidden(1.0)),
)


def scores(seen: Observed, upload: Tensor, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """What speaks for each candidate being a training row of the client with this upload."""
    module = seen.task.module(Model(seen.sent, seen.sent[:0]))  # type: ignore[attr-defined]
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}

    def loss(theta: Tensor, row: Tensor, label: Tensor) -> Tensor:
        pieces = theta.split([shape.numel() for shape in shapes.values()])
        named = {name: piece.reshape(shape) for (name, shape), piece in zip(shapes.items(), pieces,
                                                                            strict=True)}
        return functional.cross_entropy(functional_call(module, named, (row[None],)), label[None])

    after = vmap(loss, in_dims=(None, 0, 0))(upload, x, y)
    slopes = vmap(grad(loss), in_dims=(None, 0, 0))(seen.sent, x, y)
    return {"fit": -after.detach(), "direction": slopes.detach() @ (seen.sent - upload)}


def area(members: Tensor, others: Tensor) -> float:
    """The area under the ROC curve: how often a member scores higher; ties count half."""
    higher = (members[:, None] > others).double() + 0.5 * (members[:, None] == others).double()
    return float(higher.mean())


def found_at(members: Tensor, others: Tensor, false: float = 0.05) -> float:
    """The share of members above all but this share of the others."""
    bound = others.sort(descending=True).values[int(false * len(others))]
    return float((members > bound).double().mean())


def attack(case: Case, rows: Rows, seed: int = 0) -> dict[str, tuple[float, float]]:
    """Area and found share of both scores; candidates of all victims are taken together for the share."""
    made = clients(rows, CLIENTS, case.rows, seed, test=min(case.rows, 30))
    seen = observe(made.federation, model=DNN(hidden=HIDDEN), lr=LR, batch=case.batch, rounds=case.rounds,
                   local={"steps": case.steps}, seed=seed, privacy=case.privacy)
    uploads = seen.summed(CLIENTS).mean(0).expand_as(seen.uploads) if case.summed else seen.uploads
    kept: dict[str, tuple[list[Tensor], list[Tensor]]] = {name: ([], []) for name in SCORES}
    for upload, own, other in zip(uploads, made.train, made.test, strict=True):
        for k, part in enumerate((own, other)):
            for name, values in scores(seen, upload, rows.x[part], rows.y[part]).items():
                kept[name][k].append(values)
    return {name: (float(np.mean([area(a, b) for a, b in zip(*both, strict=True)])),
                   found_at(torch.cat(both[0]), torch.cat(both[1]))) for name, both in kept.items()}


def draw(lines: list[list[Any]], path: Path) -> None:
    datasets = list(dict.fromkeys(line[0] for line in lines))
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, dataset in zip(figure.subplots(1, len(datasets), sharey=True, squeeze=False)[0], datasets,
                             strict=True):
        cases = [case.label for case in CASES if any(line[:2] == [dataset, case.label] for line in lines)]
        for k, name in enumerate(SCORES):
            values = [float(next(line[3] for line in lines if line[:3] == [dataset, case, name]))
                      for case in cases]
            axes.barh(np.arange(len(cases)) + 0.38 * (k - 0.5), values, height=0.36, label=name)
        axes.axvline(0.5, color="black", linewidth=0.8)
        axes.set(yticks=range(len(cases)), xlim=(0.4, 1.0), title=dataset, xlabel="area under the ROC curve")
        axes.set_yticklabels(cases)
        axes.spines[["top", "right"]].set_visible(False)
    axes.invert_yaxis()  # of both
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=130, metadata={"Software": None})


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--out", type=Path, required=True, help="directory for the table and the picture")
    options.add_argument("--seeds", type=int, default=3, help="number of seeds")
    options.add_argument("--cases", type=int, default=len(CASES), help="how many of the cases")
    chosen = options.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    lines: list[list[Any]] = []
    for rows in (digits(), patients()):
        for case in CASES[: chosen.cases]:
            each = [attack(case, rows, seed) for seed in range(chosen.seeds)]
            for name in SCORES:
                area_, share = np.mean([one[name] for one in each], 0)
                lines.append([rows.name, case.label, name, f"{area_:.3f}", f"{share:.3f}"])
                print(f"{rows.name:16} {case.label:44} {name:10} area {area_:.2f}  "
                      f"found {share:4.0%} at 5 % false", flush=True)
    draw(lines, chosen.out / "membership.png")
    with (chosen.out / "membership.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["dataset", "case", "score", "area", "found_at_5_percent"])
        writer.writerows(lines)


if __name__ == "__main__":
    main()

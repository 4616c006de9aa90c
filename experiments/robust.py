"""Attackers against rules: what each rule of [robust] keeps of a model, and what it costs without attackers.

    python experiments/robust.py --out results/robust

10 clients of 3 classes each, softmax regression, 2 of the 10 attack. For every attack and every rule the test
accuracy of honest clients: of the model for all (FedAvg's) and of their personal models (Ditto's), after the
last round; means over the seeds. Written: robust.csv, robust.md and robust.png.
"""

from __future__ import annotations

import argparse
import csv
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track

import descant

ATTACKS: dict[str, dict[str, Any] | None] = {
    "nobody": None,
    "-1 x update": {"kind": "sign_flip"},
    "-10 x update": {"kind": "sign_flip", "scale": 10.0},
    "10 x update": {"kind": "scaled"},
    "labels flipped": {"kind": "label_flip"},
    "ALIE, z = 1.5": {"kind": "alie", "scale": 1.5},
    "inner product": {"kind": "inner_product", "scale": 5.0},
}
RULES: dict[str, dict[str, Any] | None] = {
    "mean": None,
    "norm, 3 medians": {"rule": "norm", "clip": 3.0},
    "norm, 1 median": {"rule": "norm"},
    "median": {"rule": "median"},
    "trimmed 20 %": {"rule": "trimmed"},
    "geometric": {"rule": "geometric"},
    "Krum": {"rule": "krum"},
    "multi-Krum": {"rule": "multi_krum"},
}
MODELS = ("shared", "personal")


def accuracy(federation: Any, attack: dict[str, Any] | None, rule: dict[str, Any] | None, rounds: int,
             seed: int) -> dict[str, float]:
    """The test accuracy of Ditto's models: its model for all is FedAvg's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that models diverge is what is to be seen
        run = descant.run("ditto", federation=federation, rounds=rounds, seed=seed, eval={"every": rounds},
                          backend="vectorised", attack=attack, robust=rule, progress=False)
    row = run.history[-1]
    return {"shared": row["global"]["pooled"]["accuracy"],
            "personal": row["personal"]["test"]["accuracy"]["mean"]}


def as_text(table: dict[tuple[str, str, str], list[float]]) -> str:
    """The means as Markdown, a table for each model."""
    blocks = []
    for model in MODELS:
        lines = [f"| {model} | {' | '.join(ATTACKS)} |", f"|---|{'---:|' * len(ATTACKS)}"]
        lines += [f"| {rule} | " + " | ".join(f"{np.mean(table[model, attack, rule]):.2f}"
                                              for attack in ATTACKS) + " |" for rule in RULES]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def draw(table: dict[tuple[str, str, str], list[float]], path: Path, title: str) -> None:
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    for axes, model in zip(figure.subplots(1, 2), MODELS, strict=True):
        values = np.array([[np.mean(table[model, attack, rule]) for attack in ATTACKS] for rule in RULES])
        image = axes.imshow(values, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axes.set(xticks=range(len(ATTACKS)), yticks=range(len(RULES)), title=f"{model} models")
        axes.set_xticklabels(list(ATTACKS), rotation=30, ha="right")
        axes.set_yticklabels(list(RULES) if model == MODELS[0] else [])
        for (row, column), value in np.ndenumerate(values):
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8,
                      color="white" if value < 0.6 else "black")
    figure.colorbar(image, ax=figure.axes, label="test accuracy of honest clients")
    figure.suptitle(title)
    figure.savefig(path, dpi=130, metadata={"Software": None})


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--out", type=Path, required=True, help="directory for the tables and the picture")
    options.add_argument("--dataset", default="digits")
    options.add_argument("--rounds", type=int, default=50)
    options.add_argument("--seeds", type=int, default=3, help="number of seeds, of training and attackers")
    chosen = options.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    federation = descant.federation(chosen.dataset, partition="classes", clients=10, classes_per_client=3)
    table: dict[tuple[str, str, str], list[float]] = {}
    work = [(attack, rule, seed) for attack in ATTACKS for rule in RULES for seed in range(chosen.seeds)]
    for attack, rule, seed in track(work, "runs", console=Console(stderr=True)):
        found = accuracy(federation, ATTACKS[attack], RULES[rule], chosen.rounds, seed)
        for model in MODELS:
            table.setdefault((model, attack, rule), []).append(found[model])
    with (chosen.out / "robust.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["model", "attack", "rule", "seed", "accuracy"])
        writer.writerows([*key, seed, f"{value:.4f}"] for key, values in table.items()
                         for seed, value in enumerate(values))
    (chosen.out / "robust.md").write_text(as_text(table), encoding="utf-8")
    draw(table, chosen.out / "robust.png", f"2 of 10 clients attack: {chosen.dataset}, 3 classes each, "
                                           f"{chosen.rounds} rounds")
    print(as_text(table))


if __name__ == "__main__":
    main()

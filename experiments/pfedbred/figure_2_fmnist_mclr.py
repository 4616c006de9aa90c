"""The generalized coherence estimate of the envelope gradients in every round, at each w_i, on FMNIST-MCLR.

100 clients of 2 classes as the authors' code deals them (42,321 to 52,585 of the 70,000 images; the paper
separates the whole dataset); the setting of Table 1, but without validation rows (0.1 there), so that clients
train on more. Of each of the 20 clients that are averaged the vector is
lam (mu - theta) of its last local round, the gradient of its envelope at its own w_i (Eq. 13, first order),
up to its length, which GCE leaves out: as in training mu and theta are those of one batch, and theta that of
5 steps. The text also has "vectors from personalized to local model", w - theta, which is the same for pFedMe
alone. pFedMe is `identity`, to the last bit the same method. mh (code) has its gradient where its
extra step on w_i ends; that step itself is not in it.

With 20 vectors GCE rounds to 1 here, but for mh (code). So methods are judged and drawn by
log(1 - GCE), which is higher where GCE is smaller; both are kept for every round. Data, model and curves of
the printed figure are not in the text: these are our choice, and so is pFedMe for a method without a
personalized prior. The lines are smoothed with a Savitzky-Golay filter, as in the paper, with a window of
ours. That the convergence phase is the last 50 of 200 rounds is ours, and the number of rounds is the
scripts'.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _envelopes import Telling
from scipy.signal import savgol_filter

import descant
from descant.comparison.reproduce.claims import Claim, of, ordering
from descant.view.lines import lines

SOURCE = "pFedBreD, Figure 2, FMNIST-MCLR"
SEEDS = 5
METHODS = {
    "pFedMe": Telling.preset("paper", strategy="identity", start="theta"),
    **{name: Telling.preset("paper", strategy=name) for name in ("lg", "meg", "mh")},
    "mh (code)": Telling.preset("paper", strategy="mh_code", start="w")}
POINTS = [{"method": name} for name in METHODS]
ROUNDS, LAST = 200, 50
WINDOW, DEGREE, DRAWN = 31, 3, 5  # of the filter; every fifth round is drawn


def measure(seed: int, method: str) -> dict[str, float]:
    federation = descant.federation("fashion_mnist", standardise="all", partition="neighbours", clients=100,
                                    classes_per_client=2, seed=seed, test=0.25, validation=0.0)
    run = descant.run(METHODS[method], federation=federation, model="mclr", rounds=ROUNDS, cohort=20,
                      participation="all", batch=20, local={"steps": 20}, backend="vectorised", seed=seed,
                      eval={"every": ROUNDS, "diagnostics": ["_envelopes:envelopes"]})
    seen = [row["diagnostics"]["envelopes"] for row in run.history]
    return {name: float(np.mean([each[name] for each in seen[-LAST:]])) for name in ("gce", "log_det")} | {
        f"{name} {number}": each[name] for number, each in enumerate(seen, 1) for name in ("gce", "log_det")}


def claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    return [ordering(f"in the convergence phase {name} has a smaller GCE than pFedMe: a higher log(1 - GCE)",
                     of(rows, "log_det", method=name), of(rows, "log_det", method="pFedMe"), lower=False,
                     words=(name, "pFedMe"))
            for name in ("mh", "mh (code)", "meg", "lg")]


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    def smooth(name: str) -> np.ndarray:
        each = [of(rows, f"log_det {number}", method=name) for number in range(1, ROUNDS + 1)]
        smoothed: np.ndarray = savgol_filter(each, WINDOW, DEGREE, axis=0)
        return smoothed[DRAWN - 1 :: DRAWN]

    lines({name: smooth(name).tolist() for name in METHODS}, list(range(DRAWN, ROUNDS + 1, DRAWN)), path,
          x="round", y="log(1 - GCE), smoothed: higher is less coherent")

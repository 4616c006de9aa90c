"""More local epochs: pFedGT gains, FedAvg with fine-tuning may lose; on HAR in place of CIFAR-10."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from _har import train

from descant import SGD
from descant.algorithms import FedAvg, pFedGT
from descant.comparison.reproduce.claims import Claim, of, ordering
from descant.core.algorithm import Algorithm

SOURCE = "pFedGT, Figures 3 and 4, on HAR: local epochs"
SEEDS = 3
METHODS: dict[str, Algorithm] = {"pFedGT": pFedGT(solver=SGD(lr=0.1)),
                                 "FedAvg+FT": FedAvg(SGD(lr=0.1), finetune=10)}
EPOCHS = (1, 5, 10, 20)
POINTS = [{"method": name, "E": E} for name in METHODS for E in EPOCHS]


def measure(seed: int, method: str, E: int) -> dict[str, float]:
    run = train(METHODS[method], seed, epochs=E, every=20)
    scored = [row["personal"]["test"]["accuracy"]["mean"] for row in run.history if "personal" in row]
    return {"early": scored[0], "last": scored[-1]}  # rounds 20 and 100


def claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    found = [ordering(f"pFedGT: {more} local epochs are ahead of {less} after {when}",
                      of(rows, figure, method="pFedGT", E=more), of(rows, figure, method="pFedGT", E=less),
                      lower=False, words=(f"E = {more}", f"E = {less}"))
             for figure, when in (("last", "100 rounds"), ("early", "20 rounds"))
             for less, more in ((1, 5), (5, 20))]
    return found + [ordering(f"E = {E}: pFedGT is ahead of FedAvg + fine-tuning", *(
        of(rows, "last", method=name, E=E) for name in METHODS), lower=False, words=("pFedGT", "FedAvg+FT"))
        for E in EPOCHS]

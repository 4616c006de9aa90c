"""Your own prior for FedMAP: a function R(theta, gamma), by its place or as an object.

By its place, in this directory:

    descant run --out robust --set algorithm.name=fedmap --set algorithm.prior.name=own \
        --set algorithm.prior.place=own_prior:robust --set algorithm.server_lr=0.5 \
        --set algorithm.weights=samples --set algorithm.solver.name=adam --set algorithm.solver.lr=0.01

As an object, from Python: `main` below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

import descant
from descant.algorithms import FedMAP
from descant.priors.energy import Energy


def robust(theta: Tensor, gamma: Tensor) -> Tensor:
    """A Gaussian near gamma, but of bounded force: coordinates in which a client is an outlier are let go."""
    return ((1 + (theta - gamma).square()).sqrt() - 1).sum()


@dataclass(frozen=True)
class Robust(Energy):
    """The same with a width: beyond it, the force grows no more."""

    name: ClassVar[str] = "robust"

    width: float = 1.0

    def energy(self, theta: Tensor, gamma: Tensor) -> Tensor:
        return self.width**2 * robust(theta / self.width, gamma / self.width)


def main() -> None:
    federation = descant.federation("digits", partition="classes", clients=10, classes_per_client=2)
    for width in (0.01, 0.1, 1.0):
        method = FedMAP(Robust(width), descant.Adam(lr=0.01), weights="samples", server_lr=0.5)
        run = descant.run(method, federation=federation, rounds=20, batch=32, local={"epochs": 2})
        accuracy = run.summary["last"]["personal"]["test"]["accuracy"]["mean"]
        print(f"width {width}: personal test accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()

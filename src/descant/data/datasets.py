"""The datasets by name. A new one is a module that imports `samples`, and one line in `DATASETS`."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from descant.data.har import Har
from descant.data.heart_disease import HeartDisease
from descant.data.images import Cifar10, Cifar100, Emnist, FashionMnist, Mnist
from descant.data.leaf import Femnist, Sent140
from descant.data.office import Office10Googlenet, Office10Surf, Office31
from descant.data.samples import Dataset, Samples
from descant.data.shakespeare import Shakespeare
from descant.data.synthetic import FedMAPLinear, FedMAPShell, FedProxLogistic, Logistic, Quadratics

__all__ = ["DATASETS", "Dataset", "Digits", "Samples"]


@dataclass(frozen=True)
class Digits(Dataset):
    """1797 handwritten digits of 8x8 pixels, 10 classes, embedded in scikit-learn.

    E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits, UCI Machine Learning
    Repository, 1998, doi:10.24432/C50P49 (its test set). Real data that needs no download.
    """

    name: ClassVar[str] = "digits"

    def load(self, clients: int, seed: int) -> Samples:
        table = torch.from_numpy(_digits())
        pixels, digits = table[:, :-1], table[:, -1]  # pixels count 0..16 dark dots
        return Samples((pixels / 16).float(), digits.long(), classes=10)


@cache  # a comparison asks for them once for each run
def _digits() -> np.ndarray:
    """scikit-learn's own file: importing the package takes as long as importing torch."""
    package = importlib.util.find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    return np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")


DATASETS: dict[str, type[Dataset]] = {
    dataset.name: dataset
    for dataset in (
        Digits,
        Mnist,
        FashionMnist,
        Emnist,
        Femnist,
        Cifar10,
        Cifar100,
        Har,
        HeartDisease,
        Office31,
        Office10Surf,
        Office10Googlenet,
        Sent140,
        Shakespeare,
        Quadratics,
        Logistic,
        FedProxLogistic,
        FedMAPShell,
        FedMAPLinear,
    )
}

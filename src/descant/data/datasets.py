"""The datasets by name. A new one is a module that imports `samples`, and one line in `DATASETS`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from descant.data.har import Har
from descant.data.heart_disease import HeartDisease
from descant.data.images import Cifar10, Cifar100, Emnist, FashionMnist, Mnist
from descant.data.leaf import Femnist, Sent140
from descant.data.office import Office10Googlenet, Office10Surf, Office31
from descant.data.samples import Dataset, Samples
from descant.data.shakespeare import Shakespeare
from descant.data.synthetic import Logistic, Quadratics
from descant.data.synthetic_papers import FedMAPLinear, FedMAPShell, FedProxLogistic

__all__ = ["DATASETS", "Dataset", "Digits", "Samples"]


@dataclass(frozen=True)
class Digits(Dataset):
    """1797 handwritten digits of 8x8 pixels, 10 classes, embedded in scikit-learn.

    E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits, UCI Machine Learning
    Repository, 1998, doi:10.24432/C50P49 (its test set). Real data that needs no download.
    """

    name: ClassVar[str] = "digits"

    def load(self, clients: int, seed: int) -> Samples:
        from sklearn.datasets import load_digits  # slow: only when asked for

        pixels, digits = load_digits(return_X_y=True)  # pixels count 0..16 dark dots
        return Samples(torch.from_numpy(pixels / 16).float(), torch.from_numpy(digits).long(), classes=10)


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

"""Heart disease at four hospitals: small, skewed, and full of missing values."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from descant.data import owned
from descant.data.cache import Arrays, Source, official
from descant.data.download import Remote
from descant.data.owned import Owned
from descant.data.samples import Samples
from descant.errors import DescantError

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
COLUMNS = ("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak", "slope",
           "ca", "thal")
_ADDRESS = "https://archive.ics.uci.edu/ml/machine-learning-databases/heart-disease/"
_FACTS = {
    "cleveland": (18461, "a74b7efa387bc9d108d7d0115d831fe9b414b29ae7124f331b622b4efa0427c8"),
    "hungarian": (10263, "d1ad108f785768cd3d7e82dc522e6f5a61eea93cccfb3a46ee8076f73fc3d796"),
    "switzerland": (4109, "834a405ccf5b66ab4056bb77794adc8df0b7125186454c0a1d002d33c6c3b314"),
    "va": (6737, "e7c93d8d0d2acdadfa4c5e8de768e2191e7f618b952e29623f1f0d5949ff6b8f"),
}


def parse(folder: Path) -> Arrays:
    """The four files processed.HOSPITAL.data."""
    tables = [_read(folder, f"processed.{hospital}.data") for hospital in HOSPITALS]
    x = [table[:, :-1].astype(np.float32) for table in tables]
    y = [table[:, -1] > 0 for table in tables]  # 0 is healthy, 1 to 4 are degrees of disease
    return {**owned.arrays(x, y, HOSPITALS), "columns": np.array(COLUMNS)}


def _read(folder: Path, name: str) -> np.ndarray:
    path = official(folder, name)
    with path.open(newline="", encoding="latin-1") as file:
        rows = [_patient(cells, f"{path}, row {number}")
                for number, cells in enumerate(csv.reader(file), start=1) if cells]
    if not rows:
        raise DescantError(f"{path} is empty")
    return np.array(rows)


def _patient(cells: list[str], where: str) -> list[float]:
    """The numbers of one row; NaN for '?'."""
    columns = (*COLUMNS, "num")
    if len(cells) != len(columns):
        raise DescantError(f"{where} has {len(cells)} columns, not {len(columns)}: the file was cut off or "
                           "is another one")
    numbers = []
    for cell, column in zip(cells, columns, strict=True):
        try:
            numbers.append(math.nan if cell.strip() == "?" else float(cell))
        except ValueError:
            raise DescantError(f"{where}, column {column!r}: {cell!r} is neither a number nor '?'") from None
    if math.isnan(numbers[-1]):
        raise DescantError(f"{where} has no diagnosis (column 'num')")
    return numbers


@dataclass(frozen=True)
class HeartDisease(Owned):
    """920 patients of 4 hospitals, 13 clinical columns, with or without heart disease.

    NaN is missing, and must be imputed: '?' in the files, and a `chol` of 0, which stands for
    unrecorded (all of Switzerland, 49 patients of VA Long Beach). A. Janosi, W. Steinbrunn, M. Pfisterer,
    R. Detrano: Heart Disease, UCI Machine Learning Repository, 1988, doi:10.24432/C52P4X. CC BY 4.0.
    """

    name: ClassVar[str] = "heart_disease"
    classes: ClassVar[int] = 2
    default_clients: ClassVar[int] = len(HOSPITALS)
    class_names: ClassVar[tuple[str, ...] | None] = ("healthy", "disease")
    column_names: ClassVar[tuple[str, ...] | None] = COLUMNS
    source: ClassVar[Source] = Source(
        "heart_disease", owned.layout("float32", (len(COLUMNS),), 2), parse,
        "the processed files of UCI's heart disease data",
        tuple(Remote(f"processed.{hospital}.data", (f"{_ADDRESS}processed.{hospital}.data",), size, sha256)
              for hospital, (size, sha256) in _FACTS.items()),
    )

    def load(self, clients: int, seed: int) -> Samples:
        samples = super().load(clients, seed)
        chol = samples.x[:, COLUMNS.index("chol")]
        chol[chol == 0] = torch.nan
        return samples

"""An example to start with: tables of synthetic patients of twelve hospitals, and an experiment.

Most of the disease model is shared, some of it is specific to a hospital, and no hospital has many patients.
So a shared model misses the specific part, a hospital alone has too few rows, and personal models win.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import NamedTuple

import numpy as np

from descant.core.files import write_atomic
from descant.errors import UsageError

HOSPITALS = {"bridge": 110, "castle": 120, "east": 90, "forest": 130, "harbour": 120, "hill": 100,
             "lake": 150, "market": 110, "north": 140, "river": 120, "south": 130, "town": 120}  # patients
LATER, LATER_PATIENTS, NEW_PATIENTS = "west", 100, 20
VITAL = {"age": (58, 12), "weight": (78, 14), "pressure": (132, 17), "heart_rate": (74, 12),
         "oxygen": (96, 2), "temperature": (36.8, 0.5), "cholesterol": (216, 40), "glucose": (105, 25)}
COLUMNS = {**VITAL, **{f"lab_{k:02}": (10 + k, 1 + k / 4) for k in range(1, 33)}}  # mean, deviation
SHARED = 4.0  # weight of the shared part of the disease model
OWN = 2.2  # weight of the part that is specific to a hospital
SEED = 7

EXPERIMENT = """\
# Twelve hospitals learn together whether a patient is ill. Each ends with a model of its own.

[data]
dataset = "./data"      # one table for each hospital
scale = "client"        # each hospital scales its columns by its own means and deviations

[model]
name = "mclr"           # softmax regression

[algorithm]
name = "ditto"
lam = 0.3               # how strongly a personal model leans on the shared one
solver = {{ lr = 0.1 }}

[train]
rounds = 30
local = {{ steps = 20 }}

[eval]
every = 2

[schema]                # what the tables hold
target = "disease"
classes = ["no", "yes"]

[schema.columns]
{columns}
sex = ["female", "male"]
"""


class Patients(NamedTuple):
    numbers: np.ndarray  # [n, columns]
    male: np.ndarray  # [n] bool
    ill: np.ndarray  # [n] bool


def write_example(place: Path) -> list[Path]:
    """Write the example into a new directory: data/<hospital>.csv, experiment.toml, and two files that are
    not trained on: new.csv, undiagnosed patients of north, and west.csv, a hospital that joins later."""
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise UsageError(f"{place} exists and is not empty: choose a new directory")
    columns = "\n".join(f'{name} = "number"' for name in COLUMNS)
    files = {place / "experiment.toml": EXPERIMENT.format(columns=columns).encode()}
    rng = np.random.default_rng(SEED)
    shared = _direction(rng, SHARED)
    for name, count in {**HOSPITALS, LATER: LATER_PATIENTS}.items():
        truth = shared + _direction(rng, OWN)
        patients = _patients(rng, truth, count)
        files[place / ("" if name == LATER else "data") / f"{name}.csv"] = _table(patients)
        if name == "north":
            files[place / "new.csv"] = _table(_patients(rng, truth, NEW_PATIENTS), with_target=False)
    try:
        (place / "data").mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            write_atomic(path, content)
    except OSError as error:
        raise UsageError(f"cannot write to {place}: {error.strerror}; choose another directory") from None
    return list(files)


def _direction(rng: np.random.Generator, length: float) -> np.ndarray:
    direction = rng.normal(size=len(COLUMNS) + 1)
    return np.asarray(direction * length / np.linalg.norm(direction))


def _patients(rng: np.random.Generator, truth: np.ndarray, count: int) -> Patients:
    z = rng.normal(size=(count, len(COLUMNS)))
    male = rng.random(count) < 0.5
    log_odds = 2 * np.column_stack([z, male - 0.5]) @ truth
    ill = rng.random(count) < 1 / (1 + np.exp(-log_odds))
    mean, deviation = np.array(list(COLUMNS.values())).T
    return Patients(mean + deviation * z, male, ill)


def _table(patients: Patients, *, with_target: bool = True) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*COLUMNS, "sex", *(["disease"] if with_target else [])])
    for numbers, is_male, is_ill in zip(*patients, strict=True):
        row = [*(f"{value:.1f}" for value in numbers), "male" if is_male else "female"]
        writer.writerow([*row, "yes" if is_ill else "no"] if with_target else row)
    return text.getvalue().encode()

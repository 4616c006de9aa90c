"""Human activity from smartphone motion, by person."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from descant.data import owned
from descant.data.cache import Absent, Arrays, Expected, Source, prepared, unpacking
from descant.data.download import Remote
from descant.data.samples import Dataset, Samples
from descant.errors import DescantError

PEOPLE, ACTIVITIES, WINDOW = 30, 6, 128
CHANNELS = tuple(f"{signal}_{axis}" for signal in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
FOLDER = "UCI HAR Dataset"
OUTER = "human+activity+recognition+using+smartphones.zip"


def parse(folder: Path) -> Arrays:
    """The inertial signals of the official archive, sorted by person, activity and time."""
    with _unpacked(folder) as root:
        parts = [_part(root, part) for part in ("train", "test")]
    x, y, subject = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    order = np.lexsort((y, subject))  # stable: windows stay in the order of time
    x, y, client = x[order], y[order] - 1, subject[order] - 1
    return {"x": x, "y": y, "client": client, "group": overlapping(x, y, client),
            "client_names": np.array([f"subject {k}" for k in range(1, PEOPLE + 1)])}


def overlapping(x: np.ndarray, y: np.ndarray, client: np.ndarray) -> np.ndarray:
    """Per window, the number of the run of overlapping windows that it belongs to.

    Windows were cut from recordings with an overlap of one half. A window continues another one of the
    same person and activity if its first half is the other's second half, in all channels; a run is a
    chain of such windows, in whatever order the rows are.
    """
    half = x.shape[2] // 2
    whose = list(zip(client.tolist(), y.tolist(), strict=True))
    ends = {(whose[row], window[:, half:].tobytes()): row for row, window in enumerate(x)}
    before = np.array([ends.get((whose[row], window[:, :half].tobytes()), row)
                       for row, window in enumerate(x)])
    for _ in range(len(x).bit_length()):  # jumps of doubling length lead to the first window of the run
        before = before[before]
    _, first, group = np.unique(before, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[group]  # numbered in the order of the rows


@contextlib.contextmanager
def _unpacked(folder: Path) -> Iterator[Path | zipfile.Path]:
    """The folder of the official archive, unpacked or not."""
    outer, inner = folder / OUTER, folder / f"{FOLDER}.zip"
    if (folder / FOLDER).is_dir():
        yield folder / FOLDER
    elif inner.exists() or outer.exists():
        path = inner if inner.exists() else outer
        with unpacking(path):
            # the archive of the repository contains that of the authors
            content = io.BytesIO(inner.read_bytes() if path == inner else _member(outer, inner.name))
            with zipfile.ZipFile(content) as archive:
                archive.filename = str(path)  # errors name the files in it
                yield zipfile.Path(archive, f"{FOLDER}/")
    else:
        raise Absent(f"{OUTER} is not in {folder}, nor is the folder {FOLDER!r}")


def _member(path: Path, name: str) -> bytes:
    with zipfile.ZipFile(path) as archive:
        if name not in archive.namelist():
            raise DescantError(f"there is no {name!r} in {path}: download it again")
        return archive.read(name)


def _part(root: Path | zipfile.Path, part: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    y, subject = (_numbers(root / part / f"{name}_{part}.txt", 1, np.int64)[:, 0]
                  for name in ("y", "subject"))
    x = np.empty((len(y), len(CHANNELS), WINDOW), np.float32)
    for k, channel in enumerate(CHANNELS):
        path = root / part / "Inertial Signals" / f"{channel}_{part}.txt"
        signal = _numbers(path, WINDOW, np.float32)
        if not len(signal) == len(y) == len(subject):
            raise DescantError(f"{path} has {len(signal)} rows, but there are {len(y)} activities and "
                               f"{len(subject)} persons in {root / part}: the files do not match")
        x[:, k] = signal
    for name, values, limit in (("y", y, ACTIVITIES), ("subject", subject, PEOPLE)):
        for row in np.flatnonzero((values < 1) | (values > limit))[:1]:
            raise DescantError(f"{root / part / f'{name}_{part}.txt'}, row {row + 1}: {values[row]} is "
                               f"outside the range 1..{limit}")
    return x, y, subject


def _numbers(path: Path | zipfile.Path, columns: int, dtype: type) -> np.ndarray:
    if not path.exists():
        raise DescantError(f"{path} is missing: unpack the official archive again")
    try:
        with path.open("rb") as file:
            table: np.ndarray = np.loadtxt(file, dtype, ndmin=2)
    except ValueError as error:
        raise DescantError(f"{path}: {error}") from None
    if table.shape[1] != columns:
        raise DescantError(f"{path} has {table.shape[1]} columns, not {columns}")
    return table


@dataclass(frozen=True)
class Har(Dataset):
    """10,299 windows of 9 inertial signals of 30 people, 6 activities (UCI HAR).

    x is [9, 128]: acceleration of the body, angular velocity and total acceleration (x, y, z each), 2.56 s
    at 50 Hz. Windows overlap by half; those that overlap form a group that must not be split. Activities:
    walking, upstairs, downstairs, sitting, standing, laying. D. Anguita, A. Ghio, L. Oneto, X. Parra,
    J. L. Reyes-Ortiz: A Public Domain Dataset for Human Activity Recognition Using Smartphones, ESANN
    2013, doi:10.24432/C54S4K. CC BY 4.0 in the UCI repository; its README excludes commercial use.
    """

    name: ClassVar[str] = "har"
    natural: ClassVar[bool] = True
    default_clients: ClassVar[int] = PEOPLE
    class_names: ClassVar[tuple[str, ...] | None] = (
        "walking", "upstairs", "downstairs", "sitting", "standing", "laying")
    source: ClassVar[Source] = Source(
        "har", owned.layout("float32", (len(CHANNELS), WINDOW), ACTIVITIES) | {
            "group": Expected("int64", ("rows",), below="rows")},
        parse, f"UCI's archive, or the folder {FOLDER!r} in it",
        (Remote(OUTER, (f"https://archive.ics.uci.edu/static/public/240/{OUTER}",), 61005872,
                "c00b803081a5c797cd5e4b83700a9810b38d53d9d84e01917e090e1fdbc81031"),),
    )

    def load(self, clients: int, seed: int) -> Samples:
        arrays = prepared(self.source)
        owner = np.array([f"subject {k:02}" for k in range(1, PEOPLE + 1)])[arrays["client"]]  # sorts well
        return dataclasses.replace(owned.samples(arrays, ACTIVITIES), owner=owner, group=arrays["group"])

"""The data directory, and how a dataset in it is prepared once.

A dataset is read from `NAME.npz` in the data directory. If that is missing, it is made atomically from the
official files: those in `NAME/` in the data directory, those that a package of the operating system
installed, or those that are downloaded into `NAME/`.
"""

from __future__ import annotations

import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from descant.core import npz
from descant.core.files import locked, replacing
from descant.data.download import DownloadError, Remote, fetch, mismatch
from descant.errors import DescantError

ENVIRONMENT = "DESCANT_DATA"
ROWS = 2048  # per block that is read

Arrays: TypeAlias = Mapping[str, Any]  # of numpy arrays


@dataclass(frozen=True)
class Expected:
    """What an array must be. A length given by name is the same wherever the name occurs."""

    dtype: str  # as numpy names it; "str" for text of any width
    shape: tuple[int | str, ...]
    below: int | str | None = None  # numbers lie in [0, below)


@dataclass(frozen=True)
class Source:
    """A dataset outside the library: its arrays, and how they are made from the official files.

    `parse` reads a folder with official files; it raises `Absent` if one is missing.
    """

    name: str
    layout: Mapping[str, Expected]
    parse: Callable[[Path], Arrays]
    obtain: str  # which files to put into the folder, and where to get them
    remotes: tuple[Remote, ...] = ()  # files that can be downloaded
    folder: str | None = None  # in the data directory; None: the name of the dataset
    installed: Path | None = None  # where a package of the operating system puts the official files


class Absent(DescantError):
    """An official file is not in its folder."""


def official(folder: Path, name: str) -> Path:
    """The path of an official file, which must be there."""
    if not (folder / name).exists():
        raise Absent(f"{name} is not in {folder}")
    return folder / name


def data_dir() -> Path:
    """The data directory: $DESCANT_DATA, or ~/.cache/descant."""
    return Path(os.environ.get(ENVIRONMENT) or "~/.cache/descant").expanduser()


def prepared(source: Source) -> Prepared:
    """The arrays of a dataset; the first call prepares them."""
    path = data_dir() / f"{source.name}.npz"
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with locked(path.parent, wait=True):  # other processes may prepare the same dataset
                if not path.exists():
                    _convert(source, path)
        except OSError as error:
            raise DescantError(f"cannot prepare {path}: {error}; set another directory with --data-dir or "
                               f"{ENVIRONMENT}") from None
    return Prepared(path, source.layout)


class Prepared:
    """A prepared file whose arrays have the right names, types and shapes."""

    def __init__(self, path: Path, layout: Mapping[str, Expected]) -> None:
        self.path = path
        self._layout = layout
        self._headers = {}
        for name in layout:
            with self._opened(name) as archive:
                self._headers[name] = archive.header(name)
        self._lengths = _check_shapes(self._headers, layout, self._name)

    def __getitem__(self, name: str) -> np.ndarray:
        with self._opened(name) as archive:
            array = np.ascontiguousarray(archive.array(name))
        _check_range(array, self._layout[name].below, self._lengths, self._name(name))
        return array

    def shape(self, name: str) -> tuple[int, ...]:
        return self._headers[name].shape

    def blocks(self, name: str) -> Iterator[np.ndarray]:
        """An array in blocks of rows, for callers that copy it: it is never in memory twice."""
        (rows, *shape), dtype, by_column = self._headers[name]
        if by_column:
            yield self[name]
            return
        width = int(np.prod(shape)) * dtype.itemsize
        with self._opened(name) as archive, archive.opened(name) as (file, _):
            for start in range(0, rows, ROWS):
                count = min(ROWS, rows - start)
                yield np.frombuffer(file.read(count * width), dtype).reshape(count, *shape)

    def _name(self, name: str) -> str:
        return f"array {name!r} of {self.path}"

    @contextmanager
    def _opened(self, name: str) -> Iterator[npz.Archive]:
        """The file, which has this array; errors name both and say what to do."""
        remedy = "remove it, and it is prepared again from the official files"
        try:
            with npz.opened(self.path) as archive:
                if name not in archive.names:
                    raise DescantError(f"{self.path} has no array {name!r}: {remedy}")
                yield archive
        except (ValueError, OSError) as error:
            raise DescantError(f"{self.path} cannot be read (array {name!r}: {error}): {remedy}") from None


@contextmanager
def unpacking(path: Path) -> Iterator[None]:
    """While an official archive is read: errors of one that is cut off or another file name it."""
    try:
        yield
    except (OSError, EOFError, zlib.error, zipfile.BadZipFile, tarfile.TarError) as error:
        raise DescantError(f"{path} cannot be unpacked ({error}): it was cut off or changed; download it "
                           "again") from None


def _convert(source: Source, path: Path) -> None:
    """Write the prepared file atomically."""
    arrays, origin = _official(source, path.parent / (source.folder or source.name))

    def place(name: str) -> str:
        return f"array {name!r} made from the official files in {origin}"

    headers = {name: npz.Header(arrays[name].shape, arrays[name].dtype) for name in source.layout}
    lengths = _check_shapes(headers, source.layout, place)
    for name, expected in source.layout.items():
        _check_range(arrays[name], expected.below, lengths, place(name))
    with replacing(path) as file:
        np.savez(file, **arrays)


def _official(source: Source, folder: Path) -> tuple[Arrays, Path]:
    """The arrays of the official files, and their folder."""
    for remote in source.remotes:
        archive = folder / remote.name
        # text files may have other line ends; compressed files are as published
        if archive.suffix in (".gz", ".zip") and archive.exists() and (wrong := mismatch(archive, remote)):
            raise DescantError(f"{archive} is not the official file: {wrong}. Remove it to download it "
                               "again, or put its unpacked content next to it")
    absent = None
    for place in (folder, source.installed):
        if place is not None:
            try:
                return source.parse(place), place
            except Absent as error:
                absent = absent or error
    if not source.remotes:
        raise DescantError(_how_to_obtain(source, folder, str(absent)))
    try:
        for remote in source.remotes:
            names = (remote.name, remote.name.removesuffix(".gz"))  # it may be there unpacked
            if not any((folder / name).exists() for name in names):
                fetch(remote, folder)
    except DownloadError as error:
        raise DescantError(_how_to_obtain(source, folder, f"{absent}, and cannot be downloaded ({error})")
                           ) from None
    return source.parse(folder), folder


def _how_to_obtain(source: Source, folder: Path, reason: str) -> str:
    files = "".join(f"\n  {remote.name}  from  {remote.urls[0]}" for remote in source.remotes)
    return (f"there is no {source.name}.npz in {folder.parent}; {reason}.\n"
            f"Put into {folder}: {source.obtain}{files}\n"
            f"Set another data directory with --data-dir or {ENVIRONMENT}. Dataset 'digits' needs no files.")


def _check_shapes(
    headers: Mapping[str, npz.Header], layout: Mapping[str, Expected], place: Callable[[str], str]
) -> dict[str, int]:
    """Refuse arrays that do not fit the layout; returns the lengths that it gives by name."""
    lengths: dict[str, int] = {}
    for name, expected in layout.items():
        shape, dtype, _ = headers[name]
        if not (dtype.kind == "U" if expected.dtype == "str" else dtype == np.dtype(expected.dtype)):
            raise DescantError(f"{place(name)} has the type {dtype}, not {expected.dtype}")
        for k, length in enumerate(expected.shape[: len(shape)]):
            if isinstance(length, str):
                lengths.setdefault(length, shape[k])
        wanted = tuple(lengths.get(n, 0) if isinstance(n, str) else n for n in expected.shape)
        if shape != wanted:
            raise DescantError(f"{place(name)} has the shape {shape}, not {wanted}")
        if not all(shape):
            raise DescantError(f"{place(name)} is empty")
    return lengths


def _check_range(array: np.ndarray, below: int | str | None, lengths: Mapping[str, int], place: str) -> None:
    if below is None:
        return
    limit = lengths[below] if isinstance(below, str) else below
    for row in np.flatnonzero((array < 0) | (array >= limit))[:1]:
        raise DescantError(f"{place} holds {array[row]} in row {row}, outside the range 0..{limit - 1}")

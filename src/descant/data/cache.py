"""Where data lie, and how they are prepared once.

A dataset is read from `NAME.npz` in the data directory. If that is not there, it is made, in one step,
of the official files in `NAME/` in the data directory, or of those that a package of the operating
system installed, or else of those that are downloaded into `NAME/`.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import numpy as np

from descant.core.files import locked, replacing
from descant.data.download import DownloadError, Remote, fetch, mismatch
from descant.errors import DescantError

ENVIRONMENT = "DESCANT_DATA"
ROWS = 2048  # per block that is read

Arrays: TypeAlias = Mapping[str, Any]  # of numpy arrays


@dataclass(frozen=True)
class Expected:
    """What an array must be. A length that is given by name is the same wherever the name occurs."""

    dtype: str  # as numpy names it; "str" for text of any width
    shape: tuple[int | str, ...]
    below: int | str | None = None  # numbers lie in [0, below)


@dataclass(frozen=True)
class Source:
    """A dataset outside of the library: its arrays, and how they are made of the official files.

    `parse` makes the arrays of a folder with official files; it raises `Absent` if one is missing.
    """

    name: str
    layout: Mapping[str, Expected]
    parse: Callable[[Path], Arrays]
    obtain: str  # for people: what to put into the folder, and where it comes from
    remotes: tuple[Remote, ...] = ()  # what can be downloaded
    folder: str | None = None  # in the data directory; named like the dataset if this is None
    installed: Path | None = None  # where a package of the operating system puts the official files


class Absent(DescantError):
    """An official file is not in the folder where it is looked for."""


def data_dir() -> Path:
    """The data directory: $DESCANT_DATA, or ~/.cache/descant."""
    return Path(os.environ.get(ENVIRONMENT) or "~/.cache/descant").expanduser()


def prepared(source: Source) -> Prepared:
    """The arrays of a dataset, prepared now if they have not been before."""
    path = data_dir() / f"{source.name}.npz"
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with locked(path.parent, wait=True):  # others may want the same dataset at the same time
                if not path.exists():
                    _convert(source, path)
        except OSError as error:
            raise DescantError(f"cannot prepare {path}: {error}; another directory can be named with "
                               f"--data-dir or {ENVIRONMENT}") from None
    return Prepared(path, source.layout)


class Prepared:
    """A prepared file; its arrays are known to have the right names, types and shapes."""

    def __init__(self, path: Path, layout: Mapping[str, Expected]) -> None:
        self.path = path
        self._layout = layout
        self._headers = {}
        for name in layout:
            with self._open(name) as file:
                self._headers[name] = _header(file)
        self._lengths = _check_shapes(self._headers, layout, self._name)

    def __getitem__(self, name: str) -> np.ndarray:
        with self._open(name) as file:
            array = np.ascontiguousarray(np.lib.format.read_array(file, allow_pickle=False))
        _check_range(array, self._layout[name].below, self._lengths, self._name(name))
        return array

    def shape(self, name: str) -> tuple[int, ...]:
        return self._headers[name].shape

    def blocks(self, name: str) -> Iterator[np.ndarray]:
        """An array in blocks of rows: what is rearranged anyway need not be in memory twice."""
        (rows, *shape), dtype, by_column = self._headers[name]
        if by_column:
            yield self[name]
            return
        width = int(np.prod(shape)) * dtype.itemsize
        with self._open(name) as file:
            _header(file)
            for start in range(0, rows, ROWS):
                count = min(ROWS, rows - start)
                yield np.frombuffer(file.read(count * width), dtype).reshape(count, *shape)

    def _name(self, name: str) -> str:
        return f"array {name!r} of {self.path}"

    def _open(self, name: str) -> _Member:
        return _Member(self.path, name)


class _Member:
    """One array of an npz file, open for reading; whatever is wrong with the file is told by its name."""

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name

    def __enter__(self) -> IO[bytes]:
        try:
            self._archive = zipfile.ZipFile(self._path)
        except (OSError, zipfile.BadZipFile) as error:
            raise self._damaged(error) from None
        try:
            self._file = self._archive.open(f"{self._name}.npy")
        except (KeyError, zipfile.BadZipFile):
            self._archive.close()
            raise DescantError(f"{self._path} has no array {self._name!r}: remove it, "
                               "and it is prepared again from the official files") from None
        return self._file

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._file.close()
        self._archive.close()
        if isinstance(error, ValueError | OSError | EOFError | zipfile.BadZipFile | zlib.error):
            raise self._damaged(error) from None

    def _damaged(self, error: BaseException) -> DescantError:
        return DescantError(f"{self._path} cannot be read (array {self._name!r}: {error}): remove it, "
                            "and it is prepared again from the official files")


class _Header(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    by_column: bool = False


def _header(file: IO[bytes]) -> _Header:
    """What the array is that a file begins with; leaves the file at its first number."""
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(file)
    if version not in read:
        raise ValueError(f"npy format {version} is unknown")
    shape, by_column, dtype = read[version](file)
    if dtype.hasobject:
        raise ValueError("it holds objects, which are never read")
    return _Header(shape, dtype, by_column)


def _convert(source: Source, path: Path) -> None:
    """Write the prepared file, whole or not at all."""
    arrays, origin = _official(source, path.parent / (source.folder or source.name))

    def told(name: str) -> str:
        return f"array {name!r} made of the official files in {origin}"

    for name in source.layout:
        assert name in arrays, f"the parser of {source.name} makes no {name!r}"
    headers = {name: _Header(arrays[name].shape, arrays[name].dtype) for name in source.layout}
    lengths = _check_shapes(headers, source.layout, told)
    for name, expected in source.layout.items():
        _check_range(arrays[name], expected.below, lengths, told(name))
    with replacing(path) as file:
        np.savez(file, **arrays)


def _official(source: Source, folder: Path) -> tuple[Arrays, Path]:
    """The arrays of the official files, and where these were found."""
    for remote in source.remotes:
        archive = folder / remote.name
        # text that a person put there may have other line ends; what is compressed is as it was published
        if archive.suffix in (".gz", ".zip") and archive.exists() and (wrong := mismatch(archive, remote)):
            raise DescantError(f"{archive} is not the official file: {wrong}. Remove it, and it is "
                               "downloaded again; or put what it contains next to it")
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
            if not _has(folder, remote):
                fetch(remote, folder)
    except DownloadError as error:
        raise DescantError(_how_to_obtain(source, folder, f"{absent}, and cannot be downloaded ({error})")
                           ) from None
    return source.parse(folder), folder


def _has(folder: Path, remote: Remote) -> bool:
    """Whether a file is there, compressed or not."""
    return (folder / remote.name).exists() or (folder / remote.name.removesuffix(".gz")).exists()


def _how_to_obtain(source: Source, folder: Path, reason: str) -> str:
    files = "".join(f"\n  {remote.name}  from  {remote.urls[0]}" for remote in source.remotes)
    return (f"there is no {source.name}.npz in {folder.parent}; {reason}.\n"
            f"Put into {folder}: {source.obtain}{files}\n"
            f"Another data directory can be named with --data-dir or {ENVIRONMENT}. "
            "Dataset 'digits' needs no files.")


def _check_shapes(
    headers: Mapping[str, _Header], layout: Mapping[str, Expected], told: Callable[[str], str]
) -> dict[str, int]:
    """The lengths that the layout gives by name; arrays that do not fit it are an error."""
    lengths: dict[str, int] = {}
    for name, expected in layout.items():
        shape, dtype, _ = headers[name]
        if not (dtype.kind == "U" if expected.dtype == "str" else dtype == np.dtype(expected.dtype)):
            raise DescantError(f"{told(name)} has the type {dtype}, not {expected.dtype}")
        for k, length in enumerate(expected.shape[: len(shape)]):
            if isinstance(length, str):
                lengths.setdefault(length, shape[k])
        wanted = tuple(lengths.get(n, 0) if isinstance(n, str) else n for n in expected.shape)
        if shape != wanted:
            raise DescantError(f"{told(name)} has the shape {shape}, not {wanted}")
        if not all(shape):
            raise DescantError(f"{told(name)} is empty")
    return lengths


def _check_range(array: np.ndarray, below: int | str | None, lengths: Mapping[str, int], told: str) -> None:
    if below is None:
        return
    limit = lengths[below] if isinstance(below, str) else below
    for row in np.flatnonzero((array < 0) | (array >= limit))[:1]:
        raise DescantError(f"{told} holds {array[row]} in row {row}, outside the range 0..{limit - 1}")

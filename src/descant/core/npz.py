"""NPZ files: what one announces is bounded by what it can hold before any memory is taken for it.

An NPZ file is a ZIP archive of arrays, each a header and its numbers. Sizes are in the header, in the list of
the archive and in the compressed data; they must agree. How much larger than the file a compressed array may
be is in `unpack`.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from descant.core.units import size as in_units
from descant.core.unpack import excess
from descant.errors import UsageError, first_line

HEADER = 2**16  # bytes that hold any header: numpy's are at most 10,000
PART = 2**24  # bytes that are unpacked at once
SIDE = 2**31  # rows or columns of an array without numbers

_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
_DAMAGE = (ValueError, EOFError, zipfile.BadZipFile, zlib.error, struct.error, RuntimeError, ArithmeticError,
           LookupError, TypeError, MemoryError)  # what zipfile raises on files that are none


class BadArchive(ValueError):
    """A file that is no NPZ, or that is damaged, or that would take too much memory."""


class Header(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    by_column: bool = False

    @property
    def size(self) -> int:
        """Bytes of the numbers."""
        return math.prod(self.shape) * self.dtype.itemsize


class Archive:
    """The arrays of a file that is open."""

    def __init__(self, archive: zipfile.ZipFile, length: int) -> None:
        self._archive = archive
        self._length = length
        self.names = [name.removesuffix(".npy") for name in archive.namelist()]
        if twice := [name for name, count in Counter(self.names).items() if count > 1]:
            raise BadArchive(f"it has the array {twice[0]!r} more than once")

    def header(self, name: str) -> Header:
        with self.opened(name) as (_, header):
            return header

    def array(self, name: str) -> np.ndarray:
        with self.opened(name) as (file, (shape, dtype, by_column)):
            raw = np.empty(math.prod(shape) * dtype.itemsize, np.uint8)
            for start in range(0, len(raw), PART):
                part = file.read(PART)[: len(raw) - start]
                raw[start : start + len(part)] = np.frombuffer(part, np.uint8)
            file.read(1)  # the checksum is looked at when the end is reached
            found = raw.view(dtype) if len(raw) else np.empty(0, dtype)
            return found.reshape(shape[::-1]).T if by_column else found.reshape(shape)

    @contextmanager
    def opened(self, name: str) -> Iterator[tuple[IO[bytes], Header]]:
        """An array's file at its first number, and its header, which fits the file."""
        member = f"{name}.npy"
        try:
            info = self._archive.getinfo(member if member in self._archive.namelist() else name)
            self._check_entry(info)
            with self._archive.open(info) as file:
                header, start = _header(file.read(HEADER))
                self._check_size(info, header, start)
                file.seek(start)
                yield file, header
        except BadArchive as error:
            raise BadArchive(f"{member} {error}") from None
        except UsageError:
            raise  # the limit itself is no number
        except _DAMAGE as error:
            raise BadArchive(f"{member}: {error or type(error).__name__}") from None

    def _check_entry(self, info: zipfile.ZipInfo) -> None:
        if info.flag_bits & 1:
            raise BadArchive("is encrypted: write it without a password")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise BadArchive(f"is compressed by method {info.compress_type}, which numpy does not write")
        is_stored = info.compress_type == zipfile.ZIP_STORED
        if info.compress_size > self._length or (is_stored and info.file_size != info.compress_size):
            raise BadArchive(f"announces {in_units(info.file_size)}, and the file has "
                             f"{in_units(self._length)}")
        if not is_stored and (words := excess(info.file_size, info.compress_size)):
            raise BadArchive(words)

    @staticmethod
    def _check_size(info: zipfile.ZipInfo, header: Header, start: int) -> None:
        if header.size != info.file_size - start or not all(0 <= side < SIDE for side in header.shape
                                                            if not header.size):
            raise BadArchive(f"announces the shape {_shown(header.shape)} of {header.dtype}, and holds "
                             f"{in_units(max(0, info.file_size - start))} of numbers")


@contextmanager
def opened(path: Path) -> Iterator[Archive]:
    """The arrays of a file; BadArchive if it is none, OSError if it cannot be read."""
    with path.open("rb") as raw:
        try:
            archive = zipfile.ZipFile(raw)
        except _DAMAGE as error:
            raise BadArchive(str(error) or type(error).__name__) from None
        with archive:
            yield Archive(archive, os.fstat(raw.fileno()).st_size)


def _header(start: bytes) -> tuple[Header, int]:
    """The header at the start of an array's file, and where its numbers begin."""
    file = io.BytesIO(start)
    try:
        version = np.lib.format.read_magic(file)
        if version not in _READERS:
            raise BadArchive(f"has the npy format {version}, which is unknown")
        shape, by_column, dtype = _READERS[version](file)
    except BadArchive:
        raise
    except Exception as error:  # of whatever Python makes of a text that is no header
        raise BadArchive(f"has no header of an array ({first_line(error)})") from None
    if dtype.hasobject:
        raise BadArchive("holds Python objects, which are never loaded")
    if dtype.kind not in "biufUSMm" or not dtype.itemsize:
        raise BadArchive(f"holds {dtype}, which are neither numbers nor texts")
    if any(isinstance(side, bool) or side < 0 for side in shape):
        raise BadArchive(f"announces the shape {_shown(shape)}")
    return Header(shape, dtype, by_column), file.tell()


def _shown(shape: tuple[int, ...]) -> str:
    """A shape as people read it: a side of thirty digits is one of about 1e+30."""
    return f"({', '.join(f'{side:.3g}' if abs(side) > 10**12 else str(side) for side in shape)})"

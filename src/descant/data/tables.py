"""Files of users: tables in CSV and Parquet, read block by block, and arrays in NPZ.

This module reads cells and knows their place in the file; `schema` checks their values.
"""

from __future__ import annotations

import csv
import importlib
import re
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from descant.errors import UsageError, unknown

TABLES = (".csv", ".parquet")
ENDINGS = (*TABLES, ".npz")
ROWS = 20_000  # of a block: a large file is never in memory as a whole

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


class Block(ABC):
    """Some rows of a table."""

    @abstractmethod
    def place(self, row: int) -> str:
        """File and line of a row."""

    @abstractmethod
    def __len__(self) -> int:
        """How many rows there are."""

    @abstractmethod
    def numbers(self, column: str) -> np.ndarray:
        """The cells of a column as float64; NaN: missing."""

    @abstractmethod
    def texts(self, column: str) -> list[str | None]:
        """The cells of a column as text; None: missing."""

    def cell(self, row: int, column: str) -> str:
        return f"{self.place(row)}, column {column!r}"


class Table(NamedTuple):
    """A table that is open for reading."""

    columns: list[str]
    blocks: Iterator[Block]


@contextmanager
def opened(path: Path, wanted: Sequence[str]) -> Iterator[Table]:
    """Open a table; only the columns `wanted` can be read."""
    if path.suffix.lower() == ".parquet":
        yield _parquet(path, wanted)
        return
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield _csv(path, csv.reader(file, strict=True, skipinitialspace=True))
    except UnicodeDecodeError:
        raise UsageError(f"{path}, line {_first_line_not_utf8(path)} is not UTF-8 text: save the file in the "
                         'encoding "UTF-8"') from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None


def place_of_row(path: Path, row: int) -> str:
    """File and line of a row (from 0) of a readable table."""
    with opened(path, ()) as table:
        for block in table.blocks:
            if row < len(block):
                return block.place(row)
            row -= len(block)
    raise IndexError(row)


# -- CSV ---------------------------------------------------------------------------------------------


class _CsvBlock(Block):
    def __init__(self, path: Path, columns: Sequence[str], rows: list[list[str]], lines: list[int]) -> None:
        self._path, self._rows, self._lines = path, rows, lines
        self._position = {name: k for k, name in enumerate(columns)}

    def __len__(self) -> int:
        return len(self._rows)

    def place(self, row: int) -> str:
        return f"{self._path}, line {self._lines[row]}"

    def numbers(self, column: str) -> np.ndarray:
        position = self._position[column]
        cells = [row[position] for row in self._rows]
        try:
            values = np.array(list(map(float, cells)))
            plain = bool(np.isfinite(values).all()) and not any("_" in cell for cell in cells)
        except ValueError:
            plain = False
        if plain:  # Python also reads nan, infinity and 1_000 as numbers
            return values
        return np.array([self._number(cell, row, column) for row, cell in enumerate(cells)])

    def _number(self, cell: str, row: int, column: str) -> float:
        text = cell.strip()
        if not text:
            return np.nan
        if _NUMBER.fullmatch(text):
            return float(text)
        if _NUMBER.fullmatch(text.replace(",", "")):
            raise UsageError(f"{self.cell(row, column)}: {text!r} has a comma: write numbers with a decimal "
                             "point and without thousands separators")
        raise UsageError(f"{self.cell(row, column)}: {text!r} is not a number: correct it, or leave the cell "
                         "empty if the value is missing")

    def texts(self, column: str) -> list[str | None]:
        position = self._position[column]
        return [row[position].strip() or None for row in self._rows]


def _csv(path: Path, reader: Any) -> Table:  # reader: as csv.reader makes it, a type without a public name
    rows = _csv_rows(path, reader)
    header = next(rows, None)
    if header is None:
        raise UsageError(f"{path} is empty: the first line must name the columns, and rows follow")
    columns = [name.strip() for name in header[1]]
    for mark, name in ((";", "semicolons"), ("\t", "tabs")):
        if len(columns) == 1 and mark in columns[0]:
            raise UsageError(f"{path}, line 1: the columns seem to be separated by {name}: save the file "
                             "with commas between the columns, and points in the numbers")
    return Table(columns, _csv_blocks(path, columns, rows))


def _csv_blocks(path: Path, columns: list[str], rows: Iterator[tuple[int, list[str]]]) -> Iterator[Block]:
    cells: list[list[str]] = []
    lines: list[int] = []
    for line, row in rows:
        if len(row) != len(columns):
            raise UsageError(f"{path}, line {line} has {len(row)} cells, but the header names {len(columns)} "
                             "columns: correct the line (text with a comma needs quotes, and numbers a "
                             "decimal point)")
        cells.append(row)
        lines.append(line)
        if len(cells) == ROWS:
            yield _CsvBlock(path, columns, cells, lines)
            cells, lines = [], []
    if cells:
        yield _CsvBlock(path, columns, cells, lines)


def _csv_rows(path: Path, reader: Any) -> Iterator[tuple[int, list[str]]]:
    """The rows that are not blank, each with the number of the line where it begins."""
    line = 1
    try:
        for row in reader:
            if row:
                yield line, row
            line = reader.line_num + 1
    except csv.Error as error:
        raise UsageError(f"{path}, line {line}: {error}; check the quotes from there on") from None


def _first_line_not_utf8(path: Path) -> int:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return number
    return 1  # the file was replaced in the meantime


# -- Parquet -----------------------------------------------------------------------------------------


class _ParquetBlock(Block):
    def __init__(self, path: Path, batch: Any, first: int) -> None:
        self._path, self._batch, self._first = path, batch, first

    def __len__(self) -> int:
        return int(self._batch.num_rows)

    def place(self, row: int) -> str:
        return f"{self._path}, row {self._first + row + 1}"

    def numbers(self, column: str) -> np.ndarray:
        arrow: Any = importlib.import_module("pyarrow")
        cells = self._column(column)
        kinds = arrow.types
        if any(is_kind(cells.type) for is_kind in (kinds.is_integer, kinds.is_floating, kinds.is_decimal,
                                                   kinds.is_boolean, kinds.is_null)):
            values: np.ndarray = cells.cast(arrow.float64(), safe=False).to_numpy(zero_copy_only=False)
            return values
        for row, value in enumerate(cells.to_pylist()):
            if value is not None:
                raise UsageError(f"{self.cell(row, column)}: {value!r} is not a number: the column holds "
                                 f"{cells.type}, convert it to numbers")
        return np.full(len(self), np.nan)

    def texts(self, column: str) -> list[str | None]:
        return [self._text(value, row, column) for row, value in enumerate(self._column(column).to_pylist())]

    def _text(self, value: Any, row: int, column: str) -> str | None:
        """The value as CSV would have it."""
        if value is None or value != value:
            return None
        if isinstance(value, str):
            return value.strip() or None
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, int | float):  # integers with gaps are stored as 1.0
            return str(int(value)) if value == int(value) else str(value)
        raise UsageError(f"{self.cell(row, column)}: {value!r} is neither text nor a number: convert the "
                         "column to text")

    def _column(self, name: str) -> Any:
        arrow: Any = importlib.import_module("pyarrow")
        cells = self._batch.column(name)
        return cells.dictionary_decode() if arrow.types.is_dictionary(cells.type) else cells


def _parquet(path: Path, wanted: Sequence[str]) -> Table:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise UsageError(f"{path}: reading Parquet needs the package pyarrow: pip install 'descant[tables]', "
                         "or save the file as CSV") from None
    try:
        file = parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise _not_parquet(path, error) from None
    return Table(list(file.schema_arrow.names), _parquet_blocks(path, file, wanted))


def _parquet_blocks(path: Path, file: Any, wanted: Sequence[str]) -> Iterator[Block]:
    first = 0
    try:
        with file:
            for batch in file.iter_batches(batch_size=ROWS, columns=list(wanted)):
                yield _ParquetBlock(path, batch, first)
                first += batch.num_rows
    except UsageError:
        raise  # a ValueError of ours, not of pyarrow
    except (OSError, ValueError) as error:
        raise _not_parquet(path, error) from None


def _not_parquet(path: Path, error: Exception) -> UsageError:
    return UsageError(f"{path} cannot be read as Parquet: {str(error).splitlines()[0]}; write it again")


# -- arrays ------------------------------------------------------------------------------------------


class Arrays(NamedTuple):
    """Samples, targets (int64: class numbers; float: real) and the groups that no split divides."""

    x: np.ndarray
    y: np.ndarray
    group: np.ndarray | None = None

    @classmethod
    def of(cls, x: Any, y: Any, group: Any = None, where: str = "") -> Arrays:
        """The arrays, checked; `where` begins the messages."""
        x, y = _plain(x, f"{where}x"), _plain(y, f"{where}y")
        if y.dtype.kind != "f":
            y = y.astype(np.int64)
            if (y < 0).any():
                row, *_ = np.argwhere(y < 0)[0]
                raise UsageError(f"{where}y[{row}] is {y[row]}: class numbers begin at 0 (make y float if "
                                 "it is a regression target)")
        if x.ndim < 2:
            raise UsageError(f"{where}x has the shape {x.shape}: it needs rows and columns (or more "
                             "dimensions), even with a single column")
        if y.ndim < 1 or len(x) != len(y):
            raise UsageError(f"{where}x has {len(x)} rows, but y has the shape {y.shape}: they must describe "
                             "the same samples")
        if not len(x):
            raise UsageError(f"{where}x has no rows: add some")
        for name, array, is_wrong in (("x", x, np.isinf), ("y", y, lambda y: ~np.isfinite(y))):
            if array.dtype.kind == "f" and (wrong := is_wrong(array)).any():
                place = ", ".join(map(str, np.argwhere(wrong)[0]))
                raise UsageError(f"{where}{name}[{place}] is not a finite number: correct it, or leave the "
                                 "row out")
        if group is not None and np.shape(group) != (len(x),):
            raise UsageError(f"{where}group has the shape {np.shape(group)}: it needs one entry for each of "
                             f"the {len(x)} rows of x")
        return cls(x, y, None if group is None else np.asarray(group))


def read_npz(path: Path) -> Arrays:
    """The arrays x, y and, if there is one, group of a file."""
    arrays = _load_npz(path)
    if "y" not in arrays:
        raise UsageError(f"{path} has no array 'y': it needs x (samples) and y (targets)")
    return Arrays.of(arrays["x"], arrays["y"], arrays.get("group"), f"{path}: ")


def read_npz_rows(path: Path) -> tuple[np.ndarray, np.ndarray | None]:
    """The samples of a file, and the targets if it has them."""
    arrays = _load_npz(path)
    targets = arrays.get("y", np.zeros(arrays["x"].shape[:1], np.int64))
    x, y, _ = Arrays.of(arrays["x"], targets, arrays.get("group"), f"{path}: ")
    return x, y if "y" in arrays else None


def _load_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file, x at least."""
    try:
        with path.open("rb") as raw, zipfile.ZipFile(raw) as archive:
            for name in (member.removesuffix(".npy") for member in archive.namelist()):
                if name not in Arrays._fields:
                    raise UsageError(f"{path}: {unknown('array', name, Arrays._fields)}")
            raw.seek(0)
            with np.load(raw, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except UsageError:
        raise
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UsageError(f"{path} cannot be read as NPZ: {error}; write it again, with numpy.savez") from None
    if "x" not in arrays:
        raise UsageError(f"{path} has no array 'x': it needs x (samples) and y (targets)")
    return arrays


def _plain(values: Any, where: str) -> np.ndarray:
    """An array of float, uint8 or int64."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{where} must be an array of numbers: {error}") from None
    if array.dtype.kind not in "fiub":
        raise UsageError(f"{where} must be an array of numbers, not of {array.dtype}")
    if array.dtype.kind == "f":
        return array.astype(array.dtype.newbyteorder("="), copy=False)
    return array if array.dtype == np.uint8 else array.astype(np.int64)

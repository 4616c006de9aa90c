"""Files of users: tables in CSV and Parquet, read block by block, and arrays in NPZ.

This module reads cells and knows their place in the file; `schema` checks their values.
"""

from __future__ import annotations

import csv
import importlib
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from descant.core import npz
from descant.core.unpack import excess
from descant.errors import UsageError, first_line, unknown

TABLES = (".csv", ".parquet")
ENDINGS = (*TABLES, ".npz")
ROWS = 20_000  # of a block: a large file is never in memory as a whole

_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)  # in linear time


class Block(Protocol):
    """Some rows of a table. A missing cell is NaN among numbers (float64), None among texts."""

    def __len__(self) -> int: ...

    def place(self, row: int) -> str: ...  # file and line

    def numbers(self, column: str) -> np.ndarray: ...

    def texts(self, column: str) -> list[str | None]: ...

    def cell(self, row: int, column: str) -> str:
        return f"{self.place(row)}, column {column!r}"


class Table(NamedTuple):
    """A table that is open for reading."""

    columns: list[str]
    blocks: Iterator[Block]


@contextmanager
def opened(path: Path, wanted: Sequence[str], missing: Sequence[str] = ()) -> Iterator[Table]:
    """Open a table; only the columns `wanted` can be read. A cell that holds one of `missing` is as empty."""
    if path.suffix.lower() == ".parquet":
        with _parquet(path) as file:
            yield Table(list(file.schema_arrow.names), _parquet_blocks(path, file, wanted, missing))
        return
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield _csv(path, csv.reader(file, strict=True, skipinitialspace=True), missing)
    except UnicodeDecodeError:
        raise UsageError(f"{path}, line {_first_line_not_utf8(path)} is not UTF-8 text: save the file in the "
                         'encoding "UTF-8"') from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None


def read_texts(path: Path, column: str) -> list[str]:
    """The cells of one column of a table, as text; nothing where a cell is empty."""
    with opened(path, [column]) as table:
        if column not in table.columns:
            raise unknown(f"column of {path}", column, table.columns)
        return [text or "" for block in table.blocks for text in block.texts(column)]


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
    def __init__(self, path: Path, columns: Sequence[str], rows: list[list[str]], lines: list[int],
                 missing: Sequence[str]) -> None:
        self._path, self._rows, self._lines, self._missing = path, rows, lines, {"", *missing}
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
            plain = (bool(np.isfinite(values).all()) and len(self._missing) == 1
                     and not any("_" in cell for cell in cells))
        except ValueError:
            plain = False
        if plain:  # Python also reads nan, infinity and 1_000 as numbers
            return values
        return np.array([self._number(cell, row, column) for row, cell in enumerate(cells)])

    def _number(self, cell: str, row: int, column: str) -> float:
        text = cell.strip()
        if text in self._missing:
            return np.nan
        if _NUMBER.fullmatch(text):
            return float(text)
        if _NUMBER.fullmatch(text.replace(",", "")):
            raise UsageError(f"{self.cell(row, column)}: {text!r:.80} has a comma: write numbers with a "
                             "decimal point and without thousands separators")
        raise UsageError(f"{self.cell(row, column)}: {text!r:.80} is not a number: correct it, or leave the "
                         "cell empty if the value is missing")

    def texts(self, column: str) -> list[str | None]:
        position = self._position[column]
        texts = (row[position].strip() for row in self._rows)
        return [None if text in self._missing else text for text in texts]


def _csv(path: Path, reader: Any, missing: Sequence[str]) -> Table:
    """`reader` is as csv.reader makes it, a type without a public name."""
    rows = _csv_rows(path, reader)
    header = next(rows, None)
    if header is None:
        raise UsageError(f"{path} is empty: the first line must name the columns, and rows follow")
    columns = [name.strip() for name in header[1]]
    for mark, name in ((";", "semicolons"), ("\t", "tabs")):
        if len(columns) == 1 and mark in columns[0]:
            raise UsageError(f"{path}, line 1: the columns seem to be separated by {name}: save the file "
                             "with commas between the columns, and points in the numbers")
    return Table(columns, _csv_blocks(path, columns, rows, missing))


def _csv_blocks(path: Path, columns: list[str], rows: Iterator[tuple[int, list[str]]], missing: Sequence[str]
                ) -> Iterator[Block]:
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
            yield _CsvBlock(path, columns, cells, lines, missing)
            cells, lines = [], []
    if cells:
        yield _CsvBlock(path, columns, cells, lines, missing)


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
    def __init__(self, path: Path, batch: Any, first: int, missing: Sequence[str]) -> None:
        self._path, self._batch, self._first, self._missing = path, batch, first, {"", *missing}

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
            codes = [float(text) for text in self._missing if _NUMBER.fullmatch(text)]
            return np.where(np.isin(values, codes), np.nan, values) if codes else values
        for row, value in enumerate(self._values(column)):
            if value is not None:
                raise UsageError(f"{self.cell(row, column)}: {value!r:.80} is not a number: the column holds "
                                 f"{cells.type}, convert it to numbers")
        return np.full(len(self), np.nan)

    def texts(self, column: str) -> list[str | None]:
        return [self._text(value, row, column) for row, value in enumerate(self._values(column))]

    def _values(self, column: str) -> list[Any]:
        cells = self._column(column)
        try:
            values: list[Any] = cells.to_pylist()
        except UnicodeDecodeError:
            row = next(row for row in range(len(cells)) if not _is_text(cells[row]))
            raise UsageError(f"{self.cell(row, column)}: the text is not UTF-8: write it again") from None
        return values

    def _text(self, value: Any, row: int, column: str) -> str | None:
        """The value as CSV would have it."""
        if value is None or value != value:
            return None
        if isinstance(value, float) and math.isinf(value):
            raise UsageError(f"{self.cell(row, column)}: infinity is not a category: correct it, or leave "
                             "the cell empty if the value is missing")
        if isinstance(value, str):
            return None if value.strip() in self._missing else value.strip()
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, int | float):  # integers with gaps are stored as 1.0
            return str(int(value)) if value == int(value) else str(value)
        raise UsageError(f"{self.cell(row, column)}: {value!r:.80} is neither text nor a number: convert the "
                         "column to text")

    def _column(self, name: str) -> Any:
        arrow: Any = importlib.import_module("pyarrow")
        cells = self._batch.column(name)
        return cells.dictionary_decode() if arrow.types.is_dictionary(cells.type) else cells


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise UsageError(f"{path}: reading Parquet needs the package pyarrow: pip install 'descant[tables]', "
                         "or save the file as CSV") from None
    try:
        with parquet.ParquetFile(path) as file:
            yield file
    except UsageError:
        raise  # a ValueError of ours, not of pyarrow
    except (OSError, ValueError, TypeError, LookupError, NotImplementedError, ArithmeticError, MemoryError
            ) as error:  # what pyarrow's errors derive from
        raise UsageError(f"{path} cannot be read as Parquet: {first_line(error)}; write it again") from None


def _parquet_blocks(path: Path, file: Any, wanted: Sequence[str], missing: Sequence[str]) -> Iterator[Block]:
    length, first = path.stat().st_size, 0
    for batch in file.iter_batches(batch_size=ROWS, columns=list(wanted)):
        yield _ParquetBlock(path, batch, first, missing)
        first += batch.num_rows
        if words := excess(4 * first * len(wanted), length):  # a value that repeats takes no place
            raise UsageError(f"{path} {words}")


def _is_text(cell: Any) -> bool:
    try:
        cell.as_py()
    except UnicodeDecodeError:
        return False
    return True


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
        for name, array in (("x", x), ("y", y)):
            if not array.size:
                raise UsageError(f"{where}{name} has the shape {array.shape}: its rows hold nothing")
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
        with npz.opened(path) as archive:
            for name in archive.names:
                if name not in Arrays._fields:
                    raise UsageError(f"{path}: {unknown('array', name, Arrays._fields)}")
            arrays = {name: archive.array(name) for name in archive.names}
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except npz.BadArchive as error:
        raise UsageError(f"{path} cannot be read as NPZ: {error}; write it again, with numpy.savez") from None
    if "x" not in arrays:
        raise UsageError(f"{path} has no array 'x': it needs x (samples) and y (targets)")
    return arrays


def single(array: np.ndarray, where: str) -> np.ndarray:
    """The array in single precision; a number that would become infinite is an error."""
    with np.errstate(over="ignore"):  # refused below
        found: np.ndarray = array.astype(np.float32)
    for place in np.argwhere(np.isinf(found))[:1].tolist():
        raise UsageError(f"{where}[{', '.join(map(str, place))}]: {array[tuple(place)]:g} is too large: "
                         "correct it, or leave the row out")
    return found


def _plain(values: Any, where: str) -> np.ndarray:
    """An array of float, uint8 or int64."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{where} must be an array of numbers: {error}") from None
    if array.dtype.kind not in "fiub":
        raise UsageError(f"{where} must be an array of numbers, not of {array.dtype}")
    if array.dtype.kind == "f":
        wide = np.dtype(np.float64) if array.dtype.itemsize > 8 else array.dtype.newbyteorder("=")
        with np.errstate(over="ignore"):  # infinity is refused with the rest
            return array.astype(wide, copy=False)
    if array.dtype.kind == "u" and array.size and array.max() > np.iinfo(np.int64).max:
        raise UsageError(f"{where} holds {array.max()}, which is too large for a whole number of 64 bits")
    return array if array.dtype == np.uint8 else array.astype(np.int64)

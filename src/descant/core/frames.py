"""Tables as people have them in Python; and pandas where it is asked for, since it is an extra."""

from __future__ import annotations

import datetime
import decimal
import numbers
import os
import uuid
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from descant.errors import UsageError, one, unknown

TIMES = (datetime.date, datetime.time, datetime.timedelta)
FEW = 20  # so many different texts are categories, whatever the number of rows


def pandas(what: str) -> Any:
    """The module; `what` the user called needs it."""
    try:
        import pandas
    except ModuleNotFoundError as error:
        if error.name != "pandas":
            raise
        raise UsageError(f"{what} needs pandas, which is not installed: pip install 'descant[pandas]'"
                         ) from None
    return pandas


# -- tables of any kind ----------------------------------------------------------------------------------


class Encoded(NamedTuple):
    """A column as numbers."""

    values: np.ndarray  # [rows], or [rows, ...] where cells are arrays
    names: tuple[str, ...]  # of its features; () where cells are arrays


class Labelled(NamedTuple):
    """Class numbers with their names, as Hugging Face's ClassLabel has them."""

    numbers: np.ndarray
    names: tuple[str, ...]


def arrays(table: Any, roles: Mapping[str, Any], columns: Iterable[Any] | None
           ) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """The samples and targets of a table, and what else `Federation.from_arrays` is told. `roles` has the
    columns for "target", "client", "group" and "split"; the last two may be None."""
    for what in ("target", "client"):
        if roles[what] is None:
            raise UsageError(f"{what} is missing: name the column to predict as target, and the one that "
                             "says whose row it is as client")
    if columns is not None and (isinstance(columns, str) or not isinstance(columns, Iterable)):
        raise UsageError(f"columns must be a list: columns=[{columns!r}]")
    columns = None if columns is None else list(columns)
    found = columns_of(table)
    used = {what: name for what, name in roles.items() if name is not None}
    for name in (*used.values(), *(columns or ())):
        if not isinstance(name, Hashable):
            raise UsageError(f"{name!r} is not a column: name one column for each role")
        if name not in found:
            raise unknown("column", name, map(str, found))
    features = [name for name in found if name not in used.values()] if columns is None else columns
    if wrong := [name for name in features if name in used.values()]:
        raise UsageError(f"the column {wrong[0]!r} cannot be a feature: it says the "
                         f"{next(what for what, name in used.items() if name == wrong[0])}")
    if not features:
        raise UsageError("no column is left for the features")
    _require_one_length({name: found[name] for name in (*features, *used.values())})
    x, names = joined({name: feature(name, found[name]) for name in features})
    y, classes = target(roles["target"], found[roles["target"]])
    own: dict[str, Any] = {what: ids(name, found[name]) for what, name in used.items() if what != "target"}
    if classes is not None:
        own |= {"classes": len(classes), "class_names": classes}
    return x, y, own | {"column_names": names}


def columns_of(table: Any) -> dict[Any, Any]:
    """The columns of a data frame, a Hugging Face dataset, a mapping of columns, or anything with a length
    whose items are mappings or tuples, such as a torch Dataset: then a column is a name or a position."""
    if hasattr(table, "dtypes") and hasattr(table, "columns"):  # pandas
        names = list(table.columns)
        if len(set(names)) < len(names):
            raise UsageError(f"the frame has the column {next(n for n in names if names.count(n) > 1)!r} "
                             "twice: rename one")
        return {name: table[name] for name in names}
    if named := getattr(getattr(table, "dtype", None), "names", None):  # a structured array of numpy
        return {name: table[name] for name in named}
    if hasattr(table, "column_names") and hasattr(table, "to_pylist"):  # Arrow
        return {name: _objects(table[name].to_pylist()) for name in table.column_names}
    if hasattr(table, "with_format"):  # Hugging Face
        _require_whole(table)
        found = dict(table.with_format("numpy")[:])
        return {name: Labelled(values, tuple(table.features[name].names))
                if hasattr(table.features[name], "names") else values for name, values in found.items()}
    if isinstance(table, Mapping):
        return dict(table)
    if isinstance(table, str | os.PathLike):
        raise UsageError(f"the table is the path {str(table)!r}: read the file first, as in "
                         "from_frame(pandas.read_csv(path), ...)")
    if not hasattr(table, "__len__") or not hasattr(table, "__getitem__"):
        raise UsageError("the table must be a data frame, a dataset or a mapping of columns, not "
                         f"{one(table)}")
    return _of_rows([table[k] for k in range(len(table))])


def _of_rows(rows: list[Any]) -> dict[Any, Any]:
    """The columns of rows that are mappings or tuples, all alike."""
    if not rows:
        raise UsageError("the table has no rows")
    first = rows[0]
    if not isinstance(first, Mapping | tuple | list):
        raise UsageError(f"a row of the table is {one(first)}: it must be a mapping or a tuple; arrays are "
                         "read by Federation.from_arrays(x, y, client)")
    if isinstance(first, Mapping):
        for k, row in enumerate(rows):
            if not isinstance(row, Mapping) or row.keys() != first.keys():
                raise UsageError(f"row {k} of the table is not like the first: give every row the columns "
                                 f"{', '.join(map(str, first))}, with None where a value is missing")
        return {name: _objects([row[name] for row in rows]) for name in first}
    for k, row in enumerate(rows):
        if not isinstance(row, tuple | list) or len(row) != len(first):
            raise UsageError(f"row {k} of the table is not like the first: give every row {len(first)} "
                             "values, with None where one is missing")
    return {place: _objects([row[place] for row in rows]) for place in range(len(first))}


def _require_one_length(columns: Mapping[Any, Any]) -> None:
    lengths = {}
    for name, column in columns.items():
        values = column.numbers if isinstance(column, Labelled) else column
        if isinstance(values, str | Mapping) or not hasattr(values, "__len__") or getattr(
                values, "shape", None) == ():
            raise UsageError(f"the column {name!r} is {one(values)}: it must have a value for every row")
        lengths[name] = len(values)
    if len({*lengths.values()}) > 1:
        raise UsageError("the columns have different numbers of rows: "
                         + ", ".join(f"{name!r} {length}" for name, length in lengths.items()))
    if not next(iter(lengths.values())):
        raise UsageError("the table has no rows")


def _require_whole(table: Any) -> None:
    """Refuse datasets of Hugging Face that are several, or a stream."""
    if isinstance(table, Mapping):
        raise UsageError(f"the table is a DatasetDict with {', '.join(map(str, table))}: choose one, as in "
                         f"dataset[{next(iter(table), 'train')!r}], or join them with datasets."
                         "concatenate_datasets and a column that says the split")
    if not hasattr(table, "__len__"):
        raise UsageError("the table is a stream, and the rows of a client are read many times: make a "
                         "dataset of it first, without streaming=True")


def feature(name: Any, column: Any) -> Encoded:
    """A feature: numbers as they are, true and false as 1 and 0, text one-hot in the order of the categories.
    A missing text is missing in all of its columns."""
    values, given = _plain(name, column)
    if values.dtype.kind in "biuf":
        shaped = values.ndim > 1
        return Encoded(values if shaped else values.astype(np.float32), () if shaped else (str(name),))
    texts = _texts(name, values, given)
    found = [text for text in dict.fromkeys(texts) if text is not None]
    if given is None and len(found) > max(FEW, len(texts) // 2):
        raise UsageError(f"the column {name!r} has {len(found)} different texts in {len(texts)} rows, which "
                         "is no category: leave it out with columns=[...], or make numbers of it")
    categories = given or tuple(sorted(found))
    if not categories:
        raise UsageError(f"the column {name!r} has no value in any row: leave it out with columns=[...]")
    codes = np.array([len(categories) if text is None else categories.index(text) for text in texts], int)
    rows = np.eye(len(categories) + 1, len(categories), dtype=np.float32)
    rows[-1] = np.nan
    return Encoded(rows[codes], tuple(f"{name}={category}" for category in categories))


def joined(features: Mapping[Any, Encoded]) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """The samples, and the names of their columns. A column of arrays stands alone."""
    shaped = [name for name, encoded in features.items() if not encoded.names]
    if shaped and len(features) > 1:
        raise UsageError(f"the column {shaped[0]!r} holds arrays, and samples are one array each: choose it "
                         f"alone with columns=[{shaped[0]!r}], or the others")
    if shaped:
        return features[shaped[0]].values, None
    parts = [encoded.values.reshape(len(encoded.values), -1) for encoded in features.values()]
    return np.concatenate(parts, 1), tuple(name for encoded in features.values() for name in encoded.names)


def target(name: Any, column: Any) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """The targets, and the names of the classes: text and truth values are classes, whole numbers are class
    numbers, real numbers are real targets."""
    values, given = _plain(name, column)
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise UsageError(f"the target {name!r} is missing in row {int(np.argmin(np.isfinite(values)))}: "
                         "leave the row out")
    if values.dtype.kind == "b":
        return values.astype(np.int64), ("False", "True")
    if values.dtype.kind in "iuf":
        return values, None
    texts = _texts(name, values, given)
    if None in texts:
        raise UsageError(f"the target {name!r} is missing in row {texts.index(None)}: leave the row out")
    classes = given or tuple(sorted({str(text) for text in texts}))
    return np.array([classes.index(str(text)) for text in texts], np.int64), classes


def ids(name: Any, column: Any) -> np.ndarray:
    """An id for each row: whole numbers, or text."""
    values, given = _plain(name, column)
    if values.dtype.kind == "f" and np.array_equal(values, np.round(values)):
        values = values.astype(np.int64)  # numbers of clients that pandas has made real ones
    if values.dtype.kind in "biu":
        return values
    texts = _texts(name, values, given) if values.dtype.kind != "f" else [
        None if value != value else repr(value) for value in values.tolist()]
    if None in texts:
        raise UsageError(f"the column {name!r} is missing in row {texts.index(None)}: every row needs one")
    return np.array(texts)


def _plain(name: Any, column: Any) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """A column as numbers, truth values or objects; and its categories, if it has some of its own."""
    if isinstance(column, Labelled):
        return np.array([column.names[number] for number in column.numbers.tolist()], object), column.names
    dtype = getattr(column, "dtype", None)
    if (categories := getattr(dtype, "categories", None)) is not None:
        return np.array(column, object), tuple(str(category) for category in categories)
    kind = getattr(dtype, "kind", "O")
    if kind in "Mm":
        raise _times(name)
    if kind in "biuf" and hasattr(column, "isna") and bool(column.isna().any()):
        return np.asarray(column.astype("float64")), None
    values = np.asarray(column if kind != "O" else _objects(list(column)))
    if values.dtype.kind in "Mm":
        raise _times(name)
    if values.dtype.kind == "c":
        raise UsageError(f"the column {name!r} holds complex numbers: make two columns of it, real and "
                         "imaginary part")
    if values.dtype.kind != "O":
        return values, None
    cells = [cell for cell in values if not is_missing(cell)]
    if any(isinstance(cell, TIMES) or type(cell).__name__ == "Period" for cell in cells):
        raise _times(name)
    if cells and all(isinstance(cell, list | tuple) or getattr(cell, "shape", ()) for cell in cells):
        try:
            return np.stack([np.asarray(cell) for cell in values]), None
        except ValueError:
            raise UsageError(f"the column {name!r} holds arrays of different shapes: make them the same"
                             ) from None
    if cells and all(isinstance(cell, bool | np.bool_) for cell in cells):
        return (values.astype(bool) if len(cells) == len(values) else _with_gaps(values)), None
    if cells and all(isinstance(cell, numbers.Real | decimal.Decimal) or hasattr(cell, "item")
                     for cell in cells):
        whole = len(cells) == len(values)
        found = np.array([np.asarray(cell).item() for cell in values]) if whole else _with_gaps(values)
        return (found.astype(np.float64) if found.dtype.kind == "O" else found), None
    return values, None


def _times(name: Any) -> UsageError:
    return UsageError(f"the column {name!r} holds times: make numbers of them, such as days since a date, "
                      "or leave it out with columns=[...]")


def _with_gaps(values: np.ndarray) -> np.ndarray:
    return np.array([np.nan if is_missing(cell) else float(cell) for cell in values])


def is_missing(cell: Any) -> bool:
    """None, NaN, and what pandas has for them."""
    return cell is None or type(cell).__name__ in ("NAType", "NaTType") or (
        isinstance(cell, float | np.floating) and cell != cell)


def _texts(name: Any, values: np.ndarray, given: tuple[str, ...] | None) -> list[str | None]:
    """Cells as text, None where one is missing. Categories that are `given` may be anything."""
    texts = [None if is_missing(cell) else cell for cell in values.tolist()]
    kinds = sorted({type(text).__name__ for text in texts if text is not None})
    if len(kinds) > 1:
        raise UsageError(f"the column {name!r} holds {' and '.join(kinds)}: make them the same")
    if given is None and kinds and not isinstance(
            strange := next(text for text in texts if text is not None), str | uuid.UUID):
        raise UsageError(f"the column {name!r} holds {one(strange)} in each row: make numbers or text of it, "
                         "or leave it out with columns=[...]")
    return [None if text is None else str(text) for text in texts]


def _objects(cells: list[Any]) -> np.ndarray:
    """An array of objects, also where they are arrays themselves."""
    made = np.empty(len(cells), object)
    for k, cell in enumerate(cells):
        made[k] = cell
    return made

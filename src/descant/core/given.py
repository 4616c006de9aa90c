"""Arrays, ids and options as people give them, or an error that says what is wrong with them."""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from descant.errors import UsageError, first_line, one


def as_tensor(values: Any, name: str) -> Tensor:
    if hasattr(values, "toarray") or (isinstance(values, Tensor) and values.layout != torch.strided):
        how = ".to_dense()" if isinstance(values, Tensor) else ".toarray()"
        raise UsageError(f"{name} is sparse, and descant takes whole rows: give {name}{how}")
    if isinstance(values, Tensor) and values.is_meta:
        raise UsageError(f"{name} is on torch's meta device and holds no numbers: give it with its values")
    try:
        with warnings.catch_warnings():  # nobody writes into samples: frames and maps of files will do
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            tensor = torch.as_tensor(values if isinstance(values, Tensor) else np.asarray(values))
    except (TypeError, ValueError) as error:
        if "inhomogeneous" in str(error):
            raise UsageError(f"{name} has rows of different shapes: make them the same") from None
        if np.asarray(values).dtype.kind in "OUS":
            raise UsageError(f"{name} must be an array of numbers, and this holds text or objects: tables "
                             "with text, and names of classes, are read by Federation.from_frame(table, "
                             "target=..., client=...)") from None
        raise UsageError(f"{name} must be an array of numbers: {error}") from None
    if not tensor.dim():
        raise UsageError(f"{name} must be an array with one row per sample, not {values!r}")
    if tensor.is_complex():
        raise UsageError(f"{name} must hold real numbers, and these are complex")
    return tensor.detach() if tensor.requires_grad else tensor


def as_ids(values: Any, name: str, rows: int | None = None) -> np.ndarray:
    """One id for each row: numbers or text."""
    ids = np.asarray(values)
    if ids.dtype.kind == "O" and all(isinstance(value, str) for value in ids.ravel()):  # as pandas has text
        ids = ids.astype(str)
    if rows is not None and len(ids) != rows:
        raise UsageError(f"{name} has {len(ids)} rows, but x has {rows}: give each sample one")
    missing = ids.dtype.kind == "f" and bool(np.isnan(ids).any())
    if ids.ndim != 1 or ids.dtype.kind not in "biufUS" or missing:
        raise UsageError(f"{name} must hold one id (a number or a text) for each sample, and none missing")
    return ids


def owners(client: Any, x: Tensor, y: Tensor) -> np.ndarray:
    """The ids of the clients that the rows belong to."""
    if client is None:
        raise UsageError("client is missing: give the id of each sample's client, or a saved partition")
    ids = as_ids(client, "client")
    if not len(x) == len(y) == len(ids):
        raise UsageError(f"x has {len(x)} rows, y {len(y)} and client {len(ids)}: "
                         "they must describe the same samples")
    return ids


def is_pair(dataset: Any) -> bool:
    return isinstance(dataset, tuple) and len(dataset) == 2


def as_pair(dataset: Any) -> tuple[Tensor, Tensor]:
    if is_pair(dataset):
        return as_tensor(dataset[0], "x"), as_tensor(dataset[1], "y")
    if hasattr(dataset, "columns"):
        raise UsageError("the dataset of a client is a table: put the tables together, with a column that "
                         "says whose row it is, and give Federation.from_frame(table, target=..., "
                         "client=...)")
    rows = [dataset[k] for k in range(len(dataset))]
    for row in rows:
        if isinstance(row, Mapping):
            raise UsageError(f"the rows of the dataset are tables with {', '.join(map(str, row))}: say which "
                             "of them is the target, with Federation.from_frame(dataset, target=..., "
                             "client=...), or give pairs (x, y)")
        if not isinstance(row, tuple | list) or len(row) != 2:
            raise UsageError(f"a row of the dataset is {one(row)}: each must be a pair (x, y)")
    try:
        return (torch.stack([torch.as_tensor(x) for x, _ in rows]),
                torch.stack([torch.as_tensor(y) for _, y in rows]))
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"the rows of the dataset cannot be put together: {first_line(error)}; each must be "
                         "a pair (x, y) of numbers, and all of the same shape") from None


def as_constants(values: Any, name: str) -> tuple[float, ...] | None:
    """One number, or one for each column; None where none are given."""
    if values is None or isinstance(values, numbers.Real):
        return None if values is None else (float(values),)
    if isinstance(values, str) or not hasattr(values, "__iter__"):
        raise UsageError(f"{name} must be a number, or one for each column, not {one(values)}")
    return tuple(values)


def require_whole(value: Any, name: str) -> None:
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise UsageError(f"{name} must be a whole number, not {value!r}")

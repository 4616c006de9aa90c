"""Labels of any kind as classes: numbers from 0 without gaps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from descant.errors import UsageError


def as_classes(y: np.ndarray) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """Class numbers of labels [rows], and the class names: the distinct labels in ascending order. Labels
    without gaps from 0 on stay as they are, without names. So do labels of several dimensions, which are
    tokens, and negative ones, which are refused later."""
    if y.ndim != 1 or y.dtype.kind == "f" or not len(y):
        return y, None
    found, numbers = np.unique(y, return_inverse=True)
    if found[0] < 0 or found[-1] == len(found) - 1:
        return y, None
    return numbers.astype(np.int64), tuple(str(label) for label in found.tolist())


def as_known(y: np.ndarray, names: Sequence[str] | None, where: str) -> np.ndarray:
    """Labels of later rows as numbers of the known classes; `where` begins the message."""
    if names is None or not all(map(str.isdecimal, names)) or y.dtype.kind == "f":
        return y
    known = np.array([int(name) for name in names])  # ascending, as `as_classes` made them
    if (known == np.arange(len(known))).all():
        return y
    numbers = np.searchsorted(known, y).clip(max=len(known) - 1)
    if (wrong := known[numbers] != y).any():
        raise UsageError(f"{where}y holds the label {y[wrong][0]}, but the model knows {', '.join(names)}")
    return numbers

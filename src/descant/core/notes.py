"""Notes that users should read before they train on their data; nothing is repaired silently."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core.preprocess import BLOCK
from descant.core.splits import SPLITS, Division

LARGE = 10.0  # a scaled feature has a smaller mean and deviation
SMALL = 5  # a client with fewer rows is too small to measure
FEW = 5  # a real target with at most this many integers looks like classes
NAMED = 3  # columns or clients that are listed by name


class Unscaled(NamedTuple):
    """A real feature that is too large for the usual step sizes."""

    name: str
    mean: float
    std: float

    def __str__(self) -> str:
        return f"{self.name} (mean {self.mean:.3g}, deviation {self.std:.3g})"


def unscaled(x: Tensor, rows: np.ndarray, names: Sequence[str] | None) -> list[Unscaled]:
    """The unscaled columns of a real table over these rows, the largest first."""
    if x.dim() != 2 or not x.is_floating_point() or not len(rows):
        return []
    def total(of: Callable[[Tensor], Tensor]) -> Tensor:  # the table may be larger than the memory
        found = torch.zeros(x.shape[1], dtype=torch.float64)
        for start in range(0, len(rows), BLOCK):
            found += of(x[torch.from_numpy(rows[start : start + BLOCK])].double()).nan_to_num(0.0).sum(0)
        return found

    count = total(lambda seen: (~seen.isnan()).double()).clamp(min=1)
    mean = total(lambda seen: seen) / count
    std = (total(lambda seen: (seen - mean).square()) / count).sqrt()
    size = torch.maximum(mean.abs(), std)
    order = [k for k in size.argsort(descending=True).tolist() if size[k] > LARGE]
    return [Unscaled(_column(k, names), float(mean[k]), float(std[k])) for k in order]


def about_scale(found: Sequence[Unscaled]) -> str:
    """In words, with the remedy."""
    one = len(found) == 1
    return (f"{'column' if one else 'columns'} {_listed([str(each) for each in found])} "
            f"{'is' if one else 'are'} not scaled: training with the usual step sizes is likely to diverge; "
            'set scale = "client" in [data]')


def observed(x: Tensor, y: Tensor, division: Division, column_names: Sequence[str] | None,
             scaled: bool) -> tuple[str, ...]:
    """Notes on the rows before anything is imputed or scaled; `scaled`: they will be."""
    return (*([] if column_names is None else _about_target(y)), *_about_sizes(division),
            *_about_empty_columns(x, division, column_names),
            *([] if scaled or not (found := unscaled(x, division.train.indices, column_names))
              else [about_scale(found)]))


def about_labels(labels: Sequence[str] | None) -> tuple[str, ...]:
    """A note if labels with gaps became classes (`labels.as_classes`)."""
    if labels is None:
        return ()
    many = len(labels) > 10
    which = f"{len(labels)} numbers from {labels[0]} to {labels[-1]}" if many else _listed(labels)
    remedy = "; if y is a regression target, make it float" if many else ""
    return (f"the labels are {which}: they become {len(labels)} classes with these names{remedy}",)


def _about_target(y: Tensor) -> list[str]:
    """A note if the target of a table is real and looks like classes."""
    if not y.is_floating_point() or y.dim() != 1:
        return []
    values = y.unique()
    if len(values) > FEW or len(values) == len(y) or not bool((values == values.round()).all()):
        return []
    listed = _listed([f"{value:g}" for value in values.tolist()])
    return [f"the target has only the values {listed} and is treated as a real number: if these are classes, "
            "list them as classes in [schema]"]


def _about_sizes(division: Division) -> list[str]:
    size = sum(getattr(division, split).sizes for split in SPLITS)
    small = np.flatnonzero(size < SMALL)
    if not len(small):
        return []
    who = _listed([f"{division.names[k]!r} ({size[k]})" for k in small])
    whose = f"client {who} has" if len(small) == 1 else f"clients {who} have"
    return [f"{whose} fewer than {SMALL} rows: scores measured there are mostly noise"]


def _about_empty_columns(x: Tensor, division: Division, names: Sequence[str] | None) -> list[str]:
    if x.dim() != 2 or not x.is_floating_point():
        return []
    if not any(bool(x[start : start + BLOCK].isnan().any()) for start in range(0, len(x), BLOCK)):
        return []
    empty = []
    for client in range(len(division.train)):
        rows = torch.from_numpy(division.train[client])
        empty += [f"{_column(k, names)} at {division.names[client]!r}"
                  for k in torch.nonzero(x[rows].isnan().all(0)).flatten().tolist()]
    if not empty:
        return []
    return [f"{'a column has' if len(empty) == 1 else f'{len(empty)} columns have'} no value in a client's "
            f"training rows: {_listed(empty)}; imputed values carry no information"]


def _column(k: int, names: Sequence[str] | None) -> str:
    return f"{k}" if names is None else repr(names[k])


def _listed(words: Sequence[str], most: int = NAMED) -> str:
    if len(words) > max(most, 10 if all(len(word) < 6 for word in words) else 0):
        return f"{', '.join(words[:most])} and {len(words) - most} more"
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]

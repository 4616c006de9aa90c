"""Scaling and imputation of features without leakage.

Statistics are constants that the user gives, or those of the client's own training rows; test rows and rows
of other clients never enter them. Imputation comes before scaling. A column is the first dimension of a
sample: a feature of a table, a channel of images or time series.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from descant.core.fields import Checked, hyper
from descant.core.splits import Table
from descant.errors import UsageError

BLOCK = 1024  # rows that are looked at together


class Treatment(NamedTuple):
    """The preprocessing of each client, to be repeated on later rows: NaN is replaced by `fill`, `mean` is
    subtracted, and the result divided by `std`; what is None is skipped."""

    dtype: torch.dtype  # of the original rows, in which it is computed
    fill: Tensor | None = None  # [clients, columns] float64
    mean: Tensor | None = None
    std: Tensor | None = None
    is_learned: bool = False  # whether any of it is a statistic of rows

    def pick(self, clients: Any) -> Treatment:
        """The treatment of these clients, in this order."""
        fill, mean, std = (None if part is None else part[clients]
                           for part in (self.fill, self.mean, self.std))
        return self._replace(fill=fill, mean=mean, std=std)

    def constants(self, client: int) -> dict[str, list[float]]:
        """The numbers for one client, one for each column."""
        return {name: part[client].tolist() for name, part in self._parts().items()}

    def _parts(self) -> dict[str, Tensor]:
        found = {"fill": self.fill, "mean": self.mean, "std": self.std}
        return {name: part for name, part in found.items() if part is not None}


@dataclass(frozen=True)
class Preprocess(Checked):
    """Preprocessing of real features; bytes and tokens stay as they are.

    A column that is constant in a client's training rows is only centred. A column without any value there
    is imputed so that it is 0 after scaling.
    """

    scale: Literal["none", "client", "constants"] = hyper(
        "none", "standardise by the client's own training rows, or by `mean` and `std`")
    mean: tuple[float, ...] | None = hyper(None, "constants to subtract: one, or one per column")
    std: tuple[float, ...] | None = hyper(None, "constants to divide by: one, or one per column")
    impute: Literal["none", "client", "constants"] = hyper(
        "none", "replace missing values (NaN) by the mean of the client's own training rows, or by `fill`")
    fill: tuple[float, ...] | None = hyper(None, "constants for missing values: one, or one per column")

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, choice, values in (("scale", self.scale, {"mean": self.mean, "std": self.std}),
                                      ("impute", self.impute, {"fill": self.fill})):
            for name, constants in values.items():
                if choice == "constants" and not constants:
                    raise UsageError(f'{field} = "constants" needs {name}: '
                                     "give one number, or one per column")
                if choice != "constants" and constants is not None:
                    raise UsageError(f'{name} is given, but {field} = "{choice}" does not use it: set '
                                     f'{field} = "constants", or leave {name} out')
        if min(self.std or (1.0,)) <= 0:
            raise UsageError(f"std must be greater than 0, not {min(self.std or ())}")

    @property
    def changes(self) -> bool:
        return self.scale != "none" or self.impute != "none"

    @property
    def learns(self) -> bool:
        """Whether what is done to a row depends on other rows."""
        return "client" in (self.scale, self.impute)

    def check(self, x: Tensor, names: Sequence[str] | None = None) -> None:
        """Refuse values that preprocessing would not repair, and constants that do not fit. `names` are those
        of the columns."""
        if not x.is_floating_point():
            if self.changes:
                field = "scale" if self.scale != "none" else "impute"
                raise UsageError(f"{field} is for real features, and x holds {x.dtype}: leave it out (bytes "
                                 "stand for [0, 1] as they are), or give x as real numbers")
            return
        for start in range(0, len(x), BLOCK):  # the samples may be a file that is larger than the memory
            self._check_rows(x[start : start + BLOCK], start, names)
        columns = x.shape[1] if x.dim() > 1 else 1
        for name in ("mean", "std", "fill"):
            constants = getattr(self, name)
            if constants is not None and len(constants) not in (1, columns):
                raise UsageError(f"{name} has {len(constants)} numbers, but x has {columns} columns: "
                                 f"give 1 or {columns}")

    def _check_rows(self, x: Tensor, start: int, names: Sequence[str] | None) -> None:
        bad = ~torch.isfinite(x) if self.impute == "none" else torch.isinf(x)
        if not bool(bad.any()):
            return
        row, *place = torch.nonzero(bad)[0].tolist()
        missing = bool(torch.isnan(x[(row, *place)]))
        remedy = ('set impute = "client" or "constants", or leave the row out' if missing
                  else "correct it, or leave the row out")
        column = f", column {', '.join(map(str, place))}" if place else ""
        if names is not None and len(place) == 1 and place[0] < len(names):
            column = f", column {names[place[0]]!r}"
        raise UsageError(f"x has {'a missing' if missing else 'an infinite'} value in row {start + row}"
                         f"{column}: {remedy}")

    def apply(self, x: Tensor, train: Table, validation: Table, test: Table) -> tuple[Tensor, Treatment]:
        """A preprocessed copy of `x`, and how it was made; rows of no client are not imputed."""
        x = x.clone(memory_format=torch.contiguous_format)
        table = x.view(len(x), x.shape[1] if x.dim() > 1 else 1, -1)  # [rows, columns, values]
        given = {name: torch.tensor(getattr(self, name) or (usual,), dtype=torch.float64)
                 for name, usual in (("fill", 0.0), ("mean", 0.0), ("std", 1.0))}
        used = (["fill"] if self.impute != "none" else []) + (["mean", "std"] if self.scale != "none" else [])
        found = {name: given[name].expand(len(train), table.shape[1]).clone() for name in used}
        if self.impute == "constants":
            table.copy_(table.where(~table.isnan(), _as_column(given["fill"], x)))
        if self.learns:
            for client in range(len(train)):
                rows = torch.from_numpy(np.concatenate([train[client], validation[client], test[client]]))
                table[rows], own = self._of_client(table[rows], len(train[client]), given["mean"])
                for name, values in own.items():
                    found[name][client] = values
        if self.scale == "constants":
            table.sub_(_as_column(given["mean"], x)).div_(_as_column(given["std"], x))
        if bool((large := table.isinf()).any()):
            row, column, _ = torch.nonzero(large)[0].tolist()
            raise UsageError(f"x[{row}, {column}] is too large to be scaled: correct it, or scale it by less")
        return x, Treatment(x.dtype, **found, is_learned=self.learns)

    def _of_client(self, block: Tensor, training: int, zero: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """One client's rows [rows, columns, values], whose first `training` set the statistics, and these
        statistics; `zero` becomes 0 when constants scale it."""
        found: dict[str, Tensor] = {}
        if self.impute == "client":
            found["fill"] = _averages(block[:training], zero)
            block = block.where(~block.isnan(), _as_column(found["fill"], block))
        if self.scale == "client":
            found["mean"], found["std"] = _spread(block[:training])
            block = (block - _as_column(found["mean"], block)) / _as_column(found["std"], block)
        return block, found


def _averages(seen: Tensor, zero: Tensor) -> Tensor:
    """The mean of each column's known values; `zero` for a column without any."""
    seen = seen.double()
    count = (~seen.isnan()).sum((0, 2))
    return (seen.nan_to_num(0.0).sum((0, 2)) / count.clamp(min=1)).where(count > 0, zero)


def _spread(seen: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each column; 1 in place of one that is 0 up to rounding."""
    seen = seen.double()
    mean, std = seen.mean((0, 2)), seen.std((0, 2), correction=0)
    return mean, std.where(std > 1e-12 * mean.abs(), 1.0)


def _as_column(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like.dtype)[:, None]

"""A federation without data: what the server knows of its clients, and what a model is fitted to.

The server has two samples of zeros, of the shape and type that the clients' samples have, and of each client
a name and how many rows it has. That is enough to make the model, to weigh clients, and to learn what form
an upload has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from descant.core.splits import Table
from descant.engine.backends.shard import Shard
from descant.errors import UsageError


class Kind(NamedTuple):
    """What all clients' samples have in common."""

    shape: tuple[int, ...]  # of a sample
    dtype: str  # of its numbers: real ones are all the same
    target_shape: tuple[int, ...]
    target_dtype: str
    classes: int | None
    tokens: int | None  # samples are made of the integers from 0 to below this

    @classmethod
    def of(cls, x: torch.Tensor, y: torch.Tensor, classes: int | None) -> Kind:
        tokens = int(x.max()) + 1 if _name(x) not in ("real", "uint8", "bool") and x.numel() else None
        return cls(tuple(x.shape[1:]), _name(x), tuple(y.shape[1:]), _name(y), classes, tokens)

    @classmethod
    def parse(cls, table: Any) -> Kind:
        """The kind that a node says its data are of."""
        try:
            shape, dtype, target_shape, target_dtype, classes, tokens = (table[name] for name in cls._fields)
            sides = [*shape, *target_shape, *(n for n in (classes, tokens) if n is not None)]
            names = (dtype, target_dtype)
            known = all(name == "real" or isinstance(getattr(torch, str(name), None), torch.dtype)
                        for name in names)
            if not known or not all(isinstance(side, int) and 0 <= side < 2**31 for side in sides):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise UsageError(f"{table!r:.200} does not describe samples") from None
        return cls(tuple(shape), dtype, tuple(target_shape), target_dtype, classes, tokens)

    def dump(self) -> dict[str, Any]:
        return self._asdict()

    def differs(self, other: Kind) -> str | None:
        """In what two kinds differ that must not; classes and tokens may be more or fewer."""
        for name in ("shape", "dtype", "target_shape", "target_dtype"):
            if (mine := getattr(self, name)) != (its := getattr(other, name)):
                return f"its {name.replace('_', ' ')} is {its}, that of the others {mine}"
        return None if (self.classes is None) == (other.classes is None) else "only one of them has classes"

    @classmethod
    def common(cls, kinds: Sequence[Kind], classes: int | None) -> Kind:
        """What holds for all; `classes` where the experiment says how many there are."""
        first = kinds[0]
        known = [kind.classes for kind in kinds if kind.classes is not None]
        tokens = [kind.tokens for kind in kinds if kind.tokens is not None]
        return first._replace(classes=classes or max(known, default=None), tokens=max(tokens, default=None))

    def samples(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Two samples of zeros, and their targets."""
        x = torch.zeros(2, *self.shape, dtype=_dtype(self.dtype, dtype))
        if self.tokens is not None and x.numel():
            x.view(-1)[-1] = self.tokens - 1  # the largest that there is
        return x, torch.zeros(2, *self.target_shape, dtype=_dtype(self.target_dtype, dtype))


class Member(NamedTuple):
    """A client as the server knows it."""

    name: str
    train: int  # rows
    validation: int
    test: int


class Frame(Shard):
    """A federation of which only the sizes are known: every row of every client is the first sample."""

    elsewhere: ClassVar[bool] = True

    @classmethod
    def of(cls, kind: Kind, members: Sequence[Member], dtype: torch.dtype, unseen: int = 0) -> Frame:
        x, y = kind.samples(dtype)

        def table(sizes: list[int]) -> Table:
            return Table.packed(np.zeros(sum(sizes), np.int64), sizes)

        return cls(x, y, table([m.train for m in members]), table([m.validation for m in members]),
                   table([m.test for m in members]), kind.classes, tuple(m.name for m in members),
                   unseen=unseen)


def _name(values: torch.Tensor) -> str:
    return "real" if values.is_floating_point() else str(values.dtype).removeprefix("torch.")


def _dtype(name: str, real: torch.dtype) -> torch.dtype:
    found: torch.dtype = real if name == "real" else getattr(torch, name)
    return found


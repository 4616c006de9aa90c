"""What a sample of a federation looks like: what a network is fitted to, and what all clients must share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from descant.core.federation import Federation
from descant.errors import UsageError

REAL = "real"  # any floating-point type


# What another machine may claim: tensors of these sizes are made before any row is seen.
MOST = {"numbers in a sample": 2**24, "numbers in a target": 2**20, "classes": 2**16, "tokens": 2**20}


class SampleFormat(NamedTuple):
    """Shape and type of a sample and of its target."""

    shape: tuple[int, ...]
    dtype: str = REAL  # uint8 stands for [0, 1]; other integers are tokens
    target_shape: tuple[int, ...] = ()
    target_dtype: str = REAL
    classes: int | None = None  # None: the target is real
    tokens: int | None = None  # tokens are the integers from 0 to below this; None: the sample has none

    @classmethod
    def of(cls, x: Tensor, y: Tensor, classes: int | None) -> SampleFormat:
        """The format of samples x [n, ...] with targets y [n, ...]."""
        dtype, tokens = _name(x), None
        if dtype not in (REAL, "uint8", "bool") and x.numel() and int(x.min()) >= 0:
            tokens = int(x.max()) + 1
        return cls(tuple(x.shape[1:]), dtype, tuple(y.shape[1:]), _name(y), classes, tokens)

    @classmethod
    def of_federation(cls, federation: Federation) -> SampleFormat:
        return cls.of(federation.x, federation.y, federation.classes)

    @property
    def outputs(self) -> int:
        """How many numbers a network gives for a sample."""
        return math.prod(self.target_shape) if self.classes is None else self.classes

    def for_loss(self, loss: object) -> SampleFormat:
        """The format that a network for this loss is fitted to: a binary loss takes one output."""
        if loss == "binary_cross_entropy" and self.classes is not None:
            return self._replace(classes=None, target_shape=())
        return self

    def torch_dtype(self, real: torch.dtype = torch.float32) -> torch.dtype:
        """The type of a sample's numbers; `real` where any floating-point type would do."""
        return _dtype(self.dtype, real)

    @property
    def is_real(self) -> bool:
        return self.torch_dtype().is_floating_point

    def zeros(self, real: torch.dtype) -> tuple[Tensor, Tensor]:
        """Two samples of zeros, and their targets."""
        x = torch.zeros(2, *self.shape, dtype=self.torch_dtype(real))
        if self.tokens is not None and x.numel():
            x.view(-1)[-1] = self.tokens - 1  # so that the number of tokens can be read off
        return x, torch.zeros(2, *self.target_shape, dtype=_dtype(self.target_dtype, real))

    # -- between machines ------------------------------------------------------------------------------

    @classmethod
    def parse(cls, table: Any) -> SampleFormat:
        """The format that `dump` wrote."""
        try:
            shape, dtype, target_shape, target_dtype, classes, tokens = (table[name] for name in cls._fields)
            sides = [*shape, *target_shape, *(n for n in (classes, tokens) if n is not None)]
            if not all(map(is_dtype, (dtype, target_dtype))) or not all(
                    isinstance(side, int) and 0 <= side < 2**31 for side in sides):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise UsageError(f"{table!r:.200} does not describe samples") from None
        found = cls(tuple(shape), dtype, tuple(target_shape), target_dtype, classes, tokens)
        for what, count in (("numbers in a sample", _count(found.shape)), ("classes", classes or 0),
                            ("numbers in a target", _count(found.target_shape)), ("tokens", tokens or 0)):
            if count > MOST[what]:
                raise UsageError(f"{count} {what} are more than descant takes from another machine "
                                 f"({MOST[what]})")
        return found

    def dump(self) -> dict[str, Any]:
        return self._asdict()

    def differs(self, other: SampleFormat) -> str | None:
        """In what two formats differ that must not; classes and tokens may be more or fewer."""
        for name in ("shape", "dtype", "target_shape", "target_dtype"):
            if (mine := getattr(self, name)) != (its := getattr(other, name)):
                return f"its {name.replace('_', ' ')} is {its}, that of the others {mine}"
        return None if (self.classes is None) == (other.classes is None) else "only one of them has classes"

    @classmethod
    def common(cls, formats: Sequence[SampleFormat], classes: int | None) -> SampleFormat:
        """The format that covers all of them; `classes` if the experiment says how many there are."""
        known = [each.classes for each in formats if each.classes is not None]
        tokens = [each.tokens for each in formats if each.tokens is not None]
        return formats[0]._replace(classes=classes or max(known, default=None),
                                   tokens=max(tokens, default=None))


def _count(shape: tuple[int, ...]) -> int:
    return math.prod(shape) if len(shape) <= 16 else MOST["numbers in a sample"] + 1


def is_dtype(name: object) -> bool:
    """Whether this names a type of numbers."""
    return name == REAL or isinstance(getattr(torch, str(name), None), torch.dtype)


def _name(values: Tensor) -> str:
    return REAL if values.is_floating_point() else str(values.dtype).removeprefix("torch.")


def _dtype(name: str, real: torch.dtype) -> torch.dtype:
    found: torch.dtype = real if name == REAL else getattr(torch, name)
    return found

"""What an entry of the model registry is."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import nn

from descant.core.federation import Federation
from descant.core.fields import Checked
from descant.core.task import Task
from descant.errors import UsageError


class Facts(NamedTuple):
    """What a network is fitted to."""

    shape: tuple[int, ...]  # of one sample
    outputs: int
    tokens: int | None = None  # samples are made of the integers from 0 to below this; None: they are not

    @classmethod
    def of(cls, federation: Federation, loss: object = None) -> Facts:
        """The facts of a federation; a binary loss takes one output for its two classes."""
        x = federation.x
        if federation.classes is None:
            outputs = math.prod(federation.y.shape[1:])
        else:
            outputs = 1 if loss == "binary_cross_entropy" else federation.classes
        is_integer = not x.is_floating_point() and x.dtype not in (torch.uint8, torch.bool)
        tokens = int(x.max()) + 1 if is_integer and x.numel() and int(x.min()) >= 0 else None
        return cls(tuple(x.shape[1:]), outputs, tokens)

    def refuse_tokens(self, model: str) -> None:
        """For networks that calculate with the samples."""
        if self.tokens is not None:
            raise UsageError(f"model {model!r} needs real numbers, but the samples are integers, which are "
                             'taken for tokens: use model "lstm", or make x a float array')


class NetworkSpec(Checked, ABC):
    """A network that is fitted to the data's input shape and number of outputs.

    Its last layer is called `head`, so that methods that treat head and body differently find it.
    """

    name: ClassVar[str]

    @abstractmethod
    def network(self, facts: Facts) -> nn.Module:
        """A new network with random parameters."""


class TaskSpec(Checked, ABC):
    """A model that is a function of a vector, not a network."""

    name: ClassVar[str]

    @abstractmethod
    def task(self, federation: Federation, dtype: torch.dtype) -> Task:
        """The task on this federation."""

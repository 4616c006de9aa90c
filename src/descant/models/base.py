"""What an entry of the model registry is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import nn

from descant.core.federation import Federation
from descant.core.fields import Checked
from descant.core.sample import SampleFormat
from descant.core.task import Task
from descant.errors import UsageError


def require_numbers(sample: SampleFormat, model: str) -> None:
    """Refuse tokens, for networks that calculate with the samples."""
    if sample.tokens is not None:
        raise UsageError(f"model {model!r} needs real numbers, but the samples are integers, which are "
                         'taken for tokens: use model "lstm", or make x a float array')


class NetworkSpec(Checked, ABC):
    """A network that is fitted to the data's input shape and number of outputs.

    Its last layer is called `head`, so that methods that treat head and body differently find it.
    """

    name: ClassVar[str]

    @abstractmethod
    def network(self, sample: SampleFormat) -> nn.Module:
        """A new network with random parameters."""


class TaskSpec(Checked, ABC):
    """A model that is a function of a vector, not a network."""

    name: ClassVar[str]

    @abstractmethod
    def task(self, federation: Federation, dtype: torch.dtype) -> Task:
        """The task on this federation."""

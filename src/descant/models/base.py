"""What an entry of the model registry is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import nn

from descant.fields import Checked
from descant.pool import Federation
from descant.task import Task


class NetworkSpec(Checked, ABC):
    """A network that is fitted to the data's input shape and number of outputs.

    Its last layer is called `head`, so that methods that treat head and body differently find it.
    """

    name: ClassVar[str]

    @abstractmethod
    def network(self, shape: tuple[int, ...], outputs: int) -> nn.Module:
        """A new network with random parameters."""


class TaskSpec(Checked, ABC):
    """A model that is a function of a vector, not a network."""

    name: ClassVar[str]

    @abstractmethod
    def task(self, federation: Federation, dtype: torch.dtype) -> Task:
        """The task on this federation."""

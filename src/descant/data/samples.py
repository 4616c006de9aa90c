"""What a dataset is: hyper-parameters that load as samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from torch import Tensor

from descant.core.fields import Checked


@dataclass(frozen=True)
class Samples:
    """All rows of a dataset, before they are dealt to clients."""

    x: Tensor
    y: Tensor
    classes: int | None  # None where y holds real targets
    owner: np.ndarray | None = None  # per row, the id of the client it naturally belongs to
    group: np.ndarray | None = None  # per row, the id of what must stay on one side of a split
    truth: dict[str, Tensor] = field(default_factory=dict)  # what is known, a row for each sorted owner
    common: dict[str, Tensor] = field(default_factory=dict)  # what is known of them all together
    class_names: tuple[str, ...] | None = None  # where they differ from those of the dataset
    column_names: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()  # what people should know, one line each

    @property
    def labels(self) -> np.ndarray | None:
        """The class numbers; None where y holds real targets."""
        return None if self.classes is None else self.y.numpy()


class Dataset(Checked, ABC):
    """Base of all datasets; the first line of a docstring is what `descant list` shows."""

    name: ClassVar[str]
    natural: ClassVar[bool] = False  # whether the rows have owners
    default_clients: ClassVar[int] = 20  # a dataset with a fixed number of owners says how many
    class_names: ClassVar[tuple[str, ...] | None] = None  # what the classes are called
    column_names: ClassVar[tuple[str, ...] | None] = None  # likewise the features of a table

    @abstractmethod
    def load(self, clients: int, seed: int) -> Samples:
        """The samples; `clients` and `seed` matter only to datasets that are drawn."""

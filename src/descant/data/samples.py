"""A dataset: hyper-parameters that load as samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from descant.core.fields import Checked


@dataclass(frozen=True, repr=False)  # nothing that is printed shows a row
class Samples:
    """All rows of a dataset, before they are partitioned."""

    x: Tensor
    y: Tensor
    classes: int | None  # None: y holds real targets
    owner: np.ndarray | None = None  # per row, the id of its natural owner
    group: np.ndarray | None = None  # per row, an id; rows of a group stay in one split
    truth: dict[str, Tensor] = field(default_factory=dict)  # ground truth, a row for each sorted owner
    common: dict[str, Tensor] = field(default_factory=dict)  # ground truth of all of them
    class_names: tuple[str, ...] | None = None  # if they differ from those of the dataset
    column_names: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()  # for the user, one line each

    @classmethod
    def of_clients(cls, xs: Sequence[np.ndarray], ys: Sequence[np.ndarray], classes: int | None, **more: Any
                   ) -> Samples:
        """The samples of one x and one y per client, as float32 and, for class numbers, int64."""
        y = torch.from_numpy(np.concatenate(ys))
        return cls(torch.from_numpy(np.concatenate(xs)).float(), y.float() if classes is None else y.long(),
                   classes, owner=np.repeat(np.arange(len(ys)), [len(y) for y in ys]), **more)

    @property
    def labels(self) -> np.ndarray | None:
        """The class numbers; None: y holds real targets."""
        return None if self.classes is None else self.y.numpy()


class Dataset(Checked, ABC):
    """Base of all datasets; the first line of a docstring is what `descant list` shows."""

    name: ClassVar[str]
    natural: ClassVar[bool] = False  # whether the rows have owners
    default_clients: ClassVar[int] = 20  # or the fixed number of owners
    class_names: ClassVar[tuple[str, ...] | None] = None  # names of the classes
    column_names: ClassVar[tuple[str, ...] | None] = None  # names of the features of a table

    @abstractmethod
    def load(self, clients: int, seed: int) -> Samples:
        """The samples; `clients` and `seed` matter only to synthetic datasets."""

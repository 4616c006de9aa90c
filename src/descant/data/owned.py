"""Prepared datasets whose rows have owners: x, y, client (the owner of a row) and client_names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from descant.data.cache import Arrays, Expected, Prepared, Source, prepared
from descant.data.samples import Dataset, Samples


class Owned(Dataset):
    natural: ClassVar[bool] = True
    classes: ClassVar[int]
    source: ClassVar[Source]

    def load(self, clients: int, seed: int) -> Samples:
        return samples(prepared(self.source), self.classes)


def layout(dtype: str, shape: tuple[int, ...], classes: int) -> dict[str, Expected]:
    """The layout for x of that type and shape (of one row)."""
    return rows(classes) | {"x": Expected(dtype, ("rows", *shape))}


def rows(classes: int) -> dict[str, Expected]:
    """The layout of a row's owner and class."""
    return {
        "y": Expected("int64", ("rows",), below=classes),
        "client_names": Expected("str", ("clients",)),
        "client": Expected("int64", ("rows",), below="clients"),
    }


def arrays(x: Sequence[np.ndarray], y: Sequence[np.ndarray], names: Sequence[str]) -> Arrays:
    """The arrays for one x and one y per client."""
    client = np.repeat(np.arange(len(y)), [len(labels) for labels in y])
    return {"x": np.concatenate(x), "y": np.concatenate(y).astype(np.int64), "client": client,
            "client_names": np.array(names)}


def samples(arrays: Prepared, classes: int) -> Samples:
    owner = arrays["client_names"][arrays["client"]]
    return Samples(torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["y"]), classes, owner)

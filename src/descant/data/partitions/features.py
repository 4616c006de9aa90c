"""The partition with feature shift."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from descant.core.fields import hyper
from descant.core.random import stream
from descant.data.partitions.base import Partition
from descant.data.partitions.sizes import Iid
from descant.data.samples import Samples
from descant.errors import UsageError

_CHUNK = 4096  # images that are rotated at once


@dataclass(frozen=True)
class Feature(Partition):
    """Rows dealt at random, and features that each client sees changed in its own way.

    "affine": x becomes A_k x + b_k, where A_k is I + strength N(0, 1/d) and b_k is strength N(0, 1), of the
    client's own; images get a factor 1 + strength N(0, 1) and a summand strength N(0, 1) per channel.
    "rotation": client k is turned by (k mod rotations) / rotations of a full turn: images in their plane
    (exactly at multiples of 90 degrees, else bilinearly with zeros outside), flat features in a random set
    of orthogonal planes that all clients share. "noise": N(0, s^2) is added, where s grows with the client
    to `strength`, s = strength (k + 1) / clients, as in Li, Diao, Chen, He: Federated Learning on Non-IID
    Data Silos, ICDE 2022, arXiv:2102.02079. Bytes stand for [0, 1], and are rounded and cut off to it.
    """

    name: ClassVar[str] = "feature"

    change: Literal["affine", "rotation", "noise"] = hyper("affine", "what is done to a client's features")
    strength: float = hyper(0.5, "affine, noise: size of the change; 0 is none", ge=0)
    rotations: int = hyper(4, "rotation: number of different angles", ge=1)

    def assign(self, samples: Samples, clients: int, seed: int) -> np.ndarray:
        return Iid().assign(samples, clients, seed)

    def transform(self, samples: Samples, client: np.ndarray, clients: int, seed: int) -> Samples:
        x = samples.x
        self._check(x)
        result = x.clone()
        # clients of one angle are turned together: there are few angles and possibly many clients
        part = client % self.rotations if self.change == "rotation" else client
        order = np.argsort(np.where(client < 0, -1, part), kind="stable")
        order = order[np.count_nonzero(client < 0):]
        for rows in np.split(order, np.flatnonzero(np.diff(part[order])) + 1):
            if len(rows):
                k, chosen = int(part[rows[0]]), torch.from_numpy(rows)
                if x.dtype == torch.uint8:
                    seen = self._changed(x[chosen].float() / 255, k, clients, seed)
                    result[chosen] = (seen.clamp(0, 1) * 255).round().to(x.dtype)
                else:
                    result[chosen] = self._changed(x[chosen], k, clients, seed)
        return dataclasses.replace(samples, x=result)

    def _changed(self, x: Tensor, k: int, clients: int, seed: int) -> Tensor:
        """The features [n, ...] of client k (of angle k)."""
        if self.change == "rotation":
            turn = k / self.rotations
            return _turned_images(x, turn) if x.dim() > 2 else x @ _turn(x.shape[1], turn, seed).to(x.dtype).T
        rng = stream(seed, "feature", k)
        if self.change == "noise":
            noise = self.strength * (k + 1) / clients * rng.standard_normal(tuple(x.shape))
            return x + torch.from_numpy(noise).to(x.dtype)
        d = x.shape[1]
        shift = torch.from_numpy(self.strength * rng.standard_normal(d)).to(x.dtype)
        if x.dim() > 2:
            factor = torch.from_numpy(1 + self.strength * rng.standard_normal(d)).to(x.dtype)
            shape = (d, *[1] * (x.dim() - 2))
            return x * factor.view(shape) + shift.view(shape)
        matrix = np.eye(d) + self.strength / math.sqrt(d) * rng.standard_normal((d, d))
        return x @ torch.from_numpy(matrix).to(x.dtype).T + shift

    def _check(self, x: Tensor) -> None:
        if not x.is_floating_point() and x.dtype != torch.uint8:
            raise UsageError(f"partition 'feature' changes real features or images, and x holds {x.dtype}: "
                             "choose another partition")
        if x.dim() < 2 or (self.change == "rotation" and x.dim() == 2 and x.shape[1] < 2):
            raise UsageError(f"partition 'feature' needs samples with features, and x has the shape "
                             f"{tuple(x.shape)}: choose another partition")
        if self.change != "rotation":
            return
        if x.dim() > 2 and x.shape[-1] != x.shape[-2]:
            raise UsageError('change = "rotation" needs square images or flat features, and a sample has the '
                             f"shape {tuple(x.shape[1:])}: choose another change")
        if x.dim() == 2 and x.dtype == torch.uint8:
            raise UsageError('change = "rotation" cannot turn flat bytes, which would become negative: give '
                             "images, or real features")


def _turn(dim: int, turn: float, seed: int) -> Tensor:
    """The matrix that turns by a share of a full turn in each of dim // 2 random orthogonal planes."""
    basis = np.linalg.qr(stream(seed, "feature planes").standard_normal((dim, dim))).Q
    blocks, even = np.eye(dim), np.arange(0, dim - 1, 2)
    blocks[even, even] = blocks[even + 1, even + 1] = math.cos(2 * math.pi * turn)
    blocks[even + 1, even] = math.sin(2 * math.pi * turn)
    blocks[even, even + 1] = -math.sin(2 * math.pi * turn)
    return torch.from_numpy(basis @ blocks @ basis.T)


def _turned_images(x: Tensor, turn: float) -> Tensor:
    """Images [n, ..., size, size] turned counter-clockwise by a share of a full turn."""
    if (4 * turn).is_integer():
        return torch.rot90(x, int(4 * turn), (-2, -1))
    angle = 2 * math.pi * turn
    # the grid says where a pixel comes from, with the vertical axis pointing down
    matrix = torch.tensor([[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]])
    images = x.reshape(-1, 1, *x.shape[-2:])
    turned = torch.empty_like(images)
    for start in range(0, len(images), _CHUNK):
        chunk = images[start : start + _CHUNK]
        grid = functional.affine_grid(matrix.to(x.dtype).expand(len(chunk), 2, 3), list(chunk.shape),
                                      align_corners=False)
        turned[start : start + _CHUNK] = functional.grid_sample(chunk, grid, align_corners=False)
    return turned.reshape(x.shape)

"""Random numbers of the operating system: nobody can repeat them, not even who knows the seed of a run.

In a simulation noise comes from the run's streams (`core/random.py`), so that a run can be repeated. That is
no protection: whoever knows the seed can take the noise away again.
"""

from __future__ import annotations

import math
import os

import numpy as np
import torch
from torch import Tensor

SUMMED = 4  # normal numbers that are added up for each that is given


def secret_uniform(count: int) -> np.ndarray:
    """Uniform numbers in (0, 1), of 53 bits each."""
    bits = np.frombuffer(os.urandom(8 * count), "<u8") >> np.uint64(11)
    return (bits + 0.5) * 2.0**-53


def secret_normals(count: int) -> np.ndarray:
    """Standard normal numbers. Each is the sum of several: floating-point numbers have gaps, and those of a
    single one could tell what it was added to (Holohan and Braghin 2021)."""
    total = np.zeros(count)
    for _ in range(SUMMED):
        half = secret_uniform(2 * -(-count // 2)).reshape(2, -1)
        radius, angle = np.sqrt(-2 * np.log(half[0])), 2 * math.pi * half[1]
        total += np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
    return total / math.sqrt(SUMMED)


def normals(shape: tuple[int, ...], dtype: torch.dtype, generator: np.random.Generator | None) -> Tensor:
    """Standard normal numbers of a stream, in a simulation; None: of the operating system."""
    count = math.prod(shape)
    drawn = secret_normals(count) if generator is None else generator.standard_normal(count)
    return torch.from_numpy(drawn).to(dtype).reshape(shape)

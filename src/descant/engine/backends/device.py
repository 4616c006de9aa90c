"""Clients on an accelerator: one process, and chunks as large as its memory allows."""

from __future__ import annotations

import torch

from descant.engine.backends.footprint import USED, bytes_per_client
from descant.engine.settings import Train
from descant.engine.work import CPU, Work
from descant.errors import UsageError


def require_device(train: Train) -> None:
    """An error if the device is missing or does not fit the backend."""
    device = torch.device(train.device)
    if device == CPU:
        return
    if train.backend in ("processes", "ray"):
        raise UsageError(f'train.device = "{device}" runs in one process and does not fit train.backend = '
                         f'"{train.backend}": use "vectorised", "loop" or "auto"')
    if device.type != "cuda":
        raise UsageError(f'train.device must be "cpu" or "cuda", not "{device}"')
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise UsageError(f'train.device is "{device}", but torch finds {count or "no"} CUDA '
                         f'device{"" if count == 1 else "s"} here: use train.device = "cpu"')


def chunk_by_memory(work: Work) -> int:
    """How many clients fit into the free memory of the work's device."""
    free, _ = torch.cuda.mem_get_info(work.device)
    return max(1, int(USED * free) // bytes_per_client(work))

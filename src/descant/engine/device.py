"""Clients on an accelerator: one process, and chunks as large as its memory allows."""

from __future__ import annotations

import torch

from descant.engine.settings import Train
from descant.engine.work import CPU, Work
from descant.errors import UsageError

# Of a client's vectors: message, state, model, gradient, what comes of a step, upload and state again.
VECTORS = 8
# Numbers that a network keeps for its backward pass, per number of a sample: what the usual ones need.
ACTIVATIONS = 64
USED = 0.5  # share of the free memory that a chunk may take


def require_device(train: Train) -> None:
    """An error that says what to do if the device is not there, or does not fit the backend."""
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


def bytes_per_client(work: Work) -> int:
    """What a client takes in a chunk, roughly."""
    sizes = work.federation.train.sizes
    batch = int(sizes.max()) if work.batch == "full" else work.batch
    numbers = VECTORS * work.task.dim + ACTIVATIONS * batch * work.federation.x[0].numel()
    return numbers * work.task.dtype.itemsize

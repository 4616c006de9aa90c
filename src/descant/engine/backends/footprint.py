"""What a client takes of memory while it is trained, roughly: enough to say how many fit."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from descant.core.task import Batch, inputs
from descant.core.vector import Model
from descant.engine.work import Work

# Of a client's vectors: message, state, model, gradient, what comes of a step, upload and state again.
VECTORS = 8
COPIES = 3  # of what a pass keeps of a batch: the numbers, their gradients, and what is made on the way
USED = 0.5  # share of the free memory that chunks may take: much else happens in it


def bytes_per_client(work: Work) -> int:
    """What a client takes in a chunk."""
    sizes = work.federation.train.sizes
    batch = int(sizes.max()) if work.batch == "full" else work.batch
    return VECTORS * work.task.dim * work.task.dtype.itemsize + COPIES * batch * _kept_per_row(work)


def _kept_per_row(work: Work) -> int:
    """The bytes that a sample takes, and all that a network keeps of it for its backward pass."""
    return (_kept(work, 4) - _kept(work, 2)) // 2  # without what does not depend on the batch


def _kept(work: Work, rows: int) -> int:
    task, first = work.task, torch.zeros(rows, dtype=torch.int64)
    key = torch.zeros((), dtype=torch.int64) if task.draws else None
    batch = Batch(inputs(work.federation.x[first], task.dtype), work.federation.y[first], None, key)
    kept = {_place(batch.x): batch.x.nbytes}

    def keep(tensor: Tensor) -> Tensor:
        kept[_place(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    theta, stats = task.init()
    theta.requires_grad_()
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), \
         suppress(Exception):  # what fails here is told where a client fails
        task.losses(Model(theta, stats), batch, train=True)
    return sum(kept.values())


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

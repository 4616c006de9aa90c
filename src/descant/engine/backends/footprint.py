"""A rough estimate of the memory that training a client takes."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from descant.core.task import Batch, inputs
from descant.core.vector import Model
from descant.engine.work import Work

VECTORS = 8  # of a client: message, state, model, gradient, the step, upload and new state
COPIES = 3  # of what a pass keeps of a batch: values, gradients, temporaries
USED = 0.5  # share of the free memory that chunks may take


def bytes_per_client(work: Work) -> int:
    """Bytes of a client in a chunk."""
    sizes = work.federation.train.sizes
    batch = int(sizes.max()) if work.batch == "full" else work.batch
    return VECTORS * work.task.dim * work.task.dtype.itemsize + COPIES * batch * _kept_per_row(work)


def _kept_per_row(work: Work) -> int:
    """Bytes of a sample, with what a network keeps of it for its backward pass."""
    return (_kept(work, 4) - _kept(work, 2)) // 2  # without what is independent of the batch


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
         suppress(Exception):  # reported where a client fails
        task.losses(Model(theta, stats), batch, train=True)
    return sum(kept.values())


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

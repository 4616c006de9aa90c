"""Stepping out of vmap, for functions that are faster when they see all clients at once.

Under `torch.func.vmap` every operation pays for its dispatch. A function that works on a leading axis of
clients itself gets the tensors behind the client's, and its results go on as the client's own. torch offers
this for custom operators (`torch.library.register_vmap`) at 100 microseconds a call; the same steps take a
tenth here, with private functions of torch. If these are gone, or vmap is not over clients, `over_clients`
returns None and the caller works for ONE client.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import debug_unwrap

try:
    from torch._C._functorch import (
        TransformType,
        _add_batch_dim,
        get_unwrapped,
        is_batchedtensor,
        maybe_get_bdim,
        peek_interpreter_stack,
        pop_dynamic_layer_stack,
        push_dynamic_layer_stack,
    )
except ImportError:  # pragma: no cover
    AVAILABLE = False
else:
    AVAILABLE = True


def over_clients(work: Callable[..., tuple[Tensor, ...]], *own: Tensor | None) -> tuple[Tensor, ...] | None:
    """`work` on the tensors of all clients, with a leading axis, where `own` are ONE client's (alone, a
    cohort of one). None: not possible here."""
    if not AVAILABLE:
        return None
    top = peek_interpreter_stack()
    if top is None:
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in own):
            return None  # it is being differentiated
        return tuple([t[0] for t in work(*[None if t is None else t[None] for t in own])])
    level = top.level()
    if level != 1 or top.key() != TransformType.Vmap:
        return None
    rows, clients, shared = [], 0, []
    for k, tensor in enumerate(own):
        if tensor is not None:
            if is_batchedtensor(tensor):
                at, tensor = maybe_get_bdim(tensor), get_unwrapped(tensor)
                tensor = tensor if at == 0 else tensor.movedim(at, 0)
                clients = tensor.shape[0]
            else:
                shared.append(k)
        rows.append(tensor)
    if clients == 0:  # vmap is not over anything of this
        return None
    for k in shared:
        rows[k] = rows[k].expand(clients, *rows[k].shape)  # type: ignore[union-attr]
    layer = pop_dynamic_layer_stack()
    try:
        found = work(*rows)
    finally:
        push_dynamic_layer_stack(layer)
    return tuple([_add_batch_dim(t, 0, level) for t in found])


def is_transformed(*tensors: Tensor | None) -> bool:
    """Whether any tensor is under vmap or another transform."""
    return any(t is not None and debug_unwrap(t) is not t for t in tensors)

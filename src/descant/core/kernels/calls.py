"""Functions of torch that a module's own code calls and that must not see padding or a global generator.

A subclass of BatchNorm or Dropout with a `forward` of its own, `F.dropout` in a forward pass, stochastic
depth: while `Calls` is open, their functions of torch use the rows that count, and draw from the stream of
(seed, round, client, step). That costs microseconds for every function called, so it is opened only for
modules that need it (`trial.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from descant.core import random
from descant.core.kernels.layers import Context, batch_norm, drop_factor


class Calls(TorchFunctionMode):
    """Replaces functions of torch according to a context."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        answer = _ANSWERS.get(func)
        if answer is not None:
            found = answer(self._context, *args, **kwargs)
            if found is not NotImplemented:
                self._context.asked = True
                return found
        return func(*args, **kwargs)


def _torch_batch_norm(context: Context, x: Tensor, weight: Tensor | None, bias: Tensor | None,
                      running_mean: Tensor | None, running_var: Tensor | None, training: bool,
                      momentum: float, eps: float, cudnn_enabled: bool) -> Any:
    return batch_norm(context, x, running_mean, running_var, weight, bias, training, momentum, eps)


def _dropout(sides: int) -> Callable[..., Any]:
    def dropout(context: Context, input: Tensor, p: float = 0.5, training: bool | None = None,
                inplace: bool = False, *, train: bool = True) -> Any:
        drops = train if training is None else training
        if not drops or context.key is None or not 0 < p <= 1:
            return NotImplemented
        factor = drop_factor(context, input, p, sides)
        return input.mul_(factor) if inplace else input * factor

    return dropout


def _attention(context: Context, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
               dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
               enable_gqa: bool = False) -> Any:
    """Attention as torch's documentation has it, with a draw of each client's own for what is dropped."""
    if context.key is None or not 0 < dropout_p <= 1 or enable_gqa:
        return NotImplemented
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    if attn_mask is not None:
        is_choice = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -torch.inf) if is_choice else scores + attn_mask
    weights = torch.softmax(scores, -1)
    return weights * drop_factor(context, weights, dropout_p, 0) @ value


Draw = Callable[[Tensor, tuple[int, ...], torch.dtype], Tensor]


def _made(draw: Draw) -> Callable[..., Any]:
    """`torch.rand(2, 3)` and its kind."""
    def made(context: Context, *size: Any, generator: Any = None, out: Any = None,
             dtype: torch.dtype | None = None, requires_grad: bool = False, **others: Any) -> Any:
        if context.key is None or generator is not None or out is not None or requires_grad:
            return NotImplemented
        return draw(context.next_key(), _shape(others.get("size", size)), dtype or torch.get_default_dtype())

    return made


def _made_like(draw: Draw) -> Callable[..., Any]:
    """`torch.rand_like(x)` and its kind."""
    def made(context: Context, input: Tensor, *, dtype: torch.dtype | None = None, generator: Any = None,
             requires_grad: bool = False, **others: Any) -> Any:
        if context.key is None or generator is not None or requires_grad:
            return NotImplemented
        return draw(context.next_key(), tuple(input.shape), dtype or input.dtype)

    return made


def _filled(draw: Draw) -> Callable[..., Any]:
    """`x.uniform_(from, to)` and `x.normal_(mean, std)`: a draw, stretched."""
    def filled(context: Context, x: Tensor, first: float | None = None, second: float = 1.0, *,
               generator: Any = None, **named: float) -> Any:
        if context.key is None or generator is not None:
            return NotImplemented
        shift = named.get("from", named.get("mean", first or 0.0))
        second = named.get("to", named.get("std", second))
        scale = second - shift if draw is random.uniform else second
        return x.copy_(draw(context.next_key(), tuple(x.shape), x.dtype) * scale + shift)

    return filled


def _bernoulli(context: Context, input: Tensor, p: float | None = None, *, generator: Any = None,
               out: Any = None) -> Any:
    if context.key is None or generator is not None or out is not None:
        return NotImplemented
    chance = input if p is None else p
    return (random.uniform(context.next_key(), tuple(input.shape), input.dtype) < chance).to(input.dtype)


def _bernoulli_in_place(context: Context, x: Tensor, p: float | Tensor = 0.5, *, generator: Any = None
                        ) -> Any:
    if context.key is None or generator is not None:
        return NotImplemented
    return x.copy_(random.uniform(context.next_key(), tuple(x.shape), torch.float64) < p)


def _empty(context: Context, *size: Any, out: Any = None, dtype: torch.dtype | None = None,
           device: Any = None, requires_grad: bool = False, **others: Any) -> Any:
    """Room for a draw of each client's own: under vmap, torch's would be one for all."""
    if context.key is None or out is not None or requires_grad or others.keys() - {"size"}:
        return NotImplemented
    return context.key.new_empty(_shape(others.get("size", size)), dtype=dtype or torch.get_default_dtype(),
                                 device=device)


def _shape(size: Sequence[Any]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else tuple(size)


_ANSWERS: dict[Any, Callable[..., Any]] = {
    F.batch_norm: batch_norm,
    torch.batch_norm: _torch_batch_norm,
    F.dropout: _dropout(0),
    torch.dropout: _dropout(0),
    F.dropout1d: _dropout(1),
    F.dropout2d: _dropout(2),
    F.dropout3d: _dropout(3),
    torch.feature_dropout: _dropout(2),
    F.scaled_dot_product_attention: _attention,
    torch.rand: _made(random.uniform),
    torch.randn: _made(random.normal),
    torch.rand_like: _made_like(random.uniform),
    torch.randn_like: _made_like(random.normal),
    Tensor.uniform_: _filled(random.uniform),
    Tensor.normal_: _filled(random.normal),
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    Tensor.bernoulli_: _bernoulli_in_place,
    torch.empty: _empty,
}

"""Functions of torch that a module's own code calls and that must not see padding or a global generator.

A subclass of BatchNorm or Dropout with a `forward` of its own, `F.dropout` in a forward pass, stochastic
depth: while `Calls` is open, their functions of torch use the rows that count, and draw from the stream of
(seed, round, client, step). Attention and recurrent layers are here too: what they drop inside is drawn in
the same way, and where vmap has no rule for them they are written out. That costs microseconds for every
function called, so it is opened only for modules that need it (`trial.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from descant.core import random
from descant.core.kernels import recurrent
from descant.core.kernels.layers import Context, batch_norm, drop_factor
from descant.core.kernels.lift import is_transformed


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
    if not _is_ours(context, dropout_p, query, key, value):
        return NotImplemented
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    return _attended(context, query, key, value, attn_mask, dropout_p, is_causal, scale)[0]


def _attended(context: Context, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, p: float,
              is_causal: bool = False, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """What is found, and the weights by which it was."""
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = torch.softmax(scores, -1)
    if context.key is not None and 0 < p <= 1:
        weights = weights * drop_factor(context, weights, p, 0)
    return weights.to(value.dtype) @ value, weights  # softmax stays in float32 under autocast


def _is_ours(context: Context, p: float, *tensors: Tensor | None) -> bool:
    """Whether torch's own function does not serve: something is dropped, or clients run together."""
    context.asked = True  # they may later, where they were tried alone
    return (context.key is not None and 0 < p <= 1) or is_transformed(*tensors)


def _multi_head_attention(
    context: Context, query: Tensor, key: Tensor, value: Tensor, embed_dim_to_check: int, num_heads: int,
    in_proj_weight: Tensor | None, in_proj_bias: Tensor | None, bias_k: Tensor | None, bias_v: Tensor | None,
    add_zero_attn: bool, dropout_p: float, out_proj_weight: Tensor, out_proj_bias: Tensor | None,
    training: bool = True, key_padding_mask: Tensor | None = None, need_weights: bool = True,
    attn_mask: Tensor | None = None, use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None, k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None, static_k: Tensor | None = None, static_v: Tensor | None = None,
    average_attn_weights: bool = True, is_causal: bool = False,  # a hint: the mask says the same
) -> Any:
    """`nn.MultiheadAttention` for samples [T, B, width]."""
    p = dropout_p if training else 0.0
    if not _is_ours(context, p, query, key, value, out_proj_weight) or query.dim() != 3 or add_zero_attn or (
            any(t is not None for t in (bias_k, static_k, static_v))):
        return NotImplemented
    biases = [None] * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    weights: Any = ((q_proj_weight, k_proj_weight, v_proj_weight) if in_proj_weight is None
                    else in_proj_weight.chunk(3))
    q, k, v = (F.linear(x, weight, bias).unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3)
               for x, weight, bias in zip((query, key, value), weights, biases, strict=True))
    mask = None
    if attn_mask is not None:
        mask = _added(attn_mask, q.dtype)
        mask = mask.unflatten(0, (-1, num_heads)) if mask.dim() == 3 else mask
    if key_padding_mask is not None:
        hidden = _added(key_padding_mask, q.dtype)[:, None, None]
        mask = hidden if mask is None else mask + hidden
    out, shares = _attended(context, q, k, v, mask, p)
    out = F.linear(out.permute(2, 0, 1, 3).flatten(-2), out_proj_weight, out_proj_bias)
    return out, (shares.mean(1) if average_attn_weights else shares) if need_weights else None


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of `nn.MultiheadAttention`, true where nobody looks, as what is added to the scores."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)


def _recurrent(step: recurrent.Step) -> Callable[..., Any]:
    """`torch.lstm` and its kind. Sequences that are packed have other arguments, and are left to torch."""
    def layers(context: Context, x: Tensor, hx: Any, params: Any, has_biases: bool, num_layers: Any,
               dropout: float, train: bool, bidirectional: bool, batch_first: Any = None) -> Any:
        if not isinstance(params, list | tuple) or not isinstance(num_layers, int):
            return NotImplemented
        p, directions = (dropout if train and num_layers > 1 else 0.0), 1 + bool(bidirectional)
        each = 4 if has_biases else 2
        is_projected = len(params) != each * num_layers * directions
        is_cast = torch.is_autocast_enabled(x.device.type)  # torch's operation knows bfloat16 on few machines
        if not (_is_ours(context, p, x, *params) or is_cast) or is_projected:
            return NotImplemented
        found, *states = recurrent.layers(
            x.transpose(0, 1) if batch_first else x, hx if isinstance(hx, list | tuple) else (hx,),
            [params[k : k + each] for k in range(0, len(params), each)], step, directions,
            lambda x: x if not p or context.key is None else  # samples first: padding must not move the draws
            x * drop_factor(context, x.transpose(0, 1), p, 0).transpose(0, 1))
        return found.transpose(0, 1) if batch_first else found, *states

    return layers


def _in_full(norm: Callable[..., Any]) -> Callable[..., Any]:
    """A norm of what autocast has shortened, in float32, as its parameters are: vmap cannot mix the two."""
    def full(context: Context, input: Tensor, *others: Any, **named: Any) -> Any:
        return norm(input.float(), *others, **named) if input.dtype == torch.bfloat16 else NotImplemented

    return full


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
    F.multi_head_attention_forward: _multi_head_attention,
    **{norm: _in_full(norm) for norm in (F.layer_norm, F.group_norm, F.instance_norm, F.rms_norm)},
    torch.lstm: _recurrent(recurrent.lstm),
    torch.gru: _recurrent(recurrent.gru),
    torch.rnn_tanh: _recurrent(recurrent.rnn(torch.tanh)),
    torch.rnn_relu: _recurrent(recurrent.rnn(torch.relu)),
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

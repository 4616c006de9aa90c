"""Recurrent layers of plain matrix products, one step after the other.

`nn.LSTM`, `nn.GRU` and `nn.RNN` are single operations of torch, for which vmap has no rule, and which draw
what they drop between their layers from a global generator. Here they are written out. Inputs are projected
for all steps in one product; a step is then one product for all gates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Weights: TypeAlias = Sequence[Tensor]  # of one layer in one direction: weight_ih, weight_hh, bias_ih, bias_hh
# a step: what the inputs add to the gates, the states before it, weight_hh, bias_hh; the states after it
Step: TypeAlias = Callable[[Tensor, tuple[Tensor, ...], Tensor, Tensor | None], tuple[Tensor, ...]]


def unroll(x: Tensor, states: tuple[Tensor, ...], weights: Weights, step: Step, *, backwards: bool = False
           ) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The outputs [T, B, hidden] of one layer for x [T, B, inputs], and its last states."""
    w_in, w_state, *biases = weights
    b_in, b_state = biases or (None, None)
    projected = F.linear(x, w_in, b_in).unbind(0)
    found: list[Tensor] = []
    for each in reversed(projected) if backwards else projected:
        states = step(each, states, w_state, b_state)
        found.append(states[0])
    return torch.stack(found[::-1] if backwards else found), states


def lstm(inputs: Tensor, states: tuple[Tensor, ...], weight: Tensor, bias: Tensor | None
         ) -> tuple[Tensor, ...]:
    hidden, cell = states
    write, keep, value, read = (inputs + F.linear(hidden, weight, bias)).chunk(4, 1)
    cell = keep.sigmoid() * cell + write.sigmoid() * value.tanh()
    return read.sigmoid() * cell.tanh(), cell


def gru(inputs: Tensor, states: tuple[Tensor, ...], weight: Tensor, bias: Tensor | None
        ) -> tuple[Tensor, ...]:
    (hidden,) = states
    reset_in, update_in, new_in = inputs.chunk(3, 1)
    reset, update, new = F.linear(hidden, weight, bias).chunk(3, 1)
    candidate = (new_in + (reset_in + reset).sigmoid() * new).tanh()
    return (candidate + (update_in + update).sigmoid() * (hidden - candidate),)


def rnn(act: Callable[[Tensor], Tensor]) -> Step:
    def step(inputs: Tensor, states: tuple[Tensor, ...], weight: Tensor, bias: Tensor | None
             ) -> tuple[Tensor, ...]:
        return (act(inputs + F.linear(states[0], weight, bias)),)

    return step


def layers(x: Tensor, states: Sequence[Tensor], weights: Sequence[Weights], step: Step, directions: int,
           drop: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    """Layers on top of each other for x [T, B, inputs], from states [layers * directions, B, hidden]: the
    outputs of the last one, and the last states. `drop` is applied between layers."""
    last: list[tuple[Tensor, ...]] = []
    for k in range(0, len(weights), directions):
        if k:
            x = drop(x)
        found = [unroll(x, tuple(each[k + d] for each in states), weights[k + d], step, backwards=d == 1)
                 for d in range(directions)]
        x = torch.cat([out for out, _ in found], -1)
        last += [ended for _, ended in found]
    return x, *(torch.stack(each) for each in zip(*last, strict=True))

"""Recurrent network for text: `lstm`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from descant.core.fields import hyper
from descant.core.kernels.network import Network, dense
from descant.core.sample import SampleFormat
from descant.errors import UsageError
from descant.models.base import NetworkSpec

_NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")  # as nn.LSTM has them in every layer


class Recurrence(nn.LSTM):
    """The parameters of `nn.LSTM`, and a forward pass of plain matrix products.

    Inputs are projected for all steps in one product; a step is then one product for all four gates. It
    computes what `nn.LSTM` does (on [B, T, inputs], from a zero state), and its parameters can be
    exchanged with one. `nn.LSTM` itself has no rule for vmap: torch warns, and takes one client after
    the other in the forward pass. Under vmap this is the faster of the two: `benchmarks/lstm.py` measures
    by how much.
    """

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """The states of the last layer after every step: [B, T, hidden]."""
        for layer in range(self.num_layers):
            w_in, w_state, b_in, b_state = (getattr(self, f"{name}_l{layer}") for name in _NAMES)
            x = torch.stack(_unroll(F.linear(x, w_in, b_in + b_state), w_state.t()), 1)
        return x


def _unroll(projected: Tensor, weight: Tensor) -> list[Tensor]:
    """The states of one layer; `projected` [B, T, 4 hidden] holds what the inputs add to the gates."""
    states: list[Tensor] = []
    cell: Tensor | None = None
    for step in projected.unbind(1):
        gates = step if not states else step + states[-1] @ weight
        write, keep, value, read = gates.chunk(4, 1)
        new = write.sigmoid() * value.tanh()
        cell = new if cell is None else keep.sigmoid() * cell + new
        states.append(read.sigmoid() * cell.tanh())
    return states


class Reader(nn.Module):
    """Tokens [B, T] to the state after the last of them, then hidden layers."""

    def __init__(self, vocab: int, pad: int | None, width: int, layers: int, hidden: int) -> None:
        super().__init__()
        self.pad = pad
        self.embedding = nn.Embedding(vocab, width)
        self.lstm = Recurrence(width, width, layers, batch_first=True)
        self.dense = nn.Sequential(*dense((width, hidden), activation=nn.LeakyReLU))

    def forward(self, x: Tensor) -> Tensor:
        states = self.lstm(self.embedding(x.long()))
        last = states[:, -1]
        if self.pad is not None:
            position = ((x != self.pad) * torch.arange(x.shape[1])).amax(1)  # 0 in a row of padding alone
            last = states.gather(1, position[:, None, None].expand(-1, 1, states.shape[2])).squeeze(1)
        out: Tensor = self.dense(last)
        return out


@dataclass(frozen=True)
class LSTM(NetworkSpec):
    """Two LSTM layers of 50 units on an embedding of 50, the model of pFedBreD on Sent140.

    All sizes are the paper's, also the hidden layer of 100 units before the output. Our choice: the
    embedding is trained with the rest, the state after the last token is what is classified, and the
    hidden layer has the leaky ReLU of the paper's other networks. Samples are rows of integers.
    """

    name: ClassVar[str] = "lstm"

    vocab: int | None = hyper(None, "number of tokens; absent: one more than the largest in the data", ge=1)
    pad: int | Literal["none"] = hyper(0, "the token that fills up short samples, as 0 does in the datasets "
                                          "here: none is read after the last other one", ge=0)

    def network(self, sample: SampleFormat) -> nn.Module:
        if sample.tokens is None or len(sample.shape) != 1:
            kind = "tokens" if sample.tokens is not None else "other numbers"
            raise UsageError(f"model {self.name!r} needs samples that are rows of tokens (integers from 0, "
                             f"not uint8) of shape (length,); these are {kind} of shape {sample.shape}")
        vocab = self.vocab or sample.tokens
        if vocab < sample.tokens:
            raise UsageError(f"model.vocab is {vocab}, but the data have tokens up to {sample.tokens - 1}: "
                             f"it must be at least {sample.tokens}")
        pad = None if self.pad == "none" else self.pad
        return Network(Reader(vocab, pad, width=50, layers=2, hidden=100), nn.Linear(100, sample.outputs))

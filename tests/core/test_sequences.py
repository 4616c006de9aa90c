"""Attention and recurrent layers, written out where torch's own operations do not serve: against torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from descant.core.kernels.calls import Calls
from descant.core.kernels.layers import Context
from descant.models import make_task
from helpers import ragged
from module_zoo import EXACT, IN, RANDOM, seeded

FEDERATION = ragged((9, 5, 2), shape=(IN,)).to(torch.float64)
B, T, WIDTH = 3, 4, 6
FLOAT64 = {"dtype": torch.float64}


def recurrent(kind: Any, **fields: Any) -> Any:
    def make() -> nn.Module:
        return kind(WIDTH, 5, **FLOAT64, **fields)

    def inputs(lead: int) -> tuple[Tensor, ...]:
        shape = (B, T) if fields.get("batch_first") else (T, B)
        return (torch.randn(lead, *shape, WIDTH, **FLOAT64),)

    return make, inputs, {}


def started(kind: Any, states: int, **fields: Any) -> Any:
    """With first states that are given."""
    make, inputs, _ = recurrent(kind, **fields)

    def with_states(lead: int) -> tuple[Any, ...]:
        given = tuple(torch.randn(lead, 2, B, 5, **FLOAT64) for _ in range(states))
        return *inputs(lead), given if states > 1 else given[0]

    return make, with_states, {}


def attention(call: dict[str, Any], keys: int = T, **fields: Any) -> Any:
    def make() -> nn.Module:
        return nn.MultiheadAttention(WIDTH, 2, **FLOAT64, **fields)

    def inputs(lead: int) -> tuple[Tensor, ...]:
        widths = (WIDTH, fields.get("kdim", WIDTH), fields.get("vdim", WIDTH))
        shapes = [(B, n) if fields.get("batch_first") else (n, B) for n in (T, keys, keys)]
        return tuple(torch.randn(lead, *shape, width, **FLOAT64)
                     for shape, width in zip(shapes, widths, strict=True))

    return make, inputs, call


CAUSAL = torch.ones(T, T).triu(1).bool()
SHORT = torch.arange(T) >= torch.tensor([[T], [2], [3]])
LAYERS: dict[str, Any] = {
    "lstm": recurrent(nn.LSTM),
    "lstm, samples first, two layers": recurrent(nn.LSTM, num_layers=2, batch_first=True),
    "lstm, both ways, no biases": recurrent(nn.LSTM, num_layers=2, bidirectional=True, bias=False),
    "lstm from states": started(nn.LSTM, 2, num_layers=2),
    "gru, both ways": recurrent(nn.GRU, num_layers=2, bidirectional=True),
    "gru from states": started(nn.GRU, 1, num_layers=2),
    "rnn": recurrent(nn.RNN, num_layers=2),
    "rnn of relu": recurrent(nn.RNN, nonlinearity="relu", bidirectional=True, batch_first=True),
    "attention": attention({}),
    "attention, samples first": attention({}, batch_first=True),
    "attention without weights": attention({"need_weights": False}),
    "attention with those of each head": attention({"average_attn_weights": False}, keys=7),
    "attention, causal": attention({"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}),
    "attention by masks of each head": attention(
        {"attn_mask": torch.linspace(-1, 1, B * 2 * T * T, **FLOAT64).view(B * 2, T, T)}),
    "attention without padding": attention({"key_padding_mask": SHORT, "attn_mask": CAUSAL}),
    "attention to something else": attention({}, keys=5, kdim=3, vdim=2, bias=False),
}


def flat(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    return [] if found is None else [leaf for each in found for leaf in flat(each)]


def called(layer: nn.Module, theta: dict[str, Tensor], given: tuple[Any, ...], more: Any, key: Any = None
           ) -> tuple[Tensor, ...]:
    context = Context()
    with context.of_pass(None, key, {}), Calls(context):
        return tuple(flat(functional_call(layer, theta, given, more)))


@pytest.mark.parametrize("name", LAYERS)
def test_clients_together_are_torch_s_own_one_by_one(name: str) -> None:
    """Also their gradients: torch's operations serve one client alone."""
    make, inputs, more = LAYERS[name]
    layer = seeded(make)
    own = {key: value.detach() for key, value in layer.named_parameters()}
    many = {key: torch.stack([value, 0.7 * value]) for key, value in own.items()}
    given = inputs(2)

    def slope(theta: dict[str, Tensor], *given: Any) -> Any:
        def total(theta: dict[str, Tensor]) -> tuple[Tensor, Any]:
            found = called(layer, theta, given, more)
            return sum((out.sin().sum() for out in found), torch.zeros(())), found
        return torch.func.grad(total, has_aux=True)(theta)

    slopes, together = vmap(slope)(many, *given)
    for k in range(2):
        theta = {key: value[k].clone().requires_grad_() for key, value in many.items()}
        one = [x[k] if isinstance(x, Tensor) else tuple(each[k] for each in x) for x in given]
        alone = flat(functional_call(layer, theta, tuple(one), more))
        assert len(alone) == len(together)
        for a, b in zip(together, alone, strict=True):
            torch.testing.assert_close(a[k], b, rtol=1e-9, atol=1e-11)
        expected = torch.autograd.grad(sum(out.sin().sum() for out in alone), list(theta.values()))
        for key, value in zip(theta, expected, strict=True):
            torch.testing.assert_close(slopes[key][k], value, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("layer", [
    lambda: nn.LSTM(WIDTH, 5, 3, dropout=1.0, **FLOAT64),
    lambda: nn.GRU(WIDTH, 5, 2, dropout=1.0, bidirectional=True, **FLOAT64),
], ids=["lstm", "gru"])
def test_dropout_is_between_layers_where_torch_has_it(layer: Any) -> None:
    """Where all is dropped nothing is random, and torch's own layers say what is left."""
    module, x = seeded(layer), torch.randn(T, B, WIDTH, **FLOAT64)
    found = called(module, dict(module.named_parameters()), (x,), {}, torch.tensor(3))
    for a, b in zip(found, flat(module(x)), strict=True):
        torch.testing.assert_close(a, b)


def test_attention_drops_shares_as_often_as_it_says() -> None:
    """The weights that come back are those after dropout: zero with probability p, others raised."""
    layer = seeded(lambda: nn.MultiheadAttention(8, 1, dropout=0.3, **FLOAT64))
    x = torch.randn(50, 20, 8, **FLOAT64)
    theta = dict(layer.named_parameters())
    _, dropped = called(layer, theta, (x, x, x), {}, torch.tensor(3))
    _, whole = layer.eval()(x, x, x)
    kept = dropped != 0
    assert abs(kept.double().mean() - 0.7) < 5 * (0.21 / kept.numel()) ** 0.5
    torch.testing.assert_close(dropped[kept], whole[kept] / 0.7)


TIME_FIRST = "transformer with dropout, time first"  # padding would move the draws of plain dropout layers


@pytest.mark.parametrize("name", [name for name in (*EXACT, *RANDOM) if any(
    word in name for word in ("attention", "transformer", "lstm", "gru", "rnn"))])
def test_clients_run_together_or_it_is_told_why_not(name: str) -> None:
    task = make_task(seeded((EXACT | RANDOM)[name]), FEDERATION, dtype=torch.float64)
    assert (task.alone is None) == (name != TIME_FIRST)
    assert task.alone is None or "cannot be padded" in task.alone
